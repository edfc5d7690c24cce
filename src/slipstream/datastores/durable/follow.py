"""A store that follows another one: it fetches the segments that it lacks, which never change, checks them, and
switches to the other's state atomically.

Documents that are only in the other's log come with its next segment. A follower is read like any store, but not
written by anything else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from slipstream.datastores.durable.disk import on_disk, sync_folder, write_whole
from slipstream.datastores.durable.lock import Lock
from slipstream.datastores.durable.log import LogHead, LogWriter
from slipstream.datastores.durable.manifest import (
    COPY,
    FOLLOWS,
    NAME,
    Manifest,
    SegmentEntry,
    manifest_bytes,
    new_id,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from slipstream.datastores.durable.names import OURS
from slipstream.datastores.durable.newest import files_of
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.witness import Place, Witness
from slipstream.errors import DamagedError, StoreError
from slipstream.urls import Url, path_of

TURNS = 100  # tries: a writer that merges segments may delete one that is being fetched, then its newer state is read


@dataclass(frozen=True)
class Followed:
    """The result of `follow`."""

    generation: int  # of the state that both have now
    changed: bool  # whether the target had another one before
    fetched: int = 0  # segments
    bytes: int = 0


def follow(source: str | Path, target: str | Path) -> Followed:
    """Bring a store to the state of another. Each is a folder or a URL. At any moment, also after a crash, the target
    is in one complete state of the source."""
    there, here = path_of(source), path_of(target)
    for turn in range(TURNS):
        data = _manifest_bytes(there)
        manifest = parse_manifest(there / NAME, data)
        if not manifest.id:
            raise StoreError(f"{source} has format 1, which can't be followed: `slipstream store compact` renews it")
        try:
            if isinstance(here, Url):
                return _publish(there, here, manifest, data)
            return _follow(there, here, manifest)
        except _GoneError as error:
            if turn == TURNS - 1 or _manifest_bytes(there) == data:
                raise DamagedError(f"{error}: the manifest names it, but there is no such file") from error
    raise AssertionError("the last turn returns or raises")


class _GoneError(Exception):
    """The source no longer has a segment."""


@contextmanager
def _opened(path: Path | Url) -> Iterator[IO[bytes]]:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise _GoneError(str(path)) from error
    with file:
        yield file


def _manifest_bytes(there: Path | Url) -> bytes:
    if isinstance(there, Path):
        return manifest_bytes(there)
    try:
        return (there / NAME).read_bytes()
    except OSError as error:
        raise StoreError(f"{there} is no datastore, or can't be reached: {error}") from error


def _follow(there: Path | Url, folder: Path, manifest: Manifest) -> Followed:
    with on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
        try:
            old = _old_state(there, folder, manifest)
            if old is not None and old.generation == manifest.generation:
                return Followed(old.generation, changed=False)
            fetched = [entry for entry in manifest.segments if _fetch(there, folder, entry, manifest)]
            log = _empty_log(folder, manifest)
            notes = {**manifest.notes, FOLLOWS: str(there)}
            state = replace(manifest, log_id=log, gone=(), notes=notes)
            write_manifest(folder, state)
            witness = Witness(folder)
            witness.say(state.generation, log, Place())
            witness.close()
            _clean(folder, state)
            return Followed(state.generation, True, len(fetched), sum(entry.bytes for entry in fetched))
        finally:
            lock.close()


def _old_state(there: Path | Url, folder: Path, manifest: Manifest) -> Manifest | None:
    """The target's current state. Raise unless it is an earlier state of the source."""
    if not (folder / NAME).exists():
        # A first following that was interrupted leaves segments of the source and an empty log, and no copy.
        written = any(path.stat().st_size > PAGE for path in folder.glob("*.log"))
        if written or (folder / COPY).exists() or any(f.store != manifest.id for f in files_of(folder).values()):
            raise StoreError(
                f"{folder} holds a store that has lost {NAME}: `slipstream store repair` makes it anew. Or name a new "
                "folder"
            )
        return None
    old = read_manifest(folder)
    if old.id != manifest.id or FOLLOWS not in old.notes:
        raise StoreError(f"{folder} holds a store of its own, not one that follows {there}: name a new folder")
    if old.generation > manifest.generation:
        raise StoreError(
            f"{there} is of generation {manifest.generation}, {folder} has followed it to {old.generation}: if it was "
            "put back from a backup, follow it in a new folder"
        )
    if old.generation == manifest.generation:
        _finish(folder, old)
    return old


