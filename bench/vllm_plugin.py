"""slipstream's proposer inside vLLM, against none and vLLM's own: python bench/vllm_plugin.py --prompts FILE…

Greedy answers, in batches of each size. Every drafter has its own process, and all answer each batch of prompts in
turns, so that noise affects all alike. Each repetition and batch size has new processes, so that no drafter has seen an
answer to the same prompt. Reported: how many texts equal those of vLLM without speculation, tokens per step and text,
tokens per second, and its ratio to none, with a bootstrapped 95% interval over batches. `store` also drafts from a
store of the model's own answers to other prompts of the same files, which vLLM writes first, or which are read from
--answers.

--head FOLDER: an EAGLE-3 head that `slipstream export --layout speculators` wrote; its chains there and here.

A step of a text is one in which vLLM gave it tokens; tokens beyond an answer's end don't count. Some answers before the
measurement are a warm-up, for compilation and for slipstream's measurement of steps. Runs in a Python that has vLLM and
gguf (make test-vllm makes one); `suffix` needs more (tests/vllm/environment.py). Tables go to stderr, one JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 12}
OURS = {"method": "custom_class", "model": "slipstream.vllm.Proposer", "num_speculative_tokens": 12}
WAYS: dict[str, Any] = {"none": None, "ngram": NGRAM, "suffix": SUFFIX, "slipstream": OURS, "store": OURS}
DRAWS = 10_000  # of the bootstrap
Told = dict[str, Any]  # of one batch of prompts: seconds, cpu, steps, drafted, answers


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prompts_of(files: list[str], longest: int, count: int) -> list[str]:
    """So many prompts of these files, none longer than that, of every category as many as can be."""
    from slipstream.evaluate.workloads import read, select

    every = [prompt for file in files for prompt in read(file) if len(prompt.turns[0]) <= longest]
    return [prompt.turns[0] for prompt in select(every, None, count)]


# ---- a way of drafting, in a process of its own


def child(job: dict[str, Any]) -> None:
    """Answers a batch of prompts for every line of the input."""
    answer = answers_here(job) if "chain" in job else answers_of_vllm(job)
    with os.fdopen(job["out"], "w") as out:
        print("{}", file=out, flush=True)  # ready
        for line in sys.stdin:
            clock, cpu = perf_counter(), process_time()
            told = answer(json.loads(line))
            told |= {"seconds": perf_counter() - clock, "cpu": process_time() - cpu}
            print(json.dumps(told), file=out, flush=True)


def answers_of_vllm(job: dict[str, Any]) -> Callable[[list[str]], Told]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["context"],
        max_num_seqs=job["size"],
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=job["way"],
        disable_log_stats=False,
        **({"max_num_batched_tokens": job["piece"]} if job["piece"] else {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"])
    steps = [0]
    core = llm.llm_engine.engine_core
    step = core.get_output

    def counted() -> Any:
        given = step()
        steps[0] += sum(1 for each in given.outputs if each.new_token_ids)
        return given

    core.get_output = counted

    def drafted() -> int:
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")

    def answer(prompts: list[str]) -> Told:
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        before, steps[0] = drafted(), 0
        found = [list(each.outputs[0].token_ids) for each in llm.chat(asked, sampling, use_tqdm=False)]
        return {"answers": found, "steps": steps[0], "drafted": drafted() - before}

    return answer


def answers_here(job: dict[str, Any]) -> Callable[[list[str]], Told]:
    """The same head in slipstream, which verifies chains as vLLM does: its tokens per step are compared."""
    import slipstream

    chain = {"width": 1, "depth": job["chain"], "nodes": job["chain"]}
    llm = slipstream.load(job["model"], drafter_path=job["head"], drafter="eagle3", dtype=job["dtype"], **chain)

    def answer(prompts: list[str]) -> Told:
        found = [llm.generate(p, max_new_tokens=job["tokens"], max_draft=job["chain"]) for p in prompts]
        steps, drafted = (sum(getattr(each.stats, name) for each in found) for name in ("steps", "nodes_verified"))
        return {"answers": [list(each.tokens) for each in found], "steps": steps, "drafted": drafted}

    return answer


class Way:
    """A process that answers."""

    def __init__(self, job: dict[str, Any], folder: Path, name: str) -> None:
        self.log = folder / f"{name}.log"
        self.file = folder / f"{name}.json"
        given, out = os.pipe()
        self.file.write_text(json.dumps({**job, "out": out}))
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
            "SLIPSTREAM_VLLM": json.dumps(job["options"]),
        }
        command = [sys.executable, __file__, "--child", str(self.file)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[out]
            )
        os.close(out)
        self.told = os.fdopen(given)

    def heard(self) -> Told:
        line = self.told.readline()
        if not line:
            raise SystemExit(f"{self.file.stem} failed:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, prompts: list[str]) -> Told:
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        return self.heard()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.told.close()


@contextmanager
def started(jobs: dict[str, dict[str, Any]]) -> Iterator[dict[str, Way]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = {name: Way(job, Path(folder), name) for name, job in jobs.items()}
        for way in ways.values():
            stack.callback(way.close)
        for way in ways.values():
            way.heard()
        yield ways


# ---- all ways, in turn


def measure(
    jobs: dict[str, dict[str, Any]], warm: list[str], prompts: list[str], size: int, most: float
) -> dict[str, list[Told]]:
    """What each way told of each batch of prompts. most: seconds after which no further batch is begun."""
    told: dict[str, list[Told]] = {name: [] for name in jobs}
    with started(jobs) as ways:
        for way in ways.values():
            for i in range(0, len(warm), size):
                way.ask(warm[i : i + size])
        order, began = list(ways), perf_counter()
        for i in range(0, len(prompts), size):
            if perf_counter() - began > most:
                tell(f"{len(prompts) - i} prompts are left out: the time is over")
                break
            for name in order:
                told[name].append(ways[name].ask(prompts[i : i + size]))
            order = order[1:] + order[:1]  # nobody always follows the same one
    return told


def summary(told: list[Told], plain: list[Told]) -> dict[str, Any]:
    """Of all batches, against the same batches without drafts."""
    tokens = [sum(map(len, each["answers"])) for each in told]
    found = {name: np.array([each[name] for each in told], float) for name in ("seconds", "cpu")}
    base = {name: np.array([each[name] for each in plain], float) for name in found}
    picks = np.random.default_rng(0).integers(0, len(told), (DRAWS, len(told)))
    drawn = base["seconds"][picks].sum(1) / found["seconds"][picks].sum(1)
    mine, theirs = ([answer for each in some for answer in each["answers"]] for some in (told, plain))
    return {
        "texts": len(theirs),
        "same": sum(a == b for a, b in zip(mine, theirs, strict=True)),
        "tokens": sum(tokens),
        "drafted": sum(each["drafted"] for each in told),
        "tokens_per_step": sum(tokens) / sum(each["steps"] for each in told),
        "tokens_per_second": sum(tokens) / found["seconds"].sum(),
        "against_none": base["seconds"].sum() / found["seconds"].sum(),
        "interval": np.quantile(drawn, (0.025, 0.975)).tolist(),
        "against_none_cpu": base["cpu"].sum() / found["cpu"].sum(),
    }


def report(size: int, name: str, s: dict[str, Any]) -> None:
    low, high = s["interval"]
    tell(
        f"batch {size:>2}  {name:12} same {s['same']} of {s['texts']}  tokens/step {s['tokens_per_step']:.3f}  "
        f"drafted {s['drafted']:>5}  tokens/s {s['tokens_per_second']:5.1f}  against none {s['against_none']:.3f} "
        f"({low:.3f} to {high:.3f}), by the CPU's seconds {s['against_none_cpu']:.3f}"
    )


def build(folder: Path, answers: list[list[int]], vocabulary: int) -> None:
    """A store of these answers."""
    from slipstream.datastores.durable.store import Store

    with Store.create(folder, vocabulary) as store:
        for i, answer in enumerate(answers):
            store.append(np.array(answer), f"answer {i}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", default=[], help="files of prompts")
    parser.add_argument("--model", help="a folder; default: the embedded model's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=26, help="prompts")
    parser.add_argument("--others", type=int, default=200, help="other prompts, whose answers make the store")
    parser.add_argument("--answers", type=Path, help="a file to keep those answers in; read if it is there")
    parser.add_argument("--longest", type=int, default=4000, help="characters of a prompt: reading takes a CPU long")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16], help="none: only write --answers")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a repetition: then no batch is begun")
    parser.add_argument("--piece", type=int, help="tokens of a vLLM step, so that it reads prompts in pieces")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--head", help="the folder of an exported EAGLE-3 head")
    parser.add_argument("--chain", type=int, default=3, help="tokens that the head drafts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(json.loads(Path(given.child).read_text()))
        return
    from slipstream.loading import embedded

    model = given.model or str(embedded.ensure())
    prompts = prompts_of(given.prompts, given.longest, given.limit)
    random.Random(0).shuffle(prompts)  # files are sorted by kind, and a batch should have some of each
    job = {"model": model, "dtype": given.dtype, "context": 2048, "tokens": given.tokens, "piece": given.piece}
    more = [p for p in prompts_of(given.prompts, given.longest, 2 * given.limit + 32) if p not in prompts]
    warm = {size: more[: max(2, size)] for size in given.batches}
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store"
        ways = {way: {**job, "way": WAYS[way], "options": {}} for way in given.ways}
        if "store" in ways:
            known = {*prompts, *more}
            others = [p for p in prompts_of(given.prompts, given.longest, given.others + len(known)) if p not in known]
            answers = written({**job, "size": 64, "way": None, "options": {}}, others, given.answers)
            build(store, answers, json.loads((Path(model) / "config.json").read_text())["vocab_size"])
            tell(f"a store of {sum(map(len, answers))} tokens, answers to {len(answers)} other prompts")
            ways["store"]["options"] = {"stores": [str(store)]}
        if given.head:
            head = {"method": "eagle3", "model": given.head, "num_speculative_tokens": given.chain}
            ways["eagle3"] = {**job, "way": head, "options": {}}
            ways["eagle3 here"] = {**job, "chain": given.chain, "head": given.head, "options": {}}
        result = {}
        for size in given.batches:
            jobs = {way: {**each, "size": size} for way, each in ways.items()}
            told: dict[str, list[Told]] = {way: [] for way in ways}
            for turn in range(given.repeats):
                for way, batches in measure(jobs, warm[size], prompts, size, given.seconds).items():
                    told[way] += batches
                for way in ways if turn == given.repeats - 1 else ():
                    result[f"{way}, {size}"] = found = summary(told[way], told[given.ways[0]])
                    report(size, way, found)
    about = {"prompts": len(prompts), "tokens": given.tokens, "repeats": given.repeats, "longest": given.longest}
    about |= {"model": Path(model).name, "dtype": given.dtype, "piece": given.piece}
    about |= {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    print(json.dumps({"benchmark": "vllm_plugin", **about, "told": result}))


def written(job: dict[str, Any], prompts: list[str], kept: Path | None) -> list[list[int]]:
    """Answers to these prompts, by vLLM alone, or those that are kept."""
    if kept is not None and kept.exists():
        known = json.loads(kept.read_text())
        if not isinstance(known, dict) or known.get("prompts") != prompts:  # perhaps some are asked here
            raise SystemExit(f"{kept} has answers to other prompts than these: name another file, or delete it")
        return known["answers"]
    with started({"others": job}) as ways:
        answers: list[list[int]] = ways["others"].ask(prompts)["answers"]
    if kept is not None:
        kept.write_text(json.dumps({"prompts": prompts, "answers": answers}))
    return answers


if __name__ == "__main__":
    main()
