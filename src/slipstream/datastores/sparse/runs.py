"""A run: a piece of text with its positions sorted by what precedes them. Everything that can be searched is runs: the
mapped segments of a store, what was appended since, the text so far. One search goes over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.datastores.sparse.sort import (
    DEPTH,
    Positions,
    Tokens,
    context_key,
    count_positions,
    separator,
    sort_positions,
    sorted_pieces,
)

EVERY = 32  # positions per key
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Checks:
    """The checksums of a mapped section's pages, and which of them were found right so far."""

    sums: NDArray[np.uint64]  # (pages,)
    seen: NDArray[np.uint8]  # (pages,) 1 once checked


@dataclass(frozen=True, eq=False)
class Run:
    tokens: Tokens  # (n,) documents with a separator after each, DEPTH separators before the first
    positions: Positions  # (m,) in the order of `sort`
    name: str = "memory"  # for error messages: the file it is mapped from
    # (m / EVERY,) the last tokens before every EVERY-th position, as one number: most of a search is a search in these,
    # which lie close together. A small run does without.
    keys: NDArray[np.uint64] | None = None
    checks: dict[str, Checks] = field(default_factory=dict)  # of tokens, positions and keys, if they are mapped
    dead: NDArray[np.int64] = field(default_factory=lambda: NONE)  # (2d,) starts and ends of removed text, ascending
    vocabulary: int = 0  # ids from there on are no tokens, whatever a file says; 0: all but the separator are

    @classmethod
    def of(cls, documents: Sequence[Sequence[int] | NDArray[Any]], dtype: Any = np.uint16) -> Run:
        """Documents in memory, sorted."""
        tokens = join(documents, dtype)
        return cls(tokens, sort_positions(tokens))

    def __len__(self) -> int:
        return len(self.tokens)


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The narrowest tokens for a vocabulary. The largest value of the type is no token: it separates documents."""
    return np.dtype(np.uint16 if vocabulary <= 0xFFFF else np.uint32)


def join(documents: Sequence[Sequence[int] | NDArray[Any]], dtype: Any) -> Tokens:
    """Documents as a run keeps them."""
    tokens = np.empty(DEPTH + sum(len(d) + 1 for d in documents), dtype)
    sep = separator(tokens)
    tokens[:DEPTH] = sep
    at = DEPTH
    for document in documents:
        tokens[at : at + len(document)] = document
        at += len(document) + 1
        tokens[at - 1] = sep
    return tokens


# The columns of the table that hands runs to compiled code: addresses and lengths. Of each section: where it lies, the
# checksums of its pages, and which pages are known to be right.
TOKENS, TOKEN_SUMS, TOKEN_SEEN, POSITIONS, POSITION_SUMS, POSITION_SEEN, KEYS, KEY_SUMS, KEY_SEEN = range(9)
LENGTH, COUNT, DEAD, DEADS, LIMIT, COLUMNS = range(9, 15)


class Runs:
    """Several runs as one thing to search: a snapshot that never changes and keeps alive what it points to."""

    def __init__(self, runs: Sequence[Run], dtype: Any = np.uint16) -> None:
        self.runs = tuple(runs)
        self.dtype = np.dtype(dtype)
        self.table = np.zeros((len(self.runs), COLUMNS), np.int64)
        self.width = np.empty(0, self.dtype)  # tells compiled code the tokens' type
        for row, run in zip(self.table, self.runs, strict=True):
            if run.tokens.dtype != self.dtype:
                raise TypeError(f"a run of {run.tokens.dtype} tokens among runs of {self.dtype}")
            sections = {"tokens": run.tokens, "positions": run.positions, "keys": run.keys}
            for column, (name, section) in zip((TOKENS, POSITIONS, KEYS), sections.items(), strict=True):
                if section is not None:
                    row[column] = section.ctypes.data
                if name in run.checks:
                    row[column + 1] = run.checks[name].sums.ctypes.data
                    row[column + 2] = run.checks[name].seen.ctypes.data
            row[LENGTH], row[COUNT] = len(run.tokens), len(run.positions)
            row[DEAD], row[DEADS] = run.dead.ctypes.data, len(run.dead)
            row[LIMIT] = min(run.vocabulary or separator(run.tokens), separator(run.tokens))

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)


class Pieces:
    """Positions in order, sorted a piece at a time, each with its keys."""

    def __init__(self, tokens: Tokens, threads: int | None = None) -> None:
        self.tokens, self.count, self._threads = tokens, count_positions(tokens), threads

    def __iter__(self) -> Iterator[tuple[Positions, NDArray[np.uint64]]]:
        done = 0
        for positions in sorted_pieces(self.tokens, self._threads):
            yield positions, _keys(self.tokens, positions[-done % EVERY :: EVERY].copy())
            done += len(positions)


def keys_of(tokens: Tokens, positions: Positions) -> NDArray[np.uint64]:
    """A run's keys."""
    return _keys(tokens, positions[::EVERY].copy())


@compiled
def _keys(tokens, positions):  # type: ignore[no-untyped-def]
    keys = np.empty(len(positions), np.uint64)
    for i in range(len(positions)):
        keys[i] = context_key(tokens, np.int64(positions[i]), np.int64(0))
    return keys
