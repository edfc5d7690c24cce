"""Errors as HTTP responses: OpenAI's error object, headers, and messages about invalid bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from slipstream.server.errors import Refused

# Parts of an error's location that name no field, but a type of a union: str, list[str], function-…, NamedTool.
KIND = re.compile(r"(str|int|float|bool|none|function-.*|\w+\[.*|[A-Z]\w+)$")


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None  # the invalid field
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response, for /openapi.json."""

    error: ErrorObject


def error_response(refused: Refused) -> JSONResponse:
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(refused.body(), refused.status, headers.get(refused.status))


def invalid(error: RequestValidationError) -> Refused:
    """An error about the first invalid field. Of a union, what is wrong with the value goes before a wrong type."""
    found: Sequence[Mapping[str, Any]] = error.errors()
    same = [each for each in found if each["loc"][:2] == found[0]["loc"][:2]]
    first = next((each for each in same if not each["type"].endswith("_type")), found[0])
    *places, last = map(str, first["loc"])
    place = [part for part in places if part != "body" and not KIND.match(part)]
    if first["type"] == "extra_forbidden" or not (last == "body" or KIND.match(last)):
        place.append(last)
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return Refused(400, f"{param} is not supported by this server", param, "unsupported_parameter")
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "missing":
        return Refused(
            400, f"{param} is missing" if param else "the body is missing", param, "missing_required_parameter"
        )
    problem = str(first["msg"]).removeprefix("Value error, ")
    return Refused(400, f"{param}: {problem}" if param else problem, param, "invalid_value")
