"""Documents in memory that are not yet in a segment, searchable at once.

They are kept as a few runs, each more than twice as long as the next: a new document becomes a run, and runs of similar
size are sorted into one. So a token is sorted again about as often as the text doubles. A document is no Python object,
only a part of a run, since there may be millions of a few tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.segment import Content
from slipstream.datastores.sparse.runs import Run, join
from slipstream.datastores.sparse.sort import DEPTH, Tokens, separator, sort_positions


@dataclass(eq=False)
class _Batch:
    """Documents that are sorted together."""

    text: Tokens  # each with a separator after it
    run: Run | None = None


@dataclass(eq=False)
class Memory:
    """The recent documents of one collection."""

    dtype: Any
    vocabulary: int = 0  # ids from here on are never drafted; 0: no limit
    size: int = 0  # tokens
    batches: list[_Batch] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each document, in order
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # size and time of sources read to their end
    reading: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)  # progress in other sources

    def append(self, document: Tokens, source: str) -> None:
        self.extend([document], [source])

    def extend(self, documents: Sequence[Tokens], sources: Sequence[str]) -> None:
        """Append documents that are sorted together."""
        if not len(documents):
            return
        self.size += sum(map(len, documents))
        self.sources += sources
        self._add(join(documents, self.dtype)[DEPTH:])

    def _add(self, text: Tokens) -> None:
        texts = [text]
        while self.batches and len(self.batches[-1].text) <= 2 * sum(map(len, texts)):
            texts.append(self.batches.pop().text)
        self.batches.append(_Batch(np.concatenate(texts[::-1]) if len(texts) > 1 else text))

    def remove(self, source: str) -> None:
        """Remove the documents of a source."""
        self.files.pop(source, None)
        self.reading.pop(source, None)
        if source in self.sources:
            kept = [(d, s) for d, s in zip(self.documents(), self.sources, strict=True) if s != source]
            self._replace(kept)

    def keep_latest(self, limit: int) -> None:
        """Remove the oldest documents until at most `limit` tokens are left."""
        documents = self.documents()
        room = np.cumsum([len(d) for d in documents[::-1]])[::-1] <= limit
        self._replace(
            [pair for pair, fits in zip(zip(documents, self.sources, strict=True), room, strict=True) if fits]
        )

    def _replace(self, kept: list[tuple[Tokens, str]]) -> None:
        self.size, self.batches, self.sources = 0, [], []
        self.extend([d for d, _ in kept], [s for _, s in kept])

    def documents(self) -> list[Tokens]:
        return [d for batch in self.batches for d in split(batch.text)]

    def runs(self) -> list[Run]:
        """The runs for a search. Only those that are new since the last call are sorted."""
        for batch in self.batches:
            if batch.run is None:
                tokens = with_margin([batch.text], self.dtype)
                batch.run = Run(tokens, sort_positions(tokens), vocabulary=self.vocabulary)
                batch.text = tokens[DEPTH:]  # a view, to hold the tokens in memory once
        return [batch.run for batch in self.batches if batch.run is not None]

    def take_text(self) -> Tokens:
        """All documents in the form of a segment. They are removed here, to hold them in memory once."""
        texts = [batch.text for batch in self.batches]
        self.batches.clear()
        return with_margin(texts, self.dtype)

    def entries(self) -> dict[str, SourceEntry]:
        """The entries of all sources."""
        counts = dict.fromkeys([*self.files, *self.reading], 0)
        for name in self.sources:
            counts[name] = counts.get(name, 0) + 1
        return {n: self._entry(n, c) for n, c in counts.items()}

    def entry(self, name: str) -> SourceEntry | None:
        """The entry of one source."""
        documents = self.sources.count(name)
        known = documents or name in self.files or name in self.reading
        return self._entry(name, documents) if known else None

    def _entry(self, name: str, documents: int) -> SourceEntry:
        if name in self.files:
            return SourceEntry(name, documents, *self.files[name])
        size, modified, texts, tokens = self.reading.get(name, (-1, -1, 0, 0))
        return SourceEntry(name, documents, size, modified, False, texts, tokens)


def with_margin(texts: list[Tokens], dtype: Any) -> Tokens:
    """Texts, with separators after their documents, as one run. Removes each text from the list once it is copied."""
    whole = np.empty(DEPTH + sum(map(len, texts)), dtype)
    whole[:DEPTH] = separator(whole)
    at = len(whole)
    while texts:  # from the end, so that each can be freed
        text = texts.pop()
        whole[at - len(text) : at] = text
        at -= len(text)
    return whole


def split(text: Tokens) -> list[Tokens]:
    """The documents of a text that has a separator after each."""
    ends = np.flatnonzero(text == separator(text))
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return [text[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def starts_of(tokens: Tokens) -> NDArray[np.uint32]:
    """Where the documents of a run start."""
    ends = np.flatnonzero(tokens[DEPTH:] == separator(tokens)) + DEPTH
    return np.concatenate([[DEPTH], ends + 1])[: len(ends)].astype(np.uint32)


def content_of(
    documents: Sequence[Tokens],
    sources: Sequence[str],
    entries: dict[str, SourceEntry],
    collection: str,
    tokenizer: str,
    vocabulary: int,
    dtype: Any,
) -> Content:
    """Documents in the form of a segment."""
    return content_of_run(join(documents, dtype), sources, entries, collection, tokenizer, vocabulary)


def content_of_run(
    tokens: Tokens,
    sources: Sequence[str],
    entries: dict[str, SourceEntry],
    collection: str,
    tokenizer: str,
    vocabulary: int,
) -> Content:
    number = {name: i for i, name in enumerate(entries)}
    source = np.fromiter((number[s] for s in sources), np.uint32, len(sources))
    return Content(collection, tokenizer, vocabulary, tokens, starts_of(tokens), source, list(entries.values()))
