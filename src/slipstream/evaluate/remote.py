"""A client for a server of OpenAI's API: find the server's models, and time one streamed chat.

HTTP/1.1 with asyncio only, since a load generator needs a connection per request and the time of each event.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any
from urllib.parse import quote, urlsplit

from slipstream.errors import OptionError

PATIENCE = 300.0  # seconds that an answer may take
MOST = 1 << 31  # larger counts from a server are ignored
Clock = Callable[[], float]
Body = dict[str, Any]


@dataclass(frozen=True)
class Server:
    """A server's address and model."""

    host: str
    port: int
    secure: bool
    path: str  # in front of /v1
    key: str | None = None
    model: str = ""
    ours: bool = False  # a slipstream server: it reports tokens per step

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.secure}://{host}:{self.port}{self.path}"


@dataclass
class Outcome:
    """The outcome of a request. All times are of one clock, in seconds."""

    due: float  # when it was to be sent, so that waiting in this process counts as well
    sent: float
    first: float | None = None  # token
    last: float | None = None
    tokens: int = 0
    steps: float | None = None  # that the server took
    ended: str = "failed"  # or answered, or refused (status 429)
    why: str = "the answer has no end"  # reason of a failure


# ---- one request


def chat(server: Server, prompt: str, max_new_tokens: int) -> Body:
    body: Body = {"model": server.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    body |= {"max_tokens": max_new_tokens, "stream": True, "stream_options": {"include_usage": True}}
    return body | ({"slipstream": {"stats": True}} if server.ours else {})  # other servers may refuse unknown fields


async def ask(server: Server, body: Body, due: float, clock: Clock = perf_counter) -> Outcome:
    """Send a request and read the answer. Errors become part of the outcome."""
    found = Outcome(due, sent=clock())
    try:
        async with asyncio.timeout(PATIENCE), exchange(server, "chat/completions", body) as (status, pieces):
            if status == 429:
                found.ended = "refused"
            elif status != 200:
                found.why = f"status {status}{message_of(b''.join([piece async for piece in pieces]))}"
            else:
                await listen(found, pieces, clock)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        found.ended, found.why = "failed", reason(error)
    return found


async def listen(found: Outcome, pieces: AsyncIterator[bytes], clock: Clock) -> None:
    texts, usage, per_step = 0, None, None
    count: float
    async for data in events(pieces):
        if data == b"[DONE]":
            found.ended = "answered"
            break
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError("an event that is no object")
        if chunk.get("error"):
            found.ended, found.why = "failed", "an error instead of the rest"
            return
        match chunk:
            case {"choices": [{"delta": Mapping() as delta}, *_]} if any(v for k, v in delta.items() if k != "role"):
                found.last = clock()
                found.first = found.last if found.first is None else found.first
                texts += 1
        match chunk:
            case {"choices": [{"finish_reason": str()}, *_]}:
                found.ended = "answered"
        match chunk:
            case {"usage": {"completion_tokens": int() as count}} if 0 <= count < MOST:
                usage = count
        match chunk:
            case {"slipstream": {"stats": {"tokens_per_step": int() | float() as count}}} if 0 < count < MOST:
                per_step = count
    found.tokens = texts if usage is None else usage  # without usage, each event counts as a token
    found.steps = found.tokens / per_step if per_step else None


def message_of(body: bytes) -> str:
    """The message in the body of a refusal."""
    try:
        match json.loads(body):
            case {"error": {"message": str(message)}}:
                return f": {message[:200]}"
    except (ValueError, RecursionError):
        pass
    return ""


def reason(error: BaseException) -> str:
    match error:
        case TimeoutError():
            return f"no end within {PATIENCE:g} s"
        case ConnectionResetError() | BrokenPipeError() | EOFError():
            return "the connection was cut"
        case ConnectionRefusedError():
            return "the connection was refused"
        case OSError():
            return error.strerror or str(error)
    return "an answer that can't be read"


# ---- HTTP


@asynccontextmanager
async def exchange(
    server: Server, path: str, body: Body | None = None
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """The status and the body of an answer, on a new connection."""
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=tls() if server.secure else None)
    try:
        sent = b"" if body is None else json.dumps(body).encode()
        head = [f"{'GET' if body is None else 'POST'} {server.path}/v1/{path} HTTP/1.1"]
        head += [f"Host: {server.url.split('/')[2]}", "Connection: close", "Content-Type: application/json"]
        head += [f"Content-Length: {len(sent)}"] + ([f"Authorization: Bearer {server.key}"] if server.key else [])
        writer.write("\r\n".join([*head, "\r\n"]).encode() + sent)
        await writer.drain()
        version, status, *_ = [*(await line(reader)).split(), b"", b""]
        if not version.startswith(b"HTTP/1."):
            raise ValueError("no HTTP")
        headers = {}
        while field := (await line(reader)).strip():
            name, _, value = field.partition(b":")
            headers[name.lower()] = value.strip().lower()
        yield int(status), content(reader, headers)
    finally:
        writer.transport.abort()  # at once, so that a server that is still writing notices


async def line(reader: asyncio.StreamReader) -> bytes:
    found = await reader.readline()
    if not found.endswith(b"\n"):
        raise EOFError
    return found


async def content(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        while size := int((await line(reader)).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await line(reader)
    elif length := headers.get(b"content-length"):
        yield await reader.readexactly(int(length))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, which pieces may cut anywhere."""
    rest, data = b"", list[bytes]()
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for each in lines:
            name, _, value = each.rstrip(b"\r").partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif not name and not value and data:  # a blank line ends an event; a line that begins with : is a comment
                yield b"\n".join(data)
                data = []


@cache
def tls() -> ssl.SSLContext:
    return ssl.create_default_context()


# ---- finding a server


def find(url: str, key: str | None = None, model: str | None = None) -> Server:
    """The server at this address, with the named model or its first one."""
    try:
        parts = urlsplit(url)
        secure, port = parts.scheme == "https", parts.port
    except ValueError as error:
        raise OptionError(f"--serve {url!r} is no address ({error}): give one such as http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(f"--serve {url!r} is no address: give one such as http://127.0.0.1:8000")
    path = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%")
    server = Server(parts.hostname, port or (443 if secure else 80), secure, path, key and key.strip())
    return asyncio.run(_find(server, model))


async def _find(server: Server, model: str | None) -> Server:
    no_api = f"{server.url} is no server of OpenAI's API"
    try:
        async with asyncio.timeout(10), exchange(server, "models") as (status, pieces):
            body = b"".join([piece async for piece in pieces])
    except (OSError, EOFError) as error:
        why = "for 10 s" if isinstance(error, TimeoutError) else reason(error)
        raise OptionError(
            f"{server.url} does not answer ({why}): start a server, as with `slipstream serve`, or name another address"
        ) from error
    except ValueError as error:
        raise OptionError(f"{no_api}: what it answers is not HTTP") from error
    if status in (401, 403):
        raise OptionError(f"{server.url} refuses this API key (status {status}): set SLIPSTREAM_API_KEY to its own")
    try:
        found = json.loads(body)["data"] if status == 200 else None
        owners = {each["id"]: each.get("owned_by") for each in found or ()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{no_api}: /v1/models gives no list of models") from error
    if not owners:
        raise OptionError(f"{no_api}, or it serves no model: /v1/models has status {status}{message_of(body)}")
    if model is not None and model not in owners:
        raise OptionError(f"--model {model!r} is not served at {server.url}: there are {', '.join(map(str, owners))}")
    chosen = model or next(iter(owners))
    return replace(server, model=str(chosen), ours=owners[chosen] == "slipstream")
