"""Repair: keep everything of a damaged store that is provably intact. Damaged files are set aside, never deleted.

What can be rebuilt is: the order of a segment from its tokens, the manifest from its copy or from the segments. The
newest files win: a manifest that is older than some files is completed from them. New files are written first, then the
manifest is switched, and only then are damaged files moved, so an interrupted repair can be repeated.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slipstream.datastores.durable.disk import sync_folder
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
    read_log,
    salvage_log,
    sum_at,
)
from slipstream.datastores.durable.manifest import COPY, NAME, SegmentEntry, new_id, write_manifest
from slipstream.datastores.durable.memory import content_of
from slipstream.datastores.durable.names import OURS
from slipstream.datastores.durable.newest import (
    Findings,
    files_of,
    find_newest,
    kind_of,
    log_is_whole,
    segment_file,
    wrong_with,
)
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.salvage import SALVAGED, Salvaged, salvage_segment
from slipstream.datastores.durable.segment import Segment, write_segment
from slipstream.datastores.durable.state import possible
from slipstream.datastores.durable.store import Store
from slipstream.datastores.durable.sweep import ORPHANS
from slipstream.datastores.durable.witness import Witness, Witnessed
from slipstream.datastores.sparse.runs import Pieces
from slipstream.errors import StoreError

ASIDE = "damaged"
AGAIN = FILE.pack(-1, -1)  # marks a source to be read again: no file has this size and time


@dataclass(frozen=True)
class RepairReport:
    kept: int  # documents
    lost: int  # documents, as far as known
    set_aside: tuple[str, ...]  # files that are now in the folder `damaged`
    sentences: tuple[str, ...]  # what was found and done; empty if nothing was wrong


def repair(folder: str | Path) -> RepairReport:
    """Repair a store. There must be no writer."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in (NAME, COPY)) and not any(folder.glob("*.seg")):
        raise StoreError(f"{folder} is no datastore: it has neither a manifest nor a segment")
    lock = Lock(folder)
    try:
        state = find_newest(folder)
        before = state.manifest
        names = [p.name for p in (*folder.iterdir(), *folder.glob(f"{ASIDE}/*"), *folder.glob(f"{ORPHANS}/*"))]
        free = 1 + max((int(n.split(".")[0]) for n in names if OURS.match(n) and n[0].isdigit()), default=0)
        state.manifest = replace(state.manifest, next=max(state.manifest.next, free))
        witness = Witness.read(folder)
        _mend_log(state, witness)
        entries = [entry for e in state.manifest.segments if (entry := _mend_segment(state, e)) is not None]
        state.manifest = replace(state.manifest, segments=tuple(entries))
        generations = [
            before.generation,
            witness.generation if witness else 0,
            *(f.generation for f in files_of(folder).values()),
        ]
        return _finish(state, max(generations) + 1, changed=bool(state.sentences) or not before.id)
    except OSError as error:
        raise StoreError(f"{folder}: the disk or the file system failed ({error}); repair it again then") from error
    finally:
        lock.close()


# ---- logs


def _mend_log(state: Findings, witness: Witnessed | None) -> None:
    """Read every log. Unless there is exactly one and it is intact, write a new one from them."""
    damaged = [name for name in state.logs if not _is_ours(state, name, witness)]
    for name, elsewhere in state.logs.items():
        path = state.folder / name
        if name not in damaged:
            state.records += [r for r in read_log(path, beyond=True).records if r.collection not in elsewhere]
        elif not path.exists():
            state.sentences.append(f"{name}: the log is gone, and with it what was added or removed lately")
        else:
            _salvage(state, path, elsewhere, witness)
    if damaged or len(state.logs) != 1 or not state.manifest.id:
        state.aside += [state.folder / name for name in state.logs if (state.folder / name).exists()]
        id = state.manifest.id or new_id()
        log = LogWriter.create(state.folder / f"{state.name()}.log", LogHead(id, new_id(), 0))
        log.append([*state.records, *_read_again(state)])
        log.close()
        state.manifest = replace(state.manifest, id=id, log=log.path.name, log_id=log.head.log)
        state.sentences = state.sentences or ["the store had no ids: it got some"]


def _is_ours(state: Findings, name: str, witness: Witnessed | None) -> bool:
    """Whether a log is intact, and has the ids of the manifest and the witness."""
    path, m = state.folder / name, state.manifest
    if not log_is_whole(path):
        return False
    log = read_log(path, beyond=True)
    if name == m.log and m.id and (log.head.store, log.head.log) != (m.id, m.log_id):
        return False
    if witness is not None and witness.log == log.head.log:
        return sum_at(path, witness.place.length) == witness.place.sum
    return True


