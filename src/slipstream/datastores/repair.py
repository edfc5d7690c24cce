"""Repair: keep everything of a damaged store that is provably whole. Damaged files are set aside, never deleted.

Whatever can be made again from something whole is: the order of a segment from its tokens, the manifest from its copy
or from the segments. New files are written first, then the manifest is switched, and only then damaged files leave
their place, so an interrupted repair can be repeated.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.datastores.log import COMPLETE, DOCUMENT, FILE, REMOVE, LogWriter, Record, read_log, salvage_log
from slipstream.datastores.manifest import COPY, NAME, Entry, Manifest, read_manifest, write_manifest
from slipstream.datastores.memory import content_of
from slipstream.datastores.salvage import SALVAGED, Salvaged, any_header, salvage_segment
from slipstream.datastores.segment import Segment, sync_folder, write_segment
from slipstream.datastores.sort import DEPTH, sort_positions
from slipstream.datastores.store import OURS, Store, lock_folder
from slipstream.errors import DamagedError, StoreError

ASIDE = "damaged"
AGAIN = FILE.pack(-1, -1)  # a source that ended with no size or time: no file is like it, so it is read again


@dataclass(frozen=True)
class Report:
    kept: int  # documents
    lost: int  # documents, as far as it is known how many there were
    set_aside: tuple[str, ...]  # files that are now in the folder `damaged`
    sentences: tuple[str, ...]  # what was found and done; empty if all was well


@dataclass
class _State:
    """What is found out on the way."""

    folder: Path
    manifest: Manifest
    records: list[Record] = field(default_factory=list)  # of the log
    sentences: list[str] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)
    again: set[tuple[str, str]] = field(default_factory=set)  # collections and sources of which documents were lost
    lost: int = 0

    def name(self) -> str:
        number, self.manifest = self.manifest.named()
        return number


def repair(folder: str | Path) -> Report:
    """Make a store sound again. There must be no writer."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in (NAME, COPY)) and not any(folder.glob("*.seg")):
        raise StoreError(f"{folder} is no datastore: it has neither a manifest nor a segment")
    lock = lock_folder(folder)
    try:
        state, logs = _find_manifest(folder)
        names = [p.name for p in (*folder.iterdir(), *(folder / ASIDE).glob("*")) if OURS.match(p.name)]
        free = 1 + max((int(name.split(".")[0]) for name in names if name[0].isdigit()), default=0)
        state.manifest = replace(state.manifest, next=max(state.manifest.next, free))
        _mend_log(state, logs)
        entries = [entry for e in state.manifest.segments if (entry := _mend_segment(state, e)) is not None]
        state.manifest = replace(state.manifest, segments=tuple(entries))
        return _finish(state)
    finally:
        os.close(lock)


# ---- the manifest


def _find_manifest(folder: Path) -> tuple[_State, dict[str, set[str]]]:
    """The manifest, its copy, or one like it; with the logs to read, and the collections to leave out of each."""
    whole: dict[str, Manifest] = {}
    for name in (NAME, COPY):
        if (folder / name).exists():
            with suppress(DamagedError):
                whole[name] = read_manifest(folder, name)
    bad = [name for name in (NAME, COPY) if name not in whole]
    if whole:
        manifest = next(iter(whole.values()))
        state, logs = _State(folder, manifest), {manifest.log: set[str]()}
        state.sentences = [f"{name} was damaged or gone: it was made anew" for name in bad]
    else:
        state, logs = _from_headers(folder)
    state.aside += [folder / name for name in bad if (folder / name).exists()]
    return state, logs


def _from_headers(folder: Path) -> tuple[_State, dict[str, set[str]]]:
    """What the segments themselves say. A crash may have left files whose documents are in others too."""
    headers = {p.name: h for p in sorted(folder.glob("*.seg")) if (h := any_header(p)) is not None}
    if not headers:
        raise StoreError(f"{folder} has lost its manifest and every segment: nothing tells what its log is made of")
    kinds = Counter((h["vocabulary"], h["tokenizer"]) for h in headers.values())
    (vocabulary, tokenizer), _ = kinds.most_common(1)[0]
    headers = {n: h for n, h in headers.items() if (h["vocabulary"], h["tokenizer"]) == (vocabulary, tokenizer)}
    logs = {p.name: set[str]() for p in sorted(folder.glob("*.log")) if OURS.fullmatch(p.name)}
    twice: set[str] = set()
    for name, header in headers.items():
        origins = {o for o in header["made_from"] if (folder / o).exists()}
        if origins & set(logs):
            # A log has what all segments made from it have, and these may not have been all of them yet.
            log = origins.pop()
            if _log_is_whole(folder / log):
                twice.add(name)
            else:
                logs[log].add(header["collection"])
        elif len(origins) < len(header["made_from"]) or not _wrong(folder / name):
            twice |= origins
        else:
            twice.add(name)
    entries = tuple(_entry(name, header) for name, header in headers.items() if name not in twice)
    state = _State(folder, Manifest(tokenizer, vocabulary, min(logs, default=""), segments=entries))
    state.aside = [p for p in folder.glob("*.seg") if p.name not in {e.name for e in entries}]
    state.sentences = [
        f"{NAME} and its copy were damaged or gone: they were made anew from the segments; what had been removed from "
        "these without a compaction is back, and notes are lost"
    ]
    return state, logs


def _entry(name: str, header: dict[str, Any]) -> Entry:
    tokens = header["sections"]["tokens"][1] * 8 // header["width"] - DEPTH - header["documents"]
    return Entry(name, header["collection"], tokens, header["documents"], header["bytes"])


