"""The cost of steps on a GPU, and the speed of speculation there: python bench/gpu.py [PART…] --model … --prompts …

steps     a Llama of 7B shape with random weights, bfloat16, 512 tokens of context: ms per step by rows, for the plain
          model, captured, and compiled and captured, against reading the weights once; for captured steps also the
          device's time alone
texts     the embedded model in bfloat16: tokens per second and texts that differ, plain and with each drafter
peers     transformers' own generate and prompt lookup on some of the prompts: tokens per second, and how many texts its
          prompt lookup changes
batch     tokens per second of 1, 4, 16 and 64 sequences, drafters in turn, without what captures take; the median of
          five calls, and each of them
long      a step at 8,192 tokens of context against one at 512, and the memory of the cache
full      64 sequences of some 2,048 tokens, 7B shape: a step of all of them, against reading the weights and their keys
read      tokens per second of reading a prompt of 8,000 and of 31,000 tokens, by pieces, beside transformers
draft     a draft model of every other layer: ms per drafted token, against its own plain step, and its speed on prompts
rejection tokens per second with `redrafter` at temperature 0.7 by rule, against plain decoding

Each part prints a table to stderr and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import transformers

from slipstream import LLM
from slipstream.budget.pilot import Source
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.kernels.sizes import PAGE
from slipstream.sampling import Sampler, Sampling
from slipstream.stopwatch import Stopwatch, preparing
from slipstream.targets import Target, Want, load_model, open_target
from slipstream.text import encode
from slipstream.training.cutting import cut_out
from slipstream.tree import TokenTree

ROWS = (1, 8, 16, 32, 64, 128)
BATCH_REPEATS = 5
GREEDY = Sampler(Sampling(), [])


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def known_of(source: Source) -> str:
    """What `auto` knows of a source, for `tell`."""
    gains = " ".join(
        f"{gain:.2f}" if seen else "-" for gain, seen in zip(source.gains, source.observations, strict=True)
    )
    drafting = source.drafting
    return f"{source.name:12} {drafting.times} drafts of {drafting.seconds * 1e3:.3f} ms, gains {gains}"


def settled(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` gives when nothing is captured meanwhile, as happens once for a process, and the seconds of captures
    in runs before that."""
    start = preparing.seconds
    while True:
        before, result = preparing.seconds, run()
        if preparing.seconds == before:
            return result, before - start


def step_times(target: Target, context: int, rows: tuple[int, ...] = ROWS, repeats: int = 40) -> dict[int, float]:
    """Median milliseconds of a step behind so much text."""
    slot = target.open()
    for _ in target.prefill(slot, [1 + i % 1000 for i in range(context)], Want()):
        pass
    times = {}
    for n in rows:
        tree = TokenTree.build(list(range(1, n + 1)), [max(i - 4, min(0, i - 1)) for i in range(n)])
        taken = []
        for repeat in range(repeats + 5):
            torch.cuda.synchronize()
            clock = perf_counter()
            target.score([slot], [tree], Want(rows=n, samplers=(GREEDY,)))
            torch.cuda.synchronize()
            if repeat >= 5:
                taken.append(perf_counter() - clock)
        times[n] = round(statistics.median(taken) * 1e3, 3)
    target.close(slot)
    return times


def replay_times(target: Any, rows: tuple[int, ...] = ROWS, repeats: int = 40) -> dict[int, float]:
    """Median milliseconds of what the device does in the steps of `step_times`: they are started and waited for,
    nothing else."""
    times = {}
    for n in rows:
        step, taken = next(one for (shape, *_), one in target._steps.items() if shape.rows == shape.ends == n), []
        for _ in range(repeats):
            clock = perf_counter()
            step()
            taken.append(perf_counter() - clock)
        times[n] = round(statistics.median(taken) * 1e3, 3)
    return times


def bandwidth() -> float:
    """Bytes per second of a copy, read and written."""
    one = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(one)
    best = 0.0
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        other.copy_(one)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2 * one.numel() / (start.elapsed_time(end) * 1e-3))
    return best


