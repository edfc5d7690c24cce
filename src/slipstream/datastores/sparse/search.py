"""Search: what followed the longest endings of a text in any of several runs, as a draft tree. Compiled, and without
the GIL.

One pass finds every match of every length: where the text's end would be inserted in the order of contexts, its longest
matches are the neighbours, and shorter ones lie further out. So matches are collected in shells, longest first, across
all runs at once, until there are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import carray
from numpy.typing import NDArray

from slipstream.compiled import compiled, inlined
from slipstream.datastores.durable.mapping import missing, pages_missed
from slipstream.datastores.durable.pages import PAGE, pointer, xxh64
from slipstream.datastores.sparse.runs import (
    COUNT,
    DEAD,
    DEADS,
    EVERY,
    KEY_SEEN,
    KEY_SUMS,
    KEYS,
    LENGTH,
    LIMIT,
    POSITION_SEEN,
    POSITION_SUMS,
    POSITIONS,
    TOKEN_SEEN,
    TOKEN_SUMS,
    TOKENS,
    Runs,
)
from slipstream.datastores.sparse.sort import DEPTH
from slipstream.errors import DamagedError, OptionError
from slipstream.tree import TokenTree

# Found by trying how many true next tokens the tree covers on unseen code: see docs/log/datastores.md.
TRUST = 2.0  # a match counts this much more than one that is shorter by a token
MANY = 64 * EVERY  # matches that need not be counted to the last
UNKNOWN = 4.0  # what continuations that no match has count, where a match of n tokens counts TRUST ** n
FADE = 0.7  # nodes are chosen as if each were worth this much of what it is, against its parent


@dataclass(frozen=True)
class SearchShape:
    """What a search may take and give."""

    longest: int = 16  # tokens of context that are matched at most
    shortest: int = 1  # and at least
    matches: int = 40  # continuations looked at; of more, evenly spread ones
    length: int = 10  # tokens of each continuation
    nodes: int = 64  # of the tree
    fill: bool = True  # whether shorter matches fill what the longest ones leave
    exact: bool = False  # count very many matches to the last; to draft, their extent will do
    random: bool = False  # as many continuations as fit, chosen at random, instead of the best nodes of all

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 32:
            raise OptionError(f"1 <= shortest <= longest <= 32 must hold, found {self.shortest} and {self.longest}")
        if min(self.matches, self.length, self.nodes) < 1:
            raise OptionError(f"matches, length and nodes must be at least 1, found {self}")


@dataclass(frozen=True, eq=False)
class Found:
    """Matches of a text's end, the longest first."""

    tree: TokenTree
    lengths: NDArray[np.int64]  # (levels,) how many tokens matched
    counts: NDArray[np.int64]  # (levels,) how many positions have exactly that match


def draft(runs: Runs, text: NDArray[np.int32], shape: SearchShape, source: str = "") -> Found:
    """Continuations of `text`, whose last token is the root of the tree. A node's score is its conditional frequency
    among the matches, a match weighted by its length. Its raw score is how probable it is: a lone match of one token
    has no rival, and is seldom right."""
    failed, missed = np.zeros(3, np.int64), pages_missed()
    tokens, parents, raw, score, lengths, counts = _draft(
        runs.table, runs.width, text, shape.longest, shape.shortest, shape.matches, shape.length, shape.nodes,
        shape.fill, shape.random, shape.exact, failed,
    )  # fmt: skip
    if pages_missed() != missed:
        raise missing(", ".join(run.name for run in runs.runs if run.checks))
    if failed[0]:
        run = runs.runs[failed[0] - 1]
        part = ("tokens", "positions", "keys")[failed[1]]
        raise DamagedError(
            f"{run.name}: page {failed[2]} of its {part} is damaged; `slipstream store repair` keeps what is whole"
        )
    return Found(TokenTree(tokens, parents, raw, score, (source,)), lengths, counts)


# ---- compiled: `t` is the table of runs, r the number of a run in it


@compiled
def _fine(sums, seen, data, page):  # type: ignore[no-untyped-def]
    """Check a page that is not trusted yet."""
    if xxh64(data + page * PAGE, np.int64(PAGE), np.uint64(0)) != carray(pointer(sums), (page + 1,), np.uint64)[page]:
        return False
    carray(pointer(seen), (page + 1,), np.uint8)[page] = 1
    return True


