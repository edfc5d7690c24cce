"""What dense retrieval keeps, costs and gives: python bench/dense.py [PART…] [--tokens N] [--kept answers.json]

build     positions per second, bytes per vector
quality   how well short vectors stand for states: by dimensions, and with each normalisation left out
search    time and recall within groups, exactly and through graphs; how often the paper's way finds too few drafts
drafting  rest against dresd: the same store, the same shape of draft, greedy and sampled texts of the model itself

Each part prints one JSON line. The first three read code (bench/corpus.py), with queries from packages that are not in
the store; drafting reads answers that `bench/drafting.py --answer-only` kept. Times are those of the one thread that
works, so that a busy machine does not spoil them.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

import corpus as code
import slipstream
from slipstream.bench.contestants import Decoding
from slipstream.bench.measure import Item
from slipstream.bench.replay import Recording, Replayed
from slipstream.datastores.dense import index
from slipstream.datastores.dense.build import Settings, embed
from slipstream.datastores.dense.reading import Reader
from slipstream.datastores.dense.search import Found, Vectors, View
from slipstream.datastores.dense.transform import Moments, Transform
from slipstream.datastores.store import Document, Store
from slipstream.target.loading import load_model

PIECE = 512  # tokens of a document: files are cut, so that many of them are seen


def pieces(tokens: np.ndarray, starts: np.ndarray, count: int) -> list[np.ndarray]:
    """So many whole pieces, from as many documents as possible."""
    found: list[np.ndarray] = []
    for d in range(len(starts) - 1):
        if len(found) == count:
            break
        if starts[d + 1] - starts[d] >= PIECE:
            found.append(np.array(tokens[starts[d] : starts[d] + PIECE]))
    return found


class Given:
    """What the parts share, made when it is first asked for."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self._model: Any = None
        self._states: dict[str, tuple[torch.Tensor, np.ndarray]] = {}

    @property
    def model(self) -> Any:
        if self._model is None:
            self._model = load_model(self.options.model, dtype=self.options.dtype, device=self.options.device)[0]
        return self._model

    def stored(self) -> list[np.ndarray]:
        corpus = code.load()
        return pieces(corpus.tokens, corpus.starts, self.options.tokens // PIECE)

    def held(self) -> list[np.ndarray]:
        corpus = code.load()
        return pieces(corpus.held_tokens, corpus.held_starts, self.options.held // PIECE)

    def states(self, which: str) -> tuple[torch.Tensor, np.ndarray]:
        """(n, H) of all positions with four tokens behind them, and those tokens (n, 4)."""
        if which not in self._states:
            texts = self.stored() if which == "stored" else self.held()
            rows = Reader(self.model).rows(texts, PIECE, 0, 8 * PIECE, None).view(len(texts), PIECE - 2, -1)
            after = np.stack([np.lib.stride_tricks.sliding_window_view(t[1:], 4) for t in texts])  # (d, PIECE - 4, 4)
            usable = after.shape[1]
            self._states[which] = rows[:, :usable].flatten(0, 1).half(), after.reshape(-1, 4)
        return self._states[which]

    def store(self) -> Store:
        """One of code, with its vectors."""
        if self.options.store is not None:
            return Store.open(self.options.store)
        folder = self.scratch / "store"
        if not folder.exists():
            with Store.create(folder, self.model.config.get_text_config().vocab_size) as store:
                store.extend((Document(t) for t in self.stored()), bulk=True)
                store.flush()
        return Store.open(folder)


# ---- build


def build(given: Given) -> dict[str, Any]:
    with given.store() as store:
        model = given.model
        start = perf_counter()
        done = embed(store, [lambda: model], Settings(window=PIECE, overlap=0))
        seconds = perf_counter() - start
        size = sum(path.stat().st_size for path in (store.folder / "dense").glob("*.part"))
        graphs = sum(path.stat().st_size for path in (store.folder / "dense").glob("*.graph"))
        return {
            "vectors": done.vectors,
            "positions_per_second": round(done.vectors / seconds),
            "bytes_per_vector": round(size / max(done.vectors, 1), 1),
            "graph_bytes_per_vector": round(graphs / max(done.vectors, 1), 1),
            "explained": round(done.explained, 4),
        }


# ---- quality


def quality(given: Given) -> dict[str, Any]:
    stored, after = given.states("stored")
    held, truth = given.states("held")
    rng = np.random.default_rng(0)
    asked = rng.permutation(len(held))[: given.options.queries]
    own = rng.permutation(len(stored))[: given.options.queries]
    moments = Moments(stored.shape[1])
    moments.add(stored[rng.permutation(len(stored))[: given.options.sample]])
    whole = moments.fit(stored.shape[1])
    nearest = full_neighbours(whole, stored, held[asked])
    told: dict[str, Any] = {"stored": len(stored), "queries": len(asked)}
    variants: list[tuple[str, int, bool, bool]] = [(str(d), d, True, True) for d in (32, 64, 96, 128)]
    variants += [
        ("64 without z-scores", 64, False, True),
        ("64 without unit length", 64, True, False),
        ("64 without either", 64, False, False),
    ]
    for name, dims, standardise, unit in variants:
        transform = moments.fit(dims, standardise)
        reduce = transform if unit else transform.project
        keys = torch.cat([reduce(part).half() for part in stored.split(1 << 16)]).float()
        found = {
            "explained": round(float(transform.explained.sum()), 4),
            "mrr_self": round(mrr(keys, reduce(stored[own]), own), 4),
            "mrr_full": round(mrr(keys, reduce(held[asked]), nearest), 4),
            "agree_at_4": round(agree(keys, reduce(held[asked]), after, truth[asked]), 4),
        }
        told[name] = found
    return told


def blocks(keys: torch.Tensor, queries: torch.Tensor, size: int = 64) -> Any:
    for start in range(0, len(queries), size):
        yield start, queries[start : start + size].float() @ keys.T  # (q, n)


def full_neighbours(whole: Transform, stored: torch.Tensor, queries: torch.Tensor) -> np.ndarray:
    """(q,) the nearest of all by the cosine of z-scores in all dimensions."""
    best = torch.full((len(queries),), -torch.inf)
    which = torch.zeros(len(queries), dtype=torch.long)
    unit = torch.nn.functional.normalize((queries.float() - whole.mean) * whole.scale)
    for start in range(0, len(stored), 1 << 15):
        part = (stored[start : start + (1 << 15)].float() - whole.mean) * whole.scale
        top = (unit @ torch.nn.functional.normalize(part).T).max(1)
        better = top.values > best
        best[better], which[better] = top.values[better], top.indices[better] + start
    return which.numpy()


def mrr(keys: torch.Tensor, queries: torch.Tensor, right: np.ndarray) -> float:
    """Equation 4: one over the rank of the right key. Equals share a rank."""
    total = 0.0
    for start, near in blocks(keys, queries):
        mine = near.gather(1, torch.from_numpy(right[start : start + len(near), None]))
        total += float((1 / (1 + (near > mine + 1e-5).sum(1))).sum())
    return total / len(queries)


def agree(keys: torch.Tensor, queries: torch.Tensor, after: np.ndarray, truth: np.ndarray) -> float:
    """How often the best key, or one of those equally good, was followed by the four tokens that truly follow."""
    hits = 0
    for start, near in blocks(keys, queries):
        best = near >= near.max(1, keepdim=True).values - 1e-5
        for i in range(len(near)):
            rows = np.flatnonzero(best[i].numpy())
            hits += bool((after[rows] == truth[start + i]).all(1).any())
    return hits / len(queries)


# ---- search


def search(given: Given) -> dict[str, Any]:
    with given.store() as store:
        if not (store.folder / "dense" / "transform.vec").exists():
            model = given.model
            embed(store, [lambda: model], Settings(window=PIECE, overlap=0))
        vectors = Vectors(store)
        held, truth = given.states("held")
        asked = np.random.default_rng(1).permutation(len(held))[: given.options.queries]
        queries, roots = vectors.transform(held[asked]).numpy(), truth[asked, 0].tolist()
        return within_groups(vectors.view(), queries, roots, given.options.drafts, given.options.whole)


def within_groups(view: View, queries: np.ndarray, roots: list[int], drafts: int, whole: int) -> dict[str, Any]:
    sizes = np.array([view.size(root) for root in roots])
    told: dict[str, Any] = {
        "vectors": len(view),
        "queries": len(roots),
        "group": {"median": float(np.median(sizes)), "mean": round(float(sizes.mean())), "largest": int(sizes.max())},
        "library": index.installed(),
    }
    exact, told["exact"] = timed(lambda q, r: view.search(q, r, 10, exact=True), queries, roots)
    found, told["graphs"] = timed(lambda q, r: view.search(q, r, 10), queries, roots)
    large = sizes > index.LARGE
    told["large_groups"] = round(float(large.mean()), 4)
    for name, chosen in (("recall_at_10", sizes > 0), ("recall_at_10_large", large)):
        told[name] = round(float(np.mean([recall(exact[i], found[i]) for i in np.flatnonzero(chosen)] or [1])), 4)
    some = range(min(whole, len(roots)))
    every, told["unfiltered"] = timed(
        lambda q, r: view.followed_by(view.search_all(q, drafts), r), queries[list(some)], [roots[i] for i in some]
    )
    told["unfiltered"] |= {
        "too_few_drafts": round(float(np.mean([len(f) < min(drafts, sizes[i]) for i, f in enumerate(every)])), 4),
        "none": round(float(np.mean([len(f) == 0 for i, f in enumerate(every) if sizes[i]])), 4),
        "drafts_found": round(float(np.mean([len(f) for f in every])), 2),
    }
    return told


def timed(
    ask: Callable[[np.ndarray, int], Found], queries: np.ndarray, roots: list[int]
) -> tuple[list[Found], dict[str, float]]:
    """Milliseconds of this thread, once everything was read before."""
    for query, root in zip(queries, roots, strict=True):
        ask(query, root)
    found, times = [], []
    for query, root in zip(queries, roots, strict=True):
        start = thread_time()
        found.append(ask(query, root))
        times.append((thread_time() - start) * 1e3)
    told = {"median_ms": np.median(times), "mean_ms": np.mean(times), "p99_ms": np.percentile(times, 99)}
    return found, {name: round(float(value), 4) for name, value in told.items()}


def recall(exact: Found, found: Found) -> float:
    """Of the ten nearest, or of others as near."""
    if not len(exact):
        return 1.0
    return min(1.0, float((found.similarity >= exact.similarity[-1] - 1e-4).sum()) / len(exact))


# ---- drafting


def drafting(given: Given) -> dict[str, Any]:
    o = given.options
    told = json.loads(o.kept.read_text())
    model, layer = given.model, given.model.config.get_text_config().num_hidden_layers
    folder = given.scratch / "answers"
    with Store.create(folder, told["vocabulary"]) as store:
        for a in told["learned"]:
            store.append(np.array(a["prompt"] + a["answer"]), "answers")
        store.flush()
        embed(store, [lambda: model], Settings())
    texts = {"greedy": [(a["prompt"], a["answer"]) for a in told["asked"][: o.prompts]]}
    if o.nucleus:
        llm = slipstream.LLM(model, None, "none")
        asked = [prompt for prompt, _ in texts["greedy"][: o.nucleus]]
        said = llm.generate(asked, max_new_tokens=o.most, temperature=0.7, top_p=0.95, seed=0)
        texts["nucleus"] = [(p, r.tokens) for p, r in zip(asked, said, strict=True)]
    contestants: dict[str, tuple[str, dict[str, Any]]] = {
        "rest": ("rest", {"matches": o.drafts, "length": o.length}),
        "dresd": ("dresd", {"drafts": o.drafts, "length": o.length}),
        "dresd, the paper's way": ("dresd", {"drafts": o.drafts, "length": o.length, "unfiltered": True}),
        "rest, 40 matches": ("rest", {"length": o.length}),
        "dresd, 40 drafts": ("dresd", {"drafts": 40, "length": o.length}),
        "suffix": ("suffix", {"length": o.length}),
        "suffix without the store": ("suffix", {"length": o.length, "store": ""}),
        "dresd, 40 drafts, live": ("dresd", {"drafts": 40, "length": o.length, "live": True}),
    }
    result: dict[str, Any] = {
        "stored_tokens": sum(len(a["prompt"]) + len(a["answer"]) for a in told["learned"]),
        "drafts": o.drafts,
        "length": o.length,
    }
    for kind, pairs in texts.items():
        items = [Item(str(i), kind, p, a) for i, (p, a) in enumerate(pairs) if len(a) > 1]
        hidden = {}
        for number, item in enumerate(items):
            text = np.array(item.tokens + item.plain + [0])  # the last token of a text is never read
            hidden[f"{number}.{layer}"] = Reader(model).rows([text], len(text), 0, len(text), None)
        decoding = Decoding(max_new_tokens=o.most)
        recording = Recording(items, {1: 1.0, 64: 1.0}, decoding, told["vocabulary"], told["context"], "", hidden)
        result[kind] = {"prompts": len(items)}
        for name, (drafter, options) in contestants.items():
            result[kind][name] = replayed(Replayed(drafter, recording, **{"store": folder, **options}), recording)
    return result


def replayed(contestant: Replayed, recording: Recording) -> dict[str, float]:
    done = [contestant.answers([item.tokens], recording.decoding)[0].stats for item in recording.items]
    steps = sum(s.steps - 1 for s in done)
    return {
        "tokens_per_step": round(sum(s.new_tokens - 1 for s in done) / steps, 3),
        "acceptance_rate": round(float(np.mean([s.acceptance_rate for s in done])), 4),
        "accepted_per_step": round(sum(s.accepted for s in done) / steps, 3),
        "draft_ms": round(1e3 * sum(s.draft_seconds for s in done) / steps, 3),
    }


# ---- running them

PARTS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "build": build,
    "quality": quality,
    "search": search,
    "drafting": drafting,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tokens", type=int, default=200_000, help="of code to store")
    parser.add_argument("--held", type=int, default=64_000, help="tokens of other code to take queries from")
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=1_000_000, help="positions to fit on")
    parser.add_argument("--whole", type=int, default=300, help="queries that search all vectors")
    parser.add_argument("--store", type=Path, help="a store of code that has vectors already")
    parser.add_argument("--kept", type=Path, default=Path("answers.json"), help="for drafting")
    parser.add_argument("--prompts", type=int, default=164, help="for drafting")
    parser.add_argument("--nucleus", type=int, default=0, help="prompts to answer anew, sampled, for drafting")
    parser.add_argument("--most", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, default=10)
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    where = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as scratch:
        given = Given(options, Path(scratch))
        for name in options.parts or PARTS:
            told = PARTS[name](given)
            about = {"dtype": options.dtype, "model": options.model or "embedded", **where}
            print(json.dumps({"part": name, **told, **about}), flush=True)


if __name__ == "__main__":
    main()
