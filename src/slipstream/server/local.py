"""A backend with the model in this process: a service, whose requests are made from bodies, and chunks from updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from time import monotonic, time
from typing import Any

from slipstream.jobs import Job, Update, Wakes
from slipstream.llm import LLM
from slipstream.request import Request
from slipstream.sequence import TokenLogprobs
from slipstream.server import schema as s
from slipstream.server.asking import Asking, SourceWatch
from slipstream.server.backend import About, Answers, Asked, Chunk, Limits, Logprob, Question, Spelled, State
from slipstream.server.errors import logged_refusal
from slipstream.service import Service
from slipstream.text import token_bytes


class Call:
    """A call of an endpoint, and the jobs of its answers. It may be cancelled at any time, even before it has jobs."""

    def __init__(self, deliver: Callable[[int, Update], None], mailbox: Wakes) -> None:
        """deliver: called by the service's thread with an answer's index and an update; then the mailbox is woken."""
        self.jobs: list[Job] = []
        self.requests: Sequence[Request] = ()
        self._deliver, self._mailbox = deliver, mailbox
        self._service: Service | None = None
        self._cancelled = False
        self._reported: dict[int, int] = {}  # tokens whose drafter was reported, by answer
        self._ended = 0

    def submit(self, service: Service, requests: Sequence[Request], body: s.Sampled, seconds: float) -> None:
        self._service, self.requests, deadline = service, requests, monotonic() + seconds
        try:
            self.jobs = [
                Job(request, partial(self._deliver, i), body.priority, deadline, body.stream, mailbox=self._mailbox)
                for i, request in enumerate(requests)
            ]
            service.submit_all(self.jobs)
        except BaseException:
            self.cancel()
            raise
        if self._cancelled:  # it was cancelled while its prompt was tokenised
            self.cancel()

    @property
    def over(self) -> bool:
        """Whether `chunk` has made the last chunk of each answer."""
        return self._ended >= len(self.requests)

    def cancel(self) -> None:
        """Safe from any thread."""
        self._cancelled = True
        for job in list(self.jobs):
            if not job.over and self._service is not None:
                self._service.cancel(job)

    def chunk(self, number: int, update: Update, decode: Callable[[int], Spelled]) -> Chunk:
        """The chunk of an update. The updates of an answer must come in order."""
        watch = self.requests[number].watch
        self._ended += update.finish is not None
        names: list[str | None] = []
        if isinstance(watch, SourceWatch):
            reported = self._reported.get(number, 0)
            self._reported[number] = reported + len(update.ends)
            names = watch.names[reported : reported + len(update.ends)]
            names += [None] * (len(update.ends) - len(names))
        return Chunk(
            update.text,
            [with_text(each, decode) for each in update.logprobs],
            list(zip(update.ends, names, strict=True)) if names else [],
            update.finish,
            None if update.error is None else logged_refusal(update.error, "an answer"),
            None if update.sequence is None else update.sequence.stats,
        )


class Local:
    """The backend in the model's process. HTTP uses it directly, or from another process by way of `EngineEnd`."""

    def __init__(self, llm: LLM, name: str, limits: Limits | None = None) -> None:
        """name: what clients call the model."""
        self.llm, self.limits = llm, limits or Limits()
        self.service = Service(llm.engine, self.limits.waiting)
        self.asking = Asking(llm, self.limits)
        target = llm.target
        dtype = str(target.dtype).removeprefix("torch.")
        self.about = About(name, target.context, target.vocabulary, llm.engine.name, str(target.device), dtype, time())
        self.decode = lru_cache(1 << 16)(self._decode)  # thousands of calls for an answer with alternatives
        self._tokenising = ThreadPoolExecutor(1, "tokenising")
        self._asides = ThreadPoolExecutor(2, "aside")  # two, so that loading heads does not delay the rest

    # ---- from any thread; the futures raise errors as `Refused`

    def submit(self, call: Call, body: s.Sampled) -> Future[Asked]:
        return self._tokenising.submit(self._refusing, self._submit, call, body)

    def look(self, what: Question, given: Any = None) -> Future[Any]:
        tokens: dict[Question, Callable[[Any], Any]] = {"tokens": self.asking.tokens, "text": self.llm.tokenizer.decode}
        if what in tokens:
            return self._tokenising.submit(self._refusing, tokens[what], given)
        others: dict[Question, Callable[[], Any]] = {"state": self.state, "reload_heads": self._reload_heads}
        return self._asides.submit(self._refusing, others[what])

    def state(self) -> State:
        service = self.service
        jobs = [*service.running, *service.reading]
        most, pages = service.engine.max_batch, service.engine.target.filled
        filled = len(jobs) / most if pages is None else pages
        return State(service.so_far(), [summary(job) for job in jobs], service.waiting(), most, filled)

    def shut(self, within: float = 0.0) -> None:
        """Take no more requests. Running answers may end within so many seconds."""
        self.service.close(within)
        self._tokenising.shutdown(cancel_futures=True)
        self._asides.shutdown(cancel_futures=True)

    # ---- `Backend`, for an event loop

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        await asyncio.to_thread(self.shut)

    async def ask(self, body: s.Sampled) -> Answers:
        mailbox = self.service.mailbox(asyncio.get_running_loop())

        def take(number: int, update: Update) -> None:
            answers.take(number, call.chunk(number, update, self.decode))

        call = Call(lambda number, update: mailbox.put(partial(take, number), update), mailbox)
        answers = Answers(call.cancel)
        try:
            answers.begin(await asyncio.wrap_future(self.submit(call, body)))
        except BaseException:
            call.cancel()
            raise
        return answers

    async def find(self, what: Question, given: Any = None) -> Any:
        return await asyncio.wrap_future(self.look(what, given))

    # ---- in worker threads

    def _refusing(self, work: Callable[..., Any], *given: Any) -> Any:
        try:
            return work(*given)
        except Exception as error:
            raise logged_refusal(error, "a request") from error

    def _submit(self, call: Call, body: s.Sampled) -> Asked:
        asked, requests = self.asking(body)
        call.submit(self.service, requests, body, self.limits.seconds)
        return asked

    def _reload_heads(self) -> dict[str, Any]:
        return asdict(self.llm.reload_heads())

    def _decode(self, token: int) -> Spelled:
        """A token behind another one: some tokenizers leave out a text's first space."""
        tokenizer = self.llm.tokenizer
        one, two = (str(tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
        text = two[len(one) :] if two.startswith(one) else one
        return Spelled(text, token_bytes(tokenizer, token, text))


def with_text(given: TokenLogprobs, decode: Callable[[int], Spelled]) -> Logprob:
    return Logprob(decode(given.token), given.logprob, [(decode(token), value) for token, value in given.top.items()])


def summary(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {"id": f"{id(job):x}", "prompt_tokens": len(job.request.tokens)}
    stats = job.sequence.stats if job.sequence is not None else None
    return found | {
        "state": "reading" if stats is None else "writing",
        "new_tokens": stats.new_tokens if stats else 0,
        "seconds": round(stats.seconds, 3) if stats else 0.0,
        "steps": stats.steps if stats else 0,
        "tokens_per_step": round(stats.tokens_per_step, 3) if stats else 0.0,
        "by_source": dict(stats.by_source) if stats else {},
    }
