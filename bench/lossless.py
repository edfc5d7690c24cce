"""Does every drafter's greedy text equal `transformers`' text? Counts on real prompts: one JSON line last.

python bench/lossless.py --prompts question.jsonl [--limit 30] [--tokens 128]

The prompts are lines of JSON with `category` and `turns` (Spec-Bench, MT-Bench): the first turns, spread evenly over
the file. The draft model is the target itself in bfloat16, so nearly all of its tokens are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

import torch
import transformers

import slipstream
from slipstream import LLM, drafters
from slipstream.targets import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()

    questions = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    questions = questions[:: max(1, len(questions) // args.limit)][: args.limit]
    model, tokenizer = load_model(dtype="float32")
    halved, _ = load_model(dtype="bfloat16")
    trials = {}
    for name in drafters.names():
        if name == "model":
            for mode in ("greedy", "sample", "beam"):
                options = {"draft_model": halved, "draft_tokenizer": tokenizer, "mode": mode}
                trials[f"model, {mode}"] = LLM(model, tokenizer, name, **options)
        else:
            trials[name] = LLM(model, tokenizer, name)

    equal = dict.fromkeys(trials, 0)
    tokens, steps = dict.fromkeys(trials, 0), dict.fromkeys(trials, 0)
    seconds = dict.fromkeys(["transformers", *trials], 0.0)
    for i, question in enumerate(questions):
        prompt = trials["none"].request(question["turns"][0]).tokens
        ids = torch.tensor([prompt])
        start = perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, do_sample=False)
        seconds["transformers"] += perf_counter() - start
        expected = out[0, len(prompt) :].tolist()
        for name, llm in trials.items():
            result = llm.generate(prompt, max_new_tokens=args.tokens)
            equal[name] += result.tokens == expected
            tokens[name] += result.stats.new_tokens
            steps[name] += result.stats.steps
            seconds[name] += result.stats.seconds
        print(f"\r{i + 1}/{len(questions)} {question['category']:20}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    print(f"{'drafter':16} {'identical':>10} {'tokens/step':>12} {'seconds':>9}")
    print(f"{'transformers':16} {'':>10} {'':>12} {seconds['transformers']:9.1f}")
    for name in trials:
        same = f"{equal[name]}/{len(questions)}"
        print(f"{name:16} {same:>10} {tokens[name] / steps[name]:12.2f} {seconds[name]:9.1f}")
    report = {
        "benchmark": "lossless",
        "prompts": len(questions),
        "tokens": args.tokens,
        "identical": equal,
        "tokens_per_step": {n: round(tokens[n] / steps[n], 3) for n in trials},
        "seconds": {n: round(s, 1) for n, s in seconds.items()},
        "versions": {
            "slipstream": slipstream.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps(report))
    sys.exit(0 if all(n == len(questions) for n in equal.values()) else 1)


if __name__ == "__main__":
    main()
