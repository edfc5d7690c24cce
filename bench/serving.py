"""How fast a server is: python bench/serving.py PART …

beside   compare servers, NAME=URL…: OpenAI's client asks one prompt after the other, greedy, streamed; every server
         gets the same prompts, each once. Servers take turns, for each number of callers, repeated. Reported: tokens
         per second, time to the first token and per token (medians), and whether texts equal the first server's. A
         server is asked for its model's name, unless that follows the URL after a #.
offline  the server against the same model object without one, in turns: `generate` on a list, the service in an event
         loop, HTTP streamed, and HTTP not streamed. Callers, in a separate process, send the next request as soon as
         one is answered; the batch is as large as the number of callers. Reported: tokens per second, as a share of the
         list's with a 95% interval over repeats, and CPU time per token of the process with the model. A run in which
         steps were captured, as happens once per process, is repeated.
editing  rename a class in a file of about 2,000 tokens of code, through /v1/chat/completions: plain (no drafts),
         without a prediction, with the file as the prediction, and with the plain answer, some words changed, as the
         prediction. Small models edit badly: the last shows the gain if the model followed the instruction, the one
         before the actual gain. Reported: tokens per second of decoding as a multiple of plain's, the same with the
         prompt's reading, and accepted and rejected prediction tokens.

Tables go to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from time import perf_counter
from typing import Any

from serving_editing import editing
from serving_lab import add_model, tell
from serving_offline import offline
from slipstream.evaluate.workloads import builtin, read, select


async def ask(client: Any, model: str, prompt: str, tokens: int) -> dict[str, Any]:
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


async def asked_of(url: str, prompts: list[str], callers: int, tokens: int) -> dict[str, Any]:
    import openai  # here alone: the other parts do without

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


def summary(answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    later = [(a["seconds"] - a["first"]) / max(1, a["tokens"] - 1) for a in answers]
    return {
        "tokens_per_second": sum(a["tokens"] for a in answers) / seconds,
        "first_ms": 1e3 * statistics.median(a["first"] for a in answers),
        "per_token_ms": 1e3 * statistics.median(later),
        "texts": [a["text"] for a in answers],
    }


def beside(given: argparse.Namespace) -> dict[str, Any]:
    files = [p for file in given.prompts for p in select(read(file), None, given.limit)]
    prompts = [p.turns[0] for p in files or select(builtin(), None, given.limit)]
    servers = dict(word.split("=", 1) for word in given.servers)
    told: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rounds = len(given.callers) * given.repeats
    parts = [prompts[i::rounds] for i in range(rounds)]  # no prompt twice: servers keep what they have read
    for callers in given.callers:
        here = told.setdefault(str(callers), {})
        for _ in range(given.repeats):
            asked = parts.pop()
            for name, url in servers.items():
                here.setdefault(name, []).append(asyncio.run(asked_of(url, asked, callers, given.tokens)))
        example = next(iter(here.values()))[-1]["texts"]
        for name, runs in here.items():
            numbers = {k: [round(run[k], 2) for run in runs] for k in ("tokens_per_second", "first_ms", "per_token_ms")}
            same = sum(a == b for a, b in zip(runs[-1]["texts"], example, strict=True))
            shown = "  ".join(f"{k} {v}" for k, v in numbers.items())
            tell(f"{callers:3} callers  {name:16} {shown}  same {same}")
    for here in told.values():
        for runs in here.values():
            for run in runs:
                del run["texts"]
    return {"told": told, "prompts": len(prompts), "tokens": given.tokens}


PARTS = {"beside": beside, "offline": offline, "editing": editing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    of = {name: parts.add_parser(name) for name in PARTS}
    of["beside"].add_argument("servers", nargs="+", metavar="NAME=URL")
    of["beside"].add_argument("--limit", type=int, default=16, help="prompts of each file")
    for name in ("beside", "offline"):
        of[name].add_argument("--callers", type=int, nargs="+", default=[1, 4, 16])
        of[name].add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
        of[name].add_argument("--tokens", type=int, default=48)
        of[name].add_argument("--repeats", type=int, default=2 if name == "beside" else 5)
    for name in ("offline", "editing"):
        add_model(of[name])
        of[name].add_argument("--seed", type=int, default=0)
    of["offline"].add_argument("--rounds", type=int, default=2, help="requests of each caller, on average")
    of["offline"].add_argument("--least", type=int, default=4, help="requests of all callers at least")
    of["editing"].add_argument("--document", type=int, default=2000, help="tokens of the file")
    of["editing"].add_argument("--tokens", type=int, default=2200, help="of the answer, at most")
    of["editing"].add_argument("--edits", type=int, default=10, help="words of the predicted answer that are wrong")
    of["editing"].add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(json.dumps({"benchmark": f"serving {given.part}", **PARTS[given.part](given)}))


if __name__ == "__main__":
    main()
