"""Sort the positions of a text by the tokens before them, in bounded memory and on every core.

The order is that of the reversed contexts: of two positions, the one whose previous token is smaller comes first; on a
tie the token before that decides, and so on for DEPTH tokens; then the smaller position. All positions that follow one
n-gram are thus neighbours, for every n at once, and the neighbours of a text's end are its longest matches.

Positions with the same previous token form a bucket. Buckets are sorted separately, a part of them at a time, so a
segment of n tokens needs about n bytes of memory here besides its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from os import sched_getaffinity
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled, inlined

DEPTH = 32  # tokens of context that decide the order
SMALL = 4  # groups up to this size are sorted by comparing whole contexts
SHORT = 20  # at most so many pairs are sorted by insertion
PIECES = 4  # pieces in which a large segment is sorted
LARGE = 1 << 14  # larger groups are first distributed by a digit
DIGITS = 1 << 16

Tokens = NDArray[Any]  # (n,) uint16 or uint32
Positions = NDArray[np.uint32]  # (m,)


def separator(tokens: Tokens) -> int:
    """The token between documents: the largest value of the type, which is no token id."""
    return (1 << 8 * tokens.itemsize) - 1  # np.iinfo takes 3 µs, and this is asked for every run of every text


def cores() -> int:
    return len(sched_getaffinity(0))


def sort_positions(tokens: Tokens, threads: int | None = None) -> Positions:
    """Every position that has a token before it in its own document, in order of the reversed contexts.

    `tokens` begin with DEPTH separators, so that no context reaches beyond the array.
    """
    return np.concatenate([np.empty(0, np.uint32), *sorted_pieces(tokens, threads)])


def sorted_pieces(tokens: Tokens, threads: int | None = None) -> Iterator[Positions]:
    """The same in pieces, one after the other."""
    sep = separator(tokens)
    vocabulary = sep + 1 if sep < 1 << 16 else int(_largest(tokens, sep)) + 2
    shift = _shift(tokens, vocabulary)
    if len(tokens) < 1 << 17:  # not worth the buckets and threads
        yield _sort_all(tokens, sep, shift)
        return
    threads = threads or cores()
    cuts = np.linspace(DEPTH, len(tokens), threads + 1).astype(np.int64)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pairwise(cuts))
        counts = np.stack(list(pool.map(lambda part: _count(tokens, *part, sep, vocabulary), parts)))
        # Buckets by previous token; within a bucket, the first thread's positions come first.
        ends = np.cumsum(counts.sum(axis=0))
        total = int(ends[-1])
        room = max(1 << 16, total // (16 * threads))
        before = np.cumsum(counts, axis=0) - counts  # (threads, vocabulary)
        for first, last in _stretches(ends, max(1 << 20, total // PIECES)):
            base = int(ends[first - 1]) if first else 0
            stops = ends[first:last] - base
            starts = np.concatenate([[0], stops[:-1]])
            offsets = starts + before[:, first:last]
            positions = np.empty(int(stops[-1]), np.uint32)
            scatter = partial(_scatter, tokens, sep, first, last, positions)
            list(pool.map(scatter, cuts[:-1], cuts[1:], offsets))
            tasks = _split(starts, stops, max(1 << 14, len(positions) // (16 * threads)))
            sort = partial(_sort_buckets, tokens, positions, starts, stops, room, shift)
            list(pool.map(sort, *zip(*tasks, strict=True)))
            yield positions


def _shift(tokens: Tokens, vocabulary: int) -> np.uint64:
    """By how many bits a key is shifted to become a digit: its first token, or the first bits of a long one."""
    return np.uint64(64 - 8 * tokens.itemsize + max(0, (vocabulary - 2).bit_length() - DIGITS.bit_length() + 1))


def _stretches(ends: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, last + 1) of buckets with about `size` positions together, or one bucket that has more."""
    first = 0
    while first < len(ends):
        base = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, base + size, side="right")))
        if ends[last - 1] > base:
            yield first, last
        first = last


def count_positions(tokens: Tokens) -> int:
    return int(_sortable(tokens, separator(tokens)))


def _split(starts: NDArray[np.int64], ends: NDArray[np.int64], size: int) -> list[tuple[int, int]]:
    """Ranges of whole buckets of about `size` positions, the largest first, so that threads end at about one time."""
    edges, first = [0], 0
    for bucket in range(len(starts)):
        if ends[bucket] - starts[first] >= size:
            edges.append(bucket + 1)
            first = min(bucket + 1, len(starts) - 1)
    if edges[-1] < len(starts):
        edges.append(len(starts))
    tasks = list(pairwise(edges))
    return sorted(tasks, key=lambda task: starts[task[0]] - ends[task[1] - 1])


