"""Clean up what an interrupted writer left in a store's folder. A file is deleted only if its contents are provably in
other files; otherwise it is moved to the folder `orphans`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from slipstream.datastores.durable.disk import sync_folder
from slipstream.datastores.durable.log import LogHead, read_log
from slipstream.datastores.durable.manifest import Manifest
from slipstream.datastores.durable.names import OURS
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.witness import Place
from slipstream.errors import DamagedError, StoreError

ORPHANS = "orphans"


def sweep(folder: Path, manifest: Manifest, place: Place) -> None:
    """place: how far the manifest's log was read."""
    named = {e.name for e in manifest.segments} | {manifest.log}
    gone = dict(manifest.gone)
    for path in sorted(folder.iterdir()):
        if not OURS.fullmatch(path.name) or path.name in named or not path.is_file():
            continue
        if path.suffix == ".making" or _superseded(path, manifest, gone.get(path.name, ""), place):
            path.unlink()
        else:
            set_apart(path, ORPHANS)


def _superseded(path: Path, manifest: Manifest, gone: str, place: Place) -> bool:
    """Whether everything in a file is also in files that the manifest names."""
    if path.suffix == ".log":
        head = _head(path)
        _not_newer(path, head.store, head.generation, manifest)
        ours = manifest.id != "" and head.store == manifest.id
        return (gone != "" and gone == head.log) or (ours and _is_empty(path))
    try:
        segment = Segment(path)
    except DamagedError:
        return False
    header = segment.header
    _not_newer(path, header["store"], header["generation"], manifest)
    if gone and gone == segment.sum:
        return True
    there = {e.name: e.sum for e in manifest.segments if e.sum}

    def is_there(name: str, id: str) -> bool:
        """Whether a file that this one was made from is named, and unchanged. Of a log, the id tells how much of it."""
        if name != manifest.log:
            return there.get(name) == id
        log, _, length = id.partition(":")
        return log == manifest.log_id and length != "" and int(length) <= place.length

    return bool(header["made_from"]) and all(is_there(*origin) for origin in header["made_from"])


def _not_newer(path: Path, store: str, generation: int, manifest: Manifest) -> None:
    if store and store == manifest.id and generation > manifest.generation:
        raise DamagedError(
            f"{path} is newer than the manifest that lies beside it, which some older one must have replaced: "
            "`slipstream store repair` goes on from the newest files"
        )


def _head(path: Path) -> LogHead:
    with path.open("rb") as file:
        return LogHead.parse(file.read(PAGE)) or LogHead()


def _is_empty(path: Path) -> bool:
    with suppress(StoreError, OSError):
        return not read_log(path, beyond=True).records and path.stat().st_size == PAGE
    return False


def set_apart(path: Path, name: str) -> Path:
    """Move a file into a subfolder, under a name that is free there."""
    apart = path.parent / name
    apart.mkdir(exist_ok=True)
    there = apart / path.name
    number = 1
    while there.exists():
        number += 1
        there = apart / f"{path.name}.{number}"
    path.rename(there)
    sync_folder(apart)
    sync_folder(path.parent)
    return there
