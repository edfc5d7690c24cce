"""The link between the HTTP process and the model's process: messages over a pair of sockets.

A message is its length in eight bytes and a pickle. Pickle is safe here, since no other process can open the sockets.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from slipstream.server.backend import About, Chunk, Limits, Question
from slipstream.server.errors import Refused
from slipstream.server.schema import Sampled

HEAD = 8


# ---- from the model's process: first a Setup, then lists of the others


class Setup(NamedTuple):
    """What the HTTP process needs to start."""

    about: About
    limits: Limits
    key: str | None
    grace: float
    log_requests: bool


class Reply(NamedTuple):
    """The result of an Ask (an Asked) or of a Find."""

    number: int
    value: Any
    refused: Refused | None


class News(NamedTuple):
    """A chunk of an answer."""

    number: int  # of the Ask
    answer: int  # its index among the Ask's answers
    chunk: Chunk


class Stop(NamedTuple):
    """Take no more requests, and end after the last answer, or if `now` at once."""

    now: bool


# ---- from the HTTP process, one by one


class Ready(NamedTuple):
    """The HTTP process listens."""


class Ask(NamedTuple):
    number: int
    body: Sampled


class Cancel(NamedTuple):
    """The answers to this Ask are no longer needed."""

    number: int


class Find(NamedTuple):
    number: int
    what: Question
    given: Any


def packed(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEAD, "little") + body


class Unpacking:
    """Unpacks messages from bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> Iterator[Any]:
        self._bytes += piece
        while len(self._bytes) >= HEAD:
            end = HEAD + int.from_bytes(self._bytes[:HEAD], "little")
            if len(self._bytes) < end:
                return
            message = pickle.loads(self._bytes[HEAD:end])
            del self._bytes[:end]
            yield message


def messages(link: socket.socket) -> Iterator[Any]:
    """All messages until the other end is closed."""
    unpacking = Unpacking()
    while piece := link.recv(1 << 16):
        yield from unpacking.feed(piece)


def one_message(link: socket.socket) -> Any:
    """The next message, without reading beyond it. None: the other end is closed."""
    head = exactly(link, HEAD)
    body = exactly(link, int.from_bytes(head, "little")) if head else None
    return pickle.loads(body) if body else None


def exactly(link: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        if not (piece := link.recv(min(size - len(found), 1 << 16))):
            return None
        found += piece
    return bytes(found)
