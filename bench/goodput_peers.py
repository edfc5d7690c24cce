"""The part `transformers` of bench/goodput.py."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import transformers

from auto import interval, prompts_of
from gpu import settled, tell
from slipstream import LLM
from slipstream.targets import load_model
from slipstream.text import encode


@dataclass(frozen=True)
class Answered:
    """All requests, asked at once: what was said to each, and seconds until its first and its last token."""

    said: list[list[int]]
    first: list[float]
    last: list[float]

    @property
    def seconds(self) -> float:
        """Per token, until the last answer is there."""
        return max(self.last) / sum(map(len, self.said))


def by_ours(llm: LLM, prompts: list[list[int]], tokens: int) -> Answered:
    how: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True, "repetition_penalty": 1.0}
    requests, first, last = llm.requests(prompts, **how), dict[int, float](), dict[int, float]()
    said, clock = dict[int, list[int]](), perf_counter()
    for sequence in llm.engine.run(requests):
        number = id(sequence.request)
        said[number], last[number] = sequence.tokens, perf_counter() - clock
        first.setdefault(number, last[number])
    return Answered(*([found[id(request)] for request in requests] for found in (said, first, last)))


def by_transformers(model: Any, prompts: list[list[int]], tokens: int) -> Answered:
    wanted = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    clock = perf_counter()
    # What it allocates and captures is kept, and so not counted.
    found = model.generate_batch(prompts, wanted, persistent_manager=True, record_timestamps=True).values()
    if failed := [each.error for each in found if each.error is not None] or len(found) < len(prompts):
        raise SystemExit(f"transformers did not answer everything: {failed}")
    times = [[moment - clock for moment in each.timestamps] for each in found]
    return Answered([each.generated_tokens for each in found], [t[0] for t in times], [t[-1] for t in times])


def beside_transformers(given: argparse.Namespace) -> dict[str, Any]:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    where = {"dtype": given.dtype, "device": given.device}
    model, tokenizer = load_model(given.model, **where)
    # A model of its own for transformers, which gives it another attention.
    theirs, _ = load_model(given.model, **where)
    prompts = [encode(prompt.turns[0], tokenizer, True) for prompt in prompts_of(given)]
    how = {"max_batch": given.max_batch, "compile": given.compile, "memory": given.memory}
    ways: dict[str, Callable[[], Answered]] = {
        name: partial(by_ours, LLM(model, tokenizer, name, **how), prompts, given.tokens) for name in ("none", "auto")
    }
    ways["transformers"] = partial(by_transformers, theirs, prompts, given.tokens)
    found: dict[str, list[Answered]] = {name: [] for name in ways}
    for name, way in ways.items():
        clock = perf_counter()
        way()
        tell(f"{name:12} once, unmeasured: {perf_counter() - clock:.1f} s")
    for repeat in range(given.repeats):
        for name in np.roll(list(ways), repeat):
            answered, _ = settled(ways[name])
            found[name].append(answered)
    return summary(found, tokens=given.tokens, prompts=len(prompts))


def summary(found: dict[str, list[Answered]], **asked: int) -> dict[str, Any]:
    told = dict[str, Any]()
    plain = found["none"][0].said
    spent = {name: np.array([[each.seconds for each in answered]]) for name, answered in found.items()}
    for name, answered in found.items():
        last = 1e3 * np.array([each.last for each in answered])
        first = 1e3 * np.array([each.first for each in answered])
        told[name] = {
            "tokens_per_second": (1 / spent[name][0]).round(1).tolist(),
            "times_transformers": interval(spent["transformers"], spent[name]),
            "request_ms": {"mean": last.mean(), "p50": np.median(last), "p99": np.quantile(last, 0.99)},
            "first_token_ms": {"mean": first.mean(), "p50": np.median(first), "p99": np.quantile(first, 0.99)},
            "same_as_none": sum(a == b for each in answered for a, b in zip(each.said, plain, strict=True)),
        }
        for times in ("request_ms", "first_token_ms"):
            told[name][times] = {what: round(float(ms), 1) for what, ms in told[name][times].items()}
        ratio, low, high = told[name]["times_transformers"]
        tell(
            f"{name:12} {np.median(1 / spent[name]):9.1f} tokens/s, {ratio:.2f} ({low:.2f}-{high:.2f}) × transformers, "
            f"a request {told[name]['request_ms']}, its first token {told[name]['first_token_ms']}, "
            f"{told[name]['same_as_none']} of {len(answered) * len(plain)} texts as none's"
        )
    return {"found": told, **asked}
