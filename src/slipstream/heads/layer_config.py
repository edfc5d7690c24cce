"""The sizes of a head's decoder layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.activations import ACT2FN

from slipstream.errors import OptionError
from slipstream.heads.base import HeadConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # norms of queries and keys, head by head, as Qwen 3 has them
    num_hidden_layers: int = 1
    windows: tuple[int | None, ...] = ()  # by layer, how many positions are attended to, its own included; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        for window in self.windows:
            if window is not None and window < 1:
                raise OptionError(f"the sliding window of a head must be 1 or more, not {window}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise OptionError(
                f"{self.num_attention_heads} attention heads can't share {self.num_key_value_heads} key heads evenly"
            )
        if self.head_dim % 2:
            raise OptionError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if self.hidden_act not in ACT2FN:
            raise OptionError(f"hidden_act {self.hidden_act!r} is unknown: use one that transformers has, as silu")

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if layer < len(self.windows) else None


def layer_sizes(text: Any, width: int) -> dict[str, Any]:
    """The fields of a LayerConfig for a layer of this width, similar to the target's layers."""
    heads = int(text.num_attention_heads)
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    return {
        "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": width // heads,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", None) or 1e-6),
        "rope_theta": float(theta),
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", None) or 2048),
    }
