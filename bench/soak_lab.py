"""What the parts of bench/soak.py stand on: a tiny model, its prompts, servers, and a client that may be slow."""

from __future__ import annotations

import asyncio
import json
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


async def ask(port: int, body: dict[str, Any], slow: bool = False, cut: int | None = None) -> dict[str, Any]:
    """One streamed answer. slow: a few bytes at a time; cut: the connection is closed after so many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    sent = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
    got = b""
    try:
        while piece := await reader.read(24 if slow else 1 << 16):
            got += piece
            if cut is not None and len(got) > cut:
                break
            if slow:
                await asyncio.sleep(0.05)
    finally:
        writer.close()
    events = [json.loads(line[6:]) for line in re.findall(rb"data: \{.*\}", got) if line.endswith(b"}")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    return {
        "status": int(got.split(b" ", 2)[1]) if got else 0,
        "done": b"data: [DONE]\n\n" in got,
        "text": "".join(choice["text"] for choice in choices),
        "finish": next((choice["finish_reason"] for choice in choices if choice["finish_reason"]), None),
        "errors": [event["error"]["message"] for event in events if "error" in event],
        "warnings": [w for e in events for w in e.get("slipstream", {}).get("stats", {}).get("warnings", ())],
        "tokens": next((event["usage"]["completion_tokens"] for event in events if event.get("usage")), 0),
    }


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
