"""Long runs of a service and a server: python bench/soak.py PART… [--seed N] [--prompts FILE…] [--scale 0.1]

texts    200 requests to a service on the embedded model: every text equals plain decoding's, alone
many     10,000 requests from 64 threads to a tiny model: memory does not grow
streams  500 streams in one event loop, a third of them dropped: the others get the same text as alone
server   a server under 500 streams, some slow or cut, then 10,000 short requests: memory, statuses
learn    a server that learns is killed again and again, then its disk is full: nothing acknowledged is lost

Each part prints a line of JSON. --scale: share of the requests, to try it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import threading
from collections import Counter
from time import perf_counter, sleep
from typing import Any

import slipstream
from slipstream.jobs import Job
from soak_lab import WAYS, growth, real, resident, run_threads, said, tell, tiny
from soak_server import learn, server


def texts(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    how = {"dtype": given.dtype, "device": given.device, "max_batch": given.max_batch, "memory": given.memory}
    llm = slipstream.load(**how)
    short = real(given.prompts, rng, 30)
    alike = [f"A farmer has 17 sheep, 4 goats and a dog, and sells them on a market day. {p}" for p in short[:10]]
    prompts = short + alike
    ways = [WAYS[i % 3] | ({"seed": i} if i % 3 else {}) for i in range(len(prompts))]
    clock = perf_counter()
    alone = [
        llm.generate(p, max_new_tokens=given.tokens, max_draft=0, **w).tokens
        for p, w in zip(prompts, ways, strict=True)
    ]
    plain = sum(map(len, alone)) / (perf_counter() - clock)
    tell(f"alone: {plain:.1f} tokens/s")
    numbers = rng.sample(range(10_000), max(8, int(given.requests * given.scale)))
    asked = [(i % len(prompts), rng.randint(1, given.tokens)) for i in numbers]
    dropped, ended, heard = set(rng.sample(range(len(asked)), len(asked) // 20)), {}, {}
    clock = perf_counter()
    for number, (i, length) in enumerate(asked):
        request = llm.request(prompts[i], max_new_tokens=length, **{"seed": 0, **ways[i]})
        heard[number], ended[number] = [], threading.Event()

        def hear(update: Any, number: int = number) -> None:
            heard[number].append(update)
            if update.finish is not None:
                ended[number].set()

        job = llm.service.submit(Job(request, hear, streams=number % 2 == 0))
        sleep(rng.expovariate(given.rate))
        if number in dropped:
            llm.service.cancel(job)
    for one in ended.values():
        one.wait()
    seconds = perf_counter() - clock
    said_ = [[token for update in heard[n] for token in update.tokens] for n in range(len(asked))]
    differ, cancelled = [], 0
    for number, (i, length) in enumerate(asked):
        last = heard[number][-1]
        cut = last.finish == "cancelled"
        cancelled += cut
        expected = alone[i][: len(said_[number]) if cut else length]
        if last.error is not None or said_[number] != expected:
            differ.append(number)
    rate, counts = sum(map(len, said_)) / seconds, llm.service.so_far()
    return {
        "requests": len(asked),
        "cancelled": cancelled,
        "differ": len(differ),
        "tokens_per_second": round(rate, 1),
        "plain_alone": round(plain, 1),
        "found_tokens": counts.found_tokens,
        "put_back": counts.put_back,
        "left": len(llm.service.running) + llm.service.waiting() + len(llm.engine._open),
    }


def many(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    llm = slipstream.LLM(*tiny())
    prompts, total = said(rng, 60), int(10_000 * given.scale)
    asked = [(p, WAYS[i % 3], 1 + i % 16) for i, p in enumerate(prompts)]
    alone = [llm.generate(p, max_new_tokens=n, max_draft=0, **{"seed": 0, **w}).text for p, w, n in asked]
    left, wrong, curve, lock = iter(range(total)), Counter[str](), dict[int, tuple[float, float]](), threading.Lock()

    def next_one() -> int | None:
        with lock:
            number = next(left, None)
            if number is not None and number % 500 == 0:
                gc.collect()
                curve[number] = resident()
        return number

    def check(number: int, text: str) -> None:
        if text != alone[number % len(asked)]:
            wrong["text"] += 1

    def options(number: int) -> tuple[str, dict[str, Any]]:
        prompt, way, length = asked[number % len(asked)]
        return prompt, {"max_new_tokens": length, "seed": 0, **way}

    def caller() -> None:
        while (number := next_one()) is not None:
            prompt, how = options(number)
            check(number, llm.generate(prompt, **how).text)

    async def acaller() -> None:
        while (number := next_one()) is not None:
            prompt, how = options(number)
            check(number, (await llm.agenerate(prompt, **how)).text)

    clock = perf_counter()
    run_threads(caller if i % 2 else lambda: asyncio.run(acaller()) for i in range(64))
    seconds = perf_counter() - clock
    gc.collect()
    curve[total] = resident()
    return {"requests": total, "wrong": wrong["text"], "per_second": round(total / seconds), **growth(curve)}


def streams(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    llm = slipstream.LLM(*tiny())
    count = int(500 * given.scale)
    asked = [(p, WAYS[i % 3], rng.randint(1, 60)) for i, p in enumerate(said(rng, count))]
    alone = [llm.generate(p, max_new_tokens=n, max_draft=0, **{"seed": 0, **w}).text for p, w, n in asked]
    drop = {i: rng.randint(0, 20) for i in rng.sample(range(count), count // 3)}  # after so many pieces

    async def one(i: int) -> str | None:
        (prompt, way, length), text, pieces = asked[i], "", 0
        async for piece in llm.astream(prompt, max_new_tokens=length, **{"seed": 0, **way}):
            text, pieces = text + piece, pieces + 1
            if pieces > drop.get(i, count):
                return None
        return text

    async def all_of_them() -> list[str | BaseException | None]:
        tasks = [asyncio.create_task(one(i)) for i in range(count)]
        for i in rng.sample(sorted(drop), len(drop) // 2):  # and some by a cancelled task
            asyncio.get_running_loop().call_later(rng.random() * 2, tasks[i].cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    clock = perf_counter()
    found = asyncio.run(all_of_them())
    seconds = perf_counter() - clock
    sleep(0.5)
    rest = llm.service
    return {
        "streams": count,
        "dropped": sum(not isinstance(text, str) for text in found),
        "complete": sum(text == alone[i] for i, text in enumerate(found)),
        "wrong": sum(isinstance(text, str) and text != alone[i] for i, text in enumerate(found)),
        "failed": [
            repr(e) for e in found if isinstance(e, BaseException) and not isinstance(e, asyncio.CancelledError)
        ],
        "left": len(rest.running) + rest.waiting() + len(llm.engine._open),
        "seconds": round(seconds, 1),
        "ended": rest.counts.ended,
    }


PARTS = {
    "texts": texts,
    "many": many,
    "streams": streams,
    "server": server,
    "learn": learn,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument("--requests", type=int, default=200, help="of texts, as are those below")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-batch", type=int, default=8, help="of texts")
    parser.add_argument(
        "--memory", type=float, default=0.9, help="of a GPU, for texts; little of it, and answers are put back"
    )
    given = parser.parse_args()
    for part in given.parts:
        found = PARTS[part](given, random.Random(given.seed))
        print(json.dumps({"benchmark": f"soak {part}", "seed": given.seed, **found}), flush=True)


if __name__ == "__main__":
    main()
