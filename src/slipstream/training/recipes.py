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


@dataclass(frozen=True)
class Guess:
    """One depth of guesses at every position, before the vocabulary."""

    inputs: tuple[Tensor, ...]  # each (b, t, ·)
    read: Callable[..., Tensor]  # the same rows of each input, (n, ·) -> (n, V') logits


Unroll = Callable[[Any, Tensor, Tensor, int], Iterator[Guess]]  # head, states (b, t, ·), tokens (b, t), depths


@dataclass(frozen=True)
class Recipe:
    unroll: Unroll
    depths: int | None  # guessed in training; None: as many as the head can
    rate: float  # the learning rate at its peak
    tokens: float = 1.0  # weight of the cross-entropy
    features: float = 0.0  # weight of the smooth L1 distance between a guess's first input and the true state
    top: int = 0  # HASS: the cross-entropy over so many of the target's best tokens is added
    sizes: tuple[tuple[str, str], ...] = ()  # options of the command, and the names that the head has for them


def medusa(head: Any, states: Tensor, _: Tensor, depths: int) -> Iterator[Guess]:
    for k in range(depths):
        yield Guess((states,), partial(head.logits, k=k))


def redrafter(head: Any, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Guess]:
    state = head.start(states, later(tokens, 1))  # (b, t, H)
    for k in range(depths):
        if k:
            state = head.advance(state, later(tokens, 1 + k))
        yield Guess((states, state), head.logits)


def mlp(head: Any, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Guess]:
    state = head.start(states, later(tokens, 1))  # (b, t, inner)
    for k in range(depths):
        if k:
            state = head.advance(state, later(tokens, 1 + k), k)
        yield Guess((state,), partial(head.logits, depth=k))


def eagle(head: Any, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Guess]:
    """From depth 1 on the head reads its own features: HASS's aligned contexts, EAGLE-3's training-time test."""
    features, attends = head.read(states), head.chains()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    for k in range(depths):
        features = head.step(later(tokens, 1 + k), features, positions + k, *attends)  # (b, t, H)
        yield Guess((features,), head.logits)


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
