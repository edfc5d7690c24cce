"""Coupled sequential glancing distillation: a head that guesses in blocks is shown some of the answers.

Falcon's way to teach the tokens of a block about each other. The head guesses once, without learning. As many positions
as a share of its mistakes then read, instead of their own state and token, those that they are asked for, at the
beginning of their block, so that the places after them learn what follows. The share falls while the head learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.heads.base import later
from slipstream.heads.blocks import Blocks

SHARE, LEAST = 0.35, 0.1  # of the mistakes: at the beginning both, in the end the latter, as published
NOISE = 0.1  # the most that is added to a state or taken from it
_LOGITS = 1 << 27  # computed at once, at most


@dataclass(frozen=True)
class Practice:
    """Where the training is."""

    counted: Tensor  # (b, t) bool: the tokens that are learnt
    seed: int  # of what is drawn: another one at each step
    done: float  # share of the run


def glance(head: Any, states: Tensor, tokens: Tensor, blocks: Blocks, practice: Practice) -> tuple[Tensor, Tensor]:
    """The states (b, t, H) and the tokens after them (b, t) as they are read."""
    random = torch.Generator(tokens.device).manual_seed(practice.seed)
    following, k = later(tokens, 1), head.config.block

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=tokens.device)

    noisy = states + NOISE * (2 * drawn(*states.shape) - 1)
    if k == 1:  # there is nobody to learn from it
        return noisy, following
    wrong = mistakes(head, noisy, following, tokens, blocks, practice.counted)  # (b,)
    wanted = (SHARE * (1 - practice.done) + LEAST) * wrong
    # Runs of 1 to k - 1 positions at the beginnings of blocks, as many blocks as make up that number.
    ends = blocks.ends(tokens.device)
    order = drawn(len(tokens), blocks.count).argsort(1).argsort(1)  # (b, count) each block's place in a random order
    some = order * (k / 2) < wanted[:, None]
    run = 1 + (drawn(len(tokens), blocks.count) * (k - 1)).long()
    place = torch.arange(k, device=tokens.device)
    shown = some[..., None] & (place < run[..., None])  # (b, count, k)
    at = (ends[:, None] - k + 1 + place).flatten()  # (count·k,)
    shown = torch.zeros_like(practice.counted).index_copy(1, at, shown.flatten(1))
    known = torch.arange(blocks.length, device=tokens.device) < blocks.length - k - 1  # what is asked for is there
    shown &= known
    answers = noisy.roll(-k, 1).where(shown[..., None], noisy)
    return answers, later(tokens, 1 + k).where(shown, following)


@torch.no_grad()
def mistakes(head: Any, states: Tensor, following: Tensor, tokens: Tensor, blocks: Blocks, counted: Tensor) -> Tensor:
    """(b,) how many of the tokens that count are guessed wrong in the first pass."""
    k = head.config.block
    first = Blocks(blocks.length, min(k, blocks.depths), blocks.stride, blocks.first)
    features = head.blocks(states, following, tokens, first)  # (b, count, depths, H)
    about = first.following(tokens, 1 + first.depths)[..., 1:].flatten(1)  # (b, count·depths)
    counts = first.following(counted, 1 + first.depths)[..., 1:].flatten(1)
    rows, size = features.flatten(0, 2), max(1, _LOGITS // head.config.vocab_size)
    best = torch.cat([head.logits(part).argmax(-1) for part in rows.split(size)]).view_as(about)
    return ((best != about) & counts).sum(1)
