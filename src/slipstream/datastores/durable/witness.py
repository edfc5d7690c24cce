"""The witness: a file next to the log with its acknowledged length and the store's generation. By this, an older log or
an older manifest, as from a backup, is noticed."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slipstream.datastores.durable.pages import PAGE, checksum

SLOTS = (512, 1024)  # written in turn, so that one of them is always intact
ODD = 0x9E3779B185EBCA87


@dataclass(frozen=True)
class Place:
    """How far a log was read or written, and a sum over its records, which identifies the contents up to there."""

    length: int = PAGE
    sum: int = 0

    def after(self, length: int, record_sum: int) -> Place:
        """record_sum: the checksum of the record that ends there."""
        return Place(length, (self.sum * ODD + record_sum) % (1 << 64))


class Witnessed(NamedTuple):
    """The contents of a witness."""

    generation: int  # of the store
    log: str  # its id
    place: Place  # how far it was acknowledged


class Witness:
    """A witness, open for writing."""

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
        """The newest intact slot. None: there is no witness."""
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
