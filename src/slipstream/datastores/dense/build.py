"""Build: the target reads every document of a store, and its states become vectors.

First come states of a sample, to fit the transform; then vectors of all documents, in chunks of a few documents; then a
part that groups them. Every file is complete or absent and identifies its documents by their content. So after an
interruption the same call continues, and only chunks that were being read are read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.datastores.dense import index
from slipstream.datastores.dense.arrays import Mapped
from slipstream.datastores.dense.reading import Load, Reader, ReaderProcesses, ReaderThreads
from slipstream.datastores.dense.texts import TextIndex
from slipstream.datastores.dense.transform import Moments, Transform
from slipstream.datastores.dense.vector_manifest import (
    FOLDER,
    NAME,
    Origin,
    VectorManifest,
    read_manifest,
    write_manifest,
)
from slipstream.datastores.dense.vectors import (
    TRANSFORM,
    Chunk,
    Piece,
    VectorPart,
    chunks,
    keys_of,
    piece_of,
    pieces_of,
    read_chunk,
    read_transform,
    write_chunk,
    write_part,
    write_transform,
)
from slipstream.datastores.durable.lock import Lock
from slipstream.datastores.durable.store import Store
from slipstream.datastores.sparse.sort import Tokens
from slipstream.errors import DamagedError, OptionError, StoreError
from slipstream.workers import Workers

log = logging.getLogger("slipstream")

Progress = Callable[[str, int, int], None]  # stage, positions done, positions in all
USUAL = 64  # default dimensions of a vector
FEW = 4  # more parts of a collection are merged


@dataclass(frozen=True)
class EmbedSettings:
    dims: int | None = None  # dimensions of a vector; None: as the store's vectors; if there are none, 64 at most
    window: int = 1024  # tokens that the model reads at a time
    overlap: int = 256  # tokens of the previous window that a window repeats as context
    sample: int = 1_000_000  # positions that the transform is fitted on
    batch_tokens: int = 4096  # tokens of a forward, padding included
    chunk_tokens: int = 1 << 15  # tokens of a chunk: the most that a worker loses when it is killed

    def __post_init__(self) -> None:
        dims = 1 if self.dims is None else self.dims
        if min(dims, self.window, self.sample, self.batch_tokens, self.chunk_tokens) < 1:
            raise OptionError(f"dims, window, sample, batch_tokens and chunk_tokens must be at least 1, found {self}")
        if not 0 <= self.overlap < self.window:
            raise OptionError(f"0 <= overlap < window must hold, found {self.overlap} and {self.window}")


@dataclass(frozen=True)
class Embedded:
    """The result of `embed`."""

    documents: int  # read by this call
    vectors: int  # added to the store by this call
    known: int  # documents that were read before
    dims: int
    explained: float  # share of the states' variance that the vectors keep


@dataclass(frozen=True, eq=False)
class Unread:
    collection: str
    digest: int
    tokens: Tokens


def embed(
    store: Store,
    loads: Sequence[Load],
    settings: EmbedSettings | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> Embedded:
    """Make the vectors that a store lacks. loads: one per worker; a single one runs in this process. workers: used
    instead, if given; they have loaded a `reader` and see the store's folder, and are not closed."""
    folder = store.folder / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} can't be made: {error}") from error
    lock = Lock(folder)
    try:
        own = workers or (ReaderThreads(loads[0]) if len(loads) == 1 else ReaderProcesses(loads))
        try:
            return _Build(store, folder, own, settings or EmbedSettings(), progress or (lambda *_: None)).run()
        finally:
            if workers is None:
                own.close()
    except BrokenProcessPool as error:
        raise StoreError("a worker ended before its time: the same call goes on from what is there") from error
    except OSError as error:
        raise StoreError(
            f"{folder}: the disk or the file system failed ({error}); the same call goes on then"
        ) from error
    finally:
        lock.close()


