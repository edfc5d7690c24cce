"""Prompts that a model writes itself, and the file of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from slipstream.llm import LLM
from slipstream.training.collect import has_template
from slipstream.training.prompts import Question

DRAWN = 128  # prompts that the model writes at a time
HELD_OUT = 10  # every tenth prompt is for the trial
WORDS = 4  # length of the n-grams by which near-duplicates are found
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


def write_prompts(llm: LLM, known: Sequence[Question], seed: int) -> Iterator[Question]:
    """Prompts that the model writes: it continues its template at the user's turn or, without a template, its first
    token. Near-duplicates are left out; it ends when nearly all are duplicates."""
    opening, seen, barren = user_opening(llm), set[str](), 0
    for question in known:
        is_new(question.turns[0], seen)
    draw = len(known)
    at_once = min(DRAWN, 2 * llm.engine.max_batch)  # few if batches are small, since the clock is checked in between
    while barren < 4:
        results = llm.generate(opening, n=at_once, seed=seed + draw, temperature=1.0, top_p=0.95, max_new_tokens=96)
        draw += 1 + at_once
        ended = [r.text.strip() for r in results if r.finish_reason == "stop" or not has_template(llm)]
        new = [text for text in ended if len(text.split()) >= 3 and is_new(text, seen)]
        barren = 0 if len(new) > at_once // 16 else barren + 1
        yield from (Question((text,)) for text in new)


def user_opening(llm: LLM) -> list[int]:
    """The tokens of a prompt up to the place where the user's text begins."""
    if has_template(llm):
        text = llm.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        return list(llm.tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"])
    first = llm.tokenizer.bos_token_id
    return [llm.tokenizer.eos_token_id if first is None else first]


def is_new(text: str, seen: set[str]) -> bool:
    """Whether at least half of a text's n-grams are new. Adds them to `seen`."""
    words = text.lower().split()
    runs = {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}
    fresh = 2 * len(runs - seen) >= len(runs) and bool(runs - seen)
    seen |= runs
    return fresh


def split(asked: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """The questions to train on, and those for the trial."""
    learnt = [q for i, q in enumerate(asked) if (i + 1) % HELD_OUT]
    return learnt, [q for i, q in enumerate(asked) if not (i + 1) % HELD_OUT]


def read_prompts(file: Path) -> list[Question]:
    """An incomplete last line, from a killed run, is left out."""
    lines = whole_lines(file).decode().split("\n")[:-1]
    return [Question(tuple(json.loads(line)["turns"]), json.loads(line)["system"]) for line in lines]


def append(file: Path, questions: Iterable[Question]) -> None:
    """Behind the last complete line."""
    with file.open("ab") as out:
        out.truncate(len(whole_lines(file)))
        for question in questions:
            out.write((json.dumps(asdict(question), ensure_ascii=False) + "\n").encode())


def whole_lines(file: Path) -> bytes:
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        return b""
    return written[: written.rfind(b"\n") + 1]
