"""OpenAI's API over HTTP. The model is behind a backend: in this process, or in another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from slipstream.colours import COLOURS, OTHERS, colour
from slipstream.server import bodies, metrics
from slipstream.server import schema as s
from slipstream.server.backend import Answers, Backend, Chunk, Limits, State
from slipstream.server.errors import Refused, logged_refusal
from slipstream.server.http_errors import ErrorBody, error_response, invalid
from slipstream.server.middleware import BodyLimit, Guard
from slipstream.trace.page import part
from slipstream.version import __version__

PAGE = {"": ("live.html", "text/html"), "live.css": ("live.css", "text/css"), "live.js": ("live.js", "text/javascript")}
COMMON = {"live.css": "tokens.css", "live.js": "tokens.js"}  # put in front: shared with a trace's page
SAFE = {"Content-Security-Policy": "default-src 'self'", "X-Content-Type-Options": "nosniff"}
UNFINISHED = ("failed", "cancelled", "timeout")  # ends of answers that are not whole


class Api:
    """`app` is what an ASGI server runs."""

    def __init__(self, backend: Backend, limits: Limits, key: str | None = None) -> None:
        """key: the API key that clients must send, or None."""
        self.backend = backend
        self.app = FastAPI(
            title="slipstream",
            version=__version__,
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
            responses={"default": {"model": ErrorBody, "description": "What was wrong"}},
        )
        self.app.add_exception_handler(RequestValidationError, self._invalid)
        self.app.add_exception_handler(Refused, self._refused)
        self.app.add_exception_handler(HTTPException, self._http)
        self.app.add_exception_handler(Exception, self._failed)
        self._routes()
        self.app.add_middleware(BodyLimit, most=limits.body)
        if key is not None:
            self.app.add_middleware(Guard, key=key.encode(errors="surrogateescape"))

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        await self.backend.open()
        try:
            yield
        finally:
            await self.backend.close()

    # ---- routes

    def _routes(self) -> None:
        app = self.app
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/responses")(self.responses)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.post("/heads/reload")(self.reload_heads)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        app.get("/live")(self.live)
        for path, (file, kind) in PAGE.items():
            text = files("slipstream.server").joinpath(file).read_text("utf-8")
            if file in COMMON:
                text = f"{part(COMMON[file])}\n{text}"
            app.add_route(f"/{path}", part_of_page(text, kind), include_in_schema=False)

    async def chat(self, body: s.ChatRequest, http: Request) -> Any:
        return await self._answer(body, http, bodies.Chat(self._named(body.model), body))

    async def completions(self, body: s.CompletionRequest, http: Request) -> Any:
        return await self._answer(body, http, bodies.Completion(self._named(body.model), body))

    async def responses(self, body: s.ResponseRequest, http: Request) -> Any:
        return await self._answer(body, http, bodies.Response(self._named(body.model), body))

    async def models(self) -> Any:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Any:
        self._named(name)
        return self._model()

    async def tokenize(self, body: s.TokenizeRequest) -> Any:
        self._named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "give prompt or messages", "prompt", "missing_required_parameter")
        tokens = await self.backend.find("tokens", body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.backend.about.context}

    async def detokenize(self, body: s.DetokenizeRequest) -> Any:
        self._named(body.model)
        last = self.backend.about.vocabulary - 1
        if bad := [token for token in body.tokens if token > last]:
            raise Refused(400, f"tokens name {bad[:5]}: ids lie in 0..{last}", "tokens", "invalid_value")
        return {"prompt": await self.backend.find("text", body.tokens)}

    async def reload_heads(self) -> Any:
        """Load newly registered heads. Clients can't name a folder: heads are registered on the server's machine."""
        return await self.backend.find("reload_heads")

    async def health(self) -> Any:
        return {"status": "ok"}

    async def metrics(self) -> Response:
        text = metrics.exposition(await self.backend.find("state"))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def live(self) -> Any:
        """The state that the page shows."""
        about = self.backend.about
        state: State = await self.backend.find("state")
        counts = state.counts
        return {
            "model": about.name,
            "drafter": about.drafter,
            "device": about.device,
            "dtype": about.dtype,
            "running": state.running,
            "waiting": state.waiting,
            "max_batch": state.max_batch,
            "cache": {"used": round(state.filled, 4)},
            "totals": {
                "requests": counts.requests,
                "finished": sum(times for reason, times in counts.ended.items() if reason not in UNFINISHED),
                "failed": counts.ended.get("failed", 0),
                "cancelled": counts.ended.get("cancelled", 0),
                "timeout": counts.ended.get("timeout", 0),
                "prompt_tokens": counts.prompt_tokens,
                "new_tokens": counts.new_tokens,
                "steps": counts.steps,
                "seconds": time() - about.started,
                "by_source": counts.by_source,
            },
            "colours": {name: light_dark(name) for name in [*COLOURS, *counts.by_source]},
        }

    # ---- answering

    async def _answer(self, body: s.Sampled, http: Request, made: Any) -> Any:
        answers = await self.backend.ask(body)
        choices = [bodies.Choice(i, answers.asked, body.stream) for i in range(answers.asked.count)]
        if body.stream:
            return EventStream(safely(made.events(by_choice(choices, answers), choices)), answers)
        await unless_client_leaves(http, take_all(by_choice(choices, answers)), answers)
        return JSONResponse(made.answer(choices))

    def _named(self, model: str | None) -> str:
        own = self.backend.about.name
        if model is not None and model != own:
            raise Refused(404, f"there is no model {model!r} here: {own!r} is served", "model", "model_not_found")
        return own

    def _model(self) -> dict[str, Any]:
        about = self.backend.about
        found = {"id": about.name, "object": "model", "created": int(about.started), "owned_by": "slipstream"}
        return {**found, "max_model_len": about.context}

    # ---- exception handlers

    async def _invalid(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(invalid(error))

    async def _refused(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return error_response(error)

    async def _http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, Refused):  # raised by `BodyLimit` while the body was read
            return error_response(error.__cause__)
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        response = error_response(Refused(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    async def _failed(self, _: Request, error: Exception) -> Response:
        return error_response(logged_refusal(error, "a request"))


class EventStream(StreamingResponse):
    """A response of events. However it ends, its answers are closed, even if the client left before the first event."""

    def __init__(self, events: AsyncIterator[str], answers: Answers) -> None:
        # X-Accel-Buffering: a proxy in front of this server is to pass events on at once.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answers.close()


async def by_choice(choices: Sequence[bodies.Choice], answers: Answers) -> AsyncIterator[tuple[bodies.Choice, Chunk]]:
    """Each chunk with its choice. Raises if an answer was refused or cancelled, or took too long."""
    async for number, chunk in answers:
        if chunk.refused is not None:
            raise chunk.refused
        if chunk.finish == "timeout":
            raise Refused(504, "the answer took longer than this server allows: ask for fewer tokens")
        if chunk.finish == "cancelled":
            raise Refused(503, "this server is shutting down")
        yield choices[number], chunk


async def take_all(chunks: AsyncIterator[tuple[bodies.Choice, Chunk]]) -> None:
    async for choice, chunk in chunks:
        choice.take(chunk)


async def safely(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events of a stream. An error becomes an event too, since the HTTP status was already sent."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield bodies.event(logged_refusal(error, "a stream").body())
        yield bodies.DONE


async def unless_client_leaves(http: Request, work: Any, answers: Answers) -> None:
    """Await the work. If the client disconnects first, stop it and end its answers."""
    task = asyncio.create_task(work)

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client left")
        await task
    finally:
        watching.cancel()
        task.cancel()
        answers.close()


def part_of_page(text: str, kind: str) -> Callable[[Request], Response]:
    def sent(_: Request) -> Response:
        return Response(text, media_type=kind, headers=SAFE)

    return sent


def light_dark(name: str) -> str:
    """A drafter's colour in CSS, for light and dark screens."""
    variable = colour(name).removeprefix("--of-")
    light, dark = COLOURS[variable] if variable in COLOURS else OTHERS[int(variable.removeprefix("other"))]
    return f"light-dark({light}, {dark})"
