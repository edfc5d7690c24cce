"""KeyCache: the keys and values of a head's only layer, for all sessions, and attention over them.

A session's text lies in the first columns of its row. Drafted tokens lie behind it, and each looks at the text and at
its own path. Who looks where is all in tensors, so that a captured CUDA graph follows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from slipstream.heads.decoder import Attend, LayerConfig
from slipstream.target.ops import attend, write_keys

FIRST_CAPACITY = 1024  # every growth captures anew, and capacity that isn't used costs nothing but memory


class KeyCache:
    keys: Tensor  # (rows, kv heads, capacity, d); row 0 is where the padding of a batch writes
    values: Tensor

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.generation = 0  # how often the tensors moved
        self._heads, self._device = config.num_attention_heads, device
        self._scratch: dict[int, Any] = {}  # by batch
        self._free: list[int] = []
        with torch.inference_mode():
            empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.keys = self.values = empty
        self._resize(2, FIRST_CAPACITY)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def open(self) -> int:
        """A row."""
        if not self._free:
            self._resize(2 * len(self.keys), self.capacity)
        return self._free.pop()

    def close(self, row: int) -> None:
        self._free.append(row)

    def reserve(self, length: int) -> None:
        """Room for this many columns and one more, which padding may write to."""
        capacity = self.capacity
        while capacity <= length:
            capacity *= 2
        if capacity > self.capacity:
            self._resize(len(self.keys), capacity)

    @torch.inference_mode()
    def _resize(self, rows: int, capacity: int) -> None:
        had, used = len(self.keys), self.capacity
        self._free += range(rows - 1, had - 1, -1)

        def larger(old: Tensor) -> Tensor:
            new = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
            new[:had, :, :used] = old
            return new

        self.keys, self.values = larger(self.keys), larger(self.values)
        self._scratch.clear()
        self.generation += 1

    def prepare(self, batch: int, most: int, depth: int) -> None:
        """On a GPU attention needs scratch, and a replay must find it where it was: for a batch of at most that many
        drafted tokens at a time, at most that deep. The same numbers each time."""
        if self._device.type == "cuda" and batch not in self._scratch:
            from slipstream.target.exact import scratch

            size = (batch, most, self._heads, self.capacity, depth, self.values.shape[3])
            self._scratch[batch] = scratch(*size, self._device)

    def through(
        self, rows: Tensor, columns: Tensor, lengths: Tensor | None = None, paths: Tensor | None = None
    ) -> Attend:
        """Attention for one reading of the layer: its keys go to these rows (b,) and columns (b, n), and the last w of
        the n look at the first `lengths` (b,) columns and at those of their paths (b, w, depth), their own last.
        Without paths nobody looks."""

        def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write_keys(self.keys, self.values, key, value, rows, columns)
            b, heads, n, d = query.shape
            if lengths is None or paths is None:
                return query.new_zeros(b, n, heads, d)
            w, depth = paths.shape[1:]
            query = query[:, :, n - w :]
            if query.is_cuda:
                depths = torch.full((b, w), depth - 1, dtype=torch.int32, device=query.device)
                stats, sums = self._scratch[b].stats, self._scratch[b].sums
                where = (rows, lengths, depths, paths, stats, sums)
                out = attend(query, self.keys, self.values, *where, d**-0.5, None, None)
            else:
                out = masked_attention(query, self.keys, self.values, rows, lengths, paths)
            return pad(out, (0, 0, 0, 0, n - w, 0))

        return look


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor, paths: Tensor
) -> Tensor:
    """(b, heads, w, d) -> (b, w, heads, d): one sequence after the other, each over no more columns than it has."""
    heads, w, d = query.shape[1:]
    kv = keys.shape[1]
    out = []
    for q, row, length, path in zip(query, rows.tolist(), lengths.tolist(), paths.long(), strict=True):
        end = int(path.max()) + 1
        see = (torch.arange(end, device=q.device) < length).repeat(w, 1).scatter(1, path, True)  # (w, end)
        mask = see.repeat(heads // kv, 1)  # query heads that share a key head are rows of one product
        k, v = keys[row : row + 1, :, :end], values[row : row + 1, :, :end]
        out.append(scaled_dot_product_attention(q.reshape(1, kv, -1, d), k, v, attn_mask=mask).reshape(heads, w, d))
    return torch.stack(out).transpose(1, 2)
