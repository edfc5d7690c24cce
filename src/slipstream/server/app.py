"""The server: OpenAI's API over HTTP, on one service."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from importlib.resources import files
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from slipstream.answers import Updates
from slipstream.colours import COLOURS, OTHERS, colour
from slipstream.errors import SlipstreamError
from slipstream.jobs import Update
from slipstream.llm import LLM
from slipstream.server import bodies, metrics
from slipstream.server import schema as s
from slipstream.server.asking import Asked, Asking, Limits, as_message
from slipstream.server.errors import ErrorBody, Refused, invalid, refusal
from slipstream.service import Service
from slipstream.trace.page import part
from slipstream.version import __version__

log = logging.getLogger("slipstream.server")

PAGE = {"": ("live.html", "text/html"), "live.css": ("live.css", "text/css"), "live.js": ("live.js", "text/javascript")}
COMMON = {"live.css": "tokens.css", "live.js": "tokens.js"}  # what stands before: shared with the page of a trace
OPEN = ("/health", "/", "/live.css", "/live.js", "/favicon.ico")  # for everybody, whatever the key
SAFE = {"Content-Security-Policy": "default-src 'self'", "X-Content-Type-Options": "nosniff"}


class Server:
    """A model behind the API. `app` is what an ASGI server runs."""

    def __init__(self, llm: LLM, name: str, limits: Limits | None = None, key: str | None = None) -> None:
        """name: what clients call the model. key: what they must know, if anything."""
        self.llm, self.name, self.limits, self.key = llm, name, limits or Limits(), key
        self.service = Service(llm.engine, self.limits.waiting)
        self.asking = Asking(llm, self.limits)
        self.started = int(time())
        self._beside = ThreadPoolExecutor(1, "tokenising")
        self._decode = lru_cache(1 << 16)(self._decoded)  # with alternatives, thousands for one answer
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
        self.app.add_exception_handler(SlipstreamError, self._refused)
        self.app.add_exception_handler(HTTPException, self._http)
        self.app.add_exception_handler(Exception, self._failed)
        self._routes()
        self.app.add_middleware(BodyLimit, most=self.limits.body)
        if key is not None:
            self.app.add_middleware(Guard, key=key.encode(errors="surrogateescape"))

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self.service.close)
            self._beside.shutdown()

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
            page = partial(Response, text, media_type=kind, headers=SAFE)
            app.get(f"/{path}", include_in_schema=False)(lambda page=page: page())

    async def chat(self, body: s.ChatRequest, http: Request) -> Any:
        made = bodies.Chat(self._named(body.model), body, self._decode)
        return await self._answer(body, http, partial(self.asking.chat, body), made)

    async def completions(self, body: s.CompletionRequest, http: Request) -> Any:
        made = bodies.Completion(self._named(body.model), body, self._decode)
        return await self._answer(body, http, partial(self.asking.completion, body), made)

    async def responses(self, body: s.ResponseRequest, http: Request) -> Any:
        made = bodies.Response(self._named(body.model), body)
        return await self._answer(body, http, partial(self.asking.response, body), made)

    async def models(self) -> Any:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Any:
        self._named(name)
        return self._model()

    async def tokenize(self, body: s.TokenizeRequest) -> Any:
        self._named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "give prompt or messages", "prompt", "missing_required_parameter")
        tokens = await self._aside(partial(self._tokens, body))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.llm.target.context}

    async def detokenize(self, body: s.DetokenizeRequest) -> Any:
        self._named(body.model)
        last = self.llm.target.vocabulary - 1
        if bad := [token for token in body.tokens if token > last]:
            raise Refused(400, f"tokens name {bad[:5]}: ids lie in 0..{last}", "tokens", "invalid_value")
        return {"prompt": await self._aside(partial(self.llm.tokenizer.decode, body.tokens))}

    async def reload_heads(self) -> Any:
        """It takes no folder: what may draft is decided by whoever registers heads on this machine."""
        return asdict(await asyncio.to_thread(self.llm.reload_heads))

    async def health(self) -> Any:
        return {"status": "ok"}

    async def metrics(self) -> Response:
        return PlainTextResponse(metrics.exposition(self.service), media_type="text/plain; version=0.0.4")

    async def live(self) -> Any:
        """What the page shows."""
        service, counts = self.service, self.service.so_far()
        jobs = [*service.running, *service.reading]
        return {
            "model": self.name,
            "drafter": self.llm.engine.name,
            "device": str(self.llm.target.device),
            "dtype": str(self.llm.target.dtype).removeprefix("torch."),
            "running": [job_summary(job) for job in jobs],
            "waiting": service.waiting(),
            "max_batch": self.llm.engine.max_batch,
            "cache": {"used": len(jobs), "total": self.llm.engine.max_batch},
            "totals": {
                "requests": counts.requests,
                "finished": sum(counts.ended.values()),
                "failed": counts.ended.get("failed", 0),
                "cancelled": counts.ended.get("cancelled", 0),
                "prompt_tokens": counts.prompt_tokens,
                "new_tokens": counts.new_tokens,
                "steps": counts.steps,
                "seconds": time() - self.started,
                "by_source": counts.by_source,
            },
            "colours": {name: light_dark(name) for name in [*COLOURS, *counts.by_source]},
        }

    # ---- answering

    async def _answer(self, body: s.Sampled, http: Request, ask: Callable[[], Asked], made: Any) -> Any:
        asked = await self._aside(ask)
        choices = [bodies.Choice(i, asked) for i in range(len(asked.requests))]
        answers = Updates(
            self.service, *asked.requests, timeout=self.limits.seconds, priority=body.priority, streams=body.stream
        )
        if body.stream:
            return EventStream(safely(made.events(by_choice(choices, answers), choices)), answers)
        await unless_client_leaves(http, take_all(by_choice(choices, answers)), answers)
        return JSONResponse(made.answer(choices))

    async def _aside(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)

    def _tokens(self, body: s.TokenizeRequest) -> list[int]:
        if body.messages is not None:
            return self.asking.encode([as_message(m) for m in body.messages], [])
        return list(self.llm.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])

    def _named(self, model: str | None) -> str:
        if model is not None and model != self.name:
            raise Refused(404, f"there is no model {model!r} here: {self.name!r} is served", "model", "model_not_found")
        return self.name

    def _model(self) -> dict[str, Any]:
        found = {"id": self.name, "object": "model", "created": self.started, "owned_by": "slipstream"}
        return {**found, "max_model_len": self.llm.target.context}

    def _decoded(self, token: int) -> str:
        return str(self.llm.tokenizer.decode([token]))

    # ---- whom to answer, and with what

    async def _invalid(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return invalid(error).response()

    async def _refused(self, _: Request, error: Exception) -> Response:
        return refusal(error).response()

    async def _http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, Refused):  # what `BodyLimit` raised while the body was read
            return error.__cause__.response()
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        response = Refused(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    async def _failed(self, _: Request, error: Exception) -> Response:
        return logged_refusal(error, "a request").response()


class Guard:
    """Refuses those who don't know the key."""

    def __init__(self, app: Any, key: bytes) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Not `Request.url`, in which the client's Host has a say.
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self.key):
                message = "this server needs an API key: send it as 'Authorization: Bearer …'"
                await Refused(401, message, code="invalid_api_key").response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


