"""An open-loop load test of any server of OpenAI's API: requests arrive at random, independent of earlier answers.

In a closed loop, where each client waits for its answer, a slow server gets fewer requests, which hides how slow it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import isfinite
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.errors import OptionError
from slipstream.evaluate.remote import Body, Outcome, Server, ask, chat

Progress = Callable[[str, int, int], None]  # stage, done, of
Row = dict[str, Any]
MOST = 100_000  # requests at one rate


@dataclass(frozen=True)
class LoadPlan:
    """The prompts, rates and duration of a load test."""

    prompts: Sequence[str]
    rates: Sequence[float] = (0.5, 1.0, 2.0, 4.0)  # requests per second
    seconds: float = 30.0  # during which requests arrive, at each rate
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or not self.rates:
            raise OptionError("there is nothing to ask: give at least one prompt and one rate")
        for rate in self.rates:
            if not (isfinite(rate) and rate > 0):
                raise OptionError(f"rate {rate:g} is out of range: it is a number of requests per second above 0")
            if not 1 <= rate * self.seconds <= MOST:
                raise OptionError(
                    f"{rate:g} requests/s for {self.seconds:g} s are not between 1 and {MOST} requests: "
                    "change the seconds or the rate"
                )


def arrivals(rate: float, seconds: float, random: Random) -> list[float]:
    """Arrival times of a Poisson process."""
    times, now = [], random.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += random.expovariate(rate)
    return times


def measure(plan: LoadPlan, server: Server, progress: Progress) -> tuple[list[Row], str | None]:
    """A row per rate, and what is missing after Ctrl-C, which ends only the measurement."""
    rows: list[Row] = []
    try:
        asyncio.run(_measure(plan, server, progress, rows))
    except KeyboardInterrupt:
        return rows, f"interrupted after {len(rows)} of {len(plan.rates)} rates"
    return rows, None


async def _measure(plan: LoadPlan, server: Server, progress: Progress, rows: list[Row]) -> None:
    # A warm-up, for compilation and captures. If it is refused, all requests would be.
    first = await ask(server, chat(server, "Say hello.", 8), perf_counter())
    if first.why.startswith("status 4"):
        raise OptionError(f"{server.url} does not take a chat with {server.model} ({first.why})")
    # Prompts continue from rate to rate, since a server with a cache is faster on repeated prompts.
    order = Random(plan.seed).sample(plan.prompts, len(plan.prompts))
    bodies, asked = (chat(server, prompt, plan.max_new_tokens) for prompt in cycle(order)), 0
    for rate in plan.rates:
        times = arrivals(rate, plan.seconds, Random(plan.seed))
        outcomes, seconds = await offer(server, bodies, times, partial(progress, f"{rate:g} requests/s"))
        again = min(max(asked + len(times) - len(order), 0), len(times))
        rows.append({**summarise(rate, outcomes, seconds), "asked_before": again})
        asked += len(times)


async def offer(
    server: Server,
    bodies: Iterator[Body],
    times: Sequence[float],
    report: Callable[[int, int], None],
) -> tuple[list[Outcome], float]:
    """Send a request at each of these times, and wait for the last answer. Returns the outcomes and the seconds."""
    outcomes: list[Outcome] = []

    async def one(body: Body, due: float) -> None:
        outcomes.append(await ask(server, body, due))
        report(len(outcomes), len(times))

    start = perf_counter()
    async with asyncio.TaskGroup() as group:
        for time in times:
            await asyncio.sleep(start + time - perf_counter())
            group.create_task(one(next(bodies), start + time))
    return outcomes, perf_counter() - start


def summarise(rate: float, outcomes: Sequence[Outcome], seconds: float) -> Row:
    """The row of one rate. seconds: from the beginning to the end of the last answer."""
    answered = [o for o in outcomes if o.ended == "answered"]
    tokens = sum(o.tokens for o in answered)
    counted = [o for o in answered if o.steps]
    steps = sum(o.steps or 0 for o in counted)
    return {
        "rate": rate,
        "sent": len(outcomes),
        "answered": len(answered),
        "refused": sum(o.ended == "refused" for o in outcomes),
        "failed": sum(o.ended == "failed" for o in outcomes),
        "failures": dict(Counter(o.why for o in outcomes if o.ended == "failed").most_common()),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "first_token_ms": quantiles([o.first - o.due for o in answered if o.first is not None]),
        "per_token_ms": quantiles(
            [
                (o.last - o.first) / (o.tokens - 1)
                for o in answered
                if o.first is not None and o.last is not None and o.tokens > 1
            ]
        ),
        "tokens_per_step": sum(o.tokens for o in counted) / steps if steps else None,
        "late_ms": quantiles([o.sent - o.due for o in outcomes]),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The median and the 99th percentile, in milliseconds."""
    return {f"p{p}": 1e3 * float(np.percentile(seconds, p)) if seconds else None for p in (50, 99)}
