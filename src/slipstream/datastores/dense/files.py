"""Files of arrays: written whole or not at all, mapped, and checked page by page when they are first read.

Parts, chunks and the transform are such files. docs/dense.md has the bytes.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import DTypeLike, NDArray

from slipstream.datastores.pages import PAGE, checksum, page_sums, xxh64
from slipstream.datastores.segment import sync_folder
from slipstream.errors import DamagedError

MAGIC = b"SLIPVEC1"
AGAIN = "delete it, and `slipstream store embed` makes it anew"
Plan = dict[str, tuple[DTypeLike, tuple[int, ...]]]  # name -> type and shape


@contextmanager
def writing(path: Path, facts: dict[str, Any], plan: Plan) -> Iterator[dict[str, NDArray[Any]]]:
    """Arrays to be filled, in a mapped file, since they may be larger than memory. At the end of the block the file is
    on the disk under its name; if the block fails, there is none."""
    offset, arrays = PAGE, {}
    for name, (dtype, shape) in plan.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = [offset, np.dtype(dtype).str, list(shape)]
        offset += -(-size // PAGE) * PAGE
    pages = offset // PAGE - 1
    total = offset + 8 * pages
    made = path.with_suffix(".making")
    try:
        with made.open("w+b") as file:
            file.truncate(total)
            mapped = mmap.mmap(file.fileno(), total)
            yield {name: _view(mapped, place) for name, place in arrays.items()}
            data = np.frombuffer(mapped, np.uint8)
            data[offset:] = page_sums(data[PAGE:offset]).view(np.uint8)
            header = {"bytes": total, "arrays": arrays, "sums": f"{checksum(data[offset:]):016x}", **facts}
            body = json.dumps(header).encode()
            page = MAGIC + len(body).to_bytes(4, "little") + checksum(body).to_bytes(8, "little") + body
            assert len(page) <= PAGE, "names are limited so that the header fits"
            data[: len(page)] = np.frombuffer(page, np.uint8)
            mapped.flush()
            os.fsync(file.fileno())
        made.rename(path)
        sync_folder(path.parent)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


class Mapped:
    """A file of arrays. `facts` is what it says about itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.facts = self._header(file.read(PAGE))
            if size != self.facts["bytes"]:
                raise DamagedError(f"{path} has {size} bytes instead of {self.facts['bytes']}: {AGAIN}")
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._arrays: dict[str, Any] = self.facts["arrays"]
        bytes_ = np.frombuffer(self._map, np.uint8)
        pages = (size - PAGE) // (PAGE + 8)
        self._sums = bytes_[(pages + 1) * PAGE :].view(np.uint64)
        if f"{checksum(bytes_[(pages + 1) * PAGE :]):016x}" != self.facts["sums"]:
            raise DamagedError(f"{path}: its checksums are damaged; {AGAIN}")
        self._data = bytes_[PAGE : (pages + 1) * PAGE]
        self._seen = np.zeros(pages, np.uint8)  # 1 once checked

    def _header(self, page: bytes) -> dict[str, Any]:
        length = int.from_bytes(page[8:12], "little")
        body = page[20 : 20 + length]
        if page[:8] != MAGIC or checksum(body) != int.from_bytes(page[12:20], "little"):
            raise DamagedError(f"{self.path} does not begin with the header of a file of vectors: {AGAIN}")
        header: dict[str, Any] = json.loads(body)
        return header

    def __getitem__(self, name: str) -> NDArray[Any]:
        """An array, checked as a whole."""
        array = self.array(name)
        self.check(name, 0, len(array))
        return array

    def array(self, name: str) -> NDArray[Any]:
        """An array whose rows are to be checked before they are read."""
        return _view(self._map, self._arrays[name])

    def check(self, name: str, first: int, last: int) -> None:
        """Raise if the rows first..last of an array are not as they were written."""
        offset, dtype, shape = self._arrays[name]
        row = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(dtype).itemsize
        begin, end = offset - PAGE + first * row, offset - PAGE + last * row
        if end > begin and (bad := _damaged(self._data, self._sums, self._seen, begin // PAGE, -(-end // PAGE))) >= 0:
            raise DamagedError(f"{self.path}: page {bad + 1} is damaged, in its {name}; {AGAIN}")

    def verify(self) -> None:
        """Read all of it."""
        for name in self._arrays:
            self.check(name, 0, self._arrays[name][2][0])


def _view(mapped: mmap.mmap, place: list[Any]) -> NDArray[Any]:
    offset, dtype, shape = place
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mapped, dtype, count, offset).reshape(shape)


@njit(cache=True, nogil=True)
def _damaged(data, sums, seen, first, last):  # type: ignore[no-untyped-def]
    """The first page that is not as it was written, or -1."""
    for page in range(first, last):
        if seen[page] == 0:
            if xxh64(data[page * PAGE : (page + 1) * PAGE], np.uint64(0)) != sums[page]:
                return page
            seen[page] = 1
    return -1
