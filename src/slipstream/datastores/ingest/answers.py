"""Add the target's own answers to a store, from files of `slipstream collect`, with a note on how they were sampled.
Drafts from the target's own text are accepted more often than drafts from other text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.datastores.durable.store import DEFAULT, Document, Store
from slipstream.datastores.ingest.ingest import Ingested, as_stored
from slipstream.datastores.ingest.sources import source_file
from slipstream.errors import OptionError

KEPT = ("temperature", "top_p")  # the sampling options that decide how much texts vary


def add_answers(store: Store, path: Path, collection: str = DEFAULT) -> Ingested:
    """Add a file's conversations, and note how they were sampled. A file that is in the store is read again only if it
    has changed."""
    known = store.sources(collection)
    (source,) = as_stored([source_file(path)], known)
    name, entry, counts = source.name, known.get(source.name), Ingested(sources=1)
    if entry is not None:
        if entry.complete and (entry.size, entry.modified) == (source.size, source.modified):
            return Ingested(known=1)
        counts.replaced = 1
    documents = []
    for line, sampling in _lines(path):
        _note(store, path, sampling)
        documents.append(Document(np.array(line, np.int64), name))
        counts.documents, counts.tokens = counts.documents + 1, counts.tokens + len(line)
    documents.append(Document((), name, (source.size, source.modified)))
    if entry is not None:  # not before the new ones are known to be readable
        store.remove(name, collection)
    store.extend(documents, collection, bulk=True)
    store.flush()
    return counts


def _lines(path: Path) -> Iterator[tuple[list[int], dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                yield record["tokens"], {key: record["sampling"][key] for key in KEPT}
            except (ValueError, TypeError, KeyError) as error:
                if not line.endswith("\n"):
                    return  # it is being written
                raise OptionError(
                    f"{path}, line {number} was not written by `slipstream collect`: `slipstream store build` takes "
                    "other texts"
                ) from error


def _note(store: Store, path: Path, sampling: dict[str, float]) -> None:
    noted = store.manifest.notes.get("sampling")
    if noted is None:
        store.note(sampling=sampling)
    elif noted != sampling:
        raise OptionError(
            f"{path} was sampled with {sampling}, the answers in {store.folder} with {noted}: make a store for each"
        )
