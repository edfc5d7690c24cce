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

Where there is no table of tiles, as for a lone sequence, tail blocks come before text: behind it they may find no room
on a GPU that it fills. Beside wide tiles they have a launch of their own: they need low ones, as a row has few heads.

Text may lie in pages of PAGE positions, anywhere in the cache: a table says where each page of a sequence is.

`block_weights` and `page_shares` are given to measure what the roots attend to. Then partials come with the weight of
each text block for each root, and one more launch turns these into shares per page. Without them the others run exactly
the same instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import let_next, overlap, wait_last, wait_turn
from slipstream.kernels.sizes import BLOCK, PAGE, TILE, WIDE

# These, BLOCK and PAGE decide the bits, so none may depend on the number of rows or sequences or on the capacity.
# A split is 1 page below page NARROW, 4 pages below page MIDDLE, 16 from there on, so that long texts have few splits.
NARROW, MIDDLE = 64, 256

# These divide the work among programs and do not change the bits.
WARPS = {TILE: 2, WIDE: 4}  # of partials: the wide products of a Hopper need four
COMBINING = 1  # warps of the last launch
STAGES = 3  # blocks that a program loads ahead
SHARED = 512  # about how many programs read text blocks: more than fill a GPU, few where capacity is unused
CHUNKS = 16, 4  # splits that the last launch loads at a time, while there are more than 4, and then
FEW = 512  # heads of rows up to which it cuts values into parts of 32
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


