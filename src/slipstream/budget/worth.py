"""What drafts are worth: nodes in order of their value, and how many of them are worth verifying."""

from __future__ import annotations

import numpy as np

from slipstream.budget.calibration import belief
from slipstream.compiled import compiled


@compiled
def rank(parents, raw, columns, bins, without, limit, trees, share, expected):  # type: ignore[no-untyped-def]
    """The root and the nodes that may be verified, the most valuable first, and every node's score.

    columns: which source each column of raw is. without: a source whose proposals don't count. limit: nodes at most.
    trees: whether branches can be verified; else only the best chain counts. share: of the promised tokens, those to
    expect (`Text.share`). expected: filled with the expected tokens with 0, 1, … nodes."""
    score, value = _values(parents, raw, columns, bins, without, trees)
    nodes, worthy = np.zeros(len(parents), np.int64), 1
    for node in range(1, len(nodes)):  # by insertion: they are few, and nearly in order
        worthy += value[node] > 0
        place = node
        while place > 1 and value[nodes[place - 1]] < value[node]:
            nodes[place] = nodes[place - 1]
            place -= 1
        nodes[place] = node
    nodes, tokens = nodes[: min(limit + 1, worthy)], 1.0
    for count in range(len(expected)):
        if 0 < count < len(nodes):
            tokens += share * value[nodes[count]]
        expected[count] = tokens
    return nodes, score


@compiled
def best_nodes(expected, seconds, spent, plain):  # type: ignore[no-untyped-def]
    """How many nodes to verify, and the best rate in tokens per second, which counts the seconds spent on drafting.

    The time for drafting is lost in any case. So if even the best rate is below plain decoding's, nodes are verified as
    long as they give more tokens than plain decoding would in the time that they add."""
    reached = 0.0
    for nodes in range(len(expected)):
        reached = max(reached, expected[nodes] / (spent + seconds[nodes]))
    best, rate = 0, max(reached, plain)
    for nodes in range(1, len(expected)):
        if expected[nodes] - rate * seconds[nodes] > expected[best] - rate * seconds[best]:
            best = nodes
    return best, reached


@compiled
def _values(parents, raw, columns, bins, without, trees):  # type: ignore[no-untyped-def]
    """Each node's probability given its parent, and that of its whole path. Without trees only the best child of a node
    counts."""
    n = len(parents)
    score, value, depth = np.ones(n, np.float32), np.ones(n), np.zeros(n, np.int64)
    claimed = np.zeros(n)  # sum over a node's children: at most one of them can be right, so it is scaled down to 1
    best = np.zeros(n, np.int64)  # a node's most probable child
    for i in range(1, n):
        parent = parents[i]
        depth[i] = depth[parent] + 1
        score[i] = 0.0
        for column in range(len(columns)):
            if columns[column] != without and not np.isnan(raw[i, column]):
                score[i] = max(score[i], belief(bins, columns[column], depth[i], raw[i, column]))
        claimed[parent] += score[i]
        if not best[parent] or score[i] > score[best[parent]]:
            best[parent] = i
    for i in range(1, n):
        parent = parents[i]
        chance = score[i] / max(1.0, claimed[parent])
        value[i] = value[parent] * chance if trees or best[parent] == i else 0.0
    return score, value
