"""Errors as OpenAI's clients know them: a status, and an object that says what was wrong and with which field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from slipstream.errors import BusyError, ContextError, ModelError, SlipstreamError

# Parts of a place that name no field but which of several kinds was tried: str, list[str], function-…, NamedTool.
KIND = re.compile(r"(str|int|float|bool|none|function-.*|\w+\[.*|[A-Z]\w+)$")


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None  # the field that was wrong
    code: str | None


class ErrorBody(BaseModel):
    """How everything that is not answered is told, for /openapi.json."""

    error: ErrorObject


class Refused(Exception):
    """An answer that is not given."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Half a surrogate pair, which a message may quote, can't be sent."""
        message, param = (
            None if t is None else t.encode(errors="replace").decode() for t in (self.message, self.param)
        )
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
        return JSONResponse(self.body(), self.status, headers.get(self.status))


def refusal(error: Exception) -> Refused:
    """What a client is told of whatever went wrong."""
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


def invalid(error: RequestValidationError) -> Refused:
    """The first field that is wrong, in words: of one that may be of several kinds, what is wrong with its own."""
    found: Sequence[Mapping[str, Any]] = error.errors()
    same = [each for each in found if each["loc"][:2] == found[0]["loc"][:2]]
    first = next((each for each in same if not each["type"].endswith("_type")), found[0])
    place = [str(part) for part in first["loc"] if part != "body" and not KIND.match(str(part))]
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return Refused(400, f"{param} is not supported by this server", param, "unsupported_parameter")
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "missing":
        return Refused(
            400, f"{param} is missing" if param else "the body is missing", param, "missing_required_parameter"
        )
    said = str(first["msg"]).removeprefix("Value error, ")
    return Refused(400, f"{param}: {said}" if param else said, param, "invalid_value")
