"""Arena: the keys and values of all sequences, in pages of PAGE positions in one piece of memory.

It does not move as texts grow, so captured steps stay valid. Each sequence has a row of the page table, which lists
where its pages lie. Texts with a common prefix may share pages; a shared page is copied before it is written to.

Layers of heads can be added. They have the same columns: a head's n-th key of a text lies where the target's n-th does,
and its page is shared, copied and freed with it. After all pages a head's layers have columns for the keys of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CacheFullError, ModelError
from slipstream.kernels.sizes import PAGE
from slipstream.targets.base import Part, Slot
from slipstream.targets.cache import LayerShape

MEMORY = 0.9  # share of the device's free memory at most: steps and their logits need room too
SEQUENCES = 64  # whole contexts at most: a small model leaves the rest of the memory free
ELSEWHERE = 1 << 16  # tokens, where the device is no GPU, as in tests
ROWS = 1024  # rows of the table: sequences at a time, kept texts included


def _pages(length: int) -> int:
    return -(-length // PAGE)


@dataclass(eq=False)
class Added:
    """A layer of a head, which has the same pages as the target's. Its tensors change with `Arena.generation`."""

    shape: LayerShape
    spare: int  # columns after all pages, for drafts
    pair: tuple[torch.Tensor, ...] = ()  # keys and values, (1, heads, columns, dim)


