"""The engine's overhead over the model's own forward, and plain decoding against transformers: one JSON line last.

python bench/overhead.py [--dtype float32] [--tokens 96] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from time import perf_counter

import numpy as np
import torch
import transformers

import slipstream
from slipstream import Drafter, DraftSession, Proposal, TokenTree
from slipstream.engine import Engine

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
ROWS = 16


class Filler(Drafter):
    """Always ROWS rows of random tokens: a full tree each step, whatever the text."""

    def begin(self, request):  # noqa: ARG002
        return FillerSession()


class FillerSession(DraftSession):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def propose(self, root, budget):  # noqa: ARG002
        continuations = self.rng.integers(3, 40000, (3, 5))
        return Proposal(TokenTree.from_continuations(root, list(continuations), source="filler"))


class ForwardClock:
    """Seconds spent inside the model's own forward."""

    def __init__(self, model):
        self.seconds = 0.0
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def _before(self, *_):
        self._start = perf_counter()

    def _after(self, *_):
        self.seconds += perf_counter() - self._start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    llm = slipstream.load(drafter="none", dtype=args.dtype)
    prompt = llm.request(PROMPT).tokens
    ids = torch.tensor([prompt])

    def ours(**options):
        start = perf_counter()
        result = llm.generate(prompt, max_new_tokens=args.tokens, ignore_eos=True, **options)
        return perf_counter() - start, result.tokens

    def theirs():
        start = perf_counter()
        out = llm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=args.tokens,
            max_new_tokens=args.tokens,
            do_sample=False,
        )
        return perf_counter() - start, out[0, len(prompt) :].tolist()

    ours(), theirs()  # warm up
    plain, hf = [], []
    for _ in range(args.repeats):  # interleaved: noise hurts both alike
        plain.append(ours())
        hf.append(theirs())
    ratio = statistics.median(h[0] / p[0] for h, p in zip(hf, plain, strict=True))

    clock = ForwardClock(llm.model)
    full = {}
    for name, drafter, sampling in (
        ("plain", llm.engine.drafter, {}),
        ("greedy_16_rows", Filler(llm.target, None, None), {}),
        ("sampled_16_rows", Filler(llm.target, None, None), {"temperature": 0.8, "top_p": 0.95, "seed": 0}),
    ):
        llm.engine = Engine(llm.target, drafter, name)
        per_step = []
        for _ in range(args.repeats):
            clock.seconds = 0.0
            start = perf_counter()
            stats = llm.generate(prompt, max_new_tokens=args.tokens, ignore_eos=True, **sampling).stats
            per_step.append(1e3 * (perf_counter() - start - clock.seconds) / stats.steps)
        full[name] = statistics.median(per_step)

    print(f"plain decoding: {args.tokens / statistics.median(p[0] for p in plain):.1f} tokens/s")
    print(f"transformers:   {args.tokens / statistics.median(h[0] for h in hf):.1f} tokens/s; ours is {ratio:.3f} ×")
    for name, ms in full.items():
        print(f"outside the forward, {name}: {ms:.3f} ms a step")
    report = {
        "benchmark": "overhead",
        "dtype": args.dtype,
        "plain_over_transformers": round(ratio, 4),
        "same_tokens_as_transformers": plain[0][1] == hf[0][1],
        "outside_forward_ms": {k: round(v, 4) for k, v in full.items()},
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
