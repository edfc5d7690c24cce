"""Shared by the parts of bench/soak.py: a tiny model, its prompts, and servers."""

from __future__ import annotations

import os
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.evaluate.workloads import builtin, read

WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.2, "top_k": 20, "seed": 11}]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- models and servers


def tiny() -> tuple[Any, Any]:
    """A random model that writes letters, and its tokenizer."""
    signs = {sign.replace(" ", "Ġ"): i for i, sign in enumerate(["<end>", *string.printable[:95]])}
    letters = Tokenizer(models.BPE(signs, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512, "vocab_size": len(signs)}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**heads, **sizes, eos_token_id=0, bos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4)
    return model, tokenizer


def said(rng: random.Random, count: int) -> list[str]:
    """Prompts for it; every other one begins like the one before."""
    made = ["".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(3, 60))) for _ in range(count)]
    return [made[i - 1] + text if i % 2 else text for i, text in enumerate(made)]


@contextmanager
def tiny_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for part in tiny():
            part.save_pretrained(folder)
        yield Path(folder)


def run_threads(work: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def resident(process: int | str = "self") -> tuple[float, float]:
    """Megabytes in memory, and those of them that are no files, with what was swapped out: a system that takes back
    pages nobody touched lets the first shrink, not the second."""
    told = Path(f"/proc/{process}/status").read_text()
    found = {name: int(kilobytes) / 1024 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", told)}
    return round(found["VmRSS"], 1), round(found["RssAnon"] + found["VmSwap"], 1)


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`slipstream serve` in a process of its own, and its port."""
    command = [sys.executable, "-m", "slipstream", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"served at http://[\d.]+:(\d+)", line.replace("\n", " ")):
                break
        else:
            raise SystemExit(f"the server did not start: exit code {process.wait()}")
        process.log = []  # type: ignore[attr-defined]
        threading.Thread(target=lambda: process.log.extend(process.stderr), daemon=True).start()  # type: ignore
        yield process, int(found[1])
    finally:
        process.terminate()
        process.wait(60)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def at_work(port: int) -> float:
    """Requests that a server runs, or that wait there."""
    return sum(float(n) for n in re.findall(r"^slipstream_num_requests_\w+ (\S+)", get(port, "/metrics"), re.M))


def growth(curve: dict[int, tuple[float, float]]) -> dict[str, Any]:
    """The slopes after the first thousand, by least squares, of what `resident` tells."""
    points = {number: sizes for number, sizes in curve.items() if number >= 1000}
    found: dict[str, Any] = {"megabytes": curve}
    for place, name in enumerate(("growth_per_1000", "own_growth_per_1000")):
        sizes = [each[place] for each in points.values()]
        slope = statistics.linear_regression(list(points), sizes).slope if len(points) > 1 else 0.0
        found[name] = round(1000 * slope, 3)
    return found


def real(files: Iterable[str], rng: random.Random, count: int) -> list[str]:
    """Short prompts of these files, or of the built-in ones; if there are too few, again with another ending."""
    found = [p.turns[0] for file in files for p in read(file)] or [p.turns[0] for p in builtin()]
    found = sorted(found, key=len)[: 2 * count]
    rng.shuffle(found)
    again = count // len(found)
    return [prompt + f" ({i})" * (i > 0) for i in range(again + 1) for prompt in found][:count]
