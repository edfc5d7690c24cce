"""Calibration: turns a drafter's raw scores into acceptance probabilities.

Nodes are grouped in bins by source, depth and raw score (the source's own belief, between 0 and 1). A bin holds how
often its nodes were right, given that their parents were. This makes a share of matches, a head's softmax and a
similarity comparable. Every proposed node is labelled by the text that followed, whether it was verified or not. The
priors are shipped (`priors.json`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from slipstream.compiled import compiled
from slipstream.tree import TokenTree

BINS = 16  # of raw scores: no more than the hundred or so labels of one text can fill
DEPTHS = 4  # bins of depths: 1, 2, 3, more
PRIOR = 6.0  # labels that the prior counts as
# Weight of the newest observation in running means of labels, times and gains. The last 44 observations make up half of
# a mean: enough to average out chance, few enough to follow a new kind of text within a paragraph.
NEWEST = 1 / 64


class Calibration:
    """The calibration of several sources."""

    def __init__(self, sources: Sequence[str]) -> None:
        """sources: names. Each starts with its shipped prior, or with its raw scores taken as probabilities."""
        self.bins = np.full((len(sources), DEPTHS, BINS, 2), PRIOR)  # share of right labels, number of labels
        self.bins[..., 0] = (np.arange(BINS) + 0.5) / BINS
        # By drafter: (DEPTHS, BINS) its share of right labels on the texts of bench/budget.py.
        shipped = json.loads(files(__package__).joinpath("priors.json").read_text())
        for i, name in enumerate(sources):
            if name in shipped:
                self.bins[i, ..., 0] = shipped[name]
        # For a tree's names of sources: which source each column of its raw scores is.
        self.columns = cache(lambda names: np.array([sources.index(name) for name in names], np.int64))

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int = 0) -> bool:
        """Label the nodes of a tree by the tokens that followed its root. The first `known` tokens were passed in an
        earlier call already. Returns whether some nodes can't be labelled before more text has followed."""
        columns, text = self.columns(tree.sources), np.array(followed, np.int32)
        return bool(_label(tree.parents, tree.tokens, tree.raw, columns, text, known, self.bins))


@compiled
def belief(bins, source, depth, raw):  # type: ignore[no-untyped-def]
    """The probability that a node is right, given that its parent is."""
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
