"""Calibration: how often a drafter is right when it says what it says.

A source's raw score of a node, its own belief between 0 and 1, and the node's depth fall into a bin; a bin counts how
often such nodes were right, given that their parents were. So a share of matches, a head's softmax and a similarity
become comparable. Every proposed node is labelled by the text that followed, verified or not. Beforehand a source is
believed nearly what it says, but that weighs no more than a few labels. Counts decay: what a source was worth on
another kind of text is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from slipstream.tree import TokenTree

BINS = 16  # of raw scores
DEPTHS = 4  # of depths: 1, 2, 3 and 4, more
STRENGTH = 4.0  # labels that the prior counts as
MODESTY = 0.8  # of its raw score a source is believed before anything is known
DECAY = 0.98  # of a bin's counts, for each label that it gets
KEPT = 0.3  # of all counts, from one text to the next


class Calibration:
    """Of one source."""

    def __init__(self, counts: NDArray[np.float64] | None = None) -> None:
        """counts: where to keep them, for whoever keeps those of several sources in one place."""
        self._counts = blank(1)[0] if counts is None else counts  # (DEPTHS, BINS, 2) right, labelled

    @property
    def probability(self) -> NDArray[np.float64]:
        """(DEPTHS, BINS) that a node is right, given that its parent is."""
        right, labelled = self._counts[..., 0], self._counts[..., 1]
        return (right + STRENGTH * MODESTY * (np.arange(BINS) + 0.5) / BINS) / (labelled + STRENGTH)

    @property
    def labelled(self) -> float:
        """How many nodes the counts rest on."""
        return float(self._counts[..., 1].sum())

    def trust(self, labels: float) -> None:
        """Believe its scores from the start, as if so many labels of each kind had borne them out."""
        self._counts[..., 1] += labels
        self._counts[..., 0] += labels * (np.arange(BINS) + 0.5) / BINS

    def forget(self) -> None:
        """Another text begins: what was learnt of others says something about it, but less than its own will."""
        self._counts *= KEPT

    def learn(self, tree: TokenTree, column: int, followed: Sequence[int]) -> None:
        """The text after the tree's root went on with these tokens."""
        raw, text = tree.raw[:, column : column + 1], np.array(followed, np.int32)
        label(tree.parents, tree.tokens, raw, np.zeros(1, np.int64), text, 0, self._counts[None])


def blank(sources: int) -> NDArray[np.float64]:
    """Counts of so many sources."""
    return np.zeros((sources, DEPTHS, BINS, 2))


@njit(cache=True, nogil=True)
def bin_of(raw):  # type: ignore[no-untyped-def]
    return min(BINS - 1, max(0, int(raw * BINS)))


@njit(cache=True, nogil=True)
def depth_class(depth):  # type: ignore[no-untyped-def]
    return depth - 1 if depth < 3 else (2 if depth < 5 else 3)


@njit(cache=True, nogil=True)
def belief(counts, source, depth, raw):  # type: ignore[no-untyped-def]
    """`Calibration.probability` of one node."""
    i = bin_of(raw)
    right, labelled = counts[source, depth_class(depth), i]
    return (right + STRENGTH * MODESTY * (i + 0.5) / BINS) / (labelled + STRENGTH)


@njit(cache=True, nogil=True)
def label(parents, tokens, raw, sources, followed, known, counts):  # type: ignore[no-untyped-def]
    """Label a tree's nodes by the text that followed its root; those of the first `known` depths already are.

    raw: (n, m) with the scores of `sources` (m,). Returns whether more text would label more nodes.
    """
    n = len(parents)
    depth = np.zeros(n, np.int64)
    right = np.zeros(n, np.bool_)
    right[0] = True
    more = False
    for i in range(1, n):
        parent = parents[i]
        depth[i] = depth[parent] + 1
        if not right[parent]:
            continue
        if depth[i] > len(followed):
            more = True
            continue
        right[i] = tokens[i] == followed[depth[i] - 1]
        if depth[i] <= known:
            continue
        for column in range(len(sources)):
            if np.isnan(raw[i, column]):
                continue
            count = counts[sources[column], depth_class(depth[i]), bin_of(raw[i, column])]
            count *= DECAY
            count[0] += right[i]
            count[1] += 1
    return more
