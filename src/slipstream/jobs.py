"""Requests in a service, and the updates of their answers."""

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
    """What is new of an answer. The last update has `finish`, and `error` if the answer failed."""

    text: str  # new characters, which are final
    tokens: list[int]
    # For each token, if the stream asked for it: how many characters of the whole answer are final after it.
    ends: list[int]
    logprobs: list[TokenLogprobs]  # of these tokens, if asked for
    finish: str | None = None
    error: Exception | None = None
    sequence: Sequence | None = None  # in the last update, if its prompt was read

    def then(self, later: Update) -> Update:
        """Both updates as one."""
        return replace(
            later,
            text=self.text + later.text,
            tokens=self.tokens + later.tokens,
            ends=self.ends + later.ends,
            logprobs=self.logprobs + later.logprobs,
        )


class Mailbox:
    """Brings updates from the service's thread into an event loop. All updates of a step share one wake-up, since each
    wake-up takes a system call and a change of threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # weak: the service must not keep loops alive (`Service.mailbox`)
        self._entries = deque[tuple[Callable[[Update], None], Update]]()

    def put(self, take: Callable[[Update], None], update: Update) -> None:
        """Queue an update: after the next `wake`, the event loop calls `take` with it."""
        self._entries.append((take, update))

    def wake(self) -> None:
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        while self._entries:
            take, update = self._entries.popleft()
            take(update)


class Wakes(Protocol):
    """Receives one wake-up for all updates that were delivered."""

    def wake(self) -> None:
        """RuntimeError: the receiver is gone."""


@dataclass(eq=False)
class Job:
    """A request in a service."""

    request: Request
    deliver: Callable[[Update], None]  # called by the service's thread: it must not block
    priority: int = 0  # smaller ones go first
    deadline: float | None = None  # by `monotonic`
    streams: bool = True  # deliver updates while it runs, not only the last one
    offline: bool = False  # part of a list: other prompts may be read before its next step, and its text is not kept
    mailbox: Wakes | None = None  # to be woken after `deliver`
    arrived: float = field(default_factory=monotonic)
    reading: Reading | None = None  # while its text is read
    found: int = 0  # tokens of its prompt whose keys were in the cache when its reading began
    sequence: Sequence | None = None  # once its prompt is read
    number: int = 0  # in the order of arrival
    over: bool = False
    delivered_in: float = -1.0  # the interval of its latest delivery while it ran: see `service.PACE`
    _characters: int = 0  # delivered so far
    _tokens: int = 0

    def __lt__(self, other: Job) -> bool:
        """Whether it is to be read before the other."""
        return (self.priority, self.number) < (other.priority, other.number)

    def late(self, now: float) -> bool:
        """Whether its deadline has passed. now: by `monotonic`."""
        return self.deadline is not None and now > self.deadline

    def new(self, finish: str | None = None, error: Exception | None = None) -> Update:
        tokens = self.sequence.tokens[self._tokens :] if self.sequence else []
        logprobs = self.sequence.logprobs[self._tokens :] if self.sequence else []
        text, ends, stop = "", list[int](), self.request.stop
        if isinstance(stop, Detokenizer):
            text = (stop.visible() if finish is None else stop.finish())[self._characters :]
            ends = stop.lengths[self._tokens :] if self.streams and stop.by_token else []
        self._characters += len(text)
        self._tokens += len(tokens)
        ended = self.sequence if finish is not None else None
        return Update(text, list(tokens), ends, list(logprobs), finish, error, ended)
