"""Trees that a draft model grows level by level, one forward per level for all sequences together."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from slipstream.drafters.base import BatchedSession, Proposal
from slipstream.errors import OptionError
from slipstream.kernels.ops import best_tokens
from slipstream.residuals import LEAST
from slipstream.sampling import Sampler, gumbel
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.request import Request
    from slipstream.targets import Slot, Target

MODES = ("greedy", "sample", "beam")


def check_levels(options: Any) -> None:
    if options.mode not in MODES:
        raise OptionError(f"mode={options.mode!r} is unknown: there are {', '.join(MODES)}")
    if options.depth < 1 or options.width < 1:
        raise OptionError(f"depth and width must be at least 1, found {options.depth} and {options.width}")


@dataclass(frozen=True)
class Level:
    """The draft model's results for the newest nodes of a tree."""

    logits: torch.Tensor  # (f, V) over the target's vocabulary
    logp: torch.Tensor  # (f, k) log-probabilities of the most probable tokens, on the host
    ids: torch.Tensor  # (f, k) these tokens


@dataclass(frozen=True)
class Chain:
    """A greedy continuation, which the draft model wrote in one launch."""

    tokens: list[tuple[int, float]]  # with their log-probabilities


# Yields a tree whenever it needs the draft model's results for its newest nodes; returns the draft.
Grower = Generator["Growing", Level | Chain | None, Proposal]


