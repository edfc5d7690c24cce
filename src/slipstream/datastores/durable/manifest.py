"""The manifest of a store: the files that make it up, by name and id. It is replaced atomically, so a store is always
in one state or the next, never in between.

There is a copy, which is read only to repair a damaged manifest and to notice one that is out of date. Without the
copy, the vocabulary of a new store and the removed sources would be lost with the manifest.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.datastores.durable.disk import write_whole
from slipstream.datastores.durable.names import LOG, SEGMENT
from slipstream.datastores.durable.pages import checksum
from slipstream.datastores.sparse.runs import token_type
from slipstream.datastores.sparse.sort import DEPTH
from slipstream.errors import DamagedError, StoreError

FORMAT = 2
READABLE = (1, 2)  # a store of format 1 has no ids; the next writer adds them
NAME = "store.json"
COPY = "store.copy.json"
FOLLOWS = "follows"  # a note: which other store this one follows
HUGE = 1 << 62  # numbers in a file must be smaller
MOST = (1 << 32) - 1  # largest vocabulary: the last 32-bit number is the separator of documents


def new_id() -> str:
    return os.urandom(8).hex()


@dataclass(frozen=True)
class SegmentEntry:
    """A segment of the store."""

    name: str
    collection: str
    tokens: int
    documents: int
    bytes: int
    sum: str = ""  # checksum of its header, which has the checksums of everything else; empty in format 1
    removed: tuple[str, ...] = ()  # sources whose documents were removed

    @classmethod
    def of(cls, name: str, header: dict[str, Any], sum: str) -> SegmentEntry:
        """The entry of a segment file with this header. Separators before the text and after documents don't count."""
        documents = header["documents"]
        tokens = header["sections"]["tokens"][1] * 8 // header["width"] - DEPTH - documents
        return cls(name, header["collection"], tokens, documents, header["bytes"], sum)


@dataclass(frozen=True)
class Manifest:
    tokenizer: str  # fingerprint; empty if the store was made from bare token ids
    vocabulary: int
    log: str
    next: int = 1  # number of the next file
    segments: tuple[SegmentEntry, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)  # about the text, such as how answers were sampled
    id: str = ""  # of the store: 16 hex digits
    generation: int = 0  # how often it was replaced
    log_id: str = ""
    gone: tuple[tuple[str, str], ...] = ()  # files (with ids) whose contents are in others: they may be deleted

    def __post_init__(self) -> None:
        """Validate everything, since names become paths and numbers become sizes."""
        if not 1 <= self.vocabulary <= MOST:
            raise StoreError(f"vocabulary is {self.vocabulary}: there are 1 to {MOST} ids")
        names = [self.log, *(e.name for e in self.segments)]
        if not LOG.fullmatch(names[0]) or not all(map(SEGMENT.fullmatch, names[1:])) or len(set(names)) < len(names):
            raise ValueError("it names files that can't be this store's")
        if any(name in names or not (LOG.fullmatch(name) or SEGMENT.fullmatch(name)) for name, _ in self.gone):
            raise ValueError("it would delete files that can't be this store's, or that it needs")
        if any(len(x) != 16 or int(x, 16) < 0 for x in (self.id, self.log_id) if x) or bool(self.id) != bool(
            self.log_id
        ):
            raise ValueError("its ids are none")
        if min([self.next, self.generation, *(n for e in self.segments for n in (e.tokens, e.documents))]) < 0:
            raise ValueError("it has negative numbers")

    @property
    def width(self) -> int:
        """Bits of a token."""
        return token_type(self.vocabulary).itemsize * 8

    def named(self) -> tuple[str, Manifest]:
        """A number for a new file, and the manifest in which it is taken."""
        return f"{self.next:08d}", replace(self, next=self.next + 1)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its copy, durably. Only then may files be deleted that it doesn't name: after a crash the
    copy may be one state older, and that state must be complete."""
    body = {"format": FORMAT, "width": manifest.width, **asdict(manifest)}
    text = json.dumps({**body, "checksum": _sum(body)}, indent=1).encode()
    for name in (NAME, COPY):
        write_whole(folder / name, text)


def manifest_bytes(folder: Path, name: str = NAME) -> bytes:
    """The file's bytes. To notice a new manifest these are compared, since time and inode may stay the same."""
    try:
        return (folder / name).read_bytes()
    except PermissionError as error:
        raise StoreError(f"{folder / name} can't be read: {error.strerror}") from error
    except OSError as error:
        if name == NAME and (folder / COPY).exists():
            raise DamagedError(f"{folder} has lost its {name}: `slipstream store repair` makes it anew") from error
        there = "no such folder" if not folder.is_dir() else f"it has no {name}"
        raise StoreError(
            f"{folder} is no datastore: {there}; `slipstream store build … --out {folder}` makes one"
        ) from error


def read_manifest(folder: Path, name: str = NAME) -> Manifest:
    return parse_manifest(folder / name, manifest_bytes(folder, name))


def parse_manifest(path: object, data: bytes) -> Manifest:
    try:
        body = json.loads(data)
        stored = body.pop("checksum")
        if stored != _sum(body):
            raise ValueError("its checksum is wrong")
        if body["format"] not in READABLE:
            raise StoreError(f"{path} has format {body['format']}, this version reads {FORMAT}: update slipstream")
        del body["format"], body["width"]
        segments = tuple(SegmentEntry(**{**e, "removed": tuple(e["removed"])}) for e in body.pop("segments"))
        gone = tuple((str(name), str(id)) for name, id in body.pop("gone", ()))
        manifest = Manifest(**body, segments=segments, gone=gone)
        fits(manifest, _SHAPE)
        if manifest.next <= max(int(name.split(".")[0]) for name in (manifest.log, *(e.name for e in segments))):
            raise ValueError(f"its next file would be number {manifest.next}, which is taken")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}; `slipstream store repair` makes it anew") from error


_SHAPE: dict[str, Any] = {
    "tokenizer": str, "vocabulary": int, "log": str, "next": int, "notes": dict, "id": str, "generation": int,
    "log_id": str, "gone": tuple,
    "segments": {"name": str, "collection": str, "tokens": int, "documents": int, "bytes": int, "sum": str,
                 "removed": tuple},
}  # fmt: skip


def fits(value: Any, shape: dict[str, Any]) -> None:
    """Raise if a field that was read has the wrong type."""
    for name, kind in shape.items():
        found = getattr(value, name)
        if isinstance(kind, dict):
            for one in found:
                fits(one, kind)
        elif type(found) is not kind or (kind is int and abs(found) >= HUGE):
            raise ValueError(f"its {name} is {str(found)[:80]!r}")


def _sum(body: dict[str, Any]) -> str:
    return f"{checksum(json.dumps(body, sort_keys=True).encode()):016x}"
