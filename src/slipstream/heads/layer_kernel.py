"""The parts of a head's layer between its matrix products, for drafting, in Triton: one launch between two products.

A step has few rows, so its cost here is the number of launches. The modules' own code, used in training, computes the
same in many launches: see `FeatureHead.side_by_side`, `Attention.turned`, `Layer.carry`, `Residual` and `ReDrafter`.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from slipstream.kernels.layer_pieces import BLOCK, silu, steps
from slipstream.kernels.overlap import overlap, wait_turn
from slipstream.kernels.sizes import PAGE


def _warps(width: int) -> int:
    """For a program that sums over a row."""
    return 1 if width <= 256 else 4 if width <= 4096 else 8


# ---- where keys lie


def first_rows(
    given: Tensor, depths: int, tables: Tensor | None, spare: int, room: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `keys.first_places`."""
    b, m = len(given), given.shape[1] - 3
    ends = torch.empty((depths, b), dtype=torch.int32, device=given.device)
    rows, positions, columns, free = (ends.new_empty(shape) for shape in ((b,), (b, m), (b, m), (b,)))
    # fmt: off
    _first[(b,)](
        given, tables, rows, ends, positions, columns, free,
        given.stride(0), 0 if tables is None else tables.stride(0), m, depths, b, spare, room,
        PAGE=PAGE, PAD_M=triton.next_power_of_2(m), PAD_D=triton.next_power_of_2(depths), num_warps=1, **overlap(),
    )
    # fmt: on
    return rows, ends, positions, columns, free


