"""What `auto` adds to a step, and what it makes of real prompts: python bench/auto.py [overhead] [live] --prompts FILE…

overhead  microseconds of the budget per step for a tree of 64 nodes that two sources drafted: settling the last step,
          labelling its draft, fusing, choosing
live      `none`, `auto` and single drafters take turns on the same prompts; for each category the ratio of seconds per
          token to plain decoding's, with a bootstrapped 95% interval over prompts and repeats

Tables go to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from slipstream import LLM
from slipstream.bench.workloads import builtin, read, select
from slipstream.budget.costs import Costs
from slipstream.budget.pilot import Pilot
from slipstream.target import load_model
from slipstream.tree import TokenTree, fuse

RESAMPLES = 2000


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- overhead


def overhead(given: argparse.Namespace) -> dict[str, Any]:
    del given
    rng = np.random.default_rng(0)
    costs = Costs({1: 1.1e-3, 8: 1.15e-3, 16: 1.25e-3, 32: 1.3e-3, 64: 1.5e-3}, padded=True)
    pilot = Pilot(costs, ["one", "other"])
    drafts = [random_tree(rng, "one"), random_tree(rng, "other")]
    whole, seconds = fuse(drafts), {"one": 1e-5, "other": 1e-5}
    text = whole.tokens[whole.path_to(len(whole) - 1)[1:]].tolist()
    parts: dict[str, Callable[[], Any]] = {
        "settle": lambda: pilot.charge(8, 1, 3, 1.1e-3, 1e-5),
        "label": lambda: pilot.learn(whole, text),
        "fuse": lambda: fuse(drafts),
        "choose": lambda: pilot.choose([whole], [63], pilot.count(seconds)),
    }
    told = {name: round(microseconds(part), 1) for name, part in parts.items()}
    told["all"] = round(sum(told.values()), 1)
    for name, spent in told.items():
        tell(f"{name:8} {spent:7.1f} µs")
    return {"nodes": len(whole) - 1, "microseconds": told}


def random_tree(rng: np.random.Generator, source: str, nodes: int = 32) -> TokenTree:
    parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, nodes + 1))]
    tokens = rng.integers(1, 1000, nodes + 1, dtype=np.int32)
    tokens[0] = 0
    return TokenTree.build(tokens, parents, source=source, raw=rng.random(nodes + 1).astype(np.float32))


def microseconds(part: Callable[[], Any], repeats: int = 3000) -> float:
    times = []
    for _ in range(repeats):
        clock = perf_counter()
        part()
        times.append(perf_counter() - clock)
    return statistics.median(times[100:]) * 1e6


# ---- live


def live(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    asked = [p for file in given.prompts for p in select(read(file), None, given.limit)]
    asked = asked or select(builtin(), None, given.limit)
    singles = [name for name in given.singles.split(",") if name]
    llms = {name: LLM(model, tokenizer, name, compile=given.compile) for name in ("none", "auto", *singles)}
    longest = max((p.turns[0] for p in asked), key=len)
    for llm in llms.values():  # code is loaded, caches grow, steps are captured
        for prompt in (longest, asked[0].turns[0]):
            llm.generate(prompt, max_new_tokens=given.tokens, ignore_eos=True)
    # (prompts, repeats) seconds per token behind the first
    taken = {name: np.zeros((len(asked), given.repeats)) for name in llms}
    same = dict.fromkeys(llms, 0)
    for repeat in range(given.repeats):
        for i, prompt in enumerate(asked):
            said: dict[str, list[int]] = {}
            turn = list(llms)[(repeat + i) % len(llms) :] + list(llms)[: (repeat + i) % len(llms)]
            for name in turn:
                result = llms[name].generate(prompt.turns[0], max_new_tokens=given.tokens)
                seconds = result.stats.seconds - result.stats.first_token_seconds
                taken[name][i, repeat] = seconds / max(1, len(result.tokens) - 1)
                said[name] = result.tokens
            for name, tokens in said.items():
                same[name] += tokens == said["none"]
        tell(f"repeat {repeat + 1} of {given.repeats}: " + ratios(taken, slice(None), repeat + 1))
    told: dict[str, Any] = {}
    categories = np.array([p.category for p in asked])
    for category in (*dict.fromkeys(categories.tolist()), "all"):
        rows = np.ones(len(asked), np.bool_) if category == "all" else categories == category
        told[category] = {
            name: interval(taken["none"][rows], spent[rows]) for name, spent in taken.items() if name != "none"
        }
        shown = "  ".join(f"{n} {r[0]:.3f} ({r[1]:.3f}-{r[2]:.3f})" for n, r in told[category].items())
        tell(f"{category:24} {rows.sum():3} prompts  {shown}")
    of = len(asked) * given.repeats
    slower = [c for c, found in told.items() if found["auto"][2] < 1]
    return {
        "times_plain": told,
        "auto_slower_in": slower,  # categories whose whole interval lies below 1
        "same_text_as_plain": {name: f"{count}/{of}" for name, count in same.items()},
        "prompts": len(asked),
        "repeats": given.repeats,
        "tokens": given.tokens,
        "dtype": str(model.dtype),
    }


def ratios(taken: dict[str, Any], rows: Any, repeats: int) -> str:
    plain = taken["none"][rows, :repeats].sum()
    return "  ".join(f"{n} {plain / t[rows, :repeats].sum():.3f}" for n, t in taken.items() if n != "none")


def interval(plain: Any, spent: Any) -> list[float]:
    """How many times as fast as plain, of all prompts together, and its 95% interval. Prompts are drawn with all they
    took, then repeats of each, so that what a pair had in common stays together."""
    rng = np.random.default_rng(0)
    prompts, repeats = plain.shape
    found = np.empty(RESAMPLES)
    for k in range(RESAMPLES):
        rows = rng.integers(0, prompts, prompts)[:, None]
        columns = rng.integers(0, repeats, (prompts, repeats))
        found[k] = plain[rows, columns].sum() / spent[rows, columns].sum()
    low, high = np.quantile(found, [0.025, 0.975])
    return [round(float(x), 4) for x in (plain.sum() / spent.sum(), low, high)]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"overhead": overhead, "live": live}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument("--limit", type=int, default=26, help="prompts of each file, dealt out to its categories")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--singles", default="pld,suffix", help="drafters to compare with, separated by commas")
    given = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "auto"}
    for name in given.parts or PARTS:
        report[name] = PARTS[name](given)
    report["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report["threads"] = torch.get_num_threads()
    report["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
