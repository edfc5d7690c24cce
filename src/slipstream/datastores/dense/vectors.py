"""The files of dense retrieval, and how vectors are grouped in them.

dense/dense.json      the manifest: the model, the settings, the valid parts
dense/transform.vec   from states to vectors
dense/NNNNNNNN.part   vectors of documents, grouped by the token that came next
dense/*.chunk         vectors of a few documents, in no part yet
dense/*.states        states of a few documents, until there is a transform
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.datastores.dense.arrays import AGAIN, Mapped, Plan, writing
from slipstream.datastores.dense.transform import Transform
from slipstream.datastores.dense.vector_manifest import NAME, PartEntry, VectorManifest
from slipstream.datastores.durable.pages import checksum
from slipstream.errors import DamagedError

TRANSFORM = "transform.vec"
Half = NDArray[np.float16]
ROWS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


# ---- the transform


def write_transform(folder: Path, transform: Transform) -> str:
    """Write the transform. Returns its header's checksum, for the manifest."""
    arrays = {name: getattr(transform, name).numpy() for name in ("mean", "scale", "components", "explained")}
    with writing(folder / TRANSFORM, {}, {n: (a.dtype, a.shape) for n, a in arrays.items()}) as into:
        for name, array in arrays.items():
            into[name][:] = array
    return Mapped(folder / TRANSFORM).sum


def read_transform(folder: Path, manifest: VectorManifest) -> Transform | None:
    """Read the transform. None: it is not fitted yet. If it is lost, raise: vectors of a new one could not be compared
    with existing ones."""
    if not (folder / TRANSFORM).exists():
        if manifest.transform or manifest.parts:
            raise DamagedError(
                f"{folder / TRANSFORM} is gone, and vectors that it made are there: put it back, or delete {folder} "
                "and run `slipstream store embed` again"
            )
        return None
    file = Mapped(folder / TRANSFORM)
    if manifest.transform not in ("", file.sum):
        raise DamagedError(
            f"{folder / TRANSFORM} is not the transform that made these vectors: put that back, or delete {folder} and "
            "run `slipstream store embed` again"
        )
    hidden, dims = manifest.origin.hidden, manifest.dims
    file.expect(mean=("<f4", (hidden,)), scale=("<f4", (hidden,)), components=("<f4", (hidden, dims)))
    file.expect(explained=("<f8", (dims,)))
    mean, scale, components, explained = (
        torch.tensor(file[name]) for name in ("mean", "scale", "components", "explained")
    )
    return Transform(mean, scale, components, explained)


# ---- chunks: vectors that are in no part yet, in the order of the documents


@dataclass(frozen=True, eq=False)
class Chunk:
    """Documents, and a row for each position t that can draft, which needs tokens t + 1 (the root) and t + 2."""

    collection: str
    digests: NDArray[np.uint64]  # (documents,)
    lengths: NDArray[np.uint32]  # (documents,)
    following: NDArray[np.uint32]  # (n,) token t + 1
    rows: torch.Tensor  # (n, ·) states, or vectors in half precision


def keys_of(length: Any) -> Any:
    """How many positions of a document, or of each of several, can draft."""
    return np.maximum(np.asarray(length, np.int64) - 2, 0)


def write_chunk(folder: Path, chunk: Chunk, kind: str, transform: str) -> None:
    """kind: chunk or states. transform: checksum of the one that made the vectors. The file's name is a hash of the
    documents, so workers need not agree on names."""
    name = f"{checksum(chunk.digests, checksum(chunk.collection.encode())):016x}.{kind}"
    rows = chunk.rows.contiguous().cpu()
    dtype = str(rows.dtype).removeprefix("torch.")
    data = rows.view(torch.uint8).numpy()  # numpy has no bfloat16
    plan: Plan = {
        "digests": (np.uint64, chunk.digests.shape),
        "lengths": (np.uint32, chunk.lengths.shape),
        "following": (np.uint32, chunk.following.shape),
        "rows": (np.uint8, data.shape),
    }
    facts = {"collection": chunk.collection, "dtype": dtype, "transform": transform}
    with writing(folder / name, facts, plan) as into:
        into["digests"][:], into["lengths"][:], into["following"][:] = chunk.digests, chunk.lengths, chunk.following
        into["rows"][:] = data


