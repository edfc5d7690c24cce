"""Random requests against plain decoding and `transformers`: python bench/fuzz.py --seed 1 --cases 5000

Every case has its own seed, which decides: a tiny model of one of the tests' families, a drafter with options, requests
with options, and a way to make them. Its texts must equal those of a new LLM with drafter `none`, one request at a time
and, if a request is greedy and `transformers` supports its options, those of `generate` there. Nothing may stay open
afterwards. A case that fails is printed, with both texts, and repeated on new objects; `--only SEED` does the same.
Results go to stdout, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from random import Random
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from fuzz_cases import CASES, Ask, Case, draw, predicted
from fuzz_lab import ORACLE, Lab, described, leaks
from slipstream import LLM, SlipstreamError
from slipstream.answers import Result
from slipstream.drafters import _capabilities as can
from slipstream.evaluate.report import provenance

OURS = ("max_draft", "accept", "collection", "prediction", "drafters")  # options that must not matter to the text
# and those that `transformers` has too, if under other names
KNOWN = {"max_new_tokens", "seed", "repetition_penalty", "logit_bias", "bad_words", "stop_tokens", "ignore_eos"}
LOGPROBS = 2e-3  # by which log probabilities may differ: batches and trees sum in another order

Answer = Result | SlipstreamError


@dataclass
class Outcome:
    problems: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)  # texts, by what with
    tokens: int = 0
    accepted: int = 0  # of them, drafted
    refused: int = 0  # requests that are errors for whoever decodes


class Trial:
    """One case."""

    def __init__(self, lab: Lab, case: Case) -> None:
        self.lab, self.case, self.outcome = lab, case, Outcome()
        self.plain = lab.plain(case.family)
        self.llm = lab.llm(case.family, case.fixed, case.drafter, case.variant)
        self.rng = Random(f"predictions {case.seed}")

    def run(self) -> Outcome:
        first = self.case.asks[0]
        match self.case.way:
            case "generate":
                self._generate(first)
            case "several":
                self._several(first)
            case "batch":
                self._batch(self.case.asks)
            case "chat":
                self._chat()
            case "threads":
                self._threads()
            case _:
                self._stream(first)
        for ask in self.case.behind:
            self._generate(ask)
        self.outcome.problems += leaks(self.llm)
        return self.outcome

    # ---- ways to ask

    def _generate(self, ask: Ask) -> None:
        expected = self._expected(ask, ask.prompt)
        found = attempt(lambda: self.llm.generate(ask.prompt, **self._told(ask, expected)))
        self._compare(ask, found, expected)

    def _several(self, ask: Ask) -> None:
        expected = [self._expected(ask, ask.prompt, sample) for sample in range(self.case.count)]
        found = attempt(lambda: self.llm.generate(ask.prompt, n=self.case.count, **self._told(ask, expected[0])))
        self._compare_all([ask] * len(expected), found, expected)

    def _batch(self, asks: list[Ask]) -> None:
        expected = [self._expected(ask, ask.prompt) for ask in asks]
        told = [self._told(ask, answer) for ask, answer in zip(asks, expected, strict=True)]
        self._know(asks, expected)
        options = told[0] | {"seed": [t["seed"] for t in told]}
        if "prediction" in options:
            options["prediction"] = [t.get("prediction", [5]) for t in told]
        found = attempt(lambda: self.llm.generate([ask.prompt for ask in asks], **options))
        self._compare_all(asks, found, expected)

    def _stream(self, ask: Ask) -> None:
        expected = self._expected(ask, ask.prompt)
        told = self._told(ask, expected)
        self._read(ask, lambda: self.llm.stream(ask.prompt, **told), expected)

    def _chat(self) -> None:
        with self.llm.chat(self.case.system) as chat:
            for ask in self.case.asks:
                messages = [*chat.messages, {"role": "user", "content": ask.prompt}]
                expected = self._expected(ask, messages)
                told = self._told(ask, expected)
                found = self._read(ask, lambda ask=ask, told=told: chat.stream(ask.prompt, **told), expected)
                if isinstance(found, Result) and chat.messages[-1]["content"] != found.text:
                    self.outcome.problems.append(f"the chat remembers {chat.messages[-1]}, but {found.text!r} was said")

    def _threads(self) -> None:
        """All at once, on one LLM."""
        asks = self.case.asks
        expected = [self._expected(ask, ask.prompt) for ask in asks]
        told = [self._told(ask, answer) for ask, answer in zip(asks, expected, strict=True)]
        self._know(asks, expected)
        with ThreadPoolExecutor(len(asks)) as pool:
            calls = [
                pool.submit(attempt, lambda ask=ask, t=t: self.llm.generate(ask.prompt, **t))
                for ask, t in zip(asks, told, strict=True)
            ]
            for ask, call, answer in zip(asks, calls, expected, strict=True):
                self._compare(ask, call.result(), answer)

    def _read(self, ask: Ask, opened: Callable[[], Any], expected: Answer) -> Answer:
        """A stream, to its end or to where it is left."""

        def read() -> Result:
            stream, pieces = opened(), list[str]()
            for piece in stream:
                pieces.append(piece)
                if ask.leave is not None and len(pieces) >= ask.leave:
                    if not ask.cancel:
                        break
                    stream.cancel()
            found = stream.result
            if "".join(pieces) != found.text and (found.finish_reason != "cancelled" or ask.cancel):
                self.outcome.problems.append(f"the pieces are {''.join(pieces)!r}, the text is {found.text!r}")
            return found

        found = attempt(read)
        self._compare(ask, found, expected)
        return found

    # ---- what is expected

    def _expected(self, ask: Ask, prompt: Any, sample: int = 0) -> Answer:
        answer = attempt(lambda: self.plain.generate(prompt, sample=sample, **without(ask.options, *OURS)))
        if isinstance(answer, Result) and not set(without(ask.options, *OURS, "logprobs")) - KNOWN and not sample:
            tokens = self.plain.request(prompt).tokens
            theirs = by_transformers(self.plain, tokens, ask.options)
            self.outcome.compared["transformers"] += 1
            if theirs != answer.tokens:
                self.outcome.problems.append(f"transformers says {theirs}, plain decoding {answer.tokens}")
        self._know([Ask(self.plain.request(prompt).tokens, {})], [answer])
        return answer

    def _know(self, asks: list[Ask], answers: list[Answer]) -> None:
        if self.case.drafter == ORACLE:
            known = {tuple(a.prompt): r.tokens for a, r in zip(asks, answers, strict=True) if isinstance(r, Result)}
            self.llm.engine.drafter.answers = known

    def _told(self, ask: Ask, expected: Answer) -> dict[str, Any]:
        """The options, with those that this drafter alone takes."""
        options, takes, rng = dict(ask.options), can.takes(self.llm.engine.drafter), self.rng
        if "prediction" in takes and rng.random() < 0.7:
            answer = expected.tokens if isinstance(expected, Result) and rng.random() < 0.8 else [7, 8, 9] * 5
            options["prediction"] = predicted(rng, answer)
        if "drafters" in takes and rng.random() < 0.2:
            parts = [name for name in self.llm.engine.drafter.parts if name != "prediction"]
            options["drafters"] = rng.sample(parts, rng.randint(1, len(parts)))
        return options

    # ---- and what came

    def _compare_all(self, asks: list[Ask], found: Any, expected: list[Answer]) -> None:
        if isinstance(found, SlipstreamError):
            errors = [(a, e) for a, e in zip(asks, expected, strict=True) if isinstance(e, SlipstreamError)]
            ask, answer = errors[0] if errors else (asks[0], expected[0])
            self._compare(ask, found, answer)
        else:
            for ask, one, answer in zip(asks, found, expected, strict=True):
                self._compare(ask, one, answer)

    def _compare(self, ask: Ask, found: Answer, expected: Answer) -> None:
        self.outcome.problems += self._differences(ask, found, expected)
        if isinstance(found, Result):
            self.outcome.tokens += len(found.tokens)
            self.outcome.accepted += found.stats.accepted
        else:
            self.outcome.refused += 1

    def _differences(self, ask: Ask, found: Answer, expected: Answer) -> list[str]:
        rule = ask.options.get("accept", "match")
        if rule not in ("match", "rejection") or (rule == "rejection" and ask.options.get("temperature")):
            if isinstance(found, Result):  # other draws: that it runs is all that can be said
                self.outcome.compared["nothing"] += 1
                most = ask.options["max_new_tokens"]
                return [] if 0 < len(found.tokens) <= most else [f"{len(found.tokens)} tokens, {most} at most"]
            return [] if type(found) is type(expected) else [f"{found!r}, and plain decoding says {told(expected)}"]
        self.outcome.compared["none"] += 1
        if isinstance(found, SlipstreamError) or isinstance(expected, SlipstreamError):
            same = type(found) is type(expected)
        elif ask.leave is not None and found.finish_reason == "cancelled":
            same = found.tokens == expected.tokens[: len(found.tokens)]
        else:
            same = found.tokens == expected.tokens and found.text == expected.text
            same = same and found.finish_reason == expected.finish_reason
        if not same:
            return ["\n".join(f"{what:8} {told(r)}" for what, r in (("found", found), ("expected", expected)))]
        return different_logprobs(found, expected) if isinstance(found, Result) else []


def attempt(call: Callable[[], Any]) -> Any:
    """What it gives, or the error that it raises on purpose. Others are failures of the case."""
    try:
        return call()
    except SlipstreamError as error:
        return error


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in names}


def told(answer: Answer) -> str:
    if isinstance(answer, SlipstreamError):
        return repr(answer)
    return f"{answer.finish_reason} {answer.text!r} {answer.tokens}"


def different_logprobs(found: Result, expected: Result) -> list[str]:
    for i, (one, other) in enumerate(zip(found.logprobs or [], expected.logprobs or [], strict=False)):
        near = [abs(a - b) for a, b in zip(one.top.values(), other.top.values(), strict=True)]
        if max([abs(one.logprob - other.logprob), *near]) > LOGPROBS or one.token != other.token:
            return [f"log probabilities of token {i}: found {one}, expected {other}"]
    return []


@torch.inference_mode()
def by_transformers(plain: LLM, tokens: list[int], options: dict[str, Any]) -> list[int]:
    """Its greedy answer, as far as the context goes."""
    ends = {*options.get("stop_tokens", ()), *(() if options.get("ignore_eos") else plain.eos)}
    bias = options.get("logit_bias")
    config = GenerationConfig(
        max_new_tokens=min(options["max_new_tokens"], plain.target.context + 1 - len(tokens)),
        do_sample=False,
        use_cache=True,
        repetition_penalty=options.get("repetition_penalty", 1.0),
        bad_words_ids=options.get("bad_words"),
        sequence_bias=[[[token], value] for token, value in bias.items()] if bias else None,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
    )
    ids = torch.tensor([tokens])
    out = plain.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(tokens) :].tolist()


# ---- many of them


def tried(lab: Lab, case: Case) -> Outcome:
    """A failure of any kind becomes a problem."""
    try:
        return Trial(lab, case).run()
    except Exception:
        return Outcome([traceback.format_exc()])


def tell(case: Case, lab: Lab, problems: list[str], alone: list[str]) -> None:
    most, options = lab.options(case.family, case.fixed, case.drafter, case.variant)
    print(f"\n== case {case.seed}: {'fails' if alone else 'does NOT fail'} alone")
    print(json.dumps(asdict(case) | {"max_batch": most, "drafter_options": described(options)}, default=str))
    for problem in problems:
        print(problem)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=5000, help="how many, those before --first counted")
    parser.add_argument("--first", type=int, default=0, help="the number of the first, to go on where a run ended")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    parser.add_argument(
        "--only", type=int, metavar="SEED", help="the case of this seed alone (with --threads if it was drawn with it)"
    )
    parser.add_argument("--threads", action="store_true", help="also several requests at once from threads")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tiny products gain nothing by being shared out
    transformers.logging.set_verbosity_error()
    logging.getLogger("slipstream").setLevel(logging.ERROR)

    seeds = [args.only] if args.only is not None else [args.seed * CASES + i for i in range(args.first, args.cases)]
    lab, start = Lab(seeds[0] // CASES), perf_counter()
    counts = {name: Counter[str]() for name in ("way", "drafter", "family", "failed", "compared", "accepted")}
    total, failed = Outcome(), list[int]()
    for number, seed in enumerate(seeds, 1):
        case = draw(seed, args.threads)
        outcome = tried(lab, case)
        if outcome.problems:
            failed.append(seed)
            counts["failed"][case.way] += 1
            tell(case, lab, outcome.problems, tried(Lab(case.run), case).problems)
            lab.forget(case.family)
        counts["way"][case.way] += 1
        counts["drafter"][case.drafter] += 1
        counts["family"][case.family + (", fixed steps" if case.fixed else "")] += 1
        counts["compared"].update(outcome.compared)
        counts["accepted"][case.drafter] += outcome.accepted
        total.tokens, total.refused = total.tokens + outcome.tokens, total.refused + outcome.refused
        if number % 50 == 0:
            print(
                f"{args.first + number} cases, {len(failed)} failed, {perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        if perf_counter() - start > args.seconds:
            break
    report = {
        "benchmark": "fuzz",
        "seed": args.seed,
        "first": args.first,
        "cases": sum(counts["way"].values()),
        "failed": failed,
        "tokens": total.tokens,
        "errors_that_plain_decoding_raises_too": total.refused,
        "seconds": round(perf_counter() - start, 1),
        "counts": {name: dict(sorted(count.items())) for name, count in counts.items()},
        "provenance": provenance("tiny random models", lab.plain("llama").target),
    }
    print(json.dumps(report))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
