"""Approximate search in groups that are too large for exact search, by USearch (`pip install slipstream-llm[dense]`).
Without it, every group is searched exactly.

The graph of a group is a file next to its part, NNNNNNNN.TOKEN.graph, and is used memory-mapped.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.dense.arrays import AGAIN, Mapped, writing
from slipstream.datastores.dense.vectors import Half, VectorPart
from slipstream.errors import DamagedError

# Chosen by measuring: see docs/log/dense.md.
LARGE = 1 << 15  # groups with more vectors get a graph
LINKS, MADE = 16, 256  # links per vector; vectors visited to insert one
LOOKED = (128, 192, 256, 384)  # vectors visited in a search: the first number that reaches FOUND is used
FOUND = 0.995  # recall of the ten nearest. Recall is lower for texts that are unlike the store's
TRIED = 100  # vectors by which recall is measured, before they are stored themselves


def installed() -> bool:
    return importlib.util.find_spec("usearch") is not None


def write_graphs(part: VectorPart, large: int = LARGE, progress: Callable[[int, int], None] | None = None) -> None:
    """Write graphs of a part that are missing or damaged. progress: vectors done, vectors in all."""
    part.check(0, len(part))
    sizes = np.diff(part.starts)
    due = [t for t in np.flatnonzero(sizes > large).tolist() if not _is_whole(path_of(part.path, t))]
    done, total = 0, int(sizes[due].sum())
    for token in due:
        data, looked = graph_of(part.vectors[part.starts[token] : part.starts[token + 1]])
        facts = {"looked": looked, "part": part.file.sum}
        with writing(path_of(part.path, token), facts, {"graph": (np.uint8, data.shape)}) as into:
            into["graph"][:] = data
        done += int(sizes[token])
        if progress is not None:
            progress(done, total)


def _is_whole(path: Path) -> bool:
    try:
        Mapped(path).verify()
    except (FileNotFoundError, DamagedError):
        return False
    return True


def path_of(part: Path, token: int) -> Path:
    return part.with_name(f"{part.stem}.{token}.graph")


def graph_of(vectors: Half) -> tuple[NDArray[np.uint8], int]:
    """A graph of (n, D), with the vectors in it, and how many must be visited in a search to reach FOUND, which differs
    between groups."""
    vectors, index = np.ascontiguousarray(vectors), empty(vectors.shape[1])
    tried = np.unique(np.linspace(0, len(vectors) - 1, TRIED).astype(np.int64))
    first = np.delete(np.arange(len(vectors)), tried)
    looked = LOOKED[0]
    if len(first):
        index.add(first, vectors[first], threads=0)
        looked = _enough(index, vectors, first, tried)
    index.add(tried, vectors[tried], threads=0)
    return np.frombuffer(index.save(), np.uint8), looked


def _enough(index: Any, vectors: Half, stored: NDArray[np.int64], tried: NDArray[np.int64]) -> int:
    similar = vectors[tried].astype(np.float32) @ vectors.astype(np.float32).T  # (tried, n)
    count = min(10, len(stored))
    tenth = np.partition(similar[:, stored], -count, 1)[:, -count, None]  # anything at least as near counts as found
    for looked in LOOKED:
        index.expansion_search = looked
        found = index.search(vectors[tried], count, threads=1).keys.astype(np.int64)  # (tried, count)
        if (np.take_along_axis(similar, found, 1) >= tenth).mean() >= FOUND:
            break
    return looked


class Graph:
    """The graph of one group."""

    def __init__(self, data: NDArray[np.uint8], dims: int, looked: int = LOOKED[0]) -> None:
        self._data = data  # the index points into it
        self._index = empty(dims)
        self._index.view(self._data)
        self._index.expansion_search = looked

    def __len__(self) -> int:
        return len(self._index)

    def near(self, query: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """The rows within the group that are probably the nearest."""
        found = self._index.search(query.astype(np.float16), count, threads=1)
        return found.keys.astype(np.int64)


class Graphs:
    """The graphs of a part, each opened when it is first used."""

    def __init__(self, part: VectorPart) -> None:
        self._path, self._dims, self._sum = part.path, part.vectors.shape[1], part.file.sum
        names = (path.name.split(".") for path in part.path.parent.glob(f"{part.path.stem}.*.graph"))
        self._tokens = {int(name[1]) for name in names if len(name) == 3 and name[1].isdecimal()}
        self._open: dict[int, Graph] = {}

    def get(self, token: int, size: int) -> Graph | None:
        """size: rows of the group. A graph of another size was made for another part, and is not used."""
        if token not in self._tokens:
            return None
        if token not in self._open:
            try:
                file = Mapped(path_of(self._path, token))
                looked = file.facts.get("looked", LOOKED[0])
                if type(looked) is not int or not 1 <= looked <= LOOKED[-1]:
                    raise DamagedError(f"{file.path} says that {looked!r:.80} vectors are looked at: {AGAIN}")
                graph = Graph(file.whole("graph"), self._dims, looked)
                if file.facts.get("part", self._sum) != self._sum or len(graph) != size:
                    raise DamagedError(f"{file.path} is the graph of another part: {AGAIN}")
                self._open[token] = graph
            except FileNotFoundError:  # replaced meanwhile, as its part was
                self._tokens.discard(token)
                return None
        return self._open[token]


def empty(dims: int, made: int = MADE) -> Any:
    """An empty graph."""
    usearch = importlib.import_module("usearch.index")
    return usearch.Index(ndim=dims, metric="ip", dtype="f16", connectivity=LINKS, expansion_add=made)