def read_chunk(file: Mapped) -> Chunk:
    rows = torch.from_numpy(file["rows"]).view(ROWS[file.facts["dtype"]])
    return Chunk(file.facts["collection"], file["digests"], file["lengths"], file["following"], rows)


def chunks(folder: Path, kind: str, manifest: VectorManifest) -> list[Mapped]:
    """The chunks with intact headers that were made by this transform. Others are deleted: their documents can be read
    again."""
    found = []
    for path in sorted(folder.glob(f"*.{kind}")):
        try:
            file = Mapped(path)
            _expect_chunk(file, kind, manifest)
            found.append(file)
        except DamagedError:
            path.unlink()
    return found


def _expect_chunk(file: Mapped, kind: str, manifest: VectorManifest) -> None:
    facts, size = file.facts, manifest.dims if kind == "chunk" else manifest.origin.hidden
    if type(facts.get("collection")) is not str or facts.get("dtype") not in list(ROWS):  # may be of any type
        raise DamagedError(f"{file.path} does not say whose rows it has")
    if kind == "chunk" and (facts["dtype"] != "float16" or facts.get("transform", "") not in ("", manifest.transform)):
        raise DamagedError(f"{file.path} has vectors of another transform")
    width = size * ROWS[facts["dtype"]].itemsize
    file.expect(
        digests=("<u8", (None,)), lengths=("<u4", (None,)), following=("<u4", (None,)), rows=("|u1", (None, width))
    )
    lengths, following = file["lengths"], file["following"]
    if len(file.array("digests")) != len(lengths) or int(keys_of(lengths).sum()) != len(following):
        raise DamagedError(f"{file.path} has other rows than its documents")
    if len(following) != len(file.array("rows")) or (len(following) and following.max() >= manifest.vocabulary):
        raise DamagedError(f"{file.path} has rows of no token")


# ---- parts


class VectorPart:
    """A mapped part: row i is position offset[i] of document[i]. The rows of a group are contiguous."""

    def __init__(self, folder: Path, manifest: VectorManifest, entry: PartEntry) -> None:
        """Raise unless it is the part that the manifest names."""
        path = folder / entry.name
        self.file = Mapped(path)
        self.path, self.collection = path, entry.collection
        n, documents = entry.vectors, entry.documents
        self.file.expect(digests=("<u8", (documents,)), lengths=("<u4", (documents,)), document=("<u4", (n,)))
        self.file.expect(starts=("<i8", (manifest.vocabulary + 1,)), offset=("<u4", (n,)))
        self.file.expect(vectors=("<f2", (n, manifest.dims)))
        if self.file.facts.get("collection") != entry.collection or entry.sum not in ("", self.file.sum):
            raise DamagedError(f"{path} is not the part that {NAME} names: `slipstream store embed` makes it anew")
        self.vectors: Half = self.file.array("vectors")  # (n, D)
        self.document: NDArray[np.uint32] = self.file.array("document")  # (n,)
        self.offset: NDArray[np.uint32] = self.file.array("offset")  # (n,)

    def __len__(self) -> int:
        return len(self.vectors)

    @cached_property
    def digests(self) -> NDArray[np.uint64]:
        return self.file["digests"]  # (documents,)

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        return self.file["lengths"]  # (documents,)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """(V + 1,) where the group of each token starts."""
        starts = self.file["starts"]
        if starts[0] != 0 or starts[-1] != len(self) or (np.diff(starts) < 0).any():
            raise DamagedError(f"{self.path}: its groups lie outside of it: {AGAIN}")
        return starts

    def group(self, token: int) -> tuple[int, int]:
        """The range of rows with this next token, checked."""
        if not 0 <= token < len(self.starts) - 1:
            return 0, 0
        first, last = int(self.starts[token]), int(self.starts[token + 1])
        self.check(first, last)
        return first, last

    def check(self, first: int, last: int) -> None:
        for name in ("vectors", "document", "offset"):
            self.file.check(name, first, last)

    def verify(self) -> None:
        """Read everything, and raise if anything is wrong."""
        self.file.verify()
        if len(self) and (self.document.max() >= len(self.digests) or self.starts[0] != 0):
            raise DamagedError(f"{self.path}: its rows are of no document: {AGAIN}")
        if len(self) and (self.offset >= np.maximum(keys_of(self.lengths), 1)[self.document]).any():
            raise DamagedError(f"{self.path}: its rows lie outside of their documents: {AGAIN}")