@compiled
def _sort_all(tokens, sep, shift):  # type: ignore[no-untyped-def]
    positions, n = np.empty(len(tokens), np.uint32), np.int64(0)
    for p in range(DEPTH, len(tokens)):
        if tokens[p] != sep and tokens[p - 1] != sep:
            positions[n] = p
            n += 1
    _sort_group(tokens, positions, np.int64(0), n, np.int64(0), _buffers(n, shift))
    return positions[:n].copy()


@compiled
def _largest(tokens, sep):  # type: ignore[no-untyped-def]
    most = 0
    for token in tokens:
        if token != sep and token > most:
            most = token
    return most


@compiled
def _count(tokens, lo, hi, sep, vocabulary):  # type: ignore[no-untyped-def]
    counts = np.zeros(vocabulary, np.int64)
    for p in range(lo, hi):
        if tokens[p] != sep and tokens[p - 1] != sep:
            counts[tokens[p - 1]] += 1
    return counts


@compiled
def _sortable(tokens, sep):  # type: ignore[no-untyped-def]
    count = 0
    for p in range(DEPTH, len(tokens)):
        count += tokens[p] != sep and tokens[p - 1] != sep
    return count


@compiled
def _scatter(tokens, sep, first, last, positions, lo, hi, offsets):  # type: ignore[no-untyped-def]
    """Collect the positions of the buckets first..last - 1."""
    for p in range(lo, hi):
        bucket = tokens[p - 1]
        if bucket >= first and bucket < last and tokens[p] != sep and bucket != sep:
            positions[offsets[bucket - first]] = p
            offsets[bucket - first] += 1


@compiled
def _sort_buckets(tokens, positions, starts, ends, room, shift, first, last):  # type: ignore[no-untyped-def]
    buffers = _buffers(room, shift)
    for bucket in range(first, last):
        if ends[bucket] - starts[bucket] > 1:
            _sort_group(tokens, positions, starts[bucket], ends[bucket], np.int64(1), buffers)


@compiled
def context_key(tokens, position, depth):  # type: ignore[no-untyped-def]
    """The next tokens of a reversed context as one number: four of 16 bits or two of 32."""
    at = position - depth - 1
    if tokens.itemsize == 2:
        return (
            (np.uint64(tokens[at]) << np.uint64(48))
            | (np.uint64(tokens[at - 1]) << np.uint64(32))
            | (np.uint64(tokens[at - 2]) << np.uint64(16))
            | np.uint64(tokens[at - 3])
        )
    return (np.uint64(tokens[at]) << np.uint64(32)) | np.uint64(tokens[at - 1])


@compiled
def _buffers(room, shift):  # type: ignore[no-untyped-def]
    """Buffers for the keys of a group, and for distributing a large one by digit; and the shift for that."""
    large = room if room > LARGE else 0
    return np.empty(room, np.uint64), np.empty(large, np.uint64), np.empty(large, np.uint32), shift


@compiled
def _sort_group(tokens, positions, start, end, start_depth, buffers):  # type: ignore[no-untyped-def]
    """Multikey quicksort with cached keys. Positions in [start, end) agree in their first `start_depth` tokens."""
    keys = buffers[0]
    step = 8 // tokens.itemsize
    stack: Any = [(start, end, start_depth)]
    while len(stack) > 0:
        lo, hi, depth = stack.pop()
        if hi - lo <= SMALL:
            _insertion(tokens, positions, lo, hi, depth)
            continue
        if hi - lo > len(keys):  # too many for the buffer: part them in place
            less, more = _part(tokens, positions, lo, hi, depth)
            if less - lo > 1:
                stack.append((lo, less, depth))
            if hi - more > 1:
                stack.append((more, hi, depth))
            if more - less > 1:
                stack.append((less, more, depth + 1))
            continue
        if depth >= DEPTH:  # equal contexts: sort by position
            for i in range(lo, hi):
                keys[i - lo] = positions[i]
            _sort_pairs(keys[: hi - lo], positions[lo:hi])
            continue
        # The last key may reach beyond DEPTH: start it earlier, at tokens that are equal anyway.
        depth = min(depth, DEPTH - step)
        for i in range(lo, hi):
            keys[i - lo] = context_key(tokens, np.int64(positions[i]), depth)
        if hi - lo > LARGE:
            _sort_many(keys[: hi - lo], positions[lo:hi], buffers)
        else:
            _sort_pairs(keys[: hi - lo], positions[lo:hi])
        group = lo
        for i in range(lo + 1, hi + 1):
            if i == hi or keys[i - lo] != keys[group - lo]:
                if i - group > 1:
                    stack.append((group, i, depth + step))
                group = i


