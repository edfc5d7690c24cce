"""Files that a user names: refused before any work is done for them, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import OptionError


def check_writable(*paths: Path | None) -> None:
    """Raise for the first file that can't be written. None stands for a file that nobody asked for."""
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
    """Raise if files can't be written to this folder, or it can't be made. What was not there is not there after."""
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
    """Write a file. Should that fail, as on a full disk, what was there before stays."""
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
    """What the system has against writing a file, as an error for its user."""
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"{path} can't be written ({error.strerror}): name a file in a folder where there is room and you may write"
        ) from error


def _special(path: Path) -> bool:
    """A pipe or a device, such as /dev/stdout: written as it is."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    """Where a file is made: in the folder of the one it replaces, which a link may lead to."""
    final = path.resolve()
    return final.with_name(final.name + ".making")
