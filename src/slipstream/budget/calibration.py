"""Calibration: how often a drafter is right when it says what it says.

A source's raw score of a node, its own belief between 0 and 1, and the node's depth fall into a bin; a bin knows how
often such nodes were right, given that their parents were. So a share of matches, a head's softmax and a similarity
become comparable. Every proposed node is labelled by the text that followed, verified or not; what is believed at first
is shipped (`priors.json`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from slipstream.compiled import compiled
from slipstream.tree import TokenTree

BINS = 16  # of raw scores: as fine as a hundred labels of a text can fill
DEPTHS = 4  # of depths: 1, 2, 3, more
PRIOR = 6.0  # labels that the prior counts as
# Weight of the newest look in whatever is learnt by the way: labels, times, gains. Half of what is known is from the
# last 44 looks: a new kind of text is followed within a paragraph, and chance decides little.
NEWEST = 1 / 64


class Calibration:
    """Of several sources."""

    def __init__(self, sources: Sequence[str]) -> None:
        """sources: by name, each with its shipped prior; one that has none is believed what it says."""
        self.bins = np.full((len(sources), DEPTHS, BINS, 2), PRIOR)  # how often right, labels that this rests on
        self.bins[..., 0] = (np.arange(BINS) + 0.5) / BINS
        # By drafter: (DEPTHS, BINS) how often it was right, on the texts of bench/budget.py.
        shipped = json.loads(files(__package__).joinpath("priors.json").read_text())
        for i, name in enumerate(sources):
            if name in shipped:
                self.bins[i, ..., 0] = shipped[name]
        # Which of them the columns of a tree are, by its names.
        self.columns = cache(lambda names: np.array([sources.index(name) for name in names], np.int64))

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int = 0) -> bool:
        """The text after the tree's root went on with these tokens, the first `known` of which it was told before.
        Returns whether more of the text would say more about it."""
        columns, text = self.columns(tree.sources), np.array(followed, np.int32)
        return bool(_label(tree.parents, tree.tokens, tree.raw, columns, text, known, self.bins))


@compiled
def belief(bins, source, depth, raw):  # type: ignore[no-untyped-def]
    """That a node is right, given that its parent is."""
    return bins[source, min(depth, DEPTHS) - 1, min(BINS - 1, max(0, int(raw * BINS))), 0]


@compiled
def _label(parents, tokens, raw, sources, followed, known, bins):  # type: ignore[no-untyped-def]
    n, more = len(parents), False
    depth, right = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    right[0] = True
    for i in range(1, n):
        depth[i] = depth[parents[i]] + 1
        if not right[parents[i]]:
            continue
        if depth[i] > len(followed):
            more = True
            continue
        right[i] = tokens[i] == followed[depth[i] - 1]
        for column in range(len(sources)):
            if depth[i] > known and not np.isnan(raw[i, column]):
                place = min(BINS - 1, max(0, int(raw[i, column] * BINS)))
                found = bins[sources[column], min(depth[i], DEPTHS) - 1, place]
                found[0] += max(NEWEST, 1 / (1 + found[1])) * (right[i] - found[0])
                found[1] += 1
    return more
