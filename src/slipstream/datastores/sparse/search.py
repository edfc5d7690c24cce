"""Search: find the longest suffixes of a text in several runs, and draft what followed them, as a tree. Compiled, and
without the GIL.

A run's positions are sorted by their contexts. The longest matches of the text's end are next to the place where it
would be inserted, and shorter ones lie further out on both sides. So one binary search per run finds the matches of all
lengths. They are collected in shells (all matches of one length), longest first, over all runs, until there are enough.
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

# Chosen by how many true next tokens the tree covers on unseen code: see docs/log/datastores.md.
TRUST = 2.0  # the weight of a match grows by this factor with every token of its length: TRUST ** length
MANY = 64 * EVERY  # more matches than this are counted approximately
UNKNOWN = 4.0  # weight, on the same scale, of continuations that no match has
FADE = 0.7  # for the choice of nodes, mass is multiplied by this once per depth, which favours shallow nodes


@dataclass(frozen=True)
class SearchShape:
    """Limits of a search."""

    longest: int = 16  # tokens of context that are matched at most
    shortest: int = 1  # and at least
    matches: int = 40  # continuations used; if there are more matches, evenly spread ones are taken
    length: int = 10  # tokens of each continuation
    nodes: int = 64  # of the tree
    fill: bool = True  # whether shorter matches are added if there are too few of the longest
    exact: bool = False  # count large numbers of matches exactly; drafts don't need that
    random: bool = False  # randomly chosen continuations, as many as fit, instead of the best nodes of all of them

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
    counts: NDArray[np.int64]  # (levels,) how many positions match exactly that many tokens


def draft(runs: Runs, text: NDArray[np.int32], shape: SearchShape, source: str = "") -> Found:
    """Continuations of `text`, whose last token is the root of the tree. A node's score is its frequency among the
    matches that reach its parent, weighted by their lengths. Its raw score is lower, with UNKNOWN added to the total:
    the only match of a short context has score 1, but is seldom right."""
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


# ---- compiled. `t` is the table of runs, r the number of a run in it. failed: (3,) zeros, or number of a damaged run
# from 1 on, section and page


@compiled
def _check_page(sums, seen, data, page):  # type: ignore[no-untyped-def]
    """Verify the checksum of a page, and mark it as checked."""
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
        if carray(pointer(seen), (page + 1,), np.uint8)[page] == 0 and not _check_page(
            t[r, POSITION_SUMS], seen, t[r, POSITIONS], page
        ):
            failed[0], failed[1], failed[2] = r + 1, 1, page
            return np.int64(DEPTH)
    position = np.int64(carray(pointer(t[r, POSITIONS]), (i + 1,), np.uint32)[i])
    if position < DEPTH or position >= t[r, LENGTH]:  # never read outside the run, whatever the file says
        failed[0], failed[1], failed[2] = r + 1, 1, i * 4 // PAGE
        return np.int64(DEPTH)
    return position


@compiled
def _readable(t, r, first, last, size, failed):  # type: ignore[no-untyped-def]
    """Check the pages of the tokens first..last. False: one is damaged."""
    seen = t[r, TOKEN_SEEN]
    if seen != 0:
        end = last * size // PAGE
        pages = carray(pointer(seen), (end + 1,), np.uint8)
        for page in range(first * size // PAGE, end + 1):
            if pages[page] == 0 and not _check_page(t[r, TOKEN_SUMS], seen, t[r, TOKENS], page):
                failed[0], failed[1], failed[2] = r + 1, 0, page
                return False
    return True


@compiled
def _compare(t, r, width, query, i, failed):  # type: ignore[no-untyped-def]
    """How many tokens before the i-th position match the reversed query, and whether it sorts before the query."""
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
    """The lowest and the highest key of contexts that match the first n tokens of the query."""
    lowest, bits = np.uint64(0), 8 * width.itemsize
    step = 8 // width.itemsize
    for i in range(min(n, step)):
        lowest |= np.uint64(query[i]) << np.uint64(64 - bits * (i + 1))
    if n >= step:
        return lowest, lowest
    return lowest, lowest | ((np.uint64(1) << np.uint64(64 - bits * n)) - np.uint64(1))


@compiled
def _first_key(t, r, key, beyond, lo, hi, failed):  # type: ignore[no-untyped-def]
    """The index of the first key that is not below `key`; with `beyond`, of the first above it."""
    keys = carray(pointer(t[r, KEYS]), (hi,), np.uint64)
    seen = t[r, KEY_SEEN]
    while lo < hi and failed[0] == 0:
        middle = (lo + hi) // 2
        if seen != 0:
            page = middle * 8 // PAGE
            if carray(pointer(seen), (page + 1,), np.uint8)[page] == 0 and not _check_page(
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
    """Move outside[n] closer by a binary search in the keys, to within EVERY entries."""
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
    """Where the query would be inserted. Also sets below[n] and above[n] to the nearest entries on either side that are
    known to match fewer than n tokens."""
    lo, hi = np.int64(0), t[r, COUNT]
    below[:], above[:] = -1, hi
    if t[r, KEYS] != 0:
        lowest, highest = _key_bounds(width, query, len(query))
        first = _first_key(t, r, lowest, np.bool_(False), lo, (hi + EVERY - 1) // EVERY, failed)
        last = _first_key(t, r, highest, np.bool_(True), first, (hi + EVERY - 1) // EVERY, failed)
        lo, hi = max(lo, (first - 1) * EVERY + 1), min(hi, last * EVERY)
        whole = min(8 // width.itemsize, len(query))  # tokens of a key: outside lo..hi fewer match
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
    """The outermost entry that matches at least n tokens. `inside` does; outside[n] and all beyond it don't. Updates
    `outside`. If there are very many matches, a few at the edge may be missed: they count as shorter ones."""
    if t[r, KEYS] != 0 and n <= 8 // width.itemsize:
        _narrow(t, r, width, query, inside, outside, n, failed)
        # Not with removed documents: the few at the edge may be the only ones that are not removed.
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
    """Whether a position was removed: an odd number of starts and ends of removed text lie at or before it."""
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
    """The end of a text, reversed: the last token first. It stops at a token that can't be in a store."""
    size = 0
    while size < min(longest, len(text)) and text[len(text) - 1 - size] >= 0 and text[len(text) - 1 - size] < limit:
        size += 1
    return text[::-1][:size].copy()


