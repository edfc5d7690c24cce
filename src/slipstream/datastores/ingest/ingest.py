"""Ingest: sources into a store, in bounded memory. Whatever interrupts it, the same call goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.pages import checksum
from slipstream.datastores.durable.store import DEFAULT, Document, Store
from slipstream.datastores.ingest.encoding import Encoder, batches
from slipstream.datastores.ingest.records import Document as Text
from slipstream.datastores.ingest.records import read_documents, text_size
from slipstream.datastores.ingest.sources import SourceFile

BATCH = 1_000_000  # characters encoded at once: the tokenizer needs about a hundred bytes for each of its tokens
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
    source: SourceFile
    text: Text | None  # None marks the end of a source
    number: int = 0  # of the text in its source
    skip: int = 0  # tokens of it that are in the store already

    def size(self) -> int:
        return 0 if self.text is None else text_size(self.text)


def ingest(
    store: Store,
    sources: Sequence[SourceFile],
    encoder: Encoder,
    *,
    collection: str = DEFAULT,
    field: str | None = None,
    deduplicate: bool = False,
    progress: Progress | None = None,
) -> Ingested:
    """Add what is not in the store yet. A source that was read to its end is read again only if it has changed."""
    counts = Ingested()
    total, read = sum(s.size for s in sources), 0
    pieces = _pieces(store, sources, collection, field, counts)
    seen: set[int] | None = None
    for batch in batches(pieces, BATCH, size=_Piece.size):
        if deduplicate and seen is None:  # after the first sources that had changed were removed
            seen = _hashes(store, collection)
        encoded = iter(encoder.encode([piece.text for piece in batch if piece.text is not None]))
        documents = []
        for piece in batch:
            if piece.text is None:
                documents.append(Document((), piece.source.name, (piece.source.size, piece.source.modified)))
                counts.sources += 1
                read += piece.source.size
                continue
            for document in _documents(piece, next(encoded), store.segment_tokens - 1):
                if seen is not None:
                    key = checksum(np.asarray(document.tokens, store.dtype))
                    if key in seen:
                        counts.duplicates += 1
                        continue
                    seen.add(key)
                documents.append(document)
                counts.documents += 1
                counts.tokens += len(document.tokens)
        store.extend(documents, collection, bulk=True)
        if progress is not None:
            progress(read, total, counts.tokens)
    store.flush()
    return counts


def _pieces(
    store: Store, sources: Sequence[SourceFile], collection: str, field: str | None, counts: Ingested
) -> Iterator[_Piece]:
    """What is still to be read: of a source that was interrupted what comes behind the stored part, unless it has
    changed since; then all of it, instead of what is stored."""
    known = store.sources(collection)
    for source in sources:
        entry = known.get(source.name, SourceEntry(source.name, 0, complete=False))
        same = (entry.size, entry.modified) == (source.size, source.modified)
        if entry.complete and same:
            counts.known += 1
            continue
        if source.name in known and not same:
            store.remove(source.name, collection)
            counts.replaced += entry.complete
            entry = SourceEntry(source.name, 0, complete=False)
        for number, text in enumerate(read_documents(source, field)):
            if number >= entry.texts:
                yield _Piece(source, text, number, entry.tokens if number == entry.texts else 0)
        yield _Piece(source, None)


def _documents(piece: _Piece, tokens: np.ndarray, limit: int) -> Iterator[Document]:
    """A text as a document, or as several if it is longer than a segment can hold. Each says how far its source was
    read with it, so that reading can go on from there."""
    for start in range(piece.skip, len(tokens), limit):
        end = min(start + limit, len(tokens))
        done = (piece.number + 1, 0) if end == len(tokens) else (piece.number, end)
        yield Document(tokens[start:end], piece.source.name, read=(piece.source.size, piece.source.modified, *done))


def _hashes(store: Store, collection: str) -> set[int]:
    """Of every document of a collection."""
    return {checksum(document) for document in store.documents(collection)}
