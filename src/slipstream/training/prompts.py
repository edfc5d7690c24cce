"""Prompts: users' questions, read from files of any layout that has questions. Answers in the files are ignored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.datastores.ingest.records import json_array, json_lines, messages_of, parquet_rows, shape_of
from slipstream.datastores.ingest.sources import SourceFile, find_sources
from slipstream.errors import OptionError

LAYOUTS = {
    "slipstream, Spec-Bench and MT-Bench": "turns",
    "ShareGPT": "conversations",
    "OpenAI": "messages",
    "Alpaca": "instruction, and perhaps input or context",
    "questions": "prompt or question",
}
KNOWN = "known layouts: " + "; ".join(f"{name} ({fields})" for name, fields in LAYOUTS.items())


@dataclass(frozen=True)
class Question:
    """A user's messages, turn by turn, without the model's answers in between."""

    turns: tuple[str, ...]
    system: str | None = None

    @property
    def id(self) -> str:
        """A hash of the content, so a question has the same id in every file."""
        content = json.dumps([self.system, *self.turns])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_questions(
    given: Sequence[str | Path], system: str | None = None, rounds: int | None = None, limit: int | None = None
) -> list[Question]:
    """The questions of files, each once, in order, without empty ones.

    system: the system message of conversations that have none. rounds: limit of turns in a conversation. limit: of
    questions.
    """
    for name, value in (("rounds", rounds), ("limit", limit)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} is out of range: it must be at least 1")
    found: dict[str, Question] = {}
    for source in find_sources(given):
        for place, record in _records(source):
            if limit is not None and len(found) >= limit:
                return list(found.values())
            question = _question(record)
            if question is None:
                raise OptionError(f"{place}: found {shape_of(record)}; {KNOWN}. Rename the fields to one of these")
            turns = tuple(_whole(turn) for turn in question.turns if turn.strip())[:rounds]
            if turns:
                question = Question(turns, question.system or system)
                found.setdefault(question.id, question)
    if not found:
        raise OptionError(f"{', '.join(map(str, given))}: no questions were found; {KNOWN}")
    return list(found.values())


def _records(source: SourceFile) -> Iterator[tuple[str, Any]]:
    """Each record, and its place in the file. The first character decides whether JSON is a list or lines, since file
    names are often wrong about it."""
    if source.path.suffix.lower() == ".parquet":
        return parquet_rows(source, None)
    with source.path.open(encoding="utf-8-sig", errors="replace") as file:
        head = file.read(1 << 16).lstrip()
    if not head.startswith(("[", "{", '"')):
        raise OptionError(f"{source.name} is no JSON: give .jsonl, .json or .parquet; {KNOWN}")
    return json_array(source) if head.startswith("[") else json_lines(source)


def _question(record: Any) -> Question | None:
    """The record's question, or None if its layout is unknown."""
    match record:
        case str():
            return Question((record,))
        case list():
            return _asked(record)
        case {"turns": [*turns]} if all(isinstance(turn, str) for turn in turns):
            return Question(tuple(turns))
        case {"conversations": list() as turns} | {"messages": list() as turns} | {"prompt": list() as turns}:
            return _asked(turns)
        case {"instruction": str() as task}:
            given = record.get("input") or record.get("context")
            return Question((f"{task}\n\n{given}" if given else task,))
        case {"prompt": str() as ask} | {"question": str() as ask}:
            return Question((ask,))
    return None


def _asked(turns: list[Any]) -> Question | None:
    messages = messages_of(turns)
    if messages is None:
        return None
    system = next((m["content"] for m in messages if m["role"] == "system"), None)
    return Question(tuple(m["content"] for m in messages if m["role"] == "user"), system or None)


def _whole(text: str) -> str:
    """The text without lone surrogates, which JSON can hold and tokenizers refuse."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