def llama_7b(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **other: int) -> Any:
    """Or one of other sizes."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"vocab_size": 32000, "max_position_embeddings": 16384}
    config = transformers.LlamaConfig(**(sizes | other), dtype=dtype)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def steps(given: argparse.Namespace) -> dict[str, Any]:
    model, speed = llama_7b(), bandwidth()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    floor = weights / speed * 1e3
    told: dict[str, Any] = {"copy_bytes_per_second": round(speed), "floor_ms": round(floor, 3)}
    ways = {"eager": {"graphs": False}, "graph": {}, "compiled": {"compile": True}}
    for name in given.ways:
        clock = perf_counter()
        target = open_target(model, **ways[name])
        told[name] = step_times(target, 512, repeats=10 if name == "eager" else 40)
        told[name + "_seconds"] = round(perf_counter() - clock, 1)
        lines = {name: told[name]}
        if name != "eager":
            lines["… alone"] = told[name + "_alone"] = replay_times(target)
        target.release()
        for label, times in lines.items():
            tell(f"{label:10}" + "".join(f"{ms:9.3f}" for ms in times.values()) + " ms")
            tell(" " * 10 + "".join(f"{ms / floor:9.3f}" for ms in times.values()) + " × floor")
    return told


def texts(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype="bfloat16", device="cuda")
    prompts = [p.turns[0] for p in select(read(given.prompts) if given.prompts else builtin(), None, given.limit)]
    contestants: dict[str, tuple[str, dict[str, Any]]] = {
        "none": ("none", {}),
        "none-exact": ("none", {"exact": True}),
        "pld": ("pld", {}),
        "suffix": ("suffix", {}),
    }
    if given.store:
        contestants["rest"] = ("rest", {"store": given.store})
        contestants["suffix+store"] = ("suffix", {"store": given.store})
    for name, folder in (word.split("=", 1) for word in given.heads):
        contestants[name] = (name, {"drafter_path": folder})
    contestants["auto"] = ("auto", {"store": given.store} if given.store else {})
    if given.only:
        contestants = {name: made for name, made in contestants.items() if name in ("none", *given.only)}
    told: dict[str, Any] = {"prompts": len(prompts), "compiled": given.compile}
    for way, options in {"greedy": {}, "sampled": {"temperature": 0.7, "top_p": 0.95, "seed": 1}}.items():
        asked = prompts if way == "greedy" else prompts[:: given.sparse]
        said: dict[str, list[list[int]]] = {}
        for name, (drafter, own) in contestants.items():
            llm = LLM(model, tokenizer, drafter, compile=given.compile, **own)
            for prompt in asked[:2]:
                llm.generate(prompt, max_new_tokens=given.tokens, **options)
            results = [llm.generate(p, max_new_tokens=given.tokens, **options) for p in asked]
            said[name] = [r.tokens for r in results]
            told[f"{name} {way}"] = summary(results) | {
                "differ_from_none": sum(a != b for a, b in zip(said[name], said["none"], strict=True))
            }
            tell(f"{name:13}{way:9}" + "  ".join(f"{k} {v}" for k, v in told[f"{name} {way}"].items()))
            del llm
    return told


def peers(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype="bfloat16", device="cuda")
    prompts = [p.turns[0] for p in select(read(given.prompts) if given.prompts else builtin(), None, given.limit)]
    asked = prompts[:: max(1, len(prompts) // given.peers)][: given.peers]
    told: dict[str, Any] = {"prompts": len(asked), "tokens": given.tokens}
    said: dict[str, list[list[int]]] = {}
    for name, options in {"hf": {}, "hf-pld": {"prompt_lookup_num_tokens": 10}}.items():
        clock = perf_counter()
        said[name] = []
        for prompt in asked:
            ids = torch.tensor([encode(prompt, tokenizer, True)], device="cuda")
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=given.tokens, do_sample=False, **options
            )
            said[name].append(out[0, ids.shape[1] :].tolist())
        rate = sum(map(len, said[name])) / (perf_counter() - clock)
        different = sum(a != b for a, b in zip(said[name], said["hf"], strict=True))
        told[name] = {"tokens_per_second": round(rate, 1), "differ_from_hf": different}
        tell(f"{name:8}" + "  ".join(f"{k} {v}" for k, v in told[name].items()))
    return told


def summary(results: list[Any]) -> dict[str, float]:
    seconds, count = sum(r.stats.seconds for r in results), sum(len(r.tokens) for r in results)
    steps = sum(r.stats.steps for r in results)
    return {
        "tokens_per_second": round(count / seconds, 1),
        "tokens_per_step": round(count / steps, 3),
        "first_token_ms": round(statistics.median(r.stats.first_token_seconds for r in results) * 1e3, 2),
        "step_ms": round(statistics.median(r.stats.verify_seconds / r.stats.steps for r in results) * 1e3, 3),
        "draft_ms": round(sum(r.stats.draft_seconds for r in results) / steps * 1e3, 3),
        "host_ms": round(sum(r.stats.draft_seconds + r.stats.host_seconds for r in results) / steps * 1e3, 3),
    }


def batch(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype="bfloat16", device="cuda")
    prompts = [p.turns[0] for p in select(read(given.prompts) if given.prompts else builtin(), None, 64)]
    drafters = [name for name in ("none", "pld", "suffix", "eagle3", "auto") if name in (given.only or [name])]
    told: dict[str, Any] = {}
    for size in (1, 4, 16, 64):
        llms = {name: LLM(model, tokenizer, name, max_batch=size, compile=given.compile) for name in drafters}
        asked = (prompts * (1 + size // len(prompts)))[:size]
        rates: dict[str, list[float]] = {name: [] for name in llms}
        for _ in range(1 + BATCH_REPEATS):  # the first time, code is loaded
            for name, llm in llms.items():
                taken = Stopwatch()
                results = llm.generate(asked, max_new_tokens=128, ignore_eos=True)
                rates[name].append(sum(len(r.tokens) for r in results) / taken.seconds())
        for name, found in rates.items():
            told[f"{name} {size}"] = [round(rate, 1) for rate in found[1:]]
            middle = statistics.median(found[1:])
            tell(f"{name:6} {size:3} sequences {middle:9.1f} tokens/s " + " ".join(f"{rate:.0f}" for rate in found[1:]))
        llms.clear()
        gc.collect()  # their caches
    return told


def long(given: argparse.Namespace) -> dict[str, Any]:
    del given
    model = llama_7b()
    target: Any = open_target(model)
    rows = (1, 32, 64)
    told: dict[str, Any] = {"512": step_times(target, 512, rows), "8192": step_times(target, 8192, rows)}
    told["cache_bytes"] = target.arena.bytes
    target.release()
    tell(json.dumps(told))
    return told


def full(given: argparse.Namespace) -> dict[str, Any]:
    del given
    model, speed = llama_7b(), bandwidth()
    target: Any = open_target(model)
    lengths = [2048 - 64 + 2 * i for i in range(64)]
    slots = [target.open() for _ in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        for _ in target.prefill(slot, [1 + i % 1000 for i in range(length)], Want()):
            pass
    held = target.arena.pages - 1 - target.arena.free
    keys = sum(lengths) * target.arena.per_token
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    floor, taken = (weights + keys) / speed * 1e3, []
    trees, want = [TokenTree.root(1)] * 64, Want(rows=1, samplers=(GREEDY,) * 64)
    for _ in range(25):
        torch.cuda.synchronize()
        clock = perf_counter()
        target.score(slots, trees, want)
        torch.cuda.synchronize()
        taken.append(perf_counter() - clock)
    told = {
        "tokens": sum(lengths),
        "waste": round(held * PAGE / sum(lengths) - 1, 4),
        "floor_ms": round(floor, 2),
        "step_ms": round(statistics.median(taken[5:]) * 1e3, 2),
        "gigabytes": round(torch.cuda.memory_allocated() / 1e9, 1),
    }
    target.release()
    tell(json.dumps(told))
    return told


def read_prompts(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype="bfloat16", device="cuda")
    longest = model.config.max_position_embeddings
    every = "\n".join(p.turns[0] for p in (read(given.prompts) if given.prompts else builtin()))
    tokens = encode(every, tokenizer, True)
    told: dict[str, Any] = {}
    for length in (7900, 31000):
        if length > longest:
            continue
        text = (tokens * (1 + length // len(tokens)))[:length]
        rates: dict[str, float] = {}
        for chunk in (512, 2048):
            target = open_target(model, chunk=chunk, memory=0.3)
            for _ in range(4):
                slot = target.open()
                torch.cuda.synchronize()
                clock = perf_counter()
                for _ in target.prefill(slot, text, Want()):
                    pass
                torch.cuda.synchronize()
                rates[f"pieces of {chunk}"] = length / (perf_counter() - clock)
                target.close(slot)
            target.release()
        ids = torch.tensor([text], device="cuda")
        for _ in range(3):
            torch.cuda.synchronize()
            clock = perf_counter()
            with torch.inference_mode():
                model(ids, logits_to_keep=1, use_cache=True)
            torch.cuda.synchronize()
            rates["transformers"] = length / (perf_counter() - clock)
        told[str(length)] = {name: round(rate) for name, rate in rates.items()}
        tell(f"{length} tokens " + "  ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items()))
    return told


def halved(model: Any) -> Any:
    """Every other layer of a model."""
    small = cut_out(model, "even", model.config.num_hidden_layers // 2).to(model.dtype)
    small.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # in the precision that a loaded model has
    return small


def draft(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype="bfloat16", device="cuda")
    small, depth = halved(model), 5
    prompts = [p.turns[0] for p in select(read(given.prompts) if given.prompts else builtin(), None, given.limit)]
    llms = {
        "draft alone": LLM(small, tokenizer, "none", memory=0.2),
        "none": LLM(model, tokenizer, "none", memory=0.2),
        "model": LLM(model, tokenizer, "model", draft_model=small, depth=depth, memory=0.2),
        "auto": LLM(model, tokenizer, "auto", draft_model=small, memory=0.2),
    }
    told: dict[str, Any] = {}
    said: dict[str, list[list[int]]] = {}
    for name, llm in llms.items():
        for prompt in prompts[:3]:
            llm.generate(prompt, max_new_tokens=given.tokens)
        results = [llm.generate(p, max_new_tokens=given.tokens, ignore_eos=True) for p in prompts]
        said[name] = [r.tokens for r in results]
        told[name] = summary(results)
        tell(f"{name:12}" + "  ".join(f"{k} {v}" for k, v in told[name].items()))
    told["per_drafted_ms"] = round(told["model"]["draft_ms"] / depth, 4)
    told["ratio"] = round(told["per_drafted_ms"] / told["draft alone"]["step_ms"], 3)
    told["differ"] = {n: sum(a != b for a, b in zip(said[n], said["none"], strict=True)) for n in ("model", "auto")}
    tell(json.dumps({k: told[k] for k in ("per_drafted_ms", "ratio", "differ")}))
    return told


def rejection(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype="bfloat16", device="cuda")
    prompts = [p.turns[0] for p in select(read(given.prompts) if given.prompts else builtin(), None, given.limit)]
    plain, heads = LLM(model, tokenizer, "none"), LLM(model, tokenizer, "redrafter")
    told: dict[str, Any] = {}
    drawn = {"temperature": 0.7, "seed": 1, "max_new_tokens": given.tokens}
    for name, llm, options in (
        ("none", plain, {}),
        ("match", heads, {}),
        ("rejection", heads, {"accept": "rejection"}),
        ("typical", heads, {"accept": "typical"}),
    ):
        for prompt in prompts[:3]:
            llm.generate(prompt, **drawn, **options)
        told[name] = summary([llm.generate(p, **drawn, **options) for p in prompts])
        tell(f"{name:12}" + "  ".join(f"{k} {v}" for k, v in told[name].items()))
    return told


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "steps": steps,
    "texts": texts,
    "peers": peers,
    "batch": batch,
    "long": long,
    "full": full,
    "read": read_prompts,
    "draft": draft,
    "rejection": rejection,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--prompts", help="default: the built-in ones")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--peers", type=int, default=10, help="prompts that transformers answers, slowly")
    parser.add_argument("--ways", nargs="+", default=["eager", "graph", "compiled"])
    parser.add_argument("--sparse", type=int, default=4, help="sampled texts: every so many-th prompt")
    parser.add_argument("--store", help="a datastore, for rest")
    parser.add_argument("--heads", nargs="*", default=[], metavar="NAME=FOLDER", help="trained heads")
    parser.add_argument("--only", nargs="*", default=[], help="of the drafters, these and none")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    where = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for name in given.parts or PARTS:
        print(json.dumps({"part": name, **PARTS[name](given), **where}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
