"""Editing with a prediction, of a document with some edits: python bench/editing.py --tokens 2000 --seeds 0 1 2

An accept rule forces the model's output to be the edited document: steps have their real costs, and all contestants
write the same text. The document is source code of the standard library, and is in the prompt. Edits are insertions,
deletions and replacements at random places, with new text from elsewhere in the library.

Plain decoding, `auto` without the prediction and `auto` with it take turns. A text during which something was
captured, as happens once per process, is repeated. A table goes to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import transformers

from gpu import settled
from slipstream import LLM
from slipstream.accept import Rule
from slipstream.sampling import Sampler
from slipstream.targets import Scores, load_model
from slipstream.tree import TokenTree

DOCUMENT, ELSEWHERE = "argparse", "typing"
ASKED = "Here is a file. Send it back with the changes that we spoke about, and nothing else.\n\n"
CONTESTANTS: dict[str, tuple[str, bool]] = {
    "none": ("none", False),
    "auto": ("auto", False),
    "auto + prediction": ("auto", True),
}


@dataclass
class Forced(Rule):
    """Whatever the model says, these tokens come. It is asked all the same."""

    text: list[int]
    said: int = 0
    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:  # noqa: ARG002
        scores.token(node, sampler)
        self.said += 1
        return self.text[self.said - 1]


def source(module: str, tokenizer: Any) -> list[int]:
    text = inspect.getsource(importlib.import_module(module))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def edited(document: list[int], elsewhere: list[int], edits: int, length: int, seed: int) -> list[int]:
    """The document with so many edits of so many tokens. Places are drawn one from each of as many equal parts."""
    rng, part = random.Random(seed), len(document) // edits
    text: list[int] = []
    for i in range(edits):
        at = i * part + rng.randrange(part - length)
        start = rng.randrange(len(elsewhere) - length)
        new = elsewhere[start : start + length]
        kind = ("insert", "delete", "replace")[i % 3]
        text += document[i * part : at]
        text += [] if kind == "delete" else new
        text += document[at if kind == "insert" else at + length : (i + 1) * part]
    return text + document[edits * part :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tokens", type=int, default=2000, help="of the document")
    parser.add_argument("--edits", type=int, default=10)
    parser.add_argument("--length", type=int, default=20, help="tokens of an edit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()

    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    llms = {d: LLM(model, tokenizer, d, compile=given.compile) for d in {d for d, _ in CONTESTANTS.values()}}
    document, elsewhere = source(DOCUMENT, tokenizer)[: given.tokens], source(ELSEWHERE, tokenizer)
    prompt = list(tokenizer(ASKED, add_special_tokens=False)["input_ids"]) + document

    def run(name: str, text: list[int]) -> Any:
        drafter, predicted = CONTESTANTS[name]
        expected = document if predicted else None
        return llms[drafter].generate(
            prompt, max_new_tokens=len(text), ignore_eos=True, accept=Forced(text), prediction=expected
        )

    for name in CONTESTANTS:
        # Warm up: code is loaded, caches grow, steps of every width are captured.
        run(name, edited(document, elsewhere, given.edits, given.length, seed=-1))
    told: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for seed in given.seeds:
        text = edited(document, elsewhere, given.edits, given.length, seed)
        for name in CONTESTANTS:
            result, captured = settled(partial(run, name, text))
            assert result.tokens == text
            stats = result.stats
            seconds = stats.seconds - stats.first_token_seconds
            rate = (len(text) - 1) / seconds
            plain = told["none"][-1]["tokens_per_second"] if name != "none" else rate
            told[name].append(
                {
                    "tokens_per_second": round(rate, 1),
                    "tokens_per_step": round((len(text) - 1) / (stats.steps - 1), 2),
                    "times_plain": round(rate / plain, 2),
                    "draft_ms": round(1e3 * stats.draft_seconds / stats.steps, 3),
                    "host_ms": round(1e3 * stats.host_seconds / stats.steps, 3),
                    "capture_ms": round(1e3 * captured, 1),
                }
            )
            shown = "  ".join(f"{k} {v}" for k, v in told[name][-1].items())
            print(f"seed {seed}  {name:18} {shown}", file=sys.stderr, flush=True)
    report = {
        "benchmark": "editing",
        "times_plain": {n: round(statistics.median(r["times_plain"] for r in told[n]), 2) for n in CONTESTANTS},
        "runs": told,
        "document": len(document),
        "edits": [given.edits, given.length],
        "seeds": given.seeds,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else f"{torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
