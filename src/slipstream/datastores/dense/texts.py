"""Find the documents of a collection by their content.

Vectors belong to documents, and documents move: from memory into a segment, and from segment to segment. A document's
digest stays the same, so vectors refer to that, and it is looked up when they are opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.datastores.durable.pages import PAGE, page_sums, xxh64
from slipstream.datastores.sparse.runs import Run, Runs
from slipstream.datastores.sparse.sort import DEPTH, Tokens, separator
from slipstream.errors import DamagedError


@dataclass(frozen=True, eq=False)
class Listed:
    """The documents of a run that are not removed."""

    digests: NDArray[np.uint64]  # (documents,) XXH64 of the tokens
    starts: NDArray[np.int64]  # (documents,)
    lengths: NDArray[np.uint32]  # (documents,)


_LISTED: WeakKeyDictionary[Run, Listed] = WeakKeyDictionary()  # a run never changes


def list_run(run: Run) -> Listed:
    """List a run's documents. Reads and checks all of its text."""
    if run not in _LISTED:
        if "tokens" in run.checks:
            _check(run)
        starts, lengths, digests = _documents(run.tokens, separator(run.tokens))
        dead = np.isin(starts, run.dead[::2])
        _LISTED[run] = Listed(digests[~dead], starts[~dead], lengths[~dead])
    return _LISTED[run]


class TextIndex:
    """A snapshot of a collection's documents."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        listed = [list_run(run) for run in runs.runs]
        digests = np.concatenate([np.empty(0, np.uint64), *(x.digests for x in listed)])
        order = np.argsort(digests, kind="stable")
        self._digests = digests[order]
        self._starts = np.concatenate([np.empty(0, np.int64), *(x.starts for x in listed)])[order]
        self._lengths = np.concatenate([np.empty(0, np.uint32), *(x.lengths for x in listed)])[order]
        self._run = np.repeat(np.arange(len(listed)), [len(x.digests) for x in listed])[order]

    def documents(self) -> Iterator[tuple[int, Tokens]]:
        """Digest and tokens of each document, equal ones once, in the order of digests, which is random."""
        fresh = np.flatnonzero(np.append(True, self._digests[1:] != self._digests[:-1])[: len(self._digests)])
        for i in fresh:
            start = self._starts[i]
            yield int(self._digests[i]), self.runs.runs[self._run[i]].tokens[start : start + int(self._lengths[i])]

    def find(self, digests: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
        """(n, 2): for each document the number of its run and its start there; -1 if it is gone."""
        places = np.full((len(digests), 2), -1, np.int64)
        if len(self._digests):
            at = np.minimum(np.searchsorted(self._digests, digests), len(self._digests) - 1)
            there = (self._digests[at] == digests) & (self._lengths[at] == lengths)
            places[there, 0], places[there, 1] = self._run[at[there]], self._starts[at[there]]
        return places


def _check(run: Run) -> None:
    checks, data = run.checks["tokens"], run.tokens.view(np.uint8)
    whole = len(data) // PAGE * PAGE
    rest = np.zeros(PAGE if len(data) > whole else 0, np.uint8)  # in the file, zeros fill the last page
    rest[: len(data) - whole] = data[whole:]
    bad = np.flatnonzero(np.concatenate([page_sums(data[:whole]), page_sums(rest)]) != checks.sums)
    if len(bad):
        raise DamagedError(
            f"{run.name}: {len(bad)} pages of its tokens are damaged, the first is {bad[0]}; `slipstream store repair` "
            "keeps the documents in the others"
        )
    checks.seen[:] = 1


@compiled
def _documents(tokens, sep):  # type: ignore[no-untyped-def]
    """Starts, lengths and digests of documents."""
    count = 0
    for i in range(DEPTH, len(tokens)):
        count += tokens[i] == sep and tokens[i - 1] != sep
    starts, lengths = np.empty(count, np.int64), np.empty(count, np.uint32)
    digests = np.empty(count, np.uint64)
    start, found, address = DEPTH, 0, np.int64(tokens.ctypes.data)
    for i in range(DEPTH, len(tokens)):
        if tokens[i] == sep:
            if i > start:
                starts[found], lengths[found] = start, i - start
                size = tokens.itemsize
                digests[found] = xxh64(address + start * size, (i - start) * size, np.uint64(0))
                found += 1
            start = i + 1
    return starts, lengths, digests
