"""The manifest of a store: which files make it up. It is replaced as a whole, so a store is always in one state or the
next, never between.

A copy lies beside it. It is only read to repair a store whose manifest is damaged: nothing else knows the vocabulary of
a young store, or what was removed and is still in a segment.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.datastores.pages import checksum
from slipstream.datastores.runs import token_type
from slipstream.datastores.segment import sync_folder
from slipstream.errors import DamagedError, StoreError

FORMAT = 1
NAME = "store.json"
COPY = "store.copy.json"


@dataclass(frozen=True)
class Entry:
    """A segment of the store."""

    name: str
    collection: str
    tokens: int
    documents: int
    bytes: int
    removed: tuple[str, ...] = ()  # sources whose documents don't count any more


@dataclass(frozen=True)
class Manifest:
    tokenizer: str  # fingerprint; empty if the store was made from bare token ids
    vocabulary: int
    log: str
    next: int = 1  # number of the next file
    segments: tuple[Entry, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)  # how the text was made, for whoever reads it

    @property
    def width(self) -> int:
        """Bits of a token."""
        return token_type(self.vocabulary).itemsize * 8

    def named(self) -> tuple[str, Manifest]:
        """A number for a new file, and the manifest that knows it is taken."""
        return f"{self.next:08d}", replace(self, next=self.next + 1)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Durable when this returns. Only then may files go that it doesn't name: a crash can leave the copy one state
    behind, and then that state must be whole."""
    body = {"format": FORMAT, "width": manifest.width, **asdict(manifest)}
    text = json.dumps({**body, "checksum": _sum(body)}, indent=1)
    for name in (NAME, COPY):
        made = folder / (name + ".making")
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.rename(folder / name)
        sync_folder(folder)


def manifest_bytes(folder: Path, name: str = NAME) -> bytes:
    """Differs whenever the manifest does, which times and inodes of the file need not."""
    try:
        return (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if name == NAME and (folder / COPY).exists():
            raise DamagedError(f"{folder} has lost its {name}: `slipstream store repair` makes it anew") from error
        there = "no such folder" if not folder.is_dir() else f"it has no {name}"
        raise StoreError(
            f"{folder} is no datastore: {there}; `slipstream store build … --out {folder}` makes one"
        ) from error


def read_manifest(folder: Path, name: str = NAME) -> Manifest:
    return parse_manifest(folder / name, manifest_bytes(folder, name))


def parse_manifest(path: Path, data: bytes) -> Manifest:
    try:
        body = json.loads(data)
        told = body.pop("checksum")
        if told != _sum(body):
            raise ValueError("its checksum is wrong")
        if body["format"] != FORMAT:
            raise StoreError(f"{path} has format {body['format']}, this version reads {FORMAT}: update slipstream")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged: {error}; `slipstream store repair` makes it anew") from error
    del body["format"], body["width"]
    body["segments"] = tuple(Entry(**{**e, "removed": tuple(e["removed"])}) for e in body["segments"])
    return Manifest(**body)


def _sum(body: dict[str, Any]) -> str:
    return f"{checksum(json.dumps(body, sort_keys=True).encode()):016x}"
