"""The paths of trees that greedy verification accepts, in one launch: the device can go on with them before the host
has read the results."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import overlap, wait_turn

WIDE = 512  # rows from which on a program has more warps


def walk_down(
    ids: torch.Tensor,
    depths: torch.Tensor,
    parents: torch.Tensor,
    chosen: torch.Tensor,
    roots: torch.Tensor,
    room: int,
) -> torch.Tensor:
    """See `ops.walk`."""
    b, n = len(roots), ids.shape[1]
    assert all(t.is_contiguous() for t in (ids, depths, parents, chosen)), "rows lie side by side"
    table = torch.empty((b, 1 + 2 * room), dtype=torch.int64, device=ids.device)
    pads = {"PAD_N": triton.next_power_of_2(n), "PAD_R": triton.next_power_of_2(room)}
    how = {"num_warps": 4 if n <= WIDE else 8, **overlap()}
    _walk[(b,)](ids, depths, parents, chosen, roots, table, n, roots.stride(0), ROOM=room, **pads, **how)
    return table


# fmt: off
@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    ids, depths, parents, chosen, roots, table, n, stride,
    ROOM: tl.constexpr, PAD_N: tl.constexpr, PAD_R: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    wait_turn(EARLY)
    sequence = tl.program_id(0)
    node = tl.arange(0, PAD_N)
    there = node < n
    token = tl.load(ids + node, mask=there, other=-1)
    depth = tl.load(depths + node, mask=there, other=-1)
    drafted = depth > 0
    above = tl.load(parents + node, mask=drafted, other=0)
    picked = tl.load(chosen + node, mask=there, other=-1)

    at = tl.load(roots + sequence * stride).to(tl.int32)
    on_path = node == at
    while at >= 0:
        next_token = tl.sum(tl.where(node == at, picked, 0), 0)
        below = drafted & (above == at) & (token == next_token)
        first = tl.min(tl.where(below, node, PAD_N), 0)  # the first, if siblings are equal
        on_path |= node == first
        at = tl.where(first < PAD_N, first, -1)

    count = tl.sum(on_path.to(tl.int32), 0)
    place = ROOM - count + depth  # negative: there is no room for it
    kept = on_path & (place >= 0)
    slot = tl.arange(0, PAD_R)
    blank = slot < ROOM - count
    table += sequence * (1 + 2 * ROOM)
    tl.store(table, tl.minimum(count, ROOM).to(tl.int64))
    tl.store(table + 1 + slot, tl.zeros((PAD_R,), tl.int64), mask=blank)
    tl.store(table + 1 + ROOM + slot, tl.zeros((PAD_R,), tl.int64), mask=blank)
    tl.store(table + 1 + place, picked.to(tl.int64), mask=kept)
    tl.store(table + 1 + ROOM + place, node.to(tl.int64), mask=kept)
