"""BlockDrafter: several tokens per pass, each guessed by itself, as the tree of their most probable products.

A pass guesses a block of tokens behind every chain that it reads. Within a block what follows a chain depends on how
far it has come and not on its tokens, unless the head says more about that; so the best first tree is found by
products alone (DDTree), and only the chains that reach the end of a block are read by the next pass.
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
    """What was guessed behind n chains, and the w chains that go on from there."""

    logits: Tensor  # (b, n, slots, V') by place in the block
    block: Tensor  # (b, w) which of the n each chain goes on from
    tokens: Tensor  # (b, w, ·) its tokens since then; before the first pass the root is one

    def extended(self, chain: Tensor, tokens: Tensor) -> Self:
        """Other chains: each is the one numbered chain (b, w'), and one of tokens (b, w') after it."""
        path = self.tokens.take_along_dim(chain[..., None], 1)
        block = self.block.take_along_dim(chain, 1)
        return replace(self, block=block, tokens=torch.cat((path, tokens[..., None]), dim=2))


class BlockDrafter(FeatureDrafter):
    """Subclasses read the text (`start`), and go on behind whole blocks (`next_pass`) if they can."""

    slots: int  # tokens of a pass

    @abstractmethod
    def next_pass(self, carry: Carry, depth: int) -> Carry:
        """Read chains that have come to the end of their block, `depth` tokens after the root."""

    def own_logits(self, carry: Carry, depth: int) -> Tensor:
        return carry.logits[:, :, depth % self.slots].take_along_dim(carry.block[..., None], 1)

    def children(self, carry: Carry, depth: int, branch: int) -> tuple[Tensor, Tensor]:
        logp, ids = best_tokens(carry.logits[:, :, depth % self.slots].contiguous(), branch)  # (b, n, branch)
        which = carry.block[..., None]
        return logp.take_along_dim(which, 1), ids.take_along_dim(which, 1)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        longer = carry.extended(chain, tokens)
        return longer if depth % self.slots else self.next_pass(longer, depth)
