"""Runs a server until a signal ends it: the model in this process, and HTTP in another one that it starts.

A model on a fast GPU takes all the time of Python's interpreter; one that also reads requests and writes events has
less for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slipstream.errors import OptionError, SlipstreamError

if TYPE_CHECKING:  # torch is for whoever loads the model, while the other process starts
    from slipstream.server.local import Local

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
PATIENCE = 10  # seconds for a process that has nothing left to do


def listening(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, UnicodeError) as error:
        sock.close()
        why = error.strerror if isinstance(error, OSError) else "this is no host name"
        raise OptionError(f"can't listen at {host}, port {port}: {why}; give another --host or --port") from error
    return sock


class Front:
    """The process that speaks HTTP, as a context: it starts while the model is loaded, and is gone behind it."""

    def __init__(self, sock: socket.socket) -> None:
        """sock: bound, not listening yet. It is handed over."""
        self._link, theirs = socket.socketpair()
        with sock, theirs:
            files = sock.fileno(), theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.server.front", *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for this process alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the same modules as here
            )
        self._stopping = False

    def start(self, local: Local, key: str | None = None, grace: float = 0.0, log_requests: bool = False) -> None:
        """Returns when it listens. key: what clients must know, if anything. grace: seconds for running answers to end
        in, when it is stopped."""
        from slipstream.server.engine_end import EngineEnd
        from slipstream.server.link import Setup, packed

        self._local, self._grace = local, grace
        with suppress(OSError):  # that it is gone is told below
            self._link.sendall(packed(Setup(local.about, local.limits, key, grace, log_requests)))
        self._far_end = EngineEnd(local, self._link)
        self._far_end.ready.wait()
        self._check()

    def stop(self, now: bool = False) -> None:
        """No more requests; running answers may end within `grace`, or not at all."""
        self._stopping = True
        self._far_end.stop(now)
        threading.Thread(target=self._local.service.close, args=(0.0 if now else self._grace,)).start()

    def wait(self) -> None:
        """Until it was stopped, and the last client has its answer."""
        self._far_end.gone.wait()
        self._check()

    def _check(self) -> None:
        if self._far_end.gone.is_set() and not self._stopping:
            code = self._process.wait(PATIENCE)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise SlipstreamError(f"the process that speaks HTTP {how}: the server ends; start it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # if it is still there, it ends
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._link.close()


@contextmanager
def until_signals(front: Front) -> Iterator[None]:
    """SIGTERM and SIGINT stop it; a second SIGINT leaves running answers no time."""
    stopping = False

    def stop(sig: int, _: Any) -> None:
        nonlocal stopping
        front.stop(now=stopping and sig == signal.SIGINT)
        stopping = True

    before = {sig: signal.signal(sig, stop) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
