"""`auto` by the clock of a faster machine: python bench/clock.py --prompts FILE… [--drafters suffix,eagle3]

Real drafters draft for a real model here, and what they say is what they would say anywhere; but steps and drafts take
what they take on an H200, captures at first included. So it can be seen without one whom `auto` asks there, and why.
What it does not know is the time that `auto` itself takes: a fixed 0.05 ms a step, and nothing for following the text.

A line for each contestant goes to stderr, after `auto`'s also what it knows of its sources; one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream import LLM, engine
from slipstream.bench.workloads import read, select
from slipstream.budget.costs import Costs
from slipstream.drafters import auto
from slipstream.target import load_model

# Seconds, as measured for the embedded model in bfloat16.
STEPS = {1: 0.86e-3, 8: 0.90e-3, 16: 0.95e-3, 32: 1.10e-3, 64: 1.3e-3, 128: 1.7e-3}
DRAFTS = {"suffix": 0.05e-3, "eagle3": 0.35e-3, "redrafter": 0.30e-3, "prediction": 0.02e-3}
FIRST_DRAFTS = {"eagle3": [1.0, 0.3, 0.0004, 0.08], "redrafter": [0.5, 0.2, 0.0004, 0.05], "suffix": [0.2, 0.001]}
HOST, JOINT = 0.08e-3, 0.05e-3  # of every step; of `auto`'s
NOISE = 0.03  # of a time's logarithm


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._noise = np.random.default_rng(0)

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds * float(np.exp(self._noise.normal(0, NOISE)))

    def times(self, holder: Any, method: str, seconds: Callable[..., float]) -> None:
        """Calls of a method take what `seconds` says of its arguments."""
        if method in vars(holder):
            return
        original = getattr(holder, method)

        def timed(*given: Any) -> Any:
            result = original(*given)
            self.pass_by(seconds(*given))
            return result

        setattr(holder, method, timed)


def draft_time(name: str, captures: bool) -> Callable[..., float]:
    first = iter(FIRST_DRAFTS.get(name, []) if captures else [])
    return lambda *_: next(first, DRAFTS.get(name, 0.05e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--prompts", nargs="+", required=True, help="files")
    parser.add_argument("--limit", type=int, default=9, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="how often `auto` answers all of them")
    parser.add_argument("--drafters", default="", help="whom `auto` may ask; default: as it comes")
    parser.add_argument("--singles", default="none,suffix,eagle3", help="to compare with")
    given = parser.parse_args()

    clock, costs = Clock(), Costs(STEPS, padded=True)
    engine.perf_counter = auto.perf_counter = clock  # type: ignore[assignment, attr-defined]
    auto.costs_of = lambda _: Costs(STEPS, padded=True)  # type: ignore[assignment]
    model, tokenizer = load_model(given.model, dtype="bfloat16")
    asked = [p.turns[0] for file in given.prompts for p in select(read(file), None, given.limit)]
    told: dict[str, Any] = {"benchmark": "clock", "prompts": len(asked), "tokens": given.tokens}

    def answer(name: str, llm: LLM) -> None:
        start = clock.now
        results = [llm.generate(prompt, max_new_tokens=given.tokens) for prompt in asked]
        tokens, steps = sum(len(r.tokens) for r in results), sum(r.stats.steps for r in results)
        told[name] = {"tokens_per_second": tokens / (clock.now - start), "tokens_per_step": tokens / steps}
        shown = "  ".join(f"{k} {v:.2f}" for k, v in told[name].items())
        print(f"{name:16} {shown}", file=sys.stderr, flush=True)

    def step_time(_: Any, trees: Any, *__: Any) -> float:
        return costs.seconds(max(map(len, trees))) + HOST

    for name in given.singles.split(","):
        llm = LLM(model, tokenizer, name)
        clock.times(llm.target, "score", step_time)
        if name != "none":
            clock.times(llm.engine.drafter, "propose", draft_time(name, captures=False))
        answer(name, llm)
    llm = LLM(model, tokenizer, "auto", drafters=given.drafters)
    drafter: Any = llm.engine.drafter
    clock.times(llm.target, "score", step_time)
    clock.times(drafter, "propose", lambda *_: JOINT)
    for name, part in drafter.parts.items():
        clock.times(part, "propose", draft_time(name, captures=True))
    for i in range(given.rounds):
        answer(f"auto, round {i + 1}", llm)
        for source in drafter.pilot.sources.values():
            levels = " ".join("-" if a is None else f"{a:.2f}" for a in source.advantages)
            line = f"    {source.name:12} {source.drafts:5} drafts of {source.seconds * 1e3:.3f} ms, worth {levels}"
            print(line, file=sys.stderr, flush=True)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
