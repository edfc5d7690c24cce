"""A segment: documents with their sorted positions as one immutable, memory-mapped file. docs/store-format.md has the
bytes.

Opening reads one page. All else is checked when it is first touched: documents and sources as a whole, tokens and
positions page by page.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from slipstream.datastores.pages import PAGE, checksum, page_sums
from slipstream.datastores.runs import Checks, Run, keys_of
from slipstream.datastores.sort import DEPTH, Positions, Tokens, precedes, separator
from slipstream.errors import DamagedError

MAGIC = b"SLIPSEG1"
# In this order: what a cut-off file loses first can be made again.
SECTIONS = ("sources", "documents", "tokens_sums", "positions_sums", "keys_sums", "tokens", "positions", "keys")
PAGED = ("tokens", "positions", "keys")  # checked page by page


@dataclass(frozen=True)
class SourceEntry:
    """Where documents came from, and how far it was read."""

    name: str
    documents: int
    size: int = -1  # of the file, in bytes; -1 if it is no file
    modified: int = -1  # of the file, in nanoseconds
    complete: bool = True  # False: there may be more documents in it


@dataclass(frozen=True, eq=False)
class Content:
    """What a segment is made of."""

    collection: str
    tokenizer: str
    vocabulary: int
    tokens: Tokens  # as in a Run
    starts: NDArray[np.uint32]  # (documents,) where each begins in tokens
    source: NDArray[np.uint32]  # (documents,) which of the sources each is from
    sources: list[SourceEntry]
    # The log or the segments whose documents these are. Should the manifest be lost, this tells which files say the
    # same thing twice.
    made_from: tuple[str, ...] = ()


def write_segment(path: Path, content: Content, positions: Positions) -> None:
    """The file, whole and on the disk, or not at all."""
    parts: dict[str, NDArray[Any]] = {
        "sources": _bytes(json.dumps([list(vars(s).values()) for s in content.sources]).encode()),
        "documents": _bytes(np.stack([content.starts, content.source])),
        "tokens": _bytes(content.tokens),
        "positions": _bytes(positions),
        "keys": _bytes(keys_of(content.tokens, positions)),
    }
    for name in PAGED:
        whole, rest = _pages(parts[name])
        parts[name + "_sums"] = _bytes(np.concatenate([page_sums(whole), page_sums(rest)]))
    offset, sections = PAGE, {}
    for name in SECTIONS:
        sections[name] = [offset, len(parts[name])]
        offset += -(-len(parts[name]) // PAGE) * PAGE
    header = {
        "collection": content.collection,
        "tokenizer": content.tokenizer,
        "vocabulary": content.vocabulary,
        "width": content.tokens.itemsize * 8,
        "documents": len(content.starts),
        "made_from": content.made_from,
        "bytes": offset + PAGE,
        "sections": sections,
        "checksums": {n: f"{checksum(parts[n]):016x}" for n in ("sources", "documents", "tokens_sums")},
    }
    made = path.with_suffix(".making")
    with made.open("wb") as file:
        file.write(_header_page(header))
        for name in SECTIONS:
            file.write(parts[name].data)
            file.write(b"\0" * (-len(parts[name]) % PAGE))
        file.write(_header_page(header))  # once more: without it, nothing of a segment can be told
        file.flush()
        os.fsync(file.fileno())
    made.rename(path)
    sync_folder(path.parent)


class Segment:
    """A mapped segment file."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.header = read_header(path, file.read(PAGE))
            if size != self.header["bytes"]:
                raise DamagedError(
                    f"{path} has {size} bytes instead of {self.header['bytes']}: `slipstream store repair` keeps the "
                    "documents that are left whole"
                )
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        # A search jumps: reading ahead would fetch a hundred pages for each that is wanted.
        self._map.madvise(mmap.MADV_RANDOM)
        self.collection: str = self.header["collection"]
        self.dtype = np.dtype(f"<u{self.header['width'] // 8}")
        self.tokens: Tokens = self._section("tokens", self.dtype)
        self.positions: Positions = self._section("positions", np.uint32)

    def __len__(self) -> int:
        return len(self.tokens)

    def _section(self, name: str, dtype: Any) -> NDArray[Any]:
        offset, size = self.header["sections"][name]
        return np.frombuffer(self._map, dtype, size // np.dtype(dtype).itemsize, offset)

    def _whole(self, name: str, dtype: Any) -> NDArray[Any]:
        """A section that is small enough to be checked as a whole."""
        data = self._section(name, np.uint8)
        if f"{checksum(data):016x}" != self.header["checksums"][name]:
            raise DamagedError(f"{self.path}: its {name} are damaged; `slipstream store repair` keeps its text")
        return data.view(dtype)

    @cached_property
    def sources(self) -> list[SourceEntry]:
        return [SourceEntry(*entry) for entry in json.loads(self._whole("sources", np.uint8).tobytes())]

    @cached_property
    def starts(self) -> NDArray[np.uint32]:
        return self._whole("documents", np.uint32)[: self.header["documents"]]

    @cached_property
    def ends(self) -> NDArray[np.uint32]:
        """(documents,) where the separator after each stands."""
        return np.append(self.starts, np.uint32(len(self.tokens)))[1:] - np.uint32(1)

    @cached_property
    def source(self) -> NDArray[np.uint32]:
        return self._whole("documents", np.uint32)[self.header["documents"] :]

    @cached_property
    def checks(self) -> dict[str, Checks]:
        """Of tokens, positions and keys."""
        sums = {n: self._section(n + "_sums", np.uint64) for n in PAGED}
        return {n: Checks(s, np.zeros(len(s), np.uint8)) for n, s in sums.items()}

    def run(self, removed: Sequence[str] = ()) -> Run:
        """To search it, without what came from the removed sources."""
        keys = self._section("keys", np.uint64)
        return Run(self.tokens, self.positions, str(self.path), keys, self.checks, self.dead(removed))

    def dead(self, removed: Sequence[str]) -> NDArray[np.int64]:
        """(2d,) where the removed documents start and end."""
        if not removed:
            return np.empty(0, np.int64)
        gone = self.is_from(removed)
        return np.stack([self.starts[gone], self.ends[gone]], axis=1).astype(np.int64).ravel()

    def is_from(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """(documents,) whether each is from one of the sources."""
        chosen = np.array([s.name in set(names) for s in self.sources], np.bool_)
        return chosen[self.source] if len(chosen) else np.zeros(len(self.starts), np.bool_)

    def documents(self, removed: Sequence[str] = ()) -> Iterator[tuple[Tokens, str]]:
        """The tokens and the source of each document, checked, without those of the removed sources."""
        tokens = self.read_tokens()
        for i in np.flatnonzero(~self.is_from(removed)):
            yield tokens[self.starts[i] : self.ends[i]], self.sources[self.source[i]].name

    def read_tokens(self) -> Tokens:
        """All tokens, checked."""
        if bad := self.damaged_pages("tokens"):
            raise DamagedError(
                f"{self.path}: {len(bad)} pages of its tokens are damaged, the first is {bad[0]}; `slipstream store "
                "repair` keeps the documents in the others"
            )
        return self.tokens

    def damaged_pages(self, name: str) -> list[int]:
        """Of tokens, positions or keys."""
        self._map.madvise(mmap.MADV_SEQUENTIAL)
        offset, size = self.header["sections"][name]
        pages = -(-size // PAGE)
        data = np.frombuffer(self._map, np.uint8, pages * PAGE, offset)
        bad: list[int] = []
        for first in range(0, pages, 4096):  # in pieces, so that a huge segment never is in memory as a whole
            last = min(first + 4096, pages)
            differs = page_sums(data[first * PAGE : last * PAGE]) != self.checks[name].sums[first:last]
            bad += (np.flatnonzero(differs) + first).tolist()
        self._map.madvise(mmap.MADV_RANDOM)
        return bad

    def verify(self) -> list[str]:
        """Read everything: what is wrong, in words."""
        wrong = []
        for name in ("sources", "documents", "tokens_sums"):
            try:
                self._whole(name, np.uint8)
            except DamagedError as error:
                wrong.append(str(error))
        try:
            read_header(self.path, self._map[-PAGE:])
        except DamagedError:
            wrong.append(f"{self.path}: its second header, at its end, is damaged; `slipstream store repair` renews it")
        for name in PAGED:
            if bad := self.damaged_pages(name):
                wrong.append(f"{self.path}: {len(bad)} pages of its {name} are damaged, the first is {bad[0]}")
        if not wrong:
            counts = np.bincount(self.source, minlength=len(self.sources)).tolist()
            if counts != [s.documents for s in self.sources]:
                wrong.append(f"{self.path}: its sources have other numbers of documents than it says")
            if (i := _misplaced(self.tokens, self.starts, self.header["vocabulary"], separator(self.tokens))) >= 0:
                wrong.append(f"{self.path}: its document {i} is not where it says, or has a token of no vocabulary")
            at = _first_unsorted(self.tokens, self.positions, separator(self.tokens))
            if at >= 0:
                wrong.append(f"{self.path}: its positions are not in order at {at}")
            elif len(self.positions) != _sortable(self.tokens, separator(self.tokens)):
                wrong.append(f"{self.path}: it has {len(self.positions)} positions, not one for each place in its text")
            elif not np.array_equal(self._section("keys", np.uint64), keys_of(self.tokens, self.positions)):
                wrong.append(f"{self.path}: its keys are not those of its positions")
        return wrong


def read_header(path: Path, page: bytes) -> dict[str, Any]:
    """Page 0 of a segment file."""
    length = int.from_bytes(page[8:12], "little")
    told = int.from_bytes(page[12:20], "little")
    body = page[20 : 20 + length]
    if page[:8] != MAGIC or len(body) != length or checksum(body) != told:
        raise DamagedError(
            f"{path} does not begin with the header of a segment: `slipstream store repair` goes on without it"
        )
    header: dict[str, Any] = json.loads(body)
    return header


def sync_folder(path: Path) -> None:
    """Make a new or renamed name in the folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _header_page(header: dict[str, Any]) -> bytes:
    body = json.dumps(header).encode()
    page = MAGIC + len(body).to_bytes(4, "little") + checksum(body).to_bytes(8, "little") + body
    assert len(page) <= PAGE, "the collection's name is limited so that the header fits"
    return page.ljust(PAGE, b"\0")


def _bytes(array: NDArray[Any] | bytes) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8) if len(array) else np.empty(0, np.uint8)


def _pages(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Whole pages, and the rest filled up with zeros to one more, or none."""
    whole = len(data) // PAGE * PAGE
    rest = np.zeros(PAGE if len(data) > whole else 0, np.uint8)
    rest[: len(data) - whole] = data[whole:]
    return data[:whole], rest


@njit(cache=True, nogil=True)
def _misplaced(tokens, starts, vocabulary, sep):  # type: ignore[no-untyped-def]
    """The first document that does not begin right after the last one's separator, or is not made of tokens; or -1."""
    end = 0
    while end < DEPTH and tokens[end] == sep:
        end += 1
    for i in range(len(starts)):
        if starts[i] != end:
            return i
        while end < len(tokens) and tokens[end] < vocabulary:
            end += 1
        if end == starts[i] or end == len(tokens) or tokens[end] != sep:
            return i
        end += 1
    return -1 if end == len(tokens) else len(starts)


@njit(cache=True, nogil=True)
def _first_unsorted(tokens, positions, sep):  # type: ignore[no-untyped-def]
    for i in range(len(positions)):
        p = np.int64(positions[i])
        if p < DEPTH or p >= len(tokens) or tokens[p] == sep or tokens[p - 1] == sep:
            return i
        if i > 0 and not precedes(tokens, np.int64(positions[i - 1]), p, 0):
            return i
    return -1


@njit(cache=True, nogil=True)
def _sortable(tokens, sep):  # type: ignore[no-untyped-def]
    count = 0
    for p in range(DEPTH, len(tokens)):
        count += tokens[p] != sep and tokens[p - 1] != sep
    return count
