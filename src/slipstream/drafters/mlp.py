"""mlp: beams of an MLP Speculator, which has one small network per depth."""

from __future__ import annotations

from torch import Tensor

from slipstream.drafters._beams import BeamDrafter, Carry
from slipstream.heads.mlp import MLPSpeculator


class MLPDrafter(BeamDrafter):
    """An MLP Speculator head: beam search with one small network per depth."""

    kind = "mlp"
    head: MLPSpeculator

    def start(self, *inputs: Tensor) -> Carry:
        states, roots = inputs
        return self.head.start(states, roots)[:, None]  # (b, 1, inner)

    def logits(self, carry: Carry, depth: int) -> Tensor:
        return self.head.logits(carry, depth)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        return self.head.advance(carry.take_along_dim(chain[..., None], 1), tokens, depth)
