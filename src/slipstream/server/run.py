"""Runs a server until a signal ends it: the model in this process, and HTTP in another one that it starts.

A model on a fast GPU takes all the time of one Python interpreter, so HTTP has another.
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

if TYPE_CHECKING:  # it imports torch, which can wait until the HTTP process has been started
    from slipstream.server.local import Local

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
PATIENCE = 10  # seconds that the HTTP process may take to exit, once its link is closed


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
    """The HTTP process, as a context. It starts while the model is loaded, and has ended when the context is left."""

    def __init__(self, sock: socket.socket) -> None:
        """sock: bound, not listening yet. It is passed to the process and closed here."""
        self._link, theirs = socket.socketpair()
        with sock, theirs:
            files = sock.fileno(), theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.server.front", *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C in a terminal reaches this process alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the same modules as here
            )
        self._stopping = False

    def start(self, local: Local, key: str | None = None, grace: float = 0.0, log_requests: bool = False) -> None:
        """Returns when the server listens. key: the API key that clients must send, or None. grace: seconds that
        running answers have to end after `stop`."""
        from slipstream.server.engine_end import EngineEnd
        from slipstream.server.link import Setup, packed

        self._local, self._grace = local, grace
        with suppress(OSError):  # `_check` reports it if the process is gone
            self._link.sendall(packed(Setup(local.about, local.limits, key, grace, log_requests)))
        self._far_end = EngineEnd(local, self._link)
        self._far_end.ready.wait()
        self._check()

    def stop(self, now: bool = False) -> None:
        """Take no more requests. Running answers may end within `grace`; if `now`, they are cancelled."""
        self._stopping = True
        self._far_end.stop(now)
        threading.Thread(target=self._local.service.close, args=(0.0 if now else self._grace,)).start()

    def wait(self) -> None:
        """Wait until the process has ended, which it does after `stop` and the last answer."""
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
            self._link.shutdown(socket.SHUT_RDWR)  # ends the process, if it still runs
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._link.close()


@contextmanager
def until_signals(front: Front) -> Iterator[None]:
    """SIGTERM and SIGINT stop the server; a later SIGINT cancels the answers that still run."""
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
