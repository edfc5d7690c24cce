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
LINKS, MADE, LOOKED = 16, 128, 128  # links of a vector; vectors looked at to place one, and to find some


def installed() -> bool:
    return importlib.util.find_spec("usearch") is not None


def write_graphs(part: Part, large: int = LARGE, progress: Callable[[int, int], None] | None = None) -> None:
    """The graphs that a part lacks, or whose files are damaged. progress: vectors done, of how many."""
    part.check(0, len(part))
    sizes = np.diff(part.starts)
    due = [t for t in np.flatnonzero(sizes > large).tolist() if not _is_whole(path_of(part.path, t))]
    done, total = 0, int(sizes[due].sum())
    for token in due:
        data = graph_bytes(part.vectors[part.starts[token] : part.starts[token + 1]])
        with writing(path_of(part.path, token), {}, {"graph": (np.uint8, data.shape)}) as into:
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


class Graph:
    """Of one group."""

    def __init__(self, data: NDArray[np.uint8], dims: int) -> None:
        self._data = data  # the index points into it
        self._index = _empty(dims)
        self._index.view(self._data)

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
                self._open[token] = Graph(Mapped(path_of(self._path, token))["graph"], self._dims)
            except FileNotFoundError:  # replaced meanwhile, as its part was
                self._tokens.discard(token)
                return None
        return self._open[token]


def _empty(dims: int) -> Any:
    usearch = importlib.import_module("usearch.index")
    return usearch.Index(
        ndim=dims, metric="ip", dtype="f16", connectivity=LINKS, expansion_add=MADE, expansion_search=LOOKED
    )
