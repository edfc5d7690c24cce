"""Grouped-query attention without copying keys: query heads that share a key head become rows of one product.

transformers repeats keys and values for every query head if there is a mask, which takes longer than the attention
itself on long texts. This is registered as an attention function of transformers, and used only in our own forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from slipstream.targets import watching

NAME = "slipstream"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (b, heads, n, d)
    key: torch.Tensor,  # (b, key heads, width, d)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # (b, 1, n, width), added to the scores
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    batch, heads, n, _ = query.shape
    seen = watching.watched()
    if seen is not None and attention_mask is not None:
        seen.see(query, key, attention_mask, scaling if scaling is not None else query.shape[-1] ** -0.5)
    groups = heads // key.shape[1]
    if groups == 1 or attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows = query.reshape(batch, key.shape[1], groups * n, query.shape[3])
    mask = attention_mask.repeat(1, 1, groups, 1) if n > 1 else attention_mask
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)


@contextmanager
def our_attention(config: Any) -> Iterator[None]:
    """Use it for one forward; otherwise the user's model keeps its own attention."""
    if config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = "sdpa"
