"""Notices of work that takes seconds. Commands show them; in programs that use the library they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Show = Callable[[str], AbstractContextManager[None]]

_show: Show | None = None


def show_with(show: Show | None) -> None:
    """From now on, `show("doing this")` is entered around work that takes seconds."""
    global _show
    _show = show


def doing(what: str) -> AbstractContextManager[None]:
    return nullcontext() if _show is None else _show(what)
