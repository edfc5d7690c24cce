"""Tokens per second of many sequences at a time: python bench/goodput.py [PART…] [--device cuda --shape 7b …]

drafts        drafts that are right with a known probability, on a model of random weights or the embedded one: plain
              decoding, drafts of each fixed length, and `auto`, which decides how much of them is verified, take turns.
              `auto` should be near the best of them for every number of sequences and every quality
clock         the same by a clock with the times of an H200, without any device: what the pilot decides, in seconds
transformers  the same greedy requests to `generate_batch` of transformers (continuous batching) and to `none` and
              `auto`, in turns: tokens per second, milliseconds until a request is answered and until its first token,
              and how many texts are the same

Each contestant runs once unmeasured, for compilation and captures. Tables go to stderr, one JSON line for each part
last. On an H200, some minutes each: --device cuda --dtype bfloat16 --shape 7b.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

import replayed
from auto import interval
from goodput_clock import by_the_clock
from goodput_peers import beside_transformers
from gpu import llama_7b, tell
from slipstream import drafters
from slipstream.engine import Engine
from slipstream.request import Request
from slipstream.stopwatch import Stopwatch
from slipstream.targets import Target, load_model, open_target
from soak_lab import tiny

LENGTHS = (1, 2, 4, 8)  # fixed ones; `auto` may draft as many as the longest
PROMPT = 16  # tokens, of no meaning: reading them takes little


def shaped(given: argparse.Namespace) -> Any:
    dtype = getattr(torch, given.dtype)
    if given.shape == "7b":
        return llama_7b(given.device, dtype)
    if given.shape == "tiny":
        return tiny()[0].to(given.device, dtype)
    return load_model(dtype=given.dtype, device=given.device)[0]


def answers(engine: Engine, prompts: list[list[int]], tokens: int, most: int) -> tuple[list[list[int]], float]:
    """What is said to them, and the seconds of that, without captures. most: nodes of a draft."""
    requests, taken = [Request(prompt, tokens, max_draft=most) for prompt in prompts], Stopwatch()
    said = {id(sequence.request): sequence.tokens for sequence in engine.run(requests)}
    return [said[id(request)] for request in requests], taken.seconds()


def drafts(given: argparse.Namespace) -> dict[str, Any]:
    target = open_target(shaped(given), compile=given.compile, memory=given.memory)
    replayed.register()
    # What `auto` learnt of one quality, in this process or in another, must not help or harm it at the next.
    with tempfile.TemporaryDirectory() as nothing_kept:
        os.environ["SLIPSTREAM_CACHE"] = nothing_kept
        return compared(target, given)


def compared(target: Target, given: argparse.Namespace) -> dict[str, Any]:
    def engine(name: str, **options: Any) -> Engine:
        return Engine(target, drafters.make(name, target, **options), name, max(given.sequences))

    plain, fixed = engine("none"), engine(replayed.NAME)
    autos = {right: engine("auto", drafters=replayed.NAME) for right in given.p}
    told, differ = dict[str, Any](), 0
    columns = ["plain", *map(str, LENGTHS), "auto"]
    tell(" ".join(["sequences    p", *(f"{name:>9}" for name in columns), "  auto / best"]))
    for sequences in given.sequences:
        rng = np.random.default_rng(sequences)
        prompts = rng.integers(1, target.vocabulary, (sequences, PROMPT)).tolist()
        expected, _ = answers(plain, prompts, given.tokens, 0)
        known = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
        for right, auto in autos.items():
            for drafter in (fixed.drafter, auto.drafter.parts[replayed.NAME]):
                drafter.know(known, right)
            ways = [(plain, 0), *((fixed, length) for length in LENGTHS), (auto, max(LENGTHS))]
            taken = np.zeros((len(ways), 1 + given.repeats))
            for repeat in range(1 + given.repeats):  # the first is not counted
                for way in np.roll(range(len(ways)), repeat):
                    said, taken[way, repeat] = answers(ways[way][0], prompts, given.tokens, ways[way][1])
                    differ += sum(one != other for one, other in zip(said, expected, strict=True))
            rates = sequences * given.tokens / taken[:, 1:]
            best = int(np.median(rates[:-1], 1).argmax())
            ratio = interval(taken[best : best + 1, 1:], taken[-1:, 1:])
            told[f"{sequences} × {right}"] = {
                "tokens_per_second": dict(zip(columns, rates.round(1).tolist(), strict=True)),
                "best": columns[best],
                "auto/best": ratio,
            }
            shown = " ".join(f"{rate:9.1f}" for rate in np.median(rates, 1))
            tell(f"{sequences:9} {right:4} {shown}  {ratio[0]:.3f} ({ratio[1]:.3f}-{ratio[2]:.3f}) of {columns[best]}")
    worst = min(told, key=lambda cell: told[cell]["auto/best"][0])
    tell(f"least: {told[worst]['auto/best'][0]:.3f} with {worst}; {differ} texts differ from plain ones")
    return {"found": told, "least": worst, "differ": differ, "shape": given.shape, "tokens": given.tokens}


def clock(given: argparse.Namespace) -> dict[str, Any]:
    told = dict[str, Any]()
    tell(
        " ".join(["sequences    p", *(f"{name:>9}" for name in ["plain", *map(str, LENGTHS), "auto"]), "  auto / best"])
    )
    for right in given.p:
        for sequences, rates, share in by_the_clock(given.sequences, right, given.tokens, list(LENGTHS), given.repeats):
            told[f"{sequences} × {right}"] = {**rates, "auto/best": share}
            tell(f"{sequences:9} {right:4} {' '.join(f'{rate:9.0f}' for rate in rates.values())}  {share:.3f}")
    return {"found": told, "tokens": given.tokens}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "drafts": drafts,
    "clock": clock,
    "transformers": beside_transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", type=float, default=0.4, help="of a GPU, for texts")
    drafting = parser.add_argument_group("drafts")
    drafting.add_argument("--shape", choices=["7b", "tiny", "embedded"], default="tiny")
    drafting.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    drafting.add_argument("--p", type=float, nargs="+", default=[0.5, 0.7, 0.9], help="how often a token is right")
    asking = parser.add_argument_group("transformers")
    asking.add_argument("--model", help="default: the embedded one")
    asking.add_argument("--prompts", nargs="*", default=[], help="files of prompts; default: the built-in ones")
    asking.add_argument("--limit", type=int, default=64, help="prompts at most")
    asking.add_argument("--max-batch", type=int, default=64)
    given = parser.parse_args()
    where = {"device": given.device, "dtype": given.dtype, "repeats": given.repeats}
    if given.device.startswith("cuda"):
        where["device"] = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for part in given.parts or PARTS:
        found = PARTS[part](given)
        print(json.dumps({"benchmark": f"goodput {part}", **found, **where, **versions}), flush=True)


if __name__ == "__main__":
    main()
