"""For repair: which files make up a damaged store. Those that the newest intact manifest names; or, if there is none or
some files are newer than it, what the files' own headers say."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.datastores.durable.log import LogHead, Record, read_log
from slipstream.datastores.durable.manifest import COPY, NAME, Manifest, SegmentEntry, new_id, read_manifest
from slipstream.datastores.durable.names import LOG, SEGMENT
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.salvage import any_header
from slipstream.datastores.durable.segment import Segment
from slipstream.errors import DamagedError, StoreError


@dataclass
class Findings:
    """State of a repair: what was found and done so far."""

    folder: Path
    manifest: Manifest
    logs: dict[str, set[str]]  # logs to read, and the collections to leave out of each
    records: list[Record] = field(default_factory=list)  # of the logs
    sentences: list[str] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)
    again: set[tuple[str, str]] = field(default_factory=set)  # collections and sources of which documents were lost
    lost: int = 0

    def name(self) -> str:
        number, self.manifest = self.manifest.named()
        return number


@dataclass(frozen=True)
class StoreFile:
    """What a file's header says."""

    store: str
    generation: int
    id: str  # of a segment the sum of its header, of a log its id
    header: dict[str, Any] = field(default_factory=dict)  # of a segment


def files_of(folder: Path) -> dict[str, StoreFile]:
    """Every segment and log whose header can be read."""
    found = {}
    for path in sorted(folder.iterdir()):
        if SEGMENT.fullmatch(path.name) and (segment := segment_file(path)) is not None:
            found[path.name] = segment
        elif LOG.fullmatch(path.name) and path.is_file():
            with path.open("rb") as file:
                head = LogHead.parse(file.read(PAGE))
            if head is not None:
                found[path.name] = StoreFile(head.store, head.generation, head.log)
    return found


def segment_file(path: Path) -> StoreFile | None:
    """A segment file, if one of its two headers can be read."""
    found = any_header(path)
    if found is None:
        return None
    header, id = found
    return StoreFile(header["store"], header["generation"], id, header)


def find_newest(folder: Path) -> Findings:
    """The newer of the manifest and its copy, if it belongs to these files; else a manifest made from the headers."""
    files = Counter(f.store for f in files_of(folder).values())
    whole: dict[str, Manifest] = {}
    for name in (NAME, COPY):
        if (folder / name).exists():
            with suppress(DamagedError):
                manifest = read_manifest(folder, name)
                if not files or files[manifest.id]:
                    whole[name] = manifest
    bad = [name for name in (NAME, COPY) if name not in whole]
    if not whole:
        state = _from_headers(folder)
    else:
        newest = max(whole, key=lambda name: (files[whole[name].id], whole[name].generation))  # in a tie, the first
        manifest = whole[newest]
        state = Findings(folder, manifest, {manifest.log: set()})
        state.sentences = [f"{name} was damaged, gone or another store's: it was made anew" for name in bad]
        if newest == COPY and NAME in whole:
            state.sentences.append(f"{NAME} was older than its copy: it was made anew from that")
            bad.append(NAME)
        _complete(state)
    state.aside += [folder / name for name in bad if (folder / name).exists()]
    return state


def _complete(state: Findings) -> None:
    """If the store has files that only a later manifest can have named, add them."""
    m, folder, files = state.manifest, state.folder, files_of(state.folder)
    named = {e.name for e in m.segments} | {m.log}
    later = [n for n, f in files.items() if n not in named and _is_as_new(f, m)]
    newer = [n for n in later if not _within(n, files[n], m, files, folder)]
    if not newer:
        return
    there = {n: f for n, f in files.items() if n in newer or n in named}
    kept, logs = _without_duplicates(folder, there)
    superseded = {name for n in kept for name, _ in there[n].header["made_from"]}
    # A damaged segment stays, to be mended, unless its documents are in another.
    entries = [e for e in m.segments if e.name in kept or (e.name not in there and e.name not in superseded)]
    entries += [SegmentEntry.of(n, files[n].header, files[n].id) for n in kept if n not in named]
    state.manifest, state.logs = replace(m, segments=tuple(entries)), logs
    if m.log not in logs and len(logs) == 1:
        (log,) = logs
        state.manifest = replace(state.manifest, log=log, log_id=files[log].id)
    state.aside += [folder / e.name for e in m.segments if e not in entries and (folder / e.name).exists()]
    state.aside += [folder / n for n in newer if n not in kept and n not in logs]
    if m.log not in logs and (folder / m.log).exists():
        state.aside.append(folder / m.log)
    shown = ", ".join(sorted(newer))
    state.sentences.append(
        f"{NAME} was older than {shown}: they are part of the store again; what was removed since may be back"
    )


