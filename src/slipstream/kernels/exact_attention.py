"""Attention whose result for a row depends, bit for bit, only on the row's own token path.

Sums in floating point depend on their order, so the order is fixed by absolute position alone. Positions are divided
into blocks of BLOCK, and blocks are grouped into splits. Each block gives a row a partial result (top score, sum of
weights, weighted sum of values). The blocks of a split are merged from left to right, then the splits are. A masked
position adds an exact zero. So the result does not depend on the row's place in the batch or the tree, on the other
rows, on where its keys lie in memory, or on the cache's capacity. Nor does it depend on the height of a tile: tensor
cores compute each row alike, a maximum has no order, and weights are summed pairwise.

First come partials. A block that holds committed text alone is the same for all rows of a sequence: a program reads it
once for a tile of rows, and merges splits that are complete. The tail blocks, from the one that holds the end of the
text on, also hold drafted tokens: they are read row by row, along the row's path. A tail block becomes a text block as
the text grows, and must give the same bits then. So both kinds run the same instructions, and differ in data only. The
last launch merges tail blocks into their splits, then the splits, with the same function that the first one uses.
Tail blocks need low tiles, as a row has few heads: beside higher tiles of text they have a launch of their own.

Text may lie in pages of PAGE positions, anywhere in the cache: a table says where each page of a sequence is.

`block_weights` and `page_shares` are given to measure what the roots attend to. Then the first launch also stores the
weight of each text block for each root, and one more launch turns these into shares per page. Without them the others
run exactly the same instructions.

Programs look up lengths, depths and pages while the launch before theirs still runs. So that one must not write these
integers. In a step it writes queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import fetch_ahead, let_next, overlap, wait_last, wait_turn
from slipstream.kernels.sizes import BLOCK, HIGH, PAGE, TILE, WIDE

# These, BLOCK and PAGE decide the bits, so none may depend on the number of rows or sequences or on the capacity.
# A split is 1 page below page NARROW, 4 pages below page MIDDLE, 16 from there on, so that long texts have few splits.
NARROW, MIDDLE = 64, 256

# These divide the work among programs and do not change the bits.
WARPS = {TILE: 2, WIDE: 4, HIGH: 8}  # of partials: the wide products of a Hopper need four for each 64 rows
TAIL_WARPS = 2  # of tail blocks, where they have a launch of their own
REGISTERS: dict[int, int] = {}  # of a thread, at most
KEPT = (WIDE, HIGH)  # tiles whose merged splits lie in memory, not in registers
CLEAR = ()  # tiles for which blocks that all rows see whole have a loop without masks
COMBINING = 1  # warps of the last launch
STAGES = 3  # blocks that a program loads ahead
SHARED = 512  # at most so many programs share tiles of text blocks: they fill a GPU, few where capacity is unused
CHUNKS = 16, 4  # splits that the last launch loads at a time, while there are more than 4, and then
ROOM = 4096  # rows × heads up to which every split has a slot, however few tiles of a table are in use
FEW = 512  # heads of rows up to which the last launch cuts values into parts of 32
PAGES_AT_ONCE = 32  # pages that shares are added up for at a time
OWN = 512  # about how many programs read tail blocks: above that, a program handles several key heads

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Scratch:
    """Memory for partials. Layers share it, as they run one after the other, and smaller shapes fit in it too."""

    stats: torch.Tensor  # (partials × 2) top score and sum of weights
    sums: torch.Tensor  # (partials × dv) weighted sums of values

    @classmethod
    def of(cls, partials: int, value_dim: int, device: torch.device | str) -> Scratch:
        stats, sums = (torch.empty(partials * m, dtype=torch.float32, device=device) for m in (2, value_dim))
        return cls(stats, sums)


# Whether a program merges the splits of its tile: if several programs share a tile, none can.
NEVER, ALWAYS, ALONE = 0, 1, 2  # ALONE: that is so if the tiles in use are few, which the device sees


@dataclass(frozen=True)
class Launch:
    """How the work of one shape is divided."""

    tiles: int
    programs: int  # that read text, for all tiles and key heads
    splits: int  # slots for partials of text: one for each split; two where one program merges them all
    tail: int  # slots for tail blocks
    merges: int

    @property
    def shared(self) -> int:
        """How many of the programs share tiles."""
        return min(self.programs, SHARED)

    @property
    def slots(self) -> int:
        return self.splits + self.tail

    @classmethod
    def of(
        cls, b: int, n: int, groups: int, kv_heads: int, capacity: int, depth: int, tiles: int = 0, tile: int = TILE
    ) -> Launch:
        """capacity: positions that a sequence may have. tiles: rows of the tile table; 0: each sequence has n rows."""
        splits = split_of(-(-capacity // PAGE) - 1) + 1
        tail = (BLOCK - 2 + depth) // BLOCK + 1  # as many as `depth` positions can touch, from anywhere in a block
        # A table has room for more tiles than are in use, often many more.
        if tiles and n * groups * kv_heads <= ROOM and splits > 1:
            programs = max(tiles * kv_heads, min(SHARED, tiles * kv_heads * splits))
            return cls(tiles, programs, max(2, splits), tail, ALONE)
        tiles = tiles or -(-n * groups // tile)
        fill = SHARED // 2 if tile == HIGH else SHARED  # programs of high tiles are large
        turns = min(splits, max(1, fill // (tiles * kv_heads * b)))
        merges = turns == 1 and splits > 1
        return cls(tiles, tiles * kv_heads * turns, 2 if merges else splits, tail, ALWAYS if merges else NEVER)


def split_of(page: int) -> int:
    """The split that a page of a text belongs to."""
    if page < NARROW:
        return page
    return NARROW + (page - NARROW) // 4 if page < MIDDLE else NARROW + (MIDDLE - NARROW) // 4 + (page - MIDDLE) // 16


def partials(
    b: int, n: int, heads: int, kv_heads: int, capacity: int, depth: int, tiles: int = 0, tile: int = TILE
) -> int:
    """How many partials n rows make."""
    return b * n * heads * Launch.of(b, n, heads // kv_heads, kv_heads, capacity, depth, tiles, tile).slots


def scratch(
    b: int,
    n: int,
    heads: int,
    kv_heads: int,
    capacity: int,
    depth: int,
    value_dim: int,
    device: torch.device | str,
    tiles: int = 0,
    tile: int = TILE,
) -> Scratch:
    """For up to n rows, and paths up to `depth`. Allocated outside a captured graph: a replay needs the same
    addresses."""
    shape = heads, kv_heads, capacity, depth, tiles, tile
    return Scratch.of(max(partials(b, i, *shape) for i in range(n if tiles else 1, n + 1)), value_dim, device)


def exact_attention(
    query: torch.Tensor,  # (b, heads, n, d)
    keys: torch.Tensor,  # (pool rows, kv heads, capacity, d); columns that no row attends to may hold anything
    values: torch.Tensor,  # (pool rows, kv heads, capacity, dv)
    rows: torch.Tensor,  # (b,) or (b, n) int32, each sequence's row of the pool, or of the tables
    lengths: torch.Tensor,  # (b,) or (b, n) int32, tokens of text: position p lies in column p, or where its page is
    # (b, n) int32; a row attends to positions 0 .. length + depth. -1: a row of a prompt, where all of them are text,
    # its own position included. Less: padding, the result is zeros
    depths: torch.Tensor,
    # (b, n, D) int32, [s, i, k]: the column of row i's ancestor at depth k; at its own depth, its own column
    paths: torch.Tensor,
    scratch: Scratch,
    *,
    scale: float,
    window: int | None = None,  # a row sees the last `window` positions, its own included
    soft_cap: float | None = None,  # a score becomes cap × tanh(score / cap)
    tables: torch.Tensor | None = None,  # (·, pages) int32: where each page of a sequence lies in the one row of keys
    # (·, 2) int32, if the one list of rows belongs to several sequences: the first row of the tile's sequence, and the
    # tile's number within that sequence. A negative row: an unused entry
    tiles: torch.Tensor | None = None,
    tile: int = TILE,  # rows × grouped heads of a tile: TILE or WIDE
    block_weights: torch.Tensor | None = None,  # (blocks, n, heads) float32, scratch: log2 of each root's weights
    # (n, heads, pages) float32: each root (a row of depth 0) adds the share of its attention weight on each page
    page_shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """(b, n, heads, dv). Launches depend on shapes alone, so a captured CUDA graph can be replayed with other data."""
    b, heads, n, d = query.shape
    kv_heads, capacity, dv = values.shape[1:]
    groups = heads // kv_heads
    rows, lengths = (x[:, None].expand(b, n) if x.dim() == 1 else x for x in (rows, lengths))
    longest = capacity if tables is None else tables.shape[1] * PAGE
    launch = Launch.of(b, n, groups, kv_heads, longest, paths.shape[2], 0 if tiles is None else len(tiles), tile)
    assert heads == groups * kv_heads, "key heads divide the heads among them"
    assert keys.shape == (*values.shape[:3], d), "query, keys and values fit together"
    assert query.dtype == keys.dtype == values.dtype, "query, keys and values have one dtype"
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "a head's numbers lie side by side"
    assert rows.shape == lengths.shape == depths.shape == paths.shape[:2] == (b, n), "one entry per row"
    assert {t.dtype for t in (rows, lengths, depths, paths)} == {torch.int32}, "integers have 32 bits"
    assert depths.stride(1) == 1 or n == 1, "a sequence's depths lie side by side"
    assert paths.stride(2) == 1 or paths.shape[2] == 1, "a path's columns lie side by side"
    assert rows.stride() == lengths.stride(), "rows and lengths lie alike"
    assert tables is None or (len(keys) == 1 and capacity % PAGE == 0), "pages lie in one row"
    assert tiles is None or b == 1, "tiles of a table belong to one list of rows"
    assert capacity * max(keys.stride(2), values.stride(2)) < 1 << 31, "a row's keys lie within 2³¹ numbers"
    assert scratch.sums.numel() >= b * launch.slots * n * heads * dv, "the scratch was made for a smaller shape"
    assert scratch.stats.numel() >= b * launch.slots * n * heads * 2, "the scratch was made for a smaller shape"
    assert page_shares is None or (b == 1 and page_shares.shape[:2] == (n, heads) and page_shares.is_contiguous()), (
        "one list of rows"
    )
    assert (page_shares is None) == (block_weights is None), "block_weights and page_shares go together"
    assert block_weights is None or block_weights.numel() >= -(-longest // BLOCK) * n * heads, (
        "there is room for every block"
    )

    out = torch.empty((b, n, heads, dv), dtype=query.dtype, device=query.device)
    span = min(TILE, groups * max(1, b * n * kv_heads // OWN))
    wide_v = triton.next_power_of_2(max(dv, 16))
    constants = {
        "HEADS": heads,
        "DV": dv,
        "PAD_V": wide_v,
        "BLOCK": BLOCK,
        "PAGE": PAGE,
        "NARROW": NARROW,
        "MIDDLE": MIDDLE,
        "WINDOW": window is not None,
        "MERGES": launch.merges,
        "ENTRIES": triton.next_power_of_2(launch.tiles) if launch.merges == ALONE else 0,
        "enable_fp_fusion": False,  # only tl.fma rounds a product and a sum once; the compiler must not choose
        **overlap(),
    }
    texts, tails = launch.programs, n * -(-heads // span)
    apart = tile > TILE
    # Programs, the first of those for text, height of a tile, warps.
    launches = [(tails, tails, TILE, TAIL_WARPS), (texts, 0, tile, WARPS[tile])]
    if not apart:
        launches = [(tails + texts, tails, tile, WARPS[tile])]
    for programs, first_text, height, warps in launches:
        is_second = apart and first_text == 0
        # fmt: off
        _partials[(programs, b)](
            query, keys, values, rows, lengths, depths, paths, tables, tiles, scratch.stats, scratch.sums,
            block_weights, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            *rows.stride(), depths.stride(0), *paths.stride()[:2], 0 if tables is None else tables.stride(0),
            n, launch.slots, launch.splits, launch.tiles, launch.shared, span, first_text,
            scale if soft_cap else scale * LOG2_E, soft_cap or 0.0, window or 0,
            GROUPS=groups, DK=d, PAD_K=triton.next_power_of_2(max(d, 16)), TILE=height, CAP=bool(soft_cap),
            STAGES=STAGES, TEXTS=is_second or not apart, TAILS=not is_second,
            KEPT=launch.merges == ALONE or (launch.merges == ALWAYS and height in KEPT),
            CLEAR=height in CLEAR,
            # float32 and large heads need more registers than two warps have.
            num_warps=max(4, warps) if query.dtype == torch.float32 or dv > 128 else warps,
            **({"maxnreg": REGISTERS[height]} if height in REGISTERS else {}),
            **constants,
        )
        # fmt: on
    part = min(wide_v, 32 if heads * n * b <= FEW else 128)
    # fmt: off
    _combine[(heads * (wide_v // part), n, b)](
        lengths, depths, tiles, scratch.stats, scratch.sums, out, *lengths.stride(), depths.stride(0),
        n, launch.slots, launch.splits, launch.tiles, launch.shared, window or 0, KV_HEADS=kv_heads,
        TAIL=launch.tail, PART=part, LARGE=CHUNKS[0], SMALL=CHUNKS[1], num_warps=COMBINING, **constants,
    )
    if page_shares is not None:
        _share[(heads, n)](
            lengths, depths, scratch.stats, block_weights, page_shares, lengths.stride(1), n, launch.splits,
            window or 0, page_shares.shape[2], HEADS=heads, BLOCK=BLOCK, PAGE=PAGE, WINDOW=window is not None,
            PAGES=PAGES_AT_ONCE, num_warps=COMBINING, **overlap(),
        )
    # fmt: on
    return out


@triton.jit
def _merge(top1, sum1, acc1, top2, sum2, acc2):  # type: ignore[no-untyped-def]
    """Merge two partials of the same rows: tops and sums (rows,), acc (rows, dv). An empty partial, (-inf, 0, 0),
    leaves the other unchanged."""
    top = tl.maximum(top1, top2)
    origin = tl.where(top == float("-inf"), 0.0, top)  # inf - inf is not a number
    weight1, weight2 = tl.exp2(top1 - origin), tl.exp2(top2 - origin)
    acc = tl.fma(acc1, weight1[:, None], acc2 * weight2[:, None])
    return top, tl.fma(sum1, weight1, sum2 * weight2), acc


# fmt: off
@triton.jit
def _take(  # type: ignore[no-untyped-def]
    q, k, v, see, top, total, acc, scale, cap,
    TILE: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    """Add one block to the partial of rows q (TILE, dk): k (BLOCK, dk), v (BLOCK, dv), see (TILE, BLOCK) is the mask.
    Also returns the block's own top score and sum of weights."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (TILE, BLOCK)
    if CAP:
        # tanh x = 1 - 2 / (exp 2x + 1), which is right at both ends of the range too. 1.44… is log2 e.
        grown = tl.exp2(scores * (2 * 1.4426950408889634 / cap))
        scores = (1.0 - 2.0 / (grown + 1.0)) * (cap * 1.4426950408889634)
    if MASKED:
        scores = tl.where(see, scores, float("-inf"))  # logarithms to base 2 from here on
    block_top = tl.max(scores, 1)
    origin = tl.where(block_top == float("-inf"), 0.0, block_top)
    weights = tl.exp2(scores - origin[:, None])
    block_acc = tl.dot(weights.to(v.dtype), v, input_precision="ieee")  # (TILE, PAD_V)
    block_total = _sum(weights, TILE, BLOCK)
    top, total, acc = _merge(top, total, acc, block_top, block_total, block_acc)
    return top, total, acc, block_top, block_total