@dataclass(frozen=True)
class Launch:
    """How the work of one shape is divided."""

    tiles: int
    turns: int  # programs that share a tile's splits
    splits: int  # slots for partials of text: one for each split; two where one program merges them all
    tail: int  # slots for tail blocks

    @property
    def slots(self) -> int:
        return self.splits + self.tail

    @classmethod
    def of(
        cls, b: int, n: int, groups: int, kv_heads: int, capacity: int, depth: int, tiles: int = 0, tile: int = TILE
    ) -> Launch:
        """capacity: positions that a sequence may have. tiles: rows of the tile table; 0: each sequence has n rows."""
        tiles = tiles or -(-n * groups // tile)
        splits = split_of(-(-capacity // PAGE) - 1) + 1
        turns = min(splits, -(-SHARED // (tiles * kv_heads * b)))
        tail = (BLOCK - 2 + depth) // BLOCK + 1  # as many as `depth` positions can touch, from anywhere in a block
        return cls(tiles, turns, splits if turns > 1 or splits < 2 else 2, tail)

    @property
    def merged(self) -> bool:
        """Whether one program reads all splits of its tile. Then it merges the complete ones itself."""
        return self.turns == 1 and self.splits == 2


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
    apart = tiles is None and tile > TILE  # tail blocks have a launch of their own
    span = min(TILE if apart else tile, groups * max(1, b * n * kv_heads // OWN))
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
        "MERGED": launch.merged,
        "enable_fp_fusion": False,  # only tl.fma rounds a product and a sum once; the compiler must not choose
        **overlap(),
    }
    texts, tails = launch.tiles * kv_heads * launch.turns, n * -(-heads // span)
    for height, some_texts, some_tails in ((TILE, 0, tails), (tile, texts, 0)) if apart else ((tile, texts, tails),):
        # fmt: off
        _partials[(some_texts + some_tails, b)](
            query, keys, values, rows, lengths, depths, paths, tables, tiles, scratch.stats, scratch.sums,
            block_weights, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            *rows.stride(), depths.stride(0), *paths.stride()[:2], 0 if tables is None else tables.stride(0),
            n, launch.slots, launch.splits, launch.tiles, launch.turns, span,
            scale if soft_cap else scale * LOG2_E, soft_cap or 0.0, window or 0,
            GROUPS=groups, DK=d, PAD_K=triton.next_power_of_2(max(d, 16)), TILE=height, CAP=bool(soft_cap),
            STAGES=STAGES, TEXTS=some_texts > 0, TAILS=some_tails > 0,
            # float32 and large heads need more registers than two warps have.
            num_warps=4 if query.dtype == torch.float32 or dv > 128 else WARPS[height],
            **constants,
        )
        # fmt: on
    part = min(wide_v, 32 if heads * n * b <= FEW and not launch.merged else 128)
    # fmt: off
    _combine[(heads * (wide_v // part), n, b)](
        lengths, depths, scratch.stats, scratch.sums, out, *lengths.stride(), depths.stride(0),
        n, launch.slots, launch.splits, window or 0,
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


@triton.jit
def _take(q, k, v, see, top, total, acc, scale, cap, TILE: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add one block to the partial of rows q (TILE, dk): k (BLOCK, dk), v (BLOCK, dv), see (TILE, BLOCK) is the mask.
    Also returns the block's own top score and sum of weights."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (TILE, BLOCK)
    if CAP:
        # tanh x = 1 - 2 / (exp 2x + 1), which is right at both ends of the range too. 1.44… is log2 e.
        grown = tl.exp2(scores * (2 * 1.4426950408889634 / cap))
        scores = (1.0 - 2.0 / (grown + 1.0)) * (cap * 1.4426950408889634)
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


# Numbers that depend on the launch's shape are not specialised: 1 must not compile to other machine code than 2.
# fmt: off
@triton.jit(do_not_specialize=["row_sequence", "row_row", "depth_sequence", "path_sequence", "path_row", "table_row",
                               "n", "slots", "splits", "tiles", "turns", "span", "window"])
def _partials(  # type: ignore[no-untyped-def]
    query, keys, values, rows, lengths, depths, paths, tables, tile_table, stats, sums, block_weights,
    q_sequence, q_head, q_row, k_row, k_head, k_column, v_row, v_head, v_column,  # strides
    row_sequence, row_row, depth_sequence, path_sequence, path_row, table_row,  # strides
    n, slots, splits, tiles, turns, span, scale, cap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    NARROW: tl.constexpr, MIDDLE: tl.constexpr,
    WINDOW: tl.constexpr, MERGED: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    TEXTS: tl.constexpr, TAILS: tl.constexpr,
):
    # fmt: on
    """Partials of text blocks if TEXTS, by `tiles × key heads × turns` programs ("shared"), and of tail blocks if
    TAILS, by other programs ("own"): those come last if there is a table of tiles, else first.

    A shared program: a tile of rows × grouped heads, one key head, some splits of text, block after block. It stores
    each split in slot `split`; or, if MERGED, all complete splits in slot 0 and the last, incomplete one in slot 1.
    An own program: one row, `span` heads, every tail block, one key head after the other. It stores tail block i in
    slot `splits` + i.
    An iteration of either multiplies the whole tile with one block of keys. Rows of the tile that belong to another key
    head are masked."""
    PER: tl.constexpr = PAGE // BLOCK
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    program, sequence = tl.program_id(0), tl.program_id(1)
    # Text after a launch of tail blocks need not wait for that one: when it may begin, all launches before have ended.
    AFTER: tl.constexpr = EARLY and not TAILS
    if AFTER:
        let_next(EARLY)
    else:
        wait_turn(EARLY)

    spans = (HEADS + span - 1) // span
    if tile_table is None:
        tails = n * spans if TAILS else 0
        shared = program >= tails if TEXTS and TAILS else tl.full((), TEXTS, tl.int1)
        own, program = program, tl.maximum(program - tails, 0)
    else:
        shared = program < tiles * KV_HEADS * turns
        own = tl.maximum(program - tiles * KV_HEADS * turns, 0)
    kv_head, turn = program // tiles % KV_HEADS, program // tiles // KV_HEADS
    begin_head, node = own % spans * span, own // spans
    end_head = tl.minimum(begin_head + span, HEADS)

    begin_row, tile = 0, program % tiles
    if tile_table is not None:
        begin_row = tl.load(tile_table + tile * 2)
        tile = tl.load(tile_table + tile * 2 + 1)
        if shared & (begin_row < 0):
            return
    first = tl.where(shared, begin_row, node)  # any row of the sequence
    rows += sequence * row_sequence
    lengths += sequence * row_sequence
    pool_row = tl.load(rows + first * row_row)
    member = tl.arange(0, TILE)
    flat = tile * TILE + member
    row = tl.where(shared, begin_row + flat // GROUPS, node)  # (TILE,)
    head = tl.where(shared, kv_head * GROUPS + flat % GROUPS, begin_head + member)  # (TILE,)
    valid = (row < n) & (head < tl.where(shared, HEADS, end_head))
    if tile_table is not None:
        valid &= tl.load(rows + row * row_row, mask=valid, other=-1) == pool_row
    depth = tl.load(depths + sequence * depth_sequence + row, mask=valid, other=-2)
    valid &= depth > -2
    length = tl.load(lengths + row * row_row, mask=valid, other=0)  # (TILE,)
    position = tl.where(valid, length + depth, -1)  # (TILE,)
    text = tl.where(valid, _text_blocks(length, depth, BLOCK), 0)  # (TILE,) blocks
    seen = tl.min(tl.where(valid, _first_seen(length, depth, window, BLOCK, WINDOW), 1 << 30), 0)
    whole, last_position = tl.max(text, 0), tl.max(position, 0)
    text_end = tl.load(lengths + first * row_row)  # used by own programs only, for their one row
    end = tl.minimum(tl.where(shared, whole * BLOCK, last_position + 1), last_position + 1)  # exclusive

    # The blocks of a shared program: ranges of about equal length, cut at the boundaries of splits.
    begin_page, end_page = seen // PER, (whole + PER - 1) // PER
    cut = begin_page + (end_page - begin_page) * turn // turns
    next_cut = begin_page + (end_page - begin_page) * (turn + 1) // turns
    cut = tl.maximum(_first_page(_split_of(cut, NARROW, MIDDLE), NARROW, MIDDLE), begin_page)
    next_cut = tl.maximum(_first_page(_split_of(next_cut, NARROW, MIDDLE), NARROW, MIDDLE), begin_page)
    begin_block = tl.maximum(cut * PER, seen)
    end_block = tl.where(turn + 1 == turns, whole, tl.minimum(next_cut * PER, whole))
    if (last_position < 0) | (shared & (begin_block >= end_block)):
        wait_last(AFTER)
        return

    dk, dv = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
    q_mask = valid[:, None] if DK == PAD_K else valid[:, None] & (dk < DK)
    query += sequence.to(tl.int64) * q_sequence
    FROM: tl.constexpr = ".cg" if AFTER else ""  # not from a cache that only waiting is sure to bring up to date
    q = tl.load(query + ((head * q_head + row * q_row)[:, None] + dk), mask=q_mask, other=0.0, cache_modifier=FROM)
    if tables is None:
        keys += pool_row.to(tl.int64) * k_row
        values += pool_row.to(tl.int64) * v_row
    else:
        tables += pool_row.to(tl.int64) * table_row
    stats += sequence.to(tl.int64) * slots * n * HEADS * 2
    sums += sequence.to(tl.int64) * slots * n * HEADS * DV
    pitch = n.to(tl.int64) * HEADS  # from one slot to the next
    inner = row * HEADS + head  # (TILE,)
    stat, wide_sum = stats + inner * 2, sums + (inner[:, None] * DV + dv)
    sum_mask = valid[:, None] if DV == PAD_V else valid[:, None] & (dv < DV)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, PAD_V), tl.float32)

    if shared:
        key, value = keys + kv_head.to(tl.int64) * k_head, values + kv_head.to(tl.int64) * v_head
        # A split is complete if no tail block belongs to it.
        complete = -1
        if MERGED:
            tail = tl.max(tl.where(valid, depth, -1), 0) >= 0
            ended = _split_of((whole - 1) // PER, NARROW, MIDDLE) + 1
            complete = tl.where(tail, _split_of(whole // PER, NARROW, MIDDLE), ended)
        all_top, all_total, all_acc = top, total, acc
        split = _split_of(begin_block // PER, NARROW, MIDDLE)
        here = begin_block // PER  # where the page lies
        if tables is not None:
            here = tl.load(tables + begin_block // PER)
        for block in tl.range(begin_block, end_block, num_stages=STAGES):
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
                q, k, v, see, top, total, acc, scale, cap, TILE, BLOCK, CAP
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
                if MERGED & (split < complete):
                    all_top, all_total, all_acc = _merge(all_top, all_total, all_acc, top, total, acc)
                else:
                    to = pitch if MERGED else split * pitch
                    tl.store(stat + to * 2, top, mask=valid)
                    tl.store(stat + (to * 2 + 1), total, mask=valid)
                    tl.store(wide_sum + to * DV, acc, mask=sum_mask)
                top = tl.full((TILE,), float("-inf"), tl.float32)
                total = tl.zeros((TILE,), tl.float32)
                acc = tl.zeros((TILE, PAD_V), tl.float32)
                split = following
        if MERGED:
            tl.store(stat, all_top, mask=valid)
            tl.store(stat + 1, all_total, mask=valid)
            tl.store(wide_sum, all_acc, mask=sum_mask)
    else:
        paths += sequence.to(tl.int64) * path_sequence + node * path_row
        reads = head // GROUPS  # (TILE,) each row's key head
        zero = tl.zeros((), tl.int64)  # 64 bits: keys of a head may lie 2³¹ numbers after those of the first
        for block in range(whole, (end + BLOCK - 1) // BLOCK):
            page = block // PER
            at = block * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,) positions
            here = page
            if tables is not None:
                here = tl.load(tables + page, mask=page * PAGE < text_end, other=0)
            is_text = at < text_end
            ancestor = tl.load(paths + (at - text_end), mask=(is_text == 0) & (at < end), other=0)
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
                see = (at <= position[:, None]) & (reads == read)[:, None]
                if WINDOW:
                    see &= at > position[:, None] - window
                top, total, acc, _, _ = _take(q, k, v, see, top, total, acc, scale, cap, TILE, BLOCK, CAP)
            to = (splits + block - whole) * pitch
            tl.store(stat + to * 2, top, mask=valid)
            tl.store(stat + (to * 2 + 1), total, mask=valid)
            tl.store(wide_sum + to * DV, acc, mask=sum_mask)
    wait_last(AFTER)


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
@triton.jit(do_not_specialize=["row_sequence", "row_row", "depth_sequence", "n", "slots", "splits", "window"])
def _combine(  # type: ignore[no-untyped-def]
    lengths, depths, stats, sums, out, row_sequence, row_row, depth_sequence, n, slots, splits, window,
    TAIL: tl.constexpr, PART: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
    HEADS: tl.constexpr, DV: tl.constexpr, PAD_V: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, NARROW: tl.constexpr, MIDDLE: tl.constexpr,
    WINDOW: tl.constexpr, MERGED: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """Merge the partials of one head of one row, PART of its values: text splits first, then the splits that have tail
    blocks."""
    PER: tl.constexpr = PAGE // BLOCK
    PARTS: tl.constexpr = PAD_V // PART
    head, row, sequence = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    # Heads compute lengths shortly before: not from a cache that only waiting is sure to bring up to date.
    length = tl.load(lengths + sequence * row_sequence + row * row_row, cache_modifier=".cg")
    depth = tl.load(depths + sequence * depth_sequence + row, cache_modifier=".cg")
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
    wait_turn(EARLY)
    if MERGED:
        there = last + one > begin  # (1,)
        top = tl.load(stats + one, mask=there, other=float("-inf"))
        total = tl.load(stats + one + 1, mask=there, other=0.0)
        acc = tl.load(sums + dv, mask=there[:, None] & inside, other=0.0)
    else:
        large = begin + tl.maximum(last - begin + LARGE - SMALL - 1, 0) // LARGE * LARGE
        for first in range(begin, large, LARGE):
            top, total, acc = _fold(top, total, acc, stats, sums, first, last, pitch, dv, inside, DV, LARGE)
        for first in range(large, last, SMALL):
            top, total, acc = _fold(top, total, acc, stats, sums, first, last, pitch, dv, inside, DV, SMALL)
    # The splits that have tail blocks.
    end = tl.where(padding | (depth < 0), 0, _split_of(tl.maximum(position, 0) // PAGE, NARROW, MIDDLE) + 1)
    for split in range(tl.maximum(complete, begin), end):
        there = split + one < text_splits  # (1,)
        slot = pitch if MERGED else split * pitch
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
