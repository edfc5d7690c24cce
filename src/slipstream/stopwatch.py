"""Measures time without one-time work, such as capturing a CUDA graph or compiling. That would distort what is learnt
about the steps and drafts in which it happens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from numba.core import event

from slipstream.notices import doing


class Preparing:
    """Entered around one-time work."""

    def __init__(self) -> None:
        self.seconds = 0.0  # spent on it so far
        self._depth, self._since = 0, 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._since = perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += perf_counter() - self._since


preparing = Preparing()


class Compiling(event.Listener):
    """Counts numba's compilations as one-time work, nested ones included."""

    def __init__(self) -> None:
        self._notices: list[AbstractContextManager[None]] = []

    def on_start(self, event: event.Event) -> None:  # noqa: ARG002
        preparing.__enter__()
        self._notices.append(doing("compiling (once)") if not self._notices else nullcontext())
        self._notices[-1].__enter__()

    def on_end(self, event: event.Event) -> None:  # noqa: ARG002
        self._notices.pop().__exit__(None, None, None)
        preparing.__exit__()


event.register("numba:compile", Compiling())


class Stopwatch:
    """Seconds since it was made, without one-time work."""

    def __init__(self) -> None:
        self._start = perf_counter() - preparing.seconds

    def seconds(self) -> float:
        return perf_counter() - preparing.seconds - self._start
