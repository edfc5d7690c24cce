"""Search: the positions of a store with states most similar to this one, among those that the same token followed.

A small group is searched exactly, in the half precision that it is stored in; a large one by its graph, and the results
are compared exactly again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.datastores.dense import index
from slipstream.datastores.dense.texts import TextIndex
from slipstream.datastores.dense.transform import Transform
from slipstream.datastores.dense.vector_manifest import FOLDER, Origin, VectorManifest, manifest_bytes, read_manifest
from slipstream.datastores.dense.vectors import VectorPart, read_transform
from slipstream.datastores.durable.contents import RECHECK
from slipstream.datastores.durable.manifest import MOST
from slipstream.datastores.durable.mapping import watching
from slipstream.datastores.durable.store import DEFAULT, Store
from slipstream.datastores.sparse.sort import Tokens
from slipstream.errors import DamagedError, StoreError

Query = NDArray[np.float32]  # (D,) of unit length
AHEAD = 32  # rows that a scan prefetches, since it is faster than memory
LINE = 64  # bytes of a cache line
MORE = 4  # a graph is asked for this many times as many: some may be removed, and its results are approximate


@dataclass(frozen=True, eq=False)
class Nearest:
    """Positions, the most similar first."""

    similarity: NDArray[np.float32]  # (m,)
    part: NDArray[np.int64]  # (m,) which part
    row: NDArray[np.int64]  # (m,) and which row of it

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class Drafts:
    """What followed the root at the most similar positions."""

    similarity: NDArray[np.float32]  # (m,) descending
    tokens: list[Tokens]  # (m,) of up to `length` tokens each


class View:
    """A snapshot of a collection's vectors and of the current places of its documents. It never changes."""

    def __init__(self, parts: Sequence[VectorPart], texts: TextIndex) -> None:
        self.parts, self.texts = tuple(parts), texts
        self.places = [texts.find(part.digests, part.lengths) for part in parts]  # (documents, 2) each
        self.alive = [places[:, 0] >= 0 for places in self.places]
        self._graphs = [index.Graphs(p) if index.installed() else None for p in parts]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def size(self, root: int) -> int:
        """Number of positions in a root's group."""
        groups = [part.group(root) for part in self.parts]
        return sum(last - first for first, last in groups)

    def search(self, query: Query, root: int, count: int, exact: bool = False) -> Nearest:
        """Among the positions that `root` followed. exact: without graphs."""
        best = _Best(query, count)
        for number, part in enumerate(self.parts):
            with watching(part.path):
                first, last = part.group(root)
                graphs = self._graphs[number]
                graph = graphs.get(root, last - first) if graphs is not None and not exact else None
                if graph is None:
                    best.scan(number, part, self.alive[number], first, last)
                else:
                    best.take(number, part, self.alive[number], first + graph.near(query, MORE * count))
        return best.found()

    def search_all(self, query: Query, count: int) -> Nearest:
        """Among all positions, whatever token followed."""
        best = _Best(query, count)
        for number, part in enumerate(self.parts):
            part.check(0, len(part))
            best.scan(number, part, self.alive[number], 0, len(part))
        return best.found()

    def followed_by(self, found: Nearest, root: int) -> Nearest:
        """Those of them that the root followed."""
        groups = np.array([part.group(root) for part in self.parts] or [(0, 0)])[found.part]
        keep = (groups[:, 0] <= found.row) & (found.row < groups[:, 1])
        return Nearest(found.similarity[keep], found.part[keep], found.row[keep])

    def read(self, found: Nearest, length: int) -> Drafts:
        """The tokens after the root at each position."""
        tokens = []
        for number, row in zip(found.part.tolist(), found.row.tolist(), strict=True):
            part = self.parts[number]
            document = int(part.document[row])
            run, start = self.places[number][document].tolist()
            at, end = start + int(part.offset[row]) + 2, start + int(part.lengths[document])
            found_run = self.texts.runs.runs[run]
            some = found_run.tokens[at : min(at + length, end)]
            tokens.append(some[: _until(some, found_run.vocabulary)])
        return Drafts(found.similarity, tokens)


def _until(tokens: Tokens, vocabulary: int) -> int:
    """How many of them are valid tokens: a damaged file may hold others."""
    beyond = np.flatnonzero(tokens >= (vocabulary or MOST))
    return int(beyond[0]) if len(beyond) else len(tokens)


