"""The text of a running request, searchable up to its last token, and earlier answers.

A position's place in the order depends only on the tokens before it. So a growing text is never sorted again: a new
token is one insertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.compiled import compiled
from slipstream.datastores.durable.memory import Memory
from slipstream.datastores.sparse.runs import COUNT, LENGTH, Run, Runs
from slipstream.datastores.sparse.sort import DEPTH, Positions, precedes, separator, sort_positions

SHORT = 1024  # positions that are inserted one by one before they are merged
COLLECTIONS = 1024  # kept at a time: clients name them, perhaps one for each request


class LiveText:
    """A text that grows at its end, searched together with other runs.

    Its positions are two runs over the same tokens: a short one, into which new positions are inserted, and a long one,
    into which the short one is merged when it is full. So the cost of a token does not grow with the text.
    """

    def __init__(self, dtype: Any = np.uint16) -> None:
        self.dtype = np.dtype(dtype)
        self.tokens = np.empty(1024, self.dtype)
        self._separator = separator(self.tokens)
        self.tokens[: DEPTH + 1] = self._separator  # there is always one after the last token too
        self.end = DEPTH
        self.long = np.empty(0, np.uint32)
        self.short, self.count = np.empty(SHORT, np.uint32), 0
        self._own = list[Run]()  # its runs, while neither the array nor the positions are others
        self._below: Runs | None = None
        self._runs: Runs | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        start, end = self.end, self.end + len(tokens)
        if end + 1 > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * end)
            self._own = []
        self.tokens[start:end] = tokens
        self.tokens[end] = self._separator
        self.end = end
        if len(tokens) > SHORT // 2 and len(tokens) > len(self.long) // 8:
            self._lay(sort_positions(self.tokens[: end + 1]))
            return
        at = max(start, DEPTH + 1)  # the first token of a text has nothing before it
        while at < end:
            upto = min(end, at + SHORT - self.count)
            self.count = _insert(self.tokens, self.short, self.count, at, upto)
            at = upto
            if self.count == SHORT:
                self._lay(_merge(self.tokens, self.long, self.short))

    def _lay(self, positions: Positions) -> None:
        self.long, self.count, self._own = positions, 0, []

    def runs(self, below: Runs) -> Runs:
        """This text and the given runs, to be searched until the text grows."""
        if not self._own:
            self._own, self._runs = [Run(self.tokens, p, "the text so far") for p in (self.long, self.short)], None
        if self._runs is None or below is not self._below:
            self._below, self._runs = below, Runs((*below.runs, *self._own), self.dtype)
        self._runs.table[-2:, LENGTH], self._runs.table[-1, COUNT] = self.end + 1, self.count
        return self._runs


class EarlierAnswers:
    """Answers to earlier requests, by collection. The engine owns them, and adds a request's emitted tokens when it
    ends. The oldest answers are dropped first, and so are the least recently used collections."""

    def __init__(self, dtype: Any, limit: int) -> None:
        self.dtype, self.limit = np.dtype(dtype), limit  # tokens of a collection
        self._memory: dict[str, Memory] = {}
        self._views: dict[str, Runs] = {}
        self._none = Runs((), self.dtype)

    def publish(self, collection: str, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        memory = self._memory.pop(collection, None) or Memory(self.dtype)
        self._memory[collection] = memory  # the latest is the last
        if len(self._memory) > COLLECTIONS:
            oldest = next(iter(self._memory))
            del self._memory[oldest], self._views[oldest]
        memory.append(np.asarray(tokens, self.dtype)[-self.limit :], "")
        if memory.size > self.limit + self.limit // 4:  # not at every answer, since the rest must be sorted again
            memory.keep_latest(self.limit)
        self._views[collection] = Runs(memory.runs(), self.dtype)

    def runs(self, collection: str) -> Runs:
        return self._views.get(collection, self._none)


@compiled
def _insert(tokens, positions, count, start, end):  # type: ignore[no-untyped-def]
    """Put the positions start..end where they belong among the first `count`; returns the new count."""
    for p in range(start, end):
        lo, hi = 0, count
        while lo < hi:
            middle = (lo + hi) // 2
            if precedes(tokens, np.int64(positions[middle]), p, np.int64(0)):
                lo = middle + 1
            else:
                hi = middle
        for i in range(count, lo, -1):
            positions[i] = positions[i - 1]
        positions[lo] = p
        count += 1
    return count


@compiled
def _merge(tokens, a, b):  # type: ignore[no-untyped-def]
    """Two sorted arrays of positions in one text as one."""
    out = np.empty(len(a) + len(b), np.uint32)
    i, j = 0, 0
    for k in range(len(out)):
        if j == len(b) or (i < len(a) and precedes(tokens, np.int64(a[i]), np.int64(b[j]), np.int64(0))):
            out[k] = a[i]
            i += 1
        else:
            out[k] = b[j]
            j += 1
    return out
