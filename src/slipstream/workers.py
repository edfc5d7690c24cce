"""Workers that load something once and then run functions of it: in this process, or by Ray (`cluster.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Workers(Protocol):
    """A group of workers."""

    @property
    def count(self) -> int:
        """How many workers there are."""

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """Run work(loaded, *given), where `loaded` is what the worker has loaded."""

    def close(self) -> None:
        """No more work will come."""


class Here:
    """One worker, in this process."""

    count = 1

    def __init__(self, load: Callable[[], Any]) -> None:
        self._own = load()

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(self._own, *given))
        return future

    def close(self) -> None:
        pass


def results(workers: Workers, work: Callable[..., T], jobs: Iterable[Any]) -> Iterator[T]:
    """The results of `work` for each job, in order. Jobs are submitted ahead, so that no worker is idle."""
    running: deque[Future[T]] = deque()
    try:
        for job in jobs:
            running.append(workers.submit(work, job))
            if len(running) > 2 * workers.count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
