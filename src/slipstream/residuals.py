"""Decisions of the rejection rule for all nodes of a tree at once, on a GPU.

Waiting for a single number takes longer there than computing all of them. So everything is computed where the logits
are, as one captured function, and one table is copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.targets.base import Scores
from slipstream.tree import TokenTree

SMALLEST = 1e-300  # lower limit of a divisor
LEAST = 1e-250  # of q: less counts as nothing and is never drawn, so that what is left of q can always be normalised
GIVEN = 4  # columns of a table before the children's tokens


@dataclass(frozen=True)
class Decisions:
    """By node. A child's chance is that of being accepted after those before it were rejected."""

    chances: NDArray[np.float64]  # (n, k), children in draw order
    masses: NDArray[np.float64]  # (n, k) the mass left of p after the child is rejected too
    drawn: NDArray[np.float64]  # (n, 2) the token drawn from what all of them leave, and its mass

    def at(self, node: int) -> tuple[list[float], list[float], list[float]]:
        return self.chances[node].tolist(), self.masses[node].tolist(), self.drawn[node].tolist()


def decide(tree: TokenTree, scores: Scores, sampler: Sampler) -> Decisions | None:
    """The decisions for a walk that begins now. None if they can't be captured, or depend on the text."""
    s = sampler.sampling
    if scores.captured is None or s.greedy or s.adjusts or s.filters:
        return None
    given, step_logits = table(tree, scores, sampler), (scores.of_step,)
    if tree.q is None:
        found = scores.captured(reject_certain).fetch(given, still=step_logits)
    else:
        found = scores.captured(reject_drawn).fetch(given, tree.q, still=step_logits)
    numbers = found.numpy()[: len(tree)].copy()
    most = (numbers.shape[1] - 2) // 2
    return Decisions(numbers[:, :most], numbers[:, most:-2], numbers[:, -2:])


def table(tree: TokenTree, scores: Scores, sampler: Sampler) -> Tensor:
    """(n, GIVEN + 2k) float64, one line per node; n and k are rounded up, so that few shapes are captured. Columns: the
    row of the node's logits; its row of q (-1: none); the uniform number to draw with; the temperature; k tokens of
    children; k flags: 1 for a child, 0 for padding and for a child equal to an earlier one."""
    children: dict[int, list[int]] = {}
    for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True):
        children.setdefault(parent, []).append(token)
    rows, most = _rounded(len(tree)), _rounded(max(map(len, children.values()), default=1))
    made = np.zeros((rows, GIVEN + 2 * most))
    made[:, 1], made[:, 3] = -1, sampler.sampling.temperature
    made[:, GIVEN : GIVEN + most] = range(most)
    made[: len(tree), 0] = scores.rows(range(len(tree)))
    made[: len(tree), 2] = np.array(sampler.shares(1 + tree.depth))[tree.depths]
    if tree.q_row is not None:
        made[: len(tree), 1] = tree.q_row
    if children:
        lines = [_line(mine, most) for mine in children.values()]
        made[list(children), GIVEN:] = lines
    return torch.from_numpy(made)


def _rounded(n: int) -> int:
    """Up to a power of two."""
    return 1 << (n - 1).bit_length()


def _line(tokens: list[int], most: int) -> list[int]:
    """The tokens and flags of a node's children. Of equal ones only the first counts, since they are rejected together.
    The others, and padding, get ids that no child has."""
    new = [token not in tokens[:i] for i, token in enumerate(tokens)]
    free = (i for i in count() if i not in tokens)
    padding = [0] * (most - len(tokens))
    return [t if first else next(free) for t, first in zip([*tokens, *padding], [*new, *padding], strict=True)] + [
        *new,
        *padding,
    ]


# ---- on the device


def _read(table: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p (n, V), the tokens (n, k), and their flags."""
    most = (table.shape[1] - GIVEN) // 2
    warm = logits[table[:, 0].long()].float() / table[:, 3:4].float()
    return torch.softmax(warm.double(), -1), table[:, GIVEN : GIVEN + most].long(), table[:, GIVEN + most :] > 0


def _draw(left: Tensor, share: Tensor) -> Tensor:
    """(n, 2) as `Sampler.drawn`."""
    total = left.cumsum(1)
    reached = torch.where(left > 0, total, -1.0)
    token = (reached >= share[:, None] * reached.amax(1, keepdim=True)).byte().argmax(1)
    return torch.stack([token.to(left.dtype), total[:, -1]], 1)


def reject_certain(table: Tensor, logits: Tensor) -> Tensor:
    """For children without q: each is accepted with its share of what is left of p, else removed from it."""
    p, tokens, real = _read(table, logits)
    shares = p.gather(1, tokens) * real
    left = p.scatter(1, tokens, p.gather(1, tokens) * ~real)
    # After each child: the rest of p plus the children after it. A sum, since a difference may be rounded to 0.
    behind = torch.cat([shares[:, 1:], torch.zeros_like(shares[:, :1])], 1).flip(1).cumsum(1).flip(1)
    after = left.sum(1, keepdim=True) + behind
    chances = shares / (shares + after).clamp_min(SMALLEST)
    return torch.cat([chances, after, _draw(left, table[:, 2])], 1)


def reject_drawn(table: Tensor, q: Tensor, logits: Tensor) -> Tensor:
    """For children drawn from q without replacement; nodes without q as in `reject_certain`."""
    left, tokens, real = _read(table, logits)
    drawn = table[:, 1:2] >= 0
    other = q[table[:, 1].clamp_min(0).long()].to(left)
    chances, masses = torch.ones_like(real, dtype=left.dtype), torch.ones_like(real, dtype=left.dtype)
    for i in range(tokens.shape[1]):
        x, now = tokens[:, i : i + 1], real[:, i : i + 1]
        at = left.gather(1, x)
        chances[:, i : i + 1] = torch.where(now, torch.where(drawn, at / other.gather(1, x), at), 0.0)
        less = torch.where(drawn, (left - other).clamp_min(0.0), left).scatter(1, x, 0.0)
        mass = less.sum(1, keepdim=True)
        masses[:, i : i + 1] = torch.where(now, mass, 1.0)
        left = torch.where(now, less / mass.clamp_min(SMALLEST), left)
        rest = other.scatter(1, x, 0.0)
        other = torch.where(now, rest / rest.sum(1, keepdim=True).clamp_min(SMALLEST), other)
    return torch.cat([chances, masses, _draw(left, table[:, 2])], 1)
