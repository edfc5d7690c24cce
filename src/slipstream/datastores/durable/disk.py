"""Files that survive a crash: complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import StoreError


def write_whole(path: Path, data: bytes, made: Path | None = None) -> None:
    """Replace a file atomically. It is durable when this returns. made: its temporary name."""
    made = made or path.with_name(path.name + ".making")
    with made.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    made.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make a new or renamed name in the folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system into a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder}: the disk or the file system failed ({error}); what was acknowledged before is not lost"
        ) from error
