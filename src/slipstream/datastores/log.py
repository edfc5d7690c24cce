"""The write-ahead log: what was appended to or removed from a store and is not yet in a segment. The bytes are
specified in docs/store-format.md.

A record is acknowledged once it is on the disk; only then the acknowledged length in the header grows. So a torn record
behind that length is one nobody was promised, and a damaged one before it is an error, never a silent loss. Readers
stop at that length: what lies behind may yet be taken back, if the disk is full.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.datastores.pages import PAGE, checksum
from slipstream.datastores.segment import sync_folder
from slipstream.errors import DamagedError, StoreError

MAGIC = b"SLIPLOG1"
SLOTS = (512, 1024)  # the acknowledged length is written to both in turn, so that one is always whole
RECORD = struct.Struct("<4sIQ")  # mark, payload bytes, XXH64 of the payload with the record's offset as seed
MARK = b"\xa5SLR"
DOCUMENT, REMOVE, COMPLETE = 1, 2, 3
PREFIX = struct.Struct("<BHH")  # kind, bytes of the collection's name, bytes of the source's name
FILE = struct.Struct("<qq")  # size and time of change of a source that was read to its end
UNSYNCED = 1 << 26  # bytes that a bulk append may leave to be synced later
NAMES = ("utf-8", "surrogatepass")  # a file's name may be any bytes, which Python hands out as surrogates


@dataclass(frozen=True)
class Record:
    kind: int
    collection: str
    source: str
    body: bytes | memoryview = b""

    def payload(self) -> bytes:
        collection, source = self.collection.encode(*NAMES), self.source.encode(*NAMES)
        return PREFIX.pack(self.kind, len(collection), len(source)) + collection + source + self.body

    @classmethod
    def parse(cls, payload: memoryview) -> Record:
        kind, a, b = PREFIX.unpack_from(payload)
        names = bytes(payload[PREFIX.size : PREFIX.size + a + b])
        return cls(kind, names[:a].decode(*NAMES), names[a:].decode(*NAMES), payload[PREFIX.size + a + b :])


class LogWriter:
    """Appends to one log file. What it synced is on the disk, and acknowledged."""

    def __init__(self, path: Path, end: int) -> None:
        self.path, self.end = path, end
        self._synced = end
        self._in_doubt = False  # the disk refused a sync: what was to be synced may be lost
        self._file = os.open(path, os.O_RDWR)
        slots = _read_slots(os.pread(self._file, PAGE, 0))
        self._turn = slots.index(min(slots))
        os.ftruncate(self._file, end)  # what lies behind is a record that was never acknowledged
        os.fdatasync(self._file)  # what lies before may not have been either, but will be seen from now on
        self._acknowledge(end)

    @classmethod
    def create(cls, path: Path) -> LogWriter:
        made = path.with_suffix(".making")
        slot = _slot(PAGE)
        page = bytearray(PAGE)
        page[: len(MAGIC)] = MAGIC
        for at in SLOTS:
            page[at : at + len(slot)] = slot
        with made.open("wb") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)
        sync_folder(path.parent)
        return cls(path, PAGE)

    def append(self, records: Iterable[Record], sync: bool = True) -> None:
        """All of them durable, or an error and none of them acknowledged. Without sync they may become so later: in
        bulk, waiting for the disk at every turn would be most of the time."""
        if self._in_doubt:
            raise StoreError(
                f"{self.path}: the disk failed, and what was added in bulk may be lost: open the store again"
            )
        at, pieces = self.end, []
        for record in records:
            payload = record.payload()
            pieces += [RECORD.pack(MARK, len(payload), checksum(payload, at)), payload]
            at += RECORD.size + len(payload)
        data = b"".join(pieces)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, memoryview(data)[written:], self.end + written)
            if sync or at - self._synced > UNSYNCED:
                self._sync(at)
        except OSError as error:
            self._in_doubt = self._synced < self.end
            with suppress(OSError):  # else a whole record of a failed batch could be taken for one that was added
                os.ftruncate(self._file, self.end)
            raise StoreError(f"{self.path}: nothing was added, since writing failed: {error}") from error
        self.end = at

    def _sync(self, end: int) -> None:
        os.fdatasync(self._file)
        self._acknowledge(end)
        self._synced = end

    def _acknowledge(self, end: int) -> None:
        os.pwrite(self._file, _slot(end), SLOTS[self._turn])
        self._turn = 1 - self._turn

    def close(self, sync: bool = True) -> None:
        if sync and self._synced < self.end and not self._in_doubt:
            self._sync(self.end)
        os.close(self._file)


def read_log(path: Path, start: int = PAGE, beyond: bool = False) -> Iterator[tuple[Record, int]]:
    """Every acknowledged record from byte `start` on, with where it ends. beyond: for the one writer, which also takes
    what is whole behind them: after a power failure the acknowledged length may be that of a moment before."""
    with path.open("rb") as file:
        for _ in range(3):  # a writer may just be writing a slot
            slots = _read_slots(os.pread(file.fileno(), PAGE, 0))  # before the records: it may only grow meanwhile
            sure, promised = min(slots) > 0, max(slots)
            if sure:
                break
        if promised < PAGE or os.pread(file.fileno(), len(MAGIC), 0) != MAGIC:
            raise DamagedError(
                f"{path} does not begin with the header of a log: `slipstream store repair` keeps its records"
            )
        file.seek(start)
        # No further for readers: a bulk append leaves much behind that, to be read in vain at every refresh.
        data = memoryview(file.read(max(0, promised - start) if sure and not beyond else -1))
        size = os.fstat(file.fileno()).st_size
    at = start
    while (record := _record_at(data, at - start, at)) is not None:
        at += record[1]
        yield record[0], at
    # With one slot lost, more may have been promised than is known: then nothing may be left over.
    if at < promised or (not sure and at != size):
        raise DamagedError(
            f"{path}: the record at byte {at} is damaged or missing, and {promised} bytes were acknowledged; "
            "`slipstream store repair` keeps the others"
        )


def salvage_log(path: Path) -> tuple[list[Record], int]:
    """Every record that is whole, wherever it stands, and how many bytes are lost."""
    data = path.read_bytes()
    found, at, lost = [], PAGE, max(0, max(_read_slots(data[:PAGE])) - len(data))
    while at < len(data):
        if (record := _record_at(memoryview(data), at, at)) is not None:
            found.append(record[0])
            at += record[1]
        else:
            following = data.find(MARK, at + 1)
            following = len(data) if following < 0 else following
            lost += following - at
            at = following
    return found, lost


def _record_at(data: memoryview, at: int, offset: int) -> tuple[Record, int] | None:
    """The record at data[at], which is byte `offset` of the file, and its size."""
    if at + RECORD.size > len(data):
        return None
    mark, length, told = RECORD.unpack_from(data, at)
    payload = data[at + RECORD.size : at + RECORD.size + length]
    if mark != MARK or len(payload) != length or length < PREFIX.size or checksum(payload, offset) != told:
        return None
    return Record.parse(payload), RECORD.size + length


def _slot(length: int) -> bytes:
    number = struct.pack("<Q", length)
    return number + struct.pack("<Q", checksum(number))


def _read_slots(page: bytes) -> list[int]:
    """The acknowledged lengths in a log's first page, 0 for one that is damaged."""
    found = []
    for at in SLOTS:
        number, told = page[at : at + 8], page[at + 8 : at + 16]
        found.append(struct.unpack("<Q", number)[0] if told == struct.pack("<Q", checksum(number)) else 0)
    return found
