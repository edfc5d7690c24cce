"""Verify a store's vectors: read all of them, and describe what is wrong."""

from __future__ import annotations

from pathlib import Path

from slipstream.datastores.dense.arrays import Mapped
from slipstream.datastores.dense.vector_manifest import FOLDER, NAME, read_manifest
from slipstream.datastores.dense.vectors import VectorPart, read_transform
from slipstream.datastores.durable.mapping import watching
from slipstream.errors import StoreError


def verify_vectors(store: Path, id: str) -> list[str]:
    """Sentences about faults in the vectors of the store in this folder, with this id."""
    folder = store / FOLDER
    if not (folder / NAME).exists():
        left = sorted(p.name for p in folder.iterdir() if p.suffix in (".part", ".vec", ".chunk"))
        return (
            [f"{folder} has {', '.join(left[:5])} but no {NAME}: delete it, and embed the store again"] if left else []
        )
    wrong = []
    manifest = read_manifest(folder)
    checks = [lambda: manifest.belongs(folder, id), lambda: read_transform(folder, manifest)]
    for check in checks:
        try:
            check()
        except StoreError as error:
            wrong.append(str(error))
    for entry in manifest.parts:
        try:
            with watching(folder / entry.name):
                VectorPart(folder, manifest, entry).verify()
        except FileNotFoundError:
            wrong.append(f"{folder / entry.name} is gone: `slipstream store embed` makes it anew")
        except StoreError as error:
            wrong.append(str(error))
    for path in sorted(folder.glob("*.graph")):
        try:
            Mapped(path).verify()
        except StoreError as error:
            wrong.append(str(error))
    return wrong
