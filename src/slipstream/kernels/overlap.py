"""Kernels that are brought onto the device while the one before them still runs, and wait there for its results.

A step of a small model is hundreds of launches of a microsecond or two: the time from one kernel's end to the next
one's begin would be as long again. Every kernel waits before it lets the next one in, so whatever ran two before has
ended, and none reads too early.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@cache
def overlap() -> dict[str, Any]:
    """Options of a launch whose kernel calls `wait_turn`."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return {"EARLY": False}  # the hardware is older than that
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_turn(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the kernel before this one wrote can be read from here on, and the next kernel may come."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(pointers):  # type: ignore[no-untyped-def]
    """Bring the 128 bytes around each address into the L2 cache, for what does not depend on the kernel before."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
