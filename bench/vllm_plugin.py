"""slipstream's proposer inside vLLM, against none and vLLM's own: python bench/vllm_plugin.py --prompts FILE…

Greedy answers, so many at a time as --batches says. All prompts are asked at once, and the next takes the place of a
text that ends, as in a server under load. The first ones are cut short, each elsewhere, so that from then on texts end
one by one. Every drafter has its own process, and they take turns: one goes on until as many texts have ended as are
answered at a time, then the next one does, so that noise affects all alike. What is measured ends when the first place
stays empty; the rest is answered without a clock. Each repetition and size has new processes, so that no drafter has
seen an answer to the same prompt.

Reported: how many texts equal those of vLLM without speculation, tokens per step and text, tokens per second, and its
ratio to none, with a bootstrapped 95% interval over turns. `store` also drafts from a store of the model's own answers
to other prompts of the same files, which vLLM writes first, or which are read from --answers.

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
Told = dict[str, Any]  # of one turn: seconds, cpu, tokens, steps, drafted; after the last one also the answers
GoOn = Callable[[int], Told]  # until so many texts have ended
Asked = list[tuple[str, int]]  # prompts, each with how many tokens its answer may have


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prompts_of(files: list[str], longest: int, count: int) -> list[str]:
    """So many prompts of these files, none longer than that, of every category as many as can be."""
    from slipstream.evaluate.workloads import read, select

    every = [prompt for file in files for prompt in read(file) if len(prompt.turns[0]) <= longest]
    return [prompt.turns[0] for prompt in select(every, None, count)]


# ---- a way of drafting, in a process of its own


def child(job: dict[str, Any]) -> None:
    """Begins answers to prompts, or goes on with them, as each line of the input says."""
    begin = answers_here(job) if "chain" in job else answers_of_vllm(job)
    with os.fdopen(job["out"], "w") as out:
        print("{}", file=out, flush=True)  # ready
        for line in sys.stdin:
            asked = json.loads(line)
            if isinstance(asked, list):
                go_on, told = begin(asked), Told()
            else:
                clock, cpu = perf_counter(), process_time()
                told = go_on(asked)
                told |= {"seconds": perf_counter() - clock, "cpu": process_time() - cpu}
            print(json.dumps(told), file=out, flush=True)


def answers_of_vllm(job: dict[str, Any]) -> Callable[[Asked], GoOn]:
    from vllm.sampling_params import RequestOutputKind

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
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    step, given = engine.engine_core.get_output, {"tokens": 0, "steps": 0}

    def counted() -> Any:
        found = step()
        for each in found.outputs:
            given["tokens"] += len(each.new_token_ids)
            given["steps"] += bool(each.new_token_ids)
        return found

    engine.engine_core.get_output = counted

    def drafted() -> int:
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")

    def begin(prompts: Asked) -> GoOn:
        answers: dict[str, list[int]] = {}
        for i, (prompt, most) in enumerate(prompts):
            asked = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            sampling = SamplingParams(temperature=0, max_tokens=most, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(i), {"prompt_token_ids": tokens}, sampling)

        def go_on(until: int) -> Told:
            before = drafted()
            given.update(tokens=0, steps=0)
            while len(answers) < until:
                answers.update({e.request_id: list(e.outputs[0].token_ids) for e in engine.step() if e.finished})
            told = {**given, "drafted": drafted() - before, "ended": len(answers)}
            if len(answers) == len(prompts):
                told["answers"] = [answers[str(i)] for i in range(len(prompts))]
            return told

        return go_on

    return begin


def answers_here(job: dict[str, Any]) -> Callable[[Asked], GoOn]:
    """The same head in slipstream, which verifies chains as vLLM does: its tokens per step are compared."""
    import slipstream

    chain = {"width": 1, "depth": job["chain"], "nodes": job["chain"]}
    llm = slipstream.load(job["model"], drafter_path=job["head"], drafter="eagle3", dtype=job["dtype"], **chain)

    def begin(prompts: Asked) -> GoOn:
        answers: list[list[int]] = []

        def go_on(until: int) -> Told:
            asked = prompts[len(answers) : until]
            found = [llm.generate(p, max_new_tokens=most, max_draft=job["chain"]) for p, most in asked]
            answers.extend([list(each.tokens) for each in found])
            steps, drafted = (sum(getattr(each.stats, name) for each in found) for name in ("steps", "nodes_verified"))
            tokens = sum(len(each.tokens) for each in found)
            told = {"tokens": tokens, "steps": steps, "drafted": drafted, "ended": len(answers)}
            return told | ({"answers": answers} if len(answers) == len(prompts) else {})

        return go_on

    return begin


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

    def ask(self, prompts: Asked | int) -> Told:
        """Begin answers to these prompts, or go on until so many texts have ended."""
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
    jobs: dict[str, dict[str, Any]], warm: list[str], prompts: list[str], size: int, tokens: int
) -> dict[str, tuple[list[Told], list[list[int]]]]:
    """What each way told of each turn, and its answers."""
    full = len(prompts) - size + 1  # when so many texts have ended, a place stays empty
    turns = [*range(size, full, size), full]
    asked = [(prompt, tokens * min(size, 1 + i) // size) for i, prompt in enumerate(prompts)]
    told: dict[str, list[Told]] = {name: [] for name in jobs}
    with started(jobs) as ways:
        for way in ways.values():
            way.ask([(prompt, tokens) for prompt in warm])
            way.ask(len(warm))
            way.ask(asked)
        order = list(ways)
        for until in turns:
            for name in order:
                told[name].append(ways[name].ask(until))
            order = order[1:] + order[:1]  # nobody always follows the same one
        answers = {}
        for name, way in ways.items():
            last = told[name][-1]
            answers[name] = (last if "answers" in last else way.ask(len(prompts)))["answers"]
    return {name: (told[name], answers[name]) for name in jobs}


def summary(told: list[Told], plain: list[Told], same: list[bool]) -> dict[str, Any]:
    """Of all turns, against the same turns without drafts. In a turn, the ways may be at different texts: so rates are
    compared, not seconds."""

    def column(some: list[Told], name: str) -> Any:
        return np.array([each[name] for each in some], float)

    def rate(some: list[Told], clock: str, picks: Any = slice(None)) -> Any:
        return column(some, "tokens")[picks].sum(-1) / column(some, clock)[picks].sum(-1)

    picks = np.random.default_rng(0).integers(0, len(told), (DRAWS, len(told)))
    return {
        "texts": len(same),
        "same": sum(same),
        "turns": len(told),
        "tokens": int(column(told, "tokens").sum()),
        "drafted": int(column(told, "drafted").sum()),
        "tokens_per_step": rate(told, "steps"),
        "tokens_per_second": rate(told, "seconds"),
        "against_none": rate(told, "seconds") / rate(plain, "seconds"),
        "interval": np.quantile(rate(told, "seconds", picks) / rate(plain, "seconds", picks), (0.025, 0.975)).tolist(),
        "against_none_cpu": rate(told, "cpu") / rate(plain, "cpu"),
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
            same: dict[str, list[bool]] = {way: [] for way in ways}
            for _ in range(given.repeats):
                found = measure(jobs, warm[size], prompts, size, given.tokens)
                for way, (turns, answers) in found.items():
                    told[way] += turns
                    same[way] += [a == b for a, b in zip(answers, found[given.ways[0]][1], strict=True)]
            for way in ways:
                result[f"{way}, {size}"] = summary(told[way], told[given.ways[0]], same[way])
                report(size, way, result[f"{way}, {size}"])
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
        ways["others"].ask([(prompt, job["tokens"]) for prompt in prompts])
        answers: list[list[int]] = ways["others"].ask(len(prompts))["answers"]
    if kept is not None:
        kept.write_text(json.dumps({"prompts": prompts, "answers": answers}))
    return answers


if __name__ == "__main__":
    main()
