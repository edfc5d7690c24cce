"""Files at URLs (s3://, gs://, …), by fsspec: the part of pathlib's interface that reading needs."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

from slipstream.errors import OptionError, StoreError


def is_url(name: str | Path) -> bool:
    return "://" in str(name)


def path_of(name: str | Path) -> Path | Url:
    """A path, or a Url."""
    return Url(str(name)) if is_url(name) else Path(name)


@dataclass(frozen=True)
class Url:
    """A file or a folder. When pickled, only its name is sent. fsspec's cached listings are dropped before each access,
    since files may have changed."""

    url: str

    def __post_init__(self) -> None:
        fs, path = self._place
        object.__setattr__(self, "url", fs.unstrip_protocol(path))  # one name for each file

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.url.rstrip('/')}/{name}")

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url}

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the name in it."""
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise OptionError(f"{self} needs fsspec, which is missing: `pip install slipstream-llm[remote]`") from error
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
            return found
        except ImportError as error:
            raise OptionError(f"{self} needs a package that is missing: {error}") from error
        except (ValueError, OSError) as error:
            raise StoreError(f"{self} can't be opened: {error}") from error

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._place[1]).suffix

    @property
    def name(self) -> str:
        return PurePosixPath(self._place[1]).name

    def resolve(self) -> Url:
        return self

    def files(self) -> list[Url]:
        """Itself; or of a folder all files in it that are not hidden, of a pattern those that match and are not."""
        fs, path = self._place
        fs.invalidate_cache()
        found = [path]
        if pattern := re.search(r"[*?[]", path):
            found = visible(fs.glob(path), path[: pattern.start()].rpartition("/")[0])
        files = {name for one in found for name in (visible(fs.find(one), one) if fs.isdir(one) else [one])}
        return [Url(fs.unstrip_protocol(name)) for name in sorted(files) if fs.isfile(name)]

    def stat(self) -> tuple[int, int]:
        """Size, and a number that changes with the file: object stores have tags, not times."""
        fs, path = self._place
        return int(fs.size(path)), int(fs.ukey(path)[:15], 16)

    def open(self, mode: str = "r", **how: Any) -> IO[Any]:
        """As `Path.open` does."""
        fs, path = self._place
        fs.invalidate_cache()
        try:
            raw = fs.open(path, "rb" if "r" in mode else "wb")
        except OSError:
            raise
        except Exception as error:  # each service has error classes of its own
            raise OSError(f"{self}: {error}") from error
        return raw if "b" in mode else io.TextIOWrapper(raw, **how)

    def read_text(self, encoding: str) -> str:
        with self.open(encoding=encoding) as file:
            return str(file.read())

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return bytes(file.read())

    def unlink(self) -> None:
        fs, path = self._place
        fs.rm_file(path)


def visible(names: Iterable[str], folder: str) -> list[str]:
    """Those that are not hidden within the folder, wherever that is itself."""
    hidden = re.compile(r"(^|/)(\.[^/]|__pycache__(/|$))")
    return [name for name in names if not hidden.search(name.removeprefix(folder.rstrip("/")))]
