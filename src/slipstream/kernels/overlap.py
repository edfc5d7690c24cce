"""Programmatic dependent launch: a kernel is launched while the previous one still runs, and waits for its results.

A step of a small model is hundreds of kernels of a microsecond or two, and without overlap the gaps between them take
as long again. Every kernel first waits for the previous one and then allows the next to launch. So when a kernel
starts its work, all earlier ones have ended. (One that calls `let_next` needs nothing of the previous one.)
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
        return {"EARLY": False}  # needs a Hopper GPU or newer
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_turn(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the previous kernel's writes can be read, then allow the next kernel to launch."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Allow the next kernel to launch, without having waited for the previous one. `wait_last` must follow."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_last(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """At a kernel's end: so that it ends after all earlier ones, where a program has not waited before."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(pointers):  # type: ignore[no-untyped-def]
    """Prefetch the 128 bytes around each address into the L2 cache. For data that no recent kernel writes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
