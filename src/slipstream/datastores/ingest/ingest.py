"""Ingest: sources into a store, in bounded memory. Whatever interrupts it, the same call goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
class Piece:
    """A text of a source, or the source's end."""

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
    room = longest_segment(store.segment_tokens)
    for documents in encoded(pieces, encoder, room):
        if deduplicate and seen is None:  # after the first sources that had changed were removed
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
    """Tokens of a segment that is made here at most: one more, and the store would end it by itself."""
    return segment_tokens - 1


def cuts(lengths: Sequence[int], room: int, used: int = 0) -> Iterator[int]:
    """Where segments end, by the lengths of documents alone: before each that would be too much. used: tokens that
    wait for the first of them already."""
    for i, length in enumerate(lengths):
        if used + length > room:
            yield i
            used = 0
        used += length


def encoded(pieces: Iterable[Piece], encoder: Encoder, longest: int) -> Iterator[list[Document]]:
    """The documents of pieces, some at a time."""
    for batch in batches(pieces, BATCH, size=Piece.size):
        texts = iter(encoder.encode([piece.text for piece in batch if piece.text is not None]))
        yield [
            document
            for piece in batch
            for document in ([_end(piece)] if piece.text is None else _documents(piece, next(texts), longest))
        ]


def document_hash(document: Document, dtype: np.dtype[Any]) -> int:
    """By which equal documents are known."""
    return checksum(np.asarray(document.tokens, dtype))


def is_new(key: int, seen: set[int]) -> bool:
    """Whether it was not seen before; from now on it was."""
    known = key in seen
    seen.add(key)
    return not known


def _pieces(
    store: Store, sources: Sequence[SourceFile], collection: str, field: str | None, counts: Ingested
) -> Iterator[Piece]:
    """What is still to be read: of a source that was interrupted what comes after the stored part, unless it has
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
        yield from pieces_of(source, field, entry.texts, entry.tokens)


def pieces_of(source: SourceFile, field: str | None, texts: int = 0, tokens: int = 0) -> Iterator[Piece]:
    """All of a source, or what comes after so many of its texts and so many tokens of the next."""
    for number, text in enumerate(read_documents(source, field)):
        if number >= texts:
            yield Piece(source, text, number, tokens if number == texts else 0)
    yield Piece(source, None)


def _end(piece: Piece) -> Document:
    return Document((), piece.source.name, (piece.source.size, piece.source.modified))


def _documents(piece: Piece, tokens: np.ndarray, limit: int) -> Iterator[Document]:
    """A text as a document, or as several if it is longer than a segment can hold. Each says how far its source was
    read with it, so that reading can go on from there."""
    for start in range(piece.skip, len(tokens), limit):
        end = min(start + limit, len(tokens))
        done = (piece.number + 1, 0) if end == len(tokens) else (piece.number, end)
        yield Document(tokens[start:end], piece.source.name, read=(piece.source.size, piece.source.modified, *done))


def _hashes(store: Store, collection: str) -> set[int]:
    """Of every document of a collection."""
    return {checksum(document) for document in store.documents(collection)}
