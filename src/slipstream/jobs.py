"""Requests on their way through a service, and the news of their answers."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from slipstream.request import Request
from slipstream.sequence import Reading, Sequence, TokenLogprobs
from slipstream.text import Detokenizer


@dataclass(frozen=True)
class Update:
    """What is new of an answer. `finish` comes once, with the last one; `error` where it failed."""

    text: str  # characters that nothing takes back
    tokens: list[int]
    # Of a stream that wants them, after each of these tokens: the characters of the whole answer that are certain.
    ends: list[int]
    logprobs: list[TokenLogprobs]  # of these, if they were asked for
    finish: str | None = None
    error: Exception | None = None
    sequence: Sequence | None = None  # with the last one, if its prompt was read

    def then(self, later: Update) -> Update:
        """Both as one."""
        return replace(
            later,
            text=self.text + later.text,
            tokens=self.tokens + later.tokens,
            ends=self.ends + later.ends,
            logprobs=self.logprobs + later.logprobs,
        )


class Mailbox:
    """Updates on their way from the service's thread into an event loop: those of one step come by one wake-up, since
    each takes a system call, and a change of threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which the service finds this by, and keeps as long as others do
        self._letters = deque[tuple[Callable[[Update], None], Update]]()

    def put(self, take: Callable[[Update], None], update: Update) -> None:
        """To be taken within the event loop, after the next `wake`."""
        self._letters.append((take, update))

    def wake(self) -> None:
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        while self._letters:
            take, update = self._letters.popleft()
            take(update)


class Wakes(Protocol):
    """Receives one wake-up for all updates that were delivered."""

    def wake(self) -> None:
        """RuntimeError: nobody listens any more."""


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: Request
    deliver: Callable[[Update], None]  # called by the service's thread: it must not wait for anything
    priority: int = 0  # smaller ones go first
    deadline: float | None = None  # by `monotonic`
    streams: bool = True  # whether it wants to hear of every step, or of the end alone
    offline: bool = False  # one of a list: others' prompts may be read before its next step, and it does not stay read
    mailbox: Wakes | None = None  # to be woken after `deliver`
    arrived: float = field(default_factory=monotonic)
    reading: Reading | None = None  # while its text is read
    sequence: Sequence | None = None  # once its prompt is read
    number: int = 0  # in the order of arrival
    over: bool = False
    delivered_in: float = -1.0  # the interval of its latest delivery while it ran: see `service.PACE`
    _texts: int = 0  # characters that were delivered
    _tokens: int = 0

    def new(self, finish: str | None = None, error: Exception | None = None) -> Update:
        tokens = self.sequence.tokens[self._tokens :] if self.sequence else []
        logprobs = self.sequence.logprobs[self._tokens :] if self.sequence else []
        text, ends, stop = "", list[int](), self.request.stop
        if isinstance(stop, Detokenizer):
            text = (stop.visible() if finish is None else stop.finish())[self._texts :]
            ends = stop.lengths[self._tokens :] if self.streams and stop.by_token else []
        self._texts += len(text)
        self._tokens += len(tokens)
        ended = self.sequence if finish is not None else None
        return Update(text, list(tokens), ends, list(logprobs), finish, error, ended)
