"""Checks of every HTTP request before it is handled: the API key, and the size of its body."""

from __future__ import annotations

import hmac
from typing import Any

from slipstream.server.errors import Refused
from slipstream.server.http_errors import error_response

OPEN = ("/health", "/", "/live.css", "/live.js", "/favicon.ico")  # need no key


class Guard:
    """Refuses requests without the API key."""

    def __init__(self, app: Any, key: bytes) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Not the path of `Request.url`, which depends on the Host header that the client sends.
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self.key):
                message = "this server needs an API key: send it as 'Authorization: Bearer …'"
                await error_response(Refused(401, message, code="invalid_api_key"))(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too large, by their announced length or while they arrive."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = Refused(413, f"the body has more than the {self.most} bytes that this server reads")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most:
            await error_response(refused)(scope, receive, send)
            return
        read = 0

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                raise refused
            return message

        await self.app(scope, counted, send)
