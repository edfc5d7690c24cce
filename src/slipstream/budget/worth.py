"""What drafts are worth: nodes in the order of their value, and how many of them are worth a step's time."""

from __future__ import annotations

import numpy as np

from slipstream.budget.calibration import belief
from slipstream.compiled import compiled


@compiled
def rank(tokens, parents, raw, columns, bins, limit, trees, share):  # type: ignore[no-untyped-def]
    """Tokens, parents, raw scores and scores of the nodes that may be verified, the most valuable first, and the
    tokens that are expected with the first 0, 1, … of them. columns: which source each column of raw is. limit: nodes
    at most. trees: whether branches can be verified; else the best chain counts. share: of what is promised, that is
    expected to come."""
    score, value = _values(parents, raw, columns, bins, np.int64(-1))
    order = _order(parents, score, value, limit, trees)
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
    return new_tokens, new_parents, new_raw, new_score, _worth(value, order, share)


@compiled
def add_without(expected, asked, parents, raw, columns, bins, limit, trees, share):  # type: ignore[no-untyped-def]
    """Add to each row of expected (sources, width) what a draft gives with 0, 1, … nodes if one of the asked sources
    had proposed nothing."""
    for row in range(len(asked)):
        score, value = _values(parents, raw, columns, bins, asked[row])
        worth = _worth(value, _order(parents, score, value, limit, trees), share)
        for nodes in range(expected.shape[1]):
            expected[row, nodes] += worth[min(nodes, len(worth) - 1)]


@compiled
def best_rate(expected, seconds, spent):  # type: ignore[no-untyped-def]
    """Tokens per second with the best number of nodes, if drafting took so many seconds besides."""
    best = 0.0
    for nodes in range(len(expected)):
        best = max(best, expected[nodes] / (spent + seconds[nodes]))
    return best


@compiled
def best_nodes(expected, seconds, spent, plain):  # type: ignore[no-untyped-def]
    """How many nodes are best. What drafting took is spent: where even the best does not make up for it, nodes still
    have to give more than plain decoding would in the time that they take."""
    rate = max(best_rate(expected, seconds, spent), plain)
    best = 0
    for nodes in range(1, len(expected)):
        if expected[nodes] - rate * seconds[nodes] > expected[best] - rate * seconds[best]:
            best = nodes
    return best


@compiled
def _values(parents, raw, columns, bins, left_out):  # type: ignore[no-untyped-def]
    """How probable each node is, given its parent, and together with all its ancestors. left_out: a source that does
    not count."""
    n = len(parents)
    score, value, depth = np.ones(n, np.float32), np.ones(n), np.zeros(n, np.int64)
    claimed = np.zeros(n)  # by all children of a node together: no more than one of them can be right
    for i in range(1, n):
        depth[i] = depth[parents[i]] + 1
        score[i] = 0.0
        for column in range(len(columns)):
            if columns[column] != left_out and not np.isnan(raw[i, column]):
                score[i] = max(score[i], belief(bins, columns[column], depth[i], raw[i, column]))
        claimed[parents[i]] += score[i]
    for i in range(1, n):
        value[i] = value[parents[i]] * score[i] / max(1.0, claimed[parents[i]])
    return score, value


@compiled
def _order(parents, score, value, limit, trees):  # type: ignore[no-untyped-def]
    """Drafted nodes that may be verified, the most valuable first; parents before their children."""
    length = min(limit, len(parents) - 1)
    if not trees:
        return _best_chain(parents, score, length)
    nodes = np.empty(len(parents) - 1, np.int64)
    for k in range(len(nodes)):  # by insertion: they are few, and nearly in order
        node = k + 1
        while k > 0 and value[nodes[k - 1]] < value[node]:
            nodes[k] = nodes[k - 1]
            k -= 1
        nodes[k] = node
    return nodes[:length]


@compiled
def _best_chain(parents, score, length):  # type: ignore[no-untyped-def]
    """The nodes on the way to the best child, its best child, …"""
    heir = np.full(len(parents), -1, np.int64)
    for i in range(1, len(parents)):
        if heir[parents[i]] < 0 or score[i] > score[heir[parents[i]]]:
            heir[parents[i]] = i
    chain = np.empty(length, np.int64)
    n, node = 0, heir[0]
    while node >= 0 and n < length:
        chain[n] = node
        n, node = n + 1, heir[node]
    return chain[:n]


@compiled
def _worth(value, order, share):  # type: ignore[no-untyped-def]
    """(n + 1,) expected tokens with the first 0, 1, … of these nodes."""
    worth = np.ones(len(order) + 1)
    for k in range(len(order)):
        worth[k + 1] = worth[k] + share * value[order[k]]
    return worth
