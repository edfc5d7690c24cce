"""Answers: whole ones, and streams of text, for threads and for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from slipstream.engine import Engine
from slipstream.errors import ModelError, PromptError
from slipstream.jobs import Job, Update
from slipstream.merged import Merged
from slipstream.request import Request
from slipstream.sequence import Sequence as Running
from slipstream.sequence import TokenLogprobs
from slipstream.service import Service
from slipstream.stats import Stats
from slipstream.text import Detokenizer
from slipstream.trace.record import Recorder

CLOSED = "this LLM was closed before it could answer: make another"


@dataclass(frozen=True)
class Result:
    """One answer."""

    text: str  # without the stop string that ended it
    tokens: list[int]  # every emitted token, the one that ended it included
    finish_reason: str  # stop, length, cancelled
    stats: Stats
    seed: int  # seed and sample, passed again, draw the same answer
    sample: int = 0
    logprobs: list[TokenLogprobs] | None = None
    trace: list[dict[str, Any]] | None = None  # the lines of a trace file: see docs/trace-format.md

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "sample": self.sample,
            **({} if self.logprobs is None else {"logprobs": [asdict(entry) for entry in self.logprobs]}),
            "stats": self.stats.as_dict(),
        }


def result(sequence: Running) -> Result:
    text, watch = sequence.request.stop, sequence.request.watch
    return Result(
        text=text.finish() if isinstance(text, Detokenizer) else "",
        tokens=list(sequence.tokens),
        finish_reason=sequence.finish or "cancelled",
        stats=sequence.stats,
        seed=sequence.request.seed,
        sample=sequence.request.sample,
        logprobs=list(sequence.logprobs) if sequence.request.logprobs is not None else None,
        trace=watch.end(sequence) if isinstance(watch, Recorder) and sequence.finish else None,
    )


class Stream:
    """An answer as pieces of text, to be iterated over. Leaving the loop, or Ctrl-C in it, ends the generation;
    `result` keeps the text so far."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._running: Running | None = None
        self._steps: Iterator[Running] | None = None

    def __iter__(self) -> Iterator[str]:
        if self._steps is None:
            self._steps = self._begin()
        sent = 0
        try:
            for running in self._steps:
                self._running, text = running, running.request.stop
                assert isinstance(text, Detokenizer)
                now = text.visible() if running.finish is None else text.finish()
                if len(now) > sent:
                    yield now[sent:]
                    sent = len(now)
        finally:
            self.close()

    def _begin(self) -> Iterator[Running]:
        return self._engine.run([self._request])

    def cancel(self) -> None:
        """End the answer after the current step. Safe from another thread."""
        self._request.cancel()

    def close(self) -> None:
        """End the answer now, between two steps; `result` keeps the text so far. Leaving the loop calls this."""
        if self._steps is None:
            self._steps = iter(())
        elif isinstance(self._steps, Generator):
            self._steps.close()

    @property
    def stats(self) -> Stats | None:
        """The statistics so far; None if nothing was generated yet."""
        return self._running.stats if self._running else None

    @property
    def result(self) -> Result:
        """The answer so far."""
        if self._running is None:
            raise PromptError("nothing was generated yet: iterate over the stream first")
        return result(self._running)


class AsyncStream:
    """The same for an event loop: `async for` over pieces of text. Leaving the loop ends the answer."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self._running: Running | None = None
        self._cancelled = False
        self._begun = False  # the request is answered once, however often this is iterated over

    async def __aiter__(self) -> AsyncIterator[str]:
        if self._begun:
            return
        updates = Updates(self._service, self._request)
        self._begun = True
        async for _, update in updates:
            self._running = update.sequence
            if update.error is not None:
                raise update.error
            if update.finish is not None and update.sequence is None and not self._cancelled:
                raise ModelError(CLOSED)
            if update.text:
                yield update.text

    def cancel(self) -> None:
        """End the answer after the current step. Safe from another thread."""
        self._cancelled = True
        self._request.cancel()

    @property
    def result(self) -> Result:
        """The answer, once it has ended."""
        if self._running is None:
            raise PromptError("this answer has not ended: iterate over the stream first")
        return result(self._running)


class Updates(Merged[Update]):
    """The updates of several answers, for an event loop. The requests are submitted at once; then iterate over this."""

    def __init__(self, service: Service, *requests: Request, streams: bool = True) -> None:
        super().__init__(len(requests))
        self._service = service
        self.jobs: list[Job] = []
        mailbox = service.mailbox(asyncio.get_running_loop())
        try:
            for i, request in enumerate(requests):
                deliver = partial(mailbox.put, partial(self.take, i))
                self.jobs.append(service.submit(Job(request, deliver, streams=streams, mailbox=mailbox)))
        except BaseException:
            self.close()
            raise

    def _cancel(self) -> None:
        for job in self.jobs:
            if not job.over:
                self._service.cancel(job)


def together(service: Service, requests: Sequence[Request], offline: bool = False) -> list[Running]:
    """Answer the requests in the service's batch, beside those of other callers, and wait for all of them. offline: the
    time of a single answer does not matter (`Job.offline`)."""
    updates, coming = SimpleQueue[tuple[int, Update]](), enumerate(requests)
    jobs, ended = dict[int, Job](), dict[int, Running]()

    def submit(count: int) -> None:
        new = {}
        for i, request in islice(coming, count):
            deliver = lambda update, i=i: updates.put((i, update))  # noqa: E731
            new[i] = Job(request, deliver, streams=False, offline=offline)
        if new:  # else it may be closing already, which does not end what runs
            service.submit_all(new.values())
            jobs.update(new)

    try:
        # Not all at once, since the service searches its waiting requests; but enough to keep the batch full.
        submit(2 * service.engine.max_batch)
        while jobs:
            i, update = updates.get()
            del jobs[i]
            if update.error is not None:
                raise update.error
            if update.sequence is None:
                raise ModelError(CLOSED)
            ended[i] = update.sequence
            submit(1)
    except BaseException:
        for job in jobs.values():
            service.cancel(job)
        while jobs:  # wait until all have ended
            del jobs[updates.get()[0]]
        raise
    return [ended[i] for i in range(len(requests))]


async def answered(service: Service, request: Request) -> Result:
    """The whole answer, for an event loop."""
    async for _, update in Updates(service, request, streams=False):
        if update.error is not None:
            raise update.error
        if update.sequence is None:
            raise ModelError(CLOSED)
        return result(update.sequence)
    raise AssertionError("a stream ends with an update that says so")
