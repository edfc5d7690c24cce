"""Recorder: writes the steps of a generation as lines of a trace, while they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.text import token_bytes
from slipstream.trace.page import FORMAT, VERSION, Line

if TYPE_CHECKING:
    from slipstream.budget.pilot import Choice
    from slipstream.request import Step
    from slipstream.sequence import Sequence
    from slipstream.text import Detokenizer
    from slipstream.tree import TokenTree


class Recorder:
    """A watcher of one request. A line goes to the sink as soon as it is final."""

    def __init__(
        self, header: dict[str, Any], text: Detokenizer, tokenizer: Any, sink: Callable[[Line], None] | None = None
    ) -> None:
        self.lines: list[Line] = []
        self._text, self._tokenizer, self._sink = text, tokenizer, sink
        text.by_token = True
        self._readable: dict[int, str] = {}
        self._steps = self._emitted = 0
        self._shown = 0  # characters of the answer that are in earlier pieces
        self._held: Line | None = None  # the last step's line: text that comes at the end is added to its last piece
        self._header = {"format": FORMAT, "version": VERSION, **header}

    def __call__(self, step: Step) -> None:
        """Record one step of the engine. The header comes with the first: a chat makes a request anew if it went on."""
        if not self._steps:
            self._write(self._header)
        path, tree = step.verdict.path, step.tree
        credit = self._credit(tree)
        emitted = []
        for node in path[1:]:
            emitted.append({"token": int(tree.tokens[node]), "text": self._piece(), "source": "+".join(credit[node])})
        emitted.append({"token": step.verdict.bonus, "text": self._piece(), "source": None})
        self._release()
        self._held = {
            "step": self._steps,
            "first": self._emitted - len(emitted),
            "nodes": [self._node(tree, i) for i in range(len(tree))],
            "path": [int(i) for i in path],
            "emitted": emitted,
            "draft_ms": round(1e3 * step.draft_seconds, 4),
            "verify_ms": round(1e3 * step.verify_seconds, 4),
            "host_ms": round(1e3 * step.host_seconds, 4),
            "choice": None if step.choice is None else _rounded(step.choice),
        }
        self._steps += 1

    def end(self, sequence: Sequence) -> list[Line]:
        """End the trace, and return all lines."""
        if self._held is not None:
            text = self._text.finish()
            self._held["emitted"][-1]["text"] += text[self._shown :]
            self._shown = len(text)
            self._release()
            stats = sequence.stats.as_dict()
            self._write({"end": True, "finish": sequence.finish or "cancelled", "text": text, "stats": stats})
        return self.lines

    def _piece(self) -> str:
        """The text that the next emitted token added to the answer."""
        end = self._text.lengths[self._emitted]
        piece = self._text.text[self._shown : end]
        self._shown = max(self._shown, end)
        self._emitted += 1
        return piece

    def _credit(self, tree: TokenTree) -> list[list[str]]:
        proposed = tree.proposed_by()
        return [[name for name, by in proposed.items() if by[i]] for i in range(len(tree))]

    def _node(self, tree: TokenTree, i: int) -> dict[str, Any]:
        scores = {name: float(tree.raw[i, s]) for s, name in enumerate(tree.sources) if not np.isnan(tree.raw[i, s])}
        return {
            "token": int(tree.tokens[i]),
            "text": self._read(int(tree.tokens[i])),
            "parent": int(tree.parents[i]),
            "score": round(float(tree.score[i]), 6) if i else None,
            "sources": {name: round(score, 6) for name, score in scores.items()},
        }

    def _read(self, token: int) -> str:
        if token not in self._readable:
            self._readable[token] = readable(self._tokenizer, token)
        return self._readable[token]

    def _release(self) -> None:
        if self._held is not None:
            self._write(self._held)
            self._held = None

    def _write(self, line: Line) -> None:
        self.lines.append(line)
        if self._sink is not None:
            self._sink(line)


def _rounded(choice: Choice) -> dict[str, Any]:
    found = choice._asdict() | {"asked": list(choice.asked)}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def readable(tokenizer: Any, token: int) -> str:
    """One token as text; bytes that are not a complete character as ⟨F0⟩."""
    if tokenizer is None:
        return f"⟨{token}⟩"
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text
    raw, out = token_bytes(tokenizer, token, text), ""
    if raw is None:
        return text
    while raw:
        for size in (1, 2, 3, 4):
            try:
                out += raw[:size].decode()
            except UnicodeDecodeError:
                continue
            raw = raw[size:]
            break
        else:
            out += f"⟨{raw[0]:02X}⟩"
            raw = raw[1:]
    return out
