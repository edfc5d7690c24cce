"""Retrieval beside a generating drafter: python bench/rasd.py --head eagle3=FOLDER --store STORE --prompts FILE

The same greedy answers by plain decoding, the generator alone, each retriever alone, rasd, rasd without one of its
parts (pruning, fusion, overlap) and with other numbers of first tokens. All use one target and take turns prompt by
prompt, so that noise affects all alike; plain decoding and the variants of rasd answer only some of the prompts. Ratios
are of tokens per second on the prompts that both answered.

Prints a table to stderr and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers

from slipstream import LLM, drafters
from slipstream.budget.calibration import Calibration
from slipstream.drafters.rasd import RasdDrafter
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.heads import HEADS
from slipstream.targets import load_model

TOPS = (1, 5, 10, 50)  # first tokens of the generator's that may begin a retrieved continuation
COLUMNS = {
    "tokens/step": "tokens_per_step",
    "tokens/s": "tokens_per_second",
    "× plain": "against_plain",
    "× rasd": "against_rasd",
    "verified": "verified_per_step",
    "draft ms": "draft_ms",
    "generator": "generator_ms",
    "retrieval": "retrieval_ms",
    "differ": "different_texts",
}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Clock:
    """The time that the proposals of a drafter's part take."""

    def __init__(self, part: Any) -> None:
        self.seconds, self._ask = 0.0, part.propose
        part.propose = self

    def __call__(self, *asked: Any) -> Any:
        start = perf_counter()
        try:
            return self._ask(*asked)
        finally:
            self.seconds += perf_counter() - start


@dataclass
class Contestant:
    drafter: Any
    every: int = 1  # answers only each so many-th prompt
    clocks: dict[str, list[Clock]] = field(default_factory=dict)  # of its parts, which others may have too
    said: dict[tuple[int, int], Any] = field(default_factory=dict)  # {(prompt, repeat): its result}
    seconds: dict[str, float] = field(default_factory=dict)  # by the names of its clocks

    def answer(self, place: tuple[int, int], ask: Callable[[], Any]) -> None:
        before = self._clocks()
        self.said[place] = ask()
        for name, seconds in self._clocks().items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - before[name]

    def _clocks(self) -> dict[str, float]:
        return {name: sum(clock.seconds for clock in clocks) for name, clocks in self.clocks.items()}

    def rate(self, places: set[tuple[int, int]]) -> float:
        done = [self.said[place].stats for place in places]
        return sum(s.new_tokens for s in done) / sum(s.seconds for s in done)

    def against(self, other: Contestant) -> float:
        both = self.said.keys() & other.said.keys()
        return round(self.rate(both) / other.rate(both), 3)

    def told(self, everyone: dict[str, Contestant]) -> dict[str, float]:
        done = [result.stats for result in self.said.values()]
        steps = sum(s.steps - 1 for s in done)  # the prompt's own forward drafts nothing
        first = everyone["generator"].said
        found = {
            "tokens_per_step": round(sum(s.new_tokens - 1 for s in done) / steps, 3),
            "tokens_per_second": round(self.rate(set(self.said)), 1),
            "against_plain": self.against(everyone["plain"]),
            "against_rasd": self.against(everyone["rasd"]),
            "verified_per_step": round(sum(s.nodes_verified for s in done) / steps, 2),
            "draft_ms": round(1e3 * sum(s.draft_seconds for s in done) / steps, 3),
        }
        for name, seconds in self.seconds.items():
            found[f"{name}_ms"] = round(1e3 * seconds / steps, 3)
        return found | {"different_texts": sum(r.tokens != first[at].tokens for at, r in self.said.items())}


