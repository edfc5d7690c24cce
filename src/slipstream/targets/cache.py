"""The preallocated key/value cache: one pool for all sequences, of which a forward uses a window.

Every sequence owns a row of the pool. Layers of one shape lie in one tensor (layers, rows, heads, capacity, dim), so
moving an accepted path into place is one operation for all of them. A forward writes each sequence's new keys after
its committed length and reads up to the batch's longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.errors import ModelError

FIRST_CAPACITY = 256


@dataclass(frozen=True)
class LayerShape:
    """The shape of what one layer stores per token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class Window:
    """The part of the pool that one forward writes and reads: rows [first, first + len(starts))."""

    first: int
    starts: tuple[int, ...]  # where each sequence's new keys begin
    count: int  # new keys per sequence, padding included
    width: int  # keys visible to the forward


class PoolLayer(CacheLayerMixin):
    """One layer's view of the pool."""

    is_sliding = False

    def __init__(self, pool: KeyValuePool) -> None:
        super().__init__()
        self.pool = pool
        self.is_initialized = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        w = self.pool.window
        rows = slice(w.first, w.first + len(w.starts))
        if len(w.starts) == 1:
            start = w.starts[0]
            self.keys[w.first, :, start : start + w.count] = keys[0]
            self.values[w.first, :, start : start + w.count] = values[0]
        else:
            row, column = self.pool.places(self.keys.device)
            self.keys[row, :, column] = keys.transpose(1, 2)
            self.values[row, :, column] = values.transpose(1, 2)
        return self.keys[rows, :, : w.width], self.values[rows, :, : w.width]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool exists already."""

    def get_seq_length(self) -> int:
        return max(self.pool.window.starts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self.pool.window.width, 0

    def get_max_length(self) -> int:
        return self.pool.capacity


class KeyValuePool(Cache):
    # All changes are made in inference mode: tensors that a forward allocated can't be changed outside it.

    def __init__(self, shapes: Sequence[LayerShape | None], longest: int) -> None:
        """shapes: per layer of the model; None for a layer that stores nothing itself. longest: tokens of a sequence at
        most, beyond which capacity is not doubled."""
        super().__init__(layers=[PoolLayer(self) for _ in shapes])
        self._longest = longest
        self.rows, self.capacity = 0, 0
        self.window = Window(0, (0,), 0, 0)
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._members: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(shapes):
            if shape is not None:
                self._members.setdefault(shape, []).append(layer)
        self._stores: dict[
            LayerShape, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # keys, values (layers, rows, heads, cap, dim)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._stores.values() for t in pair)

    @torch.inference_mode()
    def reserve(self, rows: int, length: int) -> None:
        """Make room by doubling, and keep the contents."""
        if rows <= self.rows and length <= self.capacity:
            return
        # A power of two plus two rows, so that a slot or two beside 64 sequences don't take room for 128.
        rows = max(self.rows, rows if rows < 3 else 2 + (1 << (rows - 3).bit_length()))
        capacity = max(self.capacity, FIRST_CAPACITY)
        while capacity < length:
            capacity *= 2
        capacity = max(min(capacity, -(-self._longest // FIRST_CAPACITY) * FIRST_CAPACITY), length, self.capacity)
        stores = {shape: self._larger(shape, rows, capacity) for shape in self._members}  # all of them, or none
        for shape, members in self._members.items():
            self._stores[shape] = stores[shape]
            for i, layer in enumerate(members):
                self.layers[layer].keys, self.layers[layer].values = (store[i] for store in stores[shape])
        self.rows, self.capacity = rows, capacity

    def _larger(self, shape: LayerShape, rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values of that size, with the old contents."""
        old, pair = self._stores.get(shape), []
        for which, dim in enumerate((shape.key_dim, shape.value_dim)):
            size = (len(self._members[shape]), rows, shape.heads, capacity, dim)
            try:
                # Zeros, not uninitialised: a masked value is still multiplied by 0, and 0 × NaN is NaN.
                new = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            except RuntimeError as error:
                raise ModelError(self._too_large(rows, capacity, shape.device)) from error
            if old is not None:
                new[:, : self.rows, :, : self.capacity] = old[which]
            pair.append(new)
        return pair[0], pair[1]

    @property
    def per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(len(members) * shape.per_token for shape, members in self._members.items())

    def _too_large(self, rows: int, capacity: int, device: torch.device) -> str:
        free = f", and {torch.cuda.mem_get_info(device)[0] / 2**30:.2f} GiB are free" if device.type == "cuda" else ""
        size = rows * capacity * self.per_token
        return (
            f"the cache does not fit on {device}: {rows} sequences × {capacity} tokens × {self.per_token} bytes are "
            f"{size / 2**30:.2f} GiB, beside the {self.bytes / 2**30:.2f} GiB it has now{free}. "
            "Run fewer sequences at a time (max_batch), shorten the prompts, or use a smaller dtype"
        )

    def tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, (rows, heads, capacity, dim)."""
        for layer in self.layers:
            yield layer.keys, layer.values

    def stores(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of all layers of one shape, (layers, rows, heads, capacity, dim)."""
        return self._stores.values()

    def look(self, window: Window) -> None:
        """Set where the next forward writes and reads."""
        self.window = window
        self._places.clear()

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row (b, 1) and column (b, n) of every new key."""
        if device not in self._places:
            w = self.window
            row = torch.arange(w.first, w.first + len(w.starts), device=device)[:, None]
            column = torch.tensor(w.starts, device=device)[:, None] + torch.arange(w.count, device=device)
            self._places[device] = row, column
        return self._places[device]

    @torch.inference_mode()
    def move(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move the keys at start + path[i] to start + i."""
        still = 0
        while still < len(path) and path[still] == still:
            still += 1
        if still == len(path):
            return
        to = slice(start + still, start + len(path))
        for pair in self._stores.values():
            for store in pair:
                source = torch.tensor(path[still:], device=store.device) + start
                store[:, row, :, to] = store[:, row, :, source]

    @torch.inference_mode()
    def copy(self, source: int, to: int, length: int) -> None:
        for pair in self._stores.values():
            for store in pair:
                store[:, to, :, :length] = store[:, source, :, :length]

    @torch.inference_mode()
    def pick(self, source: int, to: int, columns: NDArray[np.int64]) -> None:
        """Copy these keys of one row to the beginning of another."""
        for pair in self._stores.values():
            for store in pair:
                chosen = torch.from_numpy(columns).to(store.device)
                store[:, to, :, : len(columns)] = store[:, source].index_select(2, chosen)

    @torch.inference_mode()
    def swap(self, one: int, other: int, length: int) -> None:
        for pair in self._stores.values():
            for store in pair:
                kept = store[:, one, :, :length].clone()
                store[:, one, :, :length] = store[:, other, :, :length]
                store[:, other, :, :length] = kept
