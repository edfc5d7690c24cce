"""Losses and their gradients, in pieces: logits are computed for few positions at a time, where tokens count."""

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
    distance: float = 0.0


LABELS = {
    "distill": Labels(),
    "hard": Labels(soft=False),
    "tv": Labels(soft=False, entropy=0.1, distance=0.9),  # DSpark's
    "overlap": Labels(entropy=0.5, distance=0.25),  # SPIRe's: half cross-entropy, half total variation
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
        needs_probs = (
            weights.labels.soft or weights.labels.distance or weights.recipe.top or any(guess.sure for guess in roots)
        )
        target_probs = teacher.distribution(true) if needs_probs else None  # (n, V')
        labels, known = teacher.labels(batch.tokens.flatten().index_select(0, piece.places))
        for k, (guess, inputs) in enumerate(zip(roots, leaves, strict=True)):
            rows, reaches, depth = guess.aims(piece, k)
            own = [x.flatten(0, 1).index_select(0, rows) for x in inputs]
            logits = guess.read(*own).float()
            each = token_loss(logits, labels, target_probs, weights) * known  # (n,)
            if guess.sure is not None and target_probs is not None:
                each = each + confidence_loss(guess.sure(*own).float(), logits, target_probs)
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


def token_loss(logits: Tensor, labels: Tensor, target_probs: Tensor | None, weights: Weights) -> Tensor:
    """(n, V'), (n,), (n, V') -> (n,)."""
    norm, labelled = logits.logsumexp(-1), weights.labels
    if labelled.soft and target_probs is not None:
        loss = norm - (target_probs * logits).sum(-1)
    else:
        loss = norm - logits.gather(-1, labels[:, None])[:, 0]
    loss = labelled.entropy * loss
    if labelled.distance and target_probs is not None:
        loss = loss + labelled.distance * ((logits - norm[:, None]).exp() - target_probs).abs().sum(-1)
    loss = weights.recipe.tokens * loss
    if weights.recipe.top and target_probs is not None:
        best, ids = target_probs.topk(min(weights.recipe.top, target_probs.shape[-1]), -1)
        loss = loss + (best * (norm[:, None] - logits.gather(-1, ids))).sum(-1)
    return loss


def confidence_loss(sure: Tensor, logits: Tensor, target_probs: Tensor) -> Tensor:
    """(n,), (n, V'), (n, V') -> (n,): the loss of the predicted probability of acceptance, whose logit is `sure`. A
    token drawn from the head is accepted with the probability that is the overlap of both distributions."""
    common = torch.minimum(logits.detach().softmax(-1), target_probs).sum(-1)
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
    size = max(1, _LOGITS // teacher.columns)
    for places, columns in zip(batch.places.split(size), batch.columns.split(size), strict=True):
        yield Batch(batch.tokens, places, columns)