def _is_as_new(file: StoreFile, m: Manifest) -> bool:
    """Whether a file is this store's, and not older than the manifest. A store of format 1 has no id to tell by."""
    return m.id != "" and file.store == m.id and file.generation >= m.generation


def _within(name: str, file: StoreFile, m: Manifest, files: dict[str, StoreFile], folder: Path) -> bool:
    """Whether everything in a file is also in files that the manifest names: then a writer was interrupted before it
    switched to the file."""
    if name.endswith(".log"):
        return (folder / name).stat().st_size <= PAGE
    named, origins = {m.log, *(e.name for e in m.segments)}, file.header["made_from"]
    return bool(origins) and all(name in named and _is_there(folder, name, id, files) for name, id in origins)


def _is_there(folder: Path, name: str, id: str, files: dict[str, StoreFile]) -> bool:
    """Whether a file that another was made from still exists, unchanged."""
    if name not in files:
        return False
    log, _, length = id.partition(":")
    return not id or (files[name].id == log and (folder / name).stat().st_size >= int(length or 0))


def _from_headers(folder: Path) -> Findings:
    """A manifest made from the headers of the files."""
    files = files_of(folder)
    segments = {n: f for n, f in files.items() if f.header}
    if not segments:
        raise StoreError(f"{folder} has lost its manifest and every segment: nothing tells what its log is made of")
    kinds = Counter((f.header["vocabulary"], f.header["tokenizer"]) for f in segments.values())
    (vocabulary, tokenizer), _ = kinds.most_common(1)[0]
    segments = {n: f for n, f in segments.items() if kind_of(f) == (vocabulary, tokenizer)}
    id, _ = Counter(f.store for f in segments.values()).most_common(1)[0]
    segments = {n: f for n, f in segments.items() if f.store in ("", id)}
    logs = {n: f for n, f in files.items() if not f.header and f.store in ("", id)}
    if any(f.generation for f in logs.values()):  # generation 0: made by an interrupted repair, from the other logs
        logs = {n: f for n, f in logs.items() if f.generation}
    kept, kept_logs = _without_duplicates(folder, segments | logs)
    entries = tuple(SegmentEntry.of(n, files[n].header, files[n].id) for n in kept)
    log = min(kept_logs, default="00000000.log")
    log_id = files[log].id if log in files and id else new_id() if id else ""
    manifest = Manifest(tokenizer, vocabulary, log, segments=entries, id=id, generation=0, log_id=log_id)
    state = Findings(folder, manifest, kept_logs)
    state.aside = [p for p in folder.glob("*.seg") if p.name not in kept]
    state.sentences = [
        f"{NAME} and its copy were damaged or gone: they were made anew from the segments; what had been removed from "
        "these without a compaction is back, and notes are lost"
    ]
    return state


def kind_of(file: StoreFile) -> tuple[int, str]:
    return file.header["vocabulary"], file.header["tokenizer"]


def _without_duplicates(folder: Path, files: dict[str, StoreFile]) -> tuple[list[str], dict[str, set[str]]]:
    """Which segments and logs to keep, and which collections to leave out of each log: after a crash, some documents
    may be in several files."""
    logs = {n: set[str]() for n, f in files.items() if not f.header}
    twice: set[str] = set()
    for name, file in files.items():
        if not file.header:
            continue
        origins = {n for n, id in file.header["made_from"] if _is_there(folder, n, id, files)}
        if origins & set(logs):
            # A log has the documents of all segments made from it, some of which may be missing.
            log = origins.pop()
            if log_is_whole(folder / log):
                twice.add(name)
            else:
                logs[log].add(file.header["collection"])
        elif len(origins) < len(file.header["made_from"]) or not wrong_with(folder / name):
            twice |= origins
        else:
            twice.add(name)
    return [n for n, f in files.items() if f.header and n not in twice], logs


def log_is_whole(path: Path) -> bool:
    try:
        read_log(path, beyond=True)
        return True
    except (StoreError, OSError):
        return False


def wrong_with(path: Path) -> list[str]:
    """The faults of a single segment."""
    try:
        return Segment(path).verify()
    except (StoreError, FileNotFoundError) as error:
        return [str(error)]
