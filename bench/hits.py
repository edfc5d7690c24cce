"""What cached beginnings of prompts save: python bench/hits.py [--model MODEL] [--drafters NAME…] [--device cuda]

Each question about one long document is asked where the document was read before (a hit), and where nothing was (a
miss). For each drafter a line of JSON: tokens per step and the time to the first token of both.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
import torch

from gpu import llama_7b
from slipstream import LLM
from slipstream.evaluate.workloads import builtin, read
from slipstream.jobs import Job, Update
from slipstream.targets import load_model
from slipstream.text import encode
from soak_lab import real, tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--shape", choices=["7b"], help="instead: random weights, and the embedded model's tokenizer")
    parser.add_argument("--drafters", nargs="+", help="default: eagle3 and auto, or auto alone with another model")
    parser.add_argument("--prompts", nargs="*", default=[], help="files of questions; default: the built-in ones")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.questions < 1:
        parser.error(f"--questions is at least 1, not {given.questions}")
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    if given.shape:
        model = llama_7b(given.device, getattr(torch, given.dtype), vocab_size=len(tokenizer))
    prompts = prompts_of(given, tokenizer)
    for name in given.drafters or (["auto"] if given.model or given.shape else ["eagle3", "auto"]):
        found = hits_and_misses(LLM(model, tokenizer, name), prompts, given.tokens)
        print(json.dumps({"benchmark": "hits", "seed": given.seed, "drafter": name, **found}), flush=True)


@dataclass(frozen=True)
class Asked:
    tokens: list[int]
    first: float  # seconds until the first of them
    per_step: float  # tokens, behind the first
    found: int  # tokens of the prompt that were read before


def ask(llm: LLM, prompt: list[int], tokens: int, collection: str) -> Asked:
    request = llm.request(prompt, max_new_tokens=tokens, ignore_eos=True, collection=collection)
    updates, before, clock = SimpleQueue[tuple[Update, float]](), llm.service.counts.found_tokens, perf_counter()
    llm.service.submit(Job(request, lambda update: updates.put((update, perf_counter()))))
    update, first = updates.get()
    while update.finish is None:
        update, _ = updates.get()
    if update.error is not None or update.sequence is None:
        raise SystemExit(f"no answer: {update.error}")
    stats, found = update.sequence.stats, llm.service.counts.found_tokens - before
    per_step = (stats.new_tokens - 1) / max(1, stats.steps - 1)
    return Asked(list(update.sequence.tokens), first - clock, per_step, found)


def prompts_of(given: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Of the document and one question each: one to begin with, then as many as are measured."""
    text = "\n\n".join(p.turns[0] for p in ([p for file in given.prompts for p in read(file)] or builtin()))
    words = tokenizer(text, add_special_tokens=False)["input_ids"]
    document = tokenizer.decode((words * (1 + given.prefix // len(words)))[: given.prefix])
    questions = real(given.prompts, random.Random(given.seed), 1 + given.questions)
    return [encode(f"{document}\n\n{question}", tokenizer, True) for question in questions]


def hits_and_misses(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    if max(map(len, prompts)) + tokens > llm.target.context:
        raise SystemExit(f"prompts of {max(map(len, prompts))} tokens: {llm.name} reads {llm.target.context}")
    pairs, (first_one, *prompts) = list[tuple[Asked, Asked]](), prompts
    for _ in range(2):  # unmeasured: the document becomes known, and what is done once is done
        ask(llm, first_one, tokens, "known")
    for i, prompt in enumerate(prompts):
        of = {where: ask(llm, prompt, tokens, where) for where in (["known", f"{i}"] if i % 2 else [f"{i}", "known"])}
        pairs.append((of["known"], of[f"{i}"]))
        tell(f"{llm.engine.name}: hit {pairs[-1][0].first:.3f} s, miss {pairs[-1][1].first:.3f} s to the first token")
    if not all(hit.found and not miss.found for hit, miss in pairs):
        raise SystemExit("nothing was read before: without pages, texts stay read in float32 alone")
    per_step, first = (np.array([[getattr(a, what) for a in pair] for pair in pairs]) for what in ("per_step", "first"))
    told = {
        "questions": len(prompts),
        "prompt_tokens": float(np.mean([len(prompt) for prompt in prompts])),
        "found_tokens": float(np.mean([hit.found for hit, _ in pairs])),
        "tokens_per_step": dict(zip(("hit", "miss"), per_step.mean(0).round(3).tolist(), strict=True)),
        "first_token_seconds": dict(zip(("hit", "miss"), np.median(first, 0).round(4).tolist(), strict=True)),
        "tokens_per_step_ratio": round(float(per_step[:, 0].sum() / per_step[:, 1].sum()), 4),
        "first_token_ratio": round(float(np.median(first[:, 0] / first[:, 1])), 4),
        "same_texts": sum(hit.tokens == miss.tokens for hit, miss in pairs),
    }
    tell(f"{llm.engine.name}: {told}")
    llm.close()
    return told


if __name__ == "__main__":
    main()
