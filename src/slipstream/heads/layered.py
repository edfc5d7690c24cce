"""LayeredHead: layers that compute their keys of the text from some of the target's states. DFlash and SPIRe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from slipstream.errors import DrafterError
from slipstream.heads.base import EMBEDDING, OUTPUT
from slipstream.heads.vocabulary import VocabularyHead


class LayeredHead(VocabularyHead):
    """Its config has `aux_layers`: which states it reads, by transformers' numbers."""

    @classmethod
    def lendable(cls, config: Any) -> tuple[str, ...]:  # noqa: ARG003
        return (EMBEDDING, OUTPUT)

    def bind(self, model: Any) -> Self:
        super().bind(model)
        count = self.lender.layers
        if max(self.config.aux_layers) >= count:
            raise DrafterError(
                f"this {self.kind} head reads hidden states {self.config.aux_layers}, and {self.lender.name} has those "
                f"from 0 to {count - 1}: use it with the model it was trained for. (State {count}, of the last layer, "
                "is taken before the final norm by some and after it by others)"
            )
        return self

    def layers(self, count: int) -> tuple[int, ...]:  # noqa: ARG002
        return self.config.aux_layers

    def join(self, hidden: Mapping[int, Tensor]) -> Tensor:
        layers = self.config.aux_layers
        if not set(layers) <= set(hidden):
            raise DrafterError(f"this {self.kind} head reads hidden states {layers}, got {sorted(hidden)}")
        return torch.cat([hidden[layer] for layer in layers], dim=-1)
