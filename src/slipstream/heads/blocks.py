"""Blocks: guesses of several tokens at once, as if the text ended at one of its positions.

What is known at the end of a block's text is the states up to there and one token more, the root. Heads that guess in
blocks are trained on many blocks of a text at once; who sees what is a mask then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Blocks:
    """In texts of one length, a block after every `stride`-th position, each of `depths` guesses."""

    length: int
    depths: int
    stride: int = 1
    first: int = 0  # the position after which the first block stands

    @property
    def count(self) -> int:
        return len(range(self.first, self.length, self.stride))

    def ends(self, device: torch.device) -> Tensor:
        """(count,) the last position that each block knows the state of."""
        return torch.arange(self.first, self.length, self.stride, device=device)

    def following(self, tokens: Tensor, depths: int | None = None) -> Tensor:
        """(b, t) -> (b, count, depths) the token before each guess: the root, then what the guesses are about. Beyond
        the text its first tokens stand in."""
        each = torch.arange(1, 1 + (depths or self.depths), device=tokens.device)
        return tokens[:, (self.ends(tokens.device)[:, None] + each) % self.length]

    def aims(self, columns: Tensor, rows: Tensor, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """For tokens in these columns of these rows of a batch, (n,) each: where their guess lies among all blocks'
        guesses (b, count·depths), laid end to end; whether there is one; and its depth. A token has a guess in several
        blocks: `turn` says in which, the nearest is 0."""
        depth = (columns - 2 - self.first) % self.stride + turn * self.stride
        end = columns - 2 - depth
        there = (end >= self.first) & (depth < self.depths)
        place = (rows * self.count + (end - self.first) // self.stride) * self.depths + depth
        return torch.where(there, place, 0), there, torch.where(there, depth, 0)

    @property
    def turns(self) -> int:
        """In how many blocks a token may have a guess."""
        return -(-self.depths // self.stride)


class Masked:
    """Attention over all keys that it was given so far. `under` sets the mask of the next call."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # (b, kv, n, d) each
        self._values: list[Tensor] = []
        self._mask = torch.empty(0)

    def under(self, mask: Tensor) -> Masked:
        """(w, n): which of the first n keys the last w rows see, the queries. Keys after these n are dropped."""
        self._mask = mask
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(b, heads, ·, d), (b, kv, ·, d), (b, kv, ·, d) -> (b, w, heads, d)."""
        w, (b, kv, _, d) = len(self._mask), key.shape
        new = self._mask.shape[1] - sum(k.shape[2] for k in self._keys)
        self._keys.append(key[:, :, :new])
        self._values.append(value[:, :, :new])
        if not w:
            return query[:, :, :0].transpose(1, 2)
        # Query heads that share a key head are rows of one product.
        rows = query[:, :, query.shape[2] - w :].reshape(b, kv, -1, d)
        mask = self._mask.repeat(query.shape[1] // kv, 1)
        mixed = scaled_dot_product_attention(rows, torch.cat(self._keys, 2), torch.cat(self._values, 2), attn_mask=mask)
        return mixed.reshape(b, -1, w, d).transpose(1, 2)


def same_block(count: int, slots: int, device: torch.device) -> Tensor:
    """(count·slots, count·slots) those of one block see each other."""
    block = torch.arange(count * slots, device=device) // slots
    return block[:, None] == block
