"""Store: a durable datastore of token documents that grows while it is searched. One writer, many readers.

Like a log-structured merge tree: what is appended goes to a write-ahead log and to memory, memory becomes a segment,
and segments of like size become one. A search works on a snapshot of runs that never changes.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.durable.compaction import Compaction, joined
from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.lock import Lock, no_writer
from slipstream.datastores.durable.log import (
    COMPLETE,
    DOCUMENT,
    FILE,
    PROGRESS,
    READ,
    REMOVE,
    Head,
    LogWriter,
    Record,
    read_log,
)
from slipstream.datastores.durable.manifest import (
    COPY,
    NAME,
    Entry,
    Manifest,
    manifest_bytes,
    new_id,
    write_manifest,
    write_whole,
)
from slipstream.datastores.durable.mapping import watching
from slipstream.datastores.durable.memory import Memory, content_of_run
from slipstream.datastores.durable.names import ENCODING, LONGEST, checked_collection, checked_source
from slipstream.datastores.durable.segment import Content, Segment, sync_folder, write_segment
from slipstream.datastores.durable.state import State, read_state
from slipstream.datastores.durable.sweep import sweep
from slipstream.datastores.durable.verify import verify
from slipstream.datastores.durable.witness import Place, Witness
from slipstream.datastores.sparse.runs import Pieces, Run, Runs
from slipstream.datastores.sparse.search import Found, Shape, draft
from slipstream.datastores.sparse.sort import DEPTH, Tokens
from slipstream.errors import StoreError

DEFAULT = "default"  # the collection of those who name none
MEMORY_TOKENS = 1 << 20  # appended tokens that become a segment
SEGMENT_TOKENS = 1 << 27  # tokens of a segment at most: building one takes 5 bytes of memory for each
RECHECK = 60.0  # seconds for which a page that was checked is believed, unless its file is seen to change


@dataclass(frozen=True)
class Document:
    tokens: Sequence[int] | NDArray[Any]
    source: str = ""
    # Set on the last document of a file: the file's size and time of change.
    completes: tuple[int, int] | None = None
    # Set on others of a file: size and time of change, how many of its texts were read with this document, and how
    # many tokens of the next.
    read: tuple[int, int, int, int] | None = None


class Store:
    """Made by `create` or `open`. Use it in a `with`, or close it."""

    def __init__(self, folder: Path, lock: Lock | None, segment_tokens: int) -> None:
        self.folder, self.segment_tokens = folder, segment_tokens
        self._held = lock  # of the one writer
        self._log: LogWriter | None = None
        self._witness: Witness | None = None
        self._place = Place()  # how far the log was read
        self._lock = threading.RLock()  # manifest, memory and log change together
        self._unsure = False  # a change was interrupted: the disk knows what came of it
        self._compaction = Compaction(self)
        self._segments: dict[str, Segment] = {}
        self._runs: dict[str, tuple[tuple[str, ...], Run]] = {}
        self._memory: dict[str, Memory] = {}
        self._views: dict[str, Runs] = {}
        self._manifest_bytes = b""
        self._checked = time.monotonic()
        self._flush_at = 0  # after a flush that failed, not before so many tokens are in memory

    # ---- making and opening one

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
        head = Head(new_id(), new_id(), 1)
        first = Manifest(tokenizer, vocabulary, "00000000.log", 1, (), notes or {}, head.store, 1, head.log)
        with _on_disk(folder):
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
        """An existing store. tokenizer: the fingerprint of the one whose ids will be searched for."""
        folder = Path(folder)
        _check_segments(segment_tokens)
        with _on_disk(folder):
            manifest_bytes(folder)  # before a lock is made in a folder that holds no store
            lock = Lock(folder) if write else None
            try:
                store = cls(folder, lock, segment_tokens)
                store._load()
                store.expect(tokenizer)
                if write:
                    store._begin_writing()
            except BaseException:
                if lock is not None:
                    lock.close()
                raise
        return store

    def _begin_writing(self) -> None:
        if not (self.folder / COPY).exists() or manifest_bytes(self.folder, COPY) != self._manifest_bytes:
            write_whole(self.folder / COPY, self._manifest_bytes)  # its writer ended in between
        sweep(self.folder, self.manifest, self._place)
        self._witness = Witness(self.folder)
        if not self.manifest.id:
            self._migrate()
        else:
            self._open_log()

    def _open_log(self) -> None:
        assert self._witness is not None
        log = LogWriter(self.folder / self.manifest.log, self._place)
        log.enter(self._witness, self.manifest.generation)
        self._log, old = log, self._log
        if old is not None:
            old.close(sync=False)

    def _migrate(self) -> None:
        """Give a store of format 1 its ids: of its own, of its log, which is written anew, and of its segments."""
        id, records = new_id(), read_log(self.folder / self.manifest.log, beyond=True).records
        number, manifest = self.manifest.named()
        log = LogWriter.create(self.folder / f"{number}.log", Head(id, new_id(), 1))
        log.append(records)
        segments = tuple(replace(e, sum=self._segments[e.name].sum) for e in manifest.segments)
        manifest = replace(manifest, id=id, generation=1, log=log.path.name, log_id=log.head.log, segments=segments)
        write_manifest(self.folder, manifest)
        (self.folder / self.manifest.log).unlink()
        log.close()
        self._load()
        self._open_log()

    def expect(self, tokenizer: str | None) -> None:
        """Raise if the store holds the ids of another tokenizer than the one with this fingerprint."""
        made_with = self.manifest.tokenizer
        if tokenizer and made_with and tokenizer != made_with:
            raise StoreError(
                f"{self.folder} holds the ids of another tokenizer (fingerprint {made_with}, yours is {tokenizer}): "
                "build a store with this model's tokenizer"
            )

    def _load(self) -> None:
        """All that there is in memory, from what there is on the disk."""
        self._take(read_state(self.folder, self._segments, writing=self._held is not None))

    def _take(self, state: State) -> None:
        self.manifest, self._segments, self._manifest_bytes = state.manifest, state.segments, state.manifest_bytes
        self._memory, self._place = {}, state.log.place
        self._apply(state.log.records)
        self._publish()

    def refresh(self) -> None:
        """See what a writer in another process did since, and check files again that have changed under our eyes."""
        with self._on_disk(), self._changing():
            self._trust_again()
            if self._held is not None:
                return
            if manifest_bytes(self.folder) != self._manifest_bytes:
                self._load()
                return
            log = self.folder / self.manifest.log
            try:
                if os.stat(log).st_size == self._place.length:
                    return
                with no_writer(self.folder) as alone:
                    read = read_log(log, self._place, beyond=alone)
            except FileNotFoundError:
                self._load()
                return
            if read.records:
                self._apply(read.records)
                self._publish()
            self._place = read.place

    def _trust_again(self) -> None:
        late = time.monotonic() - self._checked > RECHECK
        for segment in self._segments.values():
            try:
                segment.trust_again(always=late)
            except FileNotFoundError:  # it was merged, or the next manifest will tell
                self._segments = {n: s for n, s in self._segments.items() if s is not segment}
                self._manifest_bytes = b""
        if late:
            self._checked = time.monotonic()

    def close(self) -> None:
        """End background work and let another writer in. Nothing is lost by not calling it."""
        forked = self._held is not None and not self._held.ours
        if not forked:
            self._compaction.wait()
        log, witness, held = self._log, self._witness, self._held
        self._log = self._witness = self._held = None
        if log is not None:
            log.close(sync=not forked)
        for file in (witness, held):
            if file is not None:
                file.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- searching

    def runs(self, collection: str = DEFAULT) -> Runs:
        """A snapshot of all there is to search in a collection."""
        return self._views.get(collection) or Runs((), self.dtype)

    def draft(self, text: NDArray[np.int32], shape: Shape, collection: str = DEFAULT, source: str = "rest") -> Found:
        """Continuations of a text, whose last token is the root of the tree."""
        return draft(self.runs(collection), text, shape, source)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.manifest.width // 8}")

    @property
    def collections(self) -> list[str]:
        return sorted(self._views)

    # ---- writing

    def append(self, tokens: Sequence[int] | NDArray[Any], source: str = "", collection: str = DEFAULT) -> None:
        """Add a document. When this returns it is on the disk, and every search finds it."""
        self.extend([Document(tokens, source)], collection)

    def extend(self, documents: Iterable[Document], collection: str = DEFAULT, *, bulk: bool = False) -> None:
        """Add documents with one write to the disk. bulk: they need not be searchable or acknowledged before they are a
        segment, which `flush` makes of them at the latest."""
        self._writer()
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
        with self._changing():
            self._write(records, bulk)
            size = sum(m.size for m in self._memory.values())
        if size >= max(limit, self._flush_at):
            self._flush_by_itself(size + limit, quietly=not bulk)

    def _flush_by_itself(self, next_at: int, quietly: bool) -> None:
        """quietly: what was appended is on the disk, so that must not seem to have failed if this does."""
        try:
            self.flush()
        except StoreError as error:
            self._flush_at = next_at
            if not quietly:
                raise
            warnings.warn(f"{self.folder}: no segment was made, so the log goes on growing: {error}", stacklevel=4)

    def remove(self, source: str, collection: str = DEFAULT) -> int:
        """Forget every document of a source: no search finds it any more, and compaction deletes it. Returns how many
        documents there were."""
        self._writer()
        with self._changing():
            found = self._source(source, collection)
            if found is not None:
                self._write([Record(REMOVE, collection, source)])
        return 0 if found is None else found.documents

    def _source(self, name: str, collection: str) -> SourceEntry | None:
        """One of `sources`."""
        found: SourceEntry | None = None
        for entry in self._entries(collection):
            segment = self._segments[entry.name]
            if name in segment.numbers and name not in entry.removed:
                part = segment.sources[segment.numbers[name]]
                found = joined(found, part) if found else part
        memory = self._memory.get(collection)
        if memory is not None and (recent := memory.entry(name)) is not None:
            found = joined(found, recent) if found else recent
        return found

    def sources(self, collection: str = DEFAULT) -> dict[str, SourceEntry]:
        """What the documents of a collection came from."""
        with self._settled():
            found: dict[str, SourceEntry] = {}
            parts = []
            for entry in self._entries(collection):
                removed = set(entry.removed)
                parts.append([s for s in self._segments[entry.name].sources if s.name not in removed])
            if collection in self._memory:
                parts.append(list(self._memory[collection].entries().values()))
            for one in (s for part in parts for s in part):
                found[one.name] = joined(found[one.name], one) if one.name in found else one
            return found

    def documents(self, collection: str = DEFAULT) -> Iterator[Tokens]:
        """Every document of a collection, one after the other."""
        with self._settled():
            parts = [(self._segments[e.name], e.removed) for e in self._entries(collection)]
            recent = self._memory[collection].documents() if collection in self._memory else []
        for segment, removed in parts:
            with watching(segment.path):
                found = [tokens for tokens, _ in segment.documents(removed)]
            yield from found
        yield from recent

    def note(self, **notes: Any) -> None:
        """Write something about the store into its manifest."""
        self._writer()
        with self._on_disk(), self._changing():
            self._switch(replace(self.manifest, notes={**self.manifest.notes, **notes}), ())

    def flush(self) -> None:
        """Make a segment of what is in memory, and begin a new log."""
        self._writer()
        with self._on_disk(), self._changing():
            assert self._log is not None
            old, manifest, made = self._log, self.manifest, []
            origin = ((old.path.name, f"{old.head.log}:{old.place.length}"),)
            for collection, memory in self._memory.items():
                known = memory.entries()
                if known:
                    name, manifest = manifest.named()
                    m, sources = self.manifest, memory.sources
                    content = content_of_run(memory.take_text(), sources, known, collection, m.tokenizer, m.vocabulary)
                    made.append(self._make_segment(name, content, origin))
            number, manifest = manifest.named()
            head = Head(manifest.id, new_id(), manifest.generation)
            log = LogWriter.create(self.folder / f"{number}.log", head)
            manifest = replace(manifest, log=log.path.name, log_id=head.log)
            self._switch(manifest, made, [(old.path.name, old.head.log)], log)
            self._memory = {}
            self._publish()
            self._flush_at = 0
        self._compaction.in_background()

    def compact(self) -> None:
        """As few segments as can be, without what was removed."""
        self.flush()
        self._compaction.everything()

    # ---- looking at all of it

    def verify(self) -> list[str]:
        """Read everything that is on the disk: what is wrong, in words."""
        return verify(self.folder, type(self))

    def info(self) -> dict[str, Any]:
        """What there is, in numbers. Removed documents don't count, but take up space until the next compaction."""
        with self._settled():
            m = self.manifest
            removed = 0
            collections = {
                c: {"tokens": x.size, "documents": len(x.sources), "segments": 0} for c, x in self._memory.items()
            }
            for entry in m.segments:
                count = collections.setdefault(entry.collection, {"tokens": 0, "documents": 0, "segments": 0})
                dead = self._segments[entry.name].dead(entry.removed)
                removed += len(dead) // 2
                count["tokens"] += entry.tokens - int((dead[1::2] - dead[::2]).sum())
                count["documents"] += entry.documents - len(dead) // 2
                count["segments"] += 1
            size = sum(e.bytes for e in m.segments) + self._place.length + 2 * len(manifest_bytes(self.folder))
            tokens = sum(c["tokens"] for c in collections.values())
            return {
                "tokens": tokens,
                "documents": sum(c["documents"] for c in collections.values()),
                "bytes": size,
                "bytes_per_token": round(size / max(tokens, 1), 2),
                "log_bytes": self._place.length,
                "removed_documents": removed,
                "vocabulary": m.vocabulary,
                "width": m.width,
                "tokenizer": m.tokenizer,
                "collections": dict(sorted(collections.items())),
            }

    # ---- within

    def _entries(self, collection: str) -> list[Entry]:
        return [e for e in self.manifest.segments if e.collection == collection]

    def _writer(self) -> None:
        if self._held is None:
            raise StoreError(f"{self.folder} is open for reading: open it with write=True")
        if not self._held.ours:
            raise StoreError(
                f"{self.folder} was opened by process {self._held.process}, of which this is a fork: open it here, "
                "when that one has closed it"
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One change at a time. An interrupt or an error may leave memory behind the disk, or before it: then it is
        read anew before anything else is done with it."""
        with self._settled():
            self._unsure = True
            yield
            self._unsure = False

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Nobody is changing anything, and memory is what the disk says."""
        with self._lock:
            if self._unsure:
                self._recover()
                self._unsure = False
            yield

    def _recover(self) -> None:
        if self._log is not None and self._log.doubtful:
            raise StoreError(f"{self.folder}: the disk failed, and what was added in bulk may be lost: open it again")
        reserved = self.manifest.next  # background compaction may be writing to a file of such a number
        with self._on_disk():
            self._load()
            self.manifest = replace(self.manifest, next=max(self.manifest.next, reserved))
            if self._held is not None:
                self._open_log()

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

    def _write(self, records: list[Record], bulk: bool = False) -> None:
        if not records:
            return
        assert self._log is not None
        self._log.append(records, sync=not bulk)
        self._place = self._log.place
        self._apply(records)
        if not bulk:
            self._publish()

    def _apply(self, records: Sequence[Record]) -> None:
        """What records say, to memory. Documents that come one after the other are sorted together."""
        waiting: dict[str, tuple[list[Tokens], list[str]]] = {}
        for record in records:
            memory = self._memory.setdefault(record.collection, Memory(self.dtype, self.manifest.vocabulary))
            if record.kind in (DOCUMENT, READ):
                skip = PROGRESS.size if record.kind == READ else 0
                documents, sources = waiting.setdefault(record.collection, ([], []))
                documents.append(np.frombuffer(record.body, self.dtype, offset=skip))
                sources.append(record.source)
            if record.kind == READ:
                memory.reading[record.source] = PROGRESS.unpack_from(record.body)
            elif record.kind == COMPLETE:
                memory.files[record.source] = FILE.unpack(record.body)
            elif record.kind == REMOVE:
                memory.extend(*waiting.pop(record.collection, ([], [])))
                memory.remove(record.source)
                segments = tuple(self._without(e, record) for e in self.manifest.segments)
                self.manifest = replace(self.manifest, segments=segments)
        for collection, (documents, sources) in waiting.items():
            self._memory[collection].extend(documents, sources)

    def _without(self, entry: Entry, record: Record) -> Entry:
        if entry.collection != record.collection or record.source in entry.removed:
            return entry
        if record.source not in self._segments[entry.name].numbers:
            return entry
        return replace(entry, removed=(*entry.removed, record.source))

    def _make_segment(self, name: str, content: Content, made_from: Sequence[tuple[str, str]]) -> tuple[Entry, Segment]:
        path, m = self.folder / f"{name}.seg", self.manifest
        content = replace(content, made_from=tuple(made_from), store=m.id, generation=m.generation)
        write_segment(path, content, Pieces(content.tokens))
        segment = Segment(path)
        tokens = len(content.tokens) - len(content.starts) - DEPTH
        size = segment.header["bytes"]
        return Entry(path.name, content.collection, tokens, len(content.starts), size, segment.sum), segment

    def _on_disk(self) -> AbstractContextManager[None]:
        return _on_disk(self.folder)

    def _switch(
        self,
        manifest: Manifest,
        made: Sequence[tuple[Entry, Segment]],
        gone: Sequence[tuple[str, str]] = (),
        log: LogWriter | None = None,
    ) -> None:
        """The one moment in which the store passes from one state to the next. gone: files whose content is in others
        then, with their ids. log: that goes on from here."""
        assert self._log is not None
        assert self._witness is not None
        still = [(name, id) for name, id in manifest.gone if (self.folder / name).exists()]
        segments = (*manifest.segments, *(entry for entry, _ in made))
        manifest = replace(manifest, segments=segments, gone=(*still, *gone), generation=manifest.generation + 1)
        write_manifest(self.folder, manifest)
        self._manifest_bytes = manifest_bytes(self.folder)
        self.manifest = manifest
        known = {**self._segments, **{entry.name: segment for entry, segment in made}}
        self._segments = {e.name: known[e.name] for e in manifest.segments}
        if log is not None:
            self._log, self._place, old = log, log.place, self._log
            old.close(sync=False)
        self._log.enter(self._witness, manifest.generation)
        for name, _ in manifest.gone:
            (self.folder / name).unlink(missing_ok=True)

    def _publish(self) -> None:
        """New snapshots for whoever searches next."""
        runs: dict[str, list[Run]] = {}
        for entry in self.manifest.segments:
            kept = self._runs.get(entry.name)
            if kept is None or kept[0] != entry.removed:
                self._runs[entry.name] = kept = (entry.removed, self._segments[entry.name].run(entry.removed))
            runs.setdefault(entry.collection, []).append(kept[1])
        self._runs = {e.name: self._runs[e.name] for e in self.manifest.segments}
        for collection, memory in self._memory.items():
            runs.setdefault(collection, []).extend(memory.runs())
        self._views = {c: Runs(r, self.dtype) for c, r in runs.items()}


def _check_segments(tokens: int) -> None:
    if tokens < 2:  # a document's token and the mark behind it
        raise StoreError(f"segments of {tokens} tokens hold no text: at least 2 are needed, {SEGMENT_TOKENS} are usual")


@contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder}: the disk or the file system failed ({error}); what was acknowledged before is not lost"
        ) from error
