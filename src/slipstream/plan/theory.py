"""The theory of speculative decoding as pure functions: expected tokens, time, operations, and the best draft.

α is the chance that a drafted token is accepted, given that all before it were; γ is how many are drafted; c is the
time of one drafted token over that of one plain step of the target. Survival is α as it is measured: the chance that a
step keeps at least 1, 2, … drafted tokens, whatever the shape of its draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from slipstream.budget.chains import expected_tokens

FURTHEST = 64  # tokens ahead that are looked at for the best γ: nobody drafts more

StepTime = Callable[[int], float]  # of a step that verifies so many rows, over that of a step with one


def flat(_rows: int) -> float:
    """The papers' assumption: verifying takes as long as decoding one token."""
    return 1.0


# ---- how many tokens


def acceptance(p: Sequence[float], q: Sequence[float], lenience: float = 1.0) -> float:
    """The chance that a token drawn from q is accepted against p: the sum of min(p / l, q)."""
    return sum(min(a / lenience, b) for a, b in zip(p, q, strict=True))


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """D_LK of the two, which is 1 - acceptance(p, q)."""
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def lenient_range(alpha: float, lenience: float) -> tuple[float, float]:
    """Between which values lenience l puts α, whatever p and q are: min(p / l, q) is at least min(p, q), and neither
    more than that divided by l, nor in sum more than 1."""
    return alpha, min(1.0, alpha / lenience)


def survival(alpha: float, gamma: int) -> list[float]:
    """The chance that at least 1, 2, …, γ drafted tokens are kept, if each is accepted with α."""
    return [alpha**k for k in range(1, gamma + 1)]


def tokens_of(reached: Sequence[float]) -> float:
    """Tokens of a step from its survival: each drafted token counts with the chance that it is kept."""
    return 1 + sum(reached)


def alpha_of(tokens: float, gamma: int) -> float:
    """The α whose chains of γ give so many tokens per step: the inverse of `expected_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halves an interval of 1 down to the last bit of a float
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return low


# ---- trees


def ranks(alpha: float, width: int, fade: float) -> list[float]:
    """The chance that the 1st, 2nd, … best child is right, given that its parent is. Each further one is right with
    `fade` times the chance of the one before, given that those before it are wrong."""
    found, left, chance = [], 1.0, alpha
    for _ in range(width):
        found.append(left * chance)
        left, chance = left * (1 - chance), chance * fade
    return found


def tree_tokens(parents: Sequence[int], chances: Sequence[float]) -> float:
    """Tokens of a step with a tree: 1 and, for each node, the product of the chances from the root to it. Node 0 is the
    root; chances: of each node, given that its parent is right."""
    reached = [1.0]
    for parent, chance in zip(parents[1:], chances[1:], strict=True):
        reached.append(reached[parent] * chance)
    return sum(reached)


def best_tree(children: Sequence[float], nodes: int, depth: int = FURTHEST) -> tuple[list[int], list[float]]:
    """The tree of so many drafted nodes that gives most, as parents and chances: the most probable paths, one after the
    other. children: chances of a node's 1st, 2nd, … child, falling."""
    parents, chances = [-1], [1.0]
    open_nodes: list[tuple[float, int, int, int]] = []  # -(chance of its path), its parent, which child, its depth

    def offer(value: float, parent: int, rank: int, deep: int) -> None:
        if rank < len(children) and deep <= depth and children[rank] > 0:
            heappush(open_nodes, (-value * children[rank], parent, rank, deep))

    offer(1.0, 0, 0, 1)
    while open_nodes and len(parents) <= nodes:
        value, parent, rank, deep = heappop(open_nodes)
        parents.append(parent)
        chances.append(children[rank])
        offer(-value, len(parents) - 1, 0, deep + 1)
        offer(-value / children[rank], parent, rank + 1, deep)
    return parents, chances


def depth_of(parents: Sequence[int]) -> int:
    """Of the deepest node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


# ---- time and work


def walltime(alpha: float, gamma: int, c: float, step: StepTime = flat) -> float:
    """How many times as fast as plain decoding (Theorem 3.8); step: if verifying more rows takes longer."""
    return expected_tokens(alpha, gamma) / (gamma * c + step(gamma + 1))


def pays(alpha: float, c: float, step: StepTime = flat) -> bool:
    """Whether any γ is faster than plain decoding. With flat steps that is α > c (Corollary 3.9)."""
    return best_gamma(alpha, c, step)[1] > 1


def best_gamma(alpha: float, c: float, step: StepTime = flat, most: int = FURTHEST) -> tuple[int, float]:
    """The γ that is fastest, and how many times as fast it is; 0 and 1 where nothing pays."""
    rates = [1.0] + [walltime(alpha, gamma, c, step) for gamma in range(1, most + 1)]
    best = max(range(most + 1), key=rates.__getitem__)
    return best, rates[best]


def best_nodes(
    children: Sequence[float], drafting: Callable[[int], float], step: StepTime = flat, most: int = FURTHEST
) -> tuple[list[int], float]:
    """The tree that is fastest, as parents, and how many times as fast as plain decoding it is. drafting: what a draft
    of so many levels takes, over a plain step."""
    best, rate = [-1], 1.0
    for depth in range(1, most + 1):
        parents, chances = best_tree(children, most, depth)
        reached, depths = [1.0], [0]
        for i in range(1, len(parents)):  # the first so many nodes are the best tree of so many
            reached.append(reached[parents[i]] * chances[i])
            depths.append(depths[parents[i]] + 1)
            here = sum(reached) / (drafting(max(depths)) + step(i + 1))
            if here > rate:
                best, rate = parents[: i + 1], here
        if max(depths) < depth:  # it did not even want to be so deep
            break
    return best, rate


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """How many times as many arithmetic operations per token as plain decoding (Theorem 3.11). c_hat: operations of a
    drafted token over those of the target's."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


# ---- intervals


class Interval(NamedTuple):
    """A value, and between which two it lies in 95 of 100 cases."""

    value: float
    low: float
    high: float

    def holds(self, other: float) -> bool:
        return self.low <= other <= self.high

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def mean_ratio(over: Sequence[float], under: Sequence[float], groups: Sequence[str], unseen: int) -> Interval:
    """The ratio of two sums over texts, as it will be for so many unseen texts of the same groups, with its 95%
    interval: what these texts leave open, and by chance what the unseen ones will be. Texts differ, and groups of texts
    differ more; only what differs within groups is chance where all groups come again."""
    ratio = sum(over) / sum(under)
    off = [a - ratio * b for a, b in zip(over, under, strict=True)]
    square, free = 0.0, 0
    for group in dict.fromkeys(groups):
        mine = [x for x, g in zip(off, groups, strict=True) if g == group]
        if len(mine) > 1:
            mean = sum(mine) / len(mine)
            square, free = square + sum((x - mean) ** 2 for x in mine), free + len(mine) - 1
    if not free:
        return Interval(ratio, 0.0, math.inf)
    each = math.sqrt(square / free) * len(off) / sum(over)  # a text's own deviation, as a share of the ratio
    half = student(free) * each * math.sqrt(1 / len(off) + 1 / unseen)
    return Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def student(free: int) -> float:
    """The 97.5% quantile of Student's distribution, by its expansion around the normal one: to 2% from 4 degrees of
    freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
