"""A store's contents in this process: the manifest, its segments, the log, and documents in memory.

They change together, one change at a time (`changing`). The disk goes from one state to the next atomically (`switch`);
then memory is updated, and searches get a new snapshot (`publish`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.datastores.durable.disk import on_disk, write_whole
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
    read_log,
    read_shared_log,
)
from slipstream.datastores.durable.manifest import (
    COPY,
    Manifest,
    SegmentEntry,
    manifest_bytes,
    new_id,
    write_manifest,
)
from slipstream.datastores.durable.memory import Memory, content_of_run
from slipstream.datastores.durable.segment import Content, Segment, write_segment
from slipstream.datastores.durable.state import State, read_state
from slipstream.datastores.durable.sweep import sweep
from slipstream.datastores.durable.witness import Place, Witness
from slipstream.datastores.sparse.runs import Pieces, Run, Runs
from slipstream.datastores.sparse.sort import Tokens
from slipstream.errors import StoreError

RECHECK = 60.0  # seconds until pages are checked again, even if their file has not changed


class Contents:
    """The contents of one store, for one writer or one reader."""

    manifest: Manifest

    def __init__(self, folder: Path, lock: Lock | None = None) -> None:
        self.folder = folder
        self.held = lock  # the writer's lock; None: open for reading
        self.log: LogWriter | None = None
        self.witness: Witness | None = None
        self.place = Place()  # how far the log was read
        self.segments: dict[str, Segment] = {}
        self.memory: dict[str, Memory] = {}  # by collection: documents that are only in the log
        self.views: dict[str, Runs] = {}  # by collection: the snapshot for searches
        self._lock = threading.RLock()
        self._unsure = False  # a change was interrupted: memory must be loaded again from the disk
        self._runs: dict[str, tuple[tuple[str, ...], Run]] = {}
        self._manifest_bytes = b""
        self._checked = time.monotonic()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.manifest.width // 8}")

    def load(self) -> None:
        """Load everything from the disk."""
        self._take(read_state(self.folder, self.segments, writing=self.held is not None))

    def _take(self, state: State) -> None:
        self.manifest, self.segments, self._manifest_bytes = state.manifest, state.segments, state.manifest_bytes
        self.memory, self.place = {}, state.log.place
        self._apply(state.log.records)
        self.publish()

    def refresh(self) -> None:
        """Load what a writer in another process has changed, and check the pages of changed files again."""
        with on_disk(self.folder), self.changing():
            self._trust_again()
            if self.held is not None:
                return
            if manifest_bytes(self.folder) != self._manifest_bytes:
                self.load()
                return
            log = self.folder / self.manifest.log
            try:
                if os.stat(log).st_size == self.place.length:
                    return
                read = read_shared_log(log, self.place)
            except FileNotFoundError:
                self.load()
                return
            if read.records:
                self._apply(read.records)
                self.publish()
            self.place = read.place

    def _trust_again(self) -> None:
        due = time.monotonic() - self._checked > RECHECK
        for segment in self.segments.values():
            try:
                segment.trust_again(always=due)
            except FileNotFoundError:  # probably merged: the manifest must be read again
                self.segments = {n: s for n, s in self.segments.items() if s is not segment}
                self._manifest_bytes = b""
        if due:
            self._checked = time.monotonic()

    def begin_writing(self) -> None:
        if not (self.folder / COPY).exists() or manifest_bytes(self.folder, COPY) != self._manifest_bytes:
            write_whole(self.folder / COPY, self._manifest_bytes)  # the last writer ended before writing the copy
        sweep(self.folder, self.manifest, self.place)
        self.witness = Witness(self.folder)
        if not self.manifest.id:
            self._migrate()
        else:
            self._open_log()

    def _open_log(self) -> None:
        assert self.witness is not None
        log = LogWriter(self.folder / self.manifest.log, self.place)
        log.enter(self.witness, self.manifest.generation)
        self.log, old = log, self.log
        if old is not None:
            old.close(sync=False)

    def _migrate(self) -> None:
        """Convert a store of format 1: give ids to the store, to its log, which is rewritten, and to its segments."""
        id, records = new_id(), read_log(self.folder / self.manifest.log, beyond=True).records
        number, manifest = self.manifest.named()
        log = LogWriter.create(self.folder / f"{number}.log", LogHead(id, new_id(), 1))
        log.append(records)
        segments = tuple(replace(e, sum=self.segments[e.name].sum) for e in manifest.segments)
        manifest = replace(manifest, id=id, generation=1, log=log.path.name, log_id=log.head.log, segments=segments)
        write_manifest(self.folder, manifest)
        (self.folder / self.manifest.log).unlink()
        log.close()
        self.load()
        self._open_log()

    def close(self) -> None:
        forked = self.held is not None and not self.held.ours
        log, witness, held = self.log, self.witness, self.held
        self.log = self.witness = self.held = None
        try:
            if log is not None:
                with on_disk(self.folder):
                    log.close(sync=not forked)
        finally:
            for file in (witness, held):
                if file is not None:
                    file.close()

    def runs(self, collection: str) -> Runs:
        """A snapshot of everything in a collection, to be searched."""
        return self.views.get(collection) or Runs((), self.dtype)

    def entries(self, collection: str) -> list[SegmentEntry]:
        return [e for e in self.manifest.segments if e.collection == collection]

    def check_writer(self) -> None:
        if self.held is None:
            raise StoreError(f"{self.folder} is open for reading: open it with write=True")
        if not self.held.ours:
            raise StoreError(
                f"{self.folder} was opened by process {self.held.process}, of which this is a fork: open it here, "
                "when that one has closed it"
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block that changes the store, one at a time. If it is interrupted or fails, memory and disk may differ:
        then everything is loaded again before the next use."""
        with self.settled():
            self._unsure = True
            yield
            self._unsure = False

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A block in which nothing changes and memory agrees with the disk."""
        with self._lock:
            if self._unsure:
                self._recover()
                self._unsure = False
            yield

    def _recover(self) -> None:
        if self.log is not None and self.log.doubtful:
            raise StoreError(f"{self.folder}: the disk failed, and what was added in bulk may be lost: open it again")
        reserved = self.manifest.next  # background compaction may be writing a file with such a number
        with on_disk(self.folder):
            self.load()
            self.manifest = replace(self.manifest, next=max(self.manifest.next, reserved))
            if self.held is not None:
                self._open_log()

    def write(self, records: list[Record], bulk: bool = False) -> None:
        if not records:
            return
        assert self.log is not None
        self.log.append(records, sync=not bulk)
        self.place = self.log.place
        self._apply(records)
        if not bulk:
            self.publish()

    def _apply(self, records: Sequence[Record]) -> None:
        """Apply records to memory. Consecutive documents are sorted together."""
        waiting: dict[str, tuple[list[Tokens], list[str]]] = {}
        for record in records:
            memory = self.memory.setdefault(record.collection, Memory(self.dtype, self.manifest.vocabulary))
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
            self.memory[collection].extend(documents, sources)

    def _without(self, entry: SegmentEntry, record: Record) -> SegmentEntry:
        if entry.collection != record.collection or record.source in entry.removed:
            return entry
        if record.source not in self.segments[entry.name].numbers:
            return entry
        return replace(entry, removed=(*entry.removed, record.source))

    def make_segment(
        self, name: str, content: Content, made_from: Sequence[tuple[str, str]]
    ) -> tuple[SegmentEntry, Segment]:
        path, m = self.folder / f"{name}.seg", self.manifest
        content = replace(content, made_from=tuple(made_from), store=m.id, generation=m.generation)
        write_segment(path, content, Pieces(content.tokens))
        segment = Segment(path)
        return SegmentEntry.of(segment.name, segment.header, segment.sum), segment

    def switch(
        self,
        manifest: Manifest,
        made: Sequence[tuple[SegmentEntry, Segment]],
        gone: Sequence[tuple[str, str]] = (),
        log: LogWriter | None = None,
    ) -> None:
        """Replace the manifest: the store atomically goes from one state to the next. gone: files (with their ids)
        whose contents are in other files from now on. log: the log to continue with."""
        assert self.log is not None
        assert self.witness is not None
        still = [(name, id) for name, id in manifest.gone if (self.folder / name).exists()]
        segments = (*manifest.segments, *(entry for entry, _ in made))
        manifest = replace(manifest, segments=segments, gone=(*still, *gone), generation=manifest.generation + 1)
        write_manifest(self.folder, manifest)
        self._manifest_bytes = manifest_bytes(self.folder)
        self.manifest = manifest
        known = {**self.segments, **{entry.name: segment for entry, segment in made}}
        self.segments = {e.name: known[e.name] for e in manifest.segments}
        if log is not None:
            self.log, self.place, old = log, log.place, self.log
            old.close(sync=False)
        self.log.enter(self.witness, manifest.generation)
        for name, _ in manifest.gone:
            (self.folder / name).unlink(missing_ok=True)

    def publish(self) -> None:
        """Make the new snapshots for searches."""
        runs: dict[str, list[Run]] = {}
        for entry in self.manifest.segments:
            kept = self._runs.get(entry.name)
            if kept is None or kept[0] != entry.removed:
                self._runs[entry.name] = kept = (entry.removed, self.segments[entry.name].run(entry.removed))
            runs.setdefault(entry.collection, []).append(kept[1])
        self._runs = {e.name: self._runs[e.name] for e in self.manifest.segments}
        for collection, memory in self.memory.items():
            runs.setdefault(collection, []).extend(memory.runs())
        self.views = {c: Runs(r, self.dtype) for c, r in runs.items()}

    def flush(self) -> None:
        """Write the documents in memory to segments, and begin a new log."""
        self.check_writer()
        with on_disk(self.folder), self.changing():
            manifest, made, origin = self.manifest, [], self.origin
            for collection, memory in self.memory.items():
                known = memory.entries()
                if known:
                    name, manifest = manifest.named()
                    m, sources = self.manifest, memory.sources
                    content = content_of_run(memory.take_text(), sources, known, collection, m.tokenizer, m.vocabulary)
                    made.append(self.make_segment(name, content, origin))
            self._begin_log(manifest, made)

    @property
    def origin(self) -> tuple[tuple[str, str], ...]:
        """What segments made from the current log are recorded to be made from."""
        assert self.log is not None
        return ((self.log.path.name, f"{self.log.head.log}:{self.log.place.length}"),)

    def adopt(self, files: Sequence[Path]) -> None:
        """Add finished segments to the store, all at once. Other processes made them for it (`origin`) while its log
        was empty. The files get a second name in the store's folder, by links. If this is interrupted, the next writer
        deletes the links that no manifest names."""
        self.check_writer()
        with on_disk(self.folder), self.changing():
            if self.memory:
                raise StoreError(f"{self.folder} has documents that are in no segment yet: flush it first")
            manifest, made = self.manifest, []
            for file in files:
                number, manifest = manifest.named()
                os.link(file, self.folder / f"{number}.seg")
                segment = Segment(self.folder / f"{number}.seg")
                made.append((SegmentEntry.of(segment.name, segment.header, segment.sum), segment))
            self._begin_log(manifest, made)

    def _begin_log(self, manifest: Manifest, made: Sequence[tuple[SegmentEntry, Segment]]) -> None:
        """Switch to a state where the log's contents are in segments, and the log is new and empty."""
        assert self.log is not None
        old = self.log
        number, manifest = manifest.named()
        head = LogHead(manifest.id, new_id(), manifest.generation)
        log = LogWriter.create(self.folder / f"{number}.log", head)
        manifest = replace(manifest, log=log.path.name, log_id=head.log)
        self.switch(manifest, made, [(old.path.name, old.head.log)], log)
        self.memory = {}
        self.publish()