# ---- logs


def _log_is_whole(path: Path) -> bool:
    try:
        for _ in read_log(path, beyond=True):
            pass
        return True
    except (StoreError, FileNotFoundError):
        return False


def _mend_log(state: _State, logs: dict[str, set[str]]) -> None:
    """Read every log; unless there is just one and it is whole, they become a new one."""
    damaged = [name for name in logs if not _log_is_whole(state.folder / name)]
    for name, elsewhere in logs.items():
        path = state.folder / name
        if name not in damaged:
            state.records += [record for record, _ in read_log(path, beyond=True)]
        elif not path.exists():
            state.sentences.append(f"{name}: the log is gone, and with it what was added or removed lately")
        else:
            found, lost = salvage_log(path)
            found = [record for record in found if record.collection not in elsewhere]
            if lost:
                state.again |= {(r.collection, r.source) for r in found if r.kind in (DOCUMENT, COMPLETE)}
                found = [record for record in found if record.kind != COMPLETE]
            state.records += found
            more = f", {lost} bytes are lost; a removal among them is undone" if lost else ""
            state.sentences.append(f"{name}: {len(found)} records of the log are whole and kept{more}")
    if damaged or len(logs) != 1:
        state.aside += [state.folder / name for name in logs if (state.folder / name).exists()]
        log = LogWriter.create(state.folder / f"{state.name()}.log")
        log.append(state.records)
        log.close()
        state.manifest = replace(state.manifest, log=log.path.name)


# ---- segments


def _wrong(path: Path) -> list[str]:
    """What is wrong with a segment by itself."""
    try:
        return Segment(path).verify()
    except (StoreError, FileNotFoundError) as error:
        return [str(error)]


def _mend_segment(state: _State, entry: Entry) -> Entry | None:
    """The entry of a segment that is whole, or of one that was made of its whole documents."""
    path = state.folder / entry.name
    header = any_header(path)
    if header is not None:
        other = (header["vocabulary"], header["tokenizer"]) != (state.manifest.vocabulary, state.manifest.tokenizer)
        if other or replace(_entry(entry.name, header), removed=entry.removed) != entry:
            header = None
    if header is not None and not _wrong(path):
        return entry
    state.aside += [path] if path.exists() else []
    if header is None:
        state.lost += entry.documents
        how = "is gone" if not path.exists() else "has no header of this store left"
        state.sentences.append(f"{entry.name} {how}: its {entry.documents} documents are lost")
        return None
    found = salvage_segment(path, header)
    removed = {r.source for r in state.records if r.kind == REMOVE and r.collection == entry.collection}
    removed |= set(entry.removed)
    if not found.named and removed:
        state.lost += entry.documents
        state.sentences.append(
            f"{entry.name}: which of its documents had been removed can't be told any more, so none of its "
            f"{entry.documents} is kept"
        )
        return None
    found = found.without(removed)
    state.lost += found.lost
    state.again |= {(entry.collection, source) for source in found.incomplete}
    unnamed = "" if found.named else f"; they are from {SALVAGED!r} now, since their sources are lost"
    state.sentences.append(
        f"{entry.name}: {len(found.documents)} documents are whole and kept, {found.lost} are lost{unnamed}"
    )
    return _write(state, entry.collection, found) if found.sources else None


def _write(state: _State, collection: str, found: Salvaged) -> Entry:
    """A new segment of what was salvaged."""
    counts = Counter(found.names)
    entries = {s.name: replace(s, documents=counts[s.name]) for s in found.sources}
    m = state.manifest
    dtype = np.dtype(f"<u{m.width // 8}")
    content = content_of(found.documents, found.names, entries, collection, m.tokenizer, m.vocabulary, dtype)
    path = state.folder / f"{state.name()}.seg"
    write_segment(path, content, sort_positions(content.tokens))
    return _entry(path.name, Segment(path).header)


# ---- the end


def _finish(state: _State) -> Report:
    folder = state.folder
    for path in state.aside:
        _copy_aside(path)
    write_manifest(folder, state.manifest)
    for path in state.aside:
        if path.name not in (NAME, COPY):
            path.unlink()
    with Store.open(folder) as store:
        end, kept = store._log_end, store.info()["documents"]
    again = sorted((c, s) for c, s in state.again if s)
    if again:
        log = LogWriter(folder / state.manifest.log, end)
        log.append([Record(COMPLETE, collection, source, AGAIN) for collection, source in again])
        log.close()
        shown = ", ".join(source for _, source in again[:5]) + (", …" if len(again) > 5 else "")
        state.sentences.append(f"documents of {len(again)} sources were lost: add them again ({shown})")
    if state.aside:
        state.sentences.append(f"the damaged files are in {folder / ASIDE}: delete them when you miss nothing")
    return Report(kept, state.lost, tuple(p.name for p in state.aside), tuple(state.sentences))


def _copy_aside(path: Path) -> None:
    """A second name for the file, or a copy where the file system has no second names."""
    aside = path.parent / ASIDE
    aside.mkdir(exist_ok=True)
    for name in (path.name, *(f"{path.name}.{i}" for i in range(2, 1000))):
        there = aside / name
        if there.exists() and there.samefile(path):
            return
        if not there.exists():
            try:
                os.link(path, there)
            except OSError:
                shutil.copy2(path, there)
            sync_folder(aside)
            return
    raise StoreError(f"{aside} is full of {path.name}: delete what you don't need any more")