@dataclass(frozen=True, eq=False)
class Piece:
    """Vectors of complete documents, in any order, to be written into a part."""

    digests: NDArray[np.uint64]  # (documents,)
    lengths: NDArray[np.uint32]
    document: NDArray[np.uint32]  # (n,) which of those
    offset: NDArray[np.uint32]  # (n,)
    following: NDArray[np.uint32]  # (n,)
    vectors: Half  # (n, D)


def piece_of(chunk: Chunk) -> Piece:
    counts = keys_of(chunk.lengths)
    document = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    offset = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    vectors = chunk.rows.numpy()
    return Piece(chunk.digests, chunk.lengths, document, offset.astype(np.uint32), chunk.following, vectors)


def pieces_of(part: VectorPart, alive: NDArray[np.bool_], rows: int = 1 << 18) -> Iterator[Piece]:
    """The pieces of a part, some rows at a time, without removed documents."""
    number = np.cumsum(alive, dtype=np.uint32) - np.uint32(1)
    tokens = np.repeat(np.arange(len(part.starts) - 1, dtype=np.uint32), np.diff(part.starts))
    part.check(0, len(part))
    for first in range(0, max(len(part), 1), rows):
        document = part.document[first : first + rows]
        keep = alive[document]
        yield Piece(
            # The first piece has all documents; the rows of the others refer to these.
            part.digests[alive] if first == 0 else part.digests[:0],
            part.lengths[alive] if first == 0 else part.lengths[:0],
            number[document[keep]],
            part.offset[first : first + rows][keep],
            tokens[first : first + rows][keep],
            part.vectors[first : first + rows][keep],
        )


def write_part(
    folder: Path, manifest: VectorManifest, collection: str, sources: Sequence[Any], gone: Sequence[PartEntry] = ()
) -> VectorManifest:
    """Write one part from several sources. Each is a function that yields Pieces, and is called twice: to count, and to
    write. Only one piece is in memory at a time. Returns the manifest with the new part instead of `gone`."""
    counts = np.zeros(manifest.vocabulary, np.int64)
    documents = 0
    for source in sources:
        for piece in source():
            counts += np.bincount(piece.following, minlength=manifest.vocabulary)
            documents += len(piece.digests)
    n = int(counts.sum())
    starts = np.concatenate([[0], np.cumsum(counts)])
    path = folder / f"{manifest.next:08d}.part"
    plan: Plan = {
        "digests": (np.uint64, (documents,)),
        "lengths": (np.uint32, (documents,)),
        "starts": (np.int64, (len(starts),)),
        "document": (np.uint32, (n,)),
        "offset": (np.uint32, (n,)),
        "vectors": (np.float16, (n, manifest.dims)),
    }
    with writing(path, {"collection": collection}, plan) as into:
        into["starts"][:] = starts
        free, base, done = starts[:-1].copy(), 0, 0
        for source in sources:
            base = done  # of this source's documents
            for piece in source():
                into["digests"][done : done + len(piece.digests)] = piece.digests
                into["lengths"][done : done + len(piece.digests)] = piece.lengths
                done += len(piece.digests)
                order = np.argsort(piece.following, kind="stable")
                tokens = piece.following[order]
                fresh = np.flatnonzero(np.append(True, tokens[1:] != tokens[:-1])[: len(tokens)])
                size = np.diff(np.append(fresh, len(tokens)))
                at = np.repeat(free[tokens[fresh]] - fresh, size) + np.arange(len(tokens))
                free[tokens[fresh]] += size
                into["document"][at] = piece.document[order] + np.uint32(base)
                into["offset"][at] = piece.offset[order]
                into["vectors"][at] = piece.vectors[order]
    entry = PartEntry(path.name, collection, documents, n, path.stat().st_size, Mapped(path).sum)
    kept = tuple(e for e in manifest.parts if e not in gone)
    return replace(manifest, parts=(*kept, entry), next=manifest.next + 1)
