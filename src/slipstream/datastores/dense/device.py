"""Search on the target's device: states stay there, and only the places of drafts are copied to the host.

A whole batch is searched at once: on a GPU by a captured function of the states and the groups' bounds (`scan.py`),
elsewhere in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.datastores.dense.finding import Asked, Finder
from slipstream.datastores.dense.live_vectors import MOST
from slipstream.datastores.dense.nearest import Drafts, Nearest, Vectors, View
from slipstream.datastores.dense.transform import Transform
from slipstream.targets.captured.function import Captured
from slipstream.targets.captured.graph_target import BATCHES, bucket

NONE = -(1 << 63)  # no row


def nearest(
    transform: Transform, vectors: Tensor, count: int, states: Tensor, bounds: Tensor, own: Tensor | None = None
) -> Tensor:
    """vectors (n, D), states (b, H), bounds (b, 2): the range of rows for each; own (b, m, D) float32, m even.

    Returns (b, count + m / 2) int64: the nearest rows in the form of `packed`, the best first, NONE if there are fewer;
    then the similarities of own, two in each number.
    """
    if vectors.device.type == "cuda":
        from slipstream.datastores.dense.scan import nearest_rows

        best, queries = nearest_rows(transform, vectors, count, states, bounds)
    else:
        best, queries = nearest_plainly(transform, vectors, count, states, bounds)
    if own is None:
        return best
    return torch.cat((best, torch.bmm(own, queries[:, :, None])[:, :, 0].view(torch.int64)), dim=1)


def nearest_plainly(
    transform: Transform, vectors: Tensor, count: int, states: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor]:
    """`scan.nearest_rows` in plain torch."""
    queries = transform(states)
    best = torch.full((len(states), count), NONE, device=vectors.device)
    for place, query, (first, last) in zip(best, queries, bounds.tolist(), strict=True):
        similarity = vectors[first:last].float() @ query
        keys = packed(similarity, torch.arange(first, last, device=vectors.device))
        top = keys[~similarity.isnan()].sort(descending=True).values[:count]
        place[: len(top)] = top
    return best, queries


def packed(similarity: Tensor, row: Tensor) -> Tensor:
    """Similarity and row as one int64, which grows with the similarity. In a tie the earlier row is larger.

    Read as an integer, a float's bits have the same order if it is positive, and the reverse if it is negative.
    """
    bits = similarity.float().view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.long() << 32) + (0xFFFFFFFF - row)


def unpacked(keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The similarities and rows, without entries that are NONE."""
    order = (keys >> 32).astype(np.int32)
    there = order > np.iinfo(np.int32).min
    order, row = order[there], 0xFFFFFFFF - (keys[there] & 0xFFFFFFFF)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).view(np.float32), row


class Loaded:
    """A collection's vectors on a device: all parts together, without removed documents."""

    def __init__(self, view: View, transform: Transform, count: int, device: torch.device) -> None:
        self.view = view
        keep = [np.flatnonzero(view.alive[i][p.document]) for i, p in enumerate(view.parts)]
        for part in view.parts:
            part.check(0, len(part))
        tokens = [np.searchsorted(p.starts, k, side="right") - 1 for p, k in zip(view.parts, keep, strict=True)]
        none = np.empty(0, np.int64)
        order = np.argsort(np.concatenate([none, *tokens]), kind="stable")
        self.part = np.repeat(np.arange(len(keep)), [len(k) for k in keep])[order]  # (n,)
        self.row = np.concatenate([none, *keep])[order]  # (n,)
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(np.concatenate([none, *tokens])))])
        self.vectors = torch.zeros(max(1, len(order)), transform.dims, dtype=torch.float16, device=device)
        at = np.argsort(order, kind="stable")  # where each of the parts' rows goes
        done = 0
        for part, rows in zip(view.parts, keep, strict=True):
            place = torch.from_numpy(at[done : done + len(rows)]).to(device)
            self.vectors[place] = torch.from_numpy(part.vectors[rows]).to(device)
            done += len(rows)
        search = partial(nearest, transform, self.vectors, count)
        self._search = Captured(lambda bounds, states, *own: search(states, bounds, *own), device)

    def __len__(self) -> int:
        return len(self.row)

    def search(self, bounds: Tensor, *states: Tensor) -> NDArray[np.int64]:
        """See `nearest`. bounds and the result are on the host; the result is valid until the next search."""
        return self._search.fetch(bounds, *states).numpy()

    def fits(self, view: View) -> bool:
        """Whether a newer view has the same vectors. Documents may have moved, or been added without vectors."""
        return view is self.view or (
            view.parts == self.view.parts and all(map(np.array_equal, view.alive, self.view.alive))
        )

    def group(self, token: int) -> tuple[int, int]:
        if token >= len(self._starts) - 1:
            return 0, 0
        return int(self._starts[token]), int(self._starts[token + 1])


