"""Tool calls: splits an answer's text into content and calls while it grows, and makes the schema that forces a call.

This file deals with text and JSON only. The joined deltas do not depend on the pieces in which a text arrives. What is
no valid call becomes content, so nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from slipstream.errors import OptionError


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # the JSON text of an object


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallBegins:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    piece: str


Delta = Content | CallBegins | CallArguments


class Parser(Protocol):
    """Reads the text of one answer."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that are certain after this piece of the answer."""

    def finish(self) -> list[Delta]:
        """The remaining deltas, when the answer has ended."""


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and any number of times: Hermes, Qwen.

    After an opening tag that begins no call, the search goes on right after that tag.
    """

    OPENS, CLOSES = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""  # not returned yet; begins with the opening tag while an object is read
        self._object: _ObjectEnd | None = None
        self._deltas = _Deltas()

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        while self._advance():
            pass
        return self._deltas.take()

    def finish(self) -> list[Delta]:
        while self._object:  # a call that was not closed
            self._refuse()
            while self._advance():
                pass
        self._deltas.content(self._text)
        self._text = ""
        self._deltas.end()
        return self._deltas.take()

    def _advance(self) -> bool:
        """Read on by one part: text, a tag or a call. Returns False if that needs more text."""
        if self._object is None:
            before, tag, _ = self._text.partition(self.OPENS)
            if not tag:
                before = before[: len(before) - _tag_prefix(before, self.OPENS)]
            self._deltas.content(before)
            self._text = self._text[len(before) :]
            if tag:
                self._object = _ObjectEnd(len(self.OPENS))
            return bool(tag)
        try:
            # The JSON determines where the object ends: the closing tag may also stand in one of its strings.
            end = self._object.find(self._text)
        except ValueError:
            self._refuse()
            return True
        if end is None:
            return False
        rest = self._text[end:].lstrip()
        if len(rest) < len(self.CLOSES) and self.CLOSES.startswith(rest):
            return False
        call = read_call(self._text[len(self.OPENS) : end])
        if call is None or not rest.startswith(self.CLOSES):
            self._refuse()
        else:
            self._deltas.call(call)
            self._text, self._object = rest[len(self.CLOSES) :], None
        return True

    def _refuse(self) -> None:
        self._deltas.content(self.OPENS)
        self._text, self._object = self._text[len(self.OPENS) :], None


class Llama:
    """`{"name": ..., "parameters": {...}}`, or several separated by `;`, as the whole answer: Llama 3.

    Later text may still show that the answer is no call, so calls are returned only when it has ended.
    """

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""  # not returned yet
        self._at = 0  # where an object begins, or the last one ended
        self._object: _ObjectEnd | None = None  # the one being read
        self._calls: list[ToolCall] = []
        self._is_content = False
        self._deltas = _Deltas()

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        if not self._is_content:
            try:
                while self._advance():
                    pass
            except ValueError:
                self._is_content = True
        if self._is_content:
            self._give_out()
        return self._deltas.take()

    def finish(self) -> list[Delta]:
        if self._is_content or self._object or not self._calls:
            self._give_out()
        else:
            for call in self._calls:
                self._deltas.call(call)
        self._deltas.end()
        return self._deltas.take()

    def _advance(self) -> bool:
        """Read on by one call. Returns False if that needs more text. ValueError: the answer is content."""
        if self._object is None:
            rest = self._text[self._at :].lstrip()
            start = len(self._text) - len(rest)
            if not self._calls:
                if self.TAG.startswith(rest):
                    return False
                start += len(self.TAG) if rest.startswith(self.TAG) else 0
            elif not rest:
                return False
            elif rest.startswith(";"):
                start += 1
            else:
                raise ValueError("text after the calls")
            self._at, self._object = start, _ObjectEnd(start)
        end = self._object.find(self._text)
        if end is None:
            return False
        call = read_call(self._text[self._at : end])
        if call is None:
            raise ValueError("an object that is no call")
        self._calls.append(call)
        self._at, self._object = end, None
        return True

    def _give_out(self) -> None:
        self._deltas.content(self._text)
        self._text = ""


def form_of(template: str | None) -> type[Parser] | None:
    """The parser for the form in which a chat template asks for calls.

    None if it takes no tools, or asks for a form that is not supported.
    """
    if template is None or not re.search(r"\btools\b", template):
        return None
    if Hermes.OPENS in template:
        # Qwen3-Coder and GLM write XML between the same tags.
        return None if "<function=" in template or "<arg_key>" in template else Hermes
    return Llama if Llama.TAG in template or '"parameters"' in template else None


def forced_schema(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema of the call that `tool_choice` demands, in the form that `read_call` reads. None: it demands
    none."""
    if choice in (None, "auto", "none"):
        return None
    parameters: dict[str, Mapping[str, Any] | None] = {}
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name), "parameters": Mapping() | None as given}}:
                parameters[name] = given
            case {"type": "function", "function": {"name": str(name), **others}} if "parameters" not in others:
                parameters[name] = None
            case _:
                raise OptionError(f"found the tool {tool!r}: give each as {_FUNCTION}")
    match choice:
        case "required":
            names = list(parameters)
        case {"type": "function", "function": {"name": str(name)}}:
            names = [name]
        case _:
            raise OptionError(f"tool_choice={choice!r} is unknown: give auto, none, required or {_FUNCTION}")
    if not parameters:
        raise OptionError(f"tool_choice={choice!r} needs tools, found none: give at least one")
    if unknown := names - parameters.keys():
        raise OptionError(f"tool_choice names the function {unknown.pop()!r}: there are {', '.join(parameters)}")
    return {"anyOf": [_call_schema(name, parameters[name], at) for at, name in enumerate(names)]}


