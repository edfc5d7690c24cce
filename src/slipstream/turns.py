"""Threads that use one model take turns, in the order in which they asked; and each must be told its GPU."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

_of: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()
_making = threading.Lock()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, a GPU is the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Turns:
    """A fair, reentrant lock. A thread that releases it and asks again queues after the threads that wait already;
    `threading.Lock` does not promise that."""

    def __init__(self) -> None:
        # Reentrant: Python may collect garbage while it is held, and a collected stream enters it.
        self._mutex = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # thread, and the lock that it sleeps on

    @classmethod
    def of(cls, model: Any) -> Turns:
        """The one lock of a model, for all engines that use it."""
        with _making:
            return _of.setdefault(model, cls())

    @property
    def mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def attempt(self) -> bool:
        """Enter if no thread holds it, this one included. Returns whether it did."""
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
        except BaseException:  # Ctrl-C: leave the queue, or pass on the lock if it was handed over already
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
