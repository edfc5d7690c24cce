"""Does a text depend on anything but its prompt? python bench/exact.py [PART…] --prompts FILE [--model …]

prompts  each prompt is answered alone by plain decoding, greedy and sampled. Every text must be the same again: with
         each of the --drafters, alone and in batches of --batches; with prompts that are read in pieces of 64 and of
         512 tokens; and with so few pages that answers are preempted and read again
long     the same with --contexts tokens of a --text: alone, read in pieces of 64 and 512, and in a batch with others

On a GPU in bfloat16, unless something else is asked for. A line for each to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from slipstream import LLM
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.targets import load_model
from slipstream.text import encode

WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}
PIECES = (64, 512)
SCARCE = 40  # pages that are left for all texts together, so that some of a large batch must wait
Prompts = list[list[int]]
Texts = dict[str, list[list[int]]]  # by way


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Trial:
    """Counts texts that are not the expected ones."""

    def __init__(self, model: Any, tokenizer: Any, given: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.given = model, tokenizer, given
        self.told: dict[str, Any] = {}

    @contextmanager
    def llm(self, drafter: str, batch: int = 1, piece: int | None = None) -> Iterator[LLM]:
        with LLM(self.model, self.tokenizer, drafter, max_batch=batch, memory=self.given.memory) as llm:
            if piece:
                llm.target.chunk = piece
            yield llm
        gc.collect()

    def alone(self, llm: LLM, prompts: Prompts, way: str) -> list[list[int]]:
        return [llm.generate(p, max_new_tokens=self.given.tokens, **WAYS[way]).tokens for p in prompts]

    def together(self, llm: LLM, prompts: Prompts, way: str) -> list[list[int]]:
        results = llm.generate(prompts, max_new_tokens=self.given.tokens, **WAYS[way])
        return [result.tokens for result in results]

    def count(self, name: str, expected: Texts, answers: Callable[[str], list[list[int]]]) -> None:
        clock, differ, tokens = perf_counter(), 0, 0
        for way, texts in expected.items():
            found = answers(way)
            differ += sum(a != b for a, b in zip(found, texts, strict=True))
            tokens += sum(map(len, found))
        texts_ = sum(map(len, expected.values()))
        self.told[name] = {"texts": texts_, "differ": differ}
        tell(f"{name:28} {differ:3} of {texts_} differ  {tokens / (perf_counter() - clock):8.0f} tokens/s")


def short(trial: Trial) -> dict[str, Any]:
    given = trial.given
    found = select(read(given.prompts) if given.prompts else builtin(), None, given.limit)
    prompts = [encode(p.turns[0], trial.tokenizer, True) for p in found]
    with trial.llm("none") as llm:
        expected = {way: trial.alone(llm, prompts, way) for way in WAYS}
    tell(f"{len(prompts)} prompts, {sum(len(t) for ts in expected.values() for t in ts)} tokens in all")
    for drafter in given.drafters:
        for batch in (1, *given.batches):
            with trial.llm(drafter, batch) as llm:
                answers = trial.together if batch > 1 else trial.alone
                trial.count(f"{drafter}, {batch} at a time", expected, lambda way: answers(llm, prompts, way))  # noqa: B023
    for piece in PIECES:
        with trial.llm("auto", max(given.batches), piece) as llm:
            trial.count(f"pieces of {piece}", expected, lambda way: trial.together(llm, prompts, way))
    with trial.llm("auto", max(given.batches)) as llm:
        free = getattr(getattr(llm.target, "arena", None), "_free", None)
        if free is not None:
            del free[: max(0, len(free) - SCARCE)]
        trial.count("few pages", expected, lambda way: trial.together(llm, prompts, way))
        trial.told["few pages"]["put_back"] = llm.service.so_far().put_back
        tell(f"put back {trial.told['few pages']['put_back']} times")
    return trial.told


def long(trial: Trial) -> dict[str, Any]:
    given = trial.given
    words = encode("\n".join(Path(file).read_text() for file in given.text), trial.tokenizer, False)
    for length in given.contexts:
        # Four texts: two that begin alike, two of their own.
        starts = [0, 0, length // 3, length // 2]
        prompts = [
            (words * (2 + length // len(words)))[start : start + length - 40 * i] for i, start in enumerate(starts)
        ]
        with trial.llm("none") as llm:
            expected = {way: trial.alone(llm, prompts, way) for way in WAYS}
        for drafter in given.drafters:
            with trial.llm(drafter, len(prompts)) as llm:
                trial.count(f"{length}: {drafter}, alone", expected, lambda way: trial.alone(llm, prompts, way))  # noqa: B023
                trial.count(f"{length}: {drafter}, together", expected, lambda way: trial.together(llm, prompts, way))  # noqa: B023
        for piece in PIECES:
            with trial.llm("auto", len(prompts), piece) as llm:
                trial.count(f"{length}: pieces of {piece}", expected, lambda way: trial.together(llm, prompts, way))  # noqa: B023
    return trial.told


PARTS = {"prompts": short, "long": long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", help="a file; default: the built-in ones")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafters", nargs="+", default=["auto"])
    parser.add_argument("--batches", type=int, nargs="+", default=[3, 16, 64])
    parser.add_argument("--text", nargs="*", default=[], help="files of plain text, for `long`")
    parser.add_argument("--contexts", type=int, nargs="+", default=[7900])
    parser.add_argument("--memory", type=float, default=0.3, help="of a GPU, for texts")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    model, tokenizer = load_model(
        given.model, dtype=given.dtype or ("bfloat16" if cuda else "float32"), device=given.device
    )
    trial = Trial(model, tokenizer, given)
    for part in given.parts or ["prompts"]:
        PARTS[part](trial)
    print(json.dumps({"benchmark": "exact", "model": given.model, **trial.told}))
    sys.exit(any(one["differ"] for one in trial.told.values()))


if __name__ == "__main__":
    main()
