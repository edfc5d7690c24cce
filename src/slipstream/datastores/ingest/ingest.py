"""Ingest: read sources into a store, in bounded memory. After an interruption, the same call continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.pages import checksum
from slipstream.datastores.durable.store import DEFAULT, Document, Store
from slipstream.datastores.ingest.encoding import Encoder, batches
from slipstream.datastores.ingest.records import Document as Text
from slipstream.datastores.ingest.records import read_documents, text_size
from slipstream.datastores.ingest.sources import SourceFile

BATCH = 1_000_000  # characters encoded at once: the tokenizer needs about a hundred bytes per token
Progress = Callable[[int, int, int], None]  # bytes read, bytes in all, tokens added


@dataclass
class Ingested:
    """The result of an ingest."""

    sources: int = 0
    documents: int = 0
    tokens: int = 0
    known: int = 0  # unchanged sources, in the store already
    replaced: int = 0  # sources that had changed
    duplicates: int = 0  # documents left out


@dataclass(frozen=True)
class Piece:
    """A text of a source, or the end of the source."""

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
    """Add sources that are not in the store. One that was read to its end is read again only if it has changed."""
    counts = Ingested()
    total, read = sum(s.size for s in sources), 0
    pieces = _pieces(store, sources, collection, field, counts)
    seen: set[int] | None = None
    room = longest_segment(store.segment_tokens)
    for documents in encoded(pieces, encoder, room):
        if deduplicate and seen is None:  # not before changed sources were removed
            seen = _hashes(store, collection)
        fresh = [d for d in documents if d.completes or seen is None or is_new(document_hash(d, store.dtype), seen)]
        counts.duplicates += len(documents) - len(fresh)
        counts.sources += sum(1 for d in fresh if d.completes)
        counts.documents += sum(1 for d in fresh if not d.completes)
        counts.tokens += sum(len(d.tokens) for d in fresh)
        read += sum(d.completes[0] for d in fresh if d.completes)
        begin = 0
        for end in cuts([len(d.tokens) for d in fresh], room, store.waiting):
            store.extend(fresh[begin:end], collection, bulk=True)
            store.flush()
            begin = end
        store.extend(fresh[begin:], collection, bulk=True)
        if progress is not None:
            progress(read, total, counts.tokens)
    store.flush()
    return counts


def longest_segment(segment_tokens: int) -> int:
    """The limit of a segment's tokens here: with one more, the store would flush by itself."""
    return segment_tokens - 1


def cuts(lengths: Sequence[int], room: int, used: int = 0) -> Iterator[int]:
    """Where segments end, by the lengths of documents: before each document that would not fit. used: tokens in the
    first segment already."""
    for i, length in enumerate(lengths):
        if used + length > room:
            yield i
            used = 0
        used += length


def encoded(pieces: Iterable[Piece], encoder: Encoder, longest: int) -> Iterator[list[Document]]:
    """The documents of pieces, a batch at a time."""
    for batch in batches(pieces, BATCH, size=Piece.size):
        texts = iter(encoder.encode([piece.text for piece in batch if piece.text is not None]))
        yield [
            document
            for piece in batch
            for document in ([_end(piece)] if piece.text is None else _documents(piece, next(texts), longest))
        ]


def document_hash(document: Document, dtype: np.dtype[Any]) -> int:
    """A hash to find equal documents."""
    return checksum(np.asarray(document.tokens, dtype))


def is_new(key: int, seen: set[int]) -> bool:
    """Whether the key is not in `seen`. Adds it."""
    known = key in seen
    seen.add(key)
    return not known


def _pieces(
    store: Store, sources: Sequence[SourceFile], collection: str, field: str | None, counts: Ingested
) -> Iterator[Piece]:
    """What is still to be read. Of an interrupted source, the part that is not stored. If it has changed, all of it,
    and the stored part is removed: of all such sources before the first is read, so that nothing counts as a duplicate
    of what is about to go."""
    known = store.sources(collection)
    sources = as_stored(sources, known)
    for source in sources:
        entry = known.get(source.name)
        if entry is not None and (entry.size, entry.modified) != (source.size, source.modified):
            store.remove(source.name, collection)
            counts.replaced += entry.complete
            del known[source.name]
    for source in sources:
        entry = known.get(source.name, SourceEntry(source.name, 0, complete=False))
        if entry.complete:
            counts.known += 1
        else:
            yield from pieces_of(source, field, entry.texts, entry.tokens)


def as_stored(sources: Sequence[SourceFile], known: Mapping[str, SourceEntry]) -> list[SourceFile]:
    """Sources under their names in a store. Older stores have paths as they were typed. Such a name is the same source
    if the file's size and time are the same."""

    def is_old(source: SourceFile) -> bool:
        entry = known.get(str(source.path))
        return entry is not None and (entry.size, entry.modified) == (source.size, source.modified)

    return [replace(s, name=str(s.path)) if s.name not in known and is_old(s) else s for s in sources]


def pieces_of(source: SourceFile, field: str | None, texts: int = 0, tokens: int = 0) -> Iterator[Piece]:
    """All of a source, or the part after so many of its texts and so many tokens of the next."""
    for number, text in enumerate(read_documents(source, field)):
        if number >= texts:
            yield Piece(source, text, number, tokens if number == texts else 0)
    yield Piece(source, None)


def _end(piece: Piece) -> Document:
    return Document((), piece.source.name, (piece.source.size, piece.source.modified))


def _documents(piece: Piece, tokens: np.ndarray, limit: int) -> Iterator[Document]:
    """A text as one document, or as several if it is too long for a segment. Each has the progress in its source, so
    that reading can continue there."""
    for start in range(piece.skip, len(tokens), limit):
        end = min(start + limit, len(tokens))
        done = (piece.number + 1, 0) if end == len(tokens) else (piece.number, end)
        yield Document(tokens[start:end], piece.source.name, read=(piece.source.size, piece.source.modified, *done))


def _hashes(store: Store, collection: str) -> set[int]:
    """The hashes of all documents of a collection."""
    return {checksum(document) for document in store.documents(collection)}
