"""The part `offline` of bench/serving.py: a server against the engine without one."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Any

import numpy as np

import slipstream
from auto import interval
from callers import Callers
from gpu import settled
from serving_lab import asked, load_model, provenance, served, tell

BASE = "list"  # what the others are compared with


@dataclass(frozen=True)
class Load:
    """What each way is asked."""

    prompts: list[str]
    callers: int
    tokens: int
    collection: str

    def messages(self) -> list[list[dict[str, str]]]:
        return [[{"role": "user", "content": prompt}] for prompt in self.prompts]

    def options(self) -> dict[str, Any]:
        return {"max_new_tokens": self.tokens, "collection": self.collection}


Way = Callable[[Load], dict[str, Any]]


def by_list(llm: slipstream.LLM, load: Load) -> dict[str, Any]:
    """`generate` on all of them."""
    clock = perf_counter()
    results = llm.generate(load.messages(), **load.options())
    return told_by(results, perf_counter() - clock)


def by_service(llm: slipstream.LLM, load: Load) -> dict[str, Any]:
    """The service without HTTP: callers in an event loop of this process."""
    found, left = dict[int, Any](), iter(enumerate(load.messages()))

    async def caller() -> None:
        for i, messages in left:
            found[i] = await llm.agenerate(messages, **load.options())

    async def callers_at_once() -> None:
        await asyncio.gather(*(caller() for _ in range(load.callers)))

    clock = perf_counter()
    asyncio.run(callers_at_once())
    return told_by([found[i] for i in range(len(found))], perf_counter() - clock)


def told_by(results: list[Any], seconds: float) -> dict[str, Any]:
    tokens = sum(len(result.tokens) for result in results)
    return {"seconds": seconds, "texts": [result.text for result in results], "tokens": tokens}


def by_http(asking: Callers, stream: bool, load: Load) -> dict[str, Any]:
    how = {"max_tokens": load.tokens, "temperature": 0, "stream": stream, "collection": load.collection}
    found = asking.ask([{"messages": messages, **how} for messages in load.messages()], load.callers)
    answers = found["answers"]
    return {
        "seconds": found["seconds"],
        "texts": [answer["text"] for answer in answers],
        "tokens": sum(answer["tokens"] for answer in answers),
    }


def measured(way: Way, load: Load) -> dict[str, Any]:
    clock = process_time()
    return way(load) | {"cpu": process_time() - clock}


def offline(given: argparse.Namespace) -> dict[str, Any]:
    llm, rng, told = load_model(given), random.Random(given.seed), dict[str, Any]()
    with served(llm) as asking:
        ways: dict[str, Way] = {
            BASE: partial(by_list, llm),
            "service": partial(by_service, llm),
            "stream": partial(by_http, asking, True),
            "whole": partial(by_http, asking, False),
        }
        for callers in given.callers:
            llm.engine.max_batch = callers
            told[str(callers)] = compared(ways, given, callers, rng)
    return {"callers": told, "tokens": given.tokens, **provenance(llm)}


def compared(ways: dict[str, Way], given: argparse.Namespace, callers: int, rng: random.Random) -> dict[str, Any]:
    """All ways by turns, on prompts that nobody has read, none of them with what another one has said."""
    count = max(given.least, given.rounds * callers)
    prompts = asked(given, rng, count * (given.repeats + 1))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for repeat in range(given.repeats + 1):
        part = prompts[repeat :: given.repeats + 1]
        order = list(ways)[repeat % len(ways) :] + list(ways)[: repeat % len(ways)]
        for name in order:
            loads = (Load(part, callers, given.tokens, f"{name} {callers} {repeat} {i}") for i in itertools.count())
            # Not those in which steps were captured.
            runs[name].append(settled(lambda name=name, loads=loads: measured(ways[name], next(loads)))[0])
        if repeat == 0:  # whatever is done once
            for found in runs.values():
                found.clear()
            continue
        rates = {name: round(runs[name][-1]["tokens"] / runs[name][-1]["seconds"], 1) for name in ways}
        tell(f"{callers} callers, repeat {repeat}: {rates}")
    return summary(runs)


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    per_token = {name: np.array([[r["seconds"] / r["tokens"] for r in found]]) for name, found in runs.items()}
    for name, found in runs.items():
        same = sum(
            a == b
            for r, base in zip(found, runs[BASE], strict=True)
            for a, b in zip(r["texts"], base["texts"], strict=True)
        )
        told[name] = {
            "tokens_per_second": [round(r["tokens"] / r["seconds"], 2) for r in found],
            "cpu_us_per_token": round(1e6 * statistics.median(r["cpu"] / r["tokens"] for r in found), 1),
            "same_texts": [same, sum(len(r["texts"]) for r in found)],
        }
        if name != BASE:
            told[name]["over_list"] = interval(per_token[BASE], per_token[name])
            tell(f"  {name:8} {told[name]['over_list']} of the list's rate; {told[name]['cpu_us_per_token']} us/token")
    tell(f"  {BASE:8} {told[BASE]['cpu_us_per_token']} us/token")
    return told
