"""Calibration: how often a drafter is right when it says what it says.

A source's raw score of a node, its own belief between 0 and 1, and the node's depth fall into a bin; a bin counts how
often such nodes were right, given that their parents were. So a share of matches, a head's softmax and a similarity
become comparable. Every proposed node is labelled by the text that followed, verified or not. Counts decay: what a
source was worth on another kind of text is forgotten.
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
MODESTY = 0.7  # of its raw score a source is believed before anything is known
DECAY = 0.98  # of a bin's counts, for each label that it gets


class Calibration:
    """Of one source."""

    def __init__(self) -> None:
        beliefs = MODESTY * (np.arange(BINS) + 0.5) / BINS
        self._prior = np.tile(beliefs, (DEPTHS, 1))
        self._counts = np.zeros((DEPTHS, BINS, 2))  # right, labelled

    @property
    def probability(self) -> NDArray[np.float64]:
        """(DEPTHS, BINS) that a node is right, given that its parent is."""
        right, labelled = self._counts[..., 0], self._counts[..., 1]
        return (right + STRENGTH * self._prior) / (labelled + STRENGTH)

    @property
    def labelled(self) -> float:
        """How many nodes the counts rest on."""
        return float(self._counts[..., 1].sum())

    def learn(self, tree: TokenTree, column: int, followed: Sequence[int]) -> None:
        """The text after the tree's root went on with these tokens."""
        text = np.array(followed, np.int32)
        _label(tree.parents, tree.tokens, tree.raw[:, column], text, self._counts, DECAY)


@njit(cache=True, nogil=True)
def bin_of(raw):  # type: ignore[no-untyped-def]
    return min(BINS - 1, max(0, int(raw * BINS)))


@njit(cache=True, nogil=True)
def depth_class(depth):  # type: ignore[no-untyped-def]
    return depth - 1 if depth < 3 else (2 if depth < 5 else 3)


@njit(cache=True, nogil=True)
def _label(parents, tokens, raw, followed, counts, decay):  # type: ignore[no-untyped-def]
    n = len(parents)
    depth = np.zeros(n, np.int64)
    right = np.zeros(n, np.bool_)
    right[0] = True
    for i in range(1, n):
        parent = parents[i]
        depth[i] = depth[parent] + 1
        if not right[parent] or depth[i] > len(followed):
            continue
        right[i] = tokens[i] == followed[depth[i] - 1]
        if not np.isnan(raw[i]):
            count = counts[depth_class(depth[i]), bin_of(raw[i])]
            count *= decay
            count[0] += right[i]
            count[1] += 1
