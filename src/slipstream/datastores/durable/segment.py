"""A segment: documents with their sorted positions as one immutable, memory-mapped file. docs/store-format.md has the
bytes.

Opening reads one page. Everything else is checked when it is first read: documents and sources as a whole, tokens,
positions and keys page by page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.datastores.durable.disk import sync_folder
from slipstream.datastores.durable.header import (
    MAGIC,
    PAGED,
    SECTIONS,
    SourceEntry,
    header_page,
    page_sum,
    parse_sources,
    read_header,
)
from slipstream.datastores.durable.mapping import Mapping, watching
from slipstream.datastores.durable.pages import PAGE, checksum, page_sums
from slipstream.datastores.sparse.runs import EVERY, Checks, Pieces, Run, keys_of
from slipstream.datastores.sparse.sort import DEPTH, Positions, Tokens, count_positions, precedes, separator
from slipstream.errors import DamagedError


@dataclass(frozen=True, eq=False)
class Content:
    """The contents of a segment."""

    collection: str
    tokenizer: str
    vocabulary: int
    tokens: Tokens  # as in a Run
    starts: NDArray[np.uint32]  # (documents,) where each begins in tokens
    source: NDArray[np.uint32]  # (documents,) which of the sources each is from
    sources: list[SourceEntry]
    # The log or the segments that these documents came from, with their ids. If the manifest is lost, this tells which
    # files have the same documents.
    made_from: tuple[tuple[str, str], ...] = ()
    store: str = ""  # its id
    generation: int = 0  # of the manifest when this was made


def write_segment(path: Path, content: Content, positions: Pieces) -> None:
    """Write the file, complete and durable, or not at all. positions: in pieces, each written before the next is
    computed, since they take twice the memory of the text."""
    count = positions.count
    lengths = {
        "tokens": content.tokens.nbytes,
        "positions": 4 * count,
        "keys": 8 * -(-count // EVERY),
    }
    parts: dict[str, NDArray[Any]] = {
        "sources": _bytes(json.dumps([list(vars(s).values()) for s in content.sources]).encode()),
        "documents": _bytes(np.stack([content.starts, content.source])),
    }
    sizes = {n: len(p) for n, p in parts.items()} | lengths
    sizes |= {n + "_sums": 8 * -(-size // PAGE) for n, size in lengths.items()}
    sections, offset = _laid_out(sizes)
    made = path.with_suffix(".making")
    try:
        with made.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, offset + PAGE)  # a full disk fails here
            into = _Sections(file.fileno(), sections)
            for name in ("sources", "documents"):
                into.write(name, parts[name])
            into.write("tokens", _bytes(content.tokens))
            for piece, keys in positions:
                into.write("positions", _bytes(piece))
                into.write("keys", _bytes(keys))
            sums = {n: into.finish(n) for n in PAGED}
            for name, array in sums.items():
                into.write(name + "_sums", _bytes(array))
            parts |= {n + "_sums": _bytes(array) for n, array in sums.items()}
            page = header_page(
                MAGIC,
                {
                    "store": content.store,
                    "generation": content.generation,
                    "collection": content.collection,
                    "tokenizer": content.tokenizer,
                    "vocabulary": content.vocabulary,
                    "width": content.tokens.itemsize * 8,
                    "documents": len(content.starts),
                    "made_from": content.made_from,
                    "bytes": offset + PAGE,
                    "sections": sections,
                    "checksums": {n: f"{checksum(parts[n]):016x}" for n in parts},
                },
            )
            for at in (0, offset):  # twice, since without a header a segment is lost
                os.pwrite(file.fileno(), page, at)
            os.fsync(file.fileno())
        made.rename(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _laid_out(sizes: dict[str, int]) -> tuple[dict[str, list[int]], int]:
    """Offset and size of each section, on whole pages after the header; and the end of the last one."""
    offset, sections = PAGE, {}
    for name in SECTIONS:
        sections[name] = [offset, sizes[name]]
        offset += -(-sizes[name] // PAGE) * PAGE
    return sections, offset


class _Sections:
    """Writes sections piece by piece, and computes the checksums of their pages."""

    def __init__(self, file: int, sections: dict[str, list[int]]) -> None:
        self._file, self._at = file, {n: offset for n, (offset, _) in sections.items()}
        self._rest = {n: np.empty(0, np.uint8) for n in PAGED}  # of a page that is not full yet
        self._sums: dict[str, list[NDArray[np.uint64]]] = {n: [] for n in PAGED}

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done : done + (1 << 30)].data, self._at[name] + done)
        self._at[name] += len(data)
        if name in PAGED:
            if len(self._rest[name]):
                fill = PAGE - len(self._rest[name])
                page = np.concatenate([self._rest[name], data[:fill]])
                if len(page) < PAGE:
                    self._rest[name] = page
                    return
                self._sums[name].append(page_sums(page))
                data = data[fill:]
            whole = len(data) // PAGE * PAGE
            self._sums[name].append(page_sums(data[:whole]))
            self._rest[name] = data[whole:].copy()

    def finish(self, name: str) -> NDArray[np.uint64]:
        """(pages,) the checksums of a section, its last page filled with zeros."""
        if len(self._rest[name]):
            self._sums[name].append(page_sums(np.pad(self._rest[name], (0, PAGE - len(self._rest[name])))))
        return np.concatenate([np.empty(0, np.uint64), *self._sums[name]])


class Segment:
    """A mapped segment file."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        with path.open("rb") as file:
            there = os.fstat(file.fileno())
            page = file.read(PAGE)
            self.header = read_header(path, page)
            self.sum = page_sum(page)
            if there.st_size != self.header["bytes"]:
                raise DamagedError(
                    f"{path} has {there.st_size} bytes instead of {self.header['bytes']}: `slipstream store repair` "
                    "keeps the documents that are left whole"
                )
            self._map = Mapping(file.fileno(), there.st_size)
        self._state = _state_of(there)
        # A search jumps around: read-ahead would fetch a hundred pages for each that is needed.
        self._map.advise("random")
        self.collection: str = self.header["collection"]
        self.dtype = np.dtype(f"<u{self.header['width'] // 8}")
        self.tokens: Tokens = self._section("tokens", self.dtype)
        self.positions: Positions = self._section("positions", np.uint32)

    def __len__(self) -> int:
        return len(self.tokens)

    def trust_again(self, always: bool) -> None:
        """Have all pages checked again if the file has changed. always: in any case, since a disk may change bytes
        silently. Raise if the file was replaced or truncated."""
        now = _state_of(os.stat(self.path))
        if now[:3] != self._state[:3]:
            raise DamagedError(
                f"{self.path} was replaced or cut off while it was in use: `slipstream store repair` keeps what is "
                "whole"
            )
        if always or now != self._state:
            for check in self.checks.values():
                check.seen[:] = 0
            self._state = now

    def _section(self, name: str, dtype: Any) -> NDArray[Any]:
        offset, size = self.header["sections"][name]
        return self._map.array(dtype, size // np.dtype(dtype).itemsize, offset)

    def _whole(self, name: str, dtype: Any) -> NDArray[Any]:
        """A section that is small enough to be checked as a whole. A copy, since it is not checked again."""
        with watching(self.path):
            data = self._section(name, np.uint8).copy()
        if f"{checksum(data):016x}" != self.header["checksums"][name]:
            raise DamagedError(f"{self.path}: its {name} are damaged; `slipstream store repair` keeps its text")
        return data.view(dtype)

    @cached_property
    def sources(self) -> list[SourceEntry]:
        return parse_sources(self.path, self._whole("sources", np.uint8).tobytes())

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each source, by name."""
        return {s.name: i for i, s in enumerate(self.sources)}

    @cached_property
    def _places(self) -> NDArray[np.uint32]:
        """(2, documents): the start of each, and the number of its source."""
        places = self._whole("documents", np.uint32).reshape(2, -1)
        starts = places[0].astype(np.int64)
        ordered = len(starts) == 0 or (starts[0] >= DEPTH and starts[-1] < len(self) and (np.diff(starts) > 0).all())
        if not ordered or (len(starts) and places[1].max() >= len(self.sources)):
            raise DamagedError(f"{self.path}: its documents lie outside its text: `slipstream store repair`")
        return places

    @cached_property
    def starts(self) -> NDArray[np.uint32]:
        return self._places[0]

    @cached_property
    def ends(self) -> NDArray[np.uint32]:
        """(documents,) the index of the separator after each."""
        return np.append(self.starts, np.uint32(len(self.tokens)))[1:] - np.uint32(1)

    @cached_property
    def source(self) -> NDArray[np.uint32]:
        return self._places[1]

    @cached_property
    def checks(self) -> dict[str, Checks]:
        """The checksums of tokens, positions and keys."""
        sums = {n: self._section(n + "_sums", np.uint64) for n in PAGED}
        return {n: Checks(s, np.zeros(len(s), np.uint8)) for n, s in sums.items()}

    def run(self, removed: Sequence[str] = ()) -> Run:
        """The run for searches, without documents of removed sources."""
        keys = self._section("keys", np.uint64)
        dead, vocabulary = self.dead(removed), self.header["vocabulary"]
        return Run(self.tokens, self.positions, str(self.path), keys, self.checks, dead, vocabulary)

    def dead(self, removed: Sequence[str]) -> NDArray[np.int64]:
        """(2d,) starts and ends of removed documents."""
        if not removed:
            return np.empty(0, np.int64)
        gone = self.is_from(removed)
        return np.stack([self.starts[gone], self.ends[gone]], axis=1).astype(np.int64).ravel()

    def is_from(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """(documents,) whether each is from one of these sources."""
        chosen = np.zeros(len(self.sources), np.bool_)
        chosen[[self.numbers[name] for name in names if name in self.numbers]] = True
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
        """The numbers of damaged pages of tokens, positions or keys."""
        self._map.advise("sequential")
        offset, size = self.header["sections"][name]
        pages = -(-size // PAGE)
        data = self._map.array(np.uint8, pages * PAGE, offset)
        bad: list[int] = []
        for first in range(0, pages, 4096):  # in pieces, so that a large segment need not fit into memory
            last = min(first + 4096, pages)
            differs = page_sums(data[first * PAGE : last * PAGE]) != self.checks[name].sums[first:last]
            bad += (np.flatnonzero(differs) + first).tolist()
        self._map.advise("random")
        return bad

    def damage(self) -> list[str]:
        """Read everything and compare checksums. Returns a sentence for each fault."""
        wrong = []
        for name in self.header["checksums"]:
            try:
                self._whole(name, np.uint8)
            except DamagedError as error:
                wrong.append(str(error))
        try:
            last = self._map.array(np.uint8, PAGE, self.header["bytes"] - PAGE).tobytes()
            if read_header(self.path, last) != self.header:
                raise DamagedError("it is another one")
        except DamagedError:
            wrong.append(f"{self.path}: its second header, at its end, is damaged; `slipstream store repair` renews it")
        for name in PAGED:
            if bad := self.damaged_pages(name):
                wrong.append(f"{self.path}: {len(bad)} pages of its {name} are damaged, the first is {bad[0]}")
        return wrong

    def verify(self) -> list[str]:
        """Read everything, compare checksums and check that the contents are consistent. A sentence for each fault."""
        wrong = self.damage()
        if not wrong:
            try:
                self._places  # noqa: B018
            except DamagedError as error:
                wrong.append(str(error))
        if not wrong:
            counts = np.bincount(self.source, minlength=len(self.sources)).tolist()
            if counts != [s.documents for s in self.sources]:
                wrong.append(f"{self.path}: its sources have other numbers of documents than it says")
            if (i := _misplaced(self.tokens, self.starts, self.header["vocabulary"], separator(self.tokens))) >= 0:
                wrong.append(f"{self.path}: its document {i} is not where it says, or has a token of no vocabulary")
            at = _first_unsorted(self.tokens, self.positions, separator(self.tokens))
            if at >= 0:
                wrong.append(f"{self.path}: its positions are not in order at {at}")
            elif len(self.positions) != count_positions(self.tokens):
                wrong.append(f"{self.path}: it has {len(self.positions)} positions, not one for each place in its text")
            elif not np.array_equal(self._section("keys", np.uint64), keys_of(self.tokens, self.positions)):
                wrong.append(f"{self.path}: its keys are not those of its positions")
        return wrong


def _state_of(there: os.stat_result) -> tuple[int, ...]:
    return there.st_dev, there.st_ino, there.st_size, there.st_ctime_ns


def _bytes(array: NDArray[Any] | bytes) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8) if len(array) else np.empty(0, np.uint8)


@compiled
def _misplaced(tokens, starts, vocabulary, sep):  # type: ignore[no-untyped-def]
    """The first document that does not start right after a separator, or has invalid tokens; or -1."""
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


@compiled
def _first_unsorted(tokens, positions, sep):  # type: ignore[no-untyped-def]
    for i in range(len(positions)):
        p = np.int64(positions[i])
        if p < DEPTH or p >= len(tokens) or tokens[p] == sep or tokens[p - 1] == sep:
            return i
        if i > 0 and not precedes(tokens, np.int64(positions[i - 1]), p, np.int64(0)):
            return i
    return -1
