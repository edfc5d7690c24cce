"""Checksums: XXH64 of the 4096-byte pages of a file, checked the first time a page is read.

A mapped file is opened without reading it. Its pages are checked when a search first reads them, so a damaged page
raises an error and never becomes a draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from slipstream.compiled import compiled, inlined

PAGE = 4096

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


def checksum(data: bytes | memoryview | NDArray[Any], seed: int = 0) -> int:
    """XXH64, as specified at https://github.com/Cyan4973/xxHash."""
    content = np.frombuffer(data, np.uint8)
    return int(xxh64(content.__array_interface__["data"][0], len(content), np.uint64(seed)))


def page_sums(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(pages,) the checksum of each page of whole pages."""
    return _page_sums(data)


# ---- compiled. Bytes are passed by address: read-only arrays and writable ones would be compiled separately.


@intrinsic
def pointer(_context, address):  # type: ignore[no-untyped-def]
    def build(_, builder, __, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), build


@inlined
def _rotate(x, r):  # type: ignore[no-untyped-def]
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@inlined
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotate(lane + word * _P2, 31) * _P1


@compiled
def _word(data, at):  # type: ignore[no-untyped-def]
    """Eight bytes, little-endian. LLVM compiles this to one load."""
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return word


@compiled
def xxh64(address, n, seed):  # type: ignore[no-untyped-def]
    data, at = carray(pointer(address), (n,), np.uint8), np.int64(0)
    if n >= 32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 32 <= n:
            a = _round(a, _word(data, at))
            b = _round(b, _word(data, at + 8))
            c = _round(c, _word(data, at + 16))
            d = _round(d, _word(data, at + 24))
            at += 32
        h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        for lane in (a, b, c, d):
            h = (h ^ _round(np.uint64(0), lane)) * _P1 + _P4
    else:
        h = seed + _P5
    h += np.uint64(n)
    while at + 8 <= n:
        h = _rotate(h ^ _round(np.uint64(0), _word(data, at)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= n:
        word = np.uint64(0)
        for i in range(4):
            word |= np.uint64(data[at + i]) << np.uint64(8 * i)
        h = _rotate(h ^ (word * _P1), 23) * _P2 + _P3
        at += 4
    while at < n:
        h = _rotate(h ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


@compiled
def _page_sums(data):  # type: ignore[no-untyped-def]
    sums, address = np.empty(len(data) // PAGE, np.uint64), np.int64(data.ctypes.data)
    for page in range(len(sums)):
        sums[page] = xxh64(address + page * PAGE, np.int64(PAGE), np.uint64(0))
    return sums
