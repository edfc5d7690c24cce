"""The HTTP process: python -m slipstream.server.front SOCKET LINK, started by `run.Front`.

It reads requests and writes answers; the model is at the other end of the link. It imports neither torch nor
transformers, so it is ready long before the model is loaded. It ends when the model's process does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn

from slipstream.server.api import Api
from slipstream.server.link import one_message
from slipstream.server.remote import Remote

SLACK = 2  # seconds after the last answer, in which clients may still read it


class Front(uvicorn.Server):
    def __init__(self, link: socket.socket) -> None:
        setup = one_message(link)
        if setup is None:  # the model could not be loaded; its process reports why
            sys.exit()
        self.remote = Remote(link, setup.about, self.stop, self.lost)
        api = Api(self.remote, setup.limits, setup.key)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await api.app(scope, receive, send)
            except asyncio.CancelledError:  # at shutdown, a client that has not read its answer in time
                if scope["type"] == "lifespan":
                    raise

        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=setup.log_requests,
                timeout_graceful_shutdown=math.ceil(setup.grace) + SLACK,
                server_header=False,
            )
        )
        if setup.log_requests:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            print(
                f"can't listen: {error.strerror}. Another server took the port meanwhile", file=sys.stderr, flush=True
            )
            os._exit(1)
        self.remote.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ignore signals: the model's process handles them, and stops this one by a message."""

    def stop(self, now: bool) -> None:
        self.should_exit, self.force_exit = True, now

    def lost(self) -> None:
        print("the process with the model is gone: the server ends", file=sys.stderr, flush=True)
        os._exit(1)  # without the model, open requests can't be answered


def main() -> None:
    listening, link = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    Front(link).run(sockets=[listening])


if __name__ == "__main__":
    main()
