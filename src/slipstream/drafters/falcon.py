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
from slipstream.heads.keys import first_places

if TYPE_CHECKING:
    from slipstream.drafters.base import DraftSession
    from slipstream.request import Request
    from slipstream.targets.base import Target


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
    ends: Tensor  # (·, b) int32: the column of the text's last pair, and those after it
    used: int  # columns used after the text


class FalconDrafter(BlockDrafter):
    """A Falcon head: k tokens per pass, as a tree that is deeper where it is more certain."""

    kind = "falcon"
    Options = FalconOptions
    head: Falcon

    def __init__(self, target: Target, tokenizer: Any, options: FalconOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.slots = self.head.config.block
        self.rereads = self.slots  # a pass attends from the last k positions
        # The LSTM's memory after each of the last columns of each row, as a ring; one more place for padding.
        self.turn = self.max_states + self.slots
        with torch.inference_mode():
            self.memory = self.head.no_memory(len(self.cache.keys), self.turn + 1)

    def begin(self, request: Request) -> FalconSession:
        session = FalconSession(self, request)
        more = len(self.cache.keys) - len(self.memory)
        if more:  # the cache has grown, which makes all captures new
            with torch.inference_mode():
                self.memory = torch.cat((self.memory, self.head.no_memory(more, self.turn + 1)))
        return session

    def release(self) -> None:
        super().release()
        self.memory = self.memory[:0]

    def room(self) -> tuple[int, int, int]:
        k, passes = self.slots, -(-self.length // self.slots)
        chains = max(self.width, *self.growth.widths, 1)
        return 1 + (passes - 1) * chains * k, max(k, chains * k * (passes > 1)), max(1, (passes - 1) * k)

    # ---- the text

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, columns: Tensor) -> None:
        before = self.memory[row.long(), (columns[:, 0].long() - 1) % self.turn] if session.length else None
        x, after = self.head.along(self.head.pairs(tokens, states), before)
        last = columns[0, -self.turn :].long() % self.turn
        self.memory[session.row, last, OUTPUT] = x[0, -len(last) :]
        self.memory[session.row, last[-1]] = after[0]
        self.head.guess(x, x[:, :0], columns, self.cache.through(row, columns))

    # ---- drafting

    def start(self, *inputs: Tensor) -> Carry:
        """Read the unread pairs. The LSTM's last k outputs attend; older ones of them are in its memory."""
        given, states = inputs
        rows, ends, columns = first_places(given, 1 + self.length)
        row, lengths, count, k = rows.long(), given[:, 1], given[:, 2], self.slots
        m = states.shape[1]
        memory = self.memory[row, (lengths - 1) % self.turn]  # (b, 4, H)
        memory = torch.where(lengths[:, None, None] > 0, memory, 0)
        pairs = self.head.pairs(given[:, 3:], states)  # (b, m, 2H)
        read = []
        for i in range(m):
            there = i >= m - count  # (b,) padding comes first
            memory = torch.where(there[:, None, None], self.head.step(pairs[:, i], memory), memory)
            place = torch.where(there, columns[:, i].long() % self.turn, self.turn)
            self.memory[row, place] = memory
            read.append(memory[:, OUTPUT])
        end = ends[0].long()
        tail = (end[:, None] - k + 1 + torch.arange(k, device=end.device)).clamp(min=0)  # (b, k)
        looking = self.memory[row[:, None], tail % self.turn, OUTPUT]  # (b, k, H)
        # Their keys are in the cache already, or written now: these copies go to a column that drafts overwrite.
        unseen = ends[1][:, None].expand(-1, k)
        look = self.cache.through(
            rows, torch.cat((columns, unseen), 1), ends[0], ends[0][:, None, None].expand(-1, k, -1).contiguous()
        )
        positions = torch.cat((columns, tail.int()), dim=1)
        features = self.head.guess(torch.stack(read, dim=1), looking, positions, look)[:, None]  # (b, 1, k, H)
        root = given[:, -1:]
        none = rows.new_empty(len(rows), 1, 0)
        return self._carry(features, root, memory[:, None], none, rows, ends, 0)

    def next_pass(self, carry: Carry, depth: int) -> Carry:
        (b, w), k = carry.block.shape, self.slots
        which = carry.block[..., None]
        features = carry.features.take_along_dim(which[..., None], 1)  # (b, w, k, H)
        memory = carry.memory.take_along_dim(which[..., None], 1)
        x, memory = self.head.steps(self.head.pairs(carry.tokens[..., -k:], features), memory)
        new = torch.arange(carry.used, carry.used + w * k, dtype=torch.int32, device=which.device)
        columns = carry.ends[1][:, None] + new  # (b, w·k)
        paths = torch.cat((carry.paths.take_along_dim(which, 1), columns.view(b, w, k)), dim=2)
        look = self.cache.through(carry.rows, columns, carry.ends[1], paths.repeat_interleave(k, 1))
        positions = carry.ends[depth - k + 1 : depth + 1].t().repeat(1, w)  # (b, w·k)
        x = x.flatten(1, 2)
        features = self.head.guess(x[:, :0], x, positions, look).view(b, w, k, -1)
        last = carry.tokens[..., -1]
        return self._carry(features, last, memory, paths, carry.rows, carry.ends, carry.used + w * k)

    def _carry(
        self, features: Tensor, last: Tensor, memory: Tensor, paths: Tensor, rows: Tensor, ends: Tensor, used: int
    ) -> PassCarry:
        """The carry at the beginning of n chains' blocks. last (b, n): their last tokens."""
        block = torch.arange(last.shape[1], device=last.device).expand(len(last), -1)
        logits = self.head.logits(features)
        return PassCarry(logits, block, last[..., None], features, memory, paths, rows, ends, used)


class FalconSession(FeatureSession):
    drafter: FalconDrafter

    @property
    def ready(self) -> bool:
        """A block needs as many states of the text as it has places."""
        waiting = 1 + len(self.following) + (0 if self.prompt is None else len(self.prompt[1]))
        return super().ready and self.length + waiting >= self.drafter.head.config.block

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        """Copy the keys. The LSTM's memory at that place of the text is gone, so it starts from zero."""
        super().resume(other, tokens)
        with torch.inference_mode():
            self.drafter.memory[self.row, (self.length - 1) % self.drafter.turn] = 0
