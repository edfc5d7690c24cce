"""Stores built by Ray's workers, and stores that follow others: python bench/cluster.py FOLDER… [--part PART]

speed    a build by one machine alone, and by Ray with one and with two workers: seconds, and equal bytes
kills    a build on a cluster of several nodes, while workers are killed at random and a node goes down
follow   a follower that is killed at random while there is a writer: what it opens then, and how far it lags

Sources are the Python files in the folders, up to --megabytes; or, with --corpus, those of the packages that
`bench/corpus.py` lists, about 100M tokens, which are fetched once. Each part prints one JSON line. Needs Ray (see
`make test-ray`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import zipfile
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "ray"))
from killing import kill_a_worker  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import corpus as code  # noqa: E402
import ray  # noqa: E402
from slipstream.cli.store import returned  # noqa: E402
from slipstream.cluster import RayWorkers  # noqa: E402
from slipstream.datastores.durable.follow import follow  # noqa: E402
from slipstream.datastores.durable.manifest import NAME, read_manifest  # noqa: E402
from slipstream.datastores.durable.pages import PAGE  # noqa: E402
from slipstream.datastores.durable.segment import Segment  # noqa: E402
from slipstream.datastores.durable.store import Store  # noqa: E402
from slipstream.datastores.ingest.encoding import Encoder, FileTokenizer, tokenizer_fingerprint  # noqa: E402
from slipstream.datastores.ingest.ingest import Ingested, ingest  # noqa: E402
from slipstream.datastores.ingest.sharded import SHARD_BYTES, ingest_sharded  # noqa: E402
from slipstream.datastores.ingest.sources import SourceFile, find_sources  # noqa: E402
from slipstream.kept import cache_folder  # noqa: E402
from slipstream.loading import embedded  # noqa: E402

VOCABULARY = 49152
NODES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--corpus", action="store_true", help="The packages of bench/corpus.json.")
    parser.add_argument("--bytes", action="store_true", help="Each byte is a token: many tokens with less work.")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--segment-tokens", type=int, default=1 << 24)
    parser.add_argument("--shard-megabytes", type=int, default=SHARD_BYTES >> 20)
    parser.add_argument("--pause", type=float, default=15, help="Seconds between kills of workers, on average.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="Of Ray's, for speed.")
    parser.add_argument("--sha256", help="Of the build by one machine, from an earlier run: it is not made again.")
    parser.add_argument("--kills", type=int, default=40, help="Of a follower.")
    parser.add_argument("--part", action="append", choices=("speed", "kills", "follow"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = given.part or ["speed", "kills", "follow"]
        if given.corpus:
            given.folders.append(unpacked())
        found = sources(given.folders, given.megabytes)
        tokenizer = bytes_as_tokens(Path(folder)) if given.bytes else embedded.ensure() / "tokenizer.json"
        bench = Bench(Path(folder), tokenizer, given.segment_tokens, given.shard_megabytes << 20, found)
        if given.sha256:
            bench.alone = {"sha256": given.sha256}
        runs = {
            "speed": lambda: bench.speed(given.workers),
            "kills": lambda: bench.killed(given.pause),
            "follow": lambda: follower(Path(folder), given.kills),
        }
        for part in parts:
            found = runs[part]()
            about = {"part": part, "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), **found}
            print(json.dumps(about), flush=True)


def sources(folders: list[str], megabytes: int) -> list[SourceFile]:
    found, size = [], 0
    for source in find_sources([f"{folder}/**/*.py" for folder in folders]) if folders else []:
        if size >= megabytes * 1_000_000:
            break
        found.append(source)
        size += source.size
    return found


def unpacked() -> str:
    """The Python files of all packages that are not held out. Kept, since names and times are part of a store."""
    place = cache_folder() / "corpus" / "files"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".making-") as made:
            for package in code._listed()["packages"]:
                if not package["held_out"]:
                    with zipfile.ZipFile(code._fetch(package)) as wheel:
                        names = [m.filename for m in wheel.infolist() if m.filename.endswith(".py")]
                        wheel.extractall(Path(made) / "files" / package["name"], names)
            (Path(made) / "files").rename(place)  # whole or not at all
    return str(place)


def bytes_as_tokens(folder: Path) -> Path:
    """A tokenizer that joins nothing."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


