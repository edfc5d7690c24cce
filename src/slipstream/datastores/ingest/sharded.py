"""Ingest in shards, on any number of workers. The segments are the same as those that `ingest` makes.

    sources → shards ─ read ─→ tokens ─ plan ─→ segments ─ write ─→ the store takes all of them in one moment
                      workers           here              workers

Both kinds of jobs are deterministic and write one file, whose name is a hash of their inputs. So a job of a worker that
dies can be repeated by any other, and files that exist after an interruption are reused. The files are in the store's
folder, which all workers must see, until the store has adopted the segments.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.durable.disk import sync_folder
from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.memory import Memory, content_of_run
from slipstream.datastores.durable.segment import Segment, write_segment
from slipstream.datastores.durable.store import DEFAULT, Document, Store
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.ingest import (
    Ingested,
    Progress,
    as_stored,
    cuts,
    document_hash,
    encoded,
    is_new,
    longest_segment,
    pieces_of,
)
from slipstream.datastores.ingest.sources import SourceFile
from slipstream.datastores.sparse.runs import Pieces
from slipstream.errors import StoreError
from slipstream.workers import Workers, results

FOLDER = "parts"
SHARD_BYTES = 16 << 20  # of source files: some seconds of work, which are lost if a worker dies


@dataclass(frozen=True)
class Build:
    """What all jobs of one build have in common."""

    folder: Path  # for intermediate files
    collection: str
    field: str | None
    deduplicate: bool
    segment_tokens: int
    tokenizer: str  # fingerprint
    vocabulary: int
    width: int  # bits of a token
    store: str  # its id
    generation: int
    made_from: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, store: Store, collection: str, field: str | None, deduplicate: bool) -> Build:
        m = store.manifest
        return cls(
            store.folder / FOLDER, collection, field, deduplicate, store.segment_tokens, m.tokenizer,
            m.vocabulary, m.width, m.id, m.generation, store.contents.origin,
        )  # fmt: skip

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.width // 8}")

    def file(self, kind: str, *made_from: Any) -> Path:
        """The file of a job. Its name is a digest of everything that the contents depend on."""
        about = repr((self.field, self.segment_tokens, self.tokenizer, *made_from))
        return self.folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.{kind}"


@dataclass(frozen=True)
class Shard:
    """Sources that one worker reads."""

    build: Build
    sources: tuple[SourceFile, ...]

    @property
    def file(self) -> Path:
        return self.build.file("tokens", self.sources)


@dataclass(frozen=True, eq=False)
class Tokenised:
    """A shard after tokenisation: its documents, and an empty mark after those of each source."""

    shard: Shard
    lengths: NDArray[np.uint32]  # (n,) tokens of each; 0 is a mark
    hashes: NDArray[np.uint64]  # (n,) to find equal documents; empty without deduplication


@dataclass(frozen=True, eq=False)
class Plan:
    """A segment to be written: which documents of which shards, in order."""

    build: Build
    parts: list[tuple[Shard, NDArray[np.int64]]] = field(default_factory=list)

    @property
    def file(self) -> Path:
        b = self.build
        names = [(shard.file.name, hashlib.sha256(kept.tobytes()).hexdigest()) for shard, kept in self.parts]
        return b.file("seg", names, b.collection, b.vocabulary, b.store, b.generation, b.made_from)


def ingest_sharded(
    store: Store,
    sources: Sequence[SourceFile],
    workers: Workers,
    *,
    collection: str = DEFAULT,
    field: str | None = None,
    deduplicate: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Ingested:
    """Fill a new store, with workers that have loaded an Encoder. After an interruption, the same call continues."""
    known = store.sources(collection)
    entries = [known.get(s.name, SourceEntry(s.name, 0, complete=False)) for s in as_stored(sources, known)]
    if all(e.complete and (e.size, e.modified) == (s.size, s.modified) for e, s in zip(entries, sources, strict=True)):
        shutil.rmtree(store.folder / FOLDER, ignore_errors=True)  # it was interrupted after everything was done
        return Ingested(known=len(sources))
    if known or store.waiting:
        raise StoreError(f"{store.folder} was begun by one machine alone: go on without workers, or in a new folder")
    build = Build.of(store, collection, field, deduplicate)
    build.folder.mkdir(exist_ok=True)
    counts = Ingested()
    read = results(workers, read_shard, shards(build, sources, shard_bytes))
    reported = _with_progress(read, sum(s.size for s in sources), counts, progress)
    made = list(results(workers, write_planned, plans(build, reported, counts)))
    store.contents.adopt(made)
    shutil.rmtree(build.folder)
    return counts


def shards(build: Build, sources: Sequence[SourceFile], size: int) -> Iterator[Shard]:
    """Consecutive sources of about so many bytes together."""
    waiting: list[SourceFile] = []
    for source in sources:
        if waiting and sum(s.size for s in waiting) + source.size > size:
            yield Shard(build, tuple(waiting))
            waiting = []
        waiting.append(source)
    if waiting:
        yield Shard(build, tuple(waiting))


def read_shard(encoder: Encoder, shard: Shard) -> Tokenised:
    """Tokenise a shard, unless its file exists."""
    build, path = shard.build, shard.file
    if not path.exists():
        pieces = (piece for source in shard.sources for piece in pieces_of(source, build.field))
        number = {source.name: i for i, source in enumerate(shard.sources)}
        documents: list[Document] = []
        for some in encoded(pieces, encoder, longest_segment(build.segment_tokens)):
            documents += [Document(np.asarray(d.tokens, build.dtype), d.source, d.completes, d.read) for d in some]
        made = path.with_suffix(f".{uuid4().hex}.making")
        with made.open("wb") as file:
            np.savez(
                file,
                tokens=np.concatenate([np.empty(0, build.dtype), *(d.tokens for d in documents)]),
                lengths=np.array([len(d.tokens) for d in documents], np.uint32),
                hashes=np.array([document_hash(d, build.dtype) for d in documents], np.uint64),
                source=np.array([number[d.source] for d in documents], np.uint32),
                read=np.array([d.read[2:] if d.read else (0, 0) for d in documents], np.int64),
            )
            file.flush()
            os.fsync(file.fileno())
        _put(made, path)
    with _opened(path) as data:
        return Tokenised(shard, data["lengths"], data["hashes"] if build.deduplicate else np.empty(0, np.uint64))


def plans(build: Build, shards: Iterable[Tokenised], counts: Ingested) -> Iterator[Plan]:
    """Divide the documents of shards into segments in the same way as `ingest`."""
    seen: set[int] = set()
    room, used, plan = longest_segment(build.segment_tokens), 0, Plan(build)
    for tokenised in shards:
        kept = np.arange(len(tokenised.lengths))
        if build.deduplicate:
            fresh = (not n or is_new(int(h), seen) for n, h in zip(tokenised.lengths, tokenised.hashes, strict=True))
            kept = np.flatnonzero(np.fromiter(fresh, np.bool_, len(kept)))
        lengths = tokenised.lengths[kept].astype(np.int64)
        counts.sources += int((lengths == 0).sum())
        counts.documents += int((lengths > 0).sum())
        counts.tokens += int(lengths.sum())
        counts.duplicates += len(tokenised.lengths) - len(kept)
        begin = 0
        for end in cuts(lengths.tolist(), room, used):
            plan.parts.append((tokenised.shard, kept[begin:end]))
            yield plan
            plan, begin, used = Plan(build), end, 0
        plan.parts.append((tokenised.shard, kept[begin:]))
        used += int(lengths[begin:].sum())
    if any(len(kept) for _, kept in plan.parts):
        yield plan


def write_planned(_: Encoder, plan: Plan) -> Path:
    """Sort and write a segment, unless its file exists."""
    path = plan.file
    if not path.exists():
        b, memory = plan.build, Memory(plan.build.dtype, plan.build.vocabulary)
        for shard, kept in plan.parts:
            _load(memory, shard, kept)
        entries, sources = memory.entries(), memory.sources
        content = content_of_run(memory.take_text(), sources, entries, b.collection, b.tokenizer, b.vocabulary)
        content = replace(content, made_from=b.made_from, store=b.store, generation=b.generation)
        made = path.with_name(f"{path.stem}-{uuid4().hex}.seg")
        write_segment(made, content, Pieces(content.tokens, threads=1))  # other cores have their own workers
        _put(made, path)
    Segment(path)  # raises if it is damaged
    return path


def _load(memory: Memory, shard: Shard, kept: NDArray[np.int64]) -> None:
    """Load documents of a shard into memory, as the store does with new documents."""
    with _opened(shard.file) as data:
        tokens, lengths, source, read = (data[name] for name in ("tokens", "lengths", "source", "read"))
    ends = np.cumsum(lengths, dtype=np.int64)
    documents, names = [], []
    for i in kept.tolist():
        file = shard.sources[source[i]]
        if lengths[i]:
            documents.append(tokens[ends[i] - lengths[i] : ends[i]])
            names.append(file.name)
            memory.reading[file.name] = (file.size, file.modified, *read[i].tolist())
        else:
            memory.files[file.name] = (file.size, file.modified)
    memory.extend(documents, names)


def _put(made: Path, path: Path) -> None:
    """Give a complete file its name, atomically. If another worker made it too, both are the same."""
    made.replace(path)
    sync_folder(path.parent)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with np.load(path) as data:
            yield data
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise StoreError(f"{path} is damaged or gone ({error}): delete it, and build again") from error


def _with_progress(
    read: Iterable[Tokenised], total: int, counts: Ingested, progress: Progress | None
) -> Iterator[Tokenised]:
    done = 0
    for tokenised in read:
        yield tokenised
        done += sum(source.size for source in tokenised.shard.sources)
        if progress is not None:
            progress(done, total, counts.tokens)