class Growing:
    """A tree that grows level by level: a chain of unread tokens, then the root, then drafted nodes."""

    def __init__(self, slot: Slot, chain: list[int]) -> None:
        self.slot = slot  # the draft model's, with the text that the tree follows
        self.tokens, self.parents = list(chain), list(range(-1, len(chain) - 1))
        self.root = len(chain) - 1
        self.frontier = [self.root]  # the newest nodes
        self.probability = [1.0] * len(chain)
        self.rows = [-1] * len(chain)  # by node: the row of q that its children were drawn from
        self.q: list[torch.Tensor] = []
        self.scored = 0  # nodes that the draft model has scored
        self.ahead = 0  # for a greedy chain: how many tokens may be drafted in one launch

    @property
    def drafted(self) -> int:
        return len(self.tokens) - 1 - self.root

    def add(self, token: int, parent: int, probability: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probability.append(probability)
        self.rows.append(-1)

    def drawn_from(self, node: int, q: torch.Tensor) -> None:
        self.rows[node] = len(self.q)
        self.q.append(q)

    def tree(self) -> TokenTree:
        return TokenTree.build(self.tokens, self.parents)

    def proposal(self, source: str) -> TokenTree:
        """The draft: the tree without the chain before the root."""
        parents = np.array(self.parents[self.root :]) - self.root
        parents[0] = -1
        return TokenTree.build(
            self.tokens[self.root :],
            parents,
            source=source,
            raw=self.probability[self.root :],
            q=torch.stack(self.q) if self.q else None,
            q_row=self.rows[self.root :] if self.q else None,
        )


def grow_together(target: Target, growers: Sequence[Grower], vocabulary: int, best: int) -> list[Proposal]:
    """Run all growers, one forward per level. vocabulary: the target's number of tokens. best: how many of the most
    probable tokens the growers look at."""
    found: list[Proposal | None] = [None] * len(growers)
    levels: dict[int, Level | Chain | None] = dict.fromkeys(range(len(growers)))  # of the growers not finished yet
    while levels:
        trees: dict[int, Growing] = {}
        for i, level in levels.items():
            try:
                trees[i] = growers[i].send(level)
            except StopIteration as end:
                found[i] = end.value
        growing = list(trees.values())
        results = _read_chains(target, growing, vocabulary) or _read_levels(target, growing, vocabulary, best)
        levels = dict(zip(trees, results, strict=True))
    return [proposal for proposal in found if proposal is not None]


def _read_chains(target: Target, growing: list[Growing], vocabulary: int) -> list[Chain] | None:
    """All levels in one launch, if all trees are greedy chains."""
    if not growing or not all(tree.ahead for tree in growing):
        return None
    depth = max(tree.ahead for tree in growing)
    found = target.draft_chains([t.slot for t in growing], [t.tokens for t in growing], depth, vocabulary)
    return None if found is None else [Chain(tokens) for tokens in found]


def _read_levels(target: Target, growing: list[Growing], vocabulary: int, best: int) -> list[Level]:
    from slipstream.targets import Want

    if not growing:
        return []
    slots, trees, known = zip(*[(tree.slot, tree.tree(), tree.scored) for tree in growing], strict=True)
    sizes, rows = [len(tree.frontier) for tree in growing], []
    for scores, tree in zip(target.extend(slots, trees, known, Want()), growing, strict=True):
        tree.scored = len(tree.tokens)
        rows.append(scores.every()[-len(tree.frontier) :])
    logits = torch.cat(rows).float()
    missing = vocabulary - logits.shape[1]  # padded sizes may differ either way
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    logp, ids = (x.cpu() for x in best_tokens(logits, min(best, vocabulary)))  # of all: one copy to the host
    return [Level(*each) for each in zip(logits.split(sizes), logp.split(sizes), ids.split(sizes), strict=True)]


class LevelSession(BatchedSession):
    """One sequence of a drafter that grows its trees level by level."""

    def __init__(self, options: Any, request: Request, source: str) -> None:
        """options: mode, depth, width, confidence."""
        self.options, self.source = options, source
        self.first = int(getattr(options, "first", 0))
        self._shared_noise = not request.accept.needs_q
        self._keep_q = request.accept.needs_q and options.mode == "sample" and not request.sampling.greedy
        # Without processors: a draft must not advance a stateful one.
        sampling = replace(
            request.sampling,
            processors=(),
            bad_words=(),
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        self._sampler = Sampler(sampling, [], request.seed, request.sample)

    def grow_levels(self, growing: Growing, depth: int, nodes: int) -> Grower:
        """Grow a draft of at most this depth and number of nodes."""
        position = growing.slot.position + growing.root
        if self.options.mode == "greedy" and self._sampler.sampling.plain and not self.first:
            growing.ahead = min(depth, nodes)
        level = yield growing
        if isinstance(level, Chain):
            return Proposal(self._chained(growing, level))
        level = cast(Level, level)
        growing.ahead = 0
        likeliest = tuple(level.ids[0, : self.first].tolist()) if self.first else None
        value = torch.zeros(1)
        for below in range(1, depth + 1):
            first = len(growing.tokens)
            value = self._grow(growing, value, level, position + below, nodes - growing.drafted)
            growing.frontier = list(range(first, len(growing.tokens)))
            if not growing.frontier or below == depth or growing.drafted >= nodes:
                break
            level = cast(Level, (yield growing))
        return Proposal(growing.proposal(self.source), likeliest)

    def _chained(self, growing: Growing, chain: Chain) -> TokenTree:
        for token, logp in chain.tokens[: growing.ahead]:
            p = math.exp(logp)
            if p < self.options.confidence:
                break
            growing.add(token, len(growing.tokens) - 1, p)
        return growing.proposal(self.source)

    def _grow(self, growing: Growing, value: torch.Tensor, level: Level, position: int, room: int) -> torch.Tensor:
        """Add one level of children to the frontier. value (f,): log-probabilities of the frontier's paths. Returns
        the children's."""
        mode = self.options.mode
        if mode == "beam":
            return self._grow_beam(growing, value, level, self.options.width, room)
        if mode == "greedy" and self._sampler.sampling.plain:  # a beam of one
            return self._grow_beam(growing, value, level, 1, room)
        self._sampler.position = position
        values = []
        for node, row, above in zip(growing.frontier, level.logits, value, strict=True):
            logits = self._sampler.warped(row)
            logp = torch.log_softmax(logits.double(), -1)
            if mode == "sample" and not self._sampler.sampling.greedy:
                many = self.options.width if node == growing.root else 1
                key = self._sampler.key("" if self._shared_noise else "draft")
                q = logp.exp()
                q = q.where(q > LEAST, 0.0)
                noisy = (logits + gumbel(key, torch.arange(len(logits), device=logits.device))).where(q > 0, -torch.inf)
                # The k largest, in order, are k draws without replacement.
                drawn = torch.topk(noisy, min(many, room, int((q > 0).sum())))
                tokens = drawn.indices.tolist()
                if self._keep_q:
                    growing.drawn_from(node, q)
            else:
                tokens = [int(logp.argmax())]
            for token in tokens[:room]:
                p = float(logp[token].exp())
                # All draws from q must stay: leaving some out would change the distribution of the others.
                if p < self.options.confidence and not self._keep_q:
                    break
                growing.add(token, node, p)
                values.append(float(above) + float(logp[token]))
                room -= 1
        return torch.tensor(values)

    def _grow_beam(self, growing: Growing, value: torch.Tensor, level: Level, width: int, room: int) -> torch.Tensor:
        """Add the children of the `width` best paths."""
        logp, ids = level.logp[:, :width], level.ids[:, :width]
        paths = value[:, None] + logp
        best = torch.topk(paths.flatten(), min(width, room, paths.numel()))
        kept = []
        for place, flat in enumerate(best.indices.tolist()):
            beam, number = divmod(flat, logp.shape[1])
            p = float(logp[beam, number].exp())
            if p > 0 and p >= self.options.confidence:
                growing.add(int(ids[beam, number]), growing.frontier[beam], p)
                kept.append(place)
        return best.values[kept]
