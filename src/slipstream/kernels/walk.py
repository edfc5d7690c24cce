"""The path of a tree that greedy verification accepts, in one launch: the device can go on with it before the host has
read the results."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import overlap, wait_turn


def walk_down(
    ids: torch.Tensor,
    depths: torch.Tensor,
    parents: torch.Tensor,
    chosen: torch.Tensor,
    room: int,
) -> torch.Tensor:
    """See `ops.walk`."""
    b, n = ids.shape
    assert all(t.is_contiguous() for t in (ids, depths, parents, chosen)), "rows lie side by side"
    table = torch.empty((b, 1 + 2 * room), dtype=torch.int64, device=ids.device)
    pads = {"PAD_N": triton.next_power_of_2(n), "PAD_R": triton.next_power_of_2(room)}
    _walk[(b,)](ids, depths, parents, chosen, table, n, ROOM=room, **pads, num_warps=4, **overlap())
    return table


# fmt: off
@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    ids, depths, parents, chosen, table, n,
    ROOM: tl.constexpr, PAD_N: tl.constexpr, PAD_R: tl.constexpr, EARLY: tl.constexpr,
):
    # fmt: on
    wait_turn(EARLY)
    sequence = tl.program_id(0)
    node = tl.arange(0, PAD_N)
    there = node < n
    token = tl.load(ids + sequence * n + node, mask=there, other=-1)
    depth = tl.load(depths + sequence * n + node, mask=there, other=-1)
    drafted = depth > 0
    above = tl.load(parents + sequence * n + node, mask=drafted, other=0)
    picked = tl.load(chosen + sequence * n + node, mask=there, other=-1)

    on_path = node == 0
    at = 0
    while at >= 0:
        next_token = tl.sum(tl.where(node == at, picked, 0), 0)
        below = drafted & (above == at) & (token == next_token)
        first = tl.min(tl.where(below, node, PAD_N), 0)  # the first, if siblings are equal
        on_path |= node == first
        at = tl.where(first < PAD_N, first, -1)

    count = tl.sum(on_path.to(tl.int32), 0)
    place = ROOM - count + depth  # negative: there is no room for it
    slot = tl.arange(0, PAD_R)
    here = on_path[None, :] & (place[None, :] == slot[:, None])  # (PAD_R, PAD_N)
    table += sequence * (1 + 2 * ROOM)
    tl.store(table, tl.minimum(count, ROOM).to(tl.int64))
    tl.store(table + 1 + slot, tl.sum(tl.where(here, picked[None, :], 0), 1).to(tl.int64), mask=slot < ROOM)
    tl.store(table + 1 + ROOM + slot, tl.sum(tl.where(here, node[None, :], 0), 1).to(tl.int64), mask=slot < ROOM)
