"""Capturing a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


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
