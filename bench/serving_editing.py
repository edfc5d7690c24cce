"""The part `editing` of bench/serving.py: edit a file through the API, with and without a prediction."""

from __future__ import annotations

import argparse
import difflib
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import slipstream
from auto import interval
from callers import Callers
from gpu import settled
from serving_lab import load_model, provenance, served, tell

FILE = Path(slipstream.__file__).with_name("tree.py")
OLD, NEW = "TokenTree", "DraftTree"
ASKED = "Rename the class {old} to {new} in this file. Send back the whole file, and nothing else.\n\n{code}"
PLAIN = "plain"  # what the others are compared with


def first_lines(text: str, tokenizer: Any, tokens: int) -> str:
    """As many whole lines as have so many tokens, as often as that takes."""
    lines: list[str] = []
    count = 0
    while count < tokens:
        for line in text.splitlines(keepends=True):
            if count < tokens:
                lines.append(line)
                count += len(tokenizer(line, add_special_tokens=False)["input_ids"])
    return "".join(lines)


def with_edits(text: str, edits: int, seed: int) -> str:
    """Some of its words are others, one in each of as many equal parts."""
    words, rng = re.split(r"(\W+)", text), random.Random(seed)
    for i in range(edits):
        part = [at for at in range(len(words) * i // edits, len(words) * (i + 1) // edits) if words[at].isidentifier()]
        if part:
            words[rng.choice(part)] = f"edited{i}"
    return "".join(words)


def ask(asking: Callers, body: dict[str, Any], numbers: Any) -> dict[str, Any]:
    """In a collection of its own: nobody drafts from what was said before."""
    (answer,) = asking.ask([{**body, "collection": f"editing {next(numbers)}"}])["answers"]
    return answer


def editing(given: argparse.Namespace) -> dict[str, Any]:
    llm = load_model(given)
    llm.engine.max_batch = 1
    code = first_lines(FILE.read_text("utf-8"), llm.tokenizer, given.document)
    prompt = ASKED.format(old=OLD, new=NEW, code=code)
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": given.tokens}
    plain = {**body, "max_draft": 0}
    numbers = iter(range(1 << 30))
    with served(llm) as asking:
        example = settled(partial(ask, asking, plain, numbers))[0]  # whatever is done once, and what the answer is
        said = example["text"]
        ways = {
            PLAIN: plain,
            "without prediction": body,
            "original predicted": body | predicted(code),
            f"answer with {given.edits} edits predicted": body | predicted(with_edits(said, given.edits, given.seed)),
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for name in ways:
            settled(partial(ask, asking, ways[name], numbers))
        for repeat in range(given.repeats):
            order = list(ways)[repeat % len(ways) :] + list(ways)[: repeat % len(ways)]
            for name in order:
                runs[name].append(settled(partial(ask, asking, ways[name], numbers))[0])
    return {
        "ways": {name: summary(name, found, runs[PLAIN], said) for name, found in runs.items()},
        "document_tokens": len(llm.tokenizer(code)["input_ids"]),
        "answer_tokens": example["tokens"],
        # Whether the model did what it was asked for.
        "answer_like_the_right_one": round(likeness(said, code.replace(OLD, NEW)), 3),
        "answer_like_the_original": round(likeness(said, code), 3),
        **provenance(llm),
    }


def predicted(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def likeness(one: str, other: str) -> float:
    """The share of lines that both have, in the same order."""
    return difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), autojunk=False).ratio()


def summary(name: str, found: list[dict[str, Any]], plain: list[dict[str, Any]], said: str) -> dict[str, Any]:
    told = {
        "tokens_per_second": [round(1 / per_token(run), 1) for run in found],
        # While it is written, and with the reading of the prompt.
        "times_plain": interval(*(np.array([[per_token(run) for run in runs]]) for runs in (plain, found))),
        "whole_times_plain": interval(*(np.array([[run["seconds"] for run in runs]]) for runs in (plain, found))),
        "same_texts": [sum(run["text"] == said for run in found), len(found)],
        **found[-1]["predicted"],
    }
    tell(f"{name:32} " + "  ".join(f"{key} {value}" for key, value in told.items()))
    return told


def per_token(run: dict[str, Any]) -> float:
    """Seconds, behind the first."""
    return (run["seconds"] - run["first"]) / max(1, run["tokens"] - 1)
