"""Read the documents of a file. JSON and parquet hold many, in layouts that are recognised; any other file is one.

pyarrow is imported only when a parquet file is read.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

from slipstream.datastores.ingest.sources import CHUNK, SourceFile
from slipstream.errors import StoreError

Document = str | list[dict[str, str]]  # plain text, or chat messages of role and content

LAYOUTS = {
    "ShareGPT": "conversations",
    "OpenAI": "messages",
    "Alpaca": "instruction, output or response, and perhaps input or context",
    "question and answer": "prompt or question; completion, response or answer",
    "plain": "text or content",
}
KNOWN = "known layouts: " + "; ".join(f"{name} ({fields})" for name, fields in LAYOUTS.items())
_FIELDS = set(re.findall(r"\w+", " ".join(LAYOUTS.values()))) - {"or", "and", "perhaps"}
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_SPACE = re.compile(r"[ \t\r\n]*")


def read_documents(source: SourceFile, field: str | None = None) -> Iterator[Document]:
    """The documents of a file, without empty ones. JSON and parquet hold many; any other file is one.

    `field` names the field that holds the text (`a.b`: b within a); without it, a record's layout is recognised.
    """
    try:
        match source.path.suffix.lower():
            case ".jsonl" | ".ndjson":
                records = json_lines(source)
            case ".json":
                records = _json(source, field)
            case ".parquet":
                records = parquet_rows(source, field)
            case _:
                records, field = iter([(str(source.path), source.path.read_text("utf-8-sig"))]), None
        for place, record in records:
            document = _document(record, field, place)
            if text_size(document):
                yield document
    except UnicodeDecodeError as error:
        raise StoreError(f"{source.path} is not UTF-8 text ({error.reason}): convert it") from error
    except OSError as error:
        raise StoreError(f"{source.path} can't be read ({error.strerror or error}): name it as it is now") from error


def text_size(document: Document) -> int:
    """Characters of text."""
    return len(document) if isinstance(document, str) else sum(len(message["content"]) for message in document)


def json_lines(source: SourceFile) -> Iterator[tuple[str, Any]]:
    with source.path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise _broken(f"{source.path}:{number}", error) from error
                yield f"{source.path}:{number}", record


def _json(source: SourceFile, field: str | None) -> Iterator[tuple[str, Any]]:
    """An array, JSON lines with the wrong file name, or one object.

    An object of no known layout is read as text: projects have many settings in JSON, some with comments.
    """
    with source.path.open(encoding="utf-8-sig", errors="replace") as file:
        if file.read(CHUNK).lstrip().startswith("["):
            yield from json_array(source)
            return
        file.seek(0)
        first = next((line for line in file if line.strip()), "")
        if _parsed(first) is not None and any(line.strip() for line in file):
            yield from json_lines(source)
            return
    text = source.path.read_text("utf-8-sig")
    record = _parsed(text)
    if field and record is None:
        raise StoreError(f"{source.path}: not JSON, so it has no field {field!r}: repair it, or leave it out")
    yield str(source.path), record if field or _recognised(record) is not None else text


def json_array(source: SourceFile) -> Iterator[tuple[str, Any]]:
    """The elements one by one, from a buffer little longer than the longest of them."""
    decode = json.JSONDecoder().raw_decode
    with source.path.open(encoding="utf-8-sig", errors="replace") as file:  # it may end within a character
        buffer = file.read(CHUNK)
        place = buffer.index("[") + 1
        line, count, over = 1, 0, False  # line of the buffer's start, elements so far, end of file
        while True:
            place = _after_space(buffer, place)
            if buffer.startswith("]", place):
                if buffer[place + 1 :].strip() or file.read(CHUNK).strip():
                    raise StoreError(
                        f"{source.path}: there is more after the array's end: name it .jsonl, or repair it"
                    )
                return
            try:
                element, end = decode(buffer, place)
                end = _after_space(buffer, end)
                mark = buffer[end : end + 1]
                if mark not in (",", "]") and (mark or not over):  # a number may go on in the next chunk
                    raise json.JSONDecodeError("Expecting ',' or ']'", buffer, end)
            except json.JSONDecodeError as error:
                # Where the buffer's end cuts a string, word or escape, the error's position is its beginning. So an
                # error near the buffer's end may only mean that more must be read, unless the file ends properly.
                closed = over and error.pos < len(buffer.rstrip()) and buffer.rstrip().endswith("]")
                cut = error.msg.startswith("Unterminated") or (error.pos > len(buffer) - 16 and not closed)
                if not cut:
                    raise _broken(f"{source.path}:{line + error.lineno - 1}", error) from error
                if over:
                    warnings.warn(f"{source.path} is cut off: its {count} whole elements were read", stacklevel=2)
                    return
                line += buffer.count("\n", 0, place)
                more = file.read(max(CHUNK, len(buffer) - place))  # doubling: linear time for long elements
                buffer, place, over = buffer[place:] + more, 0, not more
                continue
            count += 1
            yield f"{source.path}, element {count}", element
            place = end + (mark == ",")


def parquet_rows(source: SourceFile, field: str | None) -> Iterator[tuple[str, Any]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise StoreError(
            f"{source.path} needs pyarrow, which is missing: `pip install pyarrow`, or slipstream-llm[parquet]"
        ) from error
    try:
        with source.path.open("rb") as bytes_of, parquet.ParquetFile(bytes_of) as file:
            names: list[str] = file.schema_arrow.names
            wanted = {field, field.split(".")[0]} if field else _FIELDS
            # Only these columns are read, as others may hold images. A row still has the others' names, for errors.
            columns = [name for name in names if name in wanted]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source.path}, row {number}", {**dict.fromkeys(names), **row}
    except arrow.ArrowException as error:
        raise StoreError(f"{source.path} can't be read as parquet ({error}): fetch or write it again") from error


def _document(record: Any, field: str | None, place: str) -> Document:
    if field is None:
        document = _recognised(record)
        if document is None:
            raise StoreError(f"{place}: found {shape_of(record)}; {KNOWN}. Name the field with the text: --field NAME")
        return document
    value: Any = record
    for key in [field] if isinstance(record, dict) and field in record else field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise StoreError(
                f"{place}: there is no field {field!r}, found {shape_of(record)}: name a field that holds text"
            )
        value = value[key]
    document = "" if value is None else value if isinstance(value, str) else messages_of(value)
    if document is None:
        held = type(value).__name__
        raise StoreError(f"{place}: {field!r} holds {held}, found {shape_of(record)}: name a field that holds text")
    return document


def _recognised(record: Any) -> Document | None:
    """The record's text or messages, or None if its layout is unknown."""
    match record:
        case str():
            return record
        case list():
            return messages_of(record)
        case {"conversations": list() as turns} | {"messages": list() as turns} if (
            messages := messages_of(turns)
        ) is not None:
            return messages
        case {"instruction": str() as task, "output": str() as answer} | {
            "instruction": str() as task,
            "response": str() as answer,
        }:
            given = record.get("input") or record.get("context")
            return _exchange(f"{task}\n\n{given}" if given else task, answer)
        case {"prompt": str() as ask} | {"question": str() as ask}:
            for key in ("completion", "response", "answer"):
                if isinstance(answer := record.get(key), str):
                    return _exchange(ask, answer)
    match record:
        case {"text": str() | None as text} | {"content": str() | None as text}:
            return text or ""
    return None


