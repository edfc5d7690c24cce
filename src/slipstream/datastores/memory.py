"""What was appended and is not yet in a segment: documents in memory, searchable at once.

They are kept as a few runs, each more than twice as long as the next: a new document becomes a run of its own, and runs
of like size are sorted into one. So a token is sorted again about as often as the text doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.datastores.runs import Run, join
from slipstream.datastores.segment import Content, SourceEntry
from slipstream.datastores.sort import DEPTH, Tokens


@dataclass(eq=False)
class _Batch:
    """Documents that are sorted together."""

    documents: list[Tokens]
    size: int
    run: Run | None = None


@dataclass(eq=False)
class Memory:
    """The recent documents of one collection."""

    dtype: Any
    size: int = 0  # tokens
    batches: list[_Batch] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each document, in order
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # size and time of sources read to their end

    def append(self, document: Tokens, source: str) -> None:
        self.size += len(document)
        self.sources.append(source)
        self.batches.append(_Batch([document], len(document)))
        while len(self.batches) > 1 and self.batches[-2].size <= 2 * self.batches[-1].size:
            last = self.batches.pop()
            merged = _Batch(self.batches[-1].documents + last.documents, self.batches[-1].size + last.size)
            self.batches[-1] = merged

    def remove(self, source: str) -> None:
        """Forget the documents of a source."""
        kept = [(d, s) for d, s in zip(self.documents(), self.sources, strict=True) if s != source]
        self.size, self.batches, self.sources = 0, [], []
        self.files.pop(source, None)
        for document, name in kept:
            self.append(document, name)

    def keep_latest(self, limit: int) -> None:
        """Forget the oldest documents until at most `limit` tokens are left."""
        kept = list(zip(self.documents(), self.sources, strict=True))[::-1]
        self.size, self.batches, self.sources = 0, [], []
        room = np.cumsum([len(d) for d, _ in kept]) <= limit
        for (document, name), fits in zip(kept[::-1], room[::-1], strict=True):
            if fits:
                self.append(document, name)

    def documents(self) -> list[Tokens]:
        return [d for batch in self.batches for d in batch.documents]

    def runs(self) -> list[Run]:
        """To search them. Only what is new since the last time is sorted."""
        for batch in self.batches:
            if batch.run is None:
                batch.run = Run.of(batch.documents, self.dtype)
        return [batch.run for batch in self.batches if batch.run is not None]

    def entries(self) -> dict[str, SourceEntry]:
        """The sources, with how much of each is here."""
        counts = dict.fromkeys(self.files, 0)
        for name in self.sources:
            counts[name] = counts.get(name, 0) + 1
        none = (-1, -1)
        return {n: SourceEntry(n, c, *self.files.get(n, none), n in self.files) for n, c in counts.items()}


def content_of(
    documents: Sequence[Tokens],
    sources: Sequence[str],
    entries: dict[str, SourceEntry],
    collection: str,
    tokenizer: str,
    vocabulary: int,
    dtype: Any,
) -> Content:
    """Documents as a segment keeps them."""
    lengths = np.array([len(d) + 1 for d in documents], np.int64)
    number = {name: i for i, name in enumerate(entries)}
    return Content(
        collection,
        tokenizer,
        vocabulary,
        join(documents, dtype),
        (DEPTH + np.cumsum(lengths) - lengths).astype(np.uint32),
        np.array([number[s] for s in sources], np.uint32),
        list(entries.values()),
    )
