"""Runs a server until a signal ends it."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from slipstream.errors import OptionError
from slipstream.server.app import Server

SLACK = 2  # seconds in which clients may still read what was written, after the last answer


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


def run(server: Server, sock: socket.socket, grace: float, log_requests: bool = False) -> None:
    """Until SIGTERM or SIGINT; then running answers have so many seconds to end in, a second SIGINT gives them none."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await server.app(scope, receive, send)
        except asyncio.CancelledError:  # a client that reads too slowly to wait for
            if scope["type"] == "lifespan":
                raise

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=log_requests,
        timeout_graceful_shutdown=math.ceil(grace) + SLACK,
        server_header=False,
    )
    Running(config, server, grace).run(sockets=[sock])


class Running(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, server: Server, grace: float) -> None:
        super().__init__(config)
        self.server, self.grace = server, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Uvicorn's own raises the signal once more at the end; here an orderly end is a success."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self.server.service.close, self.grace))
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(self.server.service.close)
        await closing