class Arena:
    def __init__(self, shapes: Sequence[LayerShape], longest: int, share: float = MEMORY, beside: int = 0) -> None:
        """shapes: per layer of the model. longest: positions of a sequence at most. share: of free memory.
        beside: bytes to leave free at least."""
        self._members: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(shapes):
            self._members.setdefault(shape, []).append(layer)
        self._layers = len(shapes)
        self.device, self._wanted, self._share = shapes[0].device, _pages(longest) * PAGE, share
        self._beside = beside
        self._added: list[Added] = []
        self.generation = -1  # counts allocations
        self._stores: dict[LayerShape, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: list[Slot | None] = []  # by row of the table
        self._allocate(self._fitting(0))

    def _allocate(self, pages: int) -> None:
        """Allocate all layers. No text may be held."""
        self._stores = {}
        for layer in self._added:
            layer.pair = ()  # its memory is free before new memory is taken
        self.pages, self.longest = pages, min(self._wanted, (pages - 1) * PAGE)
        self._stores = {shape: self._store(shape, len(members)) for shape, members in self._members.items()}
        for layer in self._added:
            self._store_added(layer)
        self._free = list(range(self.pages - 1, 0, -1))  # page 0 belongs to no sequence: padding writes there
        self._held = [0] * self.pages  # how many sequences hold each page
        self._host = torch.zeros((ROWS, self.longest // PAGE), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        with torch.inference_mode():
            self.tables = self._host.to(self.device, copy=True)  # (rows, pages)
        self._changed: set[int] = set()  # rows of the table that are not copied to the device yet
        self.generation += 1

    def _fitting(self, held: int) -> int:
        """How many pages fit. held: bytes that the arena itself holds already."""
        most = SEQUENCES * self._wanted
        spare = sum(layer.spare * layer.shape.per_token for layer in self._added)  # bytes
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0] + held
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            room = min(int(self._share * free), free - self._beside) - spare
            most = min(most, max(0, room) // self.per_token)
        else:
            most = min(most, max(ELSEWHERE, 2 * self._wanted))
        widest = max(max(s.key_dim, s.value_dim) for s in self._shapes())
        beyond = max((layer.spare for layer in self._added), default=0)
        pages = min(most, (1 << 31) // widest - PAGE - beyond) // PAGE  # kernels index elements with 32 bits
        if pages < 2:
            raise ModelError(
                f"the cache does not fit on {self.device}: a page of {PAGE} tokens takes "
                f"{PAGE * self.per_token / 2**20:.1f} MiB. Use a smaller dtype, or close what else is on the device"
            )
        return pages

    def _shapes(self) -> Iterator[LayerShape]:
        """Of all layers, those of heads included."""
        for shape, members in self._members.items():
            yield from [shape] * len(members)
        for layer in self._added:
            yield layer.shape

    def _store(self, shape: LayerShape, layers: int, spare: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(layers, 1, heads, columns, dim) keys and values."""
        with torch.inference_mode():
            one, other = (
                torch.zeros(
                    (layers, 1, shape.heads, self.pages * PAGE + spare, dim), dtype=shape.dtype, device=shape.device
                )
                for dim in (shape.key_dim, shape.value_dim)
            )
        return one, other

    def _store_added(self, layer: Added) -> None:
        keys, values = self._store(layer.shape, 1, layer.spare)
        layer.pair = keys[0], values[0]

    def add(self, shapes: Sequence[LayerShape], spare: int, moving: Callable[[], None]) -> list[Added]:
        """Add layers of a head, with so many columns for drafts. If memory then has room for fewer pages, all layers
        are allocated anew, but not while texts are held: then the new ones lie in what memory is left. moving: called
        before the former, to let go of tensors."""
        held, new = self.bytes, [Added(shape, spare) for shape in shapes]
        self._added += new
        try:
            fitting = self._fitting(held)
            if fitting < self.pages and not any(self._rows):
                moving()
                self._allocate(fitting)
            else:
                for layer in new:
                    self._store_added(layer)
        except BaseException:
            self.remove(new)
            raise
        return new

    def remove(self, layers: Sequence[Added]) -> None:
        """Free a head's layers."""
        for layer in layers:
            layer.pair = ()
        self._added = [layer for layer in self._added if layer not in layers]

    @property
    def per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(shape.per_token for shape in self._shapes())

    @property
    def bytes(self) -> int:
        return self.pages * PAGE * self.per_token

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    @property
    def table(self) -> NDArray[np.int32]:
        """(rows, pages) the host's copy of the table."""
        return self._host.numpy()

    @property
    def rows(self) -> int:
        """How many rows of the table were ever in use at the same time."""
        return len(self._rows)

    def tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, (1, heads, columns, dim)."""
        found: list[Any] = [None] * self._layers
        for shape, members in self._members.items():
            for i, layer in enumerate(members):
                found[layer] = tuple(store[i] for store in self._stores[shape])
        yield from found

    def stores(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of all layers of one shape, (layers, 1, heads, columns, dim)."""
        return self._stores.values()

    def release(self) -> None:
        """Free all memory."""
        self._stores.clear()
        self.remove(self._added)
        self._free.clear()
        self.tables = self.tables[:0].clone()

    # ---- sequences

    def open(self) -> Slot:
        slot = Slot(row=self._row())
        self._rows[slot.row] = slot
        return slot

    def _row(self) -> int:
        """A free row of the table."""
        if None not in self._rows:
            if len(self._rows) == ROWS:
                raise ModelError(f"{ROWS} sequences are held already: close some of them")
            self._rows.append(None)
        return self._rows.index(None)

    def select(self, slot: Slot, blocks: Sequence[int]) -> Part:
        """Some pages of a text, as a slot to draft with. They still belong to the text; drafts are written after its
        end, where its own next step writes too."""
        part = Part.of(slot, blocks, PAGE, self._row())
        self._rows[part.row] = part
        return part

    def close(self, slot: Slot) -> None:
        if slot.row < len(self._rows) and self._rows[slot.row] is slot:
            if not isinstance(slot, Part):
                self.shorten(slot, 0)
            self._rows[slot.row] = None

    def shorten(self, slot: Slot, length: int) -> None:
        """Free the pages after the first `length` positions."""
        while len(slot.pages) > _pages(length):
            self._drop(slot.pages.pop())

    def share(self, slot: Slot, twin: Slot) -> None:
        """Let another slot, which has read the same text, share this slot's pages."""
        twin.pages = slot.pages[: _pages(slot.length)]
        for page in twin.pages:
            self._held[page] += 1
        self._note(twin)

    def reach(self, slot: Slot, end: int, start: int | None = None) -> None:
        """Make the positions from `start`, by default the slot's length, to `end` writable: allocate pages, and copy
        shared ones. Raises CacheFullError before anything is changed."""
        if isinstance(slot, Part):
            self.reach(slot.whole, slot.whole.length + end - slot.length)
            pages = slot.whole.pages
            pages = [*(pages[block] for block in slot.blocks), *pages[slot.blocks[-1] + 1 :]]
            if pages != slot.pages:
                slot.pages = pages
                self._note(slot)
            return
        first, needed = (slot.length if start is None else start) // PAGE, _pages(end)
        more = needed - len(slot.pages)
        shared = [i for i, page in enumerate(slot.pages[first:needed], first) if self._held[page] > 1]
        if more <= 0 and not shared:
            return
        if len(shared) + max(0, more) > len(self._free):
            raise CacheFullError(self._too_full(len(shared) + max(0, more)))
        for i in shared:
            slot.pages[i], old = self._take(), slot.pages[i]
            self._copy(old, slot.pages[i])
            self._drop(old)
        slot.pages += [self._take() for _ in range(more)]
        self._note(slot)

    def columns(self, slot: Slot, start: int, count: int) -> NDArray[np.int32]:
        """(count,) the columns of the positions from `start` on."""
        at = np.arange(start, start + count, dtype=np.int32)
        if not count:
            return at
        first = start // PAGE
        pages = np.array(slot.pages[first : _pages(start + count)], np.int32)
        found: NDArray[np.int32] = pages[at // PAGE - first] * PAGE + at % PAGE
        return found

    @torch.inference_mode()
    def move(self, sources: NDArray[np.int32], places: NDArray[np.int32]) -> None:
        for pair in self._stores.values():
            for store in pair:
                source, place = (torch.from_numpy(x).long().to(store.device) for x in (sources, places))
                store[:, 0, :, place] = store[:, 0, :, source]

    def upload_table(self) -> None:
        """Copy changed rows of the table to the device, before the next step: neighbours by one copy."""
        if not self._changed:
            return
        rows = sorted(self._changed)
        ends = [i for i, row in enumerate(rows, 1) if row + 1 not in self._changed]
        with torch.inference_mode():
            for begin, end in zip([0, *ends], ends, strict=False):
                some = slice(rows[begin], rows[end - 1] + 1)
                self.tables[some].copy_(self._host[some], non_blocking=True)
        self._changed.clear()

    # ---- pages

    def _take(self) -> int:
        page = self._free.pop()
        self._held[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._held[page] -= 1
        if not self._held[page]:
            self._free.append(page)

    def _note(self, slot: Slot) -> None:
        self.table[slot.row, : len(slot.pages)] = slot.pages
        self.table[slot.row, len(slot.pages) :] = 0  # nobody's, should anyone write behind a text
        self._changed.add(slot.row)

    @torch.inference_mode()
    def _copy(self, source: int, to: int) -> None:
        for pair in [*self._stores.values(), *(layer.pair for layer in self._added)]:
            for store in pair:
                store[..., to * PAGE : (to + 1) * PAGE, :] = store[..., source * PAGE : (source + 1) * PAGE, :]

    def _too_full(self, needed: int) -> str:
        held = self.pages - 1 - len(self._free)
        return (
            f"the cache is full: {needed} more pages of {PAGE} tokens are needed, {held} of {self.pages - 1} are in "
            f"use ({self.bytes / 2**30:.1f} GiB on {self.device}). Run fewer sequences at a time (max_batch), shorten "
            "the prompts, or use a smaller dtype"
        )