class Bench:
    def __init__(
        self, folder: Path, tokenizer: Path, segment_tokens: int, shard_bytes: int, sources: list[SourceFile]
    ) -> None:
        self.folder, self.sources = folder, sources
        self.segment_tokens, self.shard_bytes = segment_tokens, shard_bytes
        loaded = FileTokenizer(tokenizer)
        self.encoder, self.fingerprint = Encoder(loaded), tokenizer_fingerprint(loaded)
        self.alone: dict[str, Any] = {}

    def killed(self, pause: float) -> dict[str, Any]:
        return {"alone": self._alone(), "ray, killed": self._killed(pause)}

    def speed(self, workers: list[int]) -> dict[str, Any]:
        told = {"alone": self._alone()}
        for cores in workers:
            with one_machine(cores):
                told[f"ray {cores}"] = self._by_ray({})
        return told

    def _alone(self) -> dict[str, Any]:
        if not self.alone:
            self.alone = self._built(lambda store: ingest(store, self.sources, self.encoder))
        return self.alone

    def _by_ray(self, extra: dict[str, Any]) -> dict[str, Any]:
        workers = RayWorkers("auto", partial(returned, self.encoder))
        started = perf_counter()
        workers.submit(_nothing).result()
        extra["start_s"] = round(perf_counter() - started, 1)
        told = self._built(lambda store: ingest_sharded(store, self.sources, workers, shard_bytes=self.shard_bytes))
        return {**told, **extra, "equal": told["sha256"] == self._alone()["sha256"]}

    def _killed(self, pause: float) -> dict[str, Any]:
        done, over, rng = {"workers_killed": 0, "nodes_gone": 0}, threading.Event(), random.Random(0)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(NODES - 1)]
        ray.init(cluster.address, log_to_driver=False)

        def kill() -> None:
            while not over.wait(rng.random() * 2 * pause):
                done["workers_killed"] += kill_a_worker(rng)
                if done["workers_killed"] >= 3 and not done["nodes_gone"]:
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                    done["nodes_gone"] += 1

        killer = threading.Thread(target=kill)
        try:
            killer.start()
            return {"nodes": NODES, **self._by_ray(done)}
        finally:
            over.set()
            killer.join()
            ray.shutdown()
            cluster.shutdown()

    def _built(self, fill: Any) -> dict[str, Any]:
        folder = self.folder / "store"
        with Store.create(folder, VOCABULARY, self.fingerprint, segment_tokens=self.segment_tokens) as store:
            started = perf_counter()
            counts: Ingested = fill(store)
            seconds = perf_counter() - started
        told = {
            "seconds": round(seconds, 1),
            "tokens": counts.tokens,
            "documents": counts.documents,
            "tokens_per_second": round(counts.tokens / seconds),
            "segments": len(read_manifest(folder).segments),
            "sha256": digest(folder),
        }
        shutil.rmtree(folder)
        return told


def _nothing(_: Encoder) -> None:
    pass


@contextmanager
def one_machine(cores: int) -> Any:
    ray.init(num_cpus=cores, log_to_driver=False, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


def digest(folder: Path) -> str:
    """Of all segments, without the ids of store and log, which are random, and the generation."""
    total = hashlib.sha256()
    for entry in read_manifest(folder).segments:
        segment = Segment(folder / entry.name)
        header = {k: v for k, v in segment.header.items() if k not in ("store", "generation", "made_from")}
        total.update(json.dumps(header).encode())
        with segment.path.open("rb") as file:
            file.seek(PAGE)
            left = header["bytes"] - 2 * PAGE
            while left:
                piece = file.read(min(left, 1 << 24))
                total.update(piece)
                left -= len(piece)
    return total.hexdigest()


# ---- following


def follower(folder: Path, kills: int) -> dict[str, Any]:
    """A writer makes a segment every now and then, and merges; the follower looks every 10 ms."""
    source, target, rng = folder / "source", folder / "target", random.Random(1)
    made: dict[int, float] = {}  # when the source passed to a generation
    texts: dict[int, int] = {}  # tokens that it had then
    lags: list[float] = []
    opened = 0
    context = multiprocessing.get_context("fork")
    with Store.create(source, VOCABULARY, segment_tokens=1 << 22) as store:
        for turn in range(kills):
            store.append(np.random.default_rng(turn).integers(0, VOCABULARY, 50_000), f"s{turn}")
            store.flush()
            if turn % 10 == 9:
                store.compact()
            made[store.manifest.generation], texts[store.manifest.generation] = perf_counter(), store.info()["tokens"]
            process = context.Process(target=_follow_on, args=(source, target))
            process.start()
            if turn % 2:  # half of them get to the end, to measure how long that takes
                lags.append(_until(target, store.manifest.generation) - made[store.manifest.generation])
            else:
                sleep(rng.random() * 0.03)
            process.kill()
            process.join()
            if (target / NAME).exists():
                with Store.open(target) as replica:
                    wrong = [w for w in replica.verify() if "store.copy" not in w and "log.end" not in w]
                    assert not wrong, wrong
                    assert replica.info()["tokens"] == texts[replica.manifest.generation]
                opened += 1
        lag = _lag(store, source, target, context)
    shutil.rmtree(source)
    shutil.rmtree(target)
    told = {"kills": kills, "opened_whole": opened, "lag_ms_with_start": _spread(lags), "lag_ms": _spread(lag)}
    return {**told, "tokens_of_a_segment": 50_000}


def _lag(store: Store, source: Path, target: Path, context: Any) -> list[float]:
    """From the source's switch to the follower's, of one that runs on."""
    process = context.Process(target=_follow_on, args=(source, target))
    process.start()
    _until(target, store.manifest.generation)
    lags = []
    for turn in range(40):
        sleep(0.05)
        store.append(np.random.default_rng(turn).integers(0, VOCABULARY, 50_000), "more")
        store.flush()
        switched = perf_counter()
        lags.append(_until(target, store.manifest.generation) - switched)
    process.kill()
    process.join()
    return lags


def _follow_on(source: Path, target: Path) -> None:
    while True:
        follow(source, target)
        sleep(0.01)


def _until(target: Path, generation: int) -> float:
    while True:
        with suppress(Exception):  # there is no store yet
            if read_manifest(target).generation >= generation:
                return perf_counter()
        sleep(0.001)


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(1000 * float(np.median(seconds)), 1),
        "p90": round(1000 * float(np.quantile(seconds, 0.9)), 1),
        "largest": round(1000 * max(seconds), 1),
        "count": len(seconds),
    }


if __name__ == "__main__":
    main()
