"""spire: the target's last layers draft, on its own states of the first and latest tokens of the text (SPIRe).

A session keeps the keys of as many tokens as the head sees, however long the text is: the latest take the places of
those that are seen no more. Drafted tokens lie behind them.

    row    sink │ latest tokens, in turn │ root, drafted tokens │ padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.drafters._beams import Carry
from slipstream.drafters._eagle import FeatureDrafter, FeatureOptions
from slipstream.heads.keys import Attention, KeyCache, extend_paths, first_places
from slipstream.heads.spire import Spire

if TYPE_CHECKING:
    from slipstream.drafters._eagle import FeatureSession
    from slipstream.targets.base import Target


@dataclass(frozen=True)
class SpireOptions(FeatureOptions):
    depth: int = 4  # tokens ahead


@dataclass(frozen=True)
class Places:
    """Of a batch: where its texts and drafts lie."""

    rows: Tensor  # (b,) int32, of the cache
    ends: Tensor  # (·, b) int32: the number of the text's last token, of the root, and of those after it
    lengths: Tensor  # (b,) int32, columns of the text
    free: Tensor  # (b,) int32, the first column after all that a text may have


@dataclass(frozen=True)
class Drafted:
    """The drafted tokens of one depth, from which the next one's grow; before the first, the root."""

    normed: Tensor  # (b, w, H) their last streams, under the norm
    places: Places
    paths: Tensor  # (b, w, ·) int32, the columns of the root and of drafted ancestors, their own last
    used: int  # columns after the text


class SpireDrafter(FeatureDrafter):
    """A SPIRe head: the target's last layers, on a few of its states."""

    kind = "spire"
    Options = SpireOptions
    head: Spire

    def __init__(self, target: Target, tokenizer: Any, options: SpireOptions) -> None:
        super().__init__(target, tokenizer, options)
        if self.head.config.recent is not None:  # keys that were written over can't be taken back
            self.rereads = self.head.config.recent

    def new_cache(self) -> KeyCache:
        kept = self.head.config.kept
        if kept is None:
            return super().new_cache()
        return KeyCache(self.head.config, self.head.dtype, self.device, kept + self.room()[0] + 1)

    def columns_of(self, length: int) -> int:
        kept = self.head.config.kept
        return length if kept is None else min(length, kept)

    def room(self) -> tuple[int, int, int]:
        columns, most, depth = super().room()
        return columns + 2, most, depth  # the root's, and one for what nobody looks at

    # ---- the text

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, columns: Tensor) -> None:  # noqa: ARG002
        """Of a long piece only what is still seen at its end."""
        config, last = self.head.config, session.length + columns.shape[1] - 1
        some = config.seen(columns[0], last).nonzero()[:, 0]
        index = columns[:, some]
        looks = self._looks(self.cache.through(row, config.column(index)))
        self.head.remember(self.head.read(states[:, some]), index, looks)

    def _looks(self, look: Attention) -> Sequence[Attention]:
        """One for each layer: those who look are the same in all."""
        return [replace(look, layer=n) for n in range(self.head.config.num_hidden_layers)]

    # ---- drafting

    def start(self, *inputs: Tensor) -> Carry:
        """Read the states that wait, and the root behind them."""
        given, states = inputs
        config, padding = self.head.config, self.room()[0] - 1
        rows, ends, index = first_places(given, 2 + self.length)
        after = ends[1]  # the root's number in the text
        kept = config.kept
        lengths = after if kept is None else after.clamp(max=kept)
        free = after if kept is None else torch.full_like(after, kept)
        # What is padded, or is seen no more behind what follows it here, goes where nobody looks.
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
        """Tokens (b, w), in the last columns of their paths, and memory of the text, as `Spire.step` has them."""
        streams, normed = self.head.step(self.head.embed(tokens), memory, positions, self._looks(look))
        left = self.head.left(streams)
        if left is not None:  # in the place of what they showed to themselves
            looks = self._looks(self.cache.through(at.rows, paths[..., -1]))
            self.head.remember(left, positions[:, -tokens.shape[1] :], looks)
        return Drafted(normed, at, paths, used)