@compiled
def precedes(tokens, p, q, depth):  # type: ignore[no-untyped-def]
    """Whether position p comes before q, when their first `depth` tokens are known to agree."""
    for d in range(depth + 1, DEPTH + 1):
        a, b = tokens[p - d], tokens[q - d]
        if a != b:
            return a < b
    return p < q


@compiled
def _insertion(tokens, positions, lo, hi, depth):  # type: ignore[no-untyped-def]
    for i in range(lo + 1, hi):
        p = np.int64(positions[i])
        j = i
        while j > lo and precedes(tokens, p, np.int64(positions[j - 1]), depth):
            positions[j] = positions[j - 1]
            j -= 1
        positions[j] = p


@inlined
def _token(tokens, position, depth):  # type: ignore[no-untyped-def]
    return np.int64(tokens[np.int64(position) - depth - 1]) if depth < DEPTH else np.int64(position)


@compiled
def _part(tokens, positions, lo, hi, depth):  # type: ignore[no-untyped-def]
    """Three-way partition by the token at `depth`, or beyond DEPTH by the position: returns where the equal ones begin
    and end."""
    a = _token(tokens, positions[lo + (hi - lo) // 4], depth)
    b = _token(tokens, positions[lo + (hi - lo) // 2], depth)
    c = _token(tokens, positions[lo + 3 * (hi - lo) // 4], depth)
    pivot = max(min(a, b), min(max(a, b), c))
    less, i, more = lo, lo, hi
    while i < more:
        token = _token(tokens, positions[i], depth)
        if token < pivot:
            positions[less], positions[i] = positions[i], positions[less]
            less += 1
            i += 1
        elif token > pivot:
            more -= 1
            positions[more], positions[i] = positions[i], positions[more]
        else:
            i += 1
    return less, more


@compiled
def _sort_many(keys, values, buffers):  # type: ignore[no-untyped-def]
    """Distribute a large group by the keys' first digit, about the first token; then sort within each digit."""
    _, spare_keys, spare_values, shift = buffers
    ends = np.zeros(DIGITS, np.int64)
    for key in keys:
        ends[min(key >> shift, np.uint64(DIGITS - 1))] += 1
    start = 0
    for digit in range(DIGITS):
        start, ends[digit] = start + ends[digit], start
    for i in range(len(keys)):
        digit = min(keys[i] >> shift, np.uint64(DIGITS - 1))
        spare_keys[ends[digit]], spare_values[ends[digit]] = keys[i], values[i]
        ends[digit] += 1
    for i in range(len(keys)):
        keys[i], values[i] = spare_keys[i], spare_values[i]
    start = 0
    for digit in range(DIGITS):
        if ends[digit] - start > 1:
            _sort_pairs(keys[start : ends[digit]], values[start : ends[digit]])
        start = ends[digit]


@compiled
def _sort_pairs(keys, values):  # type: ignore[no-untyped-def]
    """Quicksort of keys, with values moved along. Unsigned indices save the check for negative ones."""
    one = np.uint64(1)
    if len(keys) <= SHORT:
        _insert_pairs(keys, values, np.uint64(0), np.uint64(len(keys)))
        return
    starts, ends = np.empty(64, np.uint64), np.empty(64, np.uint64)
    starts[0], ends[0], depth = 0, len(keys), 1
    while depth > 0:
        depth -= 1
        lo, hi = starts[depth], ends[depth]
        while hi - lo > np.uint64(SHORT):
            a, b, c = keys[lo], keys[lo + ((hi - lo) >> one)], keys[hi - one]
            pivot = max(min(a, b), min(max(a, b), c))
            i, j = lo, hi - one
            while True:
                while keys[i] < pivot:
                    i += one
                while keys[j] > pivot:
                    j -= one
                if i >= j:
                    break
                keys[i], keys[j] = keys[j], keys[i]
                values[i], values[j] = values[j], values[i]
                i += one
                j -= one
            middle = j + one
            if middle - lo < hi - middle:  # the smaller side first, which keeps the stack small
                starts[depth], ends[depth] = middle, hi
                hi = middle
            else:
                starts[depth], ends[depth] = lo, middle
                lo = middle
            depth += 1
        _insert_pairs(keys, values, lo, hi)


@compiled
def _insert_pairs(keys, values, lo, hi):  # type: ignore[no-untyped-def]
    one = np.uint64(1)
    i = lo + one
    while i < hi:
        key, value = keys[i], values[i]
        j = i
        while j > lo and keys[j - one] > key:
            keys[j], values[j] = keys[j - one], values[j - one]
            j -= one
        keys[j], values[j] = key, value
        i += one
