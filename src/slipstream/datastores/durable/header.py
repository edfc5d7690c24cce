"""The header of a segment file, and the list of its sources. Every number in it is validated before it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.datastores.durable.pages import PAGE, checksum
from slipstream.datastores.sparse.runs import EVERY
from slipstream.datastores.sparse.sort import DEPTH
from slipstream.errors import DamagedError

MAGIC = b"SLIPSEG1"
# The order matters: if a file is truncated, the sections lost first are those that can be computed again.
SECTIONS = ("sources", "documents", "tokens_sums", "positions_sums", "keys_sums", "tokens", "positions", "keys")
PAGED = ("tokens", "positions", "keys")  # checked page by page


@dataclass(frozen=True)
class SourceEntry:
    """A source of documents, and how far it was read."""

    name: str
    documents: int
    size: int = -1  # of the file, in bytes; -1 if it is no file
    modified: int = -1  # of the file, in nanoseconds
    complete: bool = True  # False: it may have more documents
    texts: int = 0  # if not complete: texts of the file that were read to their end,
    tokens: int = 0  # and tokens of the next one


def read_header(path: Path, page: bytes) -> dict[str, Any]:
    """Page 0 of a segment file."""
    body = page_body(MAGIC, page)
    if body is None:
        raise DamagedError(
            f"{path} does not begin with the header of a segment: `slipstream store repair` goes on without it"
        )
    try:
        header: dict[str, Any] = {"store": "", "generation": 0, **json.loads(body)}
        # Format 1 gave names alone.
        header["made_from"] = [(m, "") if isinstance(m, str) else (str(m[0]), str(m[1])) for m in header["made_from"]]
        _possible(header)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedError(
            f"{path} has a header that can't be one ({error}): `slipstream store repair` goes on without it"
        ) from error
    return header


def _possible(header: dict[str, Any]) -> None:
    """Raise unless every section lies within the file: compiled code reads at these addresses without checking."""
    kinds = {"store": str, "generation": int, "collection": str, "tokenizer": str, "vocabulary": int, "width": int}
    for name, kind in {**kinds, "documents": int, "bytes": int}.items():
        if type(header[name]) is not kind or (kind is int and not 0 <= header[name] < 1 << 62):
            raise ValueError(f"its {name} is {str(header[name])[:80]!r}")
    sections, size = header["sections"], {}
    for name in SECTIONS:
        offset, size[name] = sections[name]
        if type(offset) is not int or type(size[name]) is not int or offset % PAGE or min(offset, size[name]) < 0:
            raise ValueError(f"its {name} lie nowhere")
        if offset + -(-size[name] // PAGE) * PAGE > header["bytes"] - PAGE:
            raise ValueError(f"its {name} lie outside the file")
        if name in header["checksums"] and type(header["checksums"][name]) is not str:
            raise ValueError(f"its {name} have no checksum")
    if not {"sources", "documents", "tokens_sums"} <= set(header["checksums"]) <= set(SECTIONS):
        raise ValueError("it has not the checksums of a segment")
    width, count = header["width"] // 8, size["positions"] // 4
    if header["width"] not in (16, 32) or size["tokens"] % width or size["tokens"] < DEPTH * width:
        raise ValueError("its tokens have no width")
    expected = {"documents": 8 * header["documents"], "positions": 4 * count, "keys": 8 * -(-count // EVERY)}
    expected |= {n + "_sums": 8 * -(-size[n] // PAGE) for n in PAGED}
    if wrong := [name for name, needed in expected.items() if size[name] != needed]:
        raise ValueError(f"its {wrong[0]} have {size[wrong[0]]} bytes")


def parse_sources(path: Path, data: bytes) -> list[SourceEntry]:
    try:
        found = [SourceEntry(*entry) for entry in json.loads(data)]
        for s in found:
            if type(s.name) is not str or any(type(n) is not int for n in (s.documents, s.size, s.modified, s.texts)):
                raise ValueError(f"{s} is no source")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"{path}: its sources are damaged ({error}); `slipstream store repair` keeps its text"
        ) from error


# ---- the first page of a file, also of files of vectors: magic number (8 bytes), length and checksum of JSON, the JSON


def header_page(magic: bytes, header: dict[str, Any]) -> bytes:
    body = json.dumps(header).encode()
    page = magic + len(body).to_bytes(4, "little") + checksum(body).to_bytes(8, "little") + body
    assert len(page) <= PAGE, "names are limited so that the header fits"
    return page.ljust(PAGE, b"\0")


def page_body(magic: bytes, page: bytes) -> bytes | None:
    """The JSON in such a page. None: it is damaged, or another file's."""
    length = int.from_bytes(page[8:12], "little")
    body = page[20 : 20 + length]
    whole = page[:8] == magic and len(body) == length and checksum(body) == int.from_bytes(page[12:20], "little")
    return body if whole else None


def page_sum(page: bytes) -> str:
    """The header's checksum. It identifies the file, since the header contains the checksums of everything else."""
    return f"{int.from_bytes(page[12:20], 'little'):016x}"
