"""Captured: a function of tensors as one launch on a GPU, which may include copying the result to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.stopwatch import preparing
from slipstream.targets.captured.recording import capture

log = logging.getLogger("slipstream")

# Captures with a copy to the host, at most: there is one for each shape of step whose states are read, and each size of
# batch that is drafted for behind it.
FETCHES = 96


@dataclass(frozen=True)
class Pending:
    """A result on its way to the host."""

    result: Tensor  # on the host
    ended: Any = None  # the event after which it has arrived; None: it is there already

    def wait(self) -> Tensor:
        if self.ended is not None:
            self.ended.synchronize()
        return self.result


@dataclass(frozen=True)
class Fetch:
    """A capture that includes the copy of its result to the host."""

    graph: Any
    table: Tensor  # on the host
    own: list[Tensor]  # the graph's own inputs on the device: the table, then the others
    still: tuple[Tensor, ...]  # tensors that the graph reads where they are; kept, so that their memory is not reused
    pending: Pending


class Captured:
    """A function of tensors whose work depends on their shapes alone. On a GPU the first call with certain shapes is
    captured, and later ones are one launch. On other devices it is simply called.

    Inputs may be on the host. The result is valid until the next call. The function may write to tensors of its own,
    but running it several times on the same inputs must be harmless. Call `clear` when those tensors move.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """within: a context in which the function is captured."""
        self._function, self._device, self._within = function, device, within
        self._graphs: dict[tuple[Any, ...], tuple[Any, list[Tensor], Any]] = {}
        self._fetches: dict[tuple[Any, ...], Fetch] = {}
        self._memory: Any = None  # the memory pool of its graphs
        self._captures = device.type == "cuda"

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Any:
        if not self._captures:
            return self._function(*[x.to(self._device) for x in inputs])
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        if shapes not in self._graphs:
            own = [torch.empty(x.shape, dtype=x.dtype, device=self._device).copy_(x) for x in inputs]
            with preparing:
                captured = self._capture(own, self._function)
            if captured is None:
                return self._function(*own)
            self._graphs[shapes] = captured
        graph, own, result = self._graphs[shapes]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        graph.replay()
        return result

    @torch.inference_mode()
    def fetch(self, table: Tensor, *inputs: Tensor, still: tuple[Tensor, ...] = ()) -> Tensor:
        """The result, which must be one tensor, on the host; valid until the next call. table: a tensor on the host,
        copied to the device within the launch, as the result is copied back. still: tensors that are read where they
        are; each set of them has a capture of its own."""
        return self.start(table, *inputs, still=still).wait()

    @torch.inference_mode()
    def start(self, table: Tensor, *inputs: Tensor, still: tuple[Tensor, ...] = ()) -> Pending:
        """`fetch` without waiting."""
        if not self._captures:
            result: Tensor = self._function(table.to(self._device), *inputs, *still)
            return Pending(result.cpu())
        key = ("fetch", table.shape, *((x.shape, x.dtype) for x in inputs), *(x.data_ptr() for x in still))
        if key not in self._fetches:
            if len(self._fetches) >= FETCHES:
                self.clear()
            with preparing:
                fetch = self._capture_fetch(table, inputs, still)
            if fetch is None:
                return self.start(table, *inputs, still=still)
            self._fetches[key] = fetch
        fetch = self._fetches[key]
        fetch.pending.wait()  # whatever nobody waited for: its table may still be read
        fetch.table.copy_(table)
        for mine, given in zip(fetch.own[1:], inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        fetch.graph.replay()
        fetch.pending.ended.record()
        return fetch.pending

    def _capture_fetch(self, table: Tensor, inputs: tuple[Tensor, ...], still: tuple[Tensor, ...]) -> Fetch | None:
        host = table.clone().pin_memory()
        own = [x.to(self._device, copy=True) for x in (host, *inputs)]
        with self._within():
            first = self._function(*own, *still)
        result = torch.empty(first.shape, dtype=first.dtype, pin_memory=True)

        def work(device: Tensor, *others: Tensor) -> None:
            device.copy_(host, non_blocking=True)
            result.copy_(self._function(device, *others, *still), non_blocking=True)

        captured = self._capture(own, work)
        return None if captured is None else Fetch(captured[0], host, own, still, Pending(result, torch.cuda.Event()))

    def clear(self) -> None:
        """Drop all captures, after those that still run have ended."""
        for fetch in self._fetches.values():
            fetch.pending.wait()
        self._graphs.clear()
        self._fetches.clear()
        self._memory = None

    def _capture(self, own: list[Tensor], function: Callable[..., Any]) -> tuple[Any, list[Tensor], Any] | None:
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(self._device), self._within():
                graph, result = capture(lambda: function(*own), self._memory)
        except RuntimeError as error:  # for instance a quantised output matrix that reads values on the host
            log.warning("drafting can't be captured and runs piece by piece: %s", str(error).splitlines()[0])
            self._captures = False
            return None
        return graph, own, result
