"""The keys and values of a head's layers, for all sessions, and attention over them.

PagedKeys are in the pages of the target's own texts, KeyCache has a row for each session. The keys of a text are at its
first positions. Drafted tokens come after it, and each attends to the text and to its own path. All of this is given by
tensors, so a captured CUDA graph can be replayed for other texts and trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.kernels.ops import attend, write_keys
from slipstream.kernels.sizes import PAGE
from slipstream.targets.cache import LayerShape

if TYPE_CHECKING:
    from slipstream.heads.layer_config import LayerConfig
    from slipstream.targets.base import Slot
    from slipstream.targets.captured.graph_target import GraphTarget

# Graphs are captured anew whenever the cache grows, and unused room costs only memory. Row 0 is for padding, so the
# first rows are enough for three sequences.
FIRST_ROWS, FIRST_CAPACITY = 4, 8192
TEXT = -1  # the "depth" of a row that attends to text alone, its own position included


class Keys(ABC):
    """What both kinds have in common."""

    nobody: int  # a row that no session has, for padding
    tables: Tensor | None = None  # (rows, pages) int32 where the pages of each row lie; None: a row is one piece
    spare: int = 0  # with pages: the first column for drafts
    room: int = 0  # with pages: how many such columns each sequence of a batch has
    generation: int  # counts reallocations of the tensors

    def __init__(self, config: LayerConfig, device: torch.device) -> None:
        self.windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self._heads, self._device = config.num_attention_heads, device
        self._scratch: dict[int, tuple[Any, Tensor]] = {}  # by batch, with the depths of rows: (depth, batch, most)

    @property
    @abstractmethod
    def layers(self) -> Sequence[tuple[Tensor, ...]]:
        """By layer, keys and values: (rows, kv heads, capacity, d) each."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Positions of a text at most."""

    @abstractmethod
    def release(self) -> None:
        """Free all memory."""

    def open(self) -> int:
        """Reserve a row, if a text does not bring its own."""
        return self.nobody

    def close(self, row: int) -> None:  # noqa: B027
        """Free a row that `open` reserved."""

    def copy(self, source: int, to: int, length: int) -> None:  # noqa: B027
        """Copy the first `length` keys of a text to a session that can't share them."""

    def reserve(self, length: int) -> None:  # noqa: B027
        """Make rows longer than this."""

    def reach(self, slot: Slot | None, start: int, end: int, later: int = 0) -> None:  # noqa: B027
        """Make these positions of a text writable, and `later` more as far as the text has pages."""

    def columns(self, row: int, positions: Tensor) -> Tensor:  # noqa: ARG002
        """The columns of these positions of a row."""
        return positions

    def stored(self, rows: Tensor) -> Tensor:
        """(b,) int32: where the keys of these rows are in the tensors."""
        return rows

    def places(self, given: Tensor, depths: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return first_places(given, depths, self.tables, self.spare, self.room)

    def prepare(self, batch: int, most: int, depth: int) -> None:
        """Allocate scratch for attention on a GPU, ahead of a capture since replays need the same addresses. most:
        tokens at a time per sequence; depth: the deepest path. Both must be the same at each call."""
        if self._device.type == "cuda" and batch not in self._scratch:
            depths = torch.arange(depth, dtype=torch.int32, device=self._device)
            self._scratch[batch] = self._new_scratch(batch, most, depth), depths[:, None, None].repeat(1, batch, most)

    def _new_scratch(self, batch: int, most: int, depth: int) -> Any:
        from slipstream.kernels.exact_attention import scratch

        keys, values = self.layers[0]
        size = (batch, most, self._heads, keys.shape[1], self.longest, depth, values.shape[3])
        return scratch(*size, self._device)

    def scratch(self, batch: int, count: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """For `count` tokens of each sequence, at the end of paths of this length: the scratch, and their depths. Depth
        0: of text, which may be more tokens than was prepared for."""
        if self._device.type != "cuda":
            nothing = torch.empty(0)
            return nothing, nothing, torch.full((batch, count), depth - 1, dtype=torch.int32)
        if depth:
            found, depths = self._scratch[batch]
            return found.stats, found.sums, depths[depth - 1, :, :count]
        text = torch.full((batch, count), TEXT, dtype=torch.int32, device=self._device)
        found, depths = self._scratch.get(batch, (None, text[None, :, :0]))
        if count > depths.shape[2]:
            found = self._new_scratch(batch, count, 1)
        return found.stats, found.sums, text

    def through(
        self,
        rows: Tensor,
        columns: Tensor,
        lengths: Tensor | None = None,
        paths: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Attention:
        """Attention for one pass: keys of n tokens are written to these rows (b,) and columns (b, n). The last w of the
        n are queries: they attend to the first `lengths` (b,) positions and to the columns of their paths (b, w,
        depth), which end with their own. Without paths there are no queries. positions (b, n): of the tokens, for heads
        of several layers."""
        return Attention(self, rows, columns, lengths, paths, positions)


class PagedKeys(Keys):
    """In the arena of a target. A text's n-th key is in the column of its n-th token, in layers that belong to the head
    alone. So whoever forks, cuts or frees a text does it for its keys too. Drafts are in columns after all pages, since
    the next draft overwrites them."""

    nobody = -1

    def __init__(
        self, target: GraphTarget, config: LayerConfig, dtype: torch.dtype, device: torch.device, room: int, batch: int
    ) -> None:
        """room: columns for the draft of one sequence. batch: sequences that are drafted for together, at most."""
        super().__init__(config, device)
        self._arena, self.room = target.arena, room
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, dtype, device)
        self._added = target.add_layers([shape] * config.num_hidden_layers, -(-batch * room // PAGE) * PAGE)
        self._one = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def layers(self) -> Sequence[tuple[Tensor, ...]]:
        return [layer.pair for layer in self._added]

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._arena.generation

    @property
    def tables(self) -> Tensor:  # type: ignore[override]
        return self._arena.tables

    @property
    def spare(self) -> int:  # type: ignore[override]
        return self._arena.pages * PAGE

    @property
    def longest(self) -> int:
        return self._arena.longest

    def release(self) -> None:
        self._arena.remove(self._added)
        self._scratch.clear()

    def stored(self, rows: Tensor) -> Tensor:
        return self._one[: len(rows)]

    def columns(self, row: int, positions: Tensor) -> Tensor:
        return self.tables[row][positions // PAGE] * PAGE + positions % PAGE

    def reach(self, slot: Slot | None, start: int, end: int, later: int = 0) -> None:
        assert slot is not None, "the keys of a text are in its pages"
        self._arena.reach(slot, max(end, min(end + later, len(slot.pages) * PAGE)), start)
        self._arena.upload_table()


class KeyCache(Keys):
    """A row for each session."""

    nobody = 0

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device, capacity: int = 0) -> None:
        """capacity: columns to begin with; 0: FIRST_CAPACITY."""
        super().__init__(config, device)
        self.generation = 0
        self._free: list[int] = []
        with torch.inference_mode():
            empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim, dtype=dtype, device=device)
        self._layers = [(empty, empty)] * config.num_hidden_layers
        self._resize(FIRST_ROWS, capacity or FIRST_CAPACITY)

    @property
    def layers(self) -> Sequence[tuple[Tensor, ...]]:
        return self._layers

    @property
    def keys(self) -> Tensor:
        """The first layer's."""
        return self._layers[0][0]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def longest(self) -> int:
        return self.capacity

    def open(self) -> int:
        if not self._free:
            self._resize(2 * len(self.keys), self.capacity)
        return self._free.pop()

    def close(self, row: int) -> None:
        if row != self.nobody:
            self._free.append(row)

    def release(self) -> None:
        self._layers.clear()
        self._scratch.clear()

    @torch.inference_mode()
    def copy(self, source: int, to: int, length: int) -> None:
        for tensor in (part for layer in self._layers for part in layer):
            tensor[to, :, :length] = tensor[source, :, :length]

    def reserve(self, length: int) -> None:
        """One more column than `length`, since padding may write to it."""
        capacity = self.capacity
        while capacity <= length:
            capacity *= 2
        if capacity > self.capacity:
            self._resize(len(self.keys), capacity)

    @torch.inference_mode()
    def _resize(self, rows: int, capacity: int) -> None:
        had, used = len(self.keys), self.capacity

        def larger(old: Tensor) -> Tensor:
            new = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
            new[:had, :, :used] = old
            return new

        self._layers = [(larger(keys), larger(values)) for keys, values in self._layers]
        self._scratch.clear()
        self.generation += 1
        self._free += range(rows - 1, had - 1, -1)


@dataclass(frozen=True)
class Attention:
    """See `Keys.through`."""

    cache: Keys
    rows: Tensor
    columns: Tensor
    lengths: Tensor | None
    paths: Tensor | None
    positions: Tensor | None = None
    layer: int = 0
    everyone: bool = False  # whether all n tokens are queries and attend to all columns up to their own; for text

    def for_layers(self, count: int) -> list[Attention]:
        """One for each layer. Below the last layer all n tokens must be queries, since the keys of the next layer are
        computed from their outputs. If all are queries anyway, they attend along their paths."""
        if count == 1:
            return [self]
        text = self._count < self.columns.shape[1]
        return [replace(self, layer=n, everyone=text and n < count - 1) for n in range(count)]

    def for_each(self) -> list[Attention]:
        """One for each layer, all the same."""
        return [replace(self, layer=n) for n in range(len(self.cache.layers))]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(b, heads, n, d), (b, kv, n, d), (b, kv, n, d) -> (b, w, heads, d)."""
        keys, values = self.cache.layers[self.layer]
        write_keys(keys, values, key, value, self.cache.stored(self.rows), self.columns.contiguous())
        return self._mixed(query[:, :, query.shape[2] - self._count :])

    def turned(self, qkv: Tensor, positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
        """The same for queries, keys and values in one tensor (b, n, ·), not rotated yet."""
        from slipstream.kernels.layer_pieces import turn

        keys, values = self.cache.layers[self.layer]
        where = self.cache.stored(self.rows), self.columns
        return self._mixed(turn(qkv, positions, frequencies, scale, keys, values, *where, self._count))

    @property
    def _count(self) -> int:
        """How many of the tokens, the last ones, are queries."""
        if self.everyone:
            return self.columns.shape[1]
        return 0 if self.paths is None else self.paths.shape[1]

    def _mixed(self, query: Tensor) -> Tensor:
        """(b, heads, w, d) -> (b, w, heads, d)."""
        (keys, values), window = self.cache.layers[self.layer], self.cache.windows[self.layer]
        rows, lengths, paths, tables = self.rows, self.lengths, self.paths, self.cache.tables
        if self.everyone and tables is None:
            return causal_attention(query, keys, values, rows, self.columns, window)
        if self.everyone:  # as rows of text
            assert self.positions is not None, "heads of several layers know their positions"
            lengths = self.positions + 1
            rows, paths = rows[:, None].repeat(1, lengths.shape[1]), lengths[..., None]  # text has no paths
        elif lengths is None or paths is None:
            return query.transpose(1, 2)  # no rows
        elif tables is None and not query.is_cuda:
            return masked_attention(query, keys, values, rows, lengths, paths, window)
        b, _, w, d = query.shape
        *scratch, depths = self.cache.scratch(b, w, 0 if self.everyone else paths.shape[2])
        where = rows, lengths, depths, paths, tables, None
        return attend(query, keys, values, *where, *scratch, d**-0.5, window, None)


@torch.library.custom_op("slipstream::first_places", mutates_args=())
def first_places(
    given: Tensor, depths: int, tables: Tensor | None = None, spare: int = 0, room: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where the keys of new states and of drafts go. given (b, 3 + m): its first three columns are a row, the number of
    keys it has, and how many of the m states are new (the last ones; the others are padding). A negative row is padding
    too. tables, spare and room: see `Keys`. Returns rows (b,); ends (depths, b): the position of the last state, and
    those after it; positions and columns (b, m) of the m states; and the first column for drafts (b,). Padding goes to
    columns that drafts will overwrite, or to a page that no text has. All int32."""
    if given.device.type == "cuda":
        from slipstream.heads.layer_kernel import first_rows

        return first_rows(given, depths, tables, spare, room)
    rows, lengths, counts = given[:, :3].int().t().contiguous()  # (b,) each
    ends = lengths + counts - 1 + torch.arange(depths, dtype=torch.int32, device=given.device)[:, None]
    m = given.shape[1] - 3
    place = torch.arange(m, dtype=torch.int32, device=given.device) + (counts - m)[:, None]  # (b, m)
    free = ends[0] + 1
    positions = torch.where(place >= 0, lengths[:, None] + place, free[:, None])
    if tables is None:
        return rows.clone(), ends, positions, positions.clone(), free
    free = spare + room * torch.arange(len(rows), dtype=torch.int32, device=given.device)
    there, rows = rows[:, None] >= 0, rows.clamp(min=0)
    pages = tables[rows].take_along_dim((positions // PAGE).long().clamp(max=tables.shape[1] - 1), 1)
    columns = torch.where(there, pages * PAGE + positions % PAGE, 0)
    return rows, ends, positions, torch.where(place >= 0, columns, free[:, None]), free


@first_places.register_fake
def _place_shapes(given: Tensor, depths: int, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For tracing: the shapes alone."""
    b, m = given.shape[0], given.shape[1] - 3
    shapes = ((b,), (depths, b), (b, m), (b, m), (b,))
    rows, ends, positions, columns, free = (given.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return rows, ends, positions, columns, free


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
