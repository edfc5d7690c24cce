"""Matrix products x·Wᵀ for few rows, close to the speed at which the weights can be read.

A row's result depends on that row alone, bit for bit: the sum over the inputs is divided into parts by the shape of the
weights, never by the number of rows, and the parts are added in order. The weights are on the tall side of the tensor
cores' product, which is 64 high whatever the number of rows. In a gated layer each tile has as many outputs of the gate
as of the up projection, and multiplies them at the end.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.layer_pieces import silu
from slipstream.kernels.overlap import fetch_ahead, overlap, wait_turn

# These decide the bits.
TALL = 64  # outputs that one product of the tensor cores makes
PARTS = 128  # programs wanted: with fewer tiles of outputs, the inputs are divided into parts
SHORTEST = 1024  # inputs of a part at least
PIECE = 128  # a part is a multiple of this

LOCKS = 4096  # tiles that can be in progress at a time, where inputs are divided

_locks: dict[torch.device, torch.Tensor] = {}


def parts(outputs: int, inputs: int) -> int:
    """Into how many parts the sum over the inputs is divided."""
    return max(1, min(PARTS // -(-outputs // TALL), inputs // SHORTEST))


def tile(rows: int, outputs: int, cut: int) -> dict[str, int]:
    """How the work is divided, measured on an H200. It does not change the bits: each output, or each part of it, is
    summed in order by one program."""
    high = -(-outputs // (4 * TALL)) * -(-rows // 128) * cut  # programs, with the highest tiles
    if rows <= 16:
        shape = (TALL, 128, 4, 4)
    elif rows <= 64:
        shape = (TALL, 128, 4, 4) if cut > 1 else (TALL, 64, 4, 4)  # three of the latter fit on a multiprocessor
    elif rows > 128 and high >= 2 * PARTS:  # enough to fill the device
        shape = (4 * TALL, 64, 3, 8)
    elif rows > 128 and cut > 1:
        shape = (2 * TALL, 64, 4, 8)
    else:
        shape = (TALL, 128, 4, 4) if cut > 1 else (2 * TALL, 64, 5, 8)
    names = ("HIGH", "DEEP", "STAGES", "num_warps")
    return dict(zip(names, shape, strict=True)) | {"ROWS": max(16, min(128, triton.next_power_of_2(rows)))}


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x (…, K), weight (N, K), bias (N,) → (…, N). `residual` (…, N) is added to the rounded result. gated: silu of the
    result's first half times its second half, (…, N/2)."""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    rows, made = len(flat), outputs // 2 if gated else outputs
    out = torch.empty((rows, made), dtype=x.dtype, device=x.device)
    cut = parts(outputs, inputs)
    shape = tile(rows, outputs, cut)
    if inputs % shape["DEEP"] and inputs % 64 == 0:
        shape |= {"DEEP": 64, "STAGES": 6 if rows <= 16 else 4}
    piece = PIECE if cut > 1 else shape["DEEP"]
    tiles = -(-outputs // shape["HIGH"]) * -(-rows // shape["ROWS"])
    partial, locks = out, out
    if cut > 1:
        partial = torch.empty((cut, rows, outputs), dtype=torch.float32, device=x.device)
        locks = _unlocked(x.device)
        assert tiles <= LOCKS, "more tiles than locks"
    grid = (-(-rows // shape["ROWS"]), -(-outputs // shape["HIGH"]), cut)
    _linear[grid](
        flat,
        weight,
        bias,
        None if residual is None else residual.reshape(rows, outputs).contiguous(),
        out,
        partial,
        locks,
        flat.stride(0),
        weight.stride(0),
        rows,
        outputs,
        inputs,
        PARTS=cut,
        PIECE=piece,
        EVEN=inputs % (cut * piece) == 0,
        FULL=outputs % shape["HIGH"] == 0,
        GATED=gated,
        **shape,
        **overlap(),
    )
    return out.view(*x.shape[:-1], made)


def _unlocked(device: torch.device) -> torch.Tensor:
    """Counters that are zero between launches: the program that counts the last part resets its counter."""
    if device not in _locks:
        _locks[device] = torch.zeros(LOCKS, dtype=torch.int32, device=device)
    return _locks[device]


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _linear(  # type: ignore[no-untyped-def]
    x, weight, bias, residual, out, partial, locks, x_row, w_row, rows, outputs, inputs,
    PARTS: tl.constexpr, PIECE: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    """A tile of HIGH outputs × ROWS rows, over one part of the inputs. The last program to finish adds the parts."""
    tile_r, tile_o, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile_r * ROWS + tl.arange(0, ROWS)
    member = tl.arange(0, HIGH)
    if GATED:
        HALF: tl.constexpr = HIGH // 2
        output = tile_o * HALF + member % HALF
        exists = output < outputs // 2
        output += member // HALF * (outputs // 2)
    else:
        output = tile_o * HIGH + member
        exists = output < outputs
    k = tl.arange(0, DEEP)
    there = row < rows
    steps = (inputs + PARTS * PIECE - 1) // (PARTS * PIECE) * (PIECE // DEEP)
    weights = weight + output[:, None].to(tl.int64) * w_row + k
    given = x + row[:, None] * x_row + k
    if EARLY and EVEN and FULL:
        for stage in tl.static_range(STAGES):
            line = (part * steps + stage) * DEEP + tl.arange(0, DEEP * 2 // 128) * 64
            if stage < steps:
                fetch_ahead(weight + output[:, None].to(tl.int64) * w_row + line[None, :])
    wait_turn(EARLY)
    acc = tl.zeros((HIGH, ROWS), tl.float32)
    for step in tl.range(part * steps, part * steps + steps, num_stages=STAGES):
        at = step * DEEP
        w_mask = exists[:, None]
        x_mask = there[:, None]
        if not EVEN:
            w_mask &= (k < inputs - at)[None, :]
            x_mask &= (k < inputs - at)[None, :]
        if EVEN and FULL:
            w = tl.load(weights + at, cache_modifier=".cg", eviction_policy="evict_first")  # (HIGH, DEEP)
        else:
            w = tl.load(weights + at, mask=w_mask, other=0.0, cache_modifier=".cg", eviction_policy="evict_first")
        g = tl.load(given + at, mask=x_mask, other=0.0)  # (ROWS, DEEP)
        acc = tl.dot(w, tl.trans(g), acc)
    place = row[None, :].to(tl.int64) * outputs + output[:, None]  # (HIGH, ROWS)
    mask = there[None, :] & exists[:, None]
    if PARTS > 1:
        tl.store(partial + part * rows.to(tl.int64) * outputs + place, acc, mask=mask)
        lock = locks + tile_o * tl.num_programs(0) + tile_r
        tl.debug_barrier()
        if tl.atomic_add(lock, 1) < PARTS - 1:
            return
        acc = tl.zeros((HIGH, ROWS), tl.float32)
        for i in range(PARTS):
            piece = partial + i * rows.to(tl.int64) * outputs + place
            acc += tl.load(piece, mask=mask, other=0.0, cache_modifier=".cg")  # from L2: the L1 cache may be stale
        tl.store(lock, 0)
    if bias is not None:
        acc += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)[:, None]
    result = acc.to(out.dtype.element_ty)
    if residual is not None:
        before = tl.load(residual + place, mask=mask, other=0.0)
        result = (result.to(tl.float32) + before.to(tl.float32)).to(out.dtype.element_ty)
    if GATED:
        gate, through = tl.split(tl.trans(tl.reshape(result, (2, HALF, ROWS)), (1, 2, 0)))  # (HALF, ROWS)
        result = (silu(gate.to(tl.float32)) * through.to(tl.float32)).to(out.dtype.element_ty)
        output = tile_o * HALF + tl.arange(0, HALF)
        place = row[None, :].to(tl.int64) * (outputs // 2) + output[:, None]
        mask = there[None, :] & (output < outputs // 2)[:, None]
    tl.store(out + place, result, mask=mask)
