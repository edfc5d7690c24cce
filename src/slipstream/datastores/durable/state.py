"""Read a store's files together: the manifest, and the segments and the log that it names. Each file's id must be the
one in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.datastores.durable.log import (
    COMPLETE,
    DOCUMENT,
    FILE,
    PROGRESS,
    READ,
    REMOVE,
    LogRead,
    Record,
    read_log,
    read_shared_log,
    sum_at,
)
from slipstream.datastores.durable.manifest import COPY, NAME, Manifest, manifest_bytes, parse_manifest
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.witness import Place, Witness
from slipstream.errors import DamagedError, StoreError

TURNS = 100
REPAIR = "`slipstream store repair` goes on from the newest files"


@dataclass(frozen=True, eq=False)
class State:
    manifest: Manifest
    manifest_bytes: bytes
    segments: dict[str, Segment]
    log: LogRead


def read_state(folder: Path, known: Mapping[str, Segment], writing: bool) -> State:
    """known: segments that are open already. If a writer switches to another state meanwhile, it deletes files of the
    old one: then read the new manifest."""
    for turn in range(TURNS):
        data = manifest_bytes(folder)
        manifest = parse_manifest(folder / NAME, data)
        try:
            return _read(folder, manifest, data, known, writing)
        except (FileNotFoundError, DamagedError) as error:
            if turn < TURNS - 1 and manifest_bytes(folder) != data:
                continue
            if isinstance(error, DamagedError):
                raise
            raise DamagedError(
                f"{error.filename}: the store's manifest names it, but there is no such file; `slipstream store "
                "repair` goes on without it"
            ) from error
    raise AssertionError("the last turn returns or raises")


def _read(folder: Path, manifest: Manifest, data: bytes, known: Mapping[str, Segment], writing: bool) -> State:
    _newest(folder, manifest, data)
    segments = {e.name: known.get(e.name) or Segment(folder / e.name) for e in manifest.segments}
    for entry in manifest.segments:
        header = segments[entry.name].header
        found = [header[key] for key in ("vocabulary", "tokenizer", "collection", "documents", "bytes", "width")]
        meant = [
            manifest.vocabulary,
            manifest.tokenizer,
            entry.collection,
            entry.documents,
            entry.bytes,
            manifest.width,
        ]
        if found != meant or entry.sum not in ("", segments[entry.name].sum):
            raise DamagedError(
                f"{folder / entry.name} is not the segment that the manifest names: `slipstream store repair` goes on "
                "without it"
            )
    witness = Witness.read(folder)
    path = folder / manifest.log
    log = read_log(path, beyond=True) if writing else read_shared_log(path)
    if manifest.id and (log.head.store, log.head.log) != (manifest.id, manifest.log_id):
        raise DamagedError(f"{path} is not the log that the manifest names: `slipstream store repair` sets it aside")
    if witness is not None and manifest.id:
        if witness.generation > manifest.generation:
            raise DamagedError(
                f"{folder / NAME} is of generation {manifest.generation}, and {witness.generation} was: {REPAIR}"
            )
        if witness.log == manifest.log_id:
            _same(path, log, witness.place)
    _possible(path, log, manifest)
    return State(manifest, data, segments, log)


def _newest(folder: Path, manifest: Manifest, data: bytes) -> None:
    """Raise if the copy is newer than the manifest, which is always written first."""
    try:
        copy = (folder / COPY).read_bytes()
        newer = copy != data and parse_manifest(folder / COPY, copy).generation > manifest.generation
    except (OSError, StoreError):
        return  # `verify` reports it, and the next writer writes it again
    if newer:
        raise DamagedError(f"{folder / NAME} is older than its copy: {REPAIR}")


def _same(path: Path, log: LogRead, place: Place) -> None:
    """Raise unless the log contains all that was acknowledged."""
    total = log.place.sum if log.place.length == place.length else None
    if log.place.length > place.length:
        total = sum_at(path, place.length)
    if total != place.sum:
        raise DamagedError(
            f"{path} is an older log or another one: {place.length} bytes were acknowledged that it does not have; "
            "`slipstream store repair` keeps its records"
        )


def _possible(path: Path, log: LogRead, manifest: Manifest) -> None:
    """Raise if a record can't belong to this store."""
    for record in log.records:
        if not possible(record, manifest.width):
            raise DamagedError(
                f"{path}: a record of {record.collection!r} is none of this store; `slipstream store repair` keeps the "
                "others"
            )


def possible(record: Record, width: int) -> bool:
    size = len(record.body) - _REST.get(record.kind, 0)
    if record.kind in (DOCUMENT, READ):
        return size > 0 and size % (width // 8) == 0
    return record.kind in _REST and size == 0


_REST = {DOCUMENT: 0, READ: PROGRESS.size, REMOVE: 0, COMPLETE: FILE.size}  # bytes besides tokens
