"""slipstream's proposer inside vLLM, beside none and vLLM's own: python bench/vllm_plugin.py --prompts FILE…

The embedded model, greedy, by batches of each size; every way of drafting in a process of its own, one after the other.
Told: how many texts are those of vLLM without speculation, tokens per step and text, tokens per second, and these
against none; by the process's own seconds too, which other processes of the machine change less. `store` drafts from
a store of the model's own answers to other prompts of the same files as well, which are written by vLLM first.
--head FOLDER: an EAGLE-3 head that `slipstream export --layout speculators` wrote; its chains there and here.

vLLM counts what it drafted and accepted; a step of a text is a token that nobody drafted. It counts what was accepted
beyond an answer's end too, so there are at most so many tokens per step. What is measured comes after one batch that is
not, in which everybody compiles and slipstream measures what steps take. Runs in a Python that has vLLM (make test-vllm
makes one) and gguf. Tables go to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 12}
OURS = {"method": "custom_class", "model": "slipstream.vllm.Proposer", "num_speculative_tokens": 12}
WAYS: dict[str, Any] = {"none": None, "ngram": NGRAM, "suffix": SUFFIX, "slipstream": OURS, "store": OURS}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prompts_of(files: list[str], longest: int, count: int) -> list[str]:
    """So many prompts of these files, none longer than that, of every category as many as can be."""
    from slipstream.evaluate.workloads import read, select

    every = [prompt for file in files for prompt in read(file) if len(prompt.turns[0]) <= longest]
    return [prompt.turns[0] for prompt in select(every, None, count)]


def counters(llm: Any) -> dict[str, int]:
    return {m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")}


def child(job: dict[str, Any]) -> None:
    """One way of drafting, in this process: answers all prompts in batches of each size."""
    from vllm import LLM, SamplingParams

    sizes = job["batches"]
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["context"],
        max_num_seqs=max(sizes),
        enforce_eager=True,
        enable_prefix_caching=False,  # the same prompts come again in other batches
        speculative_config=job["way"],
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"])

    def answers(prompts: list[str]) -> list[Any]:
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [found.outputs[0] for found in llm.chat(asked, sampling, use_tqdm=False)]

    told = {}
    for size in sizes:
        for i in range(0, min(len(job["warm"]), max(2, size)), size):
            answers(job["warm"][i : i + size])
        before, tokens, clock, cpu = counters(llm), [], perf_counter(), process_time()
        for i in range(0, len(job["prompts"]), size):
            tokens += [list(each.token_ids) for each in answers(job["prompts"][i : i + size])]
        seconds, cpu, after = perf_counter() - clock, process_time() - cpu, counters(llm)
        count = sum(map(len, tokens))
        accepted = sum(after[name] - before[name] for name in after if name.endswith("accepted_tokens"))
        drafted = sum(after[name] - before[name] for name in after if name.endswith("draft_tokens"))
        told[str(size)] = {
            "seconds": seconds,
            "tokens": count,
            "drafted": drafted,
            "tokens_per_step": count / max(1, count - accepted),
            "tokens_per_second": count / seconds,
            "tokens_per_cpu_second": count / cpu,
            "answers": tokens,
        }
    Path(job["out"]).write_text(json.dumps(told))


def child_here(job: dict[str, Any]) -> None:
    """The same head and prompts in slipstream, which verifies chains as vLLM does: its tokens per step are compared."""
    import slipstream

    chain = {"width": 1, "depth": job["chain"], "nodes": job["chain"]}
    llm = slipstream.load(job["model"], drafter_path=job["head"], drafter="eagle3", dtype=job["dtype"], **chain)
    tokens, steps = 0, 0
    for prompt in job["prompts"]:
        found = llm.generate(prompt, max_new_tokens=job["tokens"], max_draft=job["chain"])
        tokens, steps = tokens + len(found.tokens), steps + len(found.tokens) - found.stats.accepted
    Path(job["out"]).write_text(json.dumps({"tokens": tokens, "tokens_per_step": tokens / steps}))


def run(job: dict[str, Any], folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, so that nobody finds what another left."""
    file, out = folder / "job.json", folder / "told.json"
    file.write_text(json.dumps({**job, "out": str(out)}))
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "SLIPSTREAM_VLLM": json.dumps(options),
    }
    ran = subprocess.run(
        [sys.executable, __file__, "--child", str(file)], env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"vLLM failed:\n{(ran.stdout + ran.stderr)[-3000:]}")
    return json.loads(out.read_text())


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
    parser.add_argument("--longest", type=int, default=4000, help="characters of a prompt: reading takes a CPU long")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--head", help="the folder of an exported EAGLE-3 head")
    parser.add_argument("--chain", type=int, default=3, help="tokens that the head drafts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        job = json.loads(Path(given.child).read_text())
        (child_here if "chain" in job else child)(job)
        return
    from slipstream.loading import embedded

    model = given.model or str(embedded.ensure())
    prompts = prompts_of(given.prompts, given.longest, given.limit)
    warm = [
        p for p in prompts_of(given.prompts, given.longest, given.limit + 2 * max(given.batches)) if p not in prompts
    ]
    asked = {"warm": warm[: max(given.batches)], "prompts": prompts, "batches": given.batches}
    job = {"model": model, "dtype": given.dtype, "context": 2048, "tokens": given.tokens, **asked}
    told: dict[str, dict[str, Any]] = {}
    ways = {name: WAYS[name] for name in given.ways}
    if given.head:
        ways["eagle3"] = {"method": "eagle3", "model": given.head, "num_speculative_tokens": given.chain}
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), Path(name) / "store"
        if "store" in ways:
            known = {*prompts, *asked["warm"]}
            others = [p for p in prompts_of(given.prompts, given.longest, given.others + len(known)) if p not in known]
            size = {"prompts": others, "warm": [], "batches": [16]}
            made = run({**job, **size, "way": None}, folder, {})["16"]
            build(store, made["answers"], json.loads((Path(model) / "config.json").read_text())["vocab_size"])
            tell(f"a store of {made['tokens']} tokens, answers to {len(others)} other prompts")
        for name, way in ways.items():
            told[name] = run({**job, "way": way}, folder, {"stores": [str(store)]} if name == "store" else {})
            report(name, told[name], told.get("none", told[name]))
        if given.head:
            told["eagle3 here"] = here = run({**job, "chain": given.chain, "head": given.head}, folder, {})
            tell(f"the head's chains of {given.chain} in slipstream: tokens/step {here['tokens_per_step']:.3f}")
    for numbers in [each for way in told.values() for each in way.values() if isinstance(each, dict)]:
        del numbers["answers"]
    print(json.dumps({"benchmark": "vllm_plugin", "told": told, "prompts": len(prompts), "tokens": given.tokens}))


def report(name: str, told: dict[str, Any], plain: dict[str, Any]) -> None:
    """One line per batch size; answers are replaced by how many are the same."""
    for size, numbers in told.items():
        base = plain[size]
        expected = base.get("answers")
        for clock in ("second", "cpu_second"):
            numbers[f"{clock}s_against_none"] = numbers[f"tokens_per_{clock}"] / base[f"tokens_per_{clock}"]
        numbers["same"] = sum(a == b for a, b in zip(numbers["answers"], expected, strict=True))
        tell(
            f"batch {size:>2}  {name:12} same {numbers['same']} of {len(expected)}  "
            f"tokens/step {numbers['tokens_per_step']:.3f}  drafted {numbers['drafted']}  "
            f"tokens/s {numbers['tokens_per_second']:.1f}  against none {numbers['seconds_against_none']:.3f}, "
            f"by the CPU's seconds {numbers['cpu_seconds_against_none']:.3f}"
        )


if __name__ == "__main__":
    main()
