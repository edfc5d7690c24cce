"""`grow_depth` and `keep_best` in Triton, in one launch each.

A node's rank is the number of nodes that come before it. Each program counts the ranks of a few nodes against all of
the sequence's. So no program waits for another, and nothing is sorted.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.heads.packing import FIRST
from slipstream.kernels.overlap import overlap, wait_turn

# These divide the work among programs and do not change the result.
BLOCK = 16  # nodes per program
OTHERS = 512  # nodes that they are compared with at a time, at most


def grow_rows(
    logp: torch.Tensor,
    ids: torch.Tensor,
    number: torch.Tensor | None,
    names: torch.Tensor | None,
    fixed: torch.Tensor | None,
    nodes: torch.Tensor,
    odds: torch.Tensor,
    start: int,
    width: int,
    every: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `growth.grow_depth`."""
    b, parents, branch = logp.shape
    given = [t for t in (logp, ids, number, names, fixed, nodes, odds) if t is not None]
    assert all(t.is_contiguous() for t in given), "rows lie side by side"
    tokens = torch.empty((b, width), dtype=torch.int64, device=logp.device)
    chain, numbers = torch.empty_like(tokens), torch.empty_like(tokens, dtype=torch.int32)
    # fmt: off
    _grow[(triton.cdiv(parents * branch, BLOCK), b)](
        logp, ids, number, names, fixed, nodes, odds, tokens, chain, numbers, start, nodes.shape[2],
        FOUND=parents * branch, BRANCH=branch, WIDTH=width, PAD_W=triton.next_power_of_2(max(1, width)), EVERY=every,
        BLOCK=BLOCK, OTHERS=min(OTHERS, triton.next_power_of_2(parents * branch)), num_warps=4, **overlap(),
    )
    # fmt: on
    return tokens, chain, numbers


def keep_rows(
    nodes: torch.Tensor, odds: torch.Tensor, members: torch.Tensor | None, first: torch.Tensor | None, count: int
) -> torch.Tensor:
    """See `growth.keep_best`."""
    b, _, found = nodes.shape
    assert all(t.is_contiguous() for t in (nodes, odds, members, first) if t is not None), "rows lie side by side"
    appended = 0 if first is None else first.shape[1]
    packed = torch.empty((b, 3, count + appended), dtype=torch.int32, device=nodes.device)
    # fmt: off
    _keep[(triton.cdiv(found, BLOCK), b)](
        nodes, odds, members, first, packed,
        FOUND=found, COUNT=count, APPENDED=appended, PAD_B=triton.next_power_of_2(max(1, appended)), MARK=FIRST,
        BLOCK=BLOCK, OTHERS=min(OTHERS, triton.next_power_of_2(found)), num_warps=4, **overlap(),
    )
    # fmt: on
    return packed


@triton.jit
def _ahead(values, numbers, value, number):  # type: ignore[no-untyped-def]
    """How many of values (n,) come before each value (m,): larger ones, and equal ones with a smaller number. Padding
    is -inf with the largest numbers, so it comes before nothing."""
    equal = (values[None, :] == value[:, None]) & (numbers[None, :] < number[:, None])
    return tl.sum(((values[None, :] > value[:, None]) | equal).to(tl.int32), 1)


# ---- one depth


