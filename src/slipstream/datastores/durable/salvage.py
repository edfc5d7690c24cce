"""Salvage: recover the documents of a damaged segment file that are provably intact."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.durable.header import SourceEntry, page_sum, parse_sources, read_header
from slipstream.datastores.durable.pages import PAGE, checksum, page_sums
from slipstream.datastores.sparse.sort import Tokens, separator
from slipstream.errors import StoreError

SALVAGED = "salvaged"  # the source of documents whose own source is lost


@dataclass(frozen=True)
class Salvaged:
    documents: list[Tokens]
    names: list[str]  # the source of each document
    sources: list[SourceEntry]
    named: bool  # whether these are the original sources
    lost_from: list[str]  # the source of each lost document, as far as known
    lost: int

    @property
    def incomplete(self) -> set[str]:
        """The sources that lost documents."""
        return set(self.lost_from)

    def without(self, removed: Set[str]) -> Salvaged:
        """The same without removed sources: their documents are neither kept nor lost."""
        if not removed:
            return self
        kept = [i for i, name in enumerate(self.names) if name not in removed]
        lost_from = [name for name in self.lost_from if name not in removed]
        return replace(
            self,
            documents=[self.documents[i] for i in kept],
            names=[self.names[i] for i in kept],
            sources=[s for s in self.sources if s.name not in removed],
            lost_from=lost_from,
            lost=len(lost_from),
        )


def any_header(path: Path) -> tuple[dict[str, Any], str] | None:
    """The header of a segment file, from its first page or, if that is damaged, from its last; and its checksum."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        first = file.read(PAGE)
        size = file.seek(0, 2)
        file.seek(max(0, size - PAGE))
        last = file.read(PAGE)
    for page in (first, last):
        try:
            header = read_header(path, page)
        except StoreError:
            continue
        if page is first or header["bytes"] == size:
            return header, page_sum(page)
    return None


def salvage_segment(path: Path, header: dict[str, Any]) -> Salvaged:
    """Recover what is intact in a segment file."""
    file = _File(np.fromfile(path, np.uint8), header)
    tokens, good = file.tokens()
    starts, ends, numbers = file.places(tokens, good)
    whole = _in_good_pages(starts.astype(np.int64), ends.astype(np.int64) - 1, good, tokens)
    sources = file.sources()
    if numbers is not None and sources is not None and len(numbers) and numbers.max() >= len(sources):
        numbers = None
    named = sources is not None and numbers is not None
    if sources is None or numbers is None:
        sources, numbers = [SourceEntry(SALVAGED, 0, complete=False)], np.zeros(len(starts), np.uint32)
    names = [sources[n].name for n in numbers]
    kept = np.flatnonzero(whole)
    return Salvaged(
        [tokens[starts[i] : ends[i]] for i in kept],
        [names[i] for i in kept],
        sources,
        named,
        [names[i] for i in np.flatnonzero(~whole)] if named else [],
        header["documents"] - len(kept),
    )


class _File:
    """The sections of a segment file, as far as they exist."""

    def __init__(self, data: NDArray[np.uint8], header: dict[str, Any]) -> None:
        self.data, self.header = data, header

    def section(self, name: str) -> NDArray[np.uint8]:
        offset, size = self.header["sections"][name]
        return self.data[offset : offset + size]

    def is_whole(self, name: str, data: NDArray[Any]) -> bool:
        fits = data.nbytes == self.header["sections"][name][1]
        return fits and f"{checksum(data.view(np.uint8)):016x}" == self.header["checksums"][name]

    def sources(self) -> list[SourceEntry] | None:
        data = self.section("sources")
        try:
            return parse_sources(Path(), data.tobytes()) if self.is_whole("sources", data) else None
        except StoreError:
            return None

    def tokens(self) -> tuple[Tokens, NDArray[np.bool_]]:
        """(n,) tokens, zeros where the file is cut off; and (pages,) which pages are intact."""
        offset, size = self.header["sections"]["tokens"]
        pages = -(-size // PAGE)
        there = max(0, min(pages, (len(self.data) - offset) // PAGE))
        found = page_sums(self.data[offset : offset + there * PAGE])
        if there == pages and size % PAGE:  # ignore the padding of the last page
            last = np.zeros(PAGE, np.uint8)
            last[: size % PAGE] = self.section("tokens")[-(size % PAGE) :]
            found[-1:] = page_sums(last)
        stored = self.section("tokens_sums")
        sums = np.zeros(pages, np.uint64)
        sums[: len(stored) // 8] = stored[: len(stored) // 8 * 8].view(np.uint64)
        good = np.zeros(pages, np.bool_)
        good[:there] = found == sums[:there]
        if there == pages and self.is_whole("tokens_sums", found):
            good[:] = True  # the pages match the checksum of the sums: only the stored sums are damaged
        tokens = self.section("tokens")
        if len(tokens) < size:
            tokens = np.concatenate([tokens, np.zeros(size - len(tokens), np.uint8)])
        return tokens.view(f"<u{self.header['width'] // 8}"), good

    def places(self, tokens: Tokens, good: NDArray[np.bool_]) -> tuple[Any, Any, NDArray[np.uint32] | None]:
        """Where documents start and end, and the numbers of their sources, if known."""
        count, table = self.header["documents"], self.section("documents")
        found = _between_separators(tokens, good)
        if not self.is_whole("documents", table) and table.nbytes == 8 * count and len(found[0]) == count:
            # Every document was found, so only the sources' numbers are taken from the damaged table.
            table = np.concatenate([found[0].astype(np.uint32), table.view(np.uint32)[count:]]).view(np.uint8)
        if not self.is_whole("documents", table):
            return *found, None
        starts = table.view(np.uint32)[:count]
        if count and (starts[-1] >= len(tokens) or (np.diff(starts.astype(np.int64)) <= 0).any()):
            return *found, None
        return starts, np.append(starts, len(tokens))[1:] - 1, table.view(np.uint32)[count:]


def _between_separators(tokens: Tokens, good: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents found in the tokens alone: between two separators, entirely in intact pages."""
    marks = np.flatnonzero(tokens == separator(tokens))
    marks = marks[_in_good_pages(marks, marks, good, tokens)]
    starts, ends = marks[:-1] + 1, marks[1:]
    some = ends > starts
    starts, ends = starts[some], ends[some]
    whole = _in_good_pages(starts, ends, good, tokens)
    return starts[whole], ends[whole]


def _in_good_pages(
    first: NDArray[np.int64], last: NDArray[np.int64], good: NDArray[np.bool_], tokens: Tokens
) -> NDArray[np.bool_]:
    """(n,) whether all tokens from first to last (n,) are in intact pages."""
    page = PAGE // tokens.itemsize
    bad_before = np.concatenate([[0], np.cumsum(~good)])  # (pages + 1,)
    return bad_before[last // page + 1] == bad_before[first // page]