# fmt: off
@triton.jit(do_not_specialize=["spare", "room"])
def _first(  # type: ignore[no-untyped-def]
    given, tables, rows, ends, positions, columns, free, g_sequence, t_row, m, depths, b, spare, room,
    PAGE: tl.constexpr, PAD_M: tl.constexpr, PAD_D: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    wait_turn(EARLY)
    sequence = tl.program_id(0)
    given += sequence * g_sequence
    row = tl.load(given).to(tl.int32)
    length, count = tl.load(given + 1).to(tl.int32), tl.load(given + 2).to(tl.int32)
    last = length + count - 1
    depth = tl.arange(0, PAD_D)
    tl.store(ends + depth * b + sequence, last + depth, mask=depth < depths)
    i = tl.arange(0, PAD_M)
    place = i + count - m
    position = tl.where(place >= 0, length + place, last + 1)
    tl.store(positions + sequence * m + i, position, mask=i < m)
    first, column = last + 1, position
    if tables is not None:
        there = (place >= tl.where(row < 0, PAD_M, 0)) & (i < m)
        page = tl.load(tables + row.to(tl.int64) * t_row + position // PAGE, mask=there, other=0)
        first = spare + sequence * room
        column = tl.where(place >= 0, tl.where(there, page * PAGE + position % PAGE, 0), first)
        row = tl.maximum(row, 0)
    tl.store(columns + sequence * m + i, column, mask=i < m)
    tl.store(free + sequence, first)
    tl.store(rows + sequence, row)


def longer_paths(paths: Tensor, chain: Tensor, free: Tensor, used: int) -> Tensor:
    """See `keys.extend_paths`."""
    b, w = chain.shape
    before = paths.shape[2]
    out = torch.empty((b, w, before + 1), dtype=torch.int32, device=paths.device)
    # fmt: off
    _longer[(w, b)](
        paths, chain, free, out, *paths.stride()[:2], *chain.stride(), w, used,
        BEFORE=before, PAD=triton.next_power_of_2(before + 1), num_warps=1, **overlap(),
    )
    # fmt: on
    return out


# fmt: off
@triton.jit(do_not_specialize=["used"])
def _longer(  # type: ignore[no-untyped-def]
    paths, chain, free, out, p_sequence, p_row, c_sequence, c_row, w, used,
    BEFORE: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    wait_turn(EARLY)
    i, sequence = tl.program_id(0), tl.program_id(1)
    source = tl.load(chain + sequence * c_sequence + i * c_row)
    at = tl.arange(0, PAD)
    above = tl.load(paths + sequence * p_sequence + source * p_row + at, mask=at < BEFORE, other=0)
    own = tl.load(free + sequence) + used + i
    tl.store(out + (sequence * w + i) * (BEFORE + 1) + at, tl.where(at < BEFORE, above, own), mask=at <= BEFORE)


# ---- into the layer


@torch.library.custom_op("slipstream::enter", mutates_args=())
def enter(
    tokens: Tensor | None,  # (b, n)
    table: Tensor,  # (V, H) embeddings; without tokens (b·n, H), those of the rows
    features: Tensor,  # (b, w, H)
    chain: Tensor | None,  # (b, n) which of the features; None: row by row
    token_norm: Tensor | None,  # (H,) weights of a norm for each; None: none
    feature_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Embeddings and features, normed and concatenated, (b, n, 2H); and the plain features (b, n, H)."""
    b, n = features.shape[:2] if chain is None else chain.shape
    width = features.shape[2]
    assert features.stride(2) == table.stride(1) == 1, "the numbers of a row lie side by side"
    x = torch.empty((b, n, 2 * width), dtype=features.dtype, device=features.device)
    raw = x.new_empty(b, n, width)
    # fmt: off
    _enter[(n, b)](
        tokens, table, features, chain, token_norm, feature_norm, x, raw,
        *((0, 0) if tokens is None else steps(tokens)), table.stride(0), *steps(features),
        *((0, 0) if chain is None else steps(chain)), n, width, eps,
        PAD=triton.next_power_of_2(width), num_warps=_warps(width), **overlap(),
    )
    # fmt: on
    return x, raw


@enter.register_fake
def _entered(
    _tokens: Tensor | None, _table: Tensor, features: Tensor, chain: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    """For tracing: the shapes alone."""
    b, n = features.shape[:2] if chain is None else chain.shape
    width = features.shape[2]
    return features.new_empty(b, n, 2 * width), features.new_empty(b, n, width)


@triton.jit
def _normed(v, weight, at, inside, width, eps, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """v (PAD,) float32 after a norm. Rounded before the multiplication by the weight, as in the modules."""
    v *= tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    return v.to(dtype).to(tl.float32) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


# fmt: off
@triton.jit(do_not_specialize=["n"])
def _enter(  # type: ignore[no-untyped-def]
    tokens, table, features, chain, token_norm, feature_norm, x, raw,
    t_sequence, t_row, e_row, f_sequence, f_row, c_sequence, c_row, n, width, eps,
    PAD: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """One row."""
    wait_turn(EARLY)
    i, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = sequence * n + i
    token = row
    if tokens is not None:
        token = tl.load(tokens + sequence * t_sequence + i * t_row).to(tl.int64)
    source = i
    if chain is not None:
        source = tl.load(chain + sequence * c_sequence + i * c_row).to(tl.int32)
    dtype: tl.constexpr = x.dtype.element_ty
    at = tl.arange(0, PAD)
    inside = at < width
    e = tl.load(table + token * e_row + at, mask=inside, other=0.0).to(dtype).to(tl.float32)
    f = tl.load(features + sequence * f_sequence + source * f_row + at, mask=inside, other=0.0)
    tl.store(raw + row * width + at, f, mask=inside)
    f = f.to(tl.float32)
    if token_norm is not None:
        e = _normed(e, token_norm, at, inside, width, eps, dtype)
        f = _normed(f, feature_norm, at, inside, width, eps, dtype)
    tl.store(x + row * 2 * width + at, e.to(dtype), mask=inside)
    tl.store(x + row * 2 * width + width + at, f.to(dtype), mask=inside)


# ---- after a product


@torch.library.custom_op("slipstream::add_norm", mutates_args=())
def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual (b, w, H) -> their sum, and the sum after a norm."""
    b, w, width = x.shape
    x = x.contiguous()
    assert residual.stride(2) == 1, "the numbers of a row lie side by side"
    total, normed = torch.empty_like(x), torch.empty_like(x)
    # fmt: off
    _add_norm[(w, b)](
        x, residual, weight, total, normed, *residual.stride()[:2], w, width, eps,
        PAD=triton.next_power_of_2(width), num_warps=_warps(width), **overlap(),
    )
    # fmt: on
    return total, normed


@add_norm.register_fake
def _added(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """For tracing: the shapes alone."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


# fmt: off
@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, total, normed, r_sequence, r_row, w, width, eps, PAD: tl.constexpr, EARLY: tl.constexpr
):
    # fmt: on
    wait_turn(EARLY)
    i, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = total.dtype.element_ty
    at = tl.arange(0, PAD)
    inside = at < width
    place = (sequence * w + i) * width + at
    v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(residual + sequence * r_sequence + i * r_row + at, mask=inside, other=0.0).to(tl.float32)
    v = v.to(dtype)
    tl.store(total + place, v, mask=inside)
    tl.store(normed + place, _normed(v.to(tl.float32), weight, at, inside, width, eps, dtype).to(dtype), mask=inside)


@torch.library.custom_op("slipstream::add_silu", mutates_args=())
def add_silu(x: Tensor, y: Tensor, x_too: Tensor | None, y_too: Tensor | None) -> Tensor:
    """(x + x_too) + silu(y + y_too), (…, w, H). x_too and y_too (…, 1, H) are the same for all w rows."""
    w, width = 1 if x_too is None else x.shape[-2], x.shape[-1]
    for too in (x_too, y_too):
        assert too is None or (too.is_contiguous() and too.shape == (*x.shape[:-2], 1, width)), "one row for all w"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, y = x.reshape(-1, width), y.reshape(-1, width)  # no copy if they are halves of one product
    assert x.stride(1) == y.stride(1) == 1, "the numbers of a row lie side by side"
    grid = (len(x), triton.cdiv(width, BLOCK))
    _add_silu[grid](x, y, x_too, y_too, out, x.stride(0), y.stride(0), w, width, BLOCK=BLOCK, **overlap())
    return out


@add_silu.register_fake
def _blocked(x: Tensor, *_: object) -> Tensor:
    """For tracing: the shape alone."""
    return x.new_empty(x.shape)


# fmt: off
@triton.jit
def _add_silu(  # type: ignore[no-untyped-def]
    x, y, x_too, y_too, out, x_row, y_row, w, width, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    # fmt: on
    wait_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    a = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_row + at, mask=inside, other=0.0).to(tl.float32)
    if x_too is not None:
        a += tl.load(x_too + row // w * width + at, mask=inside, other=0.0).to(tl.float32)
    if y_too is not None:
        b += tl.load(y_too + row // w * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (a + silu(b)).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("slipstream::silu_sum", mutates_args=())
def silu_sum(x: Tensor, y: Tensor, chain: Tensor | None) -> Tensor:
    """silu(x + y): row i of x (b, n, H) plus row chain[i] of y (b, w, H), chain (b, n). Without chain, x and y have the
    same shape, which may be any."""
    x, y = x.contiguous(), y.contiguous()
    assert chain is not None or x.shape == y.shape, "as many rows in both"
    width = x.shape[-1]
    n, others = (x.numel() // width, 0) if chain is None else (x.shape[1], y.shape[1])
    out = torch.empty_like(x)
    strides = (0, 0) if chain is None else chain.stride()
    grid = (n, triton.cdiv(width, BLOCK), x.numel() // (n * width))
    _silu_sum[grid](x, y, chain, out, *strides, others, width, BLOCK=BLOCK, **overlap())
    return out


@silu_sum.register_fake
def _summed(x: Tensor, *_: object) -> Tensor:
    """For tracing: the shape alone."""
    return x.new_empty(x.shape)


# fmt: off
@triton.jit
def _silu_sum(  # type: ignore[no-untyped-def]
    x, y, chain, out, c_sequence, c_row, others, width, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    # fmt: on
    wait_turn(EARLY)
    i, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, other = sequence * tl.num_programs(0) + i, sequence * others + i
    if chain is not None:
        other = sequence * others + tl.load(chain + sequence * c_sequence + i * c_row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    v = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(y + other * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, silu(v).to(out.dtype.element_ty), mask=inside)
