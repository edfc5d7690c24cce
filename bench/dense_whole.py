"""Searching all vectors of a store, whatever followed, on one CPU thread: python bench/dense_whole.py STORE

For comparison with search within the root's group (`dense.py host`): one graph over all vectors, as in the paper. Some
vectors are held out as queries; recall@10 is against an exact search, where hits as near as the tenth count. A table
goes to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu import tell
from slipstream import Store
from slipstream.datastores.dense import index
from slipstream.datastores.dense.nearest import Vectors

COUNT = 10  # nearest ones
ROUNDING = 1e-5
PIECE = 1 << 17  # vectors that are compared at a time, exactly


def tenth(vectors: NDArray[np.float16], queries: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
    """(q,) how near the tenth nearest is, and the milliseconds per query when all are asked at once."""
    start, best = perf_counter(), np.full((len(queries), COUNT), -np.inf, np.float32)
    for begin in range(0, len(vectors), PIECE):
        similar = queries @ vectors[begin : begin + PIECE].astype(np.float32).T
        both = np.concatenate((best, similar), 1)
        best = np.partition(both, -COUNT, 1)[:, -COUNT:]
    return best.min(1), (perf_counter() - start) / len(queries) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path, help="a store that `slipstream store embed` has read")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--made", type=int, default=128, help="vectors looked at to place one")
    parser.add_argument("--looked", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="and to find some")
    parser.add_argument("--threads", type=int, default=0, help="to build the graph; default: all")
    given = parser.parse_args()
    (part,) = Vectors(Store.open(given.store)).view().parts
    rng = np.random.default_rng(0)
    held = np.sort(rng.choice(len(part), given.queries, replace=False))
    vectors = np.delete(np.asarray(part.vectors), held, 0)
    asked = np.asarray(part.vectors)[held]
    limit, together = tenth(vectors, asked.astype(np.float32))
    graph = index.empty(vectors.shape[1], given.made)
    start = perf_counter()
    graph.add(np.arange(len(vectors)), vectors, threads=given.threads)
    told: dict[str, Any] = {"benchmark": "dense whole", "vectors": len(vectors), "queries": len(asked)}
    told |= {"build_seconds": round(perf_counter() - start, 1), "exact_ms_all_at_once": round(together, 2)}
    tell(f"{told}")
    for looked in given.looked:
        graph.expansion_search = looked
        times, hits = [], 0
        for query, least in zip(asked, limit, strict=True):
            start = thread_time()
            found = graph.search(query, COUNT, threads=1).keys.astype(np.int64)
            times.append((thread_time() - start) * 1e3)
            hits += int((vectors[found].astype(np.float32) @ query.astype(np.float32) > least - ROUNDING).sum())
        told[str(looked)] = {
            "recall_at_10": round(hits / (COUNT * len(asked)), 4),
            "median_ms": round(float(np.median(times)), 4),
            "p99_ms": round(float(np.percentile(times, 99)), 4),
        }
        tell(f"{looked:4} looked at  {told[str(looked)]}")
    print(json.dumps({**told, "python": platform.python_version()}))


if __name__ == "__main__":
    main()
