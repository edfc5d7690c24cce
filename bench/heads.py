"""Speed of trained heads: python bench/heads.py [PART…] --heads eagle3=FOLDER redrafter=FOLDER … --prompts FILE…

sizes    tokens per step and per second against plain decoding, for several sizes of tree, greedy and at 0.7
chains   the same for a chain, and for trees of the same head: what the tree gives
trees    EAGLE's static tree against the dynamic one, of equal size
beams    ReDrafter: tokens per step by beam width; nodes with and without merging what beams share
batch    ReDrafter: tokens per second by batch and beam width, with and without merging
typical  rejection sampling against typical acceptance by temperature: only tokens per second

A head's name is its kind, or KIND:NAME=FOLDER where there are several of a kind; model=FOLDER is a draft model. Each
part prints a table to stderr and one JSON line. Plain decoding is measured before the others, and again after them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
import transformers

from slipstream import LLM
from slipstream.evaluate.workloads import read, select
from slipstream.targets import load_model

WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "0.7": {"temperature": 0.7, "seed": 1}}


class Bench:
    """The model, the prompts, and who answers them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.model, self.tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
        self.prompts = [p.turns[0] for file in given.prompts for p in select(read(file), None, given.limit)]
        self.heads = [(*name.split(":", 1), folder) for name, folder in (word.split("=", 1) for word in given.heads)]
        self.told: dict[str, Any] = {"prompts": len(self.prompts), "tokens": given.tokens}
        self.texts: dict[str, list[list[int]]] = {}  # plain decoding's, by the request's options

    def of_kind(self, *kinds: str) -> Iterable[tuple[str, str, str]]:
        """(kind, name, folder)"""
        for kind, *name, folder in self.heads:
            if not kinds or kind in kinds:
                yield kind, name[0] if name else kind, folder

    def llm(self, drafter: str, batch: int = 1, **options: Any) -> LLM:
        return LLM(self.model, self.tokenizer, drafter, compile=self.given.compile, max_batch=batch, **options)

    def drafting(self, kind: str, folder: str, **options: Any) -> LLM:
        where: dict[str, Any] = {"draft_model": folder} if kind == "model" else {"drafter_path": folder}
        return self.llm(kind, **where, **options)

    def measure(self, llm: LLM, **options: Any) -> dict[str, float]:
        """One prompt after the other."""
        clock = perf_counter()
        for prompt in self.prompts:  # captures, compiles: prompts of every length
            llm.generate(prompt, max_new_tokens=16, **options)
        first = perf_counter() - clock
        results = [llm.generate(p, max_new_tokens=self.given.tokens, **options) for p in self.prompts]
        texts = [r.tokens for r in results]
        plain = self.texts.setdefault(str({**options, "max_draft": None}), texts)
        steps = sum(r.stats.steps for r in results)
        seconds = sum(r.stats.seconds for r in results)
        return {
            "tokens_per_step": round(sum(len(r.tokens) for r in results) / steps, 3),
            "tokens_per_second": round(sum(len(r.tokens) for r in results) / seconds, 1),
            "verified": round(sum(r.stats.nodes_verified for r in results) / steps, 1),
            "draft_ms": round(sum(r.stats.draft_seconds for r in results) / steps * 1e3, 3),
            "verify_ms": round(sum(r.stats.verify_seconds for r in results) / steps * 1e3, 3),
            "first_seconds": round(first, 1),
            "same_text": sum(text == other for text, other in zip(texts, plain, strict=True)),
        }

    def plain(self, **options: Any) -> float:
        with self.llm("none") as llm:
            return self.measure(llm, **options)["tokens_per_second"]

    def tell(self, name: str, found: dict[str, Any]) -> None:
        self.told[name] = found
        print(f"{name:40}" + "  ".join(f"{k} {v}" for k, v in found.items()), file=sys.stderr, flush=True)


def sizes(bench: Bench) -> None:
    for way, options in WAYS.items():
        plain = bench.plain(**options)
        bench.tell(f"plain {way}", {"tokens_per_second": plain})
        for kind, name, folder in bench.of_kind():
            with bench.drafting(kind, folder) as llm:
                for nodes in bench.given.sizes:
                    found = bench.measure(llm, max_draft=nodes, **options)
                    ratio = round(found["tokens_per_second"] / plain, 3)
                    bench.tell(f"{name} {nodes} {way}", {**found, "speed_up": ratio})
        bench.tell(f"plain {way}, again", {"tokens_per_second": bench.plain(**options)})


