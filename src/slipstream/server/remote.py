"""The link's end in the HTTP process: a backend whose model is in another process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from slipstream.server.backend import About, Answers, Question
from slipstream.server.link import Ask, Cancel, Find, News, Ready, Reply, Stop, Unpacking, packed
from slipstream.server.schema import Sampled


class Remote(asyncio.Protocol):
    """Messages are read as soon as they arrive, so that the model's process never waits for a client."""

    def __init__(
        self, link: socket.socket, about: About, stop: Callable[[bool], None], lost: Callable[[], None]
    ) -> None:
        """stop: called with `now` when the model's process sends `Stop`. lost: called when that process is gone."""
        self.about, self._link, self._stop, self._lost = about, link, stop, lost
        self._numbers = itertools.count()
        self._answers: dict[int, Answers] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._unpacking = Unpacking()
        self._transport: asyncio.Transport | None = None
        self._closing = False

    async def open(self) -> None:
        self._link.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._link)

    async def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def ready(self) -> None:
        self._send(Ready())

    async def ask(self, body: Sampled) -> Answers:
        number = next(self._numbers)
        self._answers[number] = answers = Answers(partial(self._close, number))
        try:
            answers.begin(await self._reply(number, Ask(number, body)))
        except BaseException:
            self._close(number)
            raise
        return answers

    async def find(self, what: Question, given: Any = None) -> Any:
        number = next(self._numbers)
        return await self._reply(number, Find(number, what, given))

    async def _reply(self, number: int, message: Ask | Find) -> Any:
        self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await self._replies[number]
        finally:
            del self._replies[number]

    def _close(self, number: int) -> None:
        """Forget these answers, and cancel those that have not ended."""
        answers = self._answers.pop(number, None)
        if answers is not None and not answers.over:
            self._send(Cancel(number))

    def _send(self, message: Any) -> None:
        if self._transport is not None:
            self._transport.write(packed(message))

    # ---- of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not instances of it

    def data_received(self, data: bytes) -> None:
        for entries in self._unpacking.feed(data):
            for entry in entries:
                match entry:
                    case News(number, answer, chunk):
                        if (answers := self._answers.get(number)) is not None:
                            answers.take(answer, chunk)
                    case Reply(number, value, refused):
                        reply = self._replies.get(number)
                        if reply is not None and not reply.done():
                            reply.set_result(value) if refused is None else reply.set_exception(refused)
                    case Stop(now):
                        self._stop(now)

    def connection_lost(self, _: Exception | None) -> None:
        if not self._closing:
            self._lost()