_FUNCTION = '{"type": "function", "function": {"name": ...}}'  # how tools and choices are written


def _call_schema(name: str, parameters: Mapping[str, Any] | None, at: int) -> dict[str, Any]:
    if parameters:
        arguments = _moved({"type": "object", **parameters}, f"#/anyOf/{at}/properties/arguments")
    else:
        arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema to be put at `root` of another: its references to itself (`#/$defs/...`) are changed to point there."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            moved["$ref"] = root + reference[1:]
        return moved
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema


class _Deltas:
    """Collects deltas. Whitespace is held back until something follows it: next to a call it is kept only between two
    pieces of content, which would run together without it."""

    def __init__(self) -> None:
        self._ready: list[Delta] = []
        self._space = ""
        self._calls = 0
        self._began = False  # there was some content
        self._beside_call = False  # a call came after the last content

    def content(self, text: str) -> None:
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words:
            if self._calls and not self._began:
                words = words.lstrip()
            if self._ready and isinstance(last := self._ready[-1], Content):
                self._ready[-1] = Content(last.text + words)
            else:
                self._ready.append(Content(words))
            self._began, self._beside_call = True, False

    def call(self, call: ToolCall) -> None:
        self._ready += [CallBegins(self._calls, call.name), CallArguments(self._calls, call.arguments)]
        self._calls += 1
        self._beside_call = True

    def end(self) -> None:
        if self._space and not self._beside_call:
            self._ready.append(Content(self._space))

    def take(self) -> list[Delta]:
        ready, self._ready = self._ready, []
        return ready


_SPECIAL = re.compile(r'["\\]')  # characters within a string: its end, or an escape


class _ObjectEnd:
    """Finds where a JSON object ends while its text grows, and reads each character once.

    A character that can't stand at its place raises ValueError at once. Words, numbers and escapes are not checked:
    the decoder does that when the object is whole.
    """

    VALUE, WORD = '{["-0123456789tfn', "+-.0123456789eEtruefalsn"

    def __init__(self, start: int) -> None:
        self._at = start
        self._end: int | None = None
        self._closers: list[str] = []  # of the brackets that are open
        self._next = "{"  # the characters that may come next
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The index after the object, in the text so far. None: it has not ended yet. ValueError: it is no object."""
        while self._end is None and self._at < len(text):
            if not self._in_string:
                self._at += 1
                if (char := text[self._at - 1]) not in " \t\n\r":
                    self._step(char)
            elif special := _SPECIAL.search(text, self._at):
                self._in_string = special[0] == "\\"
                self._at = special.end() + self._in_string  # after the escaped character
            else:
                self._at = len(text)
        return self._end

    def _step(self, char: str) -> None:
        if char not in self._next:
            raise ValueError(f"{char!r} where one of {self._next} was needed")
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._next = '"}' if char == "{" else self.VALUE + "]"
        elif char == ",":
            self._next = '"' if self._closers[-1] == "}" else self.VALUE
        elif char == ":":
            self._next = self.VALUE
        elif char == '"':
            is_key = "{" not in self._next
            self._next = ":" if is_key else "," + self._closers[-1]
            self._in_string = True
        elif char in "}]":
            self._closers.pop()
            if self._closers:
                self._next = "," + self._closers[-1]
            else:
                self._end = self._at
        else:
            self._next = self.WORD + "," + self._closers[-1]


def _tag_prefix(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    return next(n for n in range(min(len(tag) - 1, len(text)), -1, -1) if text.endswith(tag[:n]))


def read_call(text: str) -> ToolCall | None:
    """The call in this JSON text; None if it is no complete call."""
    try:
        # Not strict: models write line breaks into strings as they are.
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
        match value:
            case {"name": str(name), "arguments": dict(found)} | {"name": str(name), "parameters": dict(found)} if name:
                name.encode()
                arguments = json.dumps(found, ensure_ascii=False, allow_nan=False)
            case _:
                return None
    except (ValueError, RecursionError):  # a number too long or too large, a name that is no Unicode, too many brackets
        return None
    # JSON may escape half a surrogate pair, which a response can't encode. It stays escaped.
    return ToolCall(name, re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", arguments))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
