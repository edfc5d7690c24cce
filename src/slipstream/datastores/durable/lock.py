"""The lock of a store's writer. The folder itself is locked, as a lock file might be deleted by mistake. The file
`lock` in it names the owner, and is locked too, for older versions, which know only that."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.errors import StoreError

PAUSE = 0.01  # seconds between two tries
WRITER, READERS = 20, 300  # tries: readers hold the folder while they read what was not acknowledged


class Lock:
    """Held until it is closed or the process ends."""

    def __init__(self, folder: Path) -> None:
        self.process = os.getpid()
        self._folder = os.open(folder, os.O_RDONLY)
        self._file = -1
        try:
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            for file, tries in ((self._file, WRITER), (self._folder, READERS)):
                if not _taken(file, tries):
                    holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise StoreError(
                        f"{folder} is being written by process {holder}: there can be one writer; readers need not wait"
                    )
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{self.process}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in (self._file, self._folder):
            if file >= 0:
                if self.ours:  # forked processes share the lock: without this it would be held until they end
                    with suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)
        self._file = self._folder = -1

    @property
    def ours(self) -> bool:
        """False in a forked process: only its parent may write."""
        return self.process == os.getpid()


def _taken(file: int, tries: int) -> bool:
    for attempt in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt < tries - 1:
                time.sleep(PAUSE)
    return False


@contextmanager
def no_writer(folder: Path) -> Iterator[bool]:
    """Yields whether there is no writer. If so, none can start during the block, so keep it short."""
    file = os.open(folder, os.O_RDONLY)
    try:
        alone = False
        with suppress(OSError):  # there is a writer, or the file system has no locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alone = True
        yield alone
    finally:
        os.close(file)
