"""A run: a piece of text with its positions sorted by the tokens before them. Everything that is searched is a run: the
mapped segments of a store, recently appended documents, the text of a request. One search covers all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    """The checksums of a mapped section's pages, and which pages have been checked."""

    sums: NDArray[np.uint64]  # (pages,)
    seen: NDArray[np.uint8]  # (pages,) 1 once checked


@dataclass(frozen=True, eq=False)
class Run:
    tokens: Tokens  # (n,) documents with a separator after each, DEPTH separators before the first
    positions: Positions  # (m,) in the order of `sort`
    name: str = "memory"  # for error messages: the file it is mapped from
    # (m / EVERY,) the last tokens before every EVERY-th position, packed into a number. Most steps of a binary search
    # are done in these, which are close together in memory. Small runs have none.
    keys: NDArray[np.uint64] | None = None
    checks: dict[str, Checks] = field(default_factory=dict)  # of tokens, positions and keys, if they are mapped
    dead: NDArray[np.int64] = field(default_factory=lambda: NONE)  # (2d,) starts and ends of removed text, ascending
    vocabulary: int = 0  # ids from here on are never drafted, whatever a file contains; 0: no limit but the separator

    @classmethod
    def of(cls, documents: Sequence[Sequence[int] | NDArray[Any]], dtype: Any = np.uint16) -> Run:
        """Documents in memory, sorted."""
        tokens = join(documents, dtype)
        return cls(tokens, sort_positions(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def row(self) -> NDArray[np.int64]:
        """(COLUMNS,) how compiled code finds it. Kept, since the same earlier answers are joined with many texts."""
        row = np.zeros(COLUMNS, np.int64)
        sections = {"tokens": self.tokens, "positions": self.positions, "keys": self.keys}
        for column, (name, section) in zip((TOKENS, POSITIONS, KEYS), sections.items(), strict=True):
            if section is not None:
                row[column] = section.ctypes.data
            if name in self.checks:
                row[column + 1] = self.checks[name].sums.ctypes.data
                row[column + 2] = self.checks[name].seen.ctypes.data
        row[LENGTH], row[COUNT] = len(self.tokens), len(self.positions)
        row[DEAD], row[DEADS] = self.dead.ctypes.data, len(self.dead)
        row[LIMIT] = min(self.vocabulary or separator(self.tokens), separator(self.tokens))
        return row


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The narrowest type for a vocabulary. Its largest value is the separator of documents, not a token."""
    return np.dtype(np.uint16 if vocabulary <= 0xFFFF else np.uint32)


def join(documents: Sequence[Sequence[int] | NDArray[Any]], dtype: Any) -> Tokens:
    """Documents in the form of a run: separators before, between and after them."""
    tokens = np.empty(DEPTH + sum(len(d) + 1 for d in documents), dtype)
    sep = separator(tokens)
    tokens[:DEPTH] = sep
    at = DEPTH
    for document in documents:
        tokens[at : at + len(document)] = document
        at += len(document) + 1
        tokens[at - 1] = sep
    return tokens


# The columns of the table that passes runs to compiled code: addresses and lengths. For each section: the addresses of
# its data, of its pages' checksums, and of the flags of checked pages.
TOKENS, TOKEN_SUMS, TOKEN_SEEN, POSITIONS, POSITION_SUMS, POSITION_SEEN, KEYS, KEY_SUMS, KEY_SEEN = range(9)
LENGTH, COUNT, DEAD, DEADS, LIMIT, COLUMNS = range(9, 15)


class Runs:
    """Several runs to be searched together: a snapshot that never changes and keeps alive what it points to."""

    def __init__(self, runs: Sequence[Run], dtype: Any = np.uint16) -> None:
        self.runs = tuple(runs)
        self.dtype = np.dtype(dtype)
        self.table = np.array([run.row for run in self.runs], np.int64).reshape(-1, COLUMNS)
        self.width = np.empty(0, self.dtype)  # tells compiled code the tokens' type
        for run in self.runs:
            if run.tokens.dtype != self.dtype:
                raise TypeError(f"a run of {run.tokens.dtype} tokens among runs of {self.dtype}")

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)


class Pieces:
    """Sorted positions, a piece at a time, each piece with its keys."""

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
