"""What a forward attends to: weights by key, summed over layers, heads and rows.

Attention functions say here what they were given. Nobody listens but within `watching`, since the weights of a long
text take as long as the attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Watched:
    def __init__(self, width: int) -> None:
        self.weights = torch.zeros(width)  # by key
        self.layers = 0  # that told theirs

    def see(
        self,
        query: torch.Tensor,  # (heads, n, d)
        keys: torch.Tensor,  # (key heads, width, d)
        mask: torch.Tensor,  # (n, width), to be added to the scores
        scale: float,
        soft_cap: float | None = None,
    ) -> None:
        """A layer's queries and keys."""
        heads, n, d = query.shape
        rows = query.reshape(len(keys), -1, d).float()  # heads that share a key head stand side by side
        scores = (rows @ keys.float().transpose(1, 2) * scale).view(heads, n, -1)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        self.add((scores + mask).softmax(-1))

    def add(self, weights: torch.Tensor) -> None:
        """A layer's weights, (…, width)."""
        told = weights.float().flatten(0, -2).sum(0)
        self.weights = self.weights.to(told.device)
        self.weights[: len(told)] += told
        self.layers += 1


watched: Watched | None = None  # of the forward under way


@contextmanager
def watching(width: int) -> Iterator[Watched]:
    """Within this, what forwards attend to is summed up. width: keys that there will be."""
    global watched
    watched = seen = Watched(width)
    try:
        yield seen
    finally:
        watched = None