class _Build:
    def __init__(
        self, store: Store, folder: Path, workers: Workers, settings: EmbedSettings, progress: Progress
    ) -> None:
        self.store, self.folder, self.workers = store, folder, workers
        self.settings, self.progress = settings, progress
        self.done = self.total = 0  # positions that this build has read, and that it has to read
        origin, context = workers.submit(_about).result()
        if (folder / NAME).exists():
            self.manifest = self._continued(origin)
        else:
            window = min(settings.window, context)
            dims = min(USUAL, origin.hidden) if settings.dims is None else settings.dims
            if dims > origin.hidden:
                raise OptionError(
                    f"vectors of {dims} numbers can't be made of states that have {origin.hidden}: ask for fewer"
                )
            overlap = settings.overlap * window // settings.window  # as large a share of a shorter window
            self.manifest = VectorManifest(
                origin, store.manifest.vocabulary, dims, window, overlap, store=store.manifest.id
            )
            write_manifest(folder, self.manifest)
        self.texts = {c: TextIndex(store.runs(c)) for c in store.collections}

    def _continued(self, origin: Origin) -> VectorManifest:
        """The existing manifest without damaged parts. The transform stays, so what it depends on must be the same."""
        manifest = read_manifest(self.folder)
        manifest.expect(self.folder, origin)
        manifest.belongs(self.folder, self.store.manifest.id)
        if self.settings.dims not in (None, manifest.dims):
            raise StoreError(
                f"{self.folder} has vectors of {manifest.dims} numbers, not {self.settings.dims}: go on with those, or "
                "delete it"
            )
        whole = []
        for entry in manifest.parts:
            try:
                part = VectorPart(self.folder, manifest, entry)
                part.verify()
                whole.append(replace(entry, sum=part.file.sum))
            except (DamagedError, FileNotFoundError) as error:
                log.warning("a part of the vectors is lost, so its documents are read again: %s", error)
        transform = read_transform(self.folder, manifest)
        made = Mapped(self.folder / TRANSFORM).sum if transform is not None else ""
        return replace(manifest, parts=tuple(whole), store=self.store.manifest.id, transform=made)

    def run(self) -> Embedded:
        self._sweep()
        due = self._due()
        known = sum(1 for texts in self.texts.values() for _ in texts.documents()) - len(due)
        self.total = sum(int(keys_of(len(d.tokens))) for d in due)
        transform = read_transform(self.folder, self.manifest) or self._fit(due)
        self._reduce(transform)
        self._read(self._due(), "reading", transform)
        made = self._group()
        self._merge()
        self._link()
        return Embedded(len(due), made, known, transform.dims, float(transform.explained.sum()))

    def _sweep(self) -> None:
        """Remove useless files of a killed build."""
        self._drop_unnamed()
        for path in self.folder.glob("*.making"):
            path.unlink()
        for kind in ("chunk", "states"):
            for file in chunks(self.folder, kind, self.manifest):
                try:
                    file.verify()
                    useless = bool(np.isin(file["digests"], self._in_parts(file.facts["collection"])).all())
                except DamagedError:
                    useless = True
                if useless:
                    file.path.unlink()

    def _drop_unnamed(self) -> None:
        """Remove parts that the manifest doesn't name, and their graphs."""
        named = {e.name.partition(".")[0] for e in self.manifest.parts}
        for path in (*self.folder.glob("*.part"), *self.folder.glob("*.graph")):
            if path.name.partition(".")[0] not in named:
                path.unlink()

    def _in_parts(self, collection: str) -> NDArray[np.uint64]:
        parts = [
            VectorPart(self.folder, self.manifest, e).digests for e in self.manifest.parts if e.collection == collection
        ]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def _due(self) -> list[Unread]:
        """Documents that are in no file yet, in the order of digests."""
        there = {c: set(self._in_parts(c).tolist()) for c in self.texts}
        for file in (*chunks(self.folder, "chunk", self.manifest), *chunks(self.folder, "states", self.manifest)):
            there.setdefault(file.facts["collection"], set()).update(file["digests"].tolist())
        found = [
            Unread(collection, digest, tokens)
            for collection, texts in self.texts.items()
            for digest, tokens in texts.documents()
            if digest not in there[collection]
        ]
        return sorted(found, key=lambda d: d.digest)

    def _fit(self, due: list[Unread]) -> Transform:
        """Read documents in the order of digests, which is random, until there are enough positions, and fit the
        transform. Their states are kept on the disk, so that they need not be read again."""
        have = sum(len(file.array("rows")) for file in chunks(self.folder, "states", self.manifest))
        keys = np.cumsum([have, *(int(keys_of(len(d.tokens))) for d in due)])
        self._read(due[: int(np.searchsorted(keys, self.settings.sample))], "sampling", None)
        self.progress("fitting", self.done, self.total)
        moments = Moments(self.manifest.origin.hidden, "cuda" if torch.cuda.is_available() else "cpu")
        for file in chunks(self.folder, "states", self.manifest):
            moments.add(read_chunk(file).rows)
        transform = moments.fit(self.manifest.dims)
        self.manifest = replace(self.manifest, transform=write_transform(self.folder, transform))
        write_manifest(self.folder, self.manifest)
        return transform

    def _reduce(self, transform: Transform) -> None:
        """Turn the states of the sample into vectors."""
        for file in chunks(self.folder, "states", self.manifest):
            if not file.path.with_suffix(".chunk").exists():
                chunk = read_chunk(file)
                made = replace(chunk, rows=transform(chunk.rows).half())
                write_chunk(self.folder, made, "chunk", self.manifest.transform)
            file.path.unlink()

    def _read(self, due: list[Unread], doing: str, transform: Transform | None) -> None:
        running: set[Future[int]] = set()
        jobs = portions(due, self.settings.chunk_tokens)
        self.progress(doing, self.done, self.total)
        try:
            while True:
                while len(running) < 2 * self.workers.count and (job := next(jobs, None)) is not None:
                    given = (self.folder, self.manifest, self.settings.batch_tokens, job, transform)
                    running.add(self.workers.submit(_write, *given))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                self.done += sum(future.result() for future in ended)
                self.progress(doing, self.done, self.total)
        finally:
            for future in running:
                future.cancel()

    def _group(self) -> int:
        """Make a part from each collection's chunks."""
        made = 0
        collections: dict[str, list[Path]] = {}
        for file in chunks(self.folder, "chunk", self.manifest):
            collections.setdefault(file.facts["collection"], []).append(file.path)
        for collection, paths in collections.items():
            self.progress("grouping", self.done, self.total)
            self.manifest = write_part(self.folder, self.manifest, collection, [partial(_pieces, p) for p in paths])
            made += self.manifest.parts[-1].vectors
            write_manifest(self.folder, self.manifest)
            for path in paths:
                path.unlink()
        return made

    def _merge(self) -> None:
        """Merge a collection's parts if there are too many, or if many of their vectors are of removed documents."""
        for collection, texts in self.texts.items():
            entries = [e for e in self.manifest.parts if e.collection == collection]
            parts = [VectorPart(self.folder, self.manifest, e) for e in entries]
            alive = [texts.find(p.digests, p.lengths)[:, 0] >= 0 for p in parts]
            dead = sum(int(keys_of(p.lengths[~a]).sum()) for p, a in zip(parts, alive, strict=True))
            if len(parts) > FEW or 4 * dead > sum(map(len, parts)):
                self.progress("merging", self.done, self.total)
                sources = [partial(pieces_of, p, a) for p, a in zip(parts, alive, strict=True)]
                self.manifest = write_part(self.folder, self.manifest, collection, sources, gone=entries)
                write_manifest(self.folder, self.manifest)
        self._drop_unnamed()

    def _link(self) -> None:
        """Make graphs for large groups, if the library is installed."""
        if index.installed():
            for entry in self.manifest.parts:
                index.write_graphs(
                    VectorPart(self.folder, self.manifest, entry), progress=partial(self.progress, "linking")
                )


