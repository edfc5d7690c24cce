"""Records what a forward attends to: weights by key, summed over layers, heads and rows.

Attention functions report their inputs here, only within `watching`: for many rows of a long text, computing the
weights takes as long as the attention itself; for one row, as long as reading the keys once more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

EVERY = slice(None)  # count all rows
ROOTS = slice(0, 1)  # count a tree's first row, the root


class Watched:
    def __init__(self, sequences: int, width: int, rows: slice = EVERY) -> None:
        """width: number of keys."""
        self.rows = rows  # the rows of each sequence whose weights count
        self.weights = torch.zeros(sequences, width)  # by key
        self.layers = 0  # that have reported

    def see(
        self,
        query: torch.Tensor,  # (b, heads, n, d)
        keys: torch.Tensor,  # (b, key heads, width, d)
        mask: torch.Tensor,  # (b, 1, n, width), to be added to the scores
        scale: float,
        soft_cap: float | None = None,
    ) -> None:
        """Add a layer's weights, computed from its queries and keys."""
        query, mask = query[:, :, self.rows], mask[:, :, self.rows]
        b, heads, n, d = query.shape
        rows = query.reshape(b, keys.shape[1], -1, d).float()  # heads that share a key head stand side by side
        scores = (rows @ keys.float().transpose(2, 3) * scale).view(b, heads, n, -1)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        self._add((scores + mask).softmax(-1))

    def add(self, weights: torch.Tensor) -> None:
        """Add a layer's weights, (b, heads, n, width)."""
        self._add(weights[:, :, self.rows])

    def _add(self, weights: torch.Tensor) -> None:
        summed = weights.float().sum((1, 2))
        self.weights = self.weights.to(summed.device)
        self.weights[:, : summed.shape[1]] += summed
        self.layers += 1


_own = threading.local()  # other models may run in other threads


def watched() -> Watched | None:
    """The record for this thread's current forward, if there is one."""
    return getattr(_own, "watched", None)


@contextmanager
def watching(sequences: int, width: int, rows: slice = EVERY) -> Iterator[Watched]:
    """Within this, the weights of this thread's forwards are summed up."""
    _own.watched = seen = Watched(sequences, width, rows)
    try:
        yield seen
    finally:
        _own.watched = None
