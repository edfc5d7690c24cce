"""medusa: one prediction per depth from the target's last state, combined along the paths of a static tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.drafters._beams import Carry, ChainDrafter
from slipstream.drafters._head import HeadOptions
from slipstream.errors import OptionError
from slipstream.heads.medusa import Medusa
from slipstream.heads.packing import likeliest, pack, pack_first
from slipstream.heads.ranks import FILE, RankPath, assumed, check_tree, read_tree, tune

if TYPE_CHECKING:
    from slipstream.targets.base import Target

RANKS = 10  # per depth, in a tree that was not tuned


@dataclass(frozen=True)
class MedusaOptions(HeadOptions):
    nodes: int = 64  # of the tree; what exceeds a request's max_draft is cut by the heads' probabilities
    tree: Any = None  # rank paths, or a JSON file of them, parents first; None: tree.json beside the head, if any
    width: int = 4  # mode=sample: chains, whose first tokens differ

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes < 1 or self.width < 1:
            raise OptionError(f"nodes and width must be at least 1, found {self.nodes} and {self.width}")


class MedusaDrafter(ChainDrafter):
    """A Medusa head: independent predictions of each of the next tokens, combined along a static tree."""

    kind = "medusa"
    Options = MedusaOptions
    head: Medusa

    def __init__(self, target: Target, tokenizer: Any, options: MedusaOptions) -> None:
        super().__init__(target, tokenizer, options)
        self._guessable = self.head.config.vocab_size if self.names is None else len(self.names)
        self.width, self.length = min(options.width, self._guessable), self.head.reach
        self.paths = self._choose_tree()[: options.nodes]
        parents = check_tree(self.paths, self.head.reach, self._guessable)
        self._depths = max(map(len, self.paths))
        self._ranks = 1 + max(map(max, self.paths))
        at = [(len(path) - 1) * self._ranks + path[-1] for path in self.paths]
        self._at = torch.tensor(at, device=self.device)  # (n,) in a table of depths × ranks
        self._parents = torch.tensor(parents, device=self.device)

    def _choose_tree(self) -> Sequence[RankPath]:
        given = self.options.tree
        if given is None and self.folder is not None and (self.folder / FILE).is_file():
            given = self.folder / FILE
        if given is None:
            ranks = min(RANKS, self._guessable)
            return tune(assumed(self.head.reach, ranks), self.options.nodes)
        paths = read_tree(Path(given)) if isinstance(given, str | Path) else [tuple(path) for path in given]
        if not paths:
            raise OptionError("the tree has no rank paths: give at least [[0]]")
        return paths

    def best(self, *inputs: Tensor) -> Tensor:
        logits = self._all(inputs[0], self._depths)  # (b, K, V')
        top = logits.topk(self._ranks)  # (b, K, R)
        p = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
        tokens, p = (x.flatten(1)[:, self._at] for x in (top.indices, p))  # (b, n)
        first = likeliest(logits[:, 0], self.first) if self.first else None
        if self.names is not None:
            tokens, first = self.names[tokens], None if first is None else self.names[first]
        return pack_first(pack(tokens, self._parents.expand_as(tokens), p), first)

    # Predictions don't depend on a chain's tokens, so the carry is all logits and the number of chains.

    def start(self, *inputs: Tensor) -> Carry:
        return self._all(inputs[0], self.length), 1

    def logits(self, carry: Carry, depth: int) -> Tensor:
        every, chains = carry
        logits = every[:, depth, None]
        if self.names is not None:
            whole = logits.new_full((len(logits), 1, self.head.config.vocab_size), -torch.inf)
            logits = whole.index_copy(2, self.names, logits)
        return logits.expand(-1, chains, -1)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:  # noqa: ARG002
        return carry[0], chain.shape[1]

    def _all(self, states: Tensor, depths: int) -> Tensor:
        """(b, H) -> (b, depths, V') float32."""
        return torch.stack([self.head.logits(states, k).float() for k in range(depths)], dim=1)
