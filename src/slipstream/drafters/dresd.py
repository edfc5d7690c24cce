"""dresd: dense retrieval. Drafts what followed the root in the store, where the target's state was most similar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.datastores.dense.device import DeviceFinder
from slipstream.datastores.dense.finding import Asked, Finder, HostFinder
from slipstream.datastores.dense.live_vectors import Own
from slipstream.datastores.dense.nearest import Drafts, Vectors
from slipstream.datastores.dense.remote import RemoteFinder
from slipstream.datastores.dense.vector_manifest import Origin
from slipstream.drafters._retrieval import open_store
from slipstream.drafters.base import BatchedSession, Drafter, DraftSession, Proposal, Seen
from slipstream.errors import OptionError
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets.base import Target

log = logging.getLogger("slipstream")

# Chosen by how many true next tokens a tree of 16 nodes covers on unseen code: see docs/log/dense.md.
HEAT = 10.0  # weight of a draft is exp(HEAT × similarity): 0.1 more similar counts e times as much
OTHERS = 0.3  # weight of all continuations that are not in the store; a draft of similarity 1 has weight 1


@dataclass(frozen=True)
class DresdOptions:
    store: Any = ""  # the folder of a store that `slipstream store embed` has read, or an open Store
    database: Any = ""  # where its vectors are instead: the address or folder of a Qdrant database, or a client
    drafts: int = 10  # positions whose continuations are drafted
    length: int = 10  # tokens of each continuation
    live: bool = False  # search the request's own text too
    unfiltered: bool = False  # search all positions and keep those that the root followed (the paper's way)

    def __post_init__(self) -> None:
        if not self.store:
            raise OptionError(
                "dresd drafts from a datastore: give its folder as store=…; `slipstream store build SOURCES… --out "
                "FOLDER` makes one, and `slipstream store embed FOLDER` its vectors"
            )
        if self.database and self.unfiltered:
            raise OptionError("unfiltered searches all vectors of a store for comparison: leave out database")
        if min(self.drafts, self.length) < 1:
            raise OptionError(f"drafts and length must be at least 1, found {self.drafts} and {self.length}")


class Dresd(Drafter):
    """Continuations of the positions in a datastore whose states are most similar to the current one."""

    Options = DresdOptions

    def __init__(self, target: Target, tokenizer: Any, options: DresdOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.store = open_store(options.store, target, tokenizer, write=False)
        model = getattr(target, "model", None)  # a recording has none: then the store's origin is not checked
        self.vectors = Vectors(self.store, Origin.of(model) if model is not None else None)
        self.layer = self.vectors.manifest.origin.layer
        self.layers = (self.layer,)
        self.finder = self._finder()
        self.reduce = self.finder.transform
        self._warned = False

    def _finder(self) -> Finder:
        o = self.options
        if o.database:
            return RemoteFinder(o.database, self.vectors.manifest.origin, self.vectors.transform, o.drafts, o.length)
        if self.target.device.type != "cpu":
            return DeviceFinder(self.vectors, self.target.device, o.drafts, o.length, o.unfiltered)
        return HostFinder(self.vectors, o.drafts, o.length, o.unfiltered)

    @property
    def rereads(self) -> int | None:
        """It needs the last state alone, unless it also searches the text's own states."""
        return None if self.options.live else 0

    def begin(self, request: Request) -> DraftSession:
        self.finder.refresh()
        self._compare(request)
        return DresdSession(self, request)

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        trees = [TokenTree.root(root) for root in roots]
        mine = cast(Sequence[DresdSession], sessions)
        wanted = [i for i, budget in enumerate(budgets) if budget.nodes and mine[i].state is not None]
        asked = [mine[i].ask(roots[i]) for i in wanted]
        for i, drafts in zip(wanted, self.finder.near(asked), strict=True):
            trees[i] = tree_of(roots[i], drafts, budgets[i].depth)
        return [Proposal(tree) for tree in trees]

    def _compare(self, request: Request) -> None:
        """Warn once if the store's text was sampled differently: then fewer drafts are accepted."""
        made = self.store.manifest.notes.get("sampling")
        if made is None or self._warned:
            return
        asked = request.sampling
        warmer = abs(asked.temperature - made["temperature"]) > 0.3
        wider = not asked.greedy and made["temperature"] > 0 and abs(asked.top_p - made["top_p"]) > 0.2
        if warmer or wider:
            self._warned = True
            log.warning(
                "the text of %s was sampled with temperature %g and top_p %g, this request asks for %g and %g: fewer "
                "drafts will be accepted than from a store of text that was sampled alike",
                *(self.store.folder, made["temperature"], made["top_p"], asked.temperature, asked.top_p),
            )


class DresdSession(BatchedSession):
    """One sequence: the state that chose its root, and perhaps all states of its text."""

    drafter: Dresd
    state: Tensor | None = None  # (H,); None: it was not observed

    def __init__(self, drafter: Dresd, request: Request) -> None:
        self.drafter, self.collection = drafter, request.collection
        self.own = Own() if drafter.options.live else None

    def observe(self, seen: Seen) -> None:
        self.state = seen.hidden.end(1)[self.drafter.layer][0] if seen.hidden else None
        if self.own is not None:
            with torch.inference_mode():
                states = seen.hidden.get(self.drafter.layer)
                self.own.extend(seen.tokens, None if states is None else self.drafter.reduce(states))

    def pause(self) -> None:
        self.state = None if self.state is None else self.state.clone()

    def ask(self, root: int) -> Asked:
        assert self.state is not None, "a session without a state is not asked"
        return Asked(self.collection, self.state, root, self.own)


def tree_of(root: int, drafts: Drafts, depth: int) -> TokenTree:
    """Drafts as one tree. A node's score is the weight of the drafts through it, divided by the weight of all drafts
    through its parent plus OTHERS."""
    if not len(drafts.similarity):
        return TokenTree.root(root)
    weight = np.exp(HEAT * (drafts.similarity.astype(np.float64) - 1))
    tree = TokenTree.from_continuations(root, [t[:depth] for t in drafts.tokens], weights=weight.tolist())
    mass = tree.value * weight.sum()  # (n,) weight of the drafts through each node
    score = mass / (mass[tree.parents] + OTHERS)
    return TokenTree.build(tree.tokens, tree.parents, source="dresd", raw=score.astype(np.float32))