# Options that make a draft one chain, as deep as the tree. A draft model's is one already.
CHAIN: dict[str, dict[str, Any]] = {
    **{kind: {"width": 1} for kind in ("eagle", "eagle3", "falcon", "dflash")},
    "redrafter": {"beams": 1},
    "model": {},
}


def chains(bench: Bench) -> None:
    plain = bench.plain()
    bench.tell("plain", {"tokens_per_second": plain})
    for kind, name, folder in bench.of_kind(*CHAIN):
        with bench.drafting(kind, folder, **CHAIN[kind]) as llm:
            found = {"chain": bench.measure(llm)}
            if kind == "model":  # the acceptance of a token: (tokens per step - 1) / verified
                found["one token"] = bench.measure(llm, max_draft=1)
        if kind != "model":
            with bench.drafting(kind, folder) as llm:
                found |= {f"tree of {nodes}": bench.measure(llm, max_draft=nodes) for nodes in bench.given.sizes}
        for shape, numbers in found.items():
            ratio = round(numbers["tokens_per_second"] / plain, 3)
            over = round(numbers["tokens_per_step"] / found["chain"]["tokens_per_step"], 3)
            bench.tell(f"{name} {shape}", {**numbers, "speed_up": ratio, "over_chain": over})
    bench.tell("plain, again", {"tokens_per_second": bench.plain()})


def trees(bench: Bench) -> None:
    for _, name, folder in bench.of_kind("eagle"):
        for dynamic in (False, True):
            llm = bench.llm("eagle", drafter_path=folder, dynamic=dynamic)
            for nodes in bench.given.sizes:
                bench.tell(f"{name} dynamic={dynamic} {nodes}", bench.measure(llm, max_draft=nodes))


def beams(bench: Bench) -> None:
    for _, name, folder in bench.of_kind("redrafter"):
        for width in (1, 2, 4, 8, 16):
            for compress in (True, False):
                llm = bench.llm("redrafter", drafter_path=folder, beams=width, every=False, compress=compress)
                bench.tell(f"{name} {width} beams, merged={compress}", bench.measure(llm, max_draft=80))


def batch(bench: Bench) -> None:
    settings: list[tuple[int, bool]] = [(0, True), *((w, c) for w in (1, 4, 16) for c in (True, False))]
    for _, name, folder in bench.of_kind("redrafter"):
        for size in (1, 4, 16, 32):
            asked = (bench.prompts * (1 + size // len(bench.prompts)))[:size]
            for width, compress in settings:
                if width:
                    given = {"drafter_path": folder, "beams": width, "every": False, "compress": compress}
                    llm = bench.llm("redrafter", size, **given)
                else:
                    llm = bench.llm("none", size)
                for _ in range(2):  # the first time captures
                    clock = perf_counter()
                    results = llm.generate(asked, max_new_tokens=bench.given.tokens, max_draft=40, ignore_eos=True)
                    rate = sum(len(r.tokens) for r in results) / (perf_counter() - clock)
                found = {"tokens_per_second": round(rate, 1), "each": round(rate / size, 1)}
                bench.tell(f"{name} batch {size}, {width} beams, merged={compress}", found)


def typical(bench: Bench) -> None:
    for kind, name, folder in bench.of_kind("redrafter"):
        llm = bench.llm(kind, drafter_path=folder, mode="sample")
        for temperature in (0.1, 0.3, 0.5, 0.7, 0.9):
            for rule in ("rejection", "typical"):
                found = bench.measure(llm, temperature=temperature, seed=1, accept=rule)
                bench.tell(f"{name} {rule} {temperature}", found)


PARTS: dict[str, Callable[[Bench], None]] = {
    "sizes": sizes,
    "chains": chains,
    "trees": trees,
    "beams": beams,
    "batch": batch,
    "typical": typical,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--heads", nargs="+", required=True, metavar="KIND[:NAME]=FOLDER")
    parser.add_argument("--prompts", nargs="+", required=True, help="files of prompts")
    parser.add_argument("--limit", type=int, default=26, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 63], help="nodes of a tree")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    where = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        where["device"] = torch.cuda.get_device_name()
    bench = Bench(given)
    for name in given.parts or PARTS:
        bench.told = {"part": name, **where, "prompts": len(bench.prompts), "tokens": given.tokens}
        PARTS[name](bench)
        print(json.dumps(bench.told), flush=True)


if __name__ == "__main__":
    main()
