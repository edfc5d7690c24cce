"""Cost and quality of the datastore, on 100M tokens of code: python bench/retrieval.py [PART…]

build     tokens per second from tokenised documents, memory, bytes on disk
search    time per query, warm, with one segment and with eight, and of the first query after a cold start
larger    a store ten times larger than the memory it may use
coverage  true next tokens in the drafted tree, by size of the store, by longest match, and against random selection

Each part prints one JSON line. Queries come from packages that are not in the store.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import corpus as code
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.sparse.search import SearchShape
from slipstream.datastores.sparse.sort import cores
from slipstream.tree import TokenTree

VOCABULARY = 49152
QUERIES = 2000
TOKENS = 100_000_000
CGROUP = Path("/sys/fs/cgroup/memory")


def documents(corpus: code.Corpus, tokens: int) -> list[np.ndarray]:
    """The first documents, of about so many tokens together."""
    count = min(int(np.searchsorted(corpus.starts, tokens)), len(corpus.starts) - 1)
    return [corpus.tokens[corpus.starts[d] : corpus.starts[d + 1]] for d in range(count)]


def make_store(folder: Path, texts: list[np.ndarray], segment_tokens: int = 1 << 27) -> None:
    with Store.create(folder, VOCABULARY, segment_tokens=segment_tokens) as store:
        for start in range(0, len(texts), 256):
            store.extend((Document(t, "code") for t in texts[start : start + 256]), bulk=True)
        store.flush()


def queries(corpus: code.Corpus) -> list[tuple[np.ndarray, np.ndarray]]:
    """A context of 32 tokens and the 10 that truly follow."""
    found = []
    for document, position in code.queries(corpus, QUERIES, seed=1):
        at = corpus.held_starts[document] + position
        found.append((corpus.held_tokens[at - 32 : at].astype(np.int32), corpus.held_tokens[at : at + 10]))
    return found


def covered(tree: TokenTree, truth: np.ndarray) -> int:
    """How many of the true next tokens the tree has as a path."""
    node: int | None = 0
    for depth, token in enumerate(truth):
        node = tree.child(node or 0, int(token))
        if node is None:
            return depth
    return len(truth)


def timed(store: Store, asked: list[tuple[np.ndarray, np.ndarray]], shape: SearchShape) -> dict[str, float]:
    """Microseconds per query, and the tokens covered."""
    for context, _ in asked:  # warm: every page was read before
        store.draft(context, shape)
    times, hits, nodes = [], [], []
    for context, truth in asked:
        clock = perf_counter()
        found = store.draft(context, shape)
        times.append((perf_counter() - clock) * 1e6)
        hits.append(covered(found.tree, truth))
        nodes.append(len(found.tree) - 1)
    return {
        "mean_us": round(float(np.mean(times)), 1),
        "median_us": round(float(np.median(times)), 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
        "covered": round(float(np.mean(hits)), 3),
        "nodes": round(float(np.mean(nodes)), 1),
    }


# ---- the parts


def build(_: code.Corpus, scratch: Path) -> dict[str, Any]:
    """In a process of its own, for its peak memory."""
    return child("build-child", str(scratch / "store"))


def build_child(folder: str) -> dict[str, Any]:
    corpus = code.load()
    make_store(Path(folder + "-warm"), documents(corpus, 400_000))  # compiles, and maps what is needed anyway
    texts = documents(corpus, TOKENS)
    for text in texts:
        text.max()  # read from the disk before the clock runs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = perf_counter()
    make_store(Path(folder), texts)
    seconds = perf_counter() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Store.open(folder) as store:
        entry = store.manifest.segments[0]
        return {
            "tokens": entry.tokens,
            "tokens_per_second": round(entry.tokens / seconds),
            "memory_bytes_per_token": round((peak - before) * 1024 / entry.tokens, 2),
            "disk_bytes_per_token": round(entry.bytes / entry.tokens, 3),
        }


def search(corpus: code.Corpus, scratch: Path) -> dict[str, Any]:
    folder, several = scratch / "store", scratch / "eight"
    texts = documents(corpus, TOKENS)
    if not folder.exists():
        make_store(folder, texts)
    make_store(several, texts, segment_tokens=TOKENS // 8 + TOKENS // 100)
    asked = queries(corpus)
    # First of all, since pages that a process has mapped stay in memory.
    told: dict[str, Any] = {"cold": [child("cold-child", str(folder), str(i)) for i in range(5)]}
    with Store.open(folder) as one, Store.open(several) as eight:
        told["segments"] = [len(one.manifest.segments), len(eight.manifest.segments)]
        told["filled"] = timed(one, asked, SearchShape())
        told["longest_only"] = timed(one, asked, SearchShape(fill=False))
        told["eight_segments"] = timed(eight, asked, SearchShape())
    told["covers_more"] = round(told["filled"]["covered"] / told["longest_only"]["covered"], 3)
    return told


def cold_child(folder: str, number: str) -> dict[str, Any]:
    """Open a store none of whose pages are in memory, and ask."""
    asked = queries(code.load())[int(number) * 20 :][:20]
    warm_up(Path(folder).parent / f"warm-{number}")
    for path in Path(folder).iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = perf_counter()
    store = Store.open(folder)
    opened = perf_counter()
    times = []
    for context, _ in asked:
        start = perf_counter()
        store.draft(context, SearchShape())
        times.append(round((perf_counter() - start) * 1e3, 2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "open_ms": round((opened - clock) * 1e3, 2),
        "first_ms": times[0],
        "next_ms": round(float(np.mean(times[1:])), 2),
        "memory_kb": peak - before,
    }


def larger(corpus: code.Corpus, scratch: Path) -> dict[str, Any]:
    folder = scratch / "store"
    if not folder.exists():
        make_store(folder, documents(corpus, TOKENS))
    return child("larger-child", str(folder))


def larger_child(folder: str) -> dict[str, Any]:
    """What is loaded already stays outside; the store and all that searching takes must keep within the limit."""
    asked = queries(code.load())[:500]
    warm_up(Path(folder).parent / "warm-larger")
    size = sum(p.stat().st_size for p in Path(folder).iterdir())
    group = CGROUP / f"slipstream-{os.getpid()}"
    told: dict[str, Any] = {"store_bytes": size, "limit_bytes": size // 10}
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size // 10))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        told["limited_by"] = "cgroup"
    except OSError:
        told["limited_by"] = None  # the resident size below still says what was used
    for path in Path(folder).iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    with Store.open(folder) as store:
        told |= timed(store, asked, SearchShape())
    if told["limited_by"]:
        told["peak_bytes"] = int((group / "memory.max_usage_in_bytes").read_text())
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
    return told


def coverage(corpus: code.Corpus, scratch: Path) -> dict[str, Any]:
    asked = queries(corpus)
    told: dict[str, Any] = {"tokens": {}, "longest": {}}

    def mean(store: Store, shape: SearchShape) -> float:
        return round(float(np.mean([covered(store.draft(c, shape).tree, truth) for c, truth in asked])), 3)

    for tokens in (1_000_000, 10_000_000, TOKENS):
        folder = scratch / ("store" if tokens == TOKENS else f"store-{tokens}")
        if not folder.exists():
            make_store(folder, documents(corpus, tokens))
        with Store.open(folder) as store:
            told["tokens"][tokens] = mean(store, SearchShape())
            if tokens == TOKENS:
                for longest in (2, 3, 4, 6, 8, 12, 16):
                    told["longest"][longest] = mean(store, SearchShape(longest=longest))
                told["trie"], told["random"] = mean(store, SearchShape()), mean(store, SearchShape(random=True))
    return told


# ---- running them


def warm_up(folder: Path) -> None:
    """Load the compiled code with a store of no importance."""
    make_store(folder, [np.arange(100) % 7, np.arange(100) % 5])
    with Store.open(folder) as store:
        store.draft(np.array([1, 2, 3], np.int32), SearchShape())
    shutil.rmtree(folder)


def child(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


PARTS: dict[str, Callable[[code.Corpus, Path], dict[str, Any]]] = {
    "build": build,
    "search": search,
    "larger": larger,
    "coverage": coverage,
}
CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "build-child": build_child,
    "cold-child": cold_child,
    "larger-child": larger_child,
}


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] in CHILDREN:
        print(json.dumps(CHILDREN[words[0]](*words[1:])))
        return
    if unknown := set(words) - set(PARTS):
        sys.exit(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    corpus = code.load()
    where = {
        "cores": cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "corpus": corpus.fingerprint,
        "queries": QUERIES,
    }
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as scratch:
        for name in words or PARTS:
            print(json.dumps({"part": name, **PARTS[name](corpus, Path(scratch)), **where}), flush=True)


if __name__ == "__main__":
    main()