@inlined
def _living(t, begin, size, first, last, failed):  # type: ignore[no-untyped-def]
    """The run and position of the first entry among first..last of a shell that was not removed; position -1: none."""
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
    # Entries lo..hi of each run are taken. The next ones on either side match the query in left and right tokens.
    runs = len(t) if len(query) > 0 else 0
    lo, hi = np.empty(runs, np.int64), np.empty(runs, np.int64)
    left, right = np.empty(runs, np.int64), np.empty(runs, np.int64)
    below, above = np.empty((runs, len(query) + 1), np.int64), np.empty((runs, len(query) + 1), np.int64)
    for r in range(runs):
        lo[r] = hi[r] = _insertion_point(t, r, width, query, below[r], above[r], failed)
        left[r] = _agree(t, r, width, query, lo[r] - 1, failed)
        right[r] = _agree(t, r, width, query, hi[r], failed)
    # The shell of one length: a part on the left and one on the right in each run.
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
            if t[r, DEADS] > 0 and _is_dead(t, r, p):  # then another one of the j-th part of the shell
                r, p = _living(t, begin, size, np.int64(j * spacing), np.int64((j + 1) * spacing), failed)
            if p >= 0:
                owner[taken], found[taken], agreed[taken] = r, p, n
                taken += 1
    matches = owner[:taken], found[:taken], agreed[:taken]
    if random:
        _shuffle(matches)
        fit = min(taken, max(1, nodes // length))
        matches = owner[:fit], found[:fit], agreed[:fit]
    _prefetch(t, width, matches, length, failed)
    tokens, parents, raw, score = _tree(t, width, text[-1], matches, length, nodes, failed)
    return tokens, parents, raw, score, lengths[:levels], counts[:levels]


@inlined
def _prefetch(t, width, matches, length, failed):  # type: ignore[no-untyped-def]
    """Check the pages of every continuation, and read its first token. These reads are independent, so their memory
    latencies overlap; building the tree would read them one after the other."""
    total = 0
    for i in range(len(matches[0])):
        r, p = matches[0][i], matches[1][i]
        if _readable(t, r, p, min(p + length, t[r, LENGTH]) - 1, width.itemsize, failed):
            total += carray(pointer(t[r, TOKENS]), (p + 1,), width.dtype)[p]
    return total


@inlined
def _shuffle(matches):  # type: ignore[no-untyped-def]
    """Shuffle with a seed made from the matches, so that the same search gives the same draft."""
    found = matches[1]
    state = np.uint64(len(found))
    for i in range(len(found) - 1, 0, -1):
        state = (state ^ np.uint64(found[i])) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
        j = np.int64((state >> np.uint64(33)) % np.uint64(i + 1))
        for column in matches:
            column[i], column[j] = column[j], column[i]


@compiled
def _next(t, width, matches, i, depth, length):  # type: ignore[no-untyped-def]
    """The token at a depth of the i-th continuation; -1 after its end."""
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
    """The slot of the hash table for the child of a node with this token, filled or free."""
    slot = ((node * 0x9E3779B1 + token * 0x85EBCA77) >> 7) & (len(table) - 1)
    while table[slot] != 0 and (parents[table[slot]] != node or tokens[table[slot]] != token):
        slot = (slot + 1) & (len(table) - 1)
    return slot


@compiled
def _tree(t, width, root, matches, length, nodes, failed):  # type: ignore[no-untyped-def]
    """Merge the continuations' common prefixes, and keep the best nodes, best first.

    A node's mass is the total weight of the matches through it. If there is only one, its children are created when
    they are needed: `tail` of a node is the match that it continues with, -1 if its children exist.
    """
    room = len(matches[0]) * length + nodes + 2
    slots = 16
    while slots < 2 * room:
        slots *= 2
    table = np.zeros(slots, np.int32)  # 0 means free: the root is no child
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
            if tail[child] >= 0:  # a second match: first create the child that the other one continues with
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
    """Remove the best node."""
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
