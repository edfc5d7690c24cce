"""Files of arrays: written atomically, mapped, and checked page by page when they are first read.

Parts, chunks and the transform are such files. docs/dense.md specifies the bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slipstream.compiled import compiled
from slipstream.datastores.durable.disk import sync_folder
from slipstream.datastores.durable.header import header_page, page_body, page_sum
from slipstream.datastores.durable.mapping import Mapping, watching
from slipstream.datastores.durable.pages import PAGE, checksum, page_sums, xxh64
from slipstream.errors import DamagedError

MAGIC = b"SLIPVEC1"
TYPES = ("|u1", "<u4", "<u8", "<i8", "<f2", "<f4", "<f8")
AGAIN = "delete it, and `slipstream store embed` makes it anew"
Plan = dict[str, tuple[DTypeLike, tuple[int, ...]]]  # name -> type and shape


@contextmanager
def writing(path: Path, facts: dict[str, Any], plan: Plan) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield arrays to be filled, in a mapped file, since they may be larger than memory. After the block the file is
    durable under its name; if the block fails, there is no file."""
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
            os.posix_fallocate(file.fileno(), 0, total)  # else writing to the mapping on a full disk ends the process
            mapped = mmap.mmap(file.fileno(), total)
            yield {name: _view(mapped, place) for name, place in arrays.items()}
            data = np.frombuffer(mapped, np.uint8)
            data[offset:] = page_sums(data[PAGE:offset]).view(np.uint8)
            header = {"bytes": total, "arrays": arrays, "sums": f"{checksum(data[offset:]):016x}", **facts}
            data[:PAGE] = np.frombuffer(header_page(MAGIC, header), np.uint8)
            mapped.flush()
            os.fsync(file.fileno())
        made.rename(path)
        sync_folder(path.parent)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


class Mapped:
    """A file of arrays. `facts`: the fields of its header. `sum`: the header's checksum, which identifies the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            page = file.read(PAGE)
            self.facts, self.sum = self._header(page), page_sum(page)
            if size != self.facts["bytes"]:
                raise DamagedError(f"{path} has {size} bytes instead of {self.facts['bytes']}: {AGAIN}")
            self._map = Mapping(file.fileno(), size)
        self._arrays: dict[str, Any] = self.facts["arrays"]
        bytes_ = self._map.array(np.uint8, size, 0)
        pages = (size - PAGE) // (PAGE + 8)
        self._sums = bytes_[(pages + 1) * PAGE :].view(np.uint64)
        if f"{checksum(bytes_[(pages + 1) * PAGE :]):016x}" != self.facts["sums"]:
            raise DamagedError(f"{path}: its checksums are damaged; {AGAIN}")
        self._data = bytes_[PAGE : (pages + 1) * PAGE]
        self._seen = np.zeros(pages, np.uint8)  # 1 once checked

    def _header(self, page: bytes) -> dict[str, Any]:
        body = page_body(MAGIC, page)
        if body is None:
            raise DamagedError(f"{self.path} does not begin with the header of a file of vectors: {AGAIN}")
        try:
            header: dict[str, Any] = json.loads(body)
            _possible(header)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{self.path} has a header that can't be one ({error}): {AGAIN}") from error
        return header

    def expect(self, **arrays: tuple[DTypeLike, tuple[int | None, ...]]) -> None:
        """Raise unless there are arrays of these types and shapes; None: of any length."""
        for name, (dtype, shape) in arrays.items():
            _, stored, found = self._arrays.get(name, (0, "", []))
            fits = len(found) == len(shape) and all(n in (None, m) for n, m in zip(shape, found, strict=True))
            if not fits or np.dtype(stored or "V1") != np.dtype(dtype):
                raise DamagedError(
                    f"{self.path}: its {name} are {stored} {found}, not {np.dtype(dtype)} {shape}: {AGAIN}"
                )

    def doubt(self) -> None:
        """Have every page checked again when it is next read."""
        self._seen[:] = 0

    def __getitem__(self, name: str) -> NDArray[Any]:
        """An array, checked as a whole. A copy, since it is not checked again."""
        with watching(self.path):
            self.check(name, 0, self._arrays[name][2][0])
            return self.array(name).copy()

    def whole(self, name: str) -> NDArray[Any]:
        """An array, checked as a whole, without a copy."""
        array = self.array(name)
        self.check(name, 0, len(array))
        return array

    def array(self, name: str) -> NDArray[Any]:
        """An array whose rows must be checked (`check`) before they are read."""
        offset, dtype, shape = self._arrays[name]
        return self._map.array(dtype, int(np.prod(shape, dtype=np.int64)), offset).reshape(shape)

    def check(self, name: str, first: int, last: int) -> None:
        """Raise if the rows first..last - 1 of an array are damaged."""
        offset, dtype, shape = self._arrays[name]
        row = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(dtype).itemsize
        begin, end = offset - PAGE + first * row, offset - PAGE + last * row
        if end > begin and (bad := _damaged(self._data, self._sums, self._seen, begin // PAGE, -(-end // PAGE))) >= 0:
            raise DamagedError(f"{self.path}: page {bad + 1} is damaged, in its {name}; {AGAIN}")

    def verify(self) -> None:
        """Read and check all arrays."""
        for name in self._arrays:
            self.check(name, 0, self._arrays[name][2][0])


def _possible(header: dict[str, Any]) -> None:
    """Raise unless every array lies within the pages that have checksums."""
    size = header["bytes"]
    if type(size) is not int or size < PAGE or (size - PAGE) % (PAGE + 8) or type(header["sums"]) is not str:
        raise ValueError(f"it can't have {size} bytes")
    end = PAGE + (size - PAGE) // (PAGE + 8) * PAGE
    for name, (offset, dtype, shape) in header["arrays"].items():
        if dtype not in TYPES or not 1 <= len(shape) <= 2 or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"its {name} are of no type or shape")
        last = offset + math.prod(shape) * np.dtype(dtype).itemsize
        if type(offset) is not int or offset < PAGE or offset % PAGE or last > end:
            raise ValueError(f"its {name} lie outside of it")


def _view(mapped: mmap.mmap, place: list[Any]) -> NDArray[Any]:
    offset, dtype, shape = place
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mapped, dtype, count, offset).reshape(shape)


@compiled
def _damaged(data, sums, seen, first, last):  # type: ignore[no-untyped-def]
    """The first damaged page, or -1."""
    for page in range(first, last):
        if seen[page] == 0:
            if xxh64(np.int64(data.ctypes.data) + page * PAGE, np.int64(PAGE), np.uint64(0)) != sums[page]:
                return page
            seen[page] = 1
    return -1
