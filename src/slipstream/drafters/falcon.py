"""falcon: a pass predicts k tokens from the last k positions, which attend to each other; the next continues there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.drafters._beams import Carry
from slipstream.drafters._blocks import BlockCarry, BlockDrafter
from slipstream.drafters._eagle import FeatureOptions, FeatureSession
from slipstream.heads.falcon import OUTPUT, Falcon
from slipstream.heads.keys import FIRST_ROWS

if TYPE_CHECKING:
    from slipstream.drafters.base import DraftSession
    from slipstream.request import Request
    from slipstream.targets.base import Slot, Target


@dataclass(frozen=True)
class FalconOptions(FeatureOptions):
    depth: int = 6  # tokens ahead


@dataclass(frozen=True)
class PassCarry(BlockCarry):
    """A BlockCarry with what the next pass needs."""

    features: Tensor  # (b, n, k, H) the predicted states
    memory: Tensor  # (b, n, 4, H) of the LSTM, after the last token read
    paths: Tensor  # (b, n, ·) int32, the columns of the drafted tokens that were read
    rows: Tensor  # (b,) int32, of the cache
    ends: Tensor  # (·, b) int32: the position of the text's last pair, and those after it
    free: Tensor  # (b,) int32, the first column for drafts
    used: int  # columns used from there on


class FalconDrafter(BlockDrafter):
    """A Falcon head: k tokens per pass, as a tree that is deeper where it is more certain."""

    kind = "falcon"
    Options = FalconOptions
    head: Falcon

    def __init__(self, target: Target, tokenizer: Any, options: FalconOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.slots = self.head.config.block
        self.rereads = self.slots  # a pass attends from the last k positions
        # The LSTM's memory after each of the last pairs of each text, as a ring; one more place for padding. By row of
        # the cache, padding's row first.
        self.turn = self.max_states + self.slots
        with torch.inference_mode():
            self.memory = self.head.no_memory(FIRST_ROWS, self.turn + 1)

    def begin(self, request: Request) -> FalconSession:
        session = FalconSession(self, request)
        self.hold(session.memory_row)
        return session

    @torch.inference_mode()
    def hold(self, row: int) -> None:
        """Make room in the memory for this row."""
        while row >= len(self.memory):
            self.memory = torch.cat((self.memory, self.head.no_memory(len(self.memory), self.turn + 1)))
            self.outdated = True

    def release(self) -> None:
        super().release()
        self.memory = self.memory[:0]

    def room(self) -> tuple[int, int, int]:
        k, passes = self.head.config.block, -(-self.length // self.head.config.block)
        chains = max(self.width, *self.growth.widths, 1)
        return 1 + (passes - 1) * chains * k, max(k, chains * k * (passes > 1)), max(1, (passes - 1) * k)

    # ---- the text

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, positions: Tensor) -> None:
        memory = self.memory[session.row - self.cache.nobody]
        before = memory[(positions[0, :1].long() - 1) % self.turn] if session.length else None
        x, after = self.head.along(self.head.pairs(tokens, states), before)
        last = positions[0, -self.turn :].long() % self.turn
        memory[last, OUTPUT] = x[0, -len(last) :]
        memory[last[-1]] = after[0]
        look = self.cache.through(row, self.cache.columns(session.row, positions))
        self.head.guess(x, x[:, :0], positions, look)

    # ---- drafting

    def start(self, *inputs: Tensor) -> Carry:
        """Read the unread pairs. The LSTM's last k outputs attend; older ones of them are in its memory."""
        given, states = inputs
        rows, ends, positions, columns, free = self.cache.places(given, 1 + self.length)
        row, lengths, count, k = given[:, 0].long() - self.cache.nobody, given[:, 1], given[:, 2], self.slots
        m = states.shape[1]
        memory = self.memory[row, (lengths - 1) % self.turn]  # (b, 4, H)
        memory = torch.where(lengths[:, None, None] > 0, memory, 0)
        pairs = self.head.pairs(given[:, 3:], states)  # (b, m, 2H)
        read = []
        for i in range(m):
            there = i >= m - count  # (b,) padding comes first
            memory = torch.where(there[:, None, None], self.head.step(pairs[:, i], memory), memory)
            place = torch.where(there, positions[:, i].long() % self.turn, self.turn)
            self.memory[row, place] = memory
            read.append(memory[:, OUTPUT])
        end = ends[0].long()
        tail = (end[:, None] - k + 1 + torch.arange(k, device=end.device)).clamp(min=0)  # (b, k)
        looking = self.memory[row[:, None], tail % self.turn, OUTPUT]  # (b, k, H)
        # Their keys are in the cache already, or written now: these copies go to a column that drafts overwrite.
        unseen = free[:, None].expand(-1, k)
        paths = columns[:, -1:, None].expand(-1, k, -1).contiguous()
        look = self.cache.through(rows, torch.cat((columns, unseen), 1), ends[0], paths)
        positions = torch.cat((positions, tail.int()), dim=1)
        features = self.head.guess(torch.stack(read, dim=1), looking, positions, look)[:, None]  # (b, 1, k, H)
        root = given[:, -1:]
        none = rows.new_empty(len(rows), 1, 0)
        return self._carry(features, root, memory[:, None], none, (rows, ends, free), 0)

    def next_pass(self, carry: Carry, depth: int) -> Carry:
        (b, w), k = carry.block.shape, self.slots
        which = carry.block[..., None]
        features = carry.features.take_along_dim(which[..., None], 1)  # (b, w, k, H)
        memory = carry.memory.take_along_dim(which[..., None], 1)
        x, memory = self.head.steps(self.head.pairs(carry.tokens[..., -k:], features), memory)
        new = torch.arange(carry.used, carry.used + w * k, dtype=torch.int32, device=which.device)
        columns = carry.free[:, None] + new  # (b, w·k)
        paths = torch.cat((carry.paths.take_along_dim(which, 1), columns.view(b, w, k)), dim=2)
        look = self.cache.through(carry.rows, columns, carry.ends[1], paths.repeat_interleave(k, 1))
        positions = carry.ends[depth - k + 1 : depth + 1].t().repeat(1, w)  # (b, w·k)
        x = x.flatten(1, 2)
        features = self.head.guess(x[:, :0], x, positions, look).view(b, w, k, -1)
        last = carry.tokens[..., -1]
        at = carry.rows, carry.ends, carry.free
        return self._carry(features, last, memory, paths, at, carry.used + w * k)

    def _carry(
        self,
        features: Tensor,
        last: Tensor,
        memory: Tensor,
        paths: Tensor,
        at: tuple[Tensor, Tensor, Tensor],
        used: int,
    ) -> PassCarry:
        """The carry at the beginning of n chains' blocks. last (b, n): their last tokens. at: rows, ends and free."""
        block = torch.arange(last.shape[1], device=last.device).expand(len(last), -1)
        logits = self.head.logits(features)
        return PassCarry(logits, block, last[..., None], features, memory, paths, *at, used)


class FalconSession(FeatureSession):
    drafter: FalconDrafter

    @property
    def ready(self) -> bool:
        """A block needs as many states of the text as it has places."""
        waiting = 1 + len(self.following) + (0 if self.prompt is None else len(self.prompt[1]))
        return super().ready and self.length + waiting >= self.drafter.head.config.block

    @property
    def memory_row(self) -> int:
        """Its row of the drafter's memory."""
        return self.row - self.drafter.cache.nobody

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        super().resume(other, tokens)
        self._forget_memory()

    def follow(self, slot: Slot | None) -> None:
        super().follow(slot)
        if self.slot is not None:
            self.drafter.hold(self.memory_row)
            self._forget_memory()

    @torch.inference_mode()
    def _forget_memory(self) -> None:
        """The LSTM's memory at this place of the text is gone, so it starts from zero."""
        self.drafter.memory[self.memory_row, (self.length - 1) % self.drafter.turn] = 0
