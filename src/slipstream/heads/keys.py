"""KeyCache: the keys and values of a head's layers, for all sessions, and attention over them.

A session's text lies in the first columns of its row. Drafted tokens lie after it, and each looks at the text and at
its own path. Who looks where is all in tensors, so that a captured CUDA graph follows it.
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

# Every growth captures anew, and room that isn't used costs nothing but memory. Row 0 is padding's: three sequences.
FIRST_ROWS, FIRST_CAPACITY = 4, 8192


class KeyCache:
    # By layer, keys and values: (rows, kv heads, capacity, d) each; row 0 is where the padding of a batch writes.
    layers: list[tuple[Tensor, Tensor]]

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device, capacity: int = 0) -> None:
        """capacity: columns to begin with; 0: the usual number."""
        self.generation = 0  # how often the tensors moved
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
        """Of the first layer."""
        return self.layers[0][0]

    @property
    def values(self) -> Tensor:
        return self.layers[0][1]

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

    def release(self) -> None:
        self.layers.clear()
        self.scratch.clear()

    @torch.inference_mode()
    def copy(self, source: int, to: int, length: int) -> None:
        """The first columns of a row, into another."""
        for tensor in (part for layer in self.layers for part in layer):
            tensor[to, :, :length] = tensor[source, :, :length]

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

        self.layers = [(larger(keys), larger(values)) for keys, values in self.layers]
        self.scratch.clear()
        self.generation += 1

    def prepare(self, batch: int, most: int, depth: int) -> None:
        """On a GPU attention needs scratch, and a replay must find it where it was: for a batch of at most that many
        drafted tokens at a time, at most that deep. The same numbers each time."""
        if self._device.type == "cuda" and batch not in self.scratch:
            from slipstream.kernels.exact_attention import scratch

            size = (batch, most, self._heads, self.keys.shape[1], self.capacity, depth, self.values.shape[3])
            depths = torch.arange(depth, dtype=torch.int32, device=self._device)
            self.scratch[batch] = scratch(*size, self._device), depths[:, None, None].repeat(1, batch, most)

    def through(
        self, rows: Tensor, columns: Tensor, lengths: Tensor | None = None, paths: Tensor | None = None
    ) -> Attention:
        """Attention for one reading of the layer: its keys go to these rows (b,) and columns (b, n), and the last w of
        the n look at the first `lengths` (b,) columns and at those of their paths (b, w, depth), their own last.
        Without paths nobody looks."""
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
    everyone: bool = False  # whether all n look, each at the columns up to its own; for what is text

    def for_layers(self, count: int) -> list[Attention]:
        """One for each layer. Below the last one everyone must look, since the keys above are made of what they see;
        where all that are read look anyway, they do it along their paths."""
        if count == 1:
            return [self]
        text = self._count < self.columns.shape[1]
        return [replace(self, layer=n, everyone=text and n < count - 1) for n in range(count)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(b, heads, n, d), (b, kv, n, d), (b, kv, n, d) -> (b, w, heads, d)."""
        write_keys(*self.cache.layers[self.layer], key, value, self.rows, self.columns.contiguous())
        return self._mixed(query[:, :, query.shape[2] - self._count :])

    def turned(self, qkv: Tensor, positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
        """The same of all three side by side, (b, n, ·), which are rotated on the way."""
        from slipstream.kernels.layer_pieces import turn

        keys, values = self.cache.layers[self.layer]
        return self._mixed(turn(qkv, positions, frequencies, scale, keys, values, self.rows, self.columns, self._count))

    @property
    def _count(self) -> int:
        """How many look, the last ones."""
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
    """(b, 3 + m) whose first three are a row, how many keys it has, and how many of m states at their end wait -> rows
    (b,); ends (depths, b), the column of the last state and those after it; and the columns of all m (b, m): what is
    padded goes where drafts will be. All int32."""
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
    """(b, w', depth) -> (b, w, depth + 1) int32: each of w goes on from the path numbered chain (b, w), in a column of
    its own: the first is `used` columns after `free` (b,)."""
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
    """(b, heads, w, d) -> (b, w, heads, d): one sequence after the other, each over no more columns than it has."""
    heads, w, d = query.shape[1:]
    kv = keys.shape[1]
    out = []
    for q, row, length, path in zip(query, rows.tolist(), lengths.tolist(), paths.long(), strict=True):
        end = int(path.max()) + 1
        column = torch.arange(end, device=q.device)
        text = column < length
        if window is not None:  # what is looked for is at place length + depth - 1, since paths follow the text
            text &= column >= length + path.shape[1] - window
            path = path[:, -window:]
        see = text.repeat(w, 1).scatter(1, path, True)  # (w, end)
        mask = see.repeat(heads // kv, 1)  # query heads that share a key head are rows of one product
        k, v = keys[row : row + 1, :, :end], values[row : row + 1, :, :end]
        out.append(scaled_dot_product_attention(q.reshape(1, kv, -1, d), k, v, attn_mask=mask).reshape(heads, w, d))
    return torch.stack(out).transpose(1, 2)


def causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor, window: int | None
) -> Tensor:
    """(b, heads, n, d) -> (b, n, heads, d): each row sees the columns up to its own, (b, n). On a GPU over all that
    the cache has room for, so that nobody waits for a number."""
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