@triton.jit
def _found(logp, number, paths, at, FOUND: tl.constexpr, BRANCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the nodes `at`: numbers of their parents, their log-probabilities, and those of their paths."""
    own = tl.load(logp + at, mask=at < FOUND, other=float("-inf"))
    # A child must not be more probable than its parent. NaN, from a head that overflows, counts as impossible.
    own = tl.where(own == own, tl.where(own > 0, 0.0, own), float("-inf"))
    parent, path = tl.zeros_like(at), own
    if number is not None:
        parent = tl.load(number + at // BRANCH, mask=at < FOUND, other=1)
        path = own + tl.load(paths + parent - 1)
    return parent, own, path


# fmt: off
@triton.jit(do_not_specialize=["start"])
def _grow(  # type: ignore[no-untyped-def]
    logp, ids, number, names, fixed, nodes, odds, tokens, chain, numbers, start, total,
    FOUND: tl.constexpr, BRANCH: tl.constexpr, WIDTH: tl.constexpr, PAD_W: tl.constexpr, EVERY: tl.constexpr,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    wait_turn(EARLY)
    block, sequence = tl.program_id(0), tl.program_id(1)
    logp += sequence * FOUND
    if number is not None:
        number += sequence * (FOUND // BRANCH)
    nodes += sequence * 2 * total
    odds += sequence * 2 * total
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < FOUND
    parent, own, path = _found(logp, number, odds + total, at, FOUND, BRANCH)
    token = tl.load(ids + sequence * FOUND + at, mask=there, other=0)
    if names is not None:
        token = tl.load(names + token, mask=there, other=0)

    place = at
    if WIDTH > 0:
        if fixed is None:
            rank = tl.zeros_like(at)
            for begin in range(0, FOUND, OTHERS):
                other = begin + tl.arange(0, OTHERS)
                _, _, value = _found(logp, number, odds + total, other, FOUND, BRANCH)
                rank += _ahead(value, other, path, at)
        else:
            one = tl.arange(0, PAD_W)
            which = tl.load(fixed + one, mask=one < WIDTH, other=-1)
            rank = tl.min(tl.where(which[None, :] == at[:, None], one[None, :], WIDTH), 1)
        chosen = there & (rank < WIDTH)
        if not EVERY:
            place, there = rank, chosen
        tl.store(tokens + sequence * WIDTH + rank, token, mask=chosen)
        tl.store(chain + sequence * WIDTH + rank, (at // BRANCH).to(tl.int64), mask=chosen)
        tl.store(numbers + sequence * WIDTH + rank, 1 + start + place, mask=chosen)

    nodes += start + place
    odds += start + place
    tl.store(nodes, token.to(tl.int32), mask=there)
    tl.store(nodes + total, parent, mask=there)
    tl.store(odds, own, mask=there)
    tl.store(odds + total, path, mask=there)


# ---- the tree


@triton.jit
def _allowed(paths, members, at, there):  # type: ignore[no-untyped-def]
    """Log-probabilities of paths; -inf for nodes that may not be kept."""
    if members is not None:
        there &= tl.load(members + at, mask=there, other=0) != 0
    return tl.load(paths + at, mask=there, other=float("-inf"))


# fmt: off
@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    nodes, odds, members, first, packed,
    FOUND: tl.constexpr, COUNT: tl.constexpr, APPENDED: tl.constexpr, PAD_B: tl.constexpr, MARK: tl.constexpr,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    wait_turn(EARLY)
    block, sequence = tl.program_id(0), tl.program_id(1)
    nodes += sequence * 2 * FOUND
    odds += sequence * 2 * FOUND
    packed += sequence * 3 * (COUNT + APPENDED)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < FOUND
    above = tl.load(nodes + FOUND + at, mask=there, other=0) - 1  # -1: the root
    path = _allowed(odds + FOUND, members, at, there)
    path_above = _allowed(odds + FOUND, members, above, there & (above >= 0))
    # The parent may belong to another program, so its place is counted here once more.
    place, place_above = tl.zeros_like(at), tl.zeros_like(at)
    for begin in range(0, FOUND, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        value = _allowed(odds + FOUND, members, other, other < FOUND)
        place += _ahead(value, other, path, at)
        place_above += _ahead(value, other, path_above, above)
    parent = tl.where(above < 0, 0, 1 + place_above)

    kept = there & (place < COUNT)
    row = COUNT + APPENDED
    own = tl.load(odds + at, mask=there, other=0.0)
    tl.store(packed + place, tl.load(nodes + at, mask=there, other=0), mask=kept)
    tl.store(packed + row + place, tl.where(path > float("-inf"), parent, -1), mask=kept)
    tl.store(packed + 2 * row + place, tl.exp(own).to(tl.int32, bitcast=True), mask=kept)
    if first is not None:
        one = block * PAD_B + tl.arange(0, PAD_B)  # in range in the first program only
        token = tl.load(first + sequence * APPENDED + one, mask=one < APPENDED, other=0)
        tl.store(packed + COUNT + one, token.to(tl.int32), mask=one < APPENDED)
        tl.store(packed + row + COUNT + one, MARK, mask=one < APPENDED)
        tl.store(packed + 2 * row + COUNT + one, MARK, mask=one < APPENDED)
