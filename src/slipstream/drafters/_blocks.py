"""BlockDrafter: heads that predict several tokens per pass, drafted as a tree of their most probable combinations.

A pass predicts a block of tokens after every chain that it reads. Within a block, a prediction depends on its place and
not on the chain's tokens, unless a head corrects for them. So the best tree follows from products of probabilities
(DDTree), and the next pass reads only the chains that reach the end of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from slipstream.drafters._beams import Carry
from slipstream.drafters._eagle import FeatureDrafter
from slipstream.kernels.ops import best_tokens


@dataclass(frozen=True)
class BlockCarry:
    """The blocks predicted after n chains, and the w chains that continue within them."""

    logits: Tensor  # (b, n, slots, V') by place in the block
    block: Tensor  # (b, w) which of the n blocks each chain is in
    tokens: Tensor  # (b, w, ·) each chain's tokens since the last pass; at first the root

    def extended(self, chain: Tensor, tokens: Tensor) -> Self:
        """The chains with the numbers in `chain` (b, w'), each extended by its token in `tokens` (b, w')."""
        path = self.tokens.take_along_dim(chain[..., None], 1)
        block = self.block.take_along_dim(chain, 1)
        return replace(self, block=block, tokens=torch.cat((path, tokens[..., None]), dim=2))


class BlockDrafter(FeatureDrafter):
    """Subclasses define `start`, which reads the text, and `next_pass`, which continues after whole blocks."""

    slots: int  # tokens per pass

    @abstractmethod
    def next_pass(self, carry: Carry, depth: int) -> Carry:
        """Read chains that have reached the end of their block, `depth` tokens after the root."""

    def own_logits(self, carry: Carry, depth: int) -> Tensor:
        return carry.logits[:, :, depth % self.slots].take_along_dim(carry.block[..., None], 1)

    def children(self, carry: Carry, depth: int, branch: int) -> tuple[Tensor, Tensor]:
        logp, ids = best_tokens(carry.logits[:, :, depth % self.slots].contiguous(), branch)  # (b, n, branch)
        which = carry.block[..., None]
        return logp.take_along_dim(which, 1), ids.take_along_dim(which, 1)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        longer = carry.extended(chain, tokens)
        return longer if depth % self.slots else self.next_pass(longer, depth)
