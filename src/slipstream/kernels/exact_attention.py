"""Attention whose result for a row depends, bit for bit, only on the row's own token path.

Sums in floating point depend on their order, so the order is fixed by absolute position alone. Positions are cut into
blocks of BLOCK, blocks are gathered into splits of SPLIT. A block gives a row its partial (top score, sum of weights,
weighted sum of values); the blocks of a split are merged from left to right; the splits are added up CHUNK at a time,
from left to right. What a row can't see counts as an exact zero wherever it appears. Neither the row's place in batch
and tree, nor its neighbours, nor the columns of its keys, nor the cache's capacity has a say in any of it.

Two launches. The first makes partials. Blocks of committed text alone are the same for all rows of a sequence: a
program reads them once for a tile of rows and merges whole splits. The late blocks, from the committed length on, are
read row by row through the row's path. A position goes from late to committed as the text grows, so both are one code,
told apart by numbers alone: the same instructions on tiles of the same shape. The second launch merges late blocks
into their splits, by the very function that the first one merges with, and adds the splits up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import overlap, wait_turn

# These decide the bits, so none may depend on the number of rows or sequences or on the capacity.
SPLIT = 128  # positions that a program of the first launch merges
BLOCK = 32  # positions scored at once
CHUNK = 8  # splits that the second launch adds up at once
TILE = 16  # rows × grouped heads of one product: the height of a tensor core
WARPS = 2  # of the first launch: how a row's sum of weights is cut up
COMBINING = 1  # warps of the second launch

# These decide who computes what, not the bits.
STAGES = 3  # blocks on their way from memory to a program
SHARED = 512  # about how many programs read committed blocks: more than fill a GPU, few where capacity is unused
OWN = 512  # about how many programs read late blocks: beyond it one takes several key heads

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Scratch:
    """Room for partials. Layers that run one after the other share it, and so do smaller shapes."""

    stats: torch.Tensor  # (b × slots × n × heads × 2) top score and sum of weights
    sums: torch.Tensor  # (b × slots × n × heads × dv) weighted sums of values


def scratch(
    b: int, n: int, heads: int, capacity: int, depth: int, value_dim: int, device: torch.device | str
) -> Scratch:
    """depth: the last size of `paths`. Made outside a captured graph, since a replay must find it where it was."""
    partials = b * (_splits(capacity) + _late_blocks(depth)) * n * heads
    return Scratch(
        torch.empty(partials * 2, dtype=torch.float32, device=device),
        torch.empty(partials * value_dim, dtype=torch.float32, device=device),
    )


def _splits(capacity: int) -> int:
    return -(-capacity // SPLIT)


def _late_blocks(depth: int) -> int:
    """How many blocks `depth` positions can touch, wherever in a block the first of them lies."""
    return (BLOCK - 2 + depth) // BLOCK + 1


def exact_attention(
    query: torch.Tensor,  # (b, heads, n, d)
    keys: torch.Tensor,  # (pool rows, kv heads, capacity, d); columns that no row reads may hold anything
    values: torch.Tensor,  # (pool rows, kv heads, capacity, dv)
    rows: torch.Tensor,  # (b,) int32, each sequence's row of the pool
    lengths: torch.Tensor,  # (b,) int32, committed tokens: position p lies in column p
    depths: torch.Tensor,  # (b, n) int32; a row reads positions 0 .. length + depth. Negative: padding, gives zeros
    paths: torch.Tensor,  # (b, n, D) int32, [s, i, k]: the column of row i's ancestor at depth k, its own at its depth
    scratch: Scratch,
    *,
    scale: float,
    window: int | None = None,  # a row sees the last `window` positions, its own included
    soft_cap: float | None = None,  # a score becomes cap × tanh(score / cap)
) -> torch.Tensor:
    """(b, n, heads, dv). The launches depend on shapes alone: a captured CUDA graph follows the integer tensors."""
    b, heads, n, d = query.shape
    kv_heads, capacity, dv = values.shape[1:]
    groups, late, splits = heads // kv_heads, _late_blocks(paths.shape[2]), _splits(capacity)
    slots = splits + late
    assert heads == groups * kv_heads, "key heads divide the heads among them"
    assert keys.shape == (*values.shape[:3], d), "query, keys and values fit together"
    assert query.dtype == keys.dtype == values.dtype, "query, keys and values have one dtype"
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "a head's numbers lie side by side"
    assert rows.shape == lengths.shape == (b,), "one entry per sequence"
    assert depths.shape == paths.shape[:2] == (b, n), "one entry per row"
    assert {t.dtype for t in (rows, lengths, depths, paths)} == {torch.int32}, "integers have 32 bits"
    assert depths.stride(1) == 1 or n == 1, "a sequence's depths lie side by side"
    assert paths.stride(2) == 1 or paths.shape[2] == 1, "a path's columns lie side by side"
    assert capacity * max(keys.stride(2), values.stride(2)) < 1 << 31, "a sequence's keys lie within 2³¹ numbers"
    assert scratch.sums.numel() >= b * slots * n * heads * dv, "the scratch was made for a smaller shape"
    assert scratch.stats.numel() >= b * slots * n * heads * 2, "the scratch was made for a smaller shape"

    out = torch.empty((b, n, heads, dv), dtype=query.dtype, device=query.device)
    tiles = -(-n * groups // TILE)
    visible = splits if window is None else min(splits, _splits(window) + 1)
    turns = min(visible, -(-SHARED // (tiles * kv_heads * b)))
    span = min(TILE, groups * max(1, b * n * kv_heads // OWN))
    constants = {
        "HEADS": heads,
        "DV": dv,
        "PAD_V": triton.next_power_of_2(max(dv, 16)),
        "BLOCK": BLOCK,
        "SPLIT": SPLIT,
        "WINDOW": window is not None,
        "enable_fp_fusion": False,  # a product and a sum are rounded once only where the code says so, alike everywhere
        **overlap(),
    }
    # fmt: off
    _partials[(tiles * kv_heads * turns + n * -(-heads // span), b)](
        query, keys, values, rows, lengths, depths, paths, scratch.stats, scratch.sums,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], depths.stride(0), *paths.stride()[:2],
        n, slots, splits, tiles, turns, span,
        scale if soft_cap else scale * LOG2_E, soft_cap or 0.0, window or 0,
        GROUPS=groups, DK=d, PAD_K=triton.next_power_of_2(max(d, 16)), TILE=TILE, CAP=bool(soft_cap), STAGES=STAGES,
        # Full precision and large heads need more registers than two warps have.
        num_warps=max(4, WARPS) if query.dtype == torch.float32 or dv > 128 else WARPS,
        **constants,
    )
    _combine[(heads, n, b)](
        lengths, depths, scratch.stats, scratch.sums, out, depths.stride(0), n, slots, splits, window or 0,
        LATE=late, CHUNK=CHUNK, num_warps=COMBINING, **constants,
    )
    # fmt: on
    return out


@triton.jit
def _merge(top1, sum1, acc1, top2, sum2, acc2):  # type: ignore[no-untyped-def]
    """Two partials of the same rows: tops and sums (rows,), acc (rows, dv). One that saw nothing, (-inf, 0, 0), leaves
    the other as it is."""
    top = tl.maximum(top1, top2)
    origin = tl.where(top == float("-inf"), 0.0, top)  # inf - inf is not a number
    weight1, weight2 = tl.exp2(top1 - origin), tl.exp2(top2 - origin)
    acc = tl.fma(acc1, weight1[:, None], acc2 * weight2[:, None])
    return top, tl.fma(sum1, weight1, sum2 * weight2), acc


@triton.jit
def _first_seen(length, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first block that any row of a sequence sees. Deeper rows may see less, which is left to the mask."""
    if WINDOW:
        return tl.maximum(length - window + 1, 0) // BLOCK
    return 0


