"""New keys and values into the cache, in one launch."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


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
):
    i, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + sequence).to(tl.int64)
    column = tl.load(columns + sequence * n + i).to(tl.int64)
    at = tl.arange(0, PAD)
    k = tl.load(new_keys + sequence.to(tl.int64) * nk_sequence + head * nk_head + i * nk_row + at, mask=at < d)
    tl.store(keys + row * k_row + head * k_head + column * k_column + at, k, mask=at < d)
    v = tl.load(new_values + sequence.to(tl.int64) * nv_sequence + head * nv_head + i * nv_row + at, mask=at < dv)
    tl.store(values + row * v_row + head * v_head + column * v_column + at, v, mask=at < dv)
