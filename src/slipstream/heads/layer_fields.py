"""The fields of a LayerConfig, read from the config.json of a Llama or Qwen, in old and new formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.heads.published import Json, Tensors, count

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_fields(config: Json, tensors: Tensors, prefix: str) -> dict[str, Any]:
    """prefix: of the first layer's tensors, from which fields are read that config.json may leave out."""
    heads = count(config, "num_attention_heads")
    further = {match[1] for name in tensors if (match := re.match(r"layers\.([1-9]\d*)\.", name))}
    types = [_layer_type(config, n) for n in range(1 + len(further))]
    theta, scaling = _rope(config, types)
    query = tensors.get(f"{prefix}self_attn.q_proj.weight")  # its shape gives the size of an attention head
    return {
        "intermediate_size": count(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": count(config, "num_key_value_heads", heads),
        "head_dim": query.shape[0] // heads if query is not None else count(config, "hidden_size") // heads,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": count(config, "max_position_embeddings", 2048),
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in tensors,
        "o_bias": f"{prefix}self_attn.o_proj.bias" in tensors,
        "qk_norm": f"{prefix}self_attn.q_norm.weight" in tensors,
        "num_hidden_layers": len(types),
        "windows": tuple(_window(config, kind) for kind in types) if SLIDING in types else (),
    }


def _layer_type(config: Json, layer: int) -> str:
    """A layer's type of attention. Without `layer_types`, `sliding_window` is ignored, as in vLLM and speculators."""
    types = config.get("layer_types") or ()
    kind = types[layer] if layer < len(types) else FULL
    if kind not in (FULL, SLIDING):
        raise ValueError(f"layer {layer} is of the type {kind!r}: known are {FULL} and {SLIDING}")
    return kind


def _window(config: Json, kind: str) -> int | None:
    return count(config, "sliding_window") if kind == SLIDING else None


def _rope(config: Json, types: list[str]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta, and the scaling of rotary positions. The former may be a field of its own, or in `rope_scaling` or
    `rope_parameters`; the latter may differ by layer type."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if any(isinstance(value, Mapping) for value in given.values()):
            given = _of_type(name, given, types)
        found |= given
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    share = found.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1
    if share != 1:
        raise ValueError(f"it rotates a share of {share} of each head (partial_rotary_factor): we rotate all")
    for name in ("mrope_section", "mrope_interleaved"):  # for images: a text token's three positions are equal
        found.pop(name, None)
    found = {name: "default" if value == "mrope" else value for name, value in found.items()}
    kind = found.get("rope_type") or found.get("type") or "default"
    return float(theta), None if kind == "default" else found


def _of_type(name: str, given: Json, types: list[str]) -> Json:
    chosen = [given.get(kind) for kind in types]
    if len(given) == 1:
        chosen = list(given.values())
    if None in chosen or any(each != chosen[0] for each in chosen):
        raise ValueError(f"{name} differ by layer type ({', '.join(given)}), and none is that of all its layers")
    return dict(chosen[0] or {})


def without_frequencies(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
