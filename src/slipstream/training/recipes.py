"""Recipes: how each kind of head is unrolled over a text, and the weights of its loss.

A head predicts at every position of a text at once. `unroll` returns the head's last states: logits are computed later,
and only at positions that count.
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

SPACING = 4  # positions between blocks. DeepSpec has 512 blocks of 7 in 4,096 tokens, one per 8; z-lab the same of 16


@dataclass(frozen=True)
class Guess:
    """The predictions of one depth at every position, before the output matrix."""

    inputs: tuple[Tensor, ...]  # each (b, t, ·)
    read: Callable[..., Tensor]  # the same rows of each input, (n, ·) -> (n, V') logits
    # The same rows -> (n,) the logit of the probability of acceptance, which some heads predict too.
    sure: Callable[..., Tensor] | None = None
    # Set if whole blocks are predicted, after some positions only. Then inputs are (b, blocks·depths, ·). A token may
    # be in several blocks: `turn` says in which of them it is predicted here, 0 is the nearest.
    blocks: Blocks | None = None
    turn: int = 0

    def aims(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every counted token, (n,) each: the row of its prediction, whether there is one, and its depth. depth: of
        all predictions, if there are no blocks."""
        if self.blocks is None:
            rows, reaches = batch.aims(depth)
            return rows, reaches, torch.full_like(rows, depth)
        return self.blocks.aims(batch.columns, batch.places // batch.tokens.shape[1], self.turn)


# head, states (b, t, ·), tokens (b, t), depths, and the state of the training (None: the head is only evaluated)
Unroll = Callable[[Any, Tensor, Tensor, int, Practice | None], Iterator[Guess]]


@dataclass(frozen=True)
class Recipe:
    unroll: Unroll
    depths: int | None  # predicted in training; None: as many as the head can
    rate: float  # the highest learning rate
    tokens: float = 1.0  # weight of the token loss
    features: float = 0.0  # weight of the smooth L1 distance between a prediction's first input and the true state
    labels: str = "distill"  # the default labels: one of `losses.LABELS`
    top: int = 0  # HASS: add the cross-entropy over so many of the target's best tokens
    sizes: Mapping[str, str] = field(default_factory=dict)  # options of the command, and the head's names for them

    def depths_for(self, head: Head) -> int:
        """How many depths this head predicts in training."""
        return self.depths or head.trained_depths or 5


def every_position(
    head: UnrolledHead, states: Tensor, tokens: Tensor, depths: int, _: Practice | None = None
) -> Iterator[Guess]:
    for inputs, read in head.unroll(states, tokens, depths):
        yield Guess(inputs, read)


def falcon(head: Any, states: Tensor, tokens: Tensor, depths: int, practice: Practice | None = None) -> Iterator[Guess]:
    """Each token is predicted once, in its block. Beyond the first pass the head reads its own predictions."""
    k, read, following = head.config.block, states, later(tokens, 1)
    blocks = Blocks(tokens.shape[1], depths, -(-depths // k) * k, k - 1)
    if practice is not None:
        blocks = replace(blocks, first=k - 1 + practice.seed % blocks.stride)
        read, following = glance(head, states, tokens, blocks, practice)
    features = head.blocks(read, following, tokens, blocks).flatten(1, 2)
    yield Guess((features,), head.logits, blocks=blocks)


def dflash(head: Any, states: Tensor, tokens: Tensor, depths: int, practice: Practice | None = None) -> Iterator[Guess]:
    """Blocks after evenly spaced positions, so that each token is predicted equally often."""
    blocks = Blocks(tokens.shape[1], depths, min(SPACING, depths))
    if practice is not None:
        blocks = replace(blocks, first=practice.seed % blocks.stride)
    hidden, before = head.hidden_blocks(states, tokens, blocks), blocks.following(tokens)
    inputs, read = [hidden], head.logits
    if (latent := head.latents(hidden, before)) is not None:
        inputs.append(latent)
    sure = None
    if head.config.confidence:  # the last input is only for the confidence
        inputs.append(before)
        read, sure = _all_but_last(head.logits), _first_and_last(head.sure)
    rows = tuple(x.flatten(1, 2) for x in inputs)
    for turn in range(blocks.turns):
        yield Guess(rows, read, sure, blocks, turn)


def spire(head: Any, states: Tensor, tokens: Tensor, depths: int, practice: Practice | None = None) -> Iterator[Guess]:
    """A block after every `depths` positions, so that each token is predicted once."""
    blocks = Blocks(tokens.shape[1], depths, depths)
    if practice is not None:
        blocks = replace(blocks, first=practice.seed % blocks.stride)
    yield Guess((head.hidden_blocks(states, tokens, blocks).flatten(1, 2),), head.output, blocks=blocks)


def _all_but_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: function(*rows[:-1])


def _first_and_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: function(rows[0], rows[-1])


def named(*same: str, **others: str) -> dict[str, str]:
    """Options for sizes: `same` have the same name in the head's config, `others` map to another name."""
    return {name: name for name in same} | others


RECIPES = {
    "medusa": Recipe(every_position, None, 1e-3, sizes=named("heads", "tied", layers="blocks")),
    "redrafter": Recipe(every_position, 5, 1e-3, sizes=named("layers", "draft_vocab", "rnn", inner_dim="exit_dim")),
    "mlp": Recipe(every_position, None, 1e-3, sizes=named("inner_dim", heads="n_predict", tied="tie_weights")),
    "eagle": Recipe(every_position, 1, 1e-3, tokens=0.1, features=1.0, sizes=named(inner_dim="intermediate_size")),
    "eagle3": Recipe(every_position, 5, 1e-3, sizes=named("draft_vocab", "tied", inner_dim="intermediate_size")),
    # Published: 3e-5 for 20 epochs, and a second loss on hard labels drawn from the target's distribution. Its
    # expectation is the cross-entropy against the distribution, so one loss is enough.
    "falcon": Recipe(falcon, None, 1e-3, tokens=0.1, features=1.0, sizes=named("block", inner_dim="intermediate_size")),
    "dflash": Recipe(
        dflash,
        None,
        1e-3,
        sizes=named("block", "layers", "bias", "confidence", "draft_vocab", "tied", inner_dim="intermediate_size"),
    ),
    # A third of other heads' learning rate, since its layers start from the target's.
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
    """The sizes under the head's own names. Unknown ones raise."""
    known = find(name).sizes
    if unknown := [size for size in given if size not in known]:
        has = ", ".join("--" + size.replace("_", "-") for size in known)
        wrong = ", ".join("--" + size.replace("_", "-") for size in unknown)
        raise OptionError(f"{name} has no {wrong}: its sizes are {has}")
    return {known[size]: value for size, value in given.items()}
