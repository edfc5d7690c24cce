"""Updates of answers in an event loop: those that were not read yet are merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, Protocol, Self, TypeVar


class Part(Protocol):
    """An update of an answer."""

    @property
    def finish(self) -> str | None:
        """Why the answer ended; None before its last update."""

    def then(self, later: Self) -> Self:
        """Both updates as one."""


T = TypeVar("T", bound=Part)


class Merged(Generic[T]):
    """The updates of several answers, as an iterator of (index of the answer, update). Leaving the loop, or being
    cancelled in it, ends the answers. A slow reader delays nothing: its updates are merged to one for each answer."""

    def __init__(self, count: int = 0) -> None:
        """count: how many answers there are. It may be set later, but before the iteration begins."""
        self.count = count
        self._came = asyncio.Event()
        self._new: dict[int, T] = {}
        self._ended = 0  # answers whose last update has arrived

    def take(self, number: int, new: T) -> None:
        """Add an update. To be called in the event loop."""
        before = self._new.get(number)
        self._new[number] = before.then(new) if before is not None else new
        self._ended += new.finish is not None
        self._came.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, T]]:
        left = self.count
        try:
            while left:
                await self._came.wait()
                self._came.clear()
                arrived, self._new = self._new, {}
                for number, new in arrived.items():
                    left -= new.finish is not None
                    yield number, new
        finally:
            self.close()

    @property
    def over(self) -> bool:
        """Whether the last update of every answer has arrived."""
        return self._ended >= self.count

    def close(self) -> None:
        if not self.over:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the answers that have not ended."""
        raise NotImplementedError
