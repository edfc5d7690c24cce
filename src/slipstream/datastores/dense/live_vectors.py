"""The vectors of a running request's text, to be searched together with a store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST = 64  # positions of the text that are searched: the latest ones that the root followed


class Own:
    """One request's text, with a vector for each token whose state is known."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._unseen = 0  # tokens at the beginning whose states are unknown: they have no vectors
        self._vectors: Tensor | None = None  # (room, D)
        self._followed: dict[int, list[int]] = {}  # token -> the positions that it followed

    def extend(self, tokens: Sequence[int], vectors: Tensor | None) -> None:
        """vectors: (n, D), or None if there were no states of these tokens."""
        if vectors is None:
            self._tokens += tokens
            self._unseen = len(self._tokens)
            return
        start = len(self._tokens)
        self._write(start - self._unseen, vectors)
        for position, token in enumerate(tokens, start - 1):  # each token follows the position before it
            if position >= self._unseen:
                self._followed.setdefault(token, []).append(position)
        self._tokens += tokens

    def _write(self, at: int, vectors: Tensor) -> None:
        end = at + len(vectors)
        if self._vectors is None or end > len(self._vectors):
            room = vectors.new_empty(max(1024, 2 * end), vectors.shape[1])
            if self._vectors is not None:
                room[:at] = self._vectors[:at]
            self._vectors = room
        self._vectors[at:end] = vectors

    def _positions(self, root: int) -> list[int]:
        return self._followed.get(root, [])[-MOST:]

    def count(self, root: int) -> int:
        """m: how many positions, among those searched, the root followed."""
        return len(self._positions(root))

    def rows(self, root: int) -> Tensor:
        """(m, D) their vectors; m must not be 0."""
        assert self._vectors is not None
        at = [position - self._unseen for position in self._positions(root)]
        return self._vectors[torch.tensor(at, dtype=torch.long, device=self._vectors.device)]

    def after(self, root: int, length: int) -> list[NDArray[np.int32]]:
        """(m,) the tokens after the root at each of them. The text ends with the root of the query."""
        text = np.array([*self._tokens, root], np.int32)
        return [text[position + 2 : position + 2 + length] for position in self._positions(root)]
