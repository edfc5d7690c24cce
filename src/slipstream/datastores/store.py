"""Store: a durable datastore of token documents that grows while it is searched. One writer, many readers.

Like a log-structured merge tree: what is appended goes to a write-ahead log and to memory, memory becomes a segment,
and segments of like size become one. A search works on a snapshot of runs that never changes.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.log import COMPLETE, DOCUMENT, FILE, NAMES, REMOVE, LogWriter, Record, read_log
from slipstream.datastores.manifest import (
    COPY,
    NAME,
    Entry,
    Manifest,
    manifest_bytes,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from slipstream.datastores.memory import Memory, content_of
from slipstream.datastores.pages import PAGE
from slipstream.datastores.runs import Run, Runs
from slipstream.datastores.search import Found, Shape, draft
from slipstream.datastores.segment import Content, Segment, SourceEntry, sync_folder, write_segment
from slipstream.datastores.sort import DEPTH, Tokens, sort_positions
from slipstream.errors import DamagedError, StoreError

DEFAULT = "default"  # the collection of those who name none
MEMORY_TOKENS = 1 << 20  # appended tokens that become a segment
SEGMENT_TOKENS = 1 << 27  # tokens of a segment at most: building one takes 10 bytes of memory for each
FAN = 4  # segments of like size that become one
AT_ONCE = 50  # segments that become one at most: their names must fit into its header
LONGEST = 200  # bytes of a collection's name and of a fingerprint, for the same reason
OURS = re.compile(r"\d{8,}\.(seg|log|making)|store(\.copy)?\.json\.making")


@dataclass(frozen=True)
class Document:
    tokens: Sequence[int] | NDArray[Any]
    source: str = ""
    # Set on the last document of a file: the file's size and time of change.
    completes: tuple[int, int] | None = None


class Store:
    """Made by `create` or `open`. Use it in a `with`, or close it."""

    def __init__(self, folder: Path, lock: int | None, segment_tokens: int) -> None:
        self.folder, self.segment_tokens = folder, segment_tokens
        self._held = lock  # the open lock file of the one writer
        self._log: LogWriter | None = None
        self._log_end = PAGE
        self._lock = threading.RLock()  # manifest, memory and log change together
        self._compacting = threading.RLock()
        self._worker: threading.Thread | None = None
        self._segments: dict[str, Segment] = {}
        self._runs: dict[str, tuple[tuple[str, ...], Run]] = {}
        self._memory: dict[str, Memory] = {}
        self._views: dict[str, Runs] = {}
        self._manifest_bytes = b""

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
        if len(tokenizer.encode(*NAMES)) > LONGEST:
            raise StoreError(f"tokenizer {tokenizer[:80]!r}…: a fingerprint has at most {LONGEST} bytes")
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:
            sync_folder(path.parent)
        lock = lock_folder(folder)
        try:
            if (folder / NAME).exists():
                raise StoreError(f"{folder} already holds a datastore: add to it, or name another folder")
            if (folder / COPY).exists() or any(folder.glob("*.seg")):
                raise StoreError(f"{folder} holds a datastore without {NAME}: `slipstream store repair` makes it anew")
            LogWriter.create(folder / "00000000.log").close()
            write_manifest(folder, Manifest(tokenizer, vocabulary, "00000000.log", notes=notes or {}))
        finally:
            os.close(lock)
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
        read_manifest(folder)
        lock = lock_folder(folder) if write else None
        try:
            store = cls(folder, lock, segment_tokens)
            store._load()
            store.expect(tokenizer)
            if write:
                if not (folder / COPY).exists() or manifest_bytes(folder, COPY) != store._manifest_bytes:
                    write_manifest(folder, read_manifest(folder))  # its writer ended in between
                store._sweep()
                store._log = LogWriter(folder / store.manifest.log, store._log_end)
        except BaseException:
            if lock is not None:
                os.close(lock)
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

    def _load(self) -> None:
        """Read the manifest and what it names. A writer that switches to the next state meanwhile deletes files of the
        last one: then there is a newer manifest to read."""
        for attempt in range(100):
            data = manifest_bytes(self.folder)
            manifest = parse_manifest(self.folder / NAME, data)
            try:
                segments = {
                    e.name: self._segments.get(e.name) or Segment(self.folder / e.name) for e in manifest.segments
                }
                records = list(read_log(self.folder / manifest.log, beyond=self._held is not None))
            except FileNotFoundError as error:
                if attempt < 99 and manifest_bytes(self.folder) != data:
                    continue
                raise DamagedError(
                    f"{error.filename}: the store's manifest names it, but there is no such file; `slipstream store "
                    "repair` goes on without it"
                ) from error
            break
        for entry in manifest.segments:
            header = segments[entry.name].header
            found = [header[key] for key in ("vocabulary", "collection", "documents", "bytes")]
            if found != [manifest.vocabulary, entry.collection, entry.documents, entry.bytes]:
                raise DamagedError(
                    f"{self.folder / entry.name} is not the segment that the manifest names: `slipstream store repair` "
                    "goes on without it"
                )
        with self._lock:
            self.manifest, self._segments, self._memory, self._manifest_bytes = manifest, segments, {}, data
            self._log_end = PAGE
            for record, end in records:
                self._apply(record)
                self._log_end = end
            self._publish()

    def refresh(self) -> None:
        """For readers: see what a writer in another process did since."""
        if self._held is not None:
            return
        with self._lock:
            if manifest_bytes(self.folder) != self._manifest_bytes:
                self._load()
                return
            log = self.folder / self.manifest.log
            try:
                if os.stat(log).st_size == self._log_end:
                    return
                records = list(read_log(log, self._log_end))
            except FileNotFoundError:
                self._load()
                return
            for record, end in records:
                self._apply(record)
                self._log_end = end
            if records:
                self._publish()

    def _sweep(self) -> None:
        """Remove what a writer left that did not get to the end."""
        named = {e.name for e in self.manifest.segments} | {self.manifest.log}
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name) and path.name not in named:
                path.unlink()

    def close(self) -> None:
        """End background work and let another writer in. Nothing is lost by not calling it."""
        if (worker := self._worker) is not None and worker is not threading.current_thread():
            worker.join()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._held is not None:
            os.close(self._held)
            self._held = None

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
        if not collection or len(collection.encode(*NAMES)) > LONGEST:
            raise StoreError(f"collection {collection!r}: a name has 1 to {LONGEST} bytes")
        records = []
        for document in documents:
            if len(document.source.encode(*NAMES)) > 0xFFFF:
                raise StoreError(f"source {document.source[:80]!r}…: a name has at most 65535 bytes")
            if len(document.tokens):
                records.append(Record(DOCUMENT, collection, document.source, self._checked(document.tokens).tobytes()))
            if document.completes:
                records.append(Record(COMPLETE, collection, document.source, FILE.pack(*document.completes)))
        limit = self.segment_tokens if bulk else min(MEMORY_TOKENS, self.segment_tokens)
        with self._lock:
            self._write(records, bulk)
            if sum(m.size for m in self._memory.values()) >= limit:
                self.flush()

    def remove(self, source: str, collection: str = DEFAULT) -> int:
        """Forget every document of a source: no search finds it any more, and compaction deletes it. Returns how many
        documents there were."""
        self._writer()
        with self._lock:
            entry = self.sources(collection).get(source)
            if entry is not None:
                self._write([Record(REMOVE, collection, source)])
        return 0 if entry is None else entry.documents

    def sources(self, collection: str = DEFAULT) -> dict[str, SourceEntry]:
        """What the documents of a collection came from."""
        with self._lock:
            found: dict[str, SourceEntry] = {}
            parts = [
                [s for s in self._segments[e.name].sources if s.name not in e.removed]
                for e in self.manifest.segments
                if e.collection == collection
            ]
            if collection in self._memory:
                parts.append(list(self._memory[collection].entries().values()))
            for entry in (s for part in parts for s in part):
                found[entry.name] = _joined(found[entry.name], entry) if entry.name in found else entry
            return found

    def documents(self, collection: str = DEFAULT) -> Iterator[Tokens]:
        """Every document of a collection, one after the other."""
        with self._lock:
            parts = [(self._segments[e.name], e.removed) for e in self._entries(collection)]
            recent = self._memory[collection].documents() if collection in self._memory else []
        for segment, removed in parts:
            for tokens, _ in segment.documents(removed):
                yield tokens
        yield from recent

    def note(self, **notes: Any) -> None:
        """Write something about the store into its manifest."""
        self._writer()
        with self._lock, self._on_disk():
            self._switch(replace(self.manifest, notes={**self.manifest.notes, **notes}), ())

    def flush(self) -> None:
        """Make a segment of what is in memory, and begin a new log."""
        self._writer()
        with self._lock, self._on_disk(), self._or_as_it_was():
            manifest = self.manifest
            made = []
            for collection, memory in self._memory.items():
                if not memory.sources and not memory.files:
                    continue
                name, manifest = manifest.named()
                documents, sources, known = memory.documents(), memory.sources, memory.entries()
                memory.batches.clear()  # tokens are in memory once while they are sorted
                content = self._content(documents, sources, known, collection, (manifest.log,))
                documents.clear()
                made.append(self._make_segment(name, content))
            number, manifest = manifest.named()
            log = LogWriter.create(self.folder / f"{number}.log")
            old = self._log
            self._switch(replace(manifest, log=log.path.name), made)
            self._log, self._log_end, self._memory = log, log.end, {}
            self._publish()
            if old is not None:
                old.path.unlink()
                old.close(sync=False)
            self._compact_in_background()

    def compact(self) -> None:
        """As few segments as can be, without what was removed."""
        self._writer()
        self.flush()
        if self._worker is not None:
            self._worker.join()
        with self._compacting:
            for collection in sorted({e.collection for e in self.manifest.segments}):
                group: list[Entry] = []
                for entry in sorted(self._entries(collection), key=lambda e: e.tokens):
                    if sum(e.tokens for e in group) + entry.tokens > self.segment_tokens or len(group) == AT_ONCE:
                        self._merge(group)
                        group = []
                    group.append(entry)
                self._merge(group)

    def _merge(self, group: list[Entry]) -> None:
        """One segment of several, without their removed documents."""
        with self._compacting, self._on_disk():
            with self._lock:
                latest = {e.name: e for e in self.manifest.segments}
                if any(e.name not in latest for e in group):
                    return  # merged meanwhile: what is due will be seen again
                group = [latest[e.name] for e in group]
                if not group or (len(group) == 1 and not group[0].removed):
                    return
                segments = [self._segments[e.name] for e in group]
                name, self.manifest = self.manifest.named()
            documents: list[Tokens] = []
            sources: list[str] = []
            known: dict[str, SourceEntry] = {}
            for entry, segment in zip(group, segments, strict=True):
                for tokens, source in segment.documents(entry.removed):
                    documents.append(tokens)
                    sources.append(source)
                for s in segment.sources:
                    if s.name not in entry.removed:
                        known[s.name] = _joined(known[s.name], s) if s.name in known else s
            names = tuple(e.name for e in group)
            content = self._content(documents, sources, known, group[0].collection, names)
            made = [self._make_segment(name, content)] if known else []
            with self._lock:
                # What was removed while this went on is still in the new segment.
                now = {e.name: e.removed for e in self.manifest.segments}
                late = {s for e in group for s in now[e.name] if s not in e.removed}
                kept = [e for e in self.manifest.segments if e.name not in {g.name for g in group}]
                made = [(replace(entry, removed=tuple(sorted(late))), segment) for entry, segment in made]
                self._switch(replace(self.manifest, segments=tuple(kept)), made)
                self._publish()
            for segment in segments:
                segment.path.unlink()

    def _compact_in_background(self) -> None:
        """Whenever several segments of like size have gathered."""
        if self._worker is not None and self._worker.is_alive():
            return
        if self._due() is None:
            return

        def work() -> None:
            try:
                while (group := self._due()) is not None:
                    self._merge(group)
            except Exception as error:  # the store is as it was; say so where someone may see it
                warnings.warn(f"{self.folder}: background compaction gave up: {error}", stacklevel=2)

        self._worker = threading.Thread(target=work, name="slipstream-compaction", daemon=True)
        self._worker.start()

    def _due(self) -> list[Entry] | None:
        """Segments that should become one."""
        tiers: dict[tuple[str, int], list[Entry]] = {}
        for entry in self.manifest.segments:
            tier = int(np.log(max(entry.tokens, 1)) / np.log(FAN))
            tiers.setdefault((entry.collection, tier), []).append(entry)
        for group in tiers.values():
            if len(group) >= FAN and sum(e.tokens for e in group[:FAN]) <= self.segment_tokens:
                return group[:FAN]
        return None

    # ---- looking at all of it

    def verify(self) -> list[str]:
        """Read everything that is on the disk: what is wrong, in words."""
        wrong = []
        try:
            read_manifest(self.folder, COPY)
        except StoreError as error:
            wrong.append(str(error))
        try:
            there = Store.open(self.folder)  # reads the manifest, the headers and the log
        except StoreError as error:
            return [*wrong, str(error)]
        for memory in there._memory.values():
            if any(np.any(document >= there.manifest.vocabulary) for document in memory.documents()):
                wrong.append(f"{self.folder / there.manifest.log}: a document has tokens of another vocabulary")
        for entry in there.manifest.segments:
            segment = there._segments[entry.name]
            found = segment.verify()
            if not found and len(segment) - DEPTH - len(segment.starts) != entry.tokens:
                found = [f"{segment.path}: the manifest says that it has {entry.tokens} tokens, which is wrong"]
            if not found and not {s.name for s in segment.sources} >= set(entry.removed):
                found = [f"{segment.path}: the manifest says that sources were removed from it which it does not have"]
            wrong += found
        return wrong

    def info(self) -> dict[str, Any]:
        """What there is, in numbers. Removed documents don't count, but take up space until the next compaction."""
        with self._lock:
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
            size = sum(e.bytes for e in m.segments) + self._log_end + 2 * len(manifest_bytes(self.folder))
            tokens = sum(c["tokens"] for c in collections.values())
            return {
                "tokens": tokens,
                "documents": sum(c["documents"] for c in collections.values()),
                "bytes": size,
                "bytes_per_token": round(size / max(tokens, 1), 2),
                "log_bytes": self._log_end,
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

    def _checked(self, tokens: Sequence[int] | NDArray[Any]) -> Tokens:
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
        with self._lock:
            assert self._log is not None
            self._log.append(records, sync=not bulk)
            self._log_end = self._log.end
            for record in records:
                self._apply(record)
            if not bulk:
                self._publish()

    def _apply(self, record: Record) -> None:
        memory = self._memory.setdefault(record.collection, Memory(self.dtype))
        if record.kind == DOCUMENT:
            memory.append(np.frombuffer(record.body, self.dtype), record.source)
        elif record.kind == COMPLETE:
            memory.files[record.source] = FILE.unpack(record.body)
        elif record.kind == REMOVE:
            memory.remove(record.source)
            self.manifest = replace(
                self.manifest, segments=tuple(self._without(e, record) for e in self.manifest.segments)
            )

    def _without(self, entry: Entry, record: Record) -> Entry:
        if entry.collection != record.collection or record.source in entry.removed:
            return entry
        if all(s.name != record.source for s in self._segments[entry.name].sources):
            return entry
        return replace(entry, removed=(*entry.removed, record.source))

    def _content(
        self,
        documents: list[Tokens],
        sources: Sequence[str],
        known: dict[str, SourceEntry],
        collection: str,
        made_from: tuple[str, ...],
    ) -> Content:
        m = self.manifest
        content = content_of(documents, sources, known, collection, m.tokenizer, m.vocabulary, self.dtype)
        return replace(content, made_from=made_from)

    def _make_segment(self, name: str, content: Content) -> tuple[Entry, Segment]:
        path = self.folder / f"{name}.seg"
        write_segment(path, content, sort_positions(content.tokens))
        segment = Segment(path)
        tokens = len(content.tokens) - len(content.starts) - DEPTH
        return Entry(path.name, content.collection, tokens, len(content.starts), segment.header["bytes"]), segment

    @contextmanager
    def _or_as_it_was(self) -> Iterator[None]:
        """If making a segment fails, go back to what the disk says: all that was in memory is still in the log."""
        try:
            yield
        except Exception:
            reserved = self.manifest.next  # background compaction may be writing to a file of such a number
            self._load()
            self.manifest = replace(self.manifest, next=max(self.manifest.next, reserved))
            if self._log is not None and self._log.path.name != self.manifest.log:
                self._log.close()
                self._log = LogWriter(self.folder / self.manifest.log, self._log_end)
            raise

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.folder}: writing failed ({error}); what was added before is not lost") from error

    def _switch(self, manifest: Manifest, made: Sequence[tuple[Entry, Segment]]) -> None:
        """The one moment in which the store passes from one state to the next."""
        manifest = replace(manifest, segments=(*manifest.segments, *(entry for entry, _ in made)))
        write_manifest(self.folder, manifest)
        self.manifest = manifest
        segments = {**self._segments, **{entry.name: segment for entry, segment in made}}
        self._segments = {e.name: segments[e.name] for e in manifest.segments}

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


def _joined(a: SourceEntry, b: SourceEntry) -> SourceEntry:
    """One source whose documents lie in two places: where its end is, there is written what file it was. If two places
    have it, the one that says no size counts: documents were lost in a repair, and it must be read again."""
    ended = [s for s in (a, b) if s.complete] or [b]
    return replace(min(ended, key=lambda s: s.size), documents=a.documents + b.documents)


def lock_folder(folder: Path) -> int:
    """The right to write, held until the file is closed or the process ends."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, 32).decode(errors="replace") or "unknown"
        os.close(file)
        raise StoreError(
            f"{folder} is being written by process {holder.strip()}: there can be one writer; readers need not wait"
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file
