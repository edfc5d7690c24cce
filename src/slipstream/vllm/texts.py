"""Finds the text of a row of vLLM's batch. Rows move and have no ids, so a text is found by its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

TAIL = 16  # a text is looked up by this many last tokens; then all tokens are compared
AWAY = 16  # steps that a text may miss before it counts as ended: full steps of vLLM leave out some requests


@dataclass(eq=False)
class KnownText:
    """One text that is being written."""

    tokens: NDArray[np.int32]  # with spare room at the end
    length: int
    prompt: int  # its length before the tokens that were new when it was first seen
    session: Any  # its draft session
    drafted: int = 0  # tokens of its latest draft
    seen: int = 0  # the latest step that had it

    @property
    def answer(self) -> list[int]:
        found: list[int] = self.tokens[self.prompt : self.length].tolist()
        return found

    def grow(self, row: NDArray[Any], length: int) -> None:
        if length > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * length)
        self.tokens[self.length : length] = row[self.length : length]
        self.length = length


@dataclass
class KnownTexts:
    """All texts that are being written."""

    step: int = 0
    _by_end: dict[tuple[int, bytes], list[KnownText]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    def __iter__(self) -> Iterator[KnownText]:
        return chain.from_iterable(self._by_end.values())

    def take(self, row: NDArray[Any], length: int) -> KnownText | None:
        """The text with these tokens, if it is known. It is removed until it is put back."""
        found = self._by_end.get(key := _key(row, length), [])
        for text in found:
            if (text.tokens[:length] == row[:length]).all():
                found.remove(text)
                if not found:
                    del self._by_end[key]
                return text
        return None

    def put(self, text: KnownText) -> None:
        text.seen = self.step
        self._by_end.setdefault(_key(text.tokens, text.length), []).append(text)

    def gone(self) -> Iterator[KnownText]:
        """Remove and return the texts that have ended: they missed more than AWAY steps."""
        for key, texts in list(self._by_end.items()):
            here = [text for text in texts if self.step - text.seen <= AWAY]
            if len(here) < len(texts):
                yield from [text for text in texts if text not in here]
                if here:
                    self._by_end[key] = here
                else:
                    del self._by_end[key]


def _key(tokens: NDArray[Any], length: int) -> tuple[int, bytes]:
    return length, tokens[max(0, length - TAIL) : length].astype(np.int32, copy=False).tobytes()
