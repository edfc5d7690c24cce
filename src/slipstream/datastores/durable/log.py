"""The write-ahead log: changes to a store that are not yet in a segment. The bytes are specified in
docs/store-format.md.

A record is acknowledged once it is durable. Only then is the acknowledged length in the header updated, and after that
the one in the witness, a file next to the log. So a torn record beyond that length was never acknowledged, and a
damaged one before it is an error, never a silent loss. While there is a writer, readers stop at that length: records
beyond it may still be taken back, if the disk is full.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.datastores.durable.disk import write_whole
from slipstream.datastores.durable.lock import no_writer
from slipstream.datastores.durable.names import ENCODING
from slipstream.datastores.durable.pages import PAGE, checksum, xxh64
from slipstream.datastores.durable.witness import ODD, SLOTS, Place, Witness
from slipstream.errors import DamagedError, StoreError

MAGIC, OLD_MAGIC = b"SLIPLOG2", b"SLIPLOG1"
HEADER = struct.Struct("<8s8s8sQQ")  # magic, the store's id, the log's id, the store's generation, XXH64 of these
RECORD = struct.Struct("<4sIQ")  # mark, payload bytes, XXH64 of the payload, seeded with log and offset
MARK = b"\xa5SLR"
NONE, DOCUMENT, REMOVE, COMPLETE, READ = 0, 1, 2, 3, 4
PREFIX = struct.Struct("<BHH")  # kind, bytes of the collection's name, bytes of the source's name
FILE = struct.Struct("<qq")  # size and modification time of a source that was read to its end
PROGRESS = struct.Struct("<qqqq")  # the same of a source that is being read, its texts read, tokens of the next text
UNSYNCED = 1 << 26  # bytes that bulk appends may leave unsynced


@dataclass(frozen=True)
class Record:
    kind: int
    collection: str
    source: str
    body: bytes | memoryview = b""

    def payload(self) -> bytes:
        collection, source = self.collection.encode(*ENCODING), self.source.encode(*ENCODING)
        return PREFIX.pack(self.kind, len(collection), len(source)) + collection + source + self.body


@dataclass(frozen=True)
class LogHead:
    """The identity of a log file. Logs of format 1 have none."""

    store: str = ""  # 16 hex digits
    log: str = ""
    generation: int = 0  # of the manifest when it was created; 0: made by a repair from other files

    def page(self) -> bytearray:
        page = bytearray(PAGE)
        start = struct.pack("<8s8s8sQ", MAGIC, bytes.fromhex(self.store), bytes.fromhex(self.log), self.generation)
        page[: HEADER.size] = start + struct.pack("<Q", checksum(start))
        return page

    @classmethod
    def parse(cls, page: bytes) -> LogHead | None:
        if page[:8] == OLD_MAGIC:
            return cls()
        if len(page) < HEADER.size:
            return None
        magic, store, log, generation, stored = HEADER.unpack_from(page)
        whole = magic == MAGIC and checksum(page[: HEADER.size - 8]) == stored and generation < 1 << 62
        return cls(store.hex(), log.hex(), generation) if whole else None


class LogWriter:
    """Appends to one log file. Everything that is synced is acknowledged."""

    def __init__(self, path: Path, place: Place) -> None:
        self.path, self.place, self._synced = path, place, place
        self._witness: tuple[Witness, int] | None = None
        self.doubtful = False  # a sync failed: what was to be synced may be lost
        self._file = os.open(path, os.O_RDWR)
        page = os.pread(self._file, PAGE, 0)
        head = LogHead.parse(page)
        assert head is not None, "its records were read before"
        self.head = head
        slots = _read_slots(page)
        self._turn = slots.index(min(slots))
        os.ftruncate(self._file, place.length)  # beyond is a record that was never acknowledged
        os.fdatasync(self._file)  # records before may not have been acknowledged either: from now on they are
        self._acknowledge(place)

    @classmethod
    def create(cls, path: Path, head: LogHead) -> LogWriter:
        page, slot = head.page(), _slot(PAGE)
        for at in SLOTS:
            page[at : at + len(slot)] = slot
        write_whole(path, bytes(page), path.with_suffix(".making"))
        return cls(path, Place())

    def append(self, records: Iterable[Record], sync: bool = True) -> None:
        """Append records: all are durable, or it raises and none is acknowledged. Without sync they may become durable
        later: in bulk, waiting for the disk each time would take most of the time."""
        if self.doubtful:
            raise StoreError(
                f"{self.path}: the disk failed, and what was added in bulk may be lost: open the store again"
            )
        start, place, pieces = self.place.length, self.place, []
        for record in records:
            payload = record.payload()
            record_sum = checksum(payload, int(_seed(self.head, place.length)))
            pieces += [RECORD.pack(MARK, len(payload), record_sum), payload]
            place = place.after(place.length + RECORD.size + len(payload), record_sum)
        data = b"".join(pieces)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, memoryview(data)[written:], start + written)
            if sync or place.length - self._synced.length > UNSYNCED:
                self._sync(place)
        except OSError as error:
            self.doubtful = self._synced.length < start
            with suppress(OSError):  # else complete records of a failed batch could later be read as valid
                os.ftruncate(self._file, start)
            raise StoreError(f"{self.path}: nothing was added, since writing failed: {error}") from error
        self.place = place

    def enter(self, witness: Witness, generation: int) -> None:
        """Record this log in the witness. The manifest of this generation must name it already."""
        self._witness = witness, generation
        witness.say(generation, self.head.log, self._synced)

    def _sync(self, place: Place) -> None:
        os.fdatasync(self._file)
        self._acknowledge(place)
        self._synced = place

    def _acknowledge(self, place: Place) -> None:
        """Update the acknowledged length. If that fails, the records are durable all the same, and the next update
        covers them."""
        with suppress(OSError):
            os.pwrite(self._file, _slot(place.length), SLOTS[self._turn])
            self._turn = 1 - self._turn
            if self._witness is not None:
                witness, generation = self._witness
                witness.say(generation, self.head.log, place)

    def close(self, sync: bool = True) -> None:
        try:
            if sync and self._synced != self.place and not self.doubtful:
                self._sync(self.place)
        finally:
            os.close(self._file)


# ---- reading

START = Place()


@dataclass(frozen=True, eq=False)
class LogRead:
    """The contents of a log."""

    head: LogHead
    records: list[Record]
    place: Place  # where the last of them ends


def read_log(path: Path, start: Place = START, beyond: bool = False) -> LogRead:
    """Every acknowledged record from a place on. beyond: also complete records after them, since after a power failure
    the acknowledged length may be out of date. Only if there is no writer, who may still take them back."""
    with path.open("rb") as file:
        front, data = _read_on(path, file.fileno(), start.length, beyond)
    return _checked(path, start, front, data)


def read_shared_log(path: Path, start: Place = START) -> LogRead:
    """The same for a reader, with complete records beyond if there is no writer. None can start while that is asked, so
    little is done then: what was acknowledged, often much, is read before, as it never changes, and parsed after."""
    with path.open("rb") as file:
        front, data = _read_on(path, file.fileno(), start.length, beyond=False)
        data = data if front.sure else b""
        with no_writer(path.parent) as alone:
            front, rest = _read_on(path, file.fileno(), start.length + len(data), alone)
    return _checked(path, start, front, data + rest)


class _Front(NamedTuple):
    """What a log says of itself."""

    head: LogHead
    promised: int  # its acknowledged length
    sure: bool  # whether both slots say so; else more may have been acknowledged
    size: int  # of the file


def _read_on(path: Path, file: int, start: int, beyond: bool) -> tuple[_Front, bytes]:
    """What the log says, and its bytes from `start` on."""
    for _ in range(3):  # a writer may be in the middle of writing a slot
        page = os.pread(file, PAGE, 0)  # read before the records, as the length can only grow
        slots = _read_slots(page)
        if min(slots) > 0:
            break
    head = LogHead.parse(page)
    if max(slots) < PAGE or head is None:
        raise DamagedError(
            f"{path} does not begin with the header of a log: `slipstream store repair` keeps its records"
        )
    front = _Front(head, max(slots), min(slots) > 0, os.fstat(file).st_size)
    # Readers read no further: a bulk append may leave much beyond, which every refresh would read for nothing.
    end = min(front.promised, front.size) if front.sure and not beyond else front.size
    with open(file, "rb", closefd=False) as buffered:  # its buffer must not outlive what is read here
        buffered.seek(start)
        return front, buffered.read(max(0, end - start))


def _checked(path: Path, start: Place, front: _Front, data: bytes) -> LogRead:
    """The records in the bytes from `start` on."""
    spans, total = _whole_records(np.frombuffer(data, np.uint8), start.length, _seed(front.head), np.uint64(start.sum))
    end = start.length + (int(spans[-1, 1]) if len(spans) else 0)
    # If one slot is damaged, more may have been acknowledged than the other says: then nothing may be left over.
    if end < front.promised or (not front.sure and end != front.size):
        raise DamagedError(
            f"{path}: the record at byte {end} is damaged or missing, and {front.promised} bytes were acknowledged; "
            "`slipstream store repair` keeps the others"
        )
    return LogRead(front.head, _parsed(data, spans), Place(end, int(total)))


def sum_at(path: Path, length: int) -> int | None:
    """The sum (see `Place`) of the records up to a length; None: no record ends there."""
    with path.open("rb") as file:
        head = LogHead.parse(file.read(PAGE))
        data = file.read(max(0, min(length, os.fstat(file.fileno()).st_size) - PAGE))
    if head is None:
        return None
    spans, total = _whole_records(np.frombuffer(data, np.uint8), PAGE, _seed(head), np.uint64(0))
    end = PAGE + (int(spans[-1, 1]) if len(spans) else 0)
    return int(total) if end == length else None


def salvage_log(path: Path, log: str = "", acknowledged: int = 0) -> tuple[list[Record], int]:
    """Every intact record, anywhere in the file, and the number of lost bytes, as far as known. log: its id, in case
    its header is damaged. acknowledged: its length according to another file."""
    data = path.read_bytes()
    head = LogHead.parse(data[:PAGE]) or LogHead(log=log)
    view = np.frombuffer(data, np.uint8)
    acknowledged = max(acknowledged, *_read_slots(data[:PAGE]))
    found, at, lost = list[Record](), PAGE, max(0, acknowledged - max(len(data), PAGE))
    while at < len(data):
        spans, _ = _whole_records(view[at:], at, _seed(head), np.uint64(0))
        if len(spans):
            found += _parsed(data[at:], spans)
            at += int(spans[-1, 1])
        else:
            following = data.find(MARK, at + 1) if MARK in data[at + 1 :] else len(data)
            lost += following - at
            at = following
    return found, lost


def _parsed(data: bytes, spans: NDArray[np.int64]) -> list[Record]:
    view, known, records = memoryview(data), dict[bytes, str](), []
    for start, end in spans.tolist():
        kind, a, b = PREFIX.unpack_from(view, start)
        at = start + PREFIX.size
        names = [bytes(view[at : at + a]), bytes(view[at + a : at + a + b])]
        for name in names:  # share one string among all records of a source, of which there may be millions
            if name not in known:
                try:
                    known[name] = name.decode(*ENCODING)
                except UnicodeDecodeError:
                    known[name], kind = "", NONE
        records.append(Record(kind, known[names[0]], known[names[1]], view[at + a + b : end]))
    return records


@compiled
def _whole_records(data, offset, seed, total):  # type: ignore[no-untyped-def]
    """(records, 2): begin and end of each record's payload, up to the first damaged record; and their sum, as in
    `Place`. data[0] is byte `offset` of the file."""
    spans, count, at, address = np.empty((16, 2), np.int64), 0, np.int64(0), np.int64(data.ctypes.data)
    while at + 16 <= len(data):
        length, stored = np.int64(0), np.uint64(0)
        for i in range(4):
            length |= np.int64(data[at + 4 + i]) << np.int64(8 * i)
        for i in range(8):
            stored |= np.uint64(data[at + 8 + i]) << np.uint64(8 * i)
        mark = data[at] == 0xA5 and data[at + 1] == 0x53 and data[at + 2] == 0x4C and data[at + 3] == 0x52
        start, end = at + 16, at + 16 + length
        if not mark or length < 5 or end > len(data):
            break
        names = np.int64(data[start + 1]) + 256 * np.int64(data[start + 2])
        names += np.int64(data[start + 3]) + 256 * np.int64(data[start + 4])
        if names + 5 > length or xxh64(address + start, length, np.uint64(offset + at) + seed) != stored:
            break
        if count == len(spans):
            more = np.empty((2 * count, 2), np.int64)
            for i in range(count):
                more[i, 0], more[i, 1] = spans[i, 0], spans[i, 1]
            spans = more
        spans[count, 0], spans[count, 1] = start, end
        total = total * np.uint64(ODD) + stored
        count += 1
        at = end
    return spans[:count], total


def _seed(head: LogHead, offset: int = 0) -> np.uint64:
    """The seed of a record's checksum: it depends on the log and on the record's offset."""
    return np.uint64((int(head.log or "0", 16) + offset) % (1 << 64))


def _slot(length: int) -> bytes:
    number = struct.pack("<Q", length)
    return number + struct.pack("<Q", checksum(number))


def _read_slots(page: bytes) -> list[int]:
    """The acknowledged lengths in a log's first page; 0 for a damaged one."""
    found = []
    for at in SLOTS:
        number, stored = page[at : at + 8], page[at + 8 : at + 16]
        found.append(struct.unpack("<Q", number)[0] if stored == struct.pack("<Q", checksum(number)) else 0)
    return found
