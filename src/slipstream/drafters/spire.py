"""spire: the target's last layers draft, from its states of the first and most recent tokens of the text (SPIRe).

A session keeps keys only for the tokens that the head attends to, however long the text is: the most recent ones form a
ring. Drafted tokens come after it.

    row    sink │ recent tokens, a ring │ root, drafted tokens │ padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.drafters._beams import Carry
from slipstream.drafters._eagle import FeatureDrafter, FeatureOptions
from slipstream.heads.keys import Attention, KeyCache, extend_paths
from slipstream.heads.spire import Spire

if TYPE_CHECKING:
    from slipstream.drafters._eagle import FeatureSession
    from slipstream.targets.base import Target


@dataclass(frozen=True)
class SpireOptions(FeatureOptions):
    depth: int = 4  # tokens ahead


@dataclass(frozen=True)
class Places:
    """Where the texts and drafts of a batch are in the cache."""

    rows: Tensor  # (b,) int32, of the cache
    ends: Tensor  # (·, b) int32: the positions of the text's last token, of the root, and of the tokens after it
    lengths: Tensor  # (b,) int32, columns of the text
    free: Tensor  # (b,) int32, the first column after those that a text may use


@dataclass(frozen=True)
class Drafted:
    """The drafted tokens of one depth, which the next depth continues; at first the root."""

    normed: Tensor  # (b, w, H) their last hidden states, under the norm
    places: Places
    paths: Tensor  # (b, w, ·) int32, the columns of the root and of drafted ancestors, their own last
    used: int  # columns used after the text


class SpireDrafter(FeatureDrafter):
    """A SPIRe head: the target's last layers, on a few of its states."""

    kind = "spire"
    Options = SpireOptions
    head: Spire

    def __init__(self, target: Target, tokenizer: Any, options: SpireOptions) -> None:
        super().__init__(target, tokenizer, options)
        if self.head.config.recent is not None:  # keys in the ring may have been overwritten
            self.rereads = self.head.config.recent

    def new_cache(self) -> KeyCache:
        """Not in the pages of the text, which would be longer than what is kept of it."""
        kept = self.head.config.kept
        capacity = 0 if kept is None else kept + self.room()[0] + 1
        return KeyCache(self.head.config, self.head.dtype, self.device, capacity)

    def columns_of(self, length: int) -> int:
        kept = self.head.config.kept
        return length if kept is None else min(length, kept)

    def room(self) -> tuple[int, int, int]:
        columns, most, depth = super().room()
        return columns + 2, most, depth  # one more column for the root, one for padding

    # ---- the text

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, positions: Tensor) -> None:  # noqa: ARG002
        """Write keys; of a long piece only of the tokens that are still attended to at its end."""
        config, last = self.head.config, session.length + positions.shape[1] - 1
        some = config.seen(positions[0], last).nonzero()[:, 0]
        index = positions[:, some]
        looks = self.cache.through(row, config.column(index)).for_each()
        self.head.remember(self.head.read(states[:, some]), index, looks)

    # ---- drafting

    def start(self, *inputs: Tensor) -> Carry:
        """Read the unread states, and the root after them."""
        given, states = inputs
        config, padding = self.head.config, self.room()[0] - 1
        rows, ends, index, _, _ = self.cache.places(given, 2 + self.length)
        after = ends[1]  # the root's position
        kept = config.kept
        lengths = after if kept is None else after.clamp(max=kept)
        free = after if kept is None else torch.full_like(after, kept)
        # The keys of padding, and of tokens that the root no longer attends to, go to the padding column.
        seen = config.seen(index, ends[0][:, None])
        columns = torch.where(seen, config.column(index), free[:, None] + padding)
        paths = free[:, None, None].contiguous()  # (b, 1, 1) the root's column
        look = self.cache.through(rows, torch.cat((columns, paths[..., 0]), dim=1), lengths, paths)
        positions = torch.cat((index, after[:, None]), dim=1)
        places = Places(rows, ends, lengths, free)
        return self._read(places, paths, 1, given[:, -1:], self.head.read(states), positions, look)

    def own_logits(self, carry: Carry, depth: int) -> Tensor:  # noqa: ARG002
        return self.head.output(carry.normed)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        at = carry.places
        paths = extend_paths(carry.paths, chain, at.free, carry.used)  # (b, w, 1 + depth)
        look = self.cache.through(at.rows, paths[..., -1], at.lengths, paths)
        positions = at.ends[1 + depth, :, None].expand_as(tokens)
        return self._read(at, paths, carry.used + tokens.shape[1], tokens, None, positions, look)

    def _read(
        self,
        at: Places,
        paths: Tensor,
        used: int,
        tokens: Tensor,
        memory: Sequence[Tensor] | None,
        positions: Tensor,
        look: Attention,
    ) -> Drafted:
        """Read tokens (b, w) into the last columns of their paths. memory: states of the text, see `Spire.step`."""
        streams, normed = self.head.step(self.head.embed(tokens), memory, positions, look.for_each())
        left = self.head.left(streams)
        if left is not None:  # overwrites the keys that the tokens used for themselves
            looks = self.cache.through(at.rows, paths[..., -1]).for_each()
            self.head.remember(left, positions[:, -tokens.shape[1] :], looks)
        return Drafted(normed, at, paths, used)
