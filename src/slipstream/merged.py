"""Answers that arrive in an event loop: what came while nobody asked for it comes as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, Protocol, Self, TypeVar


class Part(Protocol):
    """What is new of an answer."""

    @property
    def finish(self) -> str | None:
        """With the last one: why the answer ended."""

    def then(self, later: Self) -> Self:
        """Both as one."""


T = TypeVar("T", bound=Part)


class Merged(Generic[T]):
    """Several answers as they grow, to be iterated over: which of them, and what is new. Whoever leaves the loop, or is
    cancelled in it, ends the answers. Whoever reads slowly holds up nobody, and nothing piles up but the answers."""

    def __init__(self, count: int = 0) -> None:
        """count: of answers. It may be set later, before somebody iterates."""
        self.count = count
        self._came = asyncio.Event()
        self._new: dict[int, T] = {}
        self._ended = 0  # answers whose end came

    def take(self, number: int, new: T) -> None:
        """Within the event loop."""
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
        """Whether the ends of all have come."""
        return self._ended >= self.count

    def close(self) -> None:
        if not self.over:
            self._cancel()

    def _cancel(self) -> None:
        """End those that go on."""
        raise NotImplementedError
