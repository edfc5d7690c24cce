"""Acceptance and cost of lookahead, here and with another model's step times: python bench/lookahead.py --prompts FILE…

All contestants take turns on the same prompts: plain decoding, `pld`, `suffix`, `lookahead` of each of the --shapes
(N,W,G), each of these fused with `suffix`, `auto`, and `auto` without `lookahead`. For each: tokens and rows per step,
speed-up over plain decoding, and how many texts equal plain decoding's.

The same with the clock of a larger model and the same acceptance: the time of drafting and of the host is measured
here, and a step takes the larger model's time for so many rows. `auto` answers once more with that clock, without
heads, with `suffix` alone and with `suffix` and `lookahead`.

With --pairs several fresh `auto` are compared with as many without `lookahead`, and nothing else is measured.

--clock 7b       a Llama of 7B shape with random weights, measured here first: on a GPU, one command does it all
--clock small    the same with a shape that a CPU can measure, to try it
--clock 1:4,8:5  milliseconds by rows, measured elsewhere; rows in between cost as much as the next larger number

A table goes to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from auto import interval
from gpu import ROWS, known_of, llama_7b, tell
from slipstream import LLM
from slipstream.budget.calibration import BINS, DEPTHS, PRIOR, Calibration
from slipstream.budget.costs import Costs
from slipstream.budget.pilot import Pilot
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.request import Step
from slipstream.targets import load_model, open_target
from slipstream.targets.timing import measure, nonsense
from slipstream.tree import TokenTree
from sweeps import by_prompt

SMALL = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
FREE = {1: 1.0, 256: 1.0}  # seconds of steps in which everything is verified that somebody drafts


@dataclass(eq=False)
class Contestant:
    llm: LLM
    options: dict[str, Any] = field(default_factory=dict)  # of its requests
    steps: list[Step] = field(default_factory=list)  # behind each answer's first token, as everything here
    seconds: list[float] = field(default_factory=list)  # per token, of each answer,
    modelled: list[float] = field(default_factory=list)  # and by the clock of the larger model
    tokens: int = 0
    same: int = 0  # answers that are plain decoding's
    labels: list[tuple[TokenTree, Sequence[int], int]] = field(default_factory=list)  # drafts, and what followed them

    def answer(self, prompt: str, tokens: int, costs: Costs | None) -> list[int]:
        steps = list[Step]()
        request = self.llm.request(prompt, max_new_tokens=tokens, ignore_eos=True, **self.options)
        request.watch = steps.append
        *_, ended = self.llm.engine.run([request])
        later = len(ended.tokens) - 1
        self.steps += steps[1:]
        self.tokens += later
        self.seconds.append((ended.stats.seconds - ended.stats.first_token_seconds) / later)
        if costs is not None:
            taken = [s.draft_seconds + s.host_seconds + costs.seconds(len(s.tree)) for s in steps[1:]]
            self.modelled.append(sum(taken) / later)
        return ended.tokens

    def told(self, plain: Contestant, prompts: int) -> dict[str, Any]:
        count = len(self.steps)
        found = {
            "tokens_per_step": round(self.tokens / count, 3),
            "rows_per_step": round(sum(len(step.tree) for step in self.steps) / count, 1),
            "tokens_per_second": round(len(self.seconds) / sum(self.seconds), 2),
            "times_plain": interval(by_prompt(plain.seconds, prompts), by_prompt(self.seconds, prompts)),
            "draft_ms": round(1e3 * sum(step.draft_seconds for step in self.steps) / count, 3),
            "same_text_as_plain": f"{self.same}/{len(self.seconds)}",
        }
        if self.modelled:
            found["by_clock"] = interval(by_prompt(plain.modelled, prompts), by_prompt(self.modelled, prompts))
        return found


# ---- contestants


def contestants(given: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Contestant]:
    how = {"memory": given.memory}  # each has a cache of its own
    found = {name: Contestant(LLM(model, tokenizer, name, **how)) for name in ("none", "pld", "suffix")}
    for shape in dict.fromkeys([*given.shapes, *given.fused]):
        ngram, window, guesses = map(int, shape.split(","))
        llm = LLM(model, tokenizer, "lookahead", ngram=ngram, window=window, guesses=guesses, **how)
        if shape in given.shapes:
            found[f"lookahead ({shape})"] = Contestant(llm)
        if shape in given.fused:
            found[f"with suffix ({shape})"] = fused(model, tokenizer, llm, given.memory)
    return found | (autos(model, tokenizer, given.memory) if given.auto else {})


def autos(model: Any, tokenizer: Any, memory: float) -> dict[str, Contestant]:
    """`auto` with and without `lookahead`. Each learns by itself, from nothing."""
    found = {}
    for name in ("auto", "auto less it"):
        llm = LLM(model, tokenizer, "auto", memory=memory)
        others = [part for part in llm.engine.drafter.parts if part not in ("lookahead", "prediction")]
        found[name] = Contestant(llm, {} if name == "auto" else {"drafters": others})
    return found


def fused(model: Any, tokenizer: Any, alone: LLM, memory: float) -> Contestant:
    """Both are asked at every step, and everything they say is verified."""
    llm, own = LLM(model, tokenizer, "auto", drafters="suffix,lookahead", memory=memory), alone.engine.drafter
    drafter = llm.engine.drafter
    drafter.parts["lookahead"] = own
    drafter.pilot = Pilot(Costs(FREE), list(drafter.parts), returns={"lookahead": own.returns})
    drafter.pilot.costs.observe = mock.Mock()  # whatever steps take
    found, learn = Contestant(llm, {"max_draft": own.default_draft + llm.target.default_draft}), drafter.learn

    def learning(*label: Any) -> bool:
        found.labels.append(label)
        return bool(learn(*label))

    drafter.learn = learning
    return found


def beside(everybody: dict[str, Contestant], repeats: int, prompts: int) -> dict[str, Any]:
    """How fast `auto` is with `lookahead`, as a multiple of without it: in all answers, and in the later half."""
    less, whole = (everybody[name].seconds for name in ("auto less it", "auto"))
    half = prompts // 2
    later = [i for i in range(repeats * prompts) if i % prompts >= half]
    found = {
        "all": interval(by_prompt(less, prompts), by_prompt(whole, prompts)),
        "later": interval(*(by_prompt([every[i] for i in later], prompts - half) for every in (less, whole))),
    }
    tell(f"auto with it, × without: {found}")
    return found


def in_pairs(given: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[str]) -> dict[str, Any]:
    """All prompts, answered by several pairs of fresh `auto`, with and without `lookahead`. How fast with it, as a
    multiple of without: each pair, and all together with a 95% interval over pairs."""
    less, whole, same = [], [], 0
    for number in range(given.pairs):
        two = autos(model, tokenizer, given.memory)
        for one in two.values():
            Contestant(one.llm, one.options).answer(max(prompts, key=len), 8, None)
        for i, prompt in enumerate(prompts):
            turn = list(two.values())[:: 1 if (number + i) % 2 else -1]  # each begins as often as the other
            first, second = [one.answer(prompt, given.tokens, None) for one in turn]
            same += first == second
        whole.append(sum(two["auto"].seconds))
        less.append(sum(two["auto less it"].seconds))
        choices = [step.choice for step in two["auto"].steps if step.choice]
        asked = sum("lookahead" in choice.asked for choice in choices)
        tell(f"pair {number + 1}: {less[-1] / whole[-1]:.3f} x without it; asked in {asked} of {len(choices)} steps")
        for one in two.values():
            one.llm.close()
    by_pair = interval(np.array(less)[:, None], np.array(whole)[:, None])
    tell(f"auto with it, × without: {by_pair}, {same} of {given.pairs * len(prompts)} texts equal")
    return {"pairs": [round(a / b, 4) for a, b in zip(less, whole, strict=True)], "all": by_pair, "same_text": same}


def priors(labels: Sequence[tuple[TokenTree, Sequence[int], int]]) -> list[Any]:
    """By depth and bin, how often nodes of `lookahead` were right, for budget/priors.json; where few were seen, nearly
    what they say."""
    right, seen = np.zeros((2, DEPTHS, BINS))
    counting = Calibration(["lookahead", "suffix"])
    for label in labels:
        counting.bins[:] = 0.0
        counting.learn(*label)
        found = counting.bins[0]
        seen += found[..., 1]
        right += found[..., 0] * found[..., 1]
    tell(f"{seen.sum():.0f} labels")
    believed = (right + PRIOR * (np.arange(BINS) + 0.5) / BINS) / (seen + PRIOR)
    return np.round(believed, 3).tolist()


# ---- the clock of another model


def clock_of(given: argparse.Namespace) -> Costs | None:
    """What steps of the larger model take."""
    if not given.clock:
        return None
    if ":" in given.clock:
        pairs = (pair.split(":") for pair in given.clock.split(","))
        return Costs({int(rows): float(ms) / 1e3 for rows, ms in pairs}, padded=True)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = llama_7b(device, dtype, **(SMALL if given.clock == "small" else {}))
    target = open_target(model, memory=given.memory)
    seconds, padded = measure(target, nonsense(target), at_most=60.0), bool(target.widths)
    target.release()
    del model, target
    gc.collect()
    torch.cuda.empty_cache()
    tell("ms by rows: " + ", ".join(f"{rows}:{1e3 * taken:.3f}" for rows, taken in seconds.items()))
    return Costs(seconds, padded)


@contextmanager
def by_the_clock(costs: Costs) -> Iterator[Callable[[LLM], None]]:
    """Within this, time passes as it does, but for steps of models that were handed over: these take what `costs`
    says."""
    ahead = 0.0

    def now() -> float:
        return time.perf_counter() + ahead

    def hand_over(llm: LLM) -> None:
        score = llm.target.score

        def scored(slots: Any, trees: Any, *rest: Any) -> Any:
            nonlocal ahead
            start = now()
            found = score(slots, trees, *rest)
            ahead += start + costs.seconds(max(map(len, trees))) - now()
            return found

        llm.target.score = scored  # type: ignore[method-assign]

    curve = {rows: costs.seconds(rows) for rows in ROWS}
    with (
        mock.patch("slipstream.engine.perf_counter", now),
        mock.patch("slipstream.stopwatch.perf_counter", now),
        mock.patch("slipstream.sequence.perf_counter", now),
        mock.patch("slipstream.drafters.auto.costs_of", return_value=Costs(curve, costs.padded)),
    ):
        yield hand_over


def clocked(
    given: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[str], costs: Costs, plain: list[float]
) -> dict[str, Any]:
    """`auto`, which decides by what steps take, where they take that. plain: seconds per token by the same clock."""
    told = dict[str, Any]()
    for name in ("suffix", "suffix,lookahead"):
        with by_the_clock(costs) as hand_over:
            one = Contestant(LLM(model, tokenizer, "auto", drafters=name, memory=given.memory))
            hand_over(one.llm)
            for prompt in prompts:
                one.answer(prompt, given.tokens, None)
        told[name] = {
            "tokens_per_step": round(one.tokens / len(one.steps), 3),
            "rows_per_step": round(sum(len(step.tree) for step in one.steps) / len(one.steps), 1),
            "by_clock": interval(by_prompt(plain, len(prompts)), by_prompt(one.seconds, len(prompts))),
        }
        tell(f"by the clock, auto({name}): {told[name]}")
        for source in one.llm.engine.drafter.pilot.sources().values():
            tell(f"      {known_of(source)}, {source.beside} beside")
    return told


# ---- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument(
        "--limit", type=int, nargs="+", default=[13], help="prompts of each file, or of all files alike"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", help="default: the model's on a GPU, float32 elsewhere")
    parser.add_argument("--device")
    parser.add_argument("--memory", type=float, default=0.1, help="share of a GPU's free memory for each contestant")
    parser.add_argument("--shapes", nargs="*", default=["5,7,7", "5,15,15"], metavar="N,W,G")
    parser.add_argument("--clock", default="", help="7b, small, or ROWS:MS,…")
    parser.add_argument("--no-auto", dest="auto", action="store_false")
    parser.add_argument(
        "--pairs", type=int, default=0, help="only compare so many fresh `auto` with as many without it"
    )
    parser.add_argument("--fused", nargs="*", default=["5,7,7"], metavar="N,W,G", help="of these, beside suffix")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further prompt after that")
    given = parser.parse_args()
    costs = clock_of(given)
    limits = given.limit * (len(given.prompts) if len(given.limit) == 1 else 1)
    asked = [p for file, n in zip(given.prompts, limits, strict=True) for p in select(read(file), None, n)]
    prompts = [p.turns[0] for p in asked or select(builtin(), None, given.limit[0])]
    with ExitStack() as patches:  # nobody knows anything beforehand, nor keeps what is learnt
        for place in ("slipstream.drafters.auto", "slipstream.targets.timing"):
            patches.enter_context(mock.patch(f"{place}.recall", return_value=None))
            patches.enter_context(mock.patch(f"{place}.remember"))
        model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
        if given.pairs:
            print(json.dumps({"benchmark": "lookahead in pairs", **in_pairs(given, model, tokenizer, prompts)}))
            return
        everybody = contestants(given, model, tokenizer)
        for one in everybody.values():  # code is loaded, caches grow, steps are captured
            Contestant(one.llm, one.options).answer(max(prompts, key=len), 8, None)
        started = time.perf_counter()
        for repeat in range(given.repeats):
            for number, prompt in enumerate(prompts):
                if not repeat and time.perf_counter() - started > given.seconds:
                    prompts = prompts[:number]
                    break
                said = {name: one.answer(prompt, given.tokens, costs) for name, one in everybody.items()}
                for name, one in everybody.items():
                    one.same += said[name] == said["none"]
                tell(f"repeat {repeat + 1}, prompt {number + 1} of {len(prompts)}")
        told = {name: one.told(everybody["none"], len(prompts)) for name, one in everybody.items()}
        for name, found in told.items():
            tell(f"{name:24}" + "  ".join(f"{key} {value}" for key, value in found.items()))
        if given.auto:
            for source in everybody["auto"].llm.engine.drafter.pilot.sources().values():
                tell(f"      {known_of(source)}, {source.beside} beside")
        report: dict[str, Any] = {"benchmark": "lookahead", "found": told}
        if given.auto:
            report["auto_by_auto_less_it"] = beside(everybody, given.repeats, len(prompts))
        report["priors"] = priors([label for one in everybody.values() for label in one.labels])
        if costs is not None and given.auto:
            plain = np.array(everybody["none"].modelled).reshape(given.repeats, -1).mean(0).tolist()
            del everybody, one
            report["auto_by_clock"] = clocked(given, model, tokenizer, prompts, costs, plain)
    report |= {"prompts": len(prompts), "repeats": given.repeats, "tokens": given.tokens, "dtype": str(model.dtype)}
    report |= {"clock": given.clock, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
