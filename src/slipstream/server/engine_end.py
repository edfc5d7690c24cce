"""The link's end in the model's process: passes requests from the HTTP process to the backend, and answers back.

The engine never waits for the HTTP process: a separate thread writes to the socket. Updates that it has not written yet
are merged into one for each answer.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any

from slipstream.jobs import Update
from slipstream.server.errors import Refused
from slipstream.server.link import Ask, Cancel, Find, News, Ready, Reply, Stop, messages, packed
from slipstream.server.local import Call, Local

log = logging.getLogger("slipstream.server")

Address = tuple[int, int]  # the number of a call, and the index of one of its answers


class Outbox:
    """What is to be sent to the HTTP process: all of it in one message, such as the updates of one step."""

    def __init__(self, link: socket.socket, write: Callable[[Address, Update], News | None]) -> None:
        """write: turns an update into `News`, for each answer in order. None: the answer was cancelled."""
        self._link, self._write = link, write
        self._entries: list[Reply | Stop] = []
        self._updates: dict[Address, Update] = {}
        self._changed = threading.Condition()
        self._gone = False
        threading.Thread(target=self._send_all, name="outbox", daemon=True).start()

    def say(self, entry: Reply | Stop) -> None:
        with self._changed:
            self._entries.append(entry)
            self._changed.notify()

    def put(self, address: Address, update: Update) -> None:
        """Queue an update, to be sent after the next `wake`."""
        with self._changed:
            before = self._updates.get(address)
            self._updates[address] = before.then(update) if before is not None else update

    def wake(self) -> None:
        with self._changed:
            if self._gone:
                raise RuntimeError("the process that speaks HTTP is gone")
            self._changed.notify()

    def close(self) -> None:
        """Stop sending: the other end is closed."""
        with self._changed:
            self._gone = True
            self._changed.notify()

    def _send_all(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._entries or self._updates or self._gone)
                    if self._gone:
                        return
                    entries, self._entries = self._entries, []
                    updates, self._updates = self._updates, {}
                news = [self._write(address, update) for address, update in updates.items()]
                self._link.sendall(packed([*entries, *(entry for entry in news if entry is not None)]))
        except OSError:
            pass  # the other end is closed
        except Exception:
            log.exception("the engine's answers can't be sent any more")
        finally:
            self._gone = True
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it too


class EngineEnd:
    """Serves the HTTP process until that has ended."""

    def __init__(self, local: Local, link: socket.socket) -> None:
        self.ready, self.gone = threading.Event(), threading.Event()  # the HTTP process listens; it has ended
        self._local, self._link = local, link
        self._calls: dict[int, Call] = {}
        self._outbox = Outbox(link, self._news)
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def stop(self, now: bool) -> None:
        self._outbox.say(Stop(now))

    def _read(self) -> None:
        try:
            for message in messages(self._link):
                match message:
                    case Ask(number, body):
                        self._calls[number] = call = Call(partial(self._put, number), self._outbox)
                        self._local.submit(call, body).add_done_callback(partial(self._reply, number))
                    case Cancel(number):
                        if (gone := self._calls.pop(number, None)) is not None:
                            gone.cancel()
                    case Find(number, what, given):
                        self._local.look(what, given).add_done_callback(partial(self._reply, number))
                    case Ready():
                        self.ready.set()
        except OSError:
            pass  # treated like a closed link
        finally:
            self._outbox.close()
            self.gone.set()
            self.ready.set()  # so that `Front.start` stops waiting
            for call in list(self._calls.values()):
                call.cancel()

    def _reply(self, number: int, future: Future[Any]) -> None:
        value, refused = None, None
        try:
            value = future.result()
        except CancelledError:
            refused = Refused(503, "this server is shutting down")
        except Refused as error:
            refused = error
        if refused is not None:
            self._calls.pop(number, None)
        self._outbox.say(Reply(number, value, refused))

    def _put(self, number: int, answer: int, update: Update) -> None:
        self._outbox.put((number, answer), update)

    def _news(self, address: Address, update: Update) -> News | None:
        number, answer = address
        call = self._calls.get(number)
        if call is None:  # it was cancelled
            return None
        chunk = call.chunk(answer, update, self._local.decode)
        if call.over:
            self._calls.pop(number, None)
        return News(number, answer, chunk)
