"""Stores what was learnt about models on this machine in the cache folder, for the next process."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """The folder for everything that is computed once: SLIPSTREAM_CACHE, or slipstream/ in the user's cache folder."""
    if given := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def recall(kind: str, key: str) -> Any:
    """What was stored; None if there is nothing or it can't be read: then it is learnt again."""
    with suppress(OSError, ValueError):
        kept = json.loads(_file(kind, key).read_text())
        if isinstance(kept, dict) and kept.get("key") == key:
            return kept.get("known")
    return None


def remember(kind: str, key: str, known: Any) -> None:
    """Store it in place of an earlier one. Errors are ignored: if the folder can't be written to, the next process
    learns again."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({"key": key, "known": known}))
        new.replace(file)


def _file(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
