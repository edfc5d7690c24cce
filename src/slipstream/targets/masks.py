"""Which keys each row may read, and which kinds of mask a model wants.

transformers passes a 4-D mask through unchanged, and a dict of them by layer type to models that mix types, so trees
need no code per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.targets.base import Part, Slot
from slipstream.tree import TokenTree


@dataclass(frozen=True)
class MaskKind:
    """How far back a layer looks: everything, a sliding window, or the chunk the row lies in."""

    window: int | None = None
    chunk: int | None = None


def mask_kinds(config: Any) -> dict[str, MaskKind] | None:
    """By layer type, from a model's text config; None if a layer keeps a state that isn't keys and values."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    known = {
        "full_attention": MaskKind(),
        "sliding_attention": MaskKind(window=window),
        "chunked_attention": MaskKind(chunk=getattr(config, "attention_chunk_size", None)),
    }
    types = getattr(config, "layer_types", None)
    if types is None:
        return {"sliding_attention": known["sliding_attention"]} if window else {"full_attention": MaskKind()}
    if not set(types) <= set(known):
        return None
    return {name: known[name] for name in dict.fromkeys(types)}


def key_positions(slots: Sequence[Slot], trees: Sequence[TokenTree], width: int) -> NDArray[np.int64]:
    """(b, width) the absolute position of the token of each key: committed keys stand in order, tree keys by
    depth."""
    positions = np.tile(np.arange(width), (len(slots), 1))
    for i, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
        if isinstance(slot, Part):
            positions[i, : slot.length] = slot.positions(1)
        positions[i, slot.length : slot.length + len(tree)] = slot.position + tree.depths
    return positions


def visible(lengths: Sequence[int], trees: Sequence[TokenTree], known: int, rows: int, width: int) -> NDArray[np.bool_]:
    """(b, rows, width) the committed text, and each node's own ancestors. Padding rows see the text alone."""
    see = np.zeros((len(lengths), rows, width), np.bool_)
    for i, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        n = len(tree)
        see[i, :, :length] = True
        see[i, : n - known, length : length + n] = tree.mask[known:]
        see[i, n - known :, length] = True  # something to see even where nothing is committed
    return see


def additive_masks(
    kinds: dict[str, MaskKind],
    see: NDArray[np.bool_],  # (b, rows, width)
    query: NDArray[np.int64],  # (b, rows) absolute positions
    key: NDArray[np.int64],  # (b, width)
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """(b, 1, rows, width) to be added to the attention scores; one per layer type if there are several."""
    masks = {}
    for name, kind in kinds.items():
        allowed = see
        if kind.window is not None:
            allowed = see & (key[:, None, :] > query[:, :, None] - kind.window)
        elif kind.chunk is not None:
            allowed = see & (key[:, None, :] // kind.chunk == query[:, :, None] // kind.chunk)
        mask = torch.zeros(allowed.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(~allowed), torch.finfo(dtype).min)
        masks[name] = mask[:, None].to(device)
    return next(iter(masks.values())) if len(masks) == 1 else masks
