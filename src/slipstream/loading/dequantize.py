"""Dequantise GGUF's common types to float32: the same bits as the gguf package's reference, several times as fast.

A kernel gets blocks (n, bytes) with their scales (n,) and, for types that have one, the scale of their minima. Sums and
products are in the reference's order: another order would change rounding, and so texts.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quant_shape_from_byte_shape
from numpy.typing import NDArray

from slipstream.compiled import compiled

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

reference = gguf.dequantize


def dequantize(data: NDArray[Any], kind: Type) -> NDArray[Any]:
    """(..., bytes) -> (..., values) float32. Rare types use the reference."""
    if kind not in KERNELS:
        return reference(data, kind)
    kernel, *halves = KERNELS[kind]
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(-1, width)
    scales = [blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32).ravel() for at in halves]
    out = np.empty((len(blocks), size), np.float32)
    kernel(blocks, *scales, out)
    return out.reshape(quant_shape_from_byte_shape(data.shape, kind))


@compiled
def q4_0(blocks: Bytes, d: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for k in range(16):
            byte = blocks[i, 2 + k]
            out[i, k] = d[i] * np.float32(np.int32(byte & 15) - 8)
            out[i, 16 + k] = d[i] * np.float32(np.int32(byte >> 4) - 8)


@compiled
def q4_1(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for k in range(16):
            byte = blocks[i, 4 + k]
            out[i, k] = d[i] * np.float32(byte & 15) + m[i]
            out[i, 16 + k] = d[i] * np.float32(byte >> 4) + m[i]


@compiled
def _fifth_bits(block: Bytes, at: int) -> Any:
    """Bit k of these four bytes is the highest bit of value k."""
    bits = np.uint32(0)
    for k in range(4):
        bits |= np.uint32(block[at + k]) << np.uint32(8 * k)
    return bits


@compiled
def q5_0(blocks: Bytes, d: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        high = _fifth_bits(blocks[i], 2)
        for k in range(16):
            byte = blocks[i, 6 + k]
            low = np.int32(byte & 15) | np.int32((high >> np.uint32(k)) & np.uint32(1)) << 4
            top = np.int32(byte >> 4) | np.int32((high >> np.uint32(16 + k)) & np.uint32(1)) << 4
            out[i, k] = d[i] * np.float32(low - 16)
            out[i, 16 + k] = d[i] * np.float32(top - 16)


@compiled
def q5_1(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        high = _fifth_bits(blocks[i], 4)
        for k in range(16):
            byte = blocks[i, 8 + k]
            low = np.int32(byte & 15) | np.int32((high >> np.uint32(k)) & np.uint32(1)) << 4
            top = np.int32(byte >> 4) | np.int32((high >> np.uint32(16 + k)) & np.uint32(1)) << 4
            out[i, k] = d[i] * np.float32(low) + m[i]
            out[i, 16 + k] = d[i] * np.float32(top) + m[i]


@compiled
def q8_0(blocks: Bytes, d: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for k in range(32):
            out[i, k] = np.float32(np.int8(blocks[i, 2 + k])) * d[i]


# ---- 256 values to a block, in groups of 16 or 32 with a scale each


@compiled
def q2_k(blocks: Bytes, d: Floats, dmin: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for group in range(16):
            both = blocks[i, group]
            scale, low = d[i] * np.float32(both & 15), dmin[i] * np.float32(both >> 4)
            half, shift, first = group // 8, group % 8 // 2 * 2, group % 2 * 16
            for k in range(16):
                q = blocks[i, 16 + 32 * half + first + k] >> shift & 3
                out[i, 16 * group + k] = scale * np.float32(q) - low


@compiled
def q3_k(blocks: Bytes, d: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for group in range(16):
            low = blocks[i, 96 + group % 8] >> (4 * (group // 8)) & 15
            high = blocks[i, 104 + group % 4] >> (2 * (group // 4)) & 3
            scale = d[i] * np.float32((np.int32(low) | np.int32(high) << 4) - 32)
            half, shift, first = group // 8, group % 8 // 2 * 2, group % 2 * 16
            for k in range(16):
                q = np.int32(blocks[i, 32 + 32 * half + first + k] >> shift & 3)
                if not blocks[i, first + k] >> (group // 2) & 1:  # the mask says where nothing is taken off
                    q -= 4
                out[i, 16 * group + k] = scale * np.float32(q)


@compiled
def _scale_and_min(block: Bytes, group: int) -> Any:
    """Six bits each: those of the last four groups lie in pieces."""
    if group < 4:
        return block[4 + group] & 63, block[8 + group] & 63
    last = block[8 + group]
    return last & 15 | block[group] >> 2 & 48, last >> 4 | block[4 + group] >> 2 & 48


@compiled
def q4_k(blocks: Bytes, d: Floats, dmin: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for group in range(8):
            scale, low = _scale_and_min(blocks[i], group)
            scale, low = d[i] * np.float32(scale), dmin[i] * np.float32(low)
            shift, first = group % 2 * 4, 16 + 32 * (group // 2)
            for k in range(32):
                out[i, 32 * group + k] = scale * np.float32(blocks[i, first + k] >> shift & 15) - low


@compiled
def q5_k(blocks: Bytes, d: Floats, dmin: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for group in range(8):
            scale, low = _scale_and_min(blocks[i], group)
            scale, low = d[i] * np.float32(scale), dmin[i] * np.float32(low)
            shift, first = group % 2 * 4, 48 + 32 * (group // 2)
            for k in range(32):
                q = blocks[i, first + k] >> shift & 15 | (blocks[i, 16 + k] >> group & 1) << 4
                out[i, 32 * group + k] = scale * np.float32(q) - low


@compiled
def q6_k(blocks: Bytes, d: Floats, out: Floats) -> None:
    for i in range(len(blocks)):
        for group in range(16):
            scale = d[i] * np.float32(np.int8(blocks[i, 192 + group]))
            half, within = group // 8, group % 8 * 16
            for k in range(16):
                at = within + k
                low = blocks[i, 64 * half + at % 64] >> (at // 64 * 4) & 15
                high = blocks[i, 128 + 32 * half + at % 32] >> (at // 32 * 2) & 3
                out[i, 16 * group + k] = scale * np.float32((np.int32(low) | np.int32(high) << 4) - 32)


# Each with the places of its half-precision scales in a block.
KERNELS: dict[Type, tuple[Any, ...]] = {
    Type.Q4_0: (q4_0, 0),
    Type.Q4_1: (q4_1, 0, 2),
    Type.Q5_0: (q5_0, 0),
    Type.Q5_1: (q5_1, 0, 2),
    Type.Q8_0: (q8_0, 0),
    Type.Q2_K: (q2_k, 80, 82),
    Type.Q3_K: (q3_k, 108),
    Type.Q4_K: (q4_k, 0, 2),
    Type.Q5_K: (q5_k, 0, 2),
    Type.Q6_K: (q6_k, 208),
}
