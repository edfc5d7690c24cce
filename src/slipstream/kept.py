"""What is learnt about models on this machine, kept in the cache folder for the next process."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where slipstream keeps what it made once: SLIPSTREAM_CACHE, or slipstream/ in the user's cache folder."""
    if given := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def recall(kind: str, key: str) -> Any:
    """None, if nothing is kept, or nothing that can be read: it is learnt anew."""
    with suppress(OSError, ValueError):
        kept = json.loads(_file(kind, key).read_text())
        if isinstance(kept, dict) and kept.get("key") == key:
            return kept.get("known")
    return None


def remember(kind: str, key: str, known: Any) -> None:
    """In place of what was kept before. A cache folder that can't be written to costs the next process its start."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({"key": key, "known": known}))
        new.replace(file)


def _file(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