class _Best:
    """The best rows so far."""

    def __init__(self, query: Query, count: int) -> None:
        self.query = np.ascontiguousarray(query, np.float32)
        self.similarity = np.full(count, -np.inf, np.float32)
        self.part, self.row = np.full(count, -1, np.int64), np.full(count, -1, np.int64)

    def scan(self, number: int, part: VectorPart, alive: NDArray[np.bool_], first: int, last: int) -> None:
        bits = part.vectors.view(np.uint16)
        _scan(bits, self.query, first, last, part.document, alive, number, self.similarity, self.part, self.row)

    def take(self, number: int, part: VectorPart, alive: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
        bits = part.vectors.view(np.uint16)
        _take(bits, self.query, rows, part.document, alive, number, self.similarity, self.part, self.row)

    def found(self) -> Nearest:
        n = int((self.row >= 0).sum())
        return Nearest(self.similarity[:n], self.part[:n], self.row[:n])


class Vectors:
    """The vectors of a store, open to be searched."""

    manifest: VectorManifest

    def __init__(self, store: Store, origin: Origin | None = None) -> None:
        """origin: of the model whose states will be searched for. Raise if the vectors are of another model."""
        self.store, self.folder = store, store.folder / FOLDER
        self._parts: dict[str, VectorPart] = {}
        self._views: dict[str, View] = {}
        self._bytes: bytes | None = None
        self._checked = time.monotonic()
        self.refresh()
        if origin is not None:
            self.manifest.expect(self.folder, origin)
        transform = read_transform(self.folder, self.manifest)
        if transform is None:
            raise StoreError(f"{self.folder} is not finished: `slipstream store embed {store.folder}` goes on with it")
        self.transform: Transform = transform

    def refresh(self) -> None:
        """Load what was embedded since, and have pages checked again from time to time."""
        self.store.refresh()
        if time.monotonic() - self._checked > RECHECK:
            self._checked = time.monotonic()
            for part in self._parts.values():
                part.file.doubt()
        while (data := manifest_bytes(self.folder)) != self._bytes:
            manifest = read_manifest(self.folder, data)
            manifest.belongs(self.folder, self.store.manifest.id)
            if manifest.vocabulary != self.store.manifest.vocabulary:
                raise StoreError(
                    f"{self.folder} has vectors of another vocabulary: delete it, and embed the store again"
                )
            try:
                parts = {
                    e.name: self._parts.get(e.name) or VectorPart(self.folder, manifest, e) for e in manifest.parts
                }
            except FileNotFoundError as error:
                if manifest_bytes(self.folder) != data:
                    continue  # parts were merged meanwhile
                raise DamagedError(f"{error.filename} is missing: `slipstream store embed` makes it anew") from error
            self.manifest, self._parts, self._views, self._bytes = manifest, parts, {}, data

    def view(self, collection: str = DEFAULT) -> View:
        """A snapshot of a collection: the same object until something changes."""
        runs = self.store.runs(collection)
        known = self._views.get(collection)
        if known is None or known.texts.runs is not runs:
            parts = [p for p in self._parts.values() if p.collection == collection]
            known = self._views[collection] = View(parts, TextIndex(runs))
        return known


# ---- compiled


@intrinsic
def _half(_context, _bits):  # type: ignore[no-untyped-def]
    """The float32 of a half-precision number given as 16 bits."""

    def build(_, builder, __, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], cgutils.ir.HalfType()), cgutils.ir.FloatType())

    return types.float32(types.uint16), build


@intrinsic
def _expect(_context, vectors, _row):  # type: ignore[no-untyped-def]
    """Prefetch a row of a matrix. It may lie beyond the end."""

    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        matrix = context.make_array(signature.args[0])(context, builder, arguments[0])
        long, integer, pointer = cgutils.ir.IntType(64), cgutils.ir.IntType(32), cgutils.voidptr_t
        stride, _ = cgutils.unpack_tuple(builder, matrix.strides, 2)
        start = builder.add(builder.ptrtoint(matrix.data, long), builder.mul(arguments[1], stride))
        kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [pointer, integer, integer, integer])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = integer(0), integer(3), integer(1)
        with cgutils.for_range_slice(builder, long(0), stride, long(LINE), intp=long) as (offset, _):
            builder.call(prefetch, [builder.inttoptr(builder.add(start, offset), pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(vectors, types.int64), build


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _similarity(vectors, query, row):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for j in range(len(query)):
        total += _half(vectors[row, j]) * query[j]
    return total


@compiled
def _insert(value, number, row, similarity, part, rows):  # type: ignore[no-untyped-def]
    """Insert into the sorted best rows, after equal ones."""
    at = len(rows) - 1
    while at > 0 and similarity[at - 1] < value:
        similarity[at], part[at], rows[at] = similarity[at - 1], part[at - 1], rows[at - 1]
        at -= 1
    similarity[at], part[at], rows[at] = value, number, row


@compiled
def _scan(vectors, query, first, last, document, alive, number, similarity, part, rows):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        _expect(vectors, row + AHEAD)
        value = _similarity(vectors, query, row)
        if value > similarity[-1] and document[row] < len(alive) and alive[document[row]]:
            _insert(value, number, row, similarity, part, rows)


@compiled
def _take(vectors, query, given, document, alive, number, similarity, part, rows):  # type: ignore[no-untyped-def]
    for row in given:
        if row < 0 or row >= len(vectors):
            continue
        value = _similarity(vectors, query, row)
        if value > similarity[-1] and document[row] < len(alive) and alive[document[row]]:
            _insert(value, number, row, similarity, part, rows)
