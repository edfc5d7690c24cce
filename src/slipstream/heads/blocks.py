"""Blocks: predictions of several tokens at once, as if the text ended at one of its positions.

A block knows the states up to its end, and one more token, the root. Heads that predict blocks are trained on many
blocks of a text at once, with a mask that says which positions attend to which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Blocks:
    """Blocks in texts of one length: one after every `stride`-th position, each of `depths` predictions."""

    length: int
    depths: int
    stride: int = 1
    first: int = 0  # the last position before the first block

    @property
    def count(self) -> int:
        return len(range(self.first, self.length, self.stride))

    def ends(self, device: torch.device) -> Tensor:
        """(count,) the last position whose state each block knows."""
        return torch.arange(self.first, self.length, self.stride, device=device)

    def following(self, tokens: Tensor, depths: int | None = None) -> Tensor:
        """(b, t) -> (b, count, depths) the token before each prediction: the root, then the true tokens. Beyond the end
        of the text, tokens wrap around to its beginning."""
        each = torch.arange(1, 1 + (depths or self.depths), device=tokens.device)
        return tokens[:, (self.ends(tokens.device)[:, None] + each) % self.length]

    def aims(self, columns: Tensor, rows: Tensor, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """For tokens in these columns of these rows of a batch, (n,) each: the index of their prediction in the
        flattened (b, count·depths) predictions, whether there is one, and its depth. A token may be predicted in
        several blocks: `turn` says in which of them, 0 is the nearest."""
        depth = (columns - 2 - self.first) % self.stride + turn * self.stride
        end = columns - 2 - depth
        there = (end >= self.first) & (depth < self.depths)
        place = (rows * self.count + (end - self.first) // self.stride) * self.depths + depth
        return torch.where(there, place, 0), there, torch.where(there, depth, 0)

    @property
    def turns(self) -> int:
        """In how many blocks a token may be predicted."""
        return -(-self.depths // self.stride)


class Masked:
    """Attention over all keys that it has been given so far. `under` sets the mask for the next call."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # (b, kv, n, d) each
        self._values: list[Tensor] = []
        self._mask = torch.empty(0)

    def under(self, mask: Tensor) -> Masked:
        """(w, n): which of the first n keys the last w rows, the queries, attend to. Keys after these are dropped."""
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
    """(count·slots, count·slots): whether two positions are in the same block."""
    block = torch.arange(count * slots, device=device) // slots
    return block[:, None] == block
