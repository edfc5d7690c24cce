"""Errors for clients: one type with HTTP status and message, which can be sent from one process to the other."""

from __future__ import annotations

import logging
from typing import Any

from slipstream.errors import BusyError, ContextError, ModelError, SlipstreamError

log = logging.getLogger("slipstream.server")


class Refused(Exception):
    """An error that a client gets instead of an answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)  # all arguments, which unpickling needs
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """OpenAI's error object. Half surrogate pairs, which a message may quote, can't be encoded and are replaced."""
        message, param = (
            None if t is None else t.encode(errors="replace").decode() for t in (self.message, self.param)
        )
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def refusal(error: Exception) -> Refused:
    """The error that a client gets for an exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BusyError):
        return Refused(429, str(error), code="too_many_waiting")
    if isinstance(error, ContextError):
        return Refused(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, ModelError):
        return Refused(503, str(error))
    if isinstance(error, SlipstreamError):
        return Refused(400, str(error))
    return Refused(500, "the answer failed; the server's log says why")


def logged_refusal(error: Exception, what: str) -> Refused:
    """The error that a client gets. The details of an unexpected one are logged, and not sent."""
    found = refusal(error)
    if found.status == 500:
        log.error("%s failed", what, exc_info=error)
    return found
