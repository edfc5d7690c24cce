"""Approximate search in the groups that are too large to be searched exactly. USearch does it, where it is installed
(`pip install slipstream-llm[dense]`); without it every group is searched exactly.

The graph of a group is a file beside its part, NNNNNNNN.TOKEN.graph, and is used as it lies there, without loading.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.dense.files import Mapped, writing
from slipstream.datastores.dense.vectors import Half, Part
from slipstream.errors import DamagedError

# Chosen by measuring: see docs/log.md.
LARGE = 1 << 14  # vectors of a group that gets a graph
LINKS, MADE = 16, 128  # links of a vector; vectors looked at to place one,
LOOKED = (128, 192, 256, 384, 512, 768)  # and to find some: the first number that finds enough
FOUND = 0.995  # of the ten nearest, which is enough: those who ask find a little less
TRIED = 64  # queries that this is tried with
BETWEEN = 50  # of a stored vector's neighbours, the one that such a query lies half-way to


def installed() -> bool:
    return importlib.util.find_spec("usearch") is not None


def write_graphs(part: Part, large: int = LARGE, progress: Callable[[int, int], None] | None = None) -> None:
    """The graphs that a part lacks, or whose files are damaged. progress: vectors done, of how many."""
    part.check(0, len(part))
    sizes = np.diff(part.starts)
    due = [t for t in np.flatnonzero(sizes > large).tolist() if not _is_whole(path_of(part.path, t))]
    done, total = 0, int(sizes[due].sum())
    for token in due:
        vectors = np.ascontiguousarray(part.vectors[part.starts[token] : part.starts[token + 1]])
        data = graph_bytes(vectors)
        facts = {"looked": enough(Graph(data, vectors.shape[1]), vectors)}
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


def graph_bytes(vectors: Half) -> NDArray[np.uint8]:
    """(n, D) -> a graph of them, which has them too."""
    index = _empty(vectors.shape[1])
    index.add(np.arange(len(vectors)), np.ascontiguousarray(vectors), threads=0)
    return np.frombuffer(index.save(), np.uint8)


def enough(graph: Graph, vectors: Half) -> int:
    """How many vectors must be looked at to find enough of the nearest. Large groups differ in that, and so do small
    ones. What will be asked is not known yet, so points between neighbours stand for it."""
    wide = vectors.astype(np.float32)
    rows = np.linspace(0, len(wide) - 1, min(TRIED, len(wide))).astype(np.int64)
    at = min(BETWEEN, len(wide) - 1)
    others = np.argpartition(-(wide[rows] @ wide.T), at, 1)[:, at]
    queries = wide[rows] + wide[others]
    queries /= np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-6)
    similar = queries @ wide.T  # (queries, n)
    count = min(10, len(wide))
    tenth = np.partition(similar, -count, 1)[:, -count]  # as near as this is near enough
    for looked in LOOKED:
        graph.look_at(looked)
        found = [similar[i, graph.near(query, count)] >= tenth[i] for i, query in enumerate(queries)]
        if np.concatenate(found).sum() >= FOUND * count * len(queries):
            break
    return looked


class Graph:
    """Of one group."""

    def __init__(self, data: NDArray[np.uint8], dims: int, looked: int = LOOKED[0]) -> None:
        self._data = data  # the index points into it
        self._index = _empty(dims)
        self._index.view(self._data)
        self.look_at(looked)

    def look_at(self, vectors: int) -> None:
        """How many a search looks at."""
        self._index.expansion_search = vectors

    def near(self, query: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """The rows of the group, from 0 on, that are probably the nearest."""
        found = self._index.search(query.astype(np.float16), count, threads=1)
        return found.keys.astype(np.int64)


class Graphs:
    """The graphs of a part, each opened when it is first used."""

    def __init__(self, part: Part) -> None:
        self._path, self._dims = part.path, part.vectors.shape[1]
        names = (path.name.split(".") for path in part.path.parent.glob(f"{part.path.stem}.*.graph"))
        self._tokens = {int(token) for _, token, _ in names}
        self._open: dict[int, Graph] = {}

    def get(self, token: int) -> Graph | None:
        if token not in self._tokens:
            return None
        if token not in self._open:
            try:
                file = Mapped(path_of(self._path, token))
                self._open[token] = Graph(file["graph"], self._dims, file.facts.get("looked", LOOKED[0]))
            except FileNotFoundError:  # replaced meanwhile, as its part was
                self._tokens.discard(token)
                return None
        return self._open[token]


def _empty(dims: int) -> Any:
    usearch = importlib.import_module("usearch.index")
    return usearch.Index(ndim=dims, metric="ip", dtype="f16", connectivity=LINKS, expansion_add=MADE)