def portions(documents: Iterable[Unread], tokens: int) -> Iterator[list[Unread]]:
    """Groups of documents of one collection, of about so many tokens."""
    waiting: dict[str, list[Unread]] = {}
    sizes: dict[str, int] = {}
    for document in documents:
        c = document.collection
        waiting.setdefault(c, []).append(document)
        sizes[c] = sizes.get(c, 0) + len(document.tokens)
        if sizes[c] >= tokens:
            yield waiting.pop(c)
            sizes[c] = 0
    yield from waiting.values()


def _pieces(path: Path) -> Iterator[Piece]:
    yield piece_of(read_chunk(Mapped(path)))


def _about(reader: Reader) -> tuple[Origin, int]:
    return reader.origin, reader.context


def _write(
    reader: Reader,
    folder: Path,
    manifest: VectorManifest,
    batch_tokens: int,
    documents: list[Unread],
    transform: Transform | None,
) -> int:
    """Read documents and write their file: vectors, or states without a transform. Returns the number of rows."""
    rows = reader.rows([d.tokens for d in documents], manifest.window, manifest.overlap, batch_tokens, transform)
    digests = np.array([d.digest for d in documents], np.uint64)
    lengths = np.array([len(d.tokens) for d in documents], np.uint32)
    following = np.concatenate([np.empty(0, np.uint32), *(d.tokens[1:-1].astype(np.uint32) for d in documents)])
    chunk = Chunk(documents[0].collection, digests, lengths, following, rows)
    write_chunk(folder, chunk, "states" if transform is None else "chunk", manifest.transform)
    return len(rows)
