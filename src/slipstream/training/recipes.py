"""Recipes: how each kind of head is unrolled over a text, and what its training weighs.

A head guesses at every position of a text at once. `unroll` goes only as far as the head's last states: the vocabulary
is entered later, at the positions that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import OptionError
from slipstream.heads.base import later
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
    # Where guesses are made at some positions alone, but several depths of them: inputs are (b, blocks·depths, ·) then,
    # and of the blocks in which a token is guessed, this is about the turn-th.
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
    sizes: tuple[tuple[str, str], ...] = ()  # options of the command, and the names that the head has for them


def medusa(head: Any, states: Tensor, tokens: Tensor, depths: int, _: Practice | None = None) -> Iterator[Guess]:  # noqa: ARG001
    for k in range(depths):
        yield Guess((states,), partial(head.logits, k=k))


def redrafter(head: Any, states: Tensor, tokens: Tensor, depths: int, _: Practice | None = None) -> Iterator[Guess]:
    state = head.start(states, later(tokens, 1))  # (b, t, H)
    for k in range(depths):
        if k:
            state = head.advance(state, later(tokens, 1 + k))
        yield Guess((states, state), head.logits)


def mlp(head: Any, states: Tensor, tokens: Tensor, depths: int, _: Practice | None = None) -> Iterator[Guess]:
    state = head.start(states, later(tokens, 1))  # (b, t, inner)
    for k in range(depths):
        if k:
            state = head.advance(state, later(tokens, 1 + k), k)
        yield Guess((state,), partial(head.logits, depth=k))


def eagle(head: Any, states: Tensor, tokens: Tensor, depths: int, _: Practice | None = None) -> Iterator[Guess]:
    """From depth 1 on the head reads its own features: HASS's aligned contexts, EAGLE-3's training-time test."""
    features, attends = head.read(states), head.chains()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    for k in range(depths):
        features = head.step(later(tokens, 1 + k), features, positions + k, *attends)  # (b, t, H)
        yield Guess((features,), head.logits)


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
    """Blocks behind some positions, the same distance apart, so that each token is guessed equally often."""
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
    """A draft behind every so many positions as it is deep, so that each token is guessed once."""
    blocks = Blocks(tokens.shape[1], depths, depths)
    if practice is not None:
        blocks = replace(blocks, first=practice.seed % blocks.stride)
    yield Guess((head.hidden_blocks(states, tokens, blocks).flatten(1, 2),), head.output, blocks=blocks)


def _all_but_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: function(*rows[:-1])


def _first_and_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: function(rows[0], rows[-1])


RECIPES = {
    "medusa": Recipe(medusa, None, 1e-3, sizes=(("heads", "heads"), ("layers", "blocks"), ("tied", "tied"))),
    "redrafter": Recipe(
        redrafter,
        5,
        1e-3,
        sizes=(("layers", "layers"), ("inner_dim", "exit_dim"), ("draft_vocab", "draft_vocab"), ("rnn", "rnn")),
    ),
    "mlp": Recipe(mlp, None, 1e-3, sizes=(("heads", "n_predict"), ("inner_dim", "inner_dim"), ("tied", "tie_weights"))),
    "eagle": Recipe(eagle, 1, 1e-3, tokens=0.1, features=1.0, sizes=(("inner_dim", "intermediate_size"),)),
    "eagle3": Recipe(
        eagle, 5, 1e-3, sizes=(("inner_dim", "intermediate_size"), ("draft_vocab", "draft_vocab"), ("tied", "tied"))
    ),
    # Published: 3e-5 for 20 epochs. Its hard labels are drawn from the target's distribution, which is what they are
    # on average, so one cross-entropy does for both.
    "falcon": Recipe(
        falcon, None, 1e-3, tokens=0.1, features=1.0, sizes=(("block", "block"), ("inner_dim", "intermediate_size"))
    ),
    "dflash": Recipe(
        dflash,
        None,
        1e-3,
        sizes=(
            ("block", "block"),
            ("layers", "layers"),
            ("inner_dim", "intermediate_size"),
            ("bias", "bias"),
            ("confidence", "confidence"),
            ("draft_vocab", "draft_vocab"),
            ("tied", "tied"),
        ),
    ),
    # A third of what others learn with: its layers are the target's, so most is there already.
    "spire": Recipe(
        spire,
        4,
        3e-4,
        labels="overlap",
        sizes=(
            ("layers", "layers"),
            ("window", "window"),
            ("sinks", "sinks"),
            ("feedback", "feedback"),
            ("activations", "activations"),
            ("pruned", "pruned"),
            ("draft_vocab", "draft_vocab"),
            ("tied", "tied"),
        ),
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
    known = dict(find(name).sizes)
    if unknown := [size for size in given if size not in known]:
        has = ", ".join("--" + size.replace("_", "-") for size in known)
        wrong = ", ".join("--" + size.replace("_", "-") for size in unknown)
        raise OptionError(f"{name} has no {wrong}: its sizes are {has}")
    return {known[size]: value for size, value in given.items()}
