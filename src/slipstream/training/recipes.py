"""Recipes: how each kind of head is unrolled over a text, and what its training weighs.

A head guesses at every position of a text at once. `unroll` goes only as far as the head's last states: the vocabulary
is entered later, at the positions that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import OptionError
from slipstream.heads.base import Head, UnrolledHead, later
from slipstream.heads.blocks import Blocks
from slipstream.training.data import Batch
from slipstream.training.glancing import Practice, glance

SPACING = 4  # positions between blocks. DeepSpec's 512 blocks of 7 in 4,096 tokens are one in 8, z-lab's of 16 alike


@dataclass(frozen=True)
class Guess:
    """One depth of guesses at every position, before the vocabulary."""

    inputs: tuple[Tensor, ...]  # each (b, t, ·)
    read: Callable[..., Tensor]  # the same rows of each input, (n, ·) -> (n, V') logits
    # The same rows -> (n,) the logit of being accepted, which some heads guess too.
    sure: Callable[..., Tensor] | None = None
    # Where whole blocks are guessed, at some positions alone: inputs are (b, blocks·depths, ·) then. A token lies in
    # several blocks; the guess that counts here is that of the turn-th, the nearest being 0.
    blocks: Blocks | None = None
    turn: int = 0

    def aims(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every counted token, (n,) each: the row of its guess, whether there is one, and its depth. depth: that of
        all, unless there are blocks."""
        if self.blocks is None:
            rows, reaches = batch.aims(depth)
            return rows, reaches, torch.full_like(rows, depth)
        return self.blocks.aims(batch.columns, batch.places // batch.tokens.shape[1], self.turn)


# head, states (b, t, ·), tokens (b, t), depths; and what is known of the training, None where a head is only measured
Unroll = Callable[[Any, Tensor, Tensor, int, Practice | None], Iterator[Guess]]


@dataclass(frozen=True)
class Recipe:
    unroll: Unroll
    depths: int | None  # guessed in training; None: as many as the head can
    rate: float  # the learning rate at its peak
    tokens: float = 1.0  # weight of the cross-entropy
    features: float = 0.0  # weight of the smooth L1 distance between a guess's first input and the true state
    labels: str = "distill"  # what is learnt, unless told: one of `losses.LABELS`
    top: int = 0  # HASS: the cross-entropy over so many of the target's best tokens is added
    sizes: Mapping[str, str] = field(default_factory=dict)  # options of the command, and the head's names for them

    def depths_for(self, head: Head) -> int:
        """Guessed in training, by a head of this kind."""
        return self.depths or head.trained_depths or 5


def every_position(
    head: UnrolledHead, states: Tensor, tokens: Tensor, depths: int, _: Practice | None = None
) -> Iterator[Guess]:
    for inputs, read in head.unroll(states, tokens, depths):
        yield Guess(inputs, read)


def falcon(head: Any, states: Tensor, tokens: Tensor, depths: int, practice: Practice | None = None) -> Iterator[Guess]:
    """Each token is guessed once, in the block that it falls into. Beyond one block the head reads its own guesses."""
    k, read, following = head.config.block, states, later(tokens, 1)
    blocks = Blocks(tokens.shape[1], depths, -(-depths // k) * k, k - 1)
    if practice is not None:
        blocks = replace(blocks, first=k - 1 + practice.seed % blocks.stride)
        read, following = glance(head, states, tokens, blocks, practice)
    features = head.blocks(read, following, tokens, blocks).flatten(1, 2)
    yield Guess((features,), head.logits, blocks=blocks)


def dflash(head: Any, states: Tensor, tokens: Tensor, depths: int, practice: Practice | None = None) -> Iterator[Guess]:
    """Blocks after some positions, the same distance apart, so that each token is guessed equally often."""
    blocks = Blocks(tokens.shape[1], depths, min(SPACING, depths))
    if practice is not None:
        blocks = replace(blocks, first=practice.seed % blocks.stride)
    hidden, before = head.hidden_blocks(states, tokens, blocks), blocks.following(tokens)
    inputs, read = [hidden], head.logits
    if (latent := head.latents(hidden, before)) is not None:
        inputs.append(latent)
    sure = None
    if head.config.confidence:  # the last input is for that alone
        inputs.append(before)
        read, sure = _all_but_last(head.logits), _first_and_last(head.sure)
    rows = tuple(x.flatten(1, 2) for x in inputs)
    for turn in range(blocks.turns):
        yield Guess(rows, read, sure, blocks, turn)


def spire(head: Any, states: Tensor, tokens: Tensor, depths: int, practice: Practice | None = None) -> Iterator[Guess]:
    """A draft after every so many positions as it is deep, so that each token is guessed once."""
    blocks = Blocks(tokens.shape[1], depths, depths)
    if practice is not None:
        blocks = replace(blocks, first=practice.seed % blocks.stride)
    yield Guess((head.hidden_blocks(states, tokens, blocks).flatten(1, 2),), head.output, blocks=blocks)


def _all_but_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: function(*rows[:-1])


def _first_and_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: function(rows[0], rows[-1])


def named(*same: str, **others: str) -> dict[str, str]:
    """Options for sizes: those that a head calls the same, and its own names for others."""
    return {name: name for name in same} | others


RECIPES = {
    "medusa": Recipe(every_position, None, 1e-3, sizes=named("heads", "tied", layers="blocks")),
    "redrafter": Recipe(every_position, 5, 1e-3, sizes=named("layers", "draft_vocab", "rnn", inner_dim="exit_dim")),
    "mlp": Recipe(every_position, None, 1e-3, sizes=named("inner_dim", heads="n_predict", tied="tie_weights")),
    "eagle": Recipe(every_position, 1, 1e-3, tokens=0.1, features=1.0, sizes=named(inner_dim="intermediate_size")),
    "eagle3": Recipe(every_position, 5, 1e-3, sizes=named("draft_vocab", "tied", inner_dim="intermediate_size")),
    # Published: 3e-5 for 20 epochs. Its hard labels are drawn from the target's distribution, which is what they are
    # on average, so one cross-entropy does for both.
    "falcon": Recipe(falcon, None, 1e-3, tokens=0.1, features=1.0, sizes=named("block", inner_dim="intermediate_size")),
    "dflash": Recipe(
        dflash,
        None,
        1e-3,
        sizes=named("block", "layers", "bias", "confidence", "draft_vocab", "tied", inner_dim="intermediate_size"),
    ),
    # A third of what others learn with: its layers are the target's, so most is there already.
    "spire": Recipe(
        spire,
        4,
        3e-4,
        labels="overlap",
        sizes=named("layers", "window", "sinks", "feedback", "activations", "pruned", "draft_vocab", "tied"),
    ),
}


def find(name: str, hass: bool = False) -> Recipe:
    if name not in RECIPES:
        raise OptionError(f"there is no head {name!r} to train: there are {', '.join(RECIPES)}")
    if not hass:
        return RECIPES[name]
    if name != "eagle":
        raise OptionError(f"--hass is a way to train eagle, not {name}: leave it out")
    return replace(RECIPES[name], depths=3, top=10)


def name_sizes(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sizes under the head's own names. Those it doesn't have are refused."""
    known = find(name).sizes
    if unknown := [size for size in given if size not in known]:
        has = ", ".join("--" + size.replace("_", "-") for size in known)
        wrong = ", ".join("--" + size.replace("_", "-") for size in unknown)
        raise OptionError(f"{name} has no {wrong}: its sizes are {has}")
    return {known[size]: value for size, value in given.items()}
