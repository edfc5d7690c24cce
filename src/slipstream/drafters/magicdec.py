"""magicdec: the target drafts for itself, on a small part of its keys (Chen et al., MagicDec, 2024).

With long texts and large batches, most of a step's time goes into reading keys. So the target drafts a few tokens with
its own weights and some of the keys, and verifies them with all keys. Its drafts are better than a smaller model's. It
needs no training, and no memory beyond the target's.

    text    ■■□□□□□■□□□■□□□□□□□■■■■      ■ selected: the first tokens, those much attended to, the most recent
    part    ■■ ■ ■ ■■■■ ────► drafts     `Target.select`: keys keep the positions that they have in the text

A part exists for one draft. In a paged cache it lists the text's own pages, so that nothing is copied, and drafts are
written after the text, where the verification writes too. Elsewhere it is a copy of the selected keys. One selection
serves all layers and heads, since a sequence has one page table. The paper's code selects per head, and rotates the
keys of `streaming` to their places in the small cache; here they keep their positions in the text.

Selections:

- `streaming`: the first `sinks` tokens and the most recent ones (Xiao et al., StreamingLLM, 2023).
- `snapkv`: also what the prompt's last `window` tokens attend to, pooled over neighbours (Li et al., SnapKV, 2024).
- `attended`: what the root of the latest verification attended to (Zhao et al., SparseSpec, 2025), which that step
  reports (`Slot.wants_attention`). Before there was one, the selection is that of `streaming`.

`snapkv` reads the window once more, with all keys, when it selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from slipstream.drafters._levels import Grower, Growing, LevelSession, check_levels, grow_together
from slipstream.drafters.base import Drafter, DraftSession, Proposal
from slipstream.errors import CacheFullError, DrafterError, OptionError
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets import Slot, Target
    from slipstream.targets.base import Part

SELECTIONS = ("streaming", "snapkv", "attended")
POOL = 5  # neighbouring tokens whose weights are averaged, so that words stay whole; SnapKV's value


@dataclass(frozen=True)
class MagicDecOptions:
    selection: str = "streaming"  # or snapkv: what the prompt's end attends to; attended: what the last step did
    keys: float = 512  # of the text that it drafts with: tokens, or below 1 a share of the text
    sinks: int = 16  # the first tokens, which are always selected
    window: int = 32  # the last tokens, which are too; for snapkv also the prompt's last ones, whose attention selects
    shortest: int = 2048  # it drafts nothing in shorter texts, where reading keys takes little of a step
    mode: str = "greedy"  # greedy: its best tokens; sample: drawn as the request draws; beam: its best paths
    depth: int = 4  # tokens ahead
    width: int = 4  # beams, or alternatives drawn for the first token
    confidence: float = 0.0  # leave out tokens to which it gives less than this

    def __post_init__(self) -> None:
        check_levels(self)
        if self.selection not in SELECTIONS:
            raise OptionError(f"selection={self.selection!r} is unknown: there are {', '.join(SELECTIONS)}")
        if self.keys <= 0:
            raise OptionError(f"keys={self.keys}: give a number of tokens, or a share of the text between 0 and 1")
        least = {"sinks": 0, "window": 1, "shortest": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise OptionError(f"{name} must be at least {value}, found {getattr(self, name)}")


class MagicDec(Drafter):
    """The target itself, reading part of its keys."""

    generates = True
    sizes = (1, 2)  # each token takes a forward
    first = 0
    Options = MagicDecOptions

    def __init__(self, target: Target, tokenizer: Any, options: MagicDecOptions) -> None:
        super().__init__(target, tokenizer, options)
        if not target.block:
            raise DrafterError(
                f"{type(target).__name__} can't draft from a part of a text's keys: magicdec needs a model with "
                "ordinary attention, which takes trees"
            )
        if options.selection != "streaming" and not tells_attention(target):
            raise DrafterError(
                f"this model does not tell what it attends to, so selection={options.selection!r} can't select: "
                "use selection='streaming'"
            )

    def begin(self, request: Request) -> DraftSession:
        return MagicDecSession(self, request)

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        """Drafts level by level, all sequences together."""
        mine = cast(Sequence[MagicDecSession], sessions)
        growing = [session.grow(root, budget) for session, root, budget in zip(mine, roots, budgets, strict=True)]
        try:
            return grow_together(self.target, growing, self.target.vocabulary, self.options.width)
        except CacheFullError:  # no pages to draft in: the step, which needs fewer, may still succeed
            return [Proposal(TokenTree.root(root)) for root in roots]
        finally:
            for session in mine:
                session.let_go()


class MagicDecSession(LevelSession):
    def __init__(self, drafter: MagicDec, request: Request) -> None:
        super().__init__(drafter.options, request, "magicdec")
        self.drafter, self.target = drafter, drafter.target
        self._slot: Slot | None = None  # the text's
        self._part: Part | None = None
        self._prompt: NDArray[np.float32] | None = None  # for snapkv: what the prompt's end attends to, by block

    def follow(self, slot: Slot | None) -> None:
        self._slot = slot

    @property
    def silent(self) -> bool:
        """Whether the text is too short: leaving out keys would save less than a forward takes."""
        return self._slot is None or self._slot.length < max(self.options.shortest, 1)

    def grow(self, root: int, budget: Budget) -> Grower:
        """Grow a draft."""
        depth = min(budget.depth, self.options.depth)
        if self.silent or depth < 1 or budget.nodes < 1:
            return Proposal(TokenTree.root(root))
        assert self._slot is not None
        self._part = self.target.select(self._slot, self._blocks(self._slot))
        return (yield from self.grow_levels(Growing(self._part, [root]), depth, budget.nodes))

    def let_go(self) -> None:
        """Close the part: the draft is complete, or failed."""
        if self._part is not None:
            self.target.close(self._part)
            self._part = None

    def close(self) -> None:
        self.let_go()
        self._slot = self._prompt = None

    def _blocks(self, slot: Slot) -> list[int]:
        """The blocks to draft with now."""
        o, size, attention = self.options, self.target.block, None
        if o.selection == "snapkv":
            if self._prompt is None:
                weights = self.target.attended(slot, o.window)
                assert weights is not None, "a model that does not report attention is refused"
                self._prompt = by_block(pooled(weights), size)
            attention = self._prompt
        elif o.selection == "attended":
            slot.wants_attention = True
            if slot.attended is not None:  # by block; blocks of one token are pooled, as with snapkv
                attention = (pooled(slot.attended) if size == 1 else slot.attended).numpy()
        return chosen_blocks(slot.length, size, o.keys, o.sinks, o.window, attention)


def chosen_blocks(
    length: int, size: int, keys: float, sinks: int, window: int, attention: NDArray[np.float32] | None = None
) -> list[int]:
    """Numbers of the blocks of `size` tokens that a text of this length is drafted with, in order.

    keys: number of tokens, or below 1 a share of the text. The block that the text ends in, its last `window` tokens
    and its first `sinks` are always selected; the others are the most recent, or those with the largest weights.
    attention: attention weights by block, as far as known.
    """
    there = -(-length // size)
    wanted = round(keys * length) if keys < 1 else int(keys)
    latest = range(max(0, length - window) // size, there)
    always = {*range(min(there, -(-sinks // size))), *latest}
    room = -(-wanted // size) - len(always)
    others = [block for block in reversed(range(there)) if block not in always]  # the most recent first
    if attention is not None:
        weights = np.zeros(there, np.float32)
        weights[: len(attention)] = attention[:there]
        others = [others[i] for i in np.argsort(-weights[others], kind="stable")]
    return sorted(always | set(others[: max(0, room)]))


def pooled(weights: torch.Tensor) -> torch.Tensor:
    """(length,) weights by token, averaged over neighbours, on the host."""
    return torch.nn.functional.avg_pool1d(weights.float()[None].cpu(), POOL, 1, POOL // 2)[0]


def by_block(weights: torch.Tensor, size: int) -> NDArray[np.float32]:
    """The sum of its tokens' weights, for each block."""
    padded = torch.nn.functional.pad(weights, (0, -len(weights) % size))
    found: NDArray[np.float32] = padded.view(-1, size).sum(1).numpy()
    return found


def tells_attention(target: Target) -> bool:
    """Whether the model reports what it attends to: tried on a text of a few tokens."""
    from slipstream.targets import Want

    slot = target.open()
    try:
        for _ in target.prefill(slot, [1, 2, 3], Want()):
            pass
        return target.attended(slot, 2) is not None
    finally:
        target.close(slot)
