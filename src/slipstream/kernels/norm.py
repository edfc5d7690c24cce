"""Normalisation of rows, one program per row: a row's result does not depend on the number of rows."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import overlap, wait_turn


def normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centre: bool, shift: bool
) -> torch.Tensor:
    """See `ops.norm`."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    _normalise[(len(flat),)](
        flat,
        weight,
        weight if bias is None else bias,
        out,
        flat.stride(0),
        width,
        eps,
        PAD=triton.next_power_of_2(width),
        CENTRE=centre,
        SHIFT=shift,
        BIAS=bias is not None,
        num_warps=1 if width <= 256 else 4 if width <= 4096 else 8,
        **overlap(),
    )
    return out.view(x.shape)


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    x_row,
    width,
    eps,
    PAD: tl.constexpr,
    CENTRE: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    at = tl.arange(0, PAD)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0)  # no earlier kernel writes weights, so load before waiting
    wait_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    v = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        v = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)
    v *= tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    if SHIFT or BIAS:
        v *= w.to(tl.float32) + (1.0 if SHIFT else 0.0)
        if BIAS:
            v += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    else:  # rounded before the multiplication, as most models do
        v = v.to(out.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * width + at, v.to(out.dtype.element_ty), mask=inside)
