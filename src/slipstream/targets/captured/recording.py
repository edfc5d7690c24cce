"""Capturing a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def capture(run: Callable[[], Any], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what `run` does as a graph. Returns the graph and the result of the captured run, whose tensors each
    replay writes. memory: the pool to allocate from."""
    stream = _warming(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # warm-up: what the first call sets up must not be captured
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _nothing_collected(), torch.cuda.graph(graph, pool=memory):
        result = run()
    return graph, result


@cache
def _warming(device: int) -> torch.cuda.Stream:
    """The stream for warm-up runs. One for all captures: cuBLAS keeps tens of megabytes for every stream that it was
    used on, and never frees them."""
    return torch.cuda.Stream(device)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage collection during a capture: it could destroy an old graph, which CUDA forbids while capturing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
