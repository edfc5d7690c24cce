"""Memory-mapped files that may be truncated while they are read. No descriptor is kept open for a file.

Reading a mapped page beyond the end of its file is a bus error, which ends the process. Here it is caught: the page
becomes zeros, and `watching` raises an error in the reader. Only files that were mapped here are handled; any other bus
error ends the process as usual.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from slipstream.datastores.durable.pages import pointer
from slipstream.errors import DamagedError

ROOM = 1 << 16  # files that can be guarded at a time
MADV = {"random": mmap.MADV_RANDOM, "sequential": mmap.MADV_SEQUENTIAL}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Row 0: number of missing pages so far, and the address of the last one. Then begin and end of each mapping. The signal
# handler may read this at any moment, so it must not move.
_ranges = np.zeros((ROOM, 2), np.int64)
_free = list(range(ROOM - 1, 0, -1))


class Mapping:
    """A file's bytes, read-only."""

    def __init__(self, file: int, size: int) -> None:
        self.size, self.address = size, 0
        if size == 0:
            return
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.address = address
        # Not when Python ends: threads that search and merge go on until the very end.
        weakref.finalize(self, _unmap, address, size, _guard(address, size)).atexit = False

    def array(self, dtype: Any, count: int, offset: int) -> NDArray[Any]:
        """An array over a part of it, which keeps the mapping alive."""
        dtype = np.dtype(dtype)
        if offset < 0 or count < 0 or offset + count * dtype.itemsize > self.size:
            raise ValueError(f"{count} × {dtype} at byte {offset} do not lie within {self.size} bytes")
        if not count:
            return np.empty(0, dtype)
        return np.asarray(_View(self, self.address + offset, count, dtype))

    def advise(self, how: str) -> None:
        """random or sequential: how it will be read."""
        if self.size:
            _libc.madvise(self.address, self.size, MADV[how])


class _View:
    """The array interface for numpy. An array made from it keeps it alive."""

    def __init__(self, mapping: Mapping, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.mapping = mapping
        self.__array_interface__ = {"shape": (count,), "typestr": dtype.str, "data": (address, True), "version": 3}


@contextmanager
def watching(what: str | Path) -> Iterator[None]:
    """Raise if a missing page was read during the block, in this or another thread: what was read may be wrong."""
    before = int(_ranges[0, 0])
    yield
    if _ranges[0, 0] != before:
        raise missing(what)


def missing(what: str | Path) -> DamagedError:
    return DamagedError(
        f"{what}: a file was cut off while it was being read; `slipstream store repair` keeps what is whole"
    )


def pages_missed() -> int:
    """How many missing pages were read so far."""
    return int(_ranges[0, 0])


# ---- the handler


def _guard(address: int, size: int) -> int:
    """Guard a mapping, and return its row; 0: there is no room, or the system has no such signal."""
    if sys.platform != "linux" or not _free:
        return 0
    row = _free.pop()
    _ranges[row] = address, address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    _install()
    return row


def _unmap(address: int, size: int, row: int) -> None:
    if row:
        _ranges[row] = 0
        _free.append(row)
    _libc.munmap(address, size)


class _Action(ctypes.Structure):
    """struct sigaction of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_previous = _Action()  # the handler that was installed before


def _install() -> None:
    """Install the handler, unless it is installed."""
    current = _Action()
    _libc.sigaction(signal.SIGBUS, None, ctypes.byref(current))
    handler = _handler()
    if current.handler != handler:
        ctypes.memmove(ctypes.byref(_previous), ctypes.byref(current), ctypes.sizeof(_Action))
        siginfo, on_stack, while_handling = 4, 0x08000000, 0x40000000
        own = _Action(handler=handler, flags=siginfo | on_stack | while_handling)
        _libc.sigaction(signal.SIGBUS, ctypes.byref(own), None)


def _handler() -> int:
    if not _made:
        # Symbols, since cached compiled code can't contain addresses.
        llvmlite.binding.add_symbol("slipstream_mapped_ranges", _ranges.ctypes.data)
        llvmlite.binding.add_symbol("slipstream_previous_action", ctypes.addressof(_previous))
        signature = types.void(types.int32, types.voidptr, types.voidptr)
        _made.append(cfunc(signature, cache=True)(_on_bus_error))
    return int(_made[0].address)


_made: list[Any] = []  # the compiled handler, which must live as long as the process


def _symbol(name: str) -> Any:
    @intrinsic
    def address(_context):  # type: ignore[no-untyped-def]
        def build(_, builder, __, ___):  # type: ignore[no-untyped-def]
            byte, module = cgutils.ir.IntType(8), builder.module
            found = module.globals.get(name) or cgutils.ir.GlobalVariable(module, byte, name)
            return builder.ptrtoint(found, cgutils.ir.IntType(64))

        return types.int64(), build

    return address


_ranges_address = _symbol("slipstream_mapped_ranges")
_previous_address = _symbol("slipstream_previous_action")


_system_mmap = types.ExternalFunction(
    "mmap", types.int64(types.int64, types.int64, types.int32, types.int32, types.int32, types.int64)
)
_system_sigaction = types.ExternalFunction("sigaction", types.int32(types.int32, types.int64, types.int64))


def _on_bus_error(number, info, _context):  # type: ignore[no-untyped-def]
    """The signal handler. It interrupts the reading thread anywhere, so it must not call Python or allocate memory."""
    address = carray(info, (3,), np.int64)[2]  # si_addr
    ranges = carray(pointer(_ranges_address()), (ROOM, 2), np.int64)
    for row in range(1, ROOM):
        if ranges[row, 0] <= address and address < ranges[row, 1]:
            page = address - address % mmap.PAGESIZE
            fixed = 0x32  # private, anonymous, at this address
            if _system_mmap(page, mmap.PAGESIZE, mmap.PROT_READ, fixed, -1, 0) == page:
                ranges[0, 0] += 1
                ranges[0, 1] = address
                return
    _system_sigaction(number, _previous_address(), 0)  # not ours: the old handler gets it when the read is repeated
