"""Ingest: sources into a store, in bounded memory. Whatever interrupts it, the same call goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.datastores.encoding import Encoder, batches
from slipstream.datastores.pages import checksum
from slipstream.datastores.records import Document as Text
from slipstream.datastores.records import read_documents, text_size
from slipstream.datastores.segment import SourceEntry
from slipstream.datastores.sources import Source
from slipstream.datastores.store import DEFAULT, Document, Store

Progress = Callable[[int, int, int], None]  # bytes read, bytes in all, tokens added


@dataclass
class Ingested:
    """What came of it."""

    sources: int = 0
    documents: int = 0
    tokens: int = 0
    known: int = 0  # sources that were in the store already, unchanged
    replaced: int = 0  # sources that had changed since
    duplicates: int = 0  # documents left out


@dataclass(frozen=True)
class _Piece:
    source: Source
    text: Text | None  # None marks the end of a source

    def size(self) -> int:
        return 0 if self.text is None else text_size(self.text)


def ingest(
    store: Store,
    sources: Sequence[Source],
    encoder: Encoder,
    *,
    collection: str = DEFAULT,
    field: str | None = None,
    deduplicate: bool = False,
    progress: Progress | None = None,
) -> Ingested:
    """Add what is not in the store yet. A source that was read to its end is read again only if it has changed."""
    counts = Ingested()
    seen = _hashes(store, collection) if deduplicate else None
    total, read = sum(s.size for s in sources), 0
    for batch in batches(_pieces(store, sources, collection, field, counts, skips=seen is None), size=_Piece.size):
        texts = [piece.text for piece in batch if piece.text is not None]
        encoded = iter(encoder.encode(texts))
        documents = []
        for piece in batch:
            if piece.text is None:
                documents.append(Document((), piece.source.name, (piece.source.size, piece.source.modified)))
                counts.sources += 1
                read += piece.source.size
                continue
            tokens = next(encoded)
            if seen is not None:
                key = checksum(tokens.astype(store.dtype))
                if key in seen:
                    counts.duplicates += 1
                    continue
                seen.add(key)
            for part in _parts(tokens, store.segment_tokens - 1):
                documents.append(Document(part, piece.source.name))
                counts.documents += 1
                counts.tokens += len(part)
        store.extend(documents, collection, bulk=True)
        if progress is not None:
            progress(read, total, counts.tokens)
    store.flush()
    return counts


def _pieces(
    store: Store, sources: Sequence[Source], collection: str, field: str | None, counts: Ingested, skips: bool
) -> Iterator[_Piece]:
    """skips: go on behind the documents of an interrupted source that are stored. Where duplicates are left out, fewer
    are stored than were read; then it is read again, and what is stored is a duplicate."""
    known = store.sources(collection)
    for source in sources:
        entry = known.get(source.name, SourceEntry(source.name, 0, complete=False))
        skip = entry.documents if skips and not entry.complete else 0
        if entry.complete:
            if (entry.size, entry.modified) == (source.size, source.modified):
                counts.known += 1
                continue
            store.remove(source.name, collection)
            counts.replaced += 1
        for i, text in enumerate(read_documents(source, field)):
            if i >= skip:
                yield _Piece(source, text)
        yield _Piece(source, None)


def _parts(tokens: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """A document that is longer than a segment can hold, in several."""
    for start in range(0, len(tokens), limit):
        yield tokens[start : start + limit]


def _hashes(store: Store, collection: str) -> set[int]:
    """Of every document of a collection."""
    return {checksum(document) for document in store.documents(collection)}
