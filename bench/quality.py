"""What accept rules do to quality: python bench/quality.py --prompts HumanEval.jsonl [--model MODEL]

The model writes the functions of HumanEval at several temperatures, under each accept rule, from the same seeds. Its
code runs against the problem's tests, each in a process of its own, which has a few seconds. For each rule and
temperature: the share of answers that pass, the difference to `match` with a bootstrapped 95% interval over problems,
and tokens per step. A table goes to stderr, one JSON line last.

It runs what the model wrote: use a machine, or an account, that has nothing to lose.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu import tell
from slipstream import LLM
from slipstream.targets import load_model
from slipstream.text import encode

ASK = "Complete this Python function. Answer with the whole function, imports included, and nothing else.\n\n{}"
FENCE = "```python\n"  # what the answer begins with: so it is code from its first token on
SECONDS = 10.0  # that a program may take
RESAMPLES = 4000


@dataclass(frozen=True)
class Problem:
    prompt: str
    test: str
    entry_point: str

    def passes(self, code: str) -> bool:
        """Whether the code passes the tests."""
        imports = "\n".join(line for line in self.prompt.splitlines() if line.startswith(("import ", "from ")))
        program = "\n".join([imports, code, self.test, f"check({self.entry_point})"])
        with tempfile.TemporaryDirectory() as folder:
            try:
                run = [sys.executable, "-I", "-c", program]
                return (
                    subprocess.run(run, cwd=folder, capture_output=True, timeout=SECONDS, check=False).returncode == 0
                )
            except subprocess.TimeoutExpired:
                return False


def problems_of(file: Path, limit: int) -> list[Problem]:
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    lines = [lines[i * len(lines) // min(limit, len(lines))] for i in range(min(limit, len(lines)))]
    return [Problem(line["prompt"], line["test"], line["entry_point"]) for line in lines]


def answers(llm: LLM, prompts: list[list[int]], given: argparse.Namespace, **options: Any) -> tuple[list[str], float]:
    """A function for each problem, and the tokens per step of all."""
    seeds = range(given.seed, given.seed + len(prompts))
    found = llm.generate(prompts, max_new_tokens=given.tokens, stop="```", seed=list(seeds), **options)
    return [result.text for result in found], sum(r.stats.new_tokens for r in found) / sum(r.stats.steps for r in found)


def difference(passed: np.ndarray, plain: np.ndarray) -> list[float]:
    """The mean difference in points, and its interval over problems. (problems, samples) of each."""
    each = 100 * (passed.mean(1) - plain.mean(1))
    rng = np.random.default_rng(0)
    means = each[rng.integers(0, len(each), (RESAMPLES, len(each)))].mean(1)
    return [round(float(x), 1) for x in (each.mean(), *np.quantile(means, (0.025, 0.975)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="HumanEval's file, with its tests")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--drafter", default="suffix", help="who drafts under the other rules")
    parser.add_argument("--drafter-path", help="its head")
    parser.add_argument(
        "--rules", nargs="+", default=["match", "rejection", "typical"], help="the first is compared with"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.7])
    parser.add_argument("--limit", type=int, default=164, help="problems, spread evenly over the file")
    parser.add_argument("--samples", type=int, default=1, help="answers to each problem")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    problems = problems_of(given.prompts, given.limit)
    begin = tokenizer(FENCE, add_special_tokens=False)["input_ids"]
    asked = [[*encode(ASK.format(problem.prompt), tokenizer, True), *begin] for problem in problems]
    head = {"drafter_path": given.drafter_path} if given.drafter_path else {}
    llm = LLM(model, tokenizer, given.drafter, **head)
    told: dict[str, Any] = {}
    for temperature in given.temperatures:
        passed: dict[str, np.ndarray] = {}
        for rule in given.rules:
            samples, per_step = [], []
            for sample in range(given.samples):
                codes, tokens = answers(llm, asked, given, temperature=temperature, accept=rule, sample=sample)
                with ThreadPoolExecutor(2) as threads:
                    samples.append(list(threads.map(Problem.passes, problems, codes)))
                per_step.append(tokens)
            passed[rule] = np.array(samples).T
            share, mean = 100 * float(passed[rule].mean()), float(np.mean(per_step))
            off = difference(passed[rule], passed[given.rules[0]])
            tell(f"temperature {temperature}, {rule:10} {share:5.1f}% pass, {off} points, {mean:.2f} tokens per step")
            told[f"{rule} at {temperature}"] = {
                "pass": round(share, 1),
                "difference": off,
                "tokens_per_step": round(mean, 3),
            }
    print(json.dumps({"benchmark": "quality", "problems": len(problems), "drafter": given.drafter, **told}))


if __name__ == "__main__":
    main()
