"""EAGLE (versions 1 and 2, and HASS, which is trained differently): one layer predicts the target's next last state.

It reads (h_i, embedding of token i+1) and predicts h_{i+1}, from which the target's own `lm_head` computes logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.heads.base import EMBEDDING, Lender
from slipstream.heads.decoder import FeatureHead, Layer
from slipstream.heads.layer_config import LayerConfig, layer_sizes


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    bias: bool = True  # of fc


class Eagle(FeatureHead):
    kind = "eagle"
    config: EagleConfig

    def __init__(self, config: EagleConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        size = config.hidden_size
        self.add_embedding(size)
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.add_layers([Layer(config, width=size, reads=size)])

    @classmethod
    def fresh(
        cls, model: Any, *, bias: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
    ) -> Self:
        """A layer with the target's sizes, initialised to return the state unchanged. bias: of fc, which vLLM can't
        read; sizes: fields of EagleConfig."""
        size = Lender.of(model)
        fields = {**layer_sizes(model.config.get_text_config(), size.hidden_size), **sizes}
        config = EagleConfig(**size.sizes(), bias=bias, **fields)
        head = cls.begin(config, cls.lendable(config), model, seed, dtype)
        head.fc.weight.data[:, size.hidden_size :] = torch.eye(size.hidden_size)
        head.decoder.self_attn.o_proj.weight.data.zero_()
        head.decoder.mlp.down_proj.weight.data.zero_()
        return head.bind(model)

    @classmethod
    def lendable(cls, config: EagleConfig) -> tuple[str, ...]:  # noqa: ARG003
        return (EMBEDDING,)

    @property
    def decoder(self) -> Any:
        return self.decoders[0]

    def read(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def enter(self, tokens: Tensor, features: Tensor, chain: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.fc(self.side_by_side(tokens, features, chain)[0])
        return x, x

    def output(self, x: Tensor) -> Tensor:
        return self.lender.logits(x, bias=True)