def contestants(given: argparse.Namespace, make: Callable[..., Any]) -> dict[str, Contestant]:
    kind, head = given.head
    names = [name.strip() for name in given.retrievers.split(",")]
    own = {name: {"store": given.store} if given.store and has_store(name) else {} for name in names}
    joint = {"generator": kind, "drafter_path": head, "retrievers": given.retrievers, "store": given.store}
    few, rasd = given.sparse, make("rasd", **joint)
    found = {"plain": Contestant(make("none"), few), "generator": Contestant(rasd.generator)}
    found |= {name: Contestant(make(name, **own[name])) for name in names}
    found["rasd"] = Contestant(rasd, 1, clocks_of(rasd))
    for part in ("prune", "fuse", "overlap"):
        found[f"rasd, no {part}"] = Contestant(variant(rasd, **{part: False}), few, found["rasd"].clocks)
    for k in TOPS:
        if k < rasd.options.top:  # its generator names enough tokens
            found[f"rasd, k={k}"] = Contestant(variant(rasd, top=k), few, found["rasd"].clocks)
        elif k > rasd.options.top:
            more = make("rasd", **joint, top=k)
            found[f"rasd, k={k}"] = Contestant(more, few, clocks_of(more))
    return found


def variant(rasd: RasdDrafter, **changes: Any) -> RasdDrafter:
    """With the same parts, so that a draft is captured once for all."""
    other = copy.copy(rasd)
    other.options, other.calibration = replace(rasd.options, **changes), Calibration(rasd.names)
    return other


def clocks_of(rasd: RasdDrafter) -> dict[str, list[Clock]]:
    found = [Clock(rasd.parts[name]) for name in rasd.options.names()]
    return {"generator": [Clock(rasd.generator)], "retrieval": found}


def has_store(name: str) -> bool:
    return any(option.name == "store" for option in fields(drafters.find(name).Options))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    began = perf_counter()
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    if not given.head[1]:
        given.head = given.head[0], HEADS[given.head[0]].fresh(model)
    llm = LLM(model, tokenizer, "none", compile=given.compile)
    everyone = contestants(given, lambda name, **options: drafters.make(name, llm.target, tokenizer, **options))
    prompts = [p.turns[0] for p in select(read(given.prompts) if given.prompts else builtin(), None, given.limit)]

    def answer(contestant: Contestant, prompt: str, tokens: int) -> Any:
        llm.engine.drafter = contestant.drafter  # one target for all: what it has captured serves everybody
        return llm.generate(prompt, max_new_tokens=tokens, max_draft=given.max_draft)

    longest = max(prompts, key=len)
    for contestant in everyone.values():
        answer(contestant, longest, given.warm)
    tell(f"{len(prompts)} prompts, {len(everyone)} contestants, warm after {perf_counter() - began:.1f} s")
    turns = list(everyone.values())
    for repeat in range(given.repeats):
        for i, prompt in enumerate(prompts):
            random.Random(repeat * len(prompts) + i).shuffle(turns)  # nobody always follows the same one
            for contestant in turns:
                if i % contestant.every == 0:
                    contestant.answer((i, repeat), partial(answer, contestant, prompt, given.tokens))
    told = {name: contestant.told(everyone) for name, contestant in everyone.items()}
    tell(" " * 18 + "".join(f"{column:>12}" for column in COLUMNS))
    for name, numbers in told.items():
        tell(f"{name:18}" + "".join(f"{numbers.get(key, ''):>12}" for key in COLUMNS.values()))
    return {"prompts": len(prompts), "contestants": told, "seconds": round(perf_counter() - began, 1)}


def head(word: str) -> tuple[str, str]:
    kind, _, folder = word.partition("=")
    if kind not in (*HEADS, "model") or (kind == "model" and not folder):
        raise argparse.ArgumentTypeError(f"{word!r}: give KIND=FOLDER, KIND one of {', '.join(HEADS)} or model")
    return kind, folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument(
        "--head",
        type=head,
        default=("eagle3", ""),
        metavar="KIND=FOLDER",
        help="the generator; without a folder, an untrained head",
    )
    parser.add_argument("--retrievers", default="suffix", help="separated by commas")
    parser.add_argument("--store", default="", help="a datastore, for retrievers that search one")
    parser.add_argument("--prompts", help="default: the built-in ones")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-draft", type=int, default=127, help="nodes of a step: by default few are cut off")
    parser.add_argument("--sparse", type=int, default=4, help="plain and variants: every so many-th prompt")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warm", type=int, default=32, help="tokens that each answers to the longest prompt first")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    told = measure(given)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    about = {key: getattr(given, key) for key in ("retrievers", "tokens", "max_draft", "dtype", "compile")}
    where = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"part": "rasd", "head": given.head[0], **told, **about, **where}), flush=True)


if __name__ == "__main__":
    main()
