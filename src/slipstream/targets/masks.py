"""Which keys each row may read, and which kinds of mask a model needs.

transformers passes a 4-D mask through unchanged, or for models that mix layer types a dict of masks by type. So trees
need no code for single models.
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
    """What a layer attends to: everything, a sliding window, or the row's own chunk."""

    window: int | None = None
    chunk: int | None = None


def mask_kinds(config: Any) -> dict[str, MaskKind] | None:
    """Masks by layer type, from a model's text config; None if a layer has a state other than keys and values."""
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
    """(b, width) the absolute position of each key: committed keys are in order, a tree's keys count by depth."""
    positions = np.tile(np.arange(width), (len(slots), 1))
    for i, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
        if isinstance(slot, Part):
            positions[i, : slot.length] = slot.positions(1)
        positions[i, slot.length : slot.length + len(tree)] = slot.position + tree.depths
    return positions


def visible(lengths: Sequence[int], trees: Sequence[TokenTree], known: int, rows: int, width: int) -> NDArray[np.bool_]:
    """(b, rows, width) which keys each row may read: the committed text, and a node's own ancestors. Padding rows read
    the text alone."""
    see = np.zeros((len(lengths), rows, width), np.bool_)
    for i, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        n = len(tree)
        see[i, :, :length] = True
        see[i, : n - known, length : length + n] = tree.mask[known:]
        see[i, n - known :, length] = True  # at least one key for padding, even if nothing is committed
    return see


def additive_masks(
    kinds: dict[str, MaskKind],
    see: NDArray[np.bool_],  # (b, rows, width)
    query: NDArray[np.int64],  # (b, rows) absolute positions
    key: NDArray[np.int64],  # (b, width)
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """(b, 1, rows, width) masks to add to the attention scores; a dict by layer type if there are several."""
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
