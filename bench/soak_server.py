"""The parts of bench/soak.py with a server: long runs, and what is durable when it is killed."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from callers import ask
from slipstream.datastores.durable.store import Store
from soak_lab import WAYS, at_work, growth, resident, run_threads, said, serving, tell, tiny, tiny_folder

FULL = 32 << 10  # bytes that are left on the disk that fills up


async def under_streams(port: int, count: int, rng: random.Random) -> dict[str, Any]:
    """Streams at once: a tenth read slowly, a tenth is cut."""
    prompts, kinds = said(rng, count), ["slow", "cut", *["whole"] * 8]
    asked = [
        {"prompt": p, "max_tokens": rng.randint(1, 60), "temperature": 1, "seed": i} for i, p in enumerate(prompts)
    ]
    cuts = [rng.randint(1, 6000) if kinds[i % 10] == "cut" else None for i in range(count)]
    found = await asyncio.gather(*(ask(port, asked[i], kinds[i % 10] == "slow", cuts[i]) for i in range(count)))
    whole = [answer for answer, cut in zip(found, cuts, strict=True) if cut is None]
    complete = sum(a["status"] == 200 and a["done"] and bool(a["finish"]) and not a["errors"] for a in whole)
    return {"streams": count, "not_cut": len(whole), "complete": complete}


def under_requests(port: int, process: int, total: int, rng: random.Random) -> dict[str, Any]:
    """Short requests, one after the other, on 16 connections that stay open."""
    prompts, left, lock, curve = said(rng, 60), iter(range(total)), threading.Lock(), dict[int, tuple[float, float]]()
    told = Counter[str]()

    def caller() -> None:
        line = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            with lock:
                if (number := next(left, None)) is None:
                    return
                if number % 500 == 0:
                    curve[number] = resident(process)
            way = WAYS[number % 3] if number % 3 else {"temperature": 0}
            body = {"prompt": prompts[number % 60], "max_tokens": 1 + number % 4, **way}
            line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = line.getresponse()
            choice = json.loads(answer.read()).get("choices", [{}])[0]
            with lock:
                told["complete" if answer.status == 200 and choice.get("finish_reason") else str(answer.status)] += 1

    clock = perf_counter()
    run_threads(caller for _ in range(16))
    seconds = perf_counter() - clock
    curve[total] = resident(process)
    return {"requests": total, "answers": dict(told), "per_second": round(total / seconds), **growth(curve)}


def server(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    with tiny_folder() as folder, serving(str(folder), "--max-waiting", "600") as (process, port):
        begun = resident(process.pid)
        first = asyncio.run(under_streams(port, int(500 * given.scale), rng))
        tell(f"streams: {first}, {begun} MB before, {resident(process.pid)} after")
        then = under_requests(port, process.pid, int(10_000 * given.scale), rng)
        again = asyncio.run(under_streams(port, int(500 * given.scale), rng))
        sleep(1)
        at_end = {"at_work": at_work(port), "begun_megabytes": begun, "end_megabytes": resident(process.pid)}
        return {"first": first, "then": then, "again": again, **at_end, "log": process.log[-5:]}


def stored(folder: Path, tokenizer: Any) -> Counter[str]:
    with Store.open(folder) as store:
        return Counter(tokenizer.decode(list(d), skip_special_tokens=True) for d in store.documents())


def learn(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    tokenizer, told = tiny()[1], dict[str, Any]()

    async def answers(port: int, count: int, kill: Any = None) -> list[dict[str, Any]]:
        """From four callers; those whose last event came, and which the server says it has kept."""
        got: list[dict[str, Any]] = []
        left = iter(range(count))
        if kill is not None:
            asyncio.get_running_loop().call_later(*kill)

        async def caller() -> None:
            for _ in left:
                how = {"max_tokens": rng.randint(20, 60), "temperature": 1, "slipstream": {"stats": True}}
                try:
                    answer = await ask(port, {"prompt": said(rng, 1)[0], **how})
                except OSError:  # it was killed
                    return
                if answer["done"]:
                    got.append(answer)

        await asyncio.gather(*(caller() for _ in range(4)))
        return got

    with tiny_folder() as folder:
        words, received, rounds = [str(folder), "--learn", "-d", "rest", "-o"], list[str](), list[int]()
        store = folder / "store"
        for _ in range(max(2, int(10 * given.scale))):
            with serving(*words, f"store={store}") as (process, port):
                kill = (rng.uniform(0.1, 2), process.send_signal, signal.SIGKILL)
                got = asyncio.run(answers(port, 40, kill))
                process.kill()  # if it was quicker
                received += [answer["text"] for answer in got if answer["text"]]
                rounds.append(len(got))
        lost = Counter(received) - stored(store, tokenizer)
        told["kills"] = {"rounds": len(rounds), "acknowledged": rounds, "lost": lost.total()}
        tell(f"kills: {told['kills']}")
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
        try:
            with serving(*words, f"store={disk / 'store'}") as (process, port):
                before = asyncio.run(answers(port, 40))
                ballast, room = disk / "ballast", os.statvfs(disk)
                ballast.write_bytes(bytes(room.f_bavail * room.f_bsize - FULL))
                full = asyncio.run(answers(port, int(1000 * given.scale)))
                ballast.unlink()
                after = asyncio.run(answers(port, 40))
                alive = process.poll() is None and at_work(port) == 0
                log = [line for line in process.log if "No space" in line or "full" in line][:2]
            every = [*before, *full, *after]
            kept = Counter(a["text"] for a in every if a["text"] and not a["warnings"])
            told["full"] = {
                "answers": len(every),
                "errors": sum(bool(a["errors"]) for a in every),
                "warned": [sum(bool(a["warnings"]) for a in part) for part in (before, full, after)],
                "warning": next((a["warnings"][0] for a in every if a["warnings"]), None),
                "lost": (kept - stored(disk / "store", tokenizer)).total(),
                "alive": alive,
                "log": log,
            }
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return told
