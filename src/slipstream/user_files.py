"""Output files that a user names: checked before any work is done, and written as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import OptionError


def check_writable(*paths: Path | None) -> None:
    """Raise for the first file that can't be written. None, for an output that was not asked for, is skipped."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise OptionError(f"{path} is a folder: name a file")
        with told(path):
            if _special(path):
                continue
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(None, "Permission denied")
            made = _beside(path)
            made.touch()
            made.unlink()


def check_folder(path: Path) -> None:
    """Raise if files can't be written to this folder, or it can't be made. Folders made for the check are removed."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"the folder {path} can't be made ({error.strerror}): name another") from error
    finally:
        for folder in new:  # the innermost first
            if folder.is_dir():
                folder.rmdir()
    if not new:
        check_writable(path / "file")


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file. If that fails, for instance on a full disk, an old file stays as it was."""
    with told(path):
        if _special(path):
            path.write_text(text, encoding="utf-8", errors=errors, newline="\n")
            return
        made = _beside(path)
        try:
            with made.open("w", encoding="utf-8", errors=errors, newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            made.replace(path.resolve())
        except BaseException:
            made.unlink(missing_ok=True)
            raise


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns the system's errors on writing a file into one for the user."""
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"{path} can't be written ({error.strerror}): name a file in a folder where there is room and you may write"
        ) from error


def _special(path: Path) -> bool:
    """Whether it is a pipe or a device, such as /dev/stdout, which is written to directly."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    """The temporary file: in the folder of the file that it will replace, links resolved."""
    final = path.resolve()
    return final.with_name(final.name + ".making")


@contextmanager
def held(place: Path) -> Iterator[None]:
    """Refuse to work in a folder, or on a file, in which another process does."""
    file = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(f"another process works in {place}: wait for it, or name another place") from None
        except OSError:  # this file system has no locks
            pass
        yield
    finally:
        os.close(file)