@compiled
def _position(t, r, i, failed):  # type: ignore[no-untyped-def]
    """The i-th position of a run."""
    seen = t[r, POSITION_SEEN]
    if seen != 0:
        page = i * 4 // PAGE
        if carray(pointer(seen), (page + 1,), np.uint8)[page] == 0 and not _fine(
            t[r, POSITION_SUMS], seen, t[r, POSITIONS], page
        ):
            failed[0], failed[1], failed[2] = r + 1, 1, page
            return np.int64(DEPTH)
    position = np.int64(carray(pointer(t[r, POSITIONS]), (i + 1,), np.uint32)[i])
    if position < DEPTH or position >= t[r, LENGTH]:  # whatever a file says, nothing outside of it is read
        failed[0], failed[1], failed[2] = r + 1, 1, i * 4 // PAGE
        return np.int64(DEPTH)
    return position


@compiled
def _readable(t, r, first, last, size, failed):  # type: ignore[no-untyped-def]
    """Whether the tokens first..last may be read."""
    seen = t[r, TOKEN_SEEN]
    if seen != 0:
        end = last * size // PAGE
        pages = carray(pointer(seen), (end + 1,), np.uint8)
        for page in range(first * size // PAGE, end + 1):
            if pages[page] == 0 and not _fine(t[r, TOKEN_SUMS], seen, t[r, TOKENS], page):
                failed[0], failed[1], failed[2] = r + 1, 0, page
                return False
    return True


@compiled
def _compare(t, r, width, query, i, failed):  # type: ignore[no-untyped-def]
    """How many tokens before the i-th position agree with the reversed query, and whether it comes before the query."""
    position = _position(t, r, i, failed)
    if not _readable(t, r, position - len(query), position - 1, width.itemsize, failed):
        return 0, False
    tokens = carray(pointer(t[r, TOKENS]), (t[r, LENGTH],), width.dtype)
    for n in range(len(query)):
        token = tokens[position - 1 - n]
        if token != query[n]:
            return n, token < query[n]
    return len(query), False


@inlined
def _key_bounds(width, query, n):  # type: ignore[no-untyped-def]
    """The lowest and the highest key of contexts that agree with the first n tokens of the query."""
    lowest, bits = np.uint64(0), 8 * width.itemsize
    step = 8 // width.itemsize
    for i in range(min(n, step)):
        lowest |= np.uint64(query[i]) << np.uint64(64 - bits * (i + 1))
    if n >= step:
        return lowest, lowest
    return lowest, lowest | ((np.uint64(1) << np.uint64(64 - bits * n)) - np.uint64(1))


@compiled
def _first_key(t, r, key, beyond, lo, hi, failed):  # type: ignore[no-untyped-def]
    """The number of the first key that is not below `key`, or, for `beyond`, the first above it."""
    keys = carray(pointer(t[r, KEYS]), (hi,), np.uint64)
    seen = t[r, KEY_SEEN]
    while lo < hi and failed[0] == 0:
        middle = (lo + hi) // 2
        if seen != 0:
            page = middle * 8 // PAGE
            if carray(pointer(seen), (page + 1,), np.uint8)[page] == 0 and not _fine(
                t[r, KEY_SUMS], seen, t[r, KEYS], page
            ):
                failed[0], failed[1], failed[2] = r + 1, 2, page
                break
        if keys[middle] < key or (beyond and keys[middle] == key):
            lo = middle + 1
        else:
            hi = middle
    return lo


@inlined
def _narrow(t, r, width, query, inside, outside, n, failed):  # type: ignore[no-untyped-def]
    """Let the keys tell outside[n] more closely, up to the entries between two of them."""
    lowest, highest = _key_bounds(width, query, n)
    if outside[n] < inside:
        first = _first_key(t, r, lowest, np.bool_(False), (outside[n] + EVERY) // EVERY, inside // EVERY + 1, failed)
        outside[n] = max(outside[n], (first - 1) * EVERY)
    else:
        end = (outside[n] + EVERY - 1) // EVERY
        last = _first_key(t, r, highest, np.bool_(True), inside // EVERY, end, failed)
        outside[n] = min(outside[n], last * EVERY)


@compiled
def _insertion_point(t, r, width, query, below, above, failed):  # type: ignore[no-untyped-def]
    """Where the query belongs. On the way, below[n] and above[n] become the nearest entries on either side that were
    seen to agree in fewer than n tokens."""
    lo, hi = np.int64(0), t[r, COUNT]
    below[:], above[:] = -1, hi
    if t[r, KEYS] != 0:
        lowest, highest = _key_bounds(width, query, len(query))
        first = _first_key(t, r, lowest, np.bool_(False), lo, (hi + EVERY - 1) // EVERY, failed)
        last = _first_key(t, r, highest, np.bool_(True), first, (hi + EVERY - 1) // EVERY, failed)
        lo, hi = max(lo, (first - 1) * EVERY + 1), min(hi, last * EVERY)
        whole = min(8 // width.itemsize, len(query))  # tokens of a key: beyond these entries, fewer agree
        below[whole:], above[whole:] = lo - 1, hi
    while lo < hi and failed[0] == 0:
        middle = (lo + hi) // 2
        n, before = _compare(t, r, width, query, middle, failed)
        if before:
            lo = middle + 1
            below[n + 1 :] = middle
        else:
            hi = middle
            above[n + 1 :] = middle
    return lo


@compiled
def _agree(t, r, width, query, i, failed):  # type: ignore[no-untyped-def]
    if i < 0 or i >= t[r, COUNT]:
        return 0
    return _compare(t, r, width, query, i, failed)[0]


@compiled
def _edge(t, r, width, query, inside, outside, n, exact, failed):  # type: ignore[no-untyped-def]
    """The outermost entry that agrees in at least n tokens. `inside` does; all that lie `outside` or beyond don't, and
    are known better afterwards. Of very many, a few at the edge don't matter: they count as shorter matches then."""
    if t[r, KEYS] != 0 and n <= 8 // width.itemsize:
        _narrow(t, r, width, query, inside, outside, n, failed)
        # Among removed ones, the few at the edge may be all that live.
        if not exact and t[r, DEADS] == 0 and abs(outside[n] - inside) > MANY:
            return outside[n] + (EVERY if outside[n] < inside else -EVERY)
    beyond = outside[n]
    while abs(beyond - inside) > 1 and failed[0] == 0:
        middle = (inside + beyond) // 2
        agreed = _compare(t, r, width, query, middle, failed)[0]
        if agreed >= n:
            inside = middle
        else:
            beyond = middle
            outside[agreed + 1 :] = middle
    return inside


@compiled
def _is_dead(t, r, position):  # type: ignore[no-untyped-def]
    """Whether an odd number of the starts and ends of removed text lie at or before the position."""
    dead = carray(pointer(t[r, DEAD]), (t[r, DEADS],), np.int64)
    lo, hi = 0, len(dead)
    while lo < hi:
        middle = (lo + hi) // 2
        if dead[middle] <= position:
            lo = middle + 1
        else:
            hi = middle
    return lo % 2 == 1


@inlined
def _dead_among(t, begin, size, failed):  # type: ignore[no-untyped-def]
    """How many entries of a shell belong to removed documents."""
    dead = 0
    for shell in range(len(size)):
        r = shell // 2
        if t[r, DEADS] > 0:
            for i in range(begin[shell], begin[shell] + size[shell]):
                dead += _is_dead(t, r, _position(t, r, i, failed))
    return dead


@inlined
def _query(text, longest, limit):  # type: ignore[no-untyped-def]
    """The end of a text, reversed: the last token first. No further back than to what can't be in a store."""
    size = 0
    while size < min(longest, len(text)) and text[len(text) - 1 - size] >= 0 and text[len(text) - 1 - size] < limit:
        size += 1
    return text[::-1][:size].copy()


@inlined
def _living(t, begin, size, first, last, failed):  # type: ignore[no-untyped-def]
    """Of the entries first..last of a shell the first that was not removed: its run and position, or -1."""
    before = np.int64(0)
    for shell in range(len(size)):
        r = np.int64(shell // 2)
        for i in range(max(first - before, 0), min(last - before, size[shell])):
            p = _position(t, r, begin[shell] + i, failed)
            if failed[0] != 0:
                return r, np.int64(-1)
            if t[r, DEADS] == 0 or not _is_dead(t, r, p):
                return r, p
        before += size[shell]
    return np.int64(-1), np.int64(-1)


@compiled
def _draft(t, width, text, longest, shortest, most, length, nodes, fill, random, exact, failed):  # type: ignore[no-untyped-def]
    query = _query(text, longest, (np.int64(1) << (8 * width.itemsize)) - 1)
    owner, found, agreed = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    lengths, counts = np.empty(longest, np.int64), np.empty(longest, np.int64)
    # Entries lo..hi of each run are taken; beyond them, the neighbours agree with the query in left and right tokens.
    runs = len(t) if len(query) > 0 else 0
    lo, hi = np.empty(runs, np.int64), np.empty(runs, np.int64)
    left, right = np.empty(runs, np.int64), np.empty(runs, np.int64)
    below, above = np.empty((runs, len(query) + 1), np.int64), np.empty((runs, len(query) + 1), np.int64)
    for r in range(runs):
        lo[r] = hi[r] = _insertion_point(t, r, width, query, below[r], above[r], failed)
        left[r] = _agree(t, r, width, query, lo[r] - 1, failed)
        right[r] = _agree(t, r, width, query, hi[r], failed)
    # The shell of one length: to the left and right in each run.
    begin, size = np.empty(2 * runs, np.int64), np.empty(2 * runs, np.int64)
    taken, levels = 0, 0
    while taken < most and failed[0] == 0:
        n = shortest - 1
        for r in range(runs):
            n = max(n, left[r], right[r])
        if n < shortest or (taken > 0 and not fill):
            break
        count = 0
        for r in range(runs):
            size[2 * r] = size[2 * r + 1] = 0
            if left[r] == n:
                begin[2 * r] = _edge(t, r, width, query, lo[r] - 1, below[r], n, exact, failed)
                size[2 * r] = lo[r] - begin[2 * r]
                lo[r] = begin[2 * r]
                left[r] = _agree(t, r, width, query, below[r, n], failed)
            if right[r] == n:
                begin[2 * r + 1] = hi[r]
                hi[r] = _edge(t, r, width, query, hi[r], above[r], n, exact, failed) + 1
                size[2 * r + 1] = hi[r] - begin[2 * r + 1]
                right[r] = _agree(t, r, width, query, above[r, n], failed)
            count += size[2 * r] + size[2 * r + 1]
        lengths[levels], counts[levels] = n, count
        if exact:
            counts[levels] -= _dead_among(t, begin, size, failed)
        levels += 1
        take = min(count, most - taken)
        shell, before, spacing = 0, 0, count / take
        for j in range(take):
            at = np.int64((j + 0.5) * spacing)  # evenly spread
            while at >= before + size[shell]:
                before += size[shell]
                shell += 1
            r = shell // 2
            p = _position(t, r, begin[shell] + at - before, failed)
            if t[r, DEADS] > 0 and _is_dead(t, r, p):  # then any other one for which it stands
                r, p = _living(t, begin, size, np.int64(j * spacing), np.int64((j + 1) * spacing), failed)
            if p >= 0:
                owner[taken], found[taken], agreed[taken] = r, p, n
                taken += 1
    matches = owner[:taken], found[:taken], agreed[:taken]
    if random:
        _shuffle(matches)
        fit = min(taken, max(1, nodes // length))
        matches = owner[:fit], found[:fit], agreed[:fit]
    _touch(t, width, matches, length, failed)
    tokens, parents, raw, score = _tree(t, width, text[-1], matches, length, nodes, failed)
    return tokens, parents, raw, score, lengths[:levels], counts[:levels]


@inlined
def _touch(t, width, matches, length, failed):  # type: ignore[no-untyped-def]
    """Check every continuation, and read where it begins. Reads that need nothing of each other wait for memory
    together, while the tree needs one after the other."""
    total = 0
    for i in range(len(matches[0])):
        r, p = matches[0][i], matches[1][i]
        if _readable(t, r, p, min(p + length, t[r, LENGTH]) - 1, width.itemsize, failed):
            total += carray(pointer(t[r, TOKENS]), (p + 1,), width.dtype)[p]
    return total


@inlined
def _shuffle(matches):  # type: ignore[no-untyped-def]
    """An order that the matches themselves decide, so that the same search gives the same draft."""
    found = matches[1]
    state = np.uint64(len(found))
    for i in range(len(found) - 1, 0, -1):
        state = (state ^ np.uint64(found[i])) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
        j = np.int64((state >> np.uint64(33)) % np.uint64(i + 1))
        for column in matches:
            column[i], column[j] = column[j], column[i]


@compiled
def _next(t, width, matches, i, depth, length):  # type: ignore[no-untyped-def]
    """The token at a depth of the i-th continuation, -1 where it has ended."""
    r, at = matches[0][i], matches[1][i] + depth
    if depth >= length or at >= t[r, LENGTH]:
        return np.int64(-1)
    token = np.int64(carray(pointer(t[r, TOKENS]), (at + 1,), width.dtype)[at])
    return np.int64(-1) if token >= t[r, LIMIT] else token


@compiled
def _powers(base, most):  # type: ignore[no-untyped-def]
    powers = np.ones(most + 1)
    for i in range(most):
        powers[i + 1] = powers[i] * base
    return powers


@compiled
def _slot(table, parents, tokens, node, token):  # type: ignore[no-untyped-def]
    """Where in the hash table the child of a node with a token is, or would be."""
    slot = ((node * 0x9E3779B1 + token * 0x85EBCA77) >> 7) & (len(table) - 1)
    while table[slot] != 0 and (parents[table[slot]] != node or tokens[table[slot]] != token):
        slot = (slot + 1) & (len(table) - 1)
    return slot


@compiled
def _tree(t, width, root, matches, length, nodes, failed):  # type: ignore[no-untyped-def]
    """The continuations with their common prefixes merged, and of that the best nodes, best first.

    A node's mass is the weight of the matches that run through it. While only one does, what follows is left to be read
    when it is needed: `tail` of a node is the match it goes on with, -1 where its children are made.
    """
    room = len(matches[0]) * length + nodes + 2
    slots = 16
    while slots < 2 * room:
        slots *= 2
    table = np.zeros(slots, np.int32)  # 0 is free: the root is nobody's child
    trust, fade = _powers(TRUST, np.int64(DEPTH)), _powers(FADE, length)
    tokens, parents, depth = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    first, sibling, tail = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    mass = np.empty(room, np.float64)
    tokens[0], parents[0], first[0], sibling[0], tail[0], depth[0], mass[0] = root, -1, -1, -1, -1, 0, 0.0
    n = np.int64(1)
    for i in range(len(matches[0])):
        if failed[0] != 0:
            break
        weight = trust[matches[2][i]]
        node = np.int64(0)
        mass[0] += weight
        while True:
            token = _next(t, width, matches, i, depth[node], length)
            if token < 0:
                break
            slot = _slot(table, parents, tokens, node, token)
            child = np.int64(table[slot])
            if child == 0:
                table[slot] = n
                n = _add(tokens, parents, first, sibling, tail, depth, mass, n, node, token, i, weight)
                break
            if tail[child] >= 0:  # no longer alone: the other one takes its next step first
                match = np.int64(tail[child])
                other = _next(t, width, matches, match, depth[child], length)
                if other >= 0:
                    table[_slot(table, parents, tokens, child, other)] = n
                    n = _add(tokens, parents, first, sibling, tail, depth, mass, n, child, other, match, mass[child])
                tail[child] = -1
            mass[child] += weight
            node = child
    # The frontier is a heap of nodes whose parents are chosen.
    out, up, number = np.empty(nodes + 1, np.int32), np.empty(nodes + 1, np.int32), np.empty(room + nodes, np.int32)
    raw, score = np.empty((nodes + 1, 1), np.float32), np.empty(nodes + 1, np.float32)
    worth, heap = np.empty(room + nodes, np.float64), np.empty(room + nodes, np.int32)
    waiting, kept, node = np.int64(0), 0, np.int64(0)
    while True:
        out[kept], number[node] = tokens[node], kept
        up[kept] = number[parents[node]] if node else -1
        score[kept] = raw[kept, 0] = np.nan
        if node:
            whole = mass[parents[node]]
            score[kept] = mass[node] / whole
            raw[kept, 0] = mass[node] / (whole + UNKNOWN / trust[depth[parents[node]]])
        kept += 1
        if tail[node] >= 0:
            match = np.int64(tail[node])
            token = _next(t, width, matches, match, depth[node], length)
            if token >= 0:
                n = _add(tokens, parents, first, sibling, tail, depth, mass, n, node, token, match, mass[node])
        child = first[node]
        while child >= 0:
            worth[child] = mass[child] * fade[depth[child]]
            waiting = _push(heap, worth, waiting, child)
            child = sibling[child]
        if kept > nodes or waiting == 0:
            break
        node = np.int64(heap[0])
        waiting = _pop(heap, worth, waiting)
    score[0] = 1.0
    return out[:kept], up[:kept], raw[:kept], score[:kept]


@compiled
def _add(tokens, parents, first, sibling, tail, depth, mass, n, node, token, match, weight):  # type: ignore[no-untyped-def]
    tokens[n], parents[n], tail[n], depth[n], mass[n] = token, node, match, depth[node] + 1, weight
    first[n], sibling[n] = -1, first[node]
    first[node] = n
    return n + 1


@inlined
def _better(worth, a, b):  # type: ignore[no-untyped-def]
    return worth[a] > worth[b] or (worth[a] == worth[b] and a < b)


@inlined
def _push(heap, worth, size, node):  # type: ignore[no-untyped-def]
    i = size
    while i > 0 and _better(worth, node, heap[(i - 1) // 2]):
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = node
    return size + 1


@inlined
def _pop(heap, worth, size):  # type: ignore[no-untyped-def]
    """Take the best away."""
    size -= 1
    node, i = heap[size], 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and _better(worth, heap[child + 1], heap[child]):
            child += 1
        if not _better(worth, heap[child], node):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = node
    return size
