"""The parts of a decoder layer between its matrix products, in Triton: one launch between each two products.

A step has few rows, so its cost here is the number of launches. Targets and heads both use these.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from slipstream.kernels.overlap import overlap, wait_turn

BLOCK = 512  # elements per program where nothing is summed over a row


def steps(x: Tensor) -> tuple[int, int]:
    """Strides from sequence to sequence and from row to row. With one sequence the first is unused and set to 0:
    Triton compiles a second version for strides that 16 divides."""
    return x.stride(0) if len(x) > 1 else 0, x.stride(1)


# ---- attention: rotate queries and keys, write keys and values into the cache


def turn_by(
    qkv: Tensor,  # (b, n, (heads + 2 kv)·d)
    cosines: Tensor,  # (b or 1, n, d)
    sines: Tensor,
    keys: Tensor,  # (rows, kv, capacity, d)
    values: Tensor,
    rows: Tensor,  # (b,) int32
    columns: Tensor,  # (b, n) int32
) -> Tensor:
    """See `ops.turn_keys`. Returns the queries, (b, heads, n, d)."""
    assert cosines.stride() == sines.stride(), "cosines and sines lie alike"
    return _turned_queries(qkv, cosines, sines, 1.0, keys, values, rows, columns, qkv.shape[1])


@torch.library.custom_op("slipstream::turn", mutates_args=("keys", "values"))
def turn(
    qkv: Tensor,
    positions: Tensor,  # (b, n)
    frequencies: Tensor,  # (d/2,) float32
    scale: float,  # of cosines and sines
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    columns: Tensor,
    w: int,
) -> Tensor:
    """Like `turn_by`, but angles are positions times frequencies, and only the last w rows' queries are returned."""
    return _turned_queries(qkv, positions, frequencies, scale, keys, values, rows, columns, w, angles=True)


@turn.register_fake
def _turned(
    qkv: Tensor,
    _positions: Tensor,
    _frequencies: Tensor,
    _scale: float,
    keys: Tensor,
    _values: Tensor,
    _rows: Tensor,
    _columns: Tensor,
    w: int,
) -> Tensor:
    """For tracing: the shape alone."""
    kv, d = keys.shape[1], keys.shape[3]
    return qkv.new_empty(len(qkv), w, qkv.shape[2] // d - 2 * kv, d).transpose(1, 2)


def _turned_queries(
    qkv: Tensor,
    one: Tensor,  # cosines, or positions
    other: Tensor,  # sines, or frequencies
    scale: float,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    columns: Tensor,
    w: int,
    angles: bool = False,
) -> Tensor:
    b, n, every = qkv.shape
    kv, d = keys.shape[1], keys.shape[3]
    heads = every // d - 2 * kv
    assert qkv.stride(2) == keys.stride(3) == 1, "the numbers of a head lie side by side"
    assert keys.stride() == values.stride(), "keys and values lie alike"
    query = torch.empty((b, w, heads, d), dtype=qkv.dtype, device=qkv.device)
    # fmt: off
    _turn[(n, heads + 2 * kv, b)](
        qkv, one, other, query, keys, values, rows, columns, scale, *qkv.stride()[:2], *steps(one),
        *steps(columns), *keys.stride()[:3], n, w,
        HEADS=heads, KV=kv, HALF=d // 2, PAD=triton.next_power_of_2(d // 2), ANGLES=angles, num_warps=1, **overlap(),
    )
    # fmt: on
    return query.transpose(1, 2)


# fmt: off
@triton.jit(do_not_specialize=["n", "w"])
def _turn(  # type: ignore[no-untyped-def]
    qkv, one, other, query, keys, values, rows, columns, scale, x_sequence, x_row, p_sequence, p_row,
    c_sequence, c_row, k_row, k_head, k_column, n, w,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, ANGLES: tl.constexpr,
    EARLY: tl.constexpr,
):
    # fmt: on
    """One head of one row: a query, a key or a value. Element j is rotated together with element j + d/2."""
    i, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, PAD)
    inside = at < HALF
    if ANGLES:
        frequency = tl.load(other + at, mask=inside, other=0.0)  # no earlier kernel writes it, so load before waiting
    wait_turn(EARLY)
    qkv += sequence * x_sequence + i.to(tl.int64) * x_row + head * 2 * HALF + at
    first = tl.load(qkv, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV:
        place = sequence * p_sequence + i * p_row
        if ANGLES:
            angle = tl.load(one + place).to(tl.float32) * frequency
            cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
        else:  # both halves have the same angles
            cos = tl.load(one + place + at, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(other + place + at, mask=inside, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    dtype: tl.constexpr = query.dtype.element_ty
    if head < HEADS:
        if i >= n - w:
            looking = query + ((sequence * w + i - (n - w)) * HEADS + head) * 2 * HALF + at
            tl.store(looking, first.to(dtype), mask=inside)
            tl.store(looking + HALF, second.to(dtype), mask=inside)
    else:
        row = tl.load(rows + sequence).to(tl.int64)
        column = tl.load(columns + sequence * c_sequence + i * c_row).to(tl.int64)
        place = row * k_row + ((head - HEADS) % KV).to(tl.int64) * k_head + column * k_column + at
        kept = tl.where(head < HEADS + KV, keys, values) + place
        tl.store(kept, first.to(dtype), mask=inside)
        tl.store(kept + HALF, second.to(dtype), mask=inside)


# ---- between the products of a gated layer


@torch.library.custom_op("slipstream::gated", mutates_args=())
def gated(x: Tensor) -> Tensor:
    """(…, 2I), gate and up projection side by side -> (…, I), silu(gate) × up."""
    x = x.contiguous()
    inner = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], inner)
    _gated[(x.numel() // (2 * inner), triton.cdiv(inner, BLOCK))](x, out, inner, BLOCK=BLOCK, **overlap())
    return out


@gated.register_fake
def _let_through(x: Tensor) -> Tensor:
    """For tracing: the shape alone."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@triton.jit
def silu(v):  # type: ignore[no-untyped-def]
    return v / (1.0 + tl.exp(-v))


@triton.jit
def _gated(x, out, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(x + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)
