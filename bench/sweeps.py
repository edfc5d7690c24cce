"""Retrieval under the budget: python bench/sweeps.py --prompts HumanEval.jsonl --stores 1M=FOLDER 10M=FOLDER …

stores   `auto` without a store and with each of them, with default options
lengths  `auto` with the last store, whose retrieved continuations have at most 4, 8, 16 and 32 tokens; and `suffix`,
         the same retrieval without a budget, which verifies as much as a step may hold

`none` and all of these take turns prompt by prompt on one model. For each: tokens per step, retrieved and verified
nodes per step, their depth, the share of steps without any, which drafters' tokens were accepted, and the speed-up over
plain decoding, with a bootstrapped 95% interval. Without --stores, stores are made of the first 1, 10 and 100 million
tokens of corpus.py.

A table goes to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import corpus
from auto import interval
from gpu import tell
from retrieval import documents, make_store
from slipstream import LLM, Store
from slipstream.drafters.auto import AutoDrafter
from slipstream.drafters.base import Proposal
from slipstream.drafters.rest import Rest
from slipstream.drafters.suffix import Suffix
from slipstream.errors import OptionError
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.request import Step
from slipstream.targets import load_model

SIZES = {"1M": 10**6, "10M": 10**7, "100M": 10**8}
COLUMNS = "tok/step  retrieved  verified  depth  no draft  asked nobody  draft ms  × plain (95%)"


@dataclass(eq=False)
class Contestant:
    llm: LLM
    store: str = ""
    length: int = 0  # of retrieved continuations, where it is not the default
    retrieved: int = 0  # nodes, before anybody chose among them
    tokens: int = 0  # behind each answer's first, as everything here
    steps: list[Step] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # per token, of each answer
    accepted: dict[str, int] = field(default_factory=dict)  # by source; a token that two drafted counts for both
    same: int = 0  # answers that equal plain decoding's

    def __post_init__(self) -> None:
        """Reach for the parts that retrieve: to set the length of what comes from the store, and to count what they
        find."""
        drafter = self.llm.engine.drafter
        for part in drafter.parts.values() if isinstance(drafter, AutoDrafter) else [drafter]:
            if not isinstance(part, Suffix | Rest):
                continue
            if self.length and part.store is not None:
                part.shape = replace(part.shape, length=self.length)
            part.propose = partial(self.counted, part.propose)  # type: ignore[method-assign]

    def counted(self, ask: Callable[..., list[Proposal]], *given: Any) -> list[Proposal]:
        found = ask(*given)
        self.retrieved += sum(len(proposal.tree) - 1 for proposal in found)
        return found

    def answer(self, prompt: str, tokens: int, max_draft: int) -> list[int]:
        steps = list[Step]()
        request = self.llm.request(prompt, max_new_tokens=tokens, max_draft=max_draft)
        request.watch = steps.append
        *_, ended = self.llm.engine.run([request])
        later = len(ended.tokens) - 1
        self.steps += steps[1:]  # the first is the prompt's
        self.tokens += later
        self.seconds.append((ended.stats.seconds - ended.stats.first_token_seconds) / max(1, later))
        for source, count in ended.stats.by_source.items():
            self.accepted[source] = self.accepted.get(source, 0) + count["accepted"]
        return ended.tokens

    def forget(self) -> None:
        """What was counted while it warmed up; what the budget has learnt stays."""
        self.retrieved = self.tokens = 0
        self.steps, self.seconds, self.accepted = [], [], {}

    def told(self, plain: Contestant, prompts: int) -> dict[str, Any]:
        count = max(1, len(self.steps))
        nodes = [len(step.tree) - 1 for step in self.steps]
        nobody = sum(step.choice is not None and not step.choice.asked for step in self.steps)
        times = interval(by_prompt(plain.seconds, prompts), by_prompt(self.seconds, prompts))
        return {
            "store": self.store,
            "length": self.length or "default",
            "tokens_per_step": round(self.tokens / count, 3),
            "nodes_retrieved": round(self.retrieved / count, 2),
            "nodes_verified": round(sum(nodes) / count, 2),
            "depth_verified": round(sum(step.tree.depth for step in self.steps) / count, 2),
            "steps_without_draft": round(nodes.count(0) / count, 3),
            "steps_nobody_asked": round(nobody / count, 3),
            "accepted": self.accepted,
            "accepted_share": {name: round(n / max(1, self.tokens), 3) for name, n in self.accepted.items()},
            "draft_ms": round(1e3 * sum(step.draft_seconds for step in self.steps) / count, 3),
            "tokens_per_second": round(1 / float(np.mean(self.seconds)), 2),
            "times_plain": times,
            "same_text_as_plain": f"{self.same}/{len(self.seconds)}",
        }


def by_prompt(seconds: Sequence[float], prompts: int) -> Any:
    """(prompts, repeats) of what was measured repeat by repeat."""
    return np.array(seconds).reshape(-1, prompts).T


def named(stores: Sequence[str]) -> dict[str, Path]:
    found = {}
    for text in stores:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise OptionError(f"--stores takes NAME=FOLDER, found {text!r}: write for example 10M=stores/code")
        found[name] = Path(folder)
    return found


def made(scratch: Path) -> dict[str, Path]:
    """Each is a part of the next, since all are the beginning of one corpus."""
    code = corpus.load()
    for name, tokens in SIZES.items():
        tell(f"making a store of {name} tokens")
        make_store(scratch / name, documents(code, tokens))
    return {name: scratch / name for name in SIZES}


def size(folder: Path) -> int:
    with Store.open(folder) as store:
        return sum(segment.tokens for segment in store.manifest.segments)


def row(name: str, found: dict[str, Any]) -> str:
    ratio, low, high = found["times_plain"]
    sources = ", ".join(f"{source} {share:.0%}" for source, share in found["accepted_share"].items())
    return (
        f"{name:20} {found['tokens_per_step']:8.2f} {found['nodes_retrieved']:10.1f} {found['nodes_verified']:9.1f} "
        f"{found['depth_verified']:6.1f} {found['steps_without_draft']:9.0%} {found['steps_nobody_asked']:13.0%} "
        f"{found['draft_ms']:9.2f}  {ratio:.2f} ({low:.2f}-{high:.2f})  {sources}"
    )


def sweep(given: argparse.Namespace, stores: dict[str, Path]) -> dict[str, Any]:
    asked = [p.turns[0] for file in given.prompts for p in select(read(file), None, given.limit)]
    asked = asked or [p.turns[0] for p in select(builtin(), ["code-writing"], given.limit)]
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)

    names = [name.strip() for name in given.drafters.split(",")]

    def contestant(drafter: str, store: str = "", length: int = 0) -> Contestant:
        whom = ",".join(name for name in names if store or name != "rest")
        options: dict[str, Any] = {"drafters": whom} if drafter == "auto" else {}
        options |= {"store": str(stores[store])} if store else {}
        return Contestant(LLM(model, tokenizer, drafter, compile=given.compile, **options), store, length)

    *_, last = stores
    running = {"none": contestant("none"), "auto": contestant("auto")}
    running |= {f"auto {store}": contestant("auto", store) for store in stores}
    running |= {f"auto {last} l={n}": contestant("auto", last, n) for n in given.lengths}
    running |= {f"suffix {last} l={n}": contestant("suffix", last, n) for n in given.lengths}
    for each in running.values():  # code is loaded, steps are captured, pages of stores are checked
        for prompt in (builtin()[0].turns[0], *asked[: given.warm]):
            each.answer(prompt, given.tokens, given.max_draft)
        each.forget()
    plain, turn = running["none"], list(running)
    for repeat in range(given.repeats):
        for i, prompt in enumerate(asked):
            said = {name: running[name].answer(prompt, given.tokens, given.max_draft) for name in turn}
            turn = [*turn[1:], turn[0]]
            for name, tokens in said.items():
                running[name].same += tokens == said["none"]
            ratios = (f"{name} {sum(plain.seconds) / sum(each.seconds):.2f}" for name, each in running.items())
            tell(f"repeat {repeat + 1}, prompt {i + 1} of {len(asked)}: " + "  ".join(ratios))
    told = {name: each.told(plain, len(asked)) for name, each in running.items()}
    tell(" " * 21 + COLUMNS + "  accepted tokens, of all, by source")
    for name, found in told.items():
        tell(row(name, found))
    return {
        "contestants": told,
        "stores": {name: size(folder) for name, folder in stores.items()},
        "lengths": given.lengths,
        "prompts": len(asked),
        "repeats": given.repeats,
        "tokens": given.tokens,
        "max_draft": given.max_draft,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else f"{torch.get_num_threads()} threads",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones that ask for code")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--stores", nargs="+", default=[], metavar="NAME=FOLDER", help="default: made from corpus.py")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument(
        "--drafters", default="", help="whom `auto` asks (rest: where there is a store); default: its choice"
    )
    # A GPU's step has room for the root and 31 nodes without another row: continuations of 32 lose their last token.
    parser.add_argument("--max-draft", type=int, default=31, help="nodes, and depth, that a step may verify")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warm", type=int, default=1, help="prompts that everybody answers beforehand")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-sweeps-") as scratch:
        found = sweep(given, named(given.stores) or made(Path(scratch)))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"benchmark": "sweeps", **found, "versions": versions}))


if __name__ == "__main__":
    main()
