"""Work that is done once, for the first of many alike: capturing a CUDA graph, compiling. It is nobody's fault, so
whoever measures time leaves it out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any

import torch
from numba.core import event

from slipstream.notices import doing


class Preparing:
    """Entered around what is done once, for the first of many alike."""

    def __init__(self) -> None:
        self.seconds = 0.0  # spent there so far
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
    """Hears of everything that numba compiles, one function inside another's compilation included."""

    def __init__(self) -> None:
        self._told: list[AbstractContextManager[None]] = []

    def on_start(self, event: event.Event) -> None:  # noqa: ARG002
        preparing.__enter__()
        self._told.append(doing("compiling (once)") if not self._told else nullcontext())
        self._told[-1].__enter__()

    def on_end(self, event: event.Event) -> None:  # noqa: ARG002
        self._told.pop().__exit__(None, None, None)
        preparing.__exit__()


event.register("numba:compile", Compiling())


class Stopwatch:
    """Seconds since it was made, without those of `preparing`."""

    def __init__(self) -> None:
        self._start = perf_counter() - preparing.seconds

    def seconds(self) -> float:
        return perf_counter() - preparing.seconds - self._start


def capture(run: Callable[[], Any], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What `run` does, to be replayed, and what it returned while it was recorded. memory: a pool to allocate from."""
    stream = _warming(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is set up at the first call must not be recorded
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _nothing_collected(), torch.cuda.graph(graph, pool=memory):
        result = run()
    return graph, result


@cache
def _warming(device: int) -> torch.cuda.Stream:
    """Where work runs before it is recorded. One for all: cuBLAS keeps tens of megabytes for every stream it was used
    on, which nobody gives back."""
    return torch.cuda.Stream(device)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's collector could end an old graph in the middle of the recording, which CUDA forbids."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