class DeviceFinder(Finder):
    """Searches vectors that lie on the target's device."""

    def __init__(
        self, vectors: Vectors, device: torch.device, count: int, length: int, unfiltered: bool = False
    ) -> None:
        """unfiltered: as in `HostFinder`."""
        super().__init__(vectors.transform.to(device), count, length)
        self.vectors, self.device, self.unfiltered = vectors, device, unfiltered
        self._loaded: dict[str, Loaded] = {}

    def refresh(self) -> None:
        self.vectors.refresh()

    def near(self, asked: Sequence[Asked]) -> list[Drafts]:
        found: dict[int, Drafts] = {}
        for collection in dict.fromkeys(one.collection for one in asked):
            mine = [i for i, one in enumerate(asked) if one.collection == collection]
            drafts = self._near([asked[i] for i in mine], self._load(collection))
            found |= zip(mine, drafts, strict=True)
        return [found[i] for i in range(len(asked))]

    def _load(self, collection: str) -> Loaded:
        view = self.vectors.view(collection)
        held = self._loaded.get(collection)
        if held is None or not held.fits(view):
            self._loaded.pop(collection, None)  # first, since there may be no room for both
            held = self._loaded[collection] = Loaded(view, self.transform, self.count, self.device)
        held.view = view
        return held

    def _near(self, asked: list[Asked], held: Loaded) -> list[Drafts]:
        if not len(held) and all(one.own is None for one in asked):  # clients name collections: no capture for each
            return [Drafts(np.empty(0, np.float32), []) for _ in asked]
        batch = bucket(len(asked), BATCHES)
        padded = [*asked, *asked[:1] * (batch - len(asked))]
        groups = [(0, len(held)) if self.unfiltered else held.group(one.root) for one in padded]
        states = [torch.stack([one.state for one in padded])]
        if any(one.own is not None for one in asked):
            states.append(self._own(padded))
        results = held.search(torch.tensor(groups), *states)
        return [self._read(one, held, result) for one, result in zip(asked, results[: len(asked)], strict=True)]

    def _own(self, asked: Sequence[Asked]) -> Tensor:
        """(b, MOST, D)"""
        own = torch.zeros(len(asked), MOST, self.transform.dims, device=self.device)
        for place, one in zip(own, asked, strict=True):
            if one.own is not None and (m := one.own.count(one.root)):
                place[:m] = one.own.rows(one.root)
        return own

    def _read(self, one: Asked, held: Loaded, result: NDArray[np.int64]) -> Drafts:
        similarity, at = unpacked(result[: self.count])
        if self.unfiltered:
            first, last = held.group(one.root)
            keep = (first <= at) & (at < last)
            similarity, at = similarity[keep], at[keep]
        drafts = held.view.read(Nearest(similarity, held.part[at], held.row[at]), self.length)
        if one.own is None or not (m := one.own.count(one.root)):
            return drafts
        return self.with_own(one, drafts, result[self.count :].view(np.float32)[:m].copy())
