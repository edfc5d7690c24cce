"""Quality, cost and speed of dense retrieval: python bench/dense.py [PART…] --answers … --ood … --prompts … --work …

stores    three stores, built and read by the model: its own answers, other models' answers to the same prompts, and its
          own answers to code prompts only
quality   how well short vectors represent states: by dimensions, and without each normalisation
search    time within groups on the device, and over all vectors; how often the paper's method finds too few drafts
shapes    the same times for other divisions of the work, on a GPU
drafting  rest against dresd: stores, shapes of draft, greedy and sampled texts
speed     tokens per second without and with drafts
host      one CPU thread: time and recall within groups, exactly and through graphs; building those

--answers is a file of `slipstream collect`; one in --hold of its conversations is held out of the stores for queries.
--ood has lines of id, kind (code or chat), prompt and answer, with the ids of the same prompts there; or it is a .json
file of code tasks in Alpaca's layout, from which those answers were collected. Files that parts share are in --work and
made once. Each part prints a table to stderr and one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
import transformers

from dense_drafting import drafting
from dense_quality import SAME, quality, sample
from gpu import summary, tell
from slipstream import LLM
from slipstream.datastores.dense import index
from slipstream.datastores.dense.build import Embedded, EmbedSettings, embed
from slipstream.datastores.dense.device import Loaded, nearest, nearest_plainly, unpacked
from slipstream.datastores.dense.nearest import Nearest, Vectors, View
from slipstream.datastores.dense.reading import Reader
from slipstream.datastores.durable.store import Document, Store
from slipstream.evaluate.workloads import read, select
from slipstream.loading.models import load_model
from slipstream.targets.captured.function import Captured
from slipstream.text import encode
from slipstream.training.prompts import Question

LONGEST = 1024  # tokens of a stored document
MOST = 40  # drafts that are found on the device at most
ROUNDING = 1e-5  # of a similarity, added up in another order
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "seed": 1}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


@dataclass(frozen=True)
class Talk:
    """A prompt and what the model answered."""

    id: str
    tokens: list[int]
    begin: int  # of the answer


@dataclass(frozen=True)
class EarlierAnswers:
    """What the model says to a prompt that is in no store."""

    of: str  # which prompts
    way: str  # greedy or nucleus
    prompt: list[int]
    answer: list[int]


class Given:
    """What the parts share, made when it is first asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        options.work.mkdir(parents=True, exist_ok=True)
        self._opened: dict[str, Vectors] = {}
        self._loaded: dict[str, Loaded] = {}

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return load_model(self.options.model, dtype=self.options.dtype, device=self.options.device)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.pair[0])

    def use_libraries(self) -> None:
        """From here on. Stores are made before, without graphs, since those take longer than all the rest."""
        if self.options.libraries is not None and str(self.options.libraries) not in sys.path:
            sys.path.insert(0, str(self.options.libraries))

    # ---- texts

    @cached_property
    def talks(self) -> list[Talk]:
        found = (Talk(r["id"], r["tokens"], r["answers"][0][0]) for r in lines(self.options.answers) if r["answers"])
        return [talk for talk in found if min(len(talk.tokens), LONGEST) > talk.begin + 4]

    @cached_property
    def held(self) -> list[Talk]:
        return [talk for talk in self.talks if self.is_held(talk.id)]

    def is_held(self, name: str) -> bool:
        """Whether a conversation is in no store."""
        return int(name, 16) % self.options.hold == 0

    @cached_property
    def others(self) -> list[dict[str, Any]]:
        if self.options.ood.suffix != ".json":
            return list(lines(self.options.ood))
        records = json.loads(self.options.ood.read_text("utf-8"))
        asked = [Question(prompt.turns) for prompt in read(self.options.ood)]
        return [
            {"id": q.id, "kind": "code", "prompt": q.turns[0], "answer": r.get("output") or r["response"]}
            for q, r in zip(asked, records, strict=True)
        ]

    @cached_property
    def code(self) -> set[str]:
        """The ids of prompts that ask for code."""
        return {line["id"] for line in self.others if line["kind"] == "code"}

    def documents(self, name: str) -> list[list[int]]:
        """What a store holds."""
        if name != "theirs":
            kept = [t for t in self.talks if not self.is_held(t.id) and (name == "own" or t.id in self.code)]
            if not kept:
                o = self.options
                raise SystemExit(f"{o.answers} has no answers to {name} prompts of {o.ood}: collect with --rounds 1")
            return [t.tokens[:LONGEST] for t in kept]
        tokenizer = self.pair[1]
        talks = [
            [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]}]
            for r in self.others[: self.options.limit]
            if not self.is_held(r["id"])
        ]
        texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
        return [ids[:LONGEST] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    @cached_property
    def said(self) -> list[EarlierAnswers]:
        kept = self.options.work / "said.json"
        if not kept.exists():
            asked, found = self._asked(), []
            llm = LLM(*self.pair, "none", max_batch=64)
            for way, options in (("greedy", {}), ("nucleus", SAMPLED)):
                results = llm.generate([p for _, p in asked], max_new_tokens=self.options.most, **options)
                found += [EarlierAnswers(of, way, p, r.tokens) for (of, p), r in zip(asked, results, strict=True)]
            kept.write_text(json.dumps([asdict(one) for one in found if len(one.answer) > 2]))
        return [EarlierAnswers(**one) for one in json.loads(kept.read_text())]

    def _asked(self) -> list[tuple[str, list[int]]]:
        each = self.options.each
        kinds = {
            "code": [talk.tokens[: talk.begin] for talk in self.held if talk.id in self.code],
            "chat": [talk.tokens[: talk.begin] for talk in self.held if talk.id not in self.code],
        }
        for name, path in (word.split("=", 1) for word in self.options.prompts):
            kinds[name] = [encode(p.turns[0], self.pair[1]) for p in select(read(path), None, each)]
        return [(of, prompt) for of, prompts in kinds.items() for prompt in prompts[:each] if len(prompt) <= LONGEST]

    # ---- stores

    def vectors(self, name: str) -> Vectors:
        if name not in self._opened:
            self.build(name)
            self._opened[name] = Vectors(Store.open(self.options.work / name))
        return self._opened[name]

    def held_by(self, name: str) -> Loaded:
        """A store's vectors on the device."""
        if name not in self._loaded:
            vectors = self.vectors(name)
            self._loaded[name] = Loaded(vectors.view(), vectors.transform.to(self.device), MOST, self.device)
        return self._loaded[name]

    def build(self, name: str) -> dict[str, Any]:
        """What came of it; the work is done once."""
        folder, kept = self.options.work / name, self.options.work / f"{name}.json"
        if kept.exists():
            return dict(json.loads(kept.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
        documents = self.documents(name)
        with tempfile.TemporaryDirectory() as scratch:
            self._make(Path(scratch) / name, documents[:20])  # so that nothing is compiled on the clock
        built, seconds, done = self._make(folder, documents)
        told = {
            "documents": len(documents),
            "tokens": sum(map(len, documents)),
            "build_seconds": round(built, 2),
            "vectors": done.vectors,
            "embed_seconds": round(seconds, 2),
            "positions_per_second": round(done.vectors / seconds),
            "bytes": sum(path.stat().st_size for path in (folder / "dense").glob("*.part")),
            "explained": round(done.explained, 4),
        }
        kept.write_text(json.dumps(told))
        return told

    def _make(self, folder: Path, documents: Sequence[Sequence[int]]) -> tuple[float, float, Embedded]:
        """The seconds of building and of reading, and what came of it."""
        model = self.pair[0]
        start = perf_counter()
        with Store.create(folder, model.config.get_text_config().vocab_size) as store:
            store.extend((Document(np.array(tokens)) for tokens in documents), bulk=True)
            store.flush()
            built = perf_counter()
            sizes = {"batch_tokens": self.batch, "chunk_tokens": 8 * self.batch}
            done = embed(store, [lambda: model], EmbedSettings(sample=self.options.sample, **sizes))
            return built - start, perf_counter() - built, done

    # ---- states

    @property
    def batch(self) -> int:
        """Tokens that are read together."""
        return 1 << 15 if self.device.type == "cuda" else 1 << 12

    def rows(self, texts: Sequence[np.ndarray], window: int) -> torch.Tensor:
        return self.reader.rows(texts, window, 0, self.batch, None)

    def states(self, documents: Sequence[Sequence[int]], begins: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, H) the states of the positions from `begins` on that have four tokens behind them, and those (n, 4)."""
        texts = [np.array(tokens) for tokens in documents]
        rows, end, kept, after = self.rows(texts, LONGEST), 0, [], []
        for text, begin in zip(texts, begins, strict=True):
            end += len(text) - 2
            kept.append(rows[end - len(text) + 2 + begin : end - 2])
            after.append(np.lib.stride_tricks.sliding_window_view(text[1 + begin :], 4))
        return torch.cat(kept).to(self.device), torch.from_numpy(np.concatenate(after)).to(self.device)

    @cached_property
    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """States that chose tokens of answers which are in no store (q, H), and the four tokens that followed."""
        begins = [talk.begin - 1 for talk in self.held]
        states, after = self.states([talk.tokens[:LONGEST] for talk in self.held], begins)
        some = sample(len(states), self.options.queries, 0).to(self.device)
        return states[some], after[some]


# ---- stores


def stores(given: Given) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in ("own", "theirs", "code"):
        told[name] = given.build(name)
        tell(f"{name:8}" + "  ".join(f"{k} {v:,}" for k, v in told[name].items()))
    return told


# ---- search


def search(given: Given) -> dict[str, Any]:
    held, (states, after) = given.held_by("own"), given.queries
    find = finder(given, held.vectors)
    groups = [held.group(root) for root in after[:, 0].tolist()]
    told: dict[str, Any] = {
        "vectors": len(held),
        "queries": len(groups),
        "group": spread([last - first for first, last in groups]),
        "in_group": percentiles(device_times(find, states, groups)),
        "in_group_to_host": percentiles(wall_times(find, states, groups)),
        "differ_from_plain": differing(given, find, states[:100], groups[:100]),
    }
    some = states[: given.options.whole]
    told["paper's way"] = papers_way(held, find, some, groups, given.options.drafts)
    for size in given.options.sizes:
        vectors = held.vectors.repeat(-(-size // len(held.vectors)), 1)[:size]
        told[f"all of {size:,}"] = percentiles(device_times(finder(given, vectors), some, [(0, size)] * len(some)))
        del vectors
    for name, value in told.items():
        tell(f"{name:20}{value}")
    return told


def finder(given: Given, vectors: torch.Tensor) -> Captured:
    """What the drafter calls."""
    transform = given.vectors("own").transform.to(given.device)
    return Captured(partial(nearest, transform, vectors, given.options.drafts), given.device)


def device_times(find: Captured, states: torch.Tensor, groups: Sequence[tuple[int, int]]) -> list[float]:
    """Microseconds of each search on the device. A GPU is kept busy before each, so that it never waits for us."""
    bounds = torch.tensor(groups, device=states.device)
    asked = [(states[i : i + 1], bounds[i : i + 1]) for i in range(len(states))]
    find(*asked[0])
    if states.device.type != "cuda":
        return [timed(partial(find, *one)) for one in asked]
    clocks = []
    for one in asked:
        torch.cuda._sleep(400_000)  # cycles: 0.2 ms
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        find(*one)
        end.record()
        clocks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in clocks]


def wall_times(find: Captured, states: torch.Tensor, groups: Sequence[tuple[int, int]]) -> list[float]:
    """Microseconds from a state on the device to rows on the host."""
    asked = [(states[i : i + 1], torch.tensor(groups[i : i + 1])) for i in range(len(states))]
    return [timed(partial(to_host, find, *one)) for one in asked]


def to_host(find: Captured, *asked: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = find(*asked)
    return found.cpu()


def timed(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1e6


def percentiles(times: Sequence[float]) -> dict[str, float]:
    return {f"p{p}_us": round(float(np.percentile(times, p)), 1) for p in (50, 90, 99)}


def spread(sizes: Sequence[int]) -> dict[str, int]:
    return {"median": int(np.median(sizes)), "mean": int(np.mean(sizes)), "largest": max(sizes)}


def differing(given: Given, find: Captured, states: torch.Tensor, groups: Sequence[tuple[int, int]]) -> int:
    """How many searches find other similarities than plain torch does."""
    vectors, transform = given.held_by("own").vectors, given.vectors("own").transform.to(given.device)
    different = 0
    for i, group in enumerate(groups):
        asked = states[i : i + 1], torch.tensor([group], device=given.device)
        expected, _ = nearest_plainly(transform, vectors, given.options.drafts, *asked)
        (near, _), (right, _) = (unpacked(keys[0].cpu().numpy()) for keys in (find(*asked), expected))
        different += len(near) != len(right) or float(abs(near - right).max(initial=0)) > ROUNDING
    return different


def papers_way(
    held: Loaded, find: Captured, states: torch.Tensor, groups: Sequence[tuple[int, int]], drafts: int
) -> dict[str, float]:
    """Of the nearest of all, those that the root followed: how many are there?"""
    found, wanted = [], []
    everything = torch.tensor([(0, len(held))])
    for i, (first, last) in enumerate(groups[: len(states)]):
        _, rows = unpacked(find(states[i : i + 1], everything)[0].cpu().numpy())
        found.append(int(((first <= rows) & (rows < last)).sum()))
        wanted.append(min(drafts, last - first))
    counts, most = np.array(found), np.array(wanted)
    return {
        "too_few_drafts": round(float((counts < most).mean()), 4),
        "none": round(float((counts < np.minimum(most, 1)).mean()), 4),
        "drafts_found": round(float(counts.mean()), 2),
    }


def shapes(given: Given) -> dict[str, Any]:
    """Of the search kernel: rows that a program looks at together, its warps, programs per processor."""
    if given.device.type != "cuda":
        return {}
    from slipstream.datastores.dense import scan

    held, (states, after) = given.held_by("own"), given.queries
    groups = [held.group(root) for root in after[:1000, 0].tolist()]
    kept = scan.BLOCK, scan.WARPS, scan.EACH
    told: dict[str, Any] = {}
    for shape in (kept, (256, 4, 2), (128, 4, 3), (128, 4, 6), (64, 2, 6), (512, 8, 1), (512, 8, 2)):
        scan.BLOCK, scan.WARPS, scan.EACH = shape
        find, name = finder(given, held.vectors), "{} rows, {} warps, {} programs".format(*shape)
        told[name] = percentiles(device_times(find, states[:1000], groups))
        told[name]["all_us"] = percentiles(device_times(find, states[:50], [(0, len(held))] * 50))["p50_us"]
        tell(f"{name:36}{told[name]}")
    scan.BLOCK, scan.WARPS, scan.EACH = kept
    return told


# ---- host


def host(given: Given) -> dict[str, Any]:
    given.vectors("own")
    given.use_libraries()
    vectors = Vectors(given.vectors("own").store)  # opened again, to see graphs
    told: dict[str, Any] = {"library": index.installed()}
    if index.installed():
        start = perf_counter()
        for part in vectors.view().parts:
            index.write_graphs(part)
        told["graph_seconds"] = round(perf_counter() - start, 1)
        told["graph_bytes"] = sum(path.stat().st_size for path in vectors.folder.glob("*.graph"))
        vectors = Vectors(vectors.store)
    view, (states, after) = vectors.view(), given.queries
    queries, roots = vectors.transform(states.cpu()).numpy(), after[:, 0].tolist()
    sizes = np.array([view.size(root) for root in roots])
    told |= {"vectors": len(view), "queries": len(roots), "group": spread(sizes.tolist())}
    exact, told["exact"] = on_this_thread(partial(view.search, exact=True), queries, roots)
    found, told["graphs"] = on_this_thread(view.search, queries, roots)
    told["large_groups"] = round(float((sizes > index.LARGE).mean()), 4)
    for name, which in (("recall_at_10", sizes > 0), ("recall_at_10_large", sizes > index.LARGE)):
        recalls = [recall(exact[i], found[i]) for i in np.flatnonzero(which)]
        told[name] = round(float(np.mean(recalls)), 4) if recalls else None
    told["mrr_self"] = mrr_self(view, sample(len(view), len(roots), 1).tolist())
    for name, value in told.items():
        tell(f"{name:20}{value}")
    return told


def on_this_thread(
    ask: Callable[..., Nearest], queries: np.ndarray, roots: Sequence[int]
) -> tuple[list[Nearest], dict[str, float]]:
    """Milliseconds of this thread, which a busy machine does not spoil, once everything was read before."""
    for query, root in zip(queries, roots, strict=True):
        ask(query, root, 10)
    found, times = [], []
    for query, root in zip(queries, roots, strict=True):
        start = thread_time()
        found.append(ask(query, root, 10))
        times.append((thread_time() - start) * 1e3)
    told = {"median_ms": np.median(times), "mean_ms": np.mean(times), "p99_ms": np.percentile(times, 99)}
    return found, {name: round(float(value), 4) for name, value in told.items()}


def recall(exact: Nearest, found: Nearest) -> float:
    """Of the ten nearest, or of others as near."""
    return min(1.0, float((found.similarity >= exact.similarity[-1] - ROUNDING).sum()) / len(exact))


def mrr_self(view: View, rows: Sequence[int]) -> float:
    """Equation 4 for stored vectors, each searched for among those of its group. Equals share a rank."""
    total, part = 0.0, view.parts[0]
    for row in (row for row in rows if row < len(part)):
        root = int(np.searchsorted(part.starts, row, side="right")) - 1
        vector = part.vectors[row].astype(np.float32)
        query = vector / np.linalg.norm(vector)
        near, mine = view.search(query, root, 10).similarity, float(query @ vector)
        if (near >= mine - SAME).any():
            total += 1 / (1 + int((near > mine + SAME).sum()))
    return round(total / len(rows), 4)


# ---- speed


def speed(given: Given) -> dict[str, Any]:
    model, tokenizer = given.pair
    greedy = [one for one in given.said if one.way == "greedy"]
    asked = greedy[:: max(1, len(greedy) // given.options.answered)][: given.options.answered]
    store = given.options.work / "own"
    contestants: dict[str, tuple[str, dict[str, Any]]] = {
        "none": ("none", {}),
        "pld": ("pld", {}),
        "rest 10×6": ("rest", {"store": store, "matches": 10, "length": 6}),
        "dresd 10×6": ("dresd", {"store": store, "drafts": 10, "length": 6}),
        "dresd 3×20": ("dresd", {"store": store, "drafts": 3, "length": 20}),
        "dresd 10×6, live": ("dresd", {"store": store, "drafts": 10, "length": 6, "live": True}),
    }
    given.vectors("own")
    told: dict[str, Any] = {"prompts": len(asked)}
    for name, (drafter, own) in contestants.items():
        llm = LLM(model, tokenizer, drafter, compile=given.options.compile, **own)
        options = {"max_draft": given.options.max_draft, "max_new_tokens": given.options.most}
        for one in asked[:2]:
            llm.generate(one.prompt, **options)
        results = [llm.generate(one.prompt, **options) for one in asked]
        different = sum(r.tokens != one.answer for r, one in zip(results, asked, strict=True))
        told[name] = summary(results) | {"differ": different}
        tell(f"{name:20}" + "  ".join(f"{k} {v}" for k, v in told[name].items()))
        del llm
    return told


# ---- running them

PARTS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "stores": stores,
    "quality": quality,
    "search": search,
    "shapes": shapes,
    "drafting": drafting,
    "speed": speed,
    "host": host,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--answers", type=Path, required=True, help="what `slipstream collect` wrote")
    parser.add_argument("--ood", type=Path, required=True, help="what others answered, .jsonl or .jsonl.gz")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE", help="prompts that are in neither")
    parser.add_argument("--work", type=Path, required=True, help="a folder to keep stores and answers in")
    parser.add_argument("--hold", type=int, default=50, help="one in so many conversations is in no store")
    parser.add_argument("--limit", type=int, help="lines of --ood to store at most")
    parser.add_argument("--sample", type=int, default=1_000_000, help="positions to fit on")
    parser.add_argument("--positions", type=int, default=6_000_000, help="quality: stored states at most")
    parser.add_argument("--queries", type=int, default=5000)
    parser.add_argument("--whole", type=int, default=1000, help="search: queries that search all vectors")
    parser.add_argument("--sizes", type=int, nargs="*", default=[5_000_000, 30_000_000], help="of all vectors")
    parser.add_argument("--drafts", type=int, default=10)
    parser.add_argument("--each", type=int, default=40, help="drafting: prompts of each kind")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="drafting: that replay")
    parser.add_argument("--most", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--answered", type=int, default=40, help="speed: prompts")
    parser.add_argument("--max-draft", type=int, default=60, help="speed: nodes of a tree at most")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--libraries", type=Path, help="a folder that has usearch, if it is not installed")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    given = Given(options)
    where = {
        "model": options.model or "embedded",
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if given.device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for name in options.parts or PARTS:
        start = perf_counter()
        told = PARTS[name](given)
        tell(f"{name}: {perf_counter() - start:.1f} s")
        print(json.dumps({"part": name, **told, "seconds": round(perf_counter() - start, 1), **where}), flush=True)


if __name__ == "__main__":
    main()
