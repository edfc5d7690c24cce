"""Search on a GPU in three launches, whatever the sizes of the groups, so that a CUDA graph can capture them.

`_project` computes queries from states, in parts. `_scan` divides a group's rows among many programs. Each keeps its
best rows and, once it has enough, publishes the worst of them as a bound for all programs, below which rows are
dropped. So most blocks are dropped by one comparison. `_merge` takes the best of all. A row and its similarity are
packed into one number (`device.packed`): larger is better, and no two are equal.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.datastores.dense.transform import EPSILON, Transform
from slipstream.kernels.overlap import overlap, wait_turn

# These divide the work among programs and do not change the result.
PARTS = 16  # programs that compute one query
BLOCK = 128  # rows that a program compares at a time
WARPS = 4  # of such a program
EACH = 3  # such programs per multiprocessor: as many as run there at a time
MERGED = 1 << 14  # rows that one program can choose from

LOWEST = tl.constexpr(-(1 << 63))  # no row: smaller than any
NOTHING = tl.constexpr(-(1 << 63) + (1 << 20))  # smaller than any row, larger than the numbers for no row
HIGHEST = tl.constexpr((1 << 63) - 1)
SMALL = tl.constexpr(EPSILON)


def nearest_rows(
    transform: Transform, vectors: torch.Tensor, count: int, states: torch.Tensor, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """vectors (n, D) in half precision, states (b, H), bounds (b, 2) int64: the range of rows for each.

    Returns (b, count) int64 in the form of `device.packed`, and the queries (b, D).
    """
    b, hidden = states.shape
    dims, device = vectors.shape[1], vectors.device
    assert vectors.is_contiguous()
    assert states.is_contiguous()
    pad = triton.next_power_of_2(dims)
    programs = max(1, min(EACH * processors(device), MERGED // count))
    sums = torch.empty((b, PARTS, pad), dtype=torch.float32, device=device)
    queries = torch.empty((b, dims), dtype=torch.float32, device=device)
    kept = torch.empty((b, programs, count), dtype=torch.int64, device=device)
    bar = torch.empty((b,), dtype=torch.int64, device=device)
    best = torch.empty((b, count), dtype=torch.int64, device=device)
    fitted = (transform.mean, transform.scale, transform.components)
    _project[(PARTS, b)](states, *fitted, sums, bar, hidden, D=dims, PAD=pad, ROWS=32, PARTS=PARTS, **overlap())
    _scan[(programs, b)](
        sums,
        vectors,
        bounds,
        queries,
        bar,
        kept,
        D=dims,
        PAD=pad,
        K=count,
        KEEP=triton.next_power_of_2(count),
        BLOCK=BLOCK,
        PARTS=PARTS,
        num_warps=WARPS,
        **overlap(),
    )
    wide = triton.next_power_of_2(programs * count)
    _merge[(b,)](kept, best, programs * count, K=count, WIDE=wide, num_warps=8 if wide <= 8192 else 16, **overlap())
    return best, queries


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _project(  # type: ignore[no-untyped-def]
    states,
    mean,
    scale,
    components,
    sums,
    bar,
    hidden,
    D: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_turn(EARLY)
    part, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, PAD)
    if part == 0:
        tl.store(bar + sequence, NOTHING)
    total = tl.zeros((PAD,), tl.float32)
    for start in range(part * ROWS, hidden, PARTS * ROWS):
        h = start + tl.arange(0, ROWS)
        there = h < hidden
        state = tl.load(states + sequence * hidden + h, mask=there, other=0.0).to(tl.float32)
        z = (state - tl.load(mean + h, mask=there, other=0.0)) * tl.load(scale + h, mask=there, other=0.0)
        inside = there[:, None] & (d < D)[None, :]
        weights = tl.load(components + h[:, None] * D + d[None, :], mask=inside, other=0.0)
        total += tl.sum(z[:, None] * weights, 0)
    tl.store(sums + (sequence * PARTS + part) * PAD + d, total)


@triton.jit
def _places(at, d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    return at[:, None].to(tl.int64) * D + d[None, :]


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    sums,
    vectors,
    bounds,
    queries,
    bar,
    kept,
    D: tl.constexpr,
    PAD: tl.constexpr,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_turn(EARLY)
    program, programs, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    d, part, slot = tl.arange(0, PAD), tl.arange(0, PARTS), tl.arange(0, KEEP)
    query = tl.sum(tl.load(sums + (sequence * PARTS + part[:, None]) * PAD + d[None, :]), 0)
    query = query / tl.maximum(tl.sqrt(tl.sum(query * query, 0)), SMALL)
    if program == 0:
        tl.store(queries + sequence * D + d, query, mask=d < D)
    first, last = tl.load(bounds + 2 * sequence), tl.load(bounds + 2 * sequence + 1)
    size = (last - first).to(tl.int32)
    # K slots, each with a different number for no row. The padding to a power of two is never the worst.
    best = tl.where(slot < K, slot.to(tl.int64) + LOWEST, HIGHEST)
    worst = tl.min(best, 0)
    published = worst * 0 + NOTHING
    vectors += first * D
    at = program * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(vectors + _places(at, d, D), mask=(at < size)[:, None] & (d < D)[None, :], other=0.0)
    for start in range(program * BLOCK, size, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = first + at
        ahead = at + programs * BLOCK  # loaded while this block is compared
        inside = (ahead < size)[:, None] & (d < D)[None, :]
        following = tl.load(vectors + _places(ahead, d, D), mask=inside, other=0.0)
        known = tl.load(bar + sequence, volatile=True)  # a lower bound; threads may read different ones
        similarity = tl.sum(block.to(tl.float32) * query[None, :], 1)
        block = following
        bits = similarity.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (order.to(tl.int64) << 32) + (0xFFFFFFFF - row)
        key = tl.where((at < size) & (similarity == similarity), key, LOWEST)  # NaN is never found
        key = tl.where(key >= known, key, LOWEST)
        top = tl.max(key, 0)
        while top > worst:
            key = tl.where(key == top, LOWEST, key)
            best = tl.where(best == worst, top, best)
            worst = tl.min(best, 0)
            top = tl.max(key, 0)
        if worst > published:
            tl.atomic_max(bar + sequence, worst, sem="relaxed")
            published = worst
    tl.store(kept + (sequence * programs + program) * K + slot, best, mask=slot < K)


@triton.jit
def _merge(kept, best, count, K: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_turn(EARLY)
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    key = tl.load(kept + sequence * count + at, mask=at < count, other=LOWEST)
    for i in range(K):
        top = tl.max(key, 0)
        tl.store(best + sequence * K + i, top)
        key = tl.where(key == top, LOWEST, key)
