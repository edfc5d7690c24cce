"""The link between the process that speaks HTTP and the one that has the model: messages on a pair of sockets.

A message is its length in eight bytes and a pickle: both ends are ours, and nobody else can open the sockets.
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


# ---- from the model's side: first a Setup, then lists of the others


class Setup(NamedTuple):
    """What the protocol needs to know to begin."""

    about: About
    limits: Limits
    key: str | None
    grace: float
    log_requests: bool


class Reply(NamedTuple):
    """To an Ask (an Asked) or a Find."""

    number: int
    value: Any
    refused: Refused | None


class News(NamedTuple):
    """What is new of an answer."""

    number: int  # of the Ask
    answer: int  # which of its answers
    chunk: Chunk


class Stop(NamedTuple):
    """Take no more requests, and end when the last one is answered; or now."""

    now: bool


# ---- from the protocol's side, one by one


class Ready(NamedTuple):
    """It listens."""


class Ask(NamedTuple):
    number: int
    body: Sampled


class Cancel(NamedTuple):
    """Nobody reads the answers to this Ask any more."""

    number: int


class Find(NamedTuple):
    number: int
    what: Question
    given: Any


def packed(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEAD, "little") + body


class Unpacking:
    """Messages of bytes that come in any pieces."""

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
    """All that come, until the other end is closed."""
    unpacking = Unpacking()
    while piece := link.recv(1 << 16):
        yield from unpacking.feed(piece)


def one_message(link: socket.socket) -> Any:
    """The next one, and nothing that is behind it; None: the other end is closed."""
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
