"""eagle: one layer predicts the target's next states and drafts a tree from them, deeper where it is more certain."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.drafters._eagle import FeatureDrafter, FeatureOptions
from slipstream.heads.eagle import Eagle
from slipstream.heads.growth import Growth
from slipstream.heads.ranks import FILE, assumed, read_tree, tune


@dataclass(frozen=True)
class EagleOptions(FeatureOptions):
    # True: nodes are continued and kept by their probabilities (EAGLE-2). False: a tree of fixed ranks (EAGLE-1), from
    # tree.json beside the head if there is one.
    dynamic: bool = True


class EagleDrafter(FeatureDrafter):
    """An EAGLE head: one layer that continues the target's own states."""

    kind = "eagle"
    Options = EagleOptions
    head: Eagle

    def grows(self, guessable: int) -> Growth:
        options = self.options
        if options.dynamic:
            return super().grows(guessable)
        if self.folder is not None and (self.folder / FILE).is_file():
            paths = [path for path in read_tree(self.folder / FILE) if len(path) <= options.depth]
        else:
            paths = tune(assumed(options.depth, min(options.width, guessable)), options.nodes)
        return Growth.static(paths[: options.nodes], guessable, self.device)
