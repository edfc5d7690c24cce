"""redrafter: beam search with a small recurrent network, which reads the target's last state and its own draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.drafters._beams import BeamDrafter, BeamOptions, Carry
from slipstream.heads.redrafter import ReDrafter

if TYPE_CHECKING:
    from slipstream.targets.base import Target


class RecurrentDrafter(BeamDrafter):
    """A ReDrafter head: beam search with a small recurrent network."""

    kind = "redrafter"
    head: ReDrafter

    def __init__(self, target: Target, tokenizer: Any, options: BeamOptions) -> None:
        super().__init__(target, tokenizer, options)
        if self.names is not None:
            self.width = min(self.width, len(self.names))

    def own_names(self) -> Tensor | None:
        return self.head.likely_ids

    def start(self, *inputs: Tensor) -> Carry:
        states, roots = inputs
        return self.head.prepare(states[:, None]), self.head.start(states, roots)[:, None]

    def logits(self, carry: Carry, depth: int) -> Tensor:  # noqa: ARG002
        prepared, memory = carry  # memory (b, w, H)
        return self.head.guess(prepared, memory)

    def few(self, carry: Carry, depth: int) -> Tensor:  # noqa: ARG002
        prepared, memory = carry
        return self.head.few(prepared, memory)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:  # noqa: ARG002
        prepared, memory = carry
        return prepared, self.head.advance(memory, tokens, chain)
