"""Write new keys and values into the cache, and move accepted ones to their final columns, in one launch each."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import overlap, wait_turn


def write_cache(
    keys: torch.Tensor,  # (pool rows, heads, capacity, d)
    values: torch.Tensor,  # (pool rows, heads, capacity, dv)
    new_keys: torch.Tensor,  # (b, heads, n, d)
    new_values: torch.Tensor,  # (b, heads, n, dv)
    rows: torch.Tensor,  # (b,) int32
    columns: torch.Tensor,  # (b, n) int32
) -> None:
    b, heads, n, d = new_keys.shape
    dv = new_values.shape[3]
    _write[(n, heads, b)](
        keys,
        values,
        new_keys,
        new_values,
        rows,
        columns,
        *keys.stride()[:3],
        *values.stride()[:3],
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        n,
        d,
        dv,
        PAD=triton.next_power_of_2(max(d, dv)),
        num_warps=1,
        **overlap(),
    )


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    keys,
    values,
    new_keys,
    new_values,
    rows,
    columns,
    k_row,
    k_head,
    k_column,
    v_row,
    v_head,
    v_column,
    nk_sequence,
    nk_head,
    nk_row,
    nv_sequence,
    nv_head,
    nv_row,
    n,
    d,
    dv,
    PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_turn(EARLY)
    i, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + sequence).to(tl.int64)
    column = tl.load(columns + sequence * n + i).to(tl.int64)
    at = tl.arange(0, PAD)
    k = tl.load(new_keys + sequence.to(tl.int64) * nk_sequence + head * nk_head + i * nk_row + at, mask=at < d)
    tl.store(keys + row * k_row + head.to(tl.int64) * k_head + column * k_column + at, k, mask=at < d)
    v = tl.load(new_values + sequence.to(tl.int64) * nv_sequence + head * nv_head + i * nv_row + at, mask=at < dv)
    tl.store(values + row * v_row + head.to(tl.int64) * v_head + column * v_column + at, v, mask=at < dv)


def move_cache(
    keys: torch.Tensor,  # (layers, pool rows, heads, capacity, d)
    values: torch.Tensor,  # (layers, pool rows, heads, capacity, dv)
    rows: torch.Tensor,  # (b,) int32
    sources: torch.Tensor,  # (b, D) int32
    places: torch.Tensor,  # (b, D) int32
    counts: torch.Tensor,  # (b,) int32
) -> None:
    layers, _, heads, _, d = keys.shape
    dv = values.shape[4]
    _move[(heads, layers, len(rows))](
        keys,
        values,
        rows,
        sources,
        places,
        counts,
        *keys.stride()[:4],
        *values.stride()[:4],
        sources.shape[1],
        d,
        dv,
        PAD=triton.next_power_of_2(max(d, dv)),
        num_warps=1,
        **overlap(),
    )


@triton.jit(do_not_specialize=["depth"])
def _move(  # type: ignore[no-untyped-def]
    keys,
    values,
    rows,
    sources,
    places,
    counts,
    k_layer,
    k_row,
    k_head,
    k_column,
    v_layer,
    v_row,
    v_head,
    v_column,
    depth,
    d,
    dv,
    PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one layer. A column that is read may be overwritten later. That is safe: a thread handles the same
    elements of all columns, in order."""
    wait_turn(EARLY)
    head, layer, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + sequence).to(tl.int64)
    at = tl.arange(0, PAD)
    keys += layer.to(tl.int64) * k_layer + row * k_row + head.to(tl.int64) * k_head + at
    values += layer.to(tl.int64) * v_layer + row * v_row + head.to(tl.int64) * v_head + at
    for i in range(tl.load(counts + sequence)):
        source = tl.load(sources + sequence * depth + i).to(tl.int64)
        place = tl.load(places + sequence * depth + i).to(tl.int64)
        if source != place:
            tl.store(keys + place * k_column, tl.load(keys + source * k_column, mask=at < d), mask=at < d)
            tl.store(values + place * v_column, tl.load(values + source * v_column, mask=at < dv), mask=at < dv)
