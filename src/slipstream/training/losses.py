"""Losses and their gradients, in pieces: logits are computed for few positions at a time, and only where tokens count.

In this file `said` is the target's distribution, which a prediction is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.training.data import Batch
from slipstream.training.recipes import Guess, Recipe
from slipstream.training.teacher import Speaker, Teacher

_LOGITS = 1 << 27  # logits computed at a time, at most


@dataclass(frozen=True)
class Labels:
    """What a prediction is compared with."""

    soft: bool = True  # cross-entropy against the target's distribution; else against the tokens of the data
    entropy: float = 1.0  # weight of the cross-entropy
    # Weight of the L1 distance from the target's distribution. It is twice the total variation, which is the
    # probability that a sampled draft token is rejected.
    apart: float = 0.0


LABELS = {
    "distill": Labels(),
    "hard": Labels(soft=False),
    "tv": Labels(soft=False, entropy=0.1, apart=0.9),  # DSpark's
    "overlap": Labels(entropy=0.5, apart=0.25),  # SPIRe's: half cross-entropy, half total variation
}


@dataclass(frozen=True)
class Weights:
    recipe: Recipe
    decay: float = 0.8  # the weight of a depth, relative to the depth before
    labels: Labels = Labels()


def backward(
    guesses: Iterable[Guess], batch: Batch, last: Tensor, teacher: Teacher, weights: Weights, by: int
) -> Tensor:
    """Add the gradient of a batch's loss, divided `by`, to the head's parameters, and return the loss (a scalar).

    Each piece is backpropagated at once, down to the inputs of the output matrix. The gradients summed up there are
    backpropagated through the rest of the head at the end.
    """
    roots, leaves = [], []
    for guess in guesses:
        roots.append(guess)
        leaves.append([x.detach().requires_grad_() if x.requires_grad else x for x in guess.inputs])
    total = torch.zeros((), device=last.device)
    for piece in pieces(batch, teacher):
        true = last.flatten(0, 1).index_select(0, piece.places - 1)  # (n, H) the states that chose the tokens
        asked = weights.labels.soft or weights.labels.apart or weights.recipe.top or any(guess.sure for guess in roots)
        said = teacher.distribution(true) if asked else None  # (n, V')
        labels, known = teacher.labels(batch.tokens.flatten().index_select(0, piece.places))
        for k, (guess, inputs) in enumerate(zip(roots, leaves, strict=True)):
            rows, reaches, depth = guess.aims(piece, k)
            own = [x.flatten(0, 1).index_select(0, rows) for x in inputs]
            logits = guess.read(*own).float()
            each = token_loss(logits, labels, said, weights) * known  # (n,)
            if guess.sure is not None and said is not None:
                each = each + accepted_loss(guess.sure(*own).float(), logits, said)
            if weights.recipe.features:
                near = functional.smooth_l1_loss(own[0].float(), true.float(), reduction="none").mean(-1)
                each = each + weights.recipe.features * near
            loss = (each * reaches * weights.decay**depth).sum() / by
            loss.backward()
            total += loss.detach()
    grown = [
        (x, leaf.grad)
        for guess, inputs in zip(roots, leaves, strict=True)
        for x, leaf in zip(guess.inputs, inputs, strict=True)
        if leaf is not x and leaf.grad is not None
    ]
    if grown:
        torch.autograd.backward([x for x, _ in grown], [grad for _, grad in grown])
    return total


def token_loss(logits: Tensor, labels: Tensor, said: Tensor | None, weights: Weights) -> Tensor:
    """(n, V'), (n,), (n, V') -> (n,)."""
    norm, labelled = logits.logsumexp(-1), weights.labels
    if labelled.soft and said is not None:
        loss = norm - (said * logits).sum(-1)
    else:
        loss = norm - logits.gather(-1, labels[:, None])[:, 0]
    loss = labelled.entropy * loss
    if labelled.apart and said is not None:
        loss = loss + labelled.apart * ((logits - norm[:, None]).exp() - said).abs().sum(-1)
    loss = weights.recipe.tokens * loss
    if weights.recipe.top and said is not None:
        best, ids = said.topk(min(weights.recipe.top, said.shape[-1]), -1)
        loss = loss + (best * (norm[:, None] - logits.gather(-1, ids))).sum(-1)
    return loss


def accepted_loss(sure: Tensor, logits: Tensor, said: Tensor) -> Tensor:
    """(n,), (n, V'), (n, V') -> (n,): the loss of the predicted probability of acceptance, whose logit is `sure`. A
    token drawn from the head is accepted with the probability that is the overlap of both distributions."""
    common = torch.minimum(logits.detach().softmax(-1), said).sum(-1)
    return functional.binary_cross_entropy_with_logits(sure, common, reduction="none")


@torch.no_grad()
def hits(guesses: Iterable[Guess], batch: Batch, teacher: Teacher, depths: int) -> Tensor:
    """(depths, 2): how many predictions equal the token of the data, and how many there are."""
    found = torch.zeros(depths, 2, device=batch.tokens.device, dtype=torch.long)
    for k, guess in enumerate(guesses):
        for piece in pieces(batch, teacher):
            rows, reaches, depth = guess.aims(piece, k)
            logits = guess.read(*(x.flatten(0, 1).index_select(0, rows) for x in guess.inputs))
            labels, known = teacher.labels(batch.tokens.flatten().index_select(0, piece.places))
            hit = (logits.argmax(-1) == labels) & known & reaches
            found.index_add_(0, depth, torch.stack((hit, reaches), 1).long())
    return found


def pieces(batch: Batch, teacher: Speaker) -> Iterator[Batch]:
    size = max(1, _LOGITS // teacher.vocabulary)
    for places, columns in zip(batch.places.split(size), batch.columns.split(size), strict=True):
        yield Batch(batch.tokens, places, columns)
