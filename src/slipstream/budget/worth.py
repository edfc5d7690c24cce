"""What drafts are worth: nodes in the order of their value, and how many of them are worth a step's time."""

from __future__ import annotations

import numpy as np

from slipstream.budget.calibration import belief
from slipstream.compiled import compiled


@compiled
def rank(tokens, parents, raw, columns, bins, limit, trees, share, expected):  # type: ignore[no-untyped-def]
    """Tokens, parents, raw scores and scores of the nodes that may be verified, the most valuable first. columns: which
    source each column of raw is. limit: nodes at most. trees: whether branches can be verified; else the best chain
    counts. share: of what is promised, that is expected to come. expected: the tokens that come with 0, 1, … nodes are
    added to it."""
    score, value = _values(parents, raw, columns, bins, np.int64(-1), trees)
    order = _order(value, limit)
    _add(expected, value, order, share)
    n = len(order) + 1
    new_tokens, new_parents = np.empty(n, np.int32), np.empty(n, np.int32)
    new_raw, new_score = np.empty((n, raw.shape[1]), np.float32), np.empty(n, np.float32)
    place = np.empty(len(parents), np.int32)
    for k in range(n):
        node = order[k - 1] if k else 0
        place[node] = k
        new_tokens[k], new_score[k] = tokens[node], score[node]
        new_parents[k] = place[parents[node]] if k else -1
        for column in range(raw.shape[1]):
            new_raw[k, column] = raw[node, column]
    return new_tokens, new_parents, new_raw, new_score


@compiled
def add_without(expected, asked, parents, raw, columns, bins, limit, trees, share):  # type: ignore[no-untyped-def]
    """Add to each row of expected (sources, width) what a draft gives with 0, 1, … nodes if one of the asked sources
    had proposed nothing."""
    for row in range(len(asked)):
        _, value = _values(parents, raw, columns, bins, asked[row], trees)
        _add(expected[row], value, _order(value, limit), share)


@compiled
def best_rate(expected, seconds, spent):  # type: ignore[no-untyped-def]
    """Tokens per second with the best number of nodes, if drafting took so many seconds besides."""
    best = 0.0
    for nodes in range(len(expected)):
        best = max(best, expected[nodes] / (spent + seconds[nodes]))
    return best


@compiled
def best_nodes(expected, seconds, spent, plain):  # type: ignore[no-untyped-def]
    """How many nodes are best, and the best rate. What drafting took is spent: where even that rate does not make up
    for it, nodes still have to give more than plain decoding would in the time that they take."""
    best, reached = 0, best_rate(expected, seconds, spent)
    rate = max(reached, plain)
    for nodes in range(1, len(expected)):
        if expected[nodes] - rate * seconds[nodes] > expected[best] - rate * seconds[best]:
            best = nodes
    return best, reached


@compiled
def _values(parents, raw, columns, bins, left_out, trees):  # type: ignore[no-untyped-def]
    """How probable each node is, given its parent, and together with all its ancestors. left_out: a source that does
    not count. Without trees only a node's best child has a chance."""
    n = len(parents)
    score, value, depth = np.ones(n, np.float32), np.ones(n), np.zeros(n, np.int64)
    claimed = np.zeros(n)  # by all children of a node together: no more than one of them can be right
    best = np.zeros(n, np.int64)  # of these
    for i in range(1, n):
        parent = parents[i]
        depth[i] = depth[parent] + 1
        score[i] = 0.0
        for column in range(len(columns)):
            if columns[column] != left_out and not np.isnan(raw[i, column]):
                score[i] = max(score[i], belief(bins, columns[column], depth[i], raw[i, column]))
        claimed[parent] += score[i]
        if not best[parent] or score[i] > score[best[parent]]:
            best[parent] = i
    for i in range(1, n):
        parent = parents[i]
        chance = score[i] / max(1.0, claimed[parent])
        value[i] = value[parent] * chance if trees or best[parent] == i else 0.0
    return score, value


@compiled
def _order(value, limit):  # type: ignore[no-untyped-def]
    """Drafted nodes that may be verified, the most valuable first; parents before their children."""
    nodes = np.empty(len(value) - 1, np.int64)
    worthy = 0
    for k in range(len(nodes)):  # by insertion: they are few, and nearly in order
        node = k + 1
        worthy += value[node] > 0
        while k > 0 and value[nodes[k - 1]] < value[node]:
            nodes[k] = nodes[k - 1]
            k -= 1
        nodes[k] = node
    return nodes[: min(limit, worthy)]


@compiled
def _add(expected, value, order, share):  # type: ignore[no-untyped-def]
    """What these nodes give, the first 0, 1, … of them."""
    tokens = 1.0
    for nodes in range(len(expected)):
        if 0 < nodes <= len(order):
            tokens += share * value[order[nodes - 1]]
        expected[nodes] += tokens
