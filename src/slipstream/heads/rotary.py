"""Rotary positions: the angles that queries and keys are turned by, as transformers computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.errors import DrafterError

if TYPE_CHECKING:
    from slipstream.heads.layer_config import LayerConfig

_SCALINGS = {  # with the fields that each needs
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class Rotary(nn.Module):
    """Cosines and sines of positions. Its frequencies stay in float32 whatever the head is cast to."""

    frequencies: Tensor

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        with torch.device("cpu"):  # real values even if the head is on the meta device
            self._exact, self.scale = _frequencies(config)
        self.register_buffer("frequencies", self._exact, persistent=False)  # (d/2,)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        self.frequencies = self._exact.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(b, n) -> twice (b, 1, n, d)."""
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _frequencies(config: LayerConfig) -> tuple[Tensor, float]:
    """(d/2,) radians per position, and the factor of cosines and sines."""
    scaling = dict(config.rope_scaling or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    d = config.head_dim
    if kind == "default":
        return config.rope_theta ** -(torch.arange(0, d, 2).float() / d), 1.0
    if kind not in _SCALINGS:
        raise DrafterError(f"this head scales rotary positions by {kind!r}: known are default, {', '.join(_SCALINGS)}")
    if lacking := [name for name in _SCALINGS[kind] if not isinstance(scaling.get(name), int | float)]:
        raise DrafterError(f"this head scales rotary positions by {kind!r} and does not say its {', '.join(lacking)}")
    like = LlamaConfig(
        hidden_size=config.num_attention_heads * d,
        num_attention_heads=config.num_attention_heads,
        head_dim=d,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **scaling, "rope_type": kind},
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](like, torch.device("cpu"))
    return frequencies.float(), float(scale)
