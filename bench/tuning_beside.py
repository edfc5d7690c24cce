"""Tokens per second of answers while a head is trained beside them on the same device, by its share of the time.

    python bench/tuning_beside.py --data answers.jsonl --prompts FILE --shares 0.2 0.1 0.05

For every share a process of `slipstream train eagle3 --share` is started and held until its turn. Answers are measured
alone first and last, and in between with one of the trainings at a time. Prints a table to stderr and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import cycle
from pathlib import Path
from time import perf_counter, sleep

from slipstream import LLM
from slipstream.evaluate.report import provenance
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.heads.registry import heads_for
from slipstream.targets import load_model
from slipstream.training.log import read as read_log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a file that `slipstream collect` wrote")
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.1, 0.05])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    given = parser.parse_args()
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    start = next(folder for kind, folder in heads_for(model) if kind == "eagle3")
    asked = [p.turns[0] for file in given.prompts for p in select(read(file), None, given.limit)]
    asked = asked or [p.turns[0] for p in builtin()]
    with tempfile.TemporaryDirectory() as place, LLM(model, tokenizer, given.drafter, memory=0.3) as llm:
        trainings = {share: begin(given, share, start, Path(place) / str(share)) for share in given.shares}
        try:
            for prompt in asked:  # steps are captured
                llm.generate(prompt, max_new_tokens=given.tokens)
            for share, process in trainings.items():
                hold(process, Path(place) / str(share))
            found = {"alone": rate(llm, asked, given)}
            for share, process in trainings.items():
                before = steps(Path(place) / str(share))
                process.send_signal(signal.SIGCONT)
                sleep(1)
                clock = perf_counter()
                found[f"share {share}"] = rate(llm, asked, given)
                made = (steps(Path(place) / str(share)) - before) / (perf_counter() - clock)
                check_running(process)
                process.send_signal(signal.SIGSTOP)
                print(f"{made:.2f} steps of training per second", file=sys.stderr, flush=True)
            found["alone, again"] = rate(llm, asked, given)
        finally:
            for process in trainings.values():
                process.kill()
                process.wait()
    alone = (found["alone"] + found["alone, again"]) / 2
    line = {
        name: {"tokens_per_second": round(value, 1), "of_alone": round(value / alone, 3)}
        for name, value in found.items()
    }
    for name, numbers in line.items():
        print(f"{name:14} {numbers}", file=sys.stderr, flush=True)
    print(json.dumps({**line, "provenance": provenance(llm.name, model)}, default=str))


def begin(given: argparse.Namespace, share: float, start: Path, out: Path) -> subprocess.Popen[bytes]:
    """A training that goes on until it is killed."""
    words = [sys.executable, "-m", "slipstream", "train", "eagle3", "--data", str(given.data), "--out", str(out)]
    words += ["--start", str(start), "--share", str(share), "--batch-tokens", str(given.batch_tokens)]
    words += ["--minutes", "60", "--log-every", "1", "--eval-every", "1000000", "--dtype", given.dtype]
    for option in ("model", "device"):
        if getattr(given, option):
            words += [f"--{option}", getattr(given, option)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))


def hold(process: subprocess.Popen[bytes], out: Path) -> None:
    """Stop a training once it has made some steps."""
    while steps(out) < 2:
        check_running(process)
        sleep(0.1)
    process.send_signal(signal.SIGSTOP)


def check_running(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise SystemExit("a training ended too early: run it by hand to see why")


def steps(out: Path) -> int:
    """How many steps a training has made."""
    log = out / "log.jsonl"
    lines = read_log(log) if log.exists() else []
    return int(lines[-1]["step"]) if lines else 0


def rate(llm: LLM, asked: list[str], given: argparse.Namespace) -> float:
    """Tokens per second of one answer after the other."""
    clock, tokens = perf_counter(), 0
    for prompt in cycle(asked):
        tokens += len(llm.generate(prompt, max_new_tokens=given.tokens).tokens)
        if (spent := perf_counter() - clock) >= given.seconds:
            return tokens / spent
    raise AssertionError("unreachable: prompts never end")


if __name__ == "__main__":
    main()