def _finish(folder: Path, state: Manifest) -> None:
    """Finish what a follower that was killed after its switch left undone."""
    if not (folder / COPY).exists() or manifest_bytes(folder, COPY) != manifest_bytes(folder):
        write_whole(folder / COPY, manifest_bytes(folder))
    _clean(folder, state)


def _fetch(there: Path | Url, folder: Path, entry: SegmentEntry, manifest: Manifest) -> bool:
    """Fetch and check a segment. False: it exists already, and was checked before it got its name."""
    path = folder / entry.name
    if path.exists():
        if _is(path, entry, manifest):
            return False
        path.unlink()
    made = path.with_suffix(".making")
    with _opened(there / entry.name) as read, made.open("wb") as write:
        shutil.copyfileobj(read, write, 1 << 22)
        write.flush()
        os.fsync(write.fileno())
    if not _is(made, entry, manifest) or Segment(made).damage():
        raise DamagedError(f"{there / entry.name} arrived damaged: `slipstream store verify` looks at the source")
    made.rename(path)
    sync_folder(folder)
    return True


def _is(path: Path, entry: SegmentEntry, manifest: Manifest) -> bool:
    """Whether a file is this segment, by its header's checksum, as the header has the checksums of everything else."""
    try:
        segment = Segment(path)
    except DamagedError:
        return False
    return (segment.sum, segment.header["bytes"], segment.header["store"]) == (entry.sum, entry.bytes, manifest.id)


def _empty_log(folder: Path, manifest: Manifest) -> str:
    """Create an empty log with the manifest's name for it, unless there is one. Returns its id."""
    path = folder / manifest.log
    if path.exists():
        with path.open("rb") as file:
            head = LogHead.parse(file.read(PAGE))
        if head is not None and head.store == manifest.id:
            return head.log
    head = LogHead(manifest.id, new_id(), manifest.generation)
    LogWriter.create(path, head).close()
    return head.log


def _clean(folder: Path, state: Manifest) -> None:
    """Delete files that the state does not name. Readers that have them open can go on."""
    named = {state.log, *(entry.name for entry in state.segments)}
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in named:
            path.unlink()


def _publish(there: Path | Url, here: Url, manifest: Manifest, data: bytes) -> Followed:
    """Publish a store at a URL, for others to follow. Objects there are complete or absent."""
    old = _published(here)
    if old is not None and old.id != manifest.id:
        raise StoreError(f"{here} holds another store: name another place")
    known = {(e.name, e.sum) for e in old.segments} if old is not None else set()
    if old is not None and old.generation >= manifest.generation:
        return Followed(old.generation, changed=False)
    new = [e for e in manifest.segments if (e.name, e.sum) not in known]
    for entry in new:
        with _opened(there / entry.name) as read, (here / entry.name).open("wb") as write:
            shutil.copyfileobj(read, write, 1 << 22)
    with (here / NAME).open("wb") as write:
        write.write(data)
    named = {e.name for e in manifest.segments}
    for name, _ in sorted(known):
        if name not in named:
            (here / name).unlink()
    return Followed(manifest.generation, True, len(new), sum(e.bytes for e in new))


def _published(here: Url) -> Manifest | None:
    try:
        return parse_manifest(here / NAME, (here / NAME).read_bytes())
    except FileNotFoundError:
        return None
