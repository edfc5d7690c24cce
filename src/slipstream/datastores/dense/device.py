"""Search on the target's device, where the state is: it never leaves it, only the drafts' places come down.

The work depends on the shapes alone, so that a CUDA graph can hold it: a group is read as so many rows from its start
on, and what lies behind its end does not count. Capacities are powers of two, one graph each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.datastores.dense.finding import Asked, Finder
from slipstream.datastores.dense.live import MOST
from slipstream.datastores.dense.search import Drafts, Found, Vectors, View
from slipstream.datastores.dense.transform import Transform
from slipstream.heads.drafting import Captured

SMALLEST = 256  # rows


def nearest(
    transform: Transform,
    vectors: Tensor,
    capacity: int,
    count: int,
    state: Tensor,
    bounds: Tensor,
    own: Tensor,
) -> Tensor:
    """vectors (n, D), state (H,), bounds (2,) of a group of at most `capacity` rows, own (m, D).

    (2·count + m,) float64: the similarities of the nearest, -inf where there are no more; their rows; those of own.
    """
    query = transform(state)
    rows = bounds[0] + torch.arange(capacity, device=vectors.device)
    inside = rows < bounds[1]
    rows = rows.clamp(max=len(vectors) - 1)
    similarity = (vectors[rows].float() @ query).masked_fill(~inside, -torch.inf)  # (capacity,)
    top = similarity.topk(count)
    return torch.cat((top.values.double(), rows[top.indices].double(), (own.float() @ query).double()))


class Loaded:
    """A collection's vectors on a device: those of all parts as one, without what is gone."""

    def __init__(self, view: View, dims: int, device: torch.device) -> None:
        self.view = view
        keep = [np.flatnonzero(view.alive[i][p.document]) for i, p in enumerate(view.parts)]
        for part in view.parts:
            part.check(0, len(part))
        tokens = [np.searchsorted(p.starts, k, side="right") - 1 for p, k in zip(view.parts, keep, strict=True)]
        none = np.empty(0, np.int64)
        order = np.argsort(np.concatenate([none, *tokens]), kind="stable")
        self.part = np.repeat(np.arange(len(keep)), [len(k) for k in keep])[order]  # (n,)
        self.row = np.concatenate([none, *keep])[order]  # (n,)
        self._tokens = np.concatenate([none, *tokens])[order]  # (n,) ascending
        self.vectors = torch.zeros(max(1, len(order)), dims, dtype=torch.float16, device=device)
        at = np.argsort(order, kind="stable")  # where each of the parts' rows goes
        done = 0
        for part, rows in zip(view.parts, keep, strict=True):
            place = torch.from_numpy(at[done : done + len(rows)]).to(device)
            self.vectors[place] = torch.from_numpy(part.vectors[rows]).to(device)
            done += len(rows)

    def fits(self, view: View) -> bool:
        """Whether a newer view has the same vectors: documents may have moved, or have been added without any."""
        return view is self.view or (
            view.parts == self.view.parts and all(map(np.array_equal, view.alive, self.view.alive))
        )

    def group(self, token: int) -> tuple[int, int]:
        first, last = np.searchsorted(self._tokens, [token, token + 1])
        return int(first), int(last)


class DeviceFinder(Finder):
    """Searches vectors that lie on the target's device."""

    def __init__(self, vectors: Vectors, device: torch.device, count: int, length: int) -> None:
        super().__init__(vectors.transform.to(device), count, length)
        self.vectors, self.device = vectors, device
        self._loaded: dict[str, Loaded] = {}
        self._captured: dict[tuple[str, int], Captured] = {}

    def refresh(self) -> None:
        self.vectors.refresh()

    def near(self, asked: Sequence[Asked]) -> list[Drafts]:
        if not asked:
            return []
        loaded = [self._load(one.collection) for one in asked]
        # A graph writes its next result into the same place.
        there = [self._start(one, held).clone() for one, held in zip(asked, loaded, strict=True)]
        lengths = [len(t) for t in there]
        down = torch.cat(there).cpu().numpy()
        results = np.split(down, np.cumsum(lengths)[:-1])
        return [self._read(*given) for given in zip(asked, loaded, results, strict=True)]

    def _load(self, collection: str) -> Loaded:
        view = self.vectors.view(collection)
        held = self._loaded.get(collection)
        if held is None or not held.fits(view):
            held = self._loaded[collection] = Loaded(view, self.transform.dims, self.device)
            self._captured = {key: c for key, c in self._captured.items() if key[0] != collection}
        held.view = view
        return held

    def _start(self, one: Asked, held: Loaded) -> Tensor:
        first, last = held.group(one.root)
        capacity = max(SMALLEST, self.count, 1 << (last - first - 1).bit_length())
        key = (one.collection, capacity)
        if key not in self._captured:
            function = partial(nearest, self.transform, held.vectors, capacity, self.count)
            self._captured[key] = Captured(function, self.device)
        own = torch.zeros(MOST if one.own is not None else 0, self.transform.dims, device=self.device)
        if one.own is not None and (m := one.own.count(one.root)):
            own[:m] = one.own.rows(one.root)
        result: Tensor = self._captured[key](one.state, torch.tensor([first, last]), own)
        return result

    def _read(self, one: Asked, held: Loaded, result: np.ndarray) -> Drafts:
        similarity, row, own = np.split(result, [self.count, 2 * self.count])
        n = int(np.isfinite(similarity).sum())
        at = row[:n].astype(np.int64)
        found = Found(similarity[:n].astype(np.float32), held.part[at], held.row[at])
        drafts = held.view.read(found, self.length)
        if one.own is None or not (m := one.own.count(one.root)):
            return drafts
        return self.with_own(one, drafts, own[:m].astype(np.float32))
