"""The witness: a file beside the log that says once more how far it was acknowledged, and in which generation of the
store. So an older log, or an older manifest, is not taken for the present one."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slipstream.datastores.durable.pages import PAGE, checksum

SLOTS = (512, 1024)  # what is acknowledged is written to both in turn, so that one is always whole
ODD = 0x9E3779B185EBCA87


@dataclass(frozen=True)
class Place:
    """How far a log was read or written, and what was there: no other log has this sum at this length."""

    length: int = PAGE
    sum: int = 0

    def after(self, length: int, told: int) -> Place:
        """told: the checksum of the record that ends there."""
        return Place(length, (self.sum * ODD + told) % (1 << 64))


class Witnessed(NamedTuple):
    """What a witness says."""

    generation: int  # of the store
    log: str  # its id
    place: Place  # how far it was acknowledged


class Witness:
    """Open to be written."""

    NAME = "log.end"
    SLOT = struct.Struct("<Q8sQQQ")  # generation, the log's id, length, sum, XXH64 of these

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / self.NAME, os.O_RDWR | os.O_CREAT, 0o644)
        self._turn = 0

    def say(self, generation: int, log: str, place: Place) -> None:
        start = struct.pack("<Q8sQQ", generation, bytes.fromhex(log), place.length, place.sum)
        os.pwrite(self._file, start + struct.pack("<Q", checksum(start)), SLOTS[self._turn])
        self._turn = 1 - self._turn

    def close(self) -> None:
        os.close(self._file)

    @classmethod
    def read(cls, folder: Path) -> Witnessed | None:
        """None: there is no witness."""
        found = []
        with suppress(FileNotFoundError):
            data = (folder / cls.NAME).read_bytes()
            for at in SLOTS:
                slot = data[at : at + cls.SLOT.size]
                if len(slot) == cls.SLOT.size and checksum(slot[:-8]) == int.from_bytes(slot[-8:], "little"):
                    generation, log, length, total, _ = cls.SLOT.unpack(slot)
                    if max(generation, length) < 1 << 62:
                        found.append(Witnessed(generation, log.hex(), Place(length, total)))
        return max(found, key=lambda w: (w.generation, w.place.length), default=None)
