"""Coupled sequential glancing distillation: a head that predicts in blocks is shown some of the answers.

Falcon's method to teach a block's positions to depend on each other. The head first predicts without gradients. Then
some positions at the beginnings of blocks get, instead of their own state and token, those that they should predict, so
that later positions of the block learn to go on from them. Their number is a share of the head's mistakes, and the
share falls during training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.heads.base import later
from slipstream.heads.blocks import Blocks

SHARE, LEAST = 0.35, 0.1  # of the mistakes: the sum at the beginning, LEAST at the end, as published
NOISE = 0.1  # uniform noise on states is at most this large
_LOGITS = 1 << 27  # logits computed at a time, at most


@dataclass(frozen=True)
class Practice:
    """State of the training that glancing depends on."""

    counted: Tensor  # (b, t) bool: the tokens that count
    seed: int  # of random choices, different at each step
    done: float  # share of the run


def glance(head: Any, states: Tensor, tokens: Tensor, blocks: Blocks, practice: Practice) -> tuple[Tensor, Tensor]:
    """The states (b, t, H) and the tokens after them (b, t) that the head is given."""
    random = torch.Generator(tokens.device).manual_seed(practice.seed)
    following, k = later(tokens, 1), head.config.block

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=tokens.device)

    noisy = states + NOISE * (2 * drawn(*states.shape) - 1)
    if k == 1:  # a block has no later position
        return noisy, following
    wrong = mistakes(head, noisy, following, tokens, blocks, practice.counted)  # (b,)
    wanted = (SHARE * (1 - practice.done) + LEAST) * wrong
    # In random blocks, the first 1 to k - 1 positions, k / 2 on average: as many blocks as give that number together.
    ends = blocks.ends(tokens.device)
    order = drawn(len(tokens), blocks.count).argsort(1).argsort(1)  # (b, count) each block's place in a random order
    some = order * (k / 2) < wanted[:, None]
    run = 1 + (drawn(len(tokens), blocks.count) * (k - 1)).long()
    place = torch.arange(k, device=tokens.device)
    shown = some[..., None] & (place < run[..., None])  # (b, count, k)
    at = (ends[:, None] - k + 1 + place).flatten()  # (count·k,)
    shown = torch.zeros_like(practice.counted).index_copy(1, at, shown.flatten(1))
    known = torch.arange(blocks.length, device=tokens.device) < blocks.length - k - 1  # the answer lies within the text
    shown &= known
    answers = noisy.roll(-k, 1).where(shown[..., None], noisy)
    return answers, later(tokens, 1 + k).where(shown, following)


@torch.no_grad()
def mistakes(head: Any, states: Tensor, following: Tensor, tokens: Tensor, blocks: Blocks, counted: Tensor) -> Tensor:
    """(b,) how many of the tokens that count are predicted wrongly in the first pass."""
    k = head.config.block
    first = Blocks(blocks.length, min(k, blocks.depths), blocks.stride, blocks.first)
    features = head.blocks(states, following, tokens, first)  # (b, count, depths, H)
    about = first.following(tokens, 1 + first.depths)[..., 1:].flatten(1)  # (b, count·depths)
    counts = first.following(counted, 1 + first.depths)[..., 1:].flatten(1)
    rows, size = features.flatten(0, 2), max(1, _LOGITS // head.config.vocab_size)
    best = torch.cat([head.logits(part).argmax(-1) for part in rows.split(size)]).view_as(about)
    return ((best != about) & counts).sum(1)
