"""Store: a durable datastore of token documents that grows while it is searched. One writer, many readers.

It is a log-structured merge tree: appended documents go to a write-ahead log and to memory, memory is flushed to a
segment, and segments of similar size are merged. A search works on a snapshot of runs that never changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.durable.compaction import Compaction, by_name
from slipstream.datastores.durable.contents import Contents
from slipstream.datastores.durable.disk import on_disk, sync_folder
from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.lock import Lock
from slipstream.datastores.durable.log import (
    COMPLETE,
    DOCUMENT,
    FILE,
    PROGRESS,
    READ,
    REMOVE,
    LogHead,
    LogWriter,
    Record,
)
from slipstream.datastores.durable.manifest import (
    COPY,
    FOLLOWS,
    NAME,
    Manifest,
    manifest_bytes,
    new_id,
    write_manifest,
)
from slipstream.datastores.durable.mapping import watching
from slipstream.datastores.durable.names import ENCODING, LONGEST, checked_collection, checked_source
from slipstream.datastores.durable.verify import verify
from slipstream.datastores.sparse.runs import Runs
from slipstream.datastores.sparse.search import Found, SearchShape, draft
from slipstream.datastores.sparse.sort import Tokens
from slipstream.errors import StoreError

DEFAULT = "default"  # the collection, if none is named
LEARNED = "learned"  # the source of answers that models gave while they were served
MEMORY_TOKENS = 1 << 20  # tokens in memory that are flushed to a segment
SEGMENT_TOKENS = 1 << 27  # tokens of a segment at most: building one takes 5 bytes of memory per token
LARGEST_SEGMENT = 1 << 31  # positions have 32 bits


@dataclass(frozen=True)
class Document:
    tokens: Sequence[int] | NDArray[Any]
    source: str = ""
    # Set on the last document of a file: the file's size and modification time.
    completes: tuple[int, int] | None = None
    # Set on a file's other documents: its size and modification time, how many of its texts have been read completely
    # including this document, and how many tokens of the next text.
    read: tuple[int, int, int, int] | None = None


class Store:
    """Made by `create` or `open`. Use it in a `with`, or close it."""

    def __init__(self, contents: Contents, segment_tokens: int) -> None:
        self.folder, self.contents, self.segment_tokens = contents.folder, contents, segment_tokens
        self._compaction = Compaction(contents, segment_tokens)
        self._flush_at = 0  # after a failed flush, the next one waits for so many tokens in memory

    @property
    def manifest(self) -> Manifest:
        return self.contents.manifest

    # ---- creating and opening

    @classmethod
    def create(
        cls,
        folder: str | Path,
        vocabulary: int,
        tokenizer: str = "",
        notes: dict[str, Any] | None = None,
        segment_tokens: int = SEGMENT_TOKENS,
    ) -> Store:
        """A new, empty store, open for writing. tokenizer: its fingerprint, checked at every opening."""
        folder = Path(folder)
        if len(tokenizer.encode(*ENCODING)) > LONGEST:
            raise StoreError(f"tokenizer {tokenizer[:80]!r}…: a fingerprint has at most {LONGEST} bytes")
        _check_segments(segment_tokens)
        head = LogHead(new_id(), new_id(), 1)
        first = Manifest(tokenizer, vocabulary, "00000000.log", 1, (), notes or {}, head.store, 1, head.log)
        with on_disk(folder):
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"{folder} can't be made ({error.strerror}): name a new or an empty folder") from error
            for path in new:
                sync_folder(path.parent)
            lock = Lock(folder)
            try:
                if (folder / NAME).exists():
                    raise StoreError(f"{folder} already holds a datastore: add to it, or name another folder")
                if (folder / COPY).exists() or any(folder.glob("*.seg")):
                    raise StoreError(
                        f"{folder} holds a datastore without {NAME}: `slipstream store repair` makes it anew"
                    )
                LogWriter.create(folder / first.log, head).close()
                write_manifest(folder, first)
            finally:
                lock.close()
        return cls.open(folder, write=True, segment_tokens=segment_tokens)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        write: bool = False,
        tokenizer: str | None = None,
        segment_tokens: int = SEGMENT_TOKENS,
    ) -> Store:
        """Open an existing store. tokenizer: the fingerprint of the tokenizer of the texts to be searched for."""
        folder = Path(folder)
        _check_segments(segment_tokens)
        with on_disk(folder):
            manifest_bytes(folder)  # raises before a lock is created in a folder without a store
            lock = Lock(folder) if write else None
            try:
                contents = Contents(folder, lock)
                contents.load()
                store = cls(contents, segment_tokens)
                store.expect(tokenizer)
                if write and FOLLOWS in store.manifest.notes:
                    raise StoreError(
                        f"{folder} follows {store.manifest.notes[FOLLOWS]}, and is written by nobody else: write there"
                    )
                if write:
                    contents.begin_writing()
            except BaseException:
                if lock is not None:
                    lock.close()
                raise
        return store

    def expect(self, tokenizer: str | None) -> None:
        """Raise if the store holds the ids of another tokenizer than the one with this fingerprint."""
        made_with = self.manifest.tokenizer
        if tokenizer and made_with and tokenizer != made_with:
            raise StoreError(
                f"{self.folder} holds the ids of another tokenizer (fingerprint {made_with}, yours is {tokenizer}): "
                "build a store with this model's tokenizer"
            )

    def refresh(self) -> None:
        """Load what a writer in another process has changed, and check the pages of changed files again."""
        self.contents.refresh()

    def close(self) -> None:
        """Wait for background work and release the lock. Nothing is lost if it is not called."""
        held = self.contents.held
        if held is None or held.ours:  # not in a forked process: the thread runs in its parent
            self._compaction.wait()
        self.contents.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- searching

    def runs(self, collection: str = DEFAULT) -> Runs:
        """A snapshot of everything in a collection, to be searched."""
        return self.contents.runs(collection)

    def draft(
        self, text: NDArray[np.int32], shape: SearchShape, collection: str = DEFAULT, source: str = "rest"
    ) -> Found:
        """Continuations of a text, whose last token is the root of the tree."""
        return draft(self.runs(collection), text, shape, source)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.contents.dtype

    @property
    def collections(self) -> list[str]:
        return sorted(self.contents.views)

    # ---- writing

    def append(self, tokens: Sequence[int] | NDArray[Any], source: str = "", collection: str = DEFAULT) -> None:
        """Add a document. When this returns, it is durable and every search finds it."""
        self.extend([Document(tokens, source)], collection)

    def extend(self, documents: Iterable[Document], collection: str = DEFAULT, *, bulk: bool = False) -> None:
        """Add documents with one write to the disk. bulk: they need not be durable or searchable until they are in a
        segment, at the latest after `flush`."""
        self.contents.check_writer()
        checked_collection(collection)
        records = []
        for document in documents:
            source = checked_source(document.source)
            if len(document.tokens):
                body = self._checked_tokens(document.tokens).tobytes()
                if document.read:
                    records.append(Record(READ, collection, source, PROGRESS.pack(*document.read) + body))
                else:
                    records.append(Record(DOCUMENT, collection, source, body))
            if document.completes:
                records.append(Record(COMPLETE, collection, source, FILE.pack(*document.completes)))
        limit = self.segment_tokens if bulk else min(MEMORY_TOKENS, self.segment_tokens)
        with self.contents.changing():
            self.contents.write(records, bulk)
        size = self.waiting
        if size >= max(limit, self._flush_at):
            self._flush_by_itself(size + limit, quietly=not bulk)

    def _flush_by_itself(self, next_at: int, quietly: bool) -> None:
        """quietly: warn instead of raising if the flush fails, since what was appended is durable already."""
        try:
            self.flush()
        except StoreError as error:
            self._flush_at = next_at
            if not quietly:
                raise
            warnings.warn(f"{self.folder}: no segment was made, so the log goes on growing: {error}", stacklevel=4)

    def remove(self, source: str, collection: str = DEFAULT) -> int:
        """Remove all documents of a source: searches no longer find them, and compaction deletes them. Returns how many
        there were."""
        self.contents.check_writer()
        with self.contents.changing():
            found = self._source(source, collection)
            if found is not None:
                self.contents.write([Record(REMOVE, collection, source)])
        return 0 if found is None else found.documents

    def _source(self, name: str, collection: str) -> SourceEntry | None:
        """One entry of `sources`."""
        parts = []
        for entry in self.contents.entries(collection):
            segment = self.contents.segments[entry.name]
            if name in segment.numbers and name not in entry.removed:
                parts.append(segment.sources[segment.numbers[name]])
        memory = self.contents.memory.get(collection)
        if memory is not None and (recent := memory.entry(name)) is not None:
            parts.append(recent)
        return by_name(parts).get(name)

    def sources(self, collection: str = DEFAULT) -> dict[str, SourceEntry]:
        """The sources of a collection's documents."""
        with self.contents.settled():
            parts: list[SourceEntry] = []
            for entry in self.contents.entries(collection):
                removed = set(entry.removed)
                parts += [s for s in self.contents.segments[entry.name].sources if s.name not in removed]
            if collection in self.contents.memory:
                parts += self.contents.memory[collection].entries().values()
            return by_name(parts)

    def documents(self, collection: str = DEFAULT, source: str | None = None) -> Iterator[Tokens]:
        """Every document of a collection, or those of one source, one after the other."""
        with self.contents.settled():
            parts = [(self.contents.segments[e.name], e.removed) for e in self.contents.entries(collection)]
            memory = self.contents.memory.get(collection)
            recent = [] if memory is None else list(zip(memory.documents(), memory.sources, strict=True))
        for segment, removed in parts:
            with watching(segment.path):
                found = [tokens for tokens, name in segment.documents(removed) if source in (None, name)]
            yield from found
        yield from (tokens for tokens, name in recent if source in (None, name))

    def note(self, **notes: Any) -> None:
        """Add notes to the manifest."""
        self.contents.check_writer()
        with on_disk(self.folder), self.contents.changing():
            self.contents.switch(replace(self.manifest, notes={**self.manifest.notes, **notes}), ())

    def flush(self) -> None:
        """Write the documents in memory to segments, and begin a new log."""
        self.contents.flush()
        self._flush_at = 0
        self._compaction.in_background()

    @property
    def waiting(self) -> int:
        """Number of tokens that are in no segment yet."""
        with self.contents.settled():
            return sum(memory.size for memory in self.contents.memory.values())

    def compact(self) -> None:
        """Merge into as few segments as possible, and delete removed documents."""
        self.flush()
        self._compaction.everything()

    # ---- inspecting

    def verify(self) -> list[str]:
        """Read everything on the disk. Returns a sentence for each fault."""
        return verify(self.folder)

    def info(self) -> dict[str, Any]:
        """Sizes and counts. Removed documents are not counted, but take up space until the next compaction."""
        with self.contents.settled():
            m = self.manifest
            removed = 0
            collections = {
                c: {"tokens": x.size, "documents": len(x.sources), "segments": 0}
                for c, x in self.contents.memory.items()
            }
            for entry in m.segments:
                count = collections.setdefault(entry.collection, {"tokens": 0, "documents": 0, "segments": 0})
                dead = self.contents.segments[entry.name].dead(entry.removed)
                removed += len(dead) // 2
                count["tokens"] += entry.tokens - int((dead[1::2] - dead[::2]).sum())
                count["documents"] += entry.documents - len(dead) // 2
                count["segments"] += 1
            size = sum(e.bytes for e in m.segments) + self.contents.place.length + 2 * len(manifest_bytes(self.folder))
            tokens = sum(c["tokens"] for c in collections.values())
            return {
                "tokens": tokens,
                "documents": sum(c["documents"] for c in collections.values()),
                "bytes": size,
                "bytes_per_token": round(size / max(tokens, 1), 2),
                "log_bytes": self.contents.place.length,
                "removed_documents": removed,
                "vocabulary": m.vocabulary,
                "width": m.width,
                "tokenizer": m.tokenizer,
                "collections": dict(sorted(collections.items())),
            }

    def _checked_tokens(self, tokens: Sequence[int] | NDArray[Any]) -> Tokens:
        ids = np.asarray(tokens)
        if ids.dtype.kind not in "iu":
            raise StoreError(f"tokens must be whole numbers, found {ids.dtype}")
        if ids.ndim != 1 or ids.min() < 0 or ids.max() >= self.manifest.vocabulary:
            bad = ids[(ids < 0) | (ids >= self.manifest.vocabulary)][:5]
            raise StoreError(f"tokens must be ids from 0 to {self.manifest.vocabulary - 1}, found {bad.tolist()}")
        if len(ids) >= self.segment_tokens:
            raise StoreError(f"a document of {len(ids)} tokens is longer than a segment: cut it into several")
        return ids.astype(self.dtype)


def _check_segments(tokens: int) -> None:
    if tokens < 2:  # a document's token and the mark after it
        raise StoreError(f"segments of {tokens} tokens hold no text: at least 2 are needed, {SEGMENT_TOKENS} are usual")
    if tokens > LARGEST_SEGMENT:
        raise StoreError(
            f"segments of {tokens} tokens are too long: at most {LARGEST_SEGMENT} fit, {SEGMENT_TOKENS} are usual"
        )