def _exchange(ask: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]


def messages_of(turns: Any) -> list[dict[str, str]] | None:
    """Messages of role and content, or None if these aren't any."""
    messages: list[dict[str, str]] = []
    for turn in turns if isinstance(turns, list) else [None]:
        match turn:
            case {"role": str() as role, "content": content} | {"from": str() as role, "value": content}:
                pass
            case _:
                return None
        if isinstance(content, list):  # a list of parts; images and the like have no text
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "\n".join(text for text in texts if isinstance(text, str))
        if not isinstance(content, str | None):
            return None
        messages.append({"role": _ROLES.get(role, role), "content": content or ""})
    return messages


def shape_of(record: Any) -> str:
    if not isinstance(record, dict):
        return f"{type(record).__name__} instead of an object"
    return "the fields " + (", ".join(_field_names(record)) or "of an empty object")


def _field_names(record: dict[str, Any]) -> Iterator[str]:
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{name}" for name in _field_names(value))
        else:
            yield key


def _parsed(text: str) -> Any:
    """The parsed JSON, or None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _broken(place: str, error: ValueError) -> StoreError:
    return StoreError(f"{place}: not JSON ({getattr(error, 'msg', error)}): repair or remove it")


def _after_space(text: str, place: int) -> int:
    return _SPACE.match(text, place).end()  # type: ignore[union-attr]