@triton.jit
def _sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each row. Each call adds two numbers, so the order does not depend on which thread holds which."""
    x = tl.sum(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), 1)  # within a thread
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 4, 2)), 2)  # within a thread
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 8, 2)), 2)  # between threads of a warp
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 16, 2)), 2)
    tl.static_assert(COLUMNS == 32)
    return tl.sum(x, 1)  # possibly between warps


@triton.jit
def _split_of(page, NARROW: tl.constexpr, MIDDLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """See `split_of`."""
    middle = NARROW + (tl.minimum(page, MIDDLE) - NARROW) // 4
    return tl.where(page < NARROW, page, middle + tl.maximum(page - MIDDLE, 0) // 16)


@triton.jit
def _first_page(split, NARROW: tl.constexpr, MIDDLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first page of a split."""
    LAST: tl.constexpr = NARROW + (MIDDLE - NARROW) // 4  # the first split of 16 pages
    return tl.where(
        split < NARROW, split, tl.where(split < LAST, NARROW + (split - NARROW) * 4, MIDDLE + (split - LAST) * 16)
    )


@triton.jit
def _turns(tile_table, tiles, programs, KV_HEADS: tl.constexpr, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tiles are in use, and how many programs share each of them with each of its key heads. ENTRIES: room
    for the entries of a table that may have unused ones; 0: all are in use."""
    if ENTRIES > 0:
        entry = tl.arange(0, ENTRIES)
        begins = tl.load(tile_table + entry * 2, mask=entry < tiles, other=-1)
        tiles = tl.maximum(tl.sum((begins >= 0).to(tl.int32), 0), 1)
    return tiles, tl.maximum(programs // (tiles * KV_HEADS), 1)


@triton.jit
def _text_blocks(length, depth, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many text blocks a row has. A row of a prompt (depth < 0) reads the last, unfinished one as text too; other
    rows read it as a tail block."""
    return tl.where(depth < 0, length + BLOCK - 1, length) // BLOCK


@triton.jit
def _first_seen(length, depth, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first block that a row with this window needs to read. The depth of a drafted row counts as 0: deeper rows
    may need fewer blocks, and the mask leaves out the rest."""
    if WINDOW:
        return tl.maximum(length + tl.minimum(depth, 0) - window + 1, 0) // BLOCK
    return length * 0


# fmt: off
@triton.jit
def _read(  # type: ignore[no-untyped-def]
    begin, stop, end_block, end, here, split, complete, first_split, top, total, acc, all_top, all_total, all_acc,
    q, key, value, k_column, v_column, tables, position, depth, valid, stat, wide_sum, inner, pitch, block_weights,
    turns, scale, cap, window,
    DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, NARROW: tl.constexpr, MIDDLE: tl.constexpr,
    WINDOW: tl.constexpr, MERGES: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
    KEPT: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    """Text blocks begin .. stop of a tile, one after the other. Each split is stored or merged at its end. MASKED: some
    row may not see all of them."""
    PER: tl.constexpr = PAGE // BLOCK
    dk, dv = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
    sum_mask = valid[:, None] if DV == PAD_V else valid[:, None] & (dv < DV)
    for block in tl.range(begin, stop, num_stages=STAGES):
        page = block // PER
        at = block * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,) positions
        column = here * PAGE + (at - page * PAGE)
        there = (at < end)[:, None]
        k_mask = there if DK == PAD_K else there & (dk < DK)
        v_mask = there if DV == PAD_V else there & (dv < DV)
        k = tl.load(key + (column[:, None] * k_column + dk), mask=k_mask, other=0.0)  # (BLOCK, PAD_K)
        v = tl.load(value + (column[:, None] * v_column + dv), mask=v_mask, other=0.0)  # (BLOCK, PAD_V)
        see = at <= position[:, None]
        if WINDOW:
            see &= at > position[:, None] - window
        top, total, acc, block_top, block_total = _take(
            q, k, v, see, top, total, acc, scale, cap, TILE, BLOCK, CAP, MASKED
        )
        if block_weights is not None:  # -inf, the logarithm of 0, if the row attends to nothing in the block
            tl.store(
                block_weights + (block * pitch + inner),
                block_top + tl.log2(block_total),
                mask=valid & (depth == 0),
            )
        next_page = tl.minimum(block + 1, end_block - 1) // PER
        here = next_page
        if tables is not None:  # loaded a block ahead, to hide its latency
            here = tl.load(tables + next_page)
        following = _split_of((block + 1) // PER, NARROW, MIDDLE)
        if (following != split) | (block + 1 == end_block):
            if (MERGES > 0) & (split < complete):
                if KEPT:  # in slot 0
                    begun = tl.where(valid, split, first_split) != first_split  # (TILE,)
                    sum_begun = begun[:, None] if DV == PAD_V else begun[:, None] & (dv < DV)
                    old_top = tl.load(stat, mask=begun, other=float("-inf"))
                    old_total = tl.load(stat + 1, mask=begun, other=0.0)
                    old_acc = tl.load(wide_sum, mask=sum_begun, other=0.0)
                    old_top, old_total, old_acc = _merge(old_top, old_total, old_acc, top, total, acc)
                    tl.debug_barrier()  # whoever loads a number need not be who stores it
                    tl.store(stat, old_top, mask=valid)
                    tl.store(stat + 1, old_total, mask=valid)
                    tl.store(wide_sum, old_acc, mask=sum_mask)
                    tl.debug_barrier()
                else:
                    all_top, all_total, all_acc = _merge(all_top, all_total, all_acc, top, total, acc)
            else:
                slot = split
                if MERGES > 0:
                    slot = tl.where(turns == 1, 1, split)
                to = slot * pitch
                tl.store(stat + to * 2, top, mask=valid)
                tl.store(stat + (to * 2 + 1), total, mask=valid)
                tl.store(wide_sum + to * DV, acc, mask=sum_mask)
            top = tl.full((TILE,), float("-inf"), tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            acc = tl.zeros((TILE, PAD_V), tl.float32)
            split = following
    return here, split, top, total, acc, all_top, all_total, all_acc


# fmt: off
@triton.jit
def _text(  # type: ignore[no-untyped-def]
    program, sequence,
    query, keys, values, rows, lengths, depths, tables, tile_table, stats, sums, block_weights,
    q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head, v_column,  # strides
    row_row, depth_sequence, table_row,  # strides
    n, slots, tiles, programs, scale, cap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    NARROW: tl.constexpr, MIDDLE: tl.constexpr,
    WINDOW: tl.constexpr, MERGES: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    KEPT: tl.constexpr, CLEAR: tl.constexpr, ENTRIES: tl.constexpr,
):
    # fmt: on
    """Text blocks: a tile of rows × grouped heads, one key head, some splits, block after block. Each split is stored
    in slot `split`; or, if this program alone has the tile and merges, all complete splits in slot 0 and the last,
    incomplete one in slot 1."""
    PER: tl.constexpr = PAGE // BLOCK
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    tiles, turns = _turns(tile_table, tiles, programs, KV_HEADS, ENTRIES)
    kv_head, turn = program // tiles % KV_HEADS, program // tiles // KV_HEADS
    begin_row, tile = 0, program % tiles
    if tile_table is not None:
        begin_row = tl.load(tile_table + tile * 2)
        tile = tl.load(tile_table + tile * 2 + 1)
        begin_row = tl.where(begin_row < 0, n, begin_row)  # an unused entry has no rows
    pool_row = tl.load(rows + tl.minimum(begin_row, n - 1) * row_row)
    flat = tile * TILE + tl.arange(0, TILE)
    row = begin_row + flat // GROUPS  # (TILE,)
    head = kv_head * GROUPS + flat % GROUPS  # (TILE,)
    valid = row < n
    if tile_table is not None:
        valid &= tl.load(rows + row * row_row, mask=valid, other=-1) == pool_row
    depth = tl.load(depths + sequence * depth_sequence + row, mask=valid, other=-2)
    valid &= depth > -2
    length = tl.load(lengths + row * row_row, mask=valid, other=0)  # (TILE,)
    position = tl.where(valid, length + depth, -1)  # (TILE,)
    text = tl.where(valid, _text_blocks(length, depth, BLOCK), 0)  # (TILE,) blocks
    seen = tl.min(tl.where(valid, _first_seen(length, depth, window, BLOCK, WINDOW), 1 << 30), 0)
    whole, last_position = tl.max(text, 0), tl.max(position, 0)
    end = tl.minimum(whole * BLOCK, last_position + 1)  # exclusive

    # Ranges of about equal length, cut at the boundaries of splits.
    begin_page, end_page = seen // PER, (whole + PER - 1) // PER
    cut = begin_page + (end_page - begin_page) * turn // turns
    next_cut = begin_page + (end_page - begin_page) * (turn + 1) // turns
    cut = tl.maximum(_first_page(_split_of(cut, NARROW, MIDDLE), NARROW, MIDDLE), begin_page)
    next_cut = tl.maximum(_first_page(_split_of(next_cut, NARROW, MIDDLE), NARROW, MIDDLE), begin_page)
    begin_block = tl.maximum(cut * PER, seen)
    end_block = tl.where(turn + 1 == turns, whole, tl.minimum(next_cut * PER, whole))
    if (last_position >= 0) & (begin_block < end_block) & (turn < turns):
        dk, dv = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
        if tables is None:
            keys += pool_row.to(tl.int64) * k_row
            values += pool_row.to(tl.int64) * v_row
        else:
            tables += pool_row.to(tl.int64) * table_row
        key, value = keys + kv_head.to(tl.int64) * k_head, values + kv_head.to(tl.int64) * v_head
        here = begin_block // PER  # where the page lies
        if tables is not None:
            here = tl.load(tables + begin_block // PER)
        if EARLY:
            ahead = here * PAGE + tl.minimum(begin_block % PER * BLOCK + tl.arange(0, PAGE), PAGE - 1)
            fetch_ahead(key + (ahead[:, None] * k_column + tl.arange(0, (PAD_K + 63) // 64)[None, :] * 64))
            fetch_ahead(value + (ahead[:, None] * v_column + tl.arange(0, (PAD_V + 63) // 64)[None, :] * 64))
        wait_turn(EARLY)
        q_mask = valid[:, None] if DK == PAD_K else valid[:, None] & (dk < DK)
        query += sequence.to(tl.int64) * q_sequence
        q = tl.load(query + ((head * q_head + row * q_row)[:, None] + dk), mask=q_mask, other=0.0)  # (TILE, PAD_K)
        stats += sequence.to(tl.int64) * slots * n * HEADS * 2
        sums += sequence.to(tl.int64) * slots * n * HEADS * DV
        pitch = n.to(tl.int64) * HEADS  # from one slot to the next
        inner = row * HEADS + head  # (TILE,)
        stat, wide_sum = stats + inner * 2, sums + (inner[:, None] * DV + dv)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        acc = tl.zeros((TILE, PAD_V), tl.float32)
        # A split is complete if no tail block belongs to it.
        complete = -1
        if MERGES > 0:
            tail = tl.max(tl.where(valid, depth, -1), 0) >= 0
            ended = _split_of((whole - 1) // PER, NARROW, MIDDLE) + 1
            complete = tl.where(tail, _split_of(whole // PER, NARROW, MIDDLE), ended)
            complete = tl.where(turns == 1, complete, -1)
        all_top, all_total, all_acc = top, total, acc
        if KEPT:
            all_acc = total
        split = _split_of(begin_block // PER, NARROW, MIDDLE)
        first_split, clear = split, begin_block
        # fmt: off
        if CLEAR and not WINDOW:
            least = tl.min(tl.where(valid, position, 1 << 30), 0)
            clear = tl.maximum(tl.minimum((least + 1) // BLOCK, end_block), begin_block)
            here, split, top, total, acc, all_top, all_total, all_acc = _read(
                begin_block, clear, end_block, end, here, split, complete, first_split, top, total, acc,
                all_top, all_total, all_acc, q, key, value, k_column, v_column, tables, position, depth, valid,
                stat, wide_sum, inner, pitch, block_weights, turns, scale, cap, window, DK, DV, PAD_K, PAD_V, TILE,
                BLOCK, PAGE, NARROW, MIDDLE, WINDOW, MERGES, CAP, STAGES, KEPT, False,
            )
        here, split, top, total, acc, all_top, all_total, all_acc = _read(
            clear, end_block, end_block, end, here, split, complete, first_split, top, total, acc,
            all_top, all_total, all_acc, q, key, value, k_column, v_column, tables, position, depth, valid,
            stat, wide_sum, inner, pitch, block_weights, turns, scale, cap, window, DK, DV, PAD_K, PAD_V, TILE,
            BLOCK, PAGE, NARROW, MIDDLE, WINDOW, MERGES, CAP, STAGES, KEPT, True,
        )
        # fmt: on
        if MERGES > 0 and not KEPT:
            tl.store(stat, all_top, mask=valid)
            tl.store(stat + 1, all_total, mask=valid)
            tl.store(wide_sum, all_acc, mask=valid[:, None] if DV == PAD_V else valid[:, None] & (dv < DV))


# fmt: off
@triton.jit
def _tail(  # type: ignore[no-untyped-def]
    program, sequence,
    query, keys, values, rows, lengths, depths, paths, tables, stats, sums,
    q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head, v_column,  # strides
    row_row, depth_sequence, path_sequence, path_row, table_row,  # strides
    n, slots, splits, span, scale, cap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """Tail blocks: one row, `span` heads, every tail block, one key head after the other. Tail block i is stored in
    slot `splits` + i. Each time the whole tile is multiplied; its rows that belong to another key head are masked."""
    PER: tl.constexpr = PAGE // BLOCK
    spans = (HEADS + span - 1) // span
    begin_head, row = program % spans * span, program // spans
    end_head = tl.minimum(begin_head + span, HEADS)
    pool_row = tl.load(rows + row * row_row)
    depth = tl.load(depths + sequence * depth_sequence + row)
    length = tl.load(lengths + row * row_row)
    position = length + depth
    whole = _text_blocks(length, depth, BLOCK)
    end = position + 1
    if depth >= 0:  # all blocks of a prompt's row are text
        wait_turn(EARLY)
        head = begin_head + tl.arange(0, TILE)
        valid = head < end_head
        dk, dv = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
        q_mask = valid[:, None] if DK == PAD_K else valid[:, None] & (dk < DK)
        query += sequence.to(tl.int64) * q_sequence
        q = tl.load(query + ((head * q_head + row * q_row)[:, None] + dk), mask=q_mask, other=0.0)  # (TILE, PAD_K)
        if tables is None:
            keys += pool_row.to(tl.int64) * k_row
            values += pool_row.to(tl.int64) * v_row
        else:
            tables += pool_row.to(tl.int64) * table_row
        paths += sequence.to(tl.int64) * path_sequence + row * path_row
        stats += sequence.to(tl.int64) * slots * n * HEADS * 2
        sums += sequence.to(tl.int64) * slots * n * HEADS * DV
        pitch = n.to(tl.int64) * HEADS  # from one slot to the next
        inner = row * HEADS + head  # (TILE,)
        stat, wide_sum = stats + inner * 2, sums + (inner[:, None] * DV + dv)
        sum_mask = valid[:, None] if DV == PAD_V else valid[:, None] & (dv < DV)
        reads = head // GROUPS  # (TILE,) each row's key head
        zero = tl.zeros((), tl.int64)  # 64 bits: keys of a head may lie 2³¹ numbers after those of the first
        for block in range(whole, (end + BLOCK - 1) // BLOCK):
            page = block // PER
            at = block * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,) positions
            here = page
            if tables is not None:
                here = tl.load(tables + page, mask=page * PAGE < length, other=0)
            is_text = at < length
            ancestor = tl.load(paths + (at - length), mask=(is_text == 0) & (at < end), other=0)
            column = tl.where(is_text, here * PAGE + (at - page * PAGE), ancestor)  # (BLOCK,)
            there = (at < end)[:, None]
            k_mask = there if DK == PAD_K else there & (dk < DK)
            v_mask = there if DV == PAD_V else there & (dv < DV)
            top = tl.full((TILE,), float("-inf"), tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            acc = tl.zeros((TILE, PAD_V), tl.float32)
            for read in tl.range(begin_head // GROUPS, (end_head - 1) // GROUPS + 1, num_stages=STAGES):
                key, value = keys + (zero + read) * k_head, values + (zero + read) * v_head
                k = tl.load(key + (column[:, None] * k_column + dk), mask=k_mask, other=0.0)  # (BLOCK, PAD_K)
                v = tl.load(value + (column[:, None] * v_column + dv), mask=v_mask, other=0.0)  # (BLOCK, PAD_V)
                see = (at <= position)[None, :] & (reads == read)[:, None]
                if WINDOW:
                    see &= (at > position - window)[None, :]
                top, total, acc, _, _ = _take(q, k, v, see, top, total, acc, scale, cap, TILE, BLOCK, CAP, True)
            to = (splits + block - whole) * pitch
            tl.store(stat + to * 2, top, mask=valid)
            tl.store(stat + (to * 2 + 1), total, mask=valid)
            tl.store(wide_sum + to * DV, acc, mask=sum_mask)


# Numbers that depend on the launch's shape are not specialised: 1 must not compile to other machine code than 2.
# fmt: off
@triton.jit(do_not_specialize=["row_sequence", "row_row", "depth_sequence", "path_sequence", "path_row", "table_row",
                               "n", "slots", "splits", "tiles", "programs", "span", "first_text", "window"])
def _partials(  # type: ignore[no-untyped-def]
    query, keys, values, rows, lengths, depths, paths, tables, tile_table, stats, sums, block_weights,
    q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head, v_column,  # strides
    row_sequence, row_row, depth_sequence, path_sequence, path_row, table_row,  # strides
    n, slots, splits, tiles, programs, span, first_text, scale, cap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    NARROW: tl.constexpr, MIDDLE: tl.constexpr,
    WINDOW: tl.constexpr, MERGES: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    TEXTS: tl.constexpr, TAILS: tl.constexpr, KEPT: tl.constexpr, CLEAR: tl.constexpr, ENTRIES: tl.constexpr,
):
    # fmt: on
    """Partials: of tail blocks if TAILS, by the first programs, then of text blocks if TEXTS. About `programs` programs
    share the tiles of text and their key heads."""
    program, sequence = tl.program_id(0), tl.program_id(1)
    # Text after a launch of tail blocks need not wait for that one: when it may begin, all launches before have ended.
    WAITS: tl.constexpr = EARLY and TAILS
    if not TAILS:
        let_next(EARLY)
    rows += sequence * row_sequence
    lengths += sequence * row_sequence
    # fmt: off
    if TAILS:  # noqa: SIM102
        if program < first_text:
            _tail(
                program, sequence, query, keys, values, rows, lengths, depths, paths, tables, stats, sums,
                q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head, v_column,
                row_row, depth_sequence, path_sequence, path_row, table_row,
                n, slots, splits, span, scale, cap, window,
                HEADS, GROUPS, DK, DV, PAD_K, PAD_V, TILE, BLOCK, PAGE, WINDOW, CAP, STAGES, WAITS,
            )
    if TEXTS:  # noqa: SIM102
        if program >= first_text:
            _text(
                program - first_text, sequence, query, keys, values, rows, lengths, depths, tables, tile_table,
                stats, sums, block_weights, q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head,
                v_column, row_row, depth_sequence, table_row, n, slots, tiles, programs, scale, cap, window,
                HEADS, GROUPS, DK, DV, PAD_K, PAD_V, TILE, BLOCK, PAGE, NARROW, MIDDLE, WINDOW, MERGES, CAP, STAGES,
                WAITS, KEPT, CLEAR, ENTRIES,
            )
    # fmt: on
    wait_last(EARLY)


@triton.jit
def _fold(top, total, acc, stats, sums, first, last, pitch, dv, inside, DV: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merge CHUNK splits from `first` on, those before `last`, one after the other. All are loaded before any is
    merged."""
    one = tl.arange(0, 1)
    tops, totals, accs = (), (), ()
    for i in tl.static_range(CHUNK):
        there = first + i + one < last  # (1,)
        slot = (first + i) * pitch
        tops += (tl.load(stats + slot * 2 + one, mask=there, other=float("-inf")),)  # type: ignore[assignment]
        totals += (tl.load(stats + slot * 2 + 1 + one, mask=there, other=0.0),)  # type: ignore[assignment]
        accs += (tl.load(sums + slot * DV + dv, mask=there[:, None] & inside, other=0.0),)  # type: ignore[assignment]
    for i in tl.static_range(CHUNK):
        top, total, acc = _merge(top, total, acc, tops[i], totals[i], accs[i])
    return top, total, acc


# fmt: off
@triton.jit(do_not_specialize=["row_sequence", "row_row", "depth_sequence", "n", "slots", "splits", "tiles", "programs",
                               "window"])
def _combine(  # type: ignore[no-untyped-def]
    lengths, depths, tile_table, stats, sums, out, row_sequence, row_row, depth_sequence,
    n, slots, splits, tiles, programs, window, KV_HEADS: tl.constexpr, ENTRIES: tl.constexpr,
    TAIL: tl.constexpr, PART: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
    HEADS: tl.constexpr, DV: tl.constexpr, PAD_V: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, NARROW: tl.constexpr, MIDDLE: tl.constexpr,
    WINDOW: tl.constexpr, MERGES: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """Merge the partials of one head of one row, PART of its values: text splits first, then the splits that have tail
    blocks."""
    PER: tl.constexpr = PAGE // BLOCK
    PARTS: tl.constexpr = PAD_V // PART
    head, row, sequence = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence * row_sequence + row * row_row)
    depth = tl.load(depths + sequence * depth_sequence + row)
    position = length + depth
    whole = _text_blocks(length, depth, BLOCK)
    seen = _first_seen(length, depth, window, BLOCK, WINDOW)
    pitch = n.to(tl.int64) * HEADS  # from one slot to the next
    inner = row * HEADS + head
    stats += (sequence.to(tl.int64) * slots * pitch + inner) * 2
    sums += (sequence.to(tl.int64) * slots * pitch + inner) * DV
    dv = (tl.program_id(0) % PARTS * PART + tl.arange(0, PART))[None, :]
    inside = dv < DV

    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, PART), tl.float32)
    one = tl.arange(0, 1)
    begin = _split_of(seen // PER, NARROW, MIDDLE)
    text_splits = tl.where(whole > seen, _split_of(tl.maximum(whole - 1, 0) // PER, NARROW, MIDDLE) + 1, 0)
    complete = tl.where(depth >= 0, _split_of(whole // PER, NARROW, MIDDLE), text_splits)
    padding = depth < -1
    last = tl.where(padding, 0, complete)
    apart = begin  # the first split of those that lie in slots of their own
    turns = 1
    if MERGES > 0:
        _, turns = _turns(tile_table, tiles, programs, KV_HEADS, ENTRIES)
        apart = tl.where(turns == 1, tl.maximum(begin, last), begin)
    wait_turn(EARLY)
    if MERGES > 0:
        there = tl.minimum(apart, last) + one > begin  # (1,)
        top = tl.load(stats + one, mask=there, other=float("-inf"))
        total = tl.load(stats + one + 1, mask=there, other=0.0)
        acc = tl.load(sums + dv, mask=there[:, None] & inside, other=0.0)
    if MERGES != 1:
        large = tl.maximum(last - apart + LARGE - SMALL - 1, 0) // LARGE * LARGE
        for first in range(apart, apart + large, LARGE):
            top, total, acc = _fold(top, total, acc, stats, sums, first, last, pitch, dv, inside, DV, LARGE)
        for first in range(apart + large, last, SMALL):
            top, total, acc = _fold(top, total, acc, stats, sums, first, last, pitch, dv, inside, DV, SMALL)
    # The splits that have tail blocks.
    end = tl.where(padding | (depth < 0), 0, _split_of(tl.maximum(position, 0) // PAGE, NARROW, MIDDLE) + 1)
    for split in range(tl.maximum(complete, begin), end):
        there = split + one < text_splits  # (1,)
        slot = split * pitch
        if MERGES > 0:
            slot = tl.where(turns == 1, 1, split) * pitch
        part_top = tl.load(stats + slot * 2 + one, mask=there, other=float("-inf"))
        part_total = tl.load(stats + slot * 2 + 1 + one, mask=there, other=0.0)
        part_acc = tl.load(sums + slot * DV + dv, mask=there[:, None] & inside, other=0.0)
        for number in tl.static_range(TAIL):
            block = whole + number + one  # (1,)
            mine = (block * BLOCK <= position) & (_split_of(block // PER, NARROW, MIDDLE) == split)
            slot = (splits + number) * pitch
            tail_top = tl.load(stats + slot * 2 + one, mask=mine, other=float("-inf"))
            tail_total = tl.load(stats + slot * 2 + 1 + one, mask=mine, other=0.0)
            tail_acc = tl.load(sums + slot * DV + dv, mask=mine[:, None] & inside, other=0.0)
            part_top, part_total, part_acc = _merge(part_top, part_total, part_acc, tail_top, tail_total, tail_acc)
        top, total, acc = _merge(top, total, acc, part_top, part_total, part_acc)
    # Merging a masked block turns -0 into 0, skipping it does not. Adding 0 makes both 0.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] + 0.0
    out += (sequence.to(tl.int64) * pitch + inner) * DV
    tl.store(out + dv, result.to(out.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["row_row", "n", "splits", "window", "pages"])
def _share(  # type: ignore[no-untyped-def]
    lengths, depths, stats, block_weights, page_shares, row_row, n, splits, window, pages,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, PAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    # fmt: on
    """One head of one row, if that row is a root: add its share of attention weight on each page to that of the other
    layers. The shares of a layer sum to 1. A root has exactly one tail block, the one where the text ends; the weights
    of its text blocks are in `block_weights`."""
    PER: tl.constexpr = PAGE // BLOCK
    head, row = tl.program_id(0), tl.program_id(1)
    wait_turn(EARLY)
    depth = tl.load(depths + row)
    if depth != 0:
        return
    length = tl.load(lengths + row * row_row)
    whole = length // BLOCK  # the number of the tail block
    seen = _first_seen(length, depth, window, BLOCK, WINDOW)
    pitch = n.to(tl.int64) * HEADS
    inner = row * HEADS + head
    tail = stats + (splits * pitch + inner) * 2
    tail = tl.load(tail) + tl.log2(tl.load(tail + 1))  # log2 of its weight, like all weights here
    within = tl.arange(0, PAGES)[:, None] * PER + tl.arange(0, PER)[None, :]  # (PAGES, PER) blocks

    top, total = tail, tail * 0 + 1.0
    for first in range(seen // PER, whole // PER + 1, PAGES):
        block = first * PER + within
        there = (block >= seen) & (block < whole)
        weight = tl.load(block_weights + (block * pitch + inner), mask=there, other=float("-inf"))
        new = tl.maximum(top, tl.max(tl.max(weight, 1), 0))
        total = total * tl.exp2(top - new) + tl.sum(tl.sum(tl.exp2(weight - new), 1), 0)
        top = new
    page_shares += inner.to(tl.int64) * pages
    for first in range(seen // PER, whole // PER + 1, PAGES):
        block = first * PER + within
        there = (block >= seen) & (block < whole)
        weight = tl.load(block_weights + (block * pitch + inner), mask=there, other=float("-inf"))
        weight = tl.where(block == whole, tail, weight)
        share = tl.sum(tl.exp2(weight - top), 1) / total  # (PAGES,)
        page = first + tl.arange(0, PAGES)
        mine = page <= whole // PER
        tl.store(page_shares + page, tl.load(page_shares + page, mask=mine, other=0.0) + share, mask=mine)
