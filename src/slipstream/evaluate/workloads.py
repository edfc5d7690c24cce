"""The prompts of a benchmark: the built-in ones, or a file in the layout of a known benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.errors import OptionError

LAYOUTS = {
    "slipstream": "id, category, turns",
    "Spec-Bench and MT-Bench": "question_id, category, turns",
    "HumanEval": "task_id, prompt",
    "GSM8K": "question, answer",
    "Alpaca": "instruction, output or response, and perhaps input",
}
KNOWN = "known layouts, one JSON object per line or one JSON list of objects: " + "; ".join(
    f"{name} ({fields})" for name, fields in LAYOUTS.items()
)


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    turns: tuple[str, ...]  # the user's messages, without the model's answers in between


def builtin() -> list[Prompt]:
    """The prompts that come with slipstream."""
    return _parse(files("slipstream.evaluate").joinpath("prompts.jsonl").read_text("utf-8"), "prompts.jsonl")


def read(path: str | PathLike[str]) -> list[Prompt]:
    """The prompts of a file, whose layout is recognised by its fields."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise OptionError(f"{path} can't be read ({error.strerror}): give a .jsonl or .json file; {KNOWN}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error.reason}): unpack or convert it; {KNOWN}") from error
    return _parse(text, str(path))


def select(prompts: Sequence[Prompt], categories: Sequence[str] | None, limit: int | None) -> list[Prompt]:
    """The prompts of some categories (None or empty: all), in order. limit: questions at most (None: all).

    The limit is divided evenly among the categories, and within a category among evenly spaced prompts, since files are
    often sorted by kind or difficulty and the first few would not be representative. Later turns are included only
    after every prompt has its first one.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt.category, []).append(place)
    if unknown := [c for c in categories or () if c not in places]:
        raise OptionError(f"category {', '.join(map(repr, unknown))} is unknown: there are {', '.join(places)}")
    if limit is not None and limit < 1:
        raise OptionError(f"limit={limit} is out of range: it must be at least 1, or None for all prompts")
    wanted = {c: own for c, own in places.items() if not categories or c in categories}
    if limit is not None:
        shares = _deal(limit, [len(own) for own in wanted.values()])
        wanted = {
            c: [own[i * len(own) // share] for i in range(share)]
            for (c, own), share in zip(wanted.items(), shares, strict=True)
        }
    chosen = [prompts[place] for place in sorted(place for own in wanted.values() for place in own)]
    if limit is None:
        return chosen
    later = _deal(limit - len(chosen), [len(prompt.turns) - 1 for prompt in chosen])
    return [replace(p, turns=p.turns[: 1 + more]) for p, more in zip(chosen, later, strict=True)]


def _deal(limit: int, sizes: Sequence[int]) -> list[int]:
    """Divide a limit evenly among groups of these sizes; what small groups can't use goes to the others."""
    shares = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        for i, size in enumerate(sizes):
            if left and shares[i] < size:
                shares[i] += 1
                left -= 1
    return shares


def _parse(text: str, source: str) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for number, (place, record) in enumerate(_records(text, source), 1):
        prompt = _prompt(record, number)
        if prompt is None:
            raise OptionError(f"{source}, {place}: found {_shape(record)}; {KNOWN}. Rename the fields to one of these")
        if not prompt.turns or not all(isinstance(t, str) and t.strip() for t in prompt.turns):
            raise OptionError(f"{source}, {place}: prompt {prompt.id!r} needs turns of text, none of them empty")
        if prompt.id in prompts:
            raise OptionError(f"{source}, {place}: the id {prompt.id!r} was used before: give each prompt its own")
        prompts[prompt.id] = prompt
    if not prompts:
        raise OptionError(f"{source} is empty: it needs at least one prompt; {KNOWN}")
    return list(prompts.values())


def _records(text: str, source: str) -> Iterator[tuple[str, Any]]:
    """Each record, and its place in the file. Whether it is a list is decided by the text, as file names are often
    wrong about it."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise _broken(source, getattr(error, "lineno", 1), error) from error
        for number, item in enumerate(items, 1):
            yield f"item {number}", item
        return
    # Not splitlines(): it also cuts at characters such as U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise _broken(source, number, error) from error
            yield f"line {number}", record


def _broken(source: str, line: int, error: ValueError) -> OptionError:
    what = getattr(error, "msg", error)
    return OptionError(f"{source}, line {line}: broken JSON ({what}): repair that line; {KNOWN}")


def _prompt(record: Any, number: int) -> Prompt | None:
    """The record as a prompt, or None if its layout is unknown. Layouts without ids count their records."""
    match record:
        case {"id": str() | int() as name, "category": str() as category, "turns": [*turns]} | {
            "question_id": str() | int() as name,
            "category": str() as category,
            "turns": [*turns],
        }:
            return Prompt(str(name), category, tuple(turns))
        case {"task_id": str() as name, "prompt": str() as code}:
            ask = "Complete this Python function. Answer with the whole function in one code block."
            return Prompt(name, "humaneval", (f"{ask}\n\n```python\n{code.strip()}\n```",))
        case {"question": str() as question, "answer": _}:
            return Prompt(f"gsm8k-{number}", "gsm8k", (question,))
        case {"instruction": str() as task, "output": _} | {"instruction": str() as task, "response": _}:
            given = record.get("input")
            return Prompt(f"alpaca-{number}", "alpaca", (f"{task}\n\n{given}" if given else task,))
    return None


def _shape(record: Any) -> str:
    """A description of a record for errors: names and types of its fields."""
    if not isinstance(record, dict):
        return f"{type(record).__name__} instead of an object"
    return "the fields " + (", ".join(f"{k} ({type(v).__name__})" for k, v in record.items()) or "of an empty object")
