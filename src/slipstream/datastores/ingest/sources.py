"""Sources: find the files to read in what the user names (files, folders, globs, URLs, Python's standard library)."""

from __future__ import annotations

import codecs
import glob
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import StoreError
from slipstream.urls import Url, path_of

CHUNK = 1 << 20  # bytes or characters read at once
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class SourceFile:
    name: str  # that it has in a store: the absolute path, since a relative one is another file in another folder
    path: Path | Url
    size: int  # bytes
    modified: int  # modification time in nanoseconds; for a URL, a number that changes with the file


def find_sources(given: Sequence[str | Path], stdlib: bool = False) -> list[SourceFile]:
    """The files that were named or are below a named folder, each once, in the order of the names.

    In folders and globs, hidden and binary files are skipped, and files that aren't UTF-8 with a warning. A file that
    is named itself must be readable.
    """
    if not given and not stdlib:
        raise StoreError("no sources were given: name files, folders or globs, or ask for the standard library")
    found: dict[Path | Url, SourceFile] = {}
    unreadable: list[str] = []
    for item in given:
        paths, good = _paths(item), 0
        for path in paths:
            trouble = None if path.resolve() in found else _trouble(path)
            if trouble and path_of(item) == path:
                raise StoreError(
                    f"{item} is {trouble}: give UTF-8 text, .jsonl, .json or .parquet; unpack or convert it"
                )
            if trouble and trouble != "binary":
                unreadable.append(str(path))
            if not trouble:
                good += 1
                found.setdefault(path.resolve(), source_file(path))
        if not good:
            what = f"holds {len(paths)} files, none of them text" if paths else "names no files"
            raise StoreError(
                f"{item} {what}: give a file, a folder with text files in it, or a glob such as 'src/**/*.py'"
            )
    if stdlib:
        for source in _stdlib():
            found.setdefault(source.path.resolve(), source)
    if unreadable:
        some = ", ".join(unreadable[:3]) + ", …" * (len(unreadable) > 3)
        warnings.warn(f"left out {len(unreadable)} files that can't be read as UTF-8: {some}", stacklevel=2)
    return list(found.values())


def is_text(path: Path) -> bool:
    """Whether the whole file is UTF-8, without a NUL byte in its first 8 KiB."""
    return _trouble(path, parquet=False) is None


def _paths(item: str | Path) -> Sequence[Path | Url]:
    path = path_of(item)
    if isinstance(path, Url):
        return path.files()
    if path.is_dir():
        return _below(path)
    if path.exists():
        return [path]
    found: list[Path] = []
    for match in map(Path, sorted(glob.glob(str(item), recursive=True))):
        if "__pycache__" not in match.parts:
            found += _below(match) if match.is_dir() else [match]
    return found


def _below(folder: Path, without: Iterable[str] = ()) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if not n.startswith(".") and n != "__pycache__" and n not in without]
        found += [path for n in names if not n.startswith(".") and (path := Path(root, n)).is_file()]
    return sorted(found)


def _stdlib() -> list[SourceFile]:
    folder = Path(sysconfig.get_path("stdlib"))
    prefix = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [p for p in _below(folder, without=_NOT_LIBRARY) if p.suffix == ".py" and is_text(p)]
    if not paths:
        raise StoreError(
            f"{folder} holds no .py files: this Python came without its library's source; name files instead"
        )
    return [source_file(path, f"{prefix}/{path.relative_to(folder).as_posix()}") for path in paths]


def source_file(path: Path | Url, name: str | None = None) -> SourceFile:
    """name: a name in stores that says more than the path."""
    if isinstance(path, Url):
        return SourceFile(str(path), path, *path.stat())
    stat = path.stat()
    return SourceFile(name or os.path.abspath(path), path, stat.st_size, stat.st_mtime_ns)


def _trouble(path: Path | Url, parquet: bool = True) -> str | None:
    """Why a file can't be a source, or None. Of remote files only the beginning is read."""
    if isinstance(path, Path) and not path.is_file():
        return "neither a file nor a folder"
    if parquet and path.suffix.lower() == ".parquet":
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            head = file.read(8192)
            if b"\0" in head:
                return "binary"
            decoder.decode(head)
            if isinstance(path, Url):
                return None
            while chunk := file.read(CHUNK):
                decoder.decode(chunk)
            # A truncated dump may end inside a character, and is read up to there.
            decoder.decode(b"", final=path.suffix.lower() != ".json")
    except UnicodeDecodeError:
        return "not UTF-8"
    except OSError as error:
        return f"not readable ({error.strerror})"
    return None
