"""Servers beside each other and the engine alone: python bench/serving.py NAME=URL… [--offline DRAFTER]

Callers ask one prompt after the other, greedy, streamed, by OpenAI's client; the same prompts of every server, and no
prompt twice. Servers take turns, one number of callers after the other, repeated. Told: tokens per second, time to the
first token and per token (medians), and whether texts are those of the first server. --offline: the same prompts to
`generate` in this process, as many at a time, with the drafter that is named.

A server is asked for its model's name, unless that follows the URL after a #. Tables go to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from time import perf_counter
from typing import Any

import openai

from slipstream.evaluate.workloads import builtin, read, select


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    clock, first, text, counted = perf_counter(), 0.0, "", 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or perf_counter() - clock
            text += chunk.choices[0].delta.content
    return {"text": text, "tokens": counted, "first": first, "seconds": perf_counter() - clock}


async def served(url: str, prompts: list[str], callers: int, tokens: int) -> dict[str, Any]:
    url, _, model = url.partition("#")
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    model = model or (await client.models.list()).data[0].id
    waiting, answers = list(enumerate(prompts)), dict[int, dict[str, Any]]()

    async def caller() -> None:
        while waiting:
            i, prompt = waiting.pop(0)
            answers[i] = await ask(client, model, prompt, tokens)

    async with client:
        await ask(client, model, "Hello!", 4)  # whatever is done once
        clock = perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        spent = perf_counter() - clock
    return summary([answers[i] for i in range(len(prompts))], spent)


def offline(llm: Any, prompts: list[str], callers: int, tokens: int) -> dict[str, Any]:
    llm.engine.max_batch = callers
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    clock = perf_counter()
    found = llm.generate(asked, max_new_tokens=tokens)
    seconds = perf_counter() - clock
    answers = [
        {"text": r.text, "tokens": len(r.tokens), "first": r.stats.first_token_seconds, "seconds": r.stats.seconds}
        for r in found
    ]
    return summary(answers, seconds)


def summary(answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    later = [(a["seconds"] - a["first"]) / max(1, a["tokens"] - 1) for a in answers]
    return {
        "tokens_per_second": sum(a["tokens"] for a in answers) / seconds,
        "first_ms": 1e3 * statistics.median(a["first"] for a in answers),
        "per_token_ms": 1e3 * statistics.median(later),
        "texts": [a["text"] for a in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("servers", nargs="*", metavar="NAME=URL")
    parser.add_argument("--offline", metavar="DRAFTER", help="measure generate in this process too")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--callers", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    files = [p for file in given.prompts for p in select(read(file), None, given.limit)]
    prompts = [p.turns[0] for p in files or select(builtin(), None, given.limit)]
    servers = dict(word.split("=", 1) for word in given.servers)
    llm = None
    if given.offline:
        import slipstream

        llm = slipstream.load(drafter=given.offline, dtype=given.dtype)
        llm.generate("Hello!", max_new_tokens=4)
    told: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rounds = len(given.callers) * given.repeats
    parts = [prompts[i::rounds] for i in range(rounds)]  # no prompt twice: servers keep what they have read
    for callers in given.callers:
        here = told.setdefault(str(callers), {})
        for _ in range(given.repeats):
            prompts = parts.pop()
            for name, url in servers.items():
                here.setdefault(name, []).append(asyncio.run(served(url, prompts, callers, given.tokens)))
            if llm is not None:
                here.setdefault("offline", []).append(offline(llm, prompts, callers, given.tokens))
        example = next(iter(here.values()))[-1]["texts"]
        for name, runs in here.items():
            numbers = {k: [round(run[k], 2) for run in runs] for k in ("tokens_per_second", "first_ms", "per_token_ms")}
            same = sum(a == b for a, b in zip(runs[-1]["texts"], example, strict=True))
            tell(
                f"{callers:3} callers  {name:16} "
                + "  ".join(f"{k} {v}" for k, v in numbers.items())
                + f"  same {same}"
            )
    for here in told.values():
        for runs in here.values():
            for run in runs:
                del run["texts"]
    print(json.dumps({"benchmark": "serving", "told": told, "prompts": len(prompts), "tokens": given.tokens}))


if __name__ == "__main__":
    main()
