"""Files mapped into memory that may be cut off while they are read, without a descriptor kept for each.

Reading a mapped page that its file no longer has is a bus error, which ends the process. Here it is caught: the page
becomes zeros, and whoever was reading is told by `watching`. Only addresses of files that were mapped here are treated
so; any other bus error ends the process as it would have.
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

ROOM = 1 << 16  # files that are guarded at a time
MADV = {"random": mmap.MADV_RANDOM, "sequential": mmap.MADV_SEQUENTIAL}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Row 0: how many pages were missing so far, and the last one's address. Then first and last address of each mapping.
# The handler reads it at any moment, so it is never moved.
_ranges = np.zeros((ROOM, 2), np.int64)
_free = list(range(ROOM - 1, 0, -1))


class Mapping:
    """A file's bytes, to be read."""

    def __init__(self, file: int, size: int) -> None:
        self.size, self.address = size, 0
        if size == 0:
            return
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.address = address
        weakref.finalize(self, _unmap, address, size, _guard(address, size))

    def array(self, dtype: Any, count: int, offset: int) -> NDArray[Any]:
        """A view of some of it, which keeps the mapping alive."""
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
    """What numpy needs to know; an array of it keeps it."""

    def __init__(self, mapping: Mapping, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.mapping = mapping
        self.__array_interface__ = {"shape": (count,), "typestr": dtype.str, "data": (address, True), "version": 3}


@contextmanager
def watching(what: str | Path) -> Iterator[None]:
    """Raise if a page was missing that was read meanwhile, here or in another thread: what was read says nothing."""
    before = int(_ranges[0, 0])
    yield
    if _ranges[0, 0] != before:
        raise missing(what)


def missing(what: str | Path) -> DamagedError:
    return DamagedError(
        f"{what}: a file was cut off while it was being read; `slipstream store repair` keeps what is whole"
    )


def pages_missed() -> int:
    """How many pages were missing so far when they were read."""
    return int(_ranges[0, 0])


# ---- the handler


def _guard(address: int, size: int) -> int:
    """The row of a mapping that is guarded now; 0: there is no room, or no such signal here."""
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


_previous = _Action()  # who handled bus errors before


def _install() -> None:
    """Unless it is installed."""
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
        # Symbols, since compiled code that is kept for later can't contain addresses.
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
    """Runs in the thread that read, in the midst of whatever it was doing: no Python here, and no memory."""
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
    _system_sigaction(number, _previous_address(), 0)  # not ours: it happens again, for whoever was there before
