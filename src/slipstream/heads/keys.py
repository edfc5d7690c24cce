"""KeyCache: the keys and values of a head's layers, for all sessions, and attention over them.

A session's text is in the first columns of its row. Drafted tokens come after it, and each attends to the text and to
its own path. All of this is given by tensors, so a captured CUDA graph can be replayed for other texts and trees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.kernels.ops import attend, write_keys

if TYPE_CHECKING:
    from slipstream.heads.layer_config import LayerConfig

# Graphs are captured anew whenever the cache grows, and unused room costs only memory. Row 0 is for padding, so the
# first rows are enough for three sequences.
FIRST_ROWS, FIRST_CAPACITY = 4, 8192


class KeyCache:
    # By layer, keys and values: (rows, kv heads, capacity, d) each. Padding of a batch writes to row 0.
    layers: list[tuple[Tensor, Tensor]]

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device, capacity: int = 0) -> None:
        """capacity: columns to begin with; 0: FIRST_CAPACITY."""
        self.generation = 0  # counts reallocations of the tensors
        self.windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self._heads, self._device = config.num_attention_heads, device
        self.scratch: dict[int, tuple[Any, Tensor]] = {}  # by batch
        self._free: list[int] = []
        with torch.inference_mode():
            empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.layers = [(empty, empty)] * config.num_hidden_layers
        self._resize(FIRST_ROWS, capacity or FIRST_CAPACITY)

    @property
    def keys(self) -> Tensor:
        """The first layer's."""
        return self.layers[0][0]

    @property
    def values(self) -> Tensor:
        return self.layers[0][1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def open(self) -> int:
        """Reserve a row."""
        if not self._free:
            self._resize(2 * len(self.keys), self.capacity)
        return self._free.pop()

    def close(self, row: int) -> None:
        self._free.append(row)

    def release(self) -> None:
        self.layers.clear()
        self.scratch.clear()

    @torch.inference_mode()
    def copy(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` columns of a row into another."""
        for tensor in (part for layer in self.layers for part in layer):
            tensor[to, :, :length] = tensor[source, :, :length]

    def reserve(self, length: int) -> None:
        """Make room for `length` columns and one more, which padding may write to."""
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

        self.layers = [(larger(keys), larger(values)) for keys, values in self.layers]
        self.scratch.clear()
        self.generation += 1

    def prepare(self, batch: int, most: int, depth: int) -> None:
        """Allocate scratch for attention on a GPU, ahead of a capture since replays need the same addresses. most:
        drafted tokens at a time per sequence; depth: the deepest path. Both must be the same at each call."""
        if self._device.type == "cuda" and batch not in self.scratch:
            from slipstream.kernels.exact_attention import scratch

            size = (batch, most, self._heads, self.keys.shape[1], self.capacity, depth, self.values.shape[3])
            depths = torch.arange(depth, dtype=torch.int32, device=self._device)
            self.scratch[batch] = scratch(*size, self._device), depths[:, None, None].repeat(1, batch, most)

    def through(
        self, rows: Tensor, columns: Tensor, lengths: Tensor | None = None, paths: Tensor | None = None
    ) -> Attention:
        """Attention for one pass: keys of n tokens are written to these rows (b,) and columns (b, n). The last w of the
        n are queries: they attend to the first `lengths` (b,) columns and to those of their paths (b, w, depth), which
        end with their own column. Without paths there are no queries."""
        return Attention(self, rows, columns, lengths, paths)


@dataclass(frozen=True)
class Attention:
    """See `KeyCache.through`."""

    cache: KeyCache
    rows: Tensor
    columns: Tensor
    lengths: Tensor | None
    paths: Tensor | None
    layer: int = 0
    everyone: bool = False  # whether all n tokens are queries and attend to all columns up to their own; for text

    def for_layers(self, count: int) -> list[Attention]:
        """One for each layer. Below the last layer all n tokens must be queries, since the keys of the next layer are
        computed from their outputs. If all are queries anyway, they attend along their paths."""
        if count == 1:
            return [self]
        text = self._count < self.columns.shape[1]
        return [replace(self, layer=n, everyone=text and n < count - 1) for n in range(count)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(b, heads, n, d), (b, kv, n, d), (b, kv, n, d) -> (b, w, heads, d)."""
        write_keys(*self.cache.layers[self.layer], key, value, self.rows, self.columns.contiguous())
        return self._mixed(query[:, :, query.shape[2] - self._count :])

    def turned(self, qkv: Tensor, positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
        """The same for queries, keys and values in one tensor (b, n, ·), not rotated yet."""
        from slipstream.kernels.layer_pieces import turn

        keys, values = self.cache.layers[self.layer]
        return self._mixed(turn(qkv, positions, frequencies, scale, keys, values, self.rows, self.columns, self._count))

    @property
    def _count(self) -> int:
        """How many of the tokens, the last ones, are queries."""
        if self.everyone:
            return self.columns.shape[1]
        return 0 if self.paths is None else self.paths.shape[1]

    def _mixed(self, query: Tensor) -> Tensor:
        """(b, heads, w, d) -> (b, w, heads, d)."""
        (keys, values), window = self.cache.layers[self.layer], self.cache.windows[self.layer]
        if self.everyone:
            return causal_attention(query, keys, values, self.rows, self.columns, window)
        if self.lengths is None or self.paths is None:
            return query.transpose(1, 2)  # no rows
        if not query.is_cuda:
            return masked_attention(query, keys, values, self.rows, self.lengths, self.paths, window)
        b, w, depth = self.paths.shape
        scratch, depths = self.cache.scratch[b]
        where = (self.rows, self.lengths, depths[depth - 1, :, :w], self.paths, None, None)
        return attend(query, keys, values, *where, scratch.stats, scratch.sums, query.shape[3] ** -0.5, window, None)


@torch.library.custom_op("slipstream::first_places", mutates_args=())
def first_places(given: Tensor, depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the keys of new states and of drafts go. given (b, 3 + m): its first three columns are a row, the number of
    keys it has, and how many of the m states are new (the last ones; the others are padding). Returns rows (b,); ends
    (depths, b): the column of the last state, and those after it; and columns (b, m) of the m states. Padding goes to
    columns that drafts will overwrite. All int32."""
    if given.device.type == "cuda":
        from slipstream.heads.layer_kernel import first_rows

        return first_rows(given, depths)
    rows, lengths, counts = given[:, :3].int().t().contiguous()  # (b,) each
    ends = lengths + counts - 1 + torch.arange(depths, dtype=torch.int32, device=given.device)[:, None]
    m = given.shape[1] - 3
    place = torch.arange(m, dtype=torch.int32, device=given.device) + (counts - m)[:, None]  # (b, m)
    columns = torch.where(place >= 0, lengths[:, None] + place, ends[0][:, None] + 1)
    return rows, ends, columns


@first_places.register_fake
def _place_shapes(given: Tensor, depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """For tracing: the shapes alone."""
    b, m = given.shape[0], given.shape[1] - 3
    shapes = ((b,), (depths, b), (b, m))
    rows, ends, columns = (given.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return rows, ends, columns


@torch.library.custom_op("slipstream::extend_paths", mutates_args=())
def extend_paths(paths: Tensor, chain: Tensor, free: Tensor, used: int) -> Tensor:
    """(b, w', depth) -> (b, w, depth + 1) int32: node i of w extends path chain[i], chain (b, w), by a column of its
    own: free + used + i, free (b,)."""
    if paths.device.type == "cuda":
        from slipstream.heads.layer_kernel import longer_paths

        return longer_paths(paths, chain, free, used)
    own = free[:, None] + torch.arange(used, used + chain.shape[1], dtype=torch.int32, device=free.device)
    return torch.cat((paths.take_along_dim(chain[..., None], 1), own[..., None]), dim=2)


@extend_paths.register_fake
def _path_shape(paths: Tensor, chain: Tensor, _free: Tensor, _used: int) -> Tensor:
    """For tracing: the shape alone."""
    return paths.new_empty(*chain.shape, paths.shape[2] + 1)


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    lengths: Tensor,
    paths: Tensor,
    window: int | None = None,
) -> Tensor:
    """(b, heads, w, d) -> (b, w, heads, d): one sequence after the other, each over the columns that it uses."""
    heads, w, d = query.shape[1:]
    kv = keys.shape[1]
    out = []
    for q, row, length, path in zip(query, rows.tolist(), lengths.tolist(), paths.long(), strict=True):
        end = int(path.max()) + 1
        column = torch.arange(end, device=q.device)
        text = column < length
        if window is not None:  # the queries are at position length + depth - 1, since paths follow the text
            text &= column >= length + path.shape[1] - window
            path = path[:, -window:]
        see = text.repeat(w, 1).scatter(1, path, True)  # (w, end)
        mask = see.repeat(heads // kv, 1)  # query heads that share a key head become rows of one product
        k, v = keys[row : row + 1, :, :end], values[row : row + 1, :, :end]
        out.append(scaled_dot_product_attention(q.reshape(1, kv, -1, d), k, v, attn_mask=mask).reshape(heads, w, d))
    return torch.stack(out).transpose(1, 2)


def causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor, window: int | None
) -> Tensor:
    """(b, heads, n, d) -> (b, n, heads, d): each token attends to the columns up to its own, (b, n). On a GPU the mask
    covers the whole capacity, so that the host need not wait for a number."""
    b, heads, n, d = query.shape
    kv = keys.shape[1]
    end = keys.shape[2] if query.is_cuda else int(columns.max()) + 1
    column, own = torch.arange(end, device=query.device), columns[:, None, :, None]
    see = column <= own  # (b, 1, n, end)
    if window is not None:
        see &= column > own - window
    k, v = (x[rows.long(), :, :end] for x in (keys, values))
    mask = see.repeat(1, 1, heads // kv, 1)  # query heads that share a key head are rows of one product
    mixed = scaled_dot_product_attention(query.reshape(b, kv, -1, d), k, v, attn_mask=mask)
    return mixed.reshape(b, heads, n, d).transpose(1, 2)
