"""Read documents with the target, in batches: in this process, or in several processes with a model each.

On a CPU every reader uses one core. With more, the number of cores that share a product may decide the order of its
sums, and so the rounding. With one core each, the bytes do not depend on the number of readers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch

from slipstream.datastores.dense.transform import Transform
from slipstream.datastores.dense.vector_manifest import Origin
from slipstream.datastores.dense.vectors import keys_of
from slipstream.datastores.sparse.sort import Tokens, cores
from slipstream.targets.trees import context_length, input_device, unwrapped

Load = Callable[[], Any]  # returns a model; for several workers it must be picklable
Window = tuple[int, int, int, int]  # number of the document, first token, end, first token whose state is kept


class Reader:
    """A model that reads documents."""

    def __init__(self, model: Any) -> None:
        self.model = unwrapped(model).eval()
        self.device, self.context = input_device(model), context_length(model.config)
        self.ended = False  # set to cancel what is being read

    @cached_property
    def origin(self) -> Origin:
        return Origin.of(self.model)

    @torch.inference_mode()
    def rows(
        self, documents: Sequence[Tokens], window: int, overlap: int, batch_tokens: int, transform: Transform | None
    ) -> torch.Tensor:
        """(n, H) the states of all positions that can draft, document by document; with a transform, their vectors
        (n, D) in half precision."""
        counts = keys_of([len(d) for d in documents])
        starts = np.cumsum(counts) - counts
        moved = transform.to(self.device) if transform is not None else None
        found: torch.Tensor | None = None
        for batch in batches(windows(counts.tolist(), window, overlap), batch_tokens):
            if self.ended:
                raise CancelledError
            longest = max(end - begin for _, begin, end, _ in batch)
            ids = np.zeros((len(batch), longest), np.int64)  # padded on the right, where no position attends
            for line, (d, begin, end, _) in zip(ids, batch, strict=True):
                line[: end - begin] = documents[d][begin:end]
            states = self.model.base_model(
                input_ids=torch.from_numpy(ids).to(self.device), use_cache=False
            ).last_hidden_state  # (b, t, H)
            rows = states if moved is None else moved(states).half()
            if found is None:
                found = torch.empty(int(counts.sum()), rows.shape[-1], dtype=rows.dtype)
            for row, (d, begin, end, keep) in zip(rows.cpu(), batch, strict=True):
                found[starts[d] + keep : starts[d] + end] = row[keep - begin : end - begin]
        if found is None:
            width, kind = (self.origin.hidden, self.model.dtype) if moved is None else (moved.dims, torch.float16)
            found = torch.empty(0, width, dtype=kind)
        return found


def reader(load: Load) -> Reader:
    """The reader of a worker process."""
    torch.set_num_threads(1)
    return Reader(load())


def windows(counts: Sequence[int], window: int, overlap: int) -> Iterator[Window]:
    """Every document in windows that the model can read, each with the end of the previous one as context."""
    for d, count in enumerate(counts):
        begin, read = 0, 0
        while read < count:
            end = min(begin + window, count)
            yield d, begin, end, read
            begin, read = end - overlap, end


def batches(pieces: Iterator[Window], tokens: int) -> Iterator[list[Window]]:
    """Batches of windows of similar length, so that there is little padding."""
    batch: list[Window] = []
    for piece in sorted(pieces, key=lambda p: p[1] - p[2]):  # the longest first
        longest = batch[0][2] - batch[0][1] if batch else 0
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


class ReaderThreads:
    """Readers in this process: on a CPU, one thread per core, which share the model."""

    def __init__(self, load: Load) -> None:
        self._own, self._threads = Reader(load()), torch.get_num_threads()
        self.count = cores() if self._own.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        return self._pool.submit(work, self._own, *given)

    def close(self) -> None:
        self._own.ended = True
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)  # per thread, but new threads inherit the last value set


class ReaderProcesses:
    """A reader in each of several processes."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.count = len(loads)
        context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
        queue = context.Queue()
        for load in loads:
            queue.put(load)
        self._pool = ProcessPoolExecutor(self.count, context, _start, (queue,))

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        return self._pool.submit(_work, work, *given)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


_mine: list[Reader] = []  # the reader of a worker process


def _start(loads: Any) -> None:
    _mine.append(reader(loads.get()))


def _work(work: Callable[..., Any], *given: Any) -> Any:
    return work(_mine[0], *given)