def _salvage(state: Findings, path: Path, elsewhere: set[str], witness: Witnessed | None) -> None:
    m = state.manifest
    with path.open("rb") as file:
        head = LogHead.parse(file.read(PAGE))
    if head is not None and m.id and path.name == m.log and (head.store, head.log) != (m.id, m.log_id):
        state.sentences.append(
            f"{path.name}: this is another log than the store had: it is set aside, and what was added or removed "
            "lately is lost"
        )
        return
    id = head.log if head is not None else m.log_id
    told = witness.place.length if witness is not None and witness.log == id else 0
    found, lost = salvage_log(path, id, told)
    found = [r for r in found if r.collection not in elsewhere and possible(r, m.width)]
    unknown = head is None and not told
    if lost or unknown:
        state.again |= {(r.collection, r.source) for r in found if r.kind != REMOVE}
        found = [_without_progress(r) for r in found if r.kind != COMPLETE]
    state.records += found
    more = f", {lost} bytes are lost; a removal among them is undone" if lost else ""
    more = more or (", and how many there were can't be told any more" if unknown else "")
    state.sentences.append(f"{path.name}: {len(found)} records of the log are whole and kept{more}")


def _without_progress(record: Record) -> Record:
    """The record without progress in its file. Other documents of the file are lost, so it must be read again."""
    return replace(record, kind=DOCUMENT, body=record.body[PROGRESS.size :]) if record.kind == READ else record


# ---- segments


def _mend_segment(state: Findings, entry: SegmentEntry) -> SegmentEntry | None:
    """The entry of a segment if it is intact, else of a new one made from its intact documents."""
    path, m = state.folder / entry.name, state.manifest
    file = segment_file(path)
    if file is not None:
        there = replace(SegmentEntry.of(entry.name, file.header, file.id), removed=entry.removed)
        other = kind_of(file) != (m.vocabulary, m.tokenizer) or file.store not in ("", m.id)
        if other or there != replace(entry, sum=entry.sum or there.sum):
            file = None
        elif not wrong_with(path):
            return there
    state.aside += [path] if path.exists() else []
    if file is None:
        state.lost += entry.documents
        how = "is gone" if not path.exists() else "has no header of this store left"
        state.sentences.append(f"{entry.name} {how}: its {entry.documents} documents are lost")
        return None
    found = salvage_segment(path, file.header)
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
    return _write(state, entry, found) if found.sources else None


def _write(state: Findings, damaged: SegmentEntry, found: Salvaged) -> SegmentEntry:
    """Write a new segment from what was salvaged."""
    counts = Counter(found.names)
    entries = {s.name: replace(s, documents=counts[s.name]) for s in found.sources}
    for name in found.incomplete:  # said here too, since a repair may be interrupted before it is in the log
        entries[name] = SourceEntry(name, counts[name], *FILE.unpack(AGAIN))
    m = state.manifest
    dtype = np.dtype(f"<u{m.width // 8}")
    content = content_of(found.documents, found.names, entries, damaged.collection, m.tokenizer, m.vocabulary, dtype)
    content = replace(content, store=m.id, made_from=((damaged.name, damaged.sum),))
    path = state.folder / f"{state.name()}.seg"
    write_segment(path, content, Pieces(content.tokens))
    segment = Segment(path)
    return SegmentEntry.of(path.name, segment.header, segment.sum)


# ---- the end


def _finish(state: Findings, generation: int, changed: bool) -> RepairReport:
    folder = state.folder
    for path in state.aside:
        _copy_aside(path)
    changed = changed or bool(state.sentences or state.aside) or Witness.read(folder) is None
    if changed:
        write_manifest(folder, replace(state.manifest, generation=generation, gone=()))
        for path in state.aside:
            if path.name not in (NAME, COPY):
                path.unlink()
        (folder / Witness.NAME).unlink(missing_ok=True)  # it may refer to lost records
        # Complete records may lie beyond the acknowledged length, which is not synced: acknowledge them, since whoever
        # opens the store while it is locked reads no further, and what follows is cut off.
        log = folder / state.manifest.log
        LogWriter(log, read_log(log, beyond=True).place).close()
    with Store.open(folder) as store:
        place, kept, generation = store.contents.place, store.info()["documents"], store.manifest.generation
    if not changed:
        return RepairReport(kept, 0, (), ())
    writer, witness = LogWriter(folder / state.manifest.log, place), Witness(folder)
    if again := _read_again(state):
        writer.append(again)
        shown = ", ".join(record.source for record in again[:5]) + (", …" if len(again) > 5 else "")
        state.sentences.append(f"documents of {len(again)} sources were lost: add them again ({shown})")
    writer.enter(witness, generation)
    writer.close()
    witness.close()
    if state.aside:
        state.sentences.append(f"the damaged files are in {folder / ASIDE}: delete them when you miss nothing")
    return RepairReport(kept, state.lost, tuple(p.name for p in state.aside), tuple(state.sentences))


def _read_again(state: Findings) -> list[Record]:
    """Records that mark the sources to be read again, as far as they are known so far."""
    return [Record(COMPLETE, collection, source, AGAIN) for collection, source in sorted(state.again) if source]


def _copy_aside(path: Path) -> None:
    """Link the file into the folder `damaged`, or copy it if the file system has no hard links."""
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
