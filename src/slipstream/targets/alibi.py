"""Bloom's position bias, by position instead of by index in the cache.

Bloom adds a bias that grows with a key's index in the cache. In a tree, that index isn't the position. So during a
forward the model's `build_alibi_tensor` method is replaced by one that uses the true positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@contextmanager
def alibi_by_position(model: Any, key: NDArray[np.int64]) -> Iterator[None]:
    """key (b, width): the absolute position of each cached key."""
    body: Any = getattr(model, "transformer", None)
    if not hasattr(body, "build_alibi_tensor"):
        yield
        return

    original = body.build_alibi_tensor

    def build(_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        ones = torch.ones(1, 2, device=_mask.device)
        slopes = original(ones, num_heads, torch.float32)[:, 0, 1]  # (heads,) the bias one position further
        positions = torch.from_numpy(key).to(slopes)  # (b, width)
        return (slopes[None, :, None] * positions[:, None, :]).reshape(-1, 1, key.shape[1]).to(dtype)

    body.build_alibi_tensor = build
    try:
        yield
    finally:
        del body.build_alibi_tensor