# Numbers that go with the launch's shape are not specialised: 1 must not lead to other machine code than 2.
# fmt: off
@triton.jit(do_not_specialize=["depth_sequence", "path_sequence", "path_row", "n", "slots", "splits", "tiles", "turns",
                               "span", "window"])
def _partials(  # type: ignore[no-untyped-def]
    query, keys, values, rows, lengths, depths, paths, stats, sums,
    q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head, v_column,  # strides
    depth_sequence, path_sequence, path_row,  # strides
    n, slots, splits, tiles, turns, span, scale, cap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """Shared programs, the first ones: a tile of rows × grouped heads, one key head, every turns-th split of committed
    blocks, one block after the other; into slot `split`. Own programs, the others: one row, `span` heads, every late
    block, one key head after the other; into slots `splits` + the late block's number. A step of either is a product of
    the whole tile with one block of keys; rows of the tile that don't read this key head see nothing in it."""
    PER: tl.constexpr = SPLIT // BLOCK
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    program, sequence = tl.program_id(0), tl.program_id(1)
    wait_turn(EARLY)
    length = tl.load(lengths + sequence)
    whole = length // BLOCK  # blocks of committed text alone
    seen = _first_seen(length, window, BLOCK, WINDOW)

    shared = program < tiles * KV_HEADS * turns
    kv_head, turn = program // tiles % KV_HEADS, program // tiles // KV_HEADS
    own = tl.maximum(program - tiles * KV_HEADS * turns, 0)
    spans = (HEADS + span - 1) // span
    begin_head, node = own % spans * span, own // spans
    end_head = tl.minimum(begin_head + span, HEADS)

    member = tl.arange(0, TILE)
    flat = program % tiles * TILE + member
    row = tl.where(shared, flat // GROUPS, node)  # (TILE,)
    head = tl.where(shared, kv_head * GROUPS + flat % GROUPS, begin_head + member)  # (TILE,)
    valid = (row < n) & (head < tl.where(shared, HEADS, end_head))
    depth = tl.load(depths + sequence * depth_sequence + row, mask=valid, other=-1)
    position = length + depth  # (TILE,)
    deepest = tl.max(depth, 0)
    end = tl.where(shared, whole * BLOCK, length + deepest + 1)  # positions from here on are not read

    begin_slot = tl.where(shared, seen // PER + turn, splits)
    end_slot = tl.where(shared, (whole + PER - 1) // PER, splits + (end + BLOCK - 1) // BLOCK - whole)
    if (begin_slot >= end_slot) | (deepest < 0):
        return

    dk, dv = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
    q_mask = valid[:, None] if DK == PAD_K else valid[:, None] & (dk < DK)
    query += sequence.to(tl.int64) * q_sequence
    q = tl.load(query + ((head * q_head + row * q_row)[:, None] + dk), mask=q_mask, other=0.0)  # (TILE, PAD_K)
    pool_row = tl.load(rows + sequence).to(tl.int64)
    keys += pool_row * k_row
    values += pool_row * v_row
    paths += sequence.to(tl.int64) * path_sequence + node * path_row
    reads = head // GROUPS  # (TILE,) the key head
    onward = tl.where(shared, BLOCK, 0)  # from one step's positions to the next one's

    for slot in range(begin_slot, end_slot, tl.where(shared, turns, 1)):
        block = tl.where(shared, tl.maximum(slot * PER, seen), whole + slot - splits)
        at = block * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,) positions
        ancestor = tl.load(paths + (at - length), mask=(at >= length) & (at < end), other=0)
        column = tl.where(at < length, at, ancestor)  # (BLOCK,)
        first = tl.where(shared, block, begin_head // GROUPS)
        last = tl.where(shared, tl.minimum(slot * PER + PER, whole), (end_head - 1) // GROUPS + 1)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        acc = tl.zeros((TILE, PAD_V), tl.float32)
        for step in tl.range(first, last, num_stages=STAGES):
            read = tl.where(shared, kv_head, step)
            there = (at < end)[:, None]
            k_mask = there if DK == PAD_K else there & (dk < DK)
            v_mask = there if DV == PAD_V else there & (dv < DV)
            key, value = keys + read.to(tl.int64) * k_head, values + read.to(tl.int64) * v_head
            k = tl.load(key + (column[:, None] * k_column + dk), mask=k_mask, other=0.0)  # (BLOCK, PAD_K)
            v = tl.load(value + (column[:, None] * v_column + dv), mask=v_mask, other=0.0)  # (BLOCK, PAD_V)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (TILE, BLOCK)
            if CAP:
                # tanh x = 1 - 2 / (exp 2x + 1), which holds at both ends of the range too. 1.44… is log2 e.
                grown = tl.exp2(scores * (2 * 1.4426950408889634 / cap))
                scores = (1.0 - 2.0 / (grown + 1.0)) * (cap * 1.4426950408889634)
            see = (at <= position[:, None]) & (reads == read)[:, None]
            if WINDOW:
                see &= at > position[:, None] - window
            scores = tl.where(see, scores, float("-inf"))  # in powers of two from here on
            block_top = tl.max(scores, 1)
            origin = tl.where(block_top == float("-inf"), 0.0, block_top)
            weights = tl.exp2(scores - origin[:, None])
            block_acc = tl.dot(weights.to(v.dtype), v, input_precision="ieee")  # (TILE, PAD_V)
            top, total, acc = _merge(top, total, acc, block_top, tl.sum(weights, 1), block_acc)
            at += onward
            column += onward
        inner = row * HEADS + head  # (TILE,)
        place = (sequence.to(tl.int64) * slots + slot) * n * HEADS
        sum_mask = valid[:, None] if DV == PAD_V else valid[:, None] & (dv < DV)
        tl.store(stats + place * 2 + inner * 2, top, mask=valid)
        tl.store(stats + place * 2 + (inner * 2 + 1), total, mask=valid)
        tl.store(sums + place * DV + (inner[:, None] * DV + dv), acc, mask=sum_mask)


# fmt: off
@triton.jit(do_not_specialize=["depth_sequence", "n", "slots", "splits", "window"])
def _combine(  # type: ignore[no-untyped-def]
    lengths, depths, stats, sums, out, depth_sequence, n, slots, splits, window,
    LATE: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, PAD_V: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """One head of one row."""
    PER: tl.constexpr = SPLIT // BLOCK
    head, row, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_turn(EARLY)
    length = tl.load(lengths + sequence)
    depth = tl.load(depths + sequence * depth_sequence + row)
    whole = length // BLOCK
    seen = _first_seen(length, window, BLOCK, WINDOW)
    pitch = n * HEADS  # from one slot to the next
    inner = row * HEADS + head
    stats += (sequence.to(tl.int64) * slots * pitch + inner) * 2
    sums += (sequence.to(tl.int64) * slots * pitch + inner) * DV
    dv = tl.arange(0, PAD_V)
    inside = (dv < DV)[None, :]

    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, PAD_V), tl.float32)
    end = tl.where(depth < 0, 0, (length + depth) // (SPLIT * CHUNK) + 1)
    for chunk in range(seen // (PER * CHUNK), end):
        split = chunk * CHUNK + tl.arange(0, CHUNK)  # (CHUNK,)
        there = (split >= seen // PER) & (split * PER < whole)
        slot = split.to(tl.int64) * pitch
        tops = tl.load(stats + slot * 2, mask=there, other=float("-inf"))
        totals = tl.load(stats + slot * 2 + 1, mask=there, other=0.0)
        accs = tl.load(sums + slot[:, None] * DV + dv, mask=there[:, None] & inside, other=0.0)  # (CHUNK, PAD_V)
        for number in tl.static_range(LATE):
            block = whole + number
            mine = split == tl.where(block * BLOCK <= length + depth, block // PER, -1)  # (CHUNK,) one split, or none
            slot = (split * 0 + splits + number).to(tl.int64) * pitch
            late_tops = tl.load(stats + slot * 2, mask=mine, other=float("-inf"))
            late_totals = tl.load(stats + slot * 2 + 1, mask=mine, other=0.0)
            late_accs = tl.load(sums + slot[:, None] * DV + dv, mask=mine[:, None] & inside, other=0.0)
            tops, totals, accs = _merge(tops, totals, accs, late_tops, late_totals, late_accs)
        new_top = tl.maximum(top, tl.max(tops, 0))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # (1,)
        old, weights = tl.exp2(top - origin), tl.exp2(tops - origin)  # (1,), (CHUNK,)
        total = tl.fma(total, old, tl.sum(totals * weights, 0))
        acc = tl.fma(acc, old[:, None], tl.sum(accs * weights[:, None], 0)[None, :])
        top = new_top
    # Merging a block that the row can't see turns -0 into 0, leaving it out doesn't. So the result is never -0.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] + 0.0
    out += (sequence.to(tl.int64) * pitch + inner) * DV
    tl.store(out + dv[None, :], result.to(out.dtype.element_ty), mask=inside)
