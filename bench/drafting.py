"""Tokens per step of the retrieving drafters: python bench/drafting.py HumanEval.jsonl --alpaca new_codealpaca.json

pld, suffix, rest with a store of other people's code, rest with a store of the model's own answers to similar prompts,
and suffix with both stores. The model answers each prompt once; drafters are then replayed against the recorded text,
which gives exactly the tokens per step of decoding. Prints one JSON line.

--sampled compares instead, for `rest` with a store of the model's own answers, stores of one greedy answer to each
prompt, of one sampled answer, and of three, each with texts that are greedy and texts that are sampled (temperature
0.7, top-p 0.95).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import corpus as code
import slipstream
from retrieval import documents, make_store
from slipstream.datastores.durable.store import Document, Store
from slipstream.evaluate.contestants import Decoding
from slipstream.evaluate.measure import Item
from slipstream.evaluate.replay import Recording, Replayed
from slipstream.evaluate.workloads import read, select

NUCLEUS = {"temperature": 0.7, "top_p": 0.95, "seed": 0}
SAMPLES = 3  # answers to a prompt


def answers(llm: Any, path: Path, limit: int | None, most: int, **sampling: Any) -> list[dict[str, list[int]]]:
    """What the model says to each prompt's first turn, greedily unless sampling says otherwise."""
    prompts = [[{"role": "user", "content": p.turns[0]}] for p in select(read(path), None, limit)]
    results = llm.generate(prompts, max_new_tokens=most, **sampling)
    asked = [llm.request(p).tokens for p in prompts]
    return [
        {"prompt": p, "answer": r.tokens}
        for p, said in zip(asked, results, strict=True)
        for r in (said if isinstance(said, list) else [said])
    ]


def keep(given: argparse.Namespace) -> dict[str, Any]:
    """All answers that are needed: made, or read."""
    options = ("prompts", "alpaca", "count", "limit", "most", "model", "dtype", "sampled")
    made = {name: str(getattr(given, name)) for name in options}
    if not given.kept.exists():
        llm = slipstream.load(given.model, drafter="none", dtype=given.dtype, max_batch=given.batch)
        asked, learned = (given.prompts, given.limit), (given.alpaca, given.count)
        told = {
            "asked": answers(llm, *asked, given.most),
            "learned": answers(llm, *learned, given.most),
            "vocabulary": llm.target.vocabulary,
            "context": llm.target.context,
            "made": made,
        }
        if given.sampled:
            told["asked, sampled"] = answers(llm, *asked, given.most, **NUCLEUS)
            told["learned, sampled"] = answers(llm, *learned, given.most, n=SAMPLES, **NUCLEUS)
        given.kept.write_text(json.dumps(told))
    found: dict[str, Any] = json.loads(given.kept.read_text())
    if found.get("made") != made:
        raise SystemExit(
            f"{given.kept} holds answers that were made with other options, {found.get('made')}: "
            "give --kept another file"
        )
    return found


def recorded(told: dict[str, Any], which: str, most: int) -> Recording:
    items = [Item(str(i), "humaneval", a["prompt"], a["answer"]) for i, a in enumerate(told[which])]
    decoding = Decoding(max_new_tokens=most)
    return Recording(items, {1: 1.0, 64: 1.0}, decoding, told["vocabulary"], told["context"], "", {})


def sampled(told: dict[str, Any], most: int) -> dict[str, Any]:
    """Tokens per step of `rest`, by what its store holds and by the texts."""
    learned = told["learned, sampled"]
    stores = {"greedy": told["learned"], "sampled": learned[::SAMPLES], f"{SAMPLES} sampled": learned}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, said in stores.items():
            place = Path(scratch) / name
            with Store.create(place, told["vocabulary"]) as store:
                store.extend(Document(np.array(a["answer"])) for a in said)
                store.flush()
            found[name] = {
                "tokens": sum(len(a["answer"]) for a in said),
                "greedy texts": tokens_per_step(recorded(told, "asked", most), "rest", store=place),
                "sampled texts": tokens_per_step(recorded(told, "asked, sampled", most), "rest", store=place),
            }
    return found


def tokens_per_step(recording: Recording, name: str, **options: Any) -> float:
    contestant = Replayed(name, recording, **options)
    done = [contestant.answers([item.tokens], recording.decoding)[0] for item in recording.items]
    return round(sum(a.stats.new_tokens - 1 for a in done) / sum(a.stats.steps - 1 for a in done), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--alpaca", type=Path, required=True, help="prompts whose answers become a store")
    parser.add_argument("--count", type=int, default=800, help="of those")
    parser.add_argument("--limit", type=int, help="prompts at most")
    parser.add_argument("--most", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kept", type=Path, default=Path("answers.json"), help="answers, made once")
    parser.add_argument("--answer-only", action="store_true")
    parser.add_argument("--sampled", action="store_true", help="compare stores of sampled and of greedy answers")
    given = parser.parse_args()
    told = keep(given)
    if given.answer_only:
        return
    if given.sampled:
        counted = {"prompts": len(told["asked"]), "learned_prompts": len(told["learned"])}
        print(json.dumps({"part": "sampled", **counted, "tokens_per_step": sampled(told, given.most)}))
        return
    recording = recorded(told, "asked", given.most)
    with tempfile.TemporaryDirectory() as scratch:
        theirs, less, own, both = (Path(scratch) / name for name in ("theirs", "less", "own", "both"))
        corpus = code.load()
        make_store(theirs, documents(corpus, 100_000_000))
        make_store(less, documents(corpus, sum(len(a["answer"]) for a in told["learned"])))
        with Store.create(own, told["vocabulary"]) as store:
            store.extend(Document(np.array(a["answer"])) for a in told["learned"])
            store.flush()
        make_store(both, documents(corpus, 100_000_000))
        with Store.open(both, write=True) as store:
            store.extend(Document(np.array(a["answer"])) for a in told["learned"])
        print(
            json.dumps(
                {
                    "part": "drafting",
                    "prompts": len(told["asked"]),
                    "learned_answers": len(told["learned"]),
                    "learned_tokens": sum(len(a["answer"]) for a in told["learned"]),
                    "tokens_per_step": {
                        "pld": tokens_per_step(recording, "pld"),
                        "suffix": tokens_per_step(recording, "suffix"),
                        "rest, code": tokens_per_step(recording, "rest", store=theirs),
                        "rest, as much code as own answers": tokens_per_step(recording, "rest", store=less),
                        "rest, own answers": tokens_per_step(recording, "rest", store=own),
                        "suffix with code": tokens_per_step(recording, "suffix", store=theirs),
                        "suffix with own answers": tokens_per_step(recording, "suffix", store=own),
                        "suffix with both": tokens_per_step(recording, "suffix", store=both),
                    },
                }
            )
        )


if __name__ == "__main__":
    main()
