"""Turns: threads that use one model take turns, in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

_of: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()
_making = threading.Lock()


class Turns:
    """A lock that nobody starves at: a thread that gives it back and asks again stands behind those who wait, which
    `threading.Lock` does not promise. Whoever has it may enter again."""

    def __init__(self) -> None:
        # Entered again where Python collects garbage, and with it a stream, inside of it.
        self._mutex = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # thread, and what it sleeps on

    @classmethod
    def of(cls, model: Any) -> Turns:
        """The one of a model, whoever uses it."""
        with _making:
            return _of.setdefault(model, cls())

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner == threading.get_ident()

    def attempt(self) -> bool:
        """Enter if that is possible without waiting, and not from within."""
        with self._mutex:
            if self._owner is not None:
                return False
            self._owner, self._depth = threading.get_ident(), 1
            return True

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return
            bell = threading.Lock()
            bell.acquire()
            mine = (me, bell)
            self._waiting.append(mine)
        try:
            bell.acquire()
        except BaseException:  # Ctrl-C: the place in the queue must not be called up for nobody
            with self._mutex:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                else:
                    self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, bell = self._waiting.popleft()
                self._depth = 1
                bell.release()
