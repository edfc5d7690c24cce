"""dflash: a few layers predict a block of tokens at once; the tree has their most probable combinations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.drafters._beams import Carry
from slipstream.drafters._blocks import BlockCarry, BlockDrafter
from slipstream.drafters._eagle import FeatureOptions
from slipstream.heads.dflash import DFlash
from slipstream.kernels.ops import best_tokens

if TYPE_CHECKING:
    from slipstream.drafters._eagle import FeatureSession
    from slipstream.targets.base import Target


@dataclass(frozen=True)
class DFlashOptions(FeatureOptions):
    depth: int = 16  # tokens ahead; at most as many as the head predicts
    width: int = 16  # nodes per depth that are continued, by as many children each; mode=sample: chains
    # Multiply a node's probability by the head's estimate of how often it is right, if the head makes one.
    confidence: bool = True


@dataclass(frozen=True)
class PlaceCarry(BlockCarry):
    """A BlockCarry with the state of DSpark's Markov head, which corrects predictions by each chain's last token."""

    hidden: Tensor  # (b, slots, H) of the block's places
    latent: Tensor | None = None  # (b, w, r) from which the correction is computed
    memory: Tensor | None = None  # (b, w, r) if it is recurrent


class DFlashDrafter(BlockDrafter):
    """A DFlash head, with DSpark's parts if it has them: a block at once from states of the whole text."""

    kind = "dflash"
    Options = DFlashOptions
    head: DFlash

    def __init__(self, target: Target, tokenizer: Any, options: DFlashOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.slots = self.head.reach
        self.sizes = ()  # a small draft takes as long as a large one
        self._sure = options.confidence and self.head.config.confidence

    def room(self) -> tuple[int, int, int]:
        places = self.head.config.block_size
        return places + 1, places, places  # one more column, for padding

    # ---- the text

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, positions: Tensor) -> None:  # noqa: ARG002
        looks = self.cache.through(row, self.cache.columns(session.row, positions)).for_each()
        self.head.remember(self.head.read(states), positions, looks)

    # ---- drafting

    def start(self, *inputs: Tensor) -> Carry:
        given, states = inputs
        places, depths = self.head.config.block_size, self.length
        rows, ends, positions, columns, free = self.cache.places(given, 1 + places)
        roots = given[:, -1]
        own = free[:, None] + torch.arange(places, dtype=torch.int32, device=free.device)  # (b, places) the block's
        # Padding's columns would overlap with the block's: move them after it.
        columns = torch.where(positions < ends[1][:, None], columns, free[:, None] + places)
        paths = own[:, None].repeat(1, places, 1)  # each place attends to all of them
        looks = self.cache.through(rows, torch.cat((columns, own), dim=1), ends[1], paths).for_each()
        positions = torch.cat((positions, ends[1:].t()), dim=1)
        hidden = self.head.fill(self.head.block_of(roots), self.head.read(states), positions, looks)
        hidden = self.head.guessing(hidden, depths)
        logits = self.head.logits(hidden)[:, None]  # (b, 1, depths, V')
        root = roots[:, None]
        return self._said(PlaceCarry(logits, torch.zeros_like(root), root[..., None], hidden), 0)

    def _said(self, carry: PlaceCarry, depth: int) -> PlaceCarry:
        """Update the Markov head by the chains' last tokens."""
        if self.head.markov_head is None:
            return carry
        hidden, last = self._at(carry, depth)
        latent, memory = self.head.markov_head(hidden, last, carry.memory)
        return replace(carry, latent=latent, memory=memory)

    def _at(self, carry: PlaceCarry, depth: int) -> tuple[Tensor, Tensor]:
        """(b, w, H) the state that predicts the token after each chain, and the chains' last tokens (b, w)."""
        last = carry.tokens[..., -1]
        return carry.hidden[:, depth, None].expand(-1, last.shape[1], -1), last

    def own_logits(self, carry: Carry, depth: int) -> Tensor:
        logits = super().own_logits(carry, depth)
        if carry.latent is None or self.head.markov_head is None:
            return logits
        return logits + self.head.markov_head.markov_w2(carry.latent)

    def children(self, carry: Carry, depth: int, branch: int) -> tuple[Tensor, Tensor]:
        if carry.latent is None:
            logp, ids = super().children(carry, depth, branch)
        else:
            logp, ids = best_tokens(self.own_logits(carry, depth), branch)
        if not self._sure:
            return logp, ids
        # The head's estimate of the share of its distribution that is accepted scales every token's probability.
        return logp + functional.logsigmoid(self.head.sure(*self._at(carry, depth)).float())[..., None], ids

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        if carry.memory is not None:
            carry = replace(carry, memory=carry.memory.take_along_dim(chain[..., None], 1))
        return self._said(super().advance(carry, chain, tokens, depth), depth)

    def next_pass(self, carry: Carry, depth: int) -> Carry:  # noqa: ARG002
        raise AssertionError(f"a block ends behind {depth} tokens, and so does its draft")
