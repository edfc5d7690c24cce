"""Finders: find drafts from the states that chose the roots of a batch. There are finders on the CPU, on the target's
device, and in a vector database, with one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.datastores.dense.live_vectors import Own
from slipstream.datastores.dense.nearest import Drafts, Vectors
from slipstream.datastores.dense.transform import Transform


@dataclass(frozen=True, eq=False)
class Asked:
    """The query of one sequence: a root, and the state that chose it."""

    collection: str
    state: Tensor  # (H,) on the target's device
    root: int
    own: Own | None = None  # the request's text, to be searched too


class Finder(ABC):
    def __init__(self, transform: Transform, count: int, length: int) -> None:
        """count: drafts to find for each; length: tokens of each."""
        self.transform, self.count, self.length = transform, count, length

    @abstractmethod
    def near(self, asked: Sequence[Asked]) -> list[Drafts]:
        """For each query, what followed the root where states were most similar, the most similar first."""

    def refresh(self) -> None:  # noqa: B027  (a database needs none)
        """Load what was embedded since."""

    def with_text(self, one: Asked, drafts: Drafts, query: Tensor) -> Drafts:
        """The best of these drafts and, if the request's text is searched, of those in it. query: on the host."""
        if one.own is None or not one.own.count(one.root):
            return drafts
        return self.with_own(one, drafts, (one.own.rows(one.root).cpu() @ query).numpy())

    def with_own(self, one: Asked, drafts: Drafts, similarity: NDArray[np.float32]) -> Drafts:
        """Like `with_text`, with the similarities in the text given."""
        assert one.own is not None
        every = np.concatenate([drafts.similarity, similarity])
        tokens = [*drafts.tokens, *one.own.after(one.root, self.length)]
        best = np.argsort(-every, kind="stable")[: self.count]
        return Drafts(every[best], [tokens[i] for i in best])


class HostFinder(Finder):
    """Searches the mapped files of a store."""

    def __init__(self, vectors: Vectors, count: int, length: int, unfiltered: bool = False) -> None:
        """unfiltered: search all positions, then keep those that the root followed: the paper's way, for comparison."""
        super().__init__(vectors.transform, count, length)
        self.vectors, self.unfiltered = vectors, unfiltered

    def refresh(self) -> None:
        self.vectors.refresh()

    def near(self, asked: Sequence[Asked]) -> list[Drafts]:
        return [self._near(one) for one in asked]

    def _near(self, one: Asked) -> Drafts:
        view, query = self.vectors.view(one.collection), self.transform(one.state.cpu())
        if self.unfiltered:
            found = view.followed_by(view.search_all(query.numpy(), self.count), one.root)
        else:
            found = view.search(query.numpy(), one.root, self.count)
        return self.with_text(one, view.read(found, self.length), query)
