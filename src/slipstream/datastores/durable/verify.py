"""Verify: read everything that a store has on the disk, and describe what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipstream.datastores.durable.contents import Contents
from slipstream.datastores.durable.disk import on_disk
from slipstream.datastores.durable.manifest import COPY, read_manifest
from slipstream.datastores.durable.mapping import watching
from slipstream.datastores.durable.witness import Witness
from slipstream.datastores.sparse.sort import DEPTH
from slipstream.errors import SlipstreamError, StoreError


def verify(folder: Path) -> list[str]:
    wrong = []
    try:
        read_manifest(folder, COPY)
    except StoreError as error:
        wrong.append(str(error))
    try:
        contents = Contents(folder)
        with on_disk(folder):
            contents.load()  # reads the manifest, the headers and the log, and compares their ids
    except StoreError as error:
        return [*wrong, str(error)]
    m = contents.manifest
    if m.id and Witness.read(folder) is None:
        wrong.append(f"{folder / Witness.NAME} is damaged or gone: the next writer makes it anew")
    for memory in contents.memory.values():
        if any(np.any(document >= m.vocabulary) for document in memory.documents()):
            wrong.append(f"{folder / m.log}: a document has tokens of another vocabulary")
    for entry in m.segments:
        segment = contents.segments[entry.name]
        try:
            with watching(segment.path):
                found = segment.verify()
                if not found and len(segment) - DEPTH - len(segment.starts) != entry.tokens:
                    found = [f"{segment.path}: the manifest says that it has {entry.tokens} tokens, which is wrong"]
                if not found and not set(segment.numbers) >= set(entry.removed):
                    found = [f"{segment.path}: the manifest says that sources were removed from it that it never had"]
        except StoreError as error:
            found = [str(error)]
        wrong += found
    if (folder / "dense").is_dir():
        from slipstream.datastores.dense.verify_vectors import verify_vectors  # needs torch, which other stores don't

        try:
            wrong += verify_vectors(folder, m.id)
        except SlipstreamError as error:
            wrong.append(str(error))
    return wrong