class EventStream(StreamingResponse):
    """Its answers end with it, whatever ends it: a client may leave before anything of it was asked for."""

    def __init__(self, events: AsyncIterator[str], answers: Updates) -> None:
        # The last: a proxy before this server hands on what comes, instead of collecting it.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answers.close()


class BodyLimit:
    """Refuses bodies that are too large, before or while they come."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = Refused(413, f"the body has more than the {self.most} bytes that this server reads")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most:
            await refused.response()(scope, receive, send)
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


def logged_refusal(error: Exception, what: str) -> Refused:
    """What a client is told of an error. Of one that nobody foresaw, only the log has more."""
    found = refusal(error)
    if found.status == 500:
        log.error("%s failed", what, exc_info=error)
    return found


async def by_choice(choices: Sequence[bodies.Choice], answers: Updates) -> AsyncIterator[tuple[bodies.Choice, Update]]:
    """What is new, and of which answer. What ended without being one is raised."""
    async for number, update in answers:
        if update.error is not None:
            raise logged_refusal(update.error, "an answer")
        if update.finish == "timeout":
            raise Refused(504, "the answer took longer than this server allows: ask for fewer tokens")
        if update.finish == "cancelled":
            raise Refused(503, "this server is shutting down")
        yield choices[number], update


async def take_all(updates: AsyncIterator[tuple[bodies.Choice, Update]]) -> None:
    async for choice, update in updates:
        choice.take(update)


async def safely(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream that fails says so in an event: its status was sent long ago."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield bodies.event(logged_refusal(error, "a stream").body())
        yield bodies.DONE


async def unless_client_leaves(http: Request, work: Any, answers: Updates) -> None:
    """Do that, unless the client leaves before: then its answers end."""
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


def job_summary(job: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"id": f"{id(job):x}", "prompt_tokens": len(job.request.tokens), "state": "reading"}
    stats = job.sequence.stats if job.sequence is not None else None
    return found | {
        "state": "reading" if stats is None else "writing",
        "new_tokens": stats.new_tokens if stats else 0,
        "seconds": round(stats.seconds, 3) if stats else 0.0,
        "steps": stats.steps if stats else 0,
        "tokens_per_step": round(stats.tokens_per_step, 3) if stats else 0.0,
        "by_source": dict(stats.by_source) if stats else {},
    }


def light_dark(name: str) -> str:
    """A drafter's colour on either screen."""
    variable = colour(name).removeprefix("--of-")
    light, dark = COLOURS[variable] if variable in COLOURS else OTHERS[int(variable.removeprefix("other"))]
    return f"light-dark({light}, {dark})"
