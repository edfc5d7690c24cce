"""The theory of speculative decoding as pure functions: expected tokens, time, operations, and the best draft.

α is the probability that a drafted token is accepted, given that all before it were; γ is the number of drafted tokens;
c is the time of one drafted token divided by that of one plain step of the target. Survival is what is measured instead
of α: the probability that a step accepts at least 1, 2, … drafted tokens, whatever the shape of its draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from slipstream.budget.chains import expected_tokens

FURTHEST = 64  # the largest γ that is considered

StepTime = Callable[[int], float]  # of a step that verifies so many rows, over that of a step with one


def flat(_rows: int) -> float:
    """The papers' assumption: verifying any number of rows takes as long as decoding one token."""
    return 1.0


# ---- how many tokens


def acceptance(p: Sequence[float], q: Sequence[float], lenience: float = 1.0) -> float:
    """The probability that a token drawn from q is accepted against p: the sum of min(p / l, q)."""
    return sum(min(a / lenience, b) for a, b in zip(p, q, strict=True))


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """D_LK(p, q) = 1 - acceptance(p, q)."""
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def lenient_range(alpha: float, lenience: float) -> tuple[float, float]:
    """The range of α with lenience l, whatever p and q are: min(p / l, q) is at least min(p, q) and at most
    min(p, q) / l, and its sum is at most 1."""
    return alpha, min(1.0, alpha / lenience)


def survival(alpha: float, gamma: int) -> list[float]:
    """The probability that at least 1, 2, …, γ drafted tokens are accepted, if each is accepted with probability α."""
    return [alpha**k for k in range(1, gamma + 1)]


def tokens_of(reached: Sequence[float]) -> float:
    """Expected tokens per step: 1, and each drafted token with the probability that it is accepted."""
    return 1 + sum(reached)


def alpha_of(tokens: float, gamma: int) -> float:
    """The α with which chains of γ tokens give so many tokens per step: the inverse of `expected_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halves an interval of 1 down to the last bit of a float
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return low


# ---- trees


def ranks(alpha: float, width: int, fade: float) -> list[float]:
    """The probability that the 1st, 2nd, … best child is accepted, given that its parent is. Given that all before it
    are wrong, each is accepted with `fade` times the probability of the one before."""
    found, left, chance = [], 1.0, alpha
    for _ in range(width):
        found.append(left * chance)
        left, chance = left * (1 - chance), chance * fade
    return found


def tree_tokens(parents: Sequence[int], chances: Sequence[float]) -> float:
    """Expected tokens of a step with a tree: 1 and, for each node, the product of the probabilities on its path. Node 0
    is the root; chances: of each node, given that its parent is accepted."""
    reached = [1.0]
    for parent, chance in zip(parents[1:], chances[1:], strict=True):
        reached.append(reached[parent] * chance)
    return sum(reached)


def best_tree(children: Sequence[float], nodes: int, depth: int = FURTHEST) -> tuple[list[int], list[float]]:
    """The tree of so many drafted nodes with the most expected tokens, as parents and probabilities: the most probable
    paths, in order. children: probabilities of a node's 1st, 2nd, … child, falling."""
    parents, chances = [-1], [1.0]
    open_nodes: list[tuple[float, int, int, int]] = []  # -probability of the path, parent, which child, depth

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
    """The depth of the deepest node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


# ---- time and work


def walltime(alpha: float, gamma: int, c: float, step: StepTime = flat) -> float:
    """The speed-up over plain decoding (Theorem 3.8). step: cost of verifying, if more rows take longer."""
    return expected_tokens(alpha, gamma) / (gamma * c + step(gamma + 1))


def pays(alpha: float, c: float, step: StepTime = flat) -> bool:
    """Whether any γ is faster than plain decoding. With flat steps that is α > c (Corollary 3.9)."""
    return best_gamma(alpha, c, step)[1] > 1


def best_gamma(alpha: float, c: float, step: StepTime = flat, most: int = FURTHEST) -> tuple[int, float]:
    """The fastest γ and its speed-up; 0 and 1 if nothing pays."""
    rates = [1.0] + [walltime(alpha, gamma, c, step) for gamma in range(1, most + 1)]
    best = max(range(most + 1), key=rates.__getitem__)
    return best, rates[best]


def best_nodes(
    children: Sequence[float], drafting: Callable[[int], float], step: StepTime = flat, most: int = FURTHEST
) -> tuple[list[int], float]:
    """The fastest tree, as parents, and its speed-up. drafting: the time of a draft of so many levels, divided by that
    of a plain step."""
    best, rate = [-1], 1.0
    for depth in range(1, most + 1):
        parents, chances = best_tree(children, most, depth)
        reached, depths = [1.0], [0]
        for i in range(1, len(parents)):  # the first i nodes are the best tree of i nodes
            reached.append(reached[parents[i]] * chances[i])
            depths.append(depths[parents[i]] + 1)
            here = sum(reached) / (drafting(max(depths)) + step(i + 1))
            if here > rate:
                best, rate = parents[: i + 1], here
        if max(depths) < depth:  # the best tree is not that deep, so deeper limits change nothing
            break
    return best, rate


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Arithmetic operations per token, divided by those of plain decoding (Theorem 3.11). c_hat: operations per drafted
    token, divided by those per token of the target."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


# ---- intervals


class Interval(NamedTuple):
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    def holds(self, other: float) -> bool:
        return self.low <= other <= self.high

    def wider(self, share: float) -> Interval:
        """With a further error of this share of the value, independent of what the interval covers."""
        half = math.hypot(math.log(self.high / self.value), share)
        return Interval(self.value, self.value * math.exp(-half), self.value * math.exp(half))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def mean_ratio(over: Sequence[float], under: Sequence[float], groups: Sequence[str], unseen: int) -> Interval:
    """The ratio of two sums over texts, with the 95% interval for so many unseen texts of the same groups. The interval
    covers the uncertainty from the known texts and the variation of the unseen ones. Only variation within groups
    counts: differences between groups are no chance, since the unseen texts have the same groups."""
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
    """The 97.5% quantile of Student's t distribution, by expansion around the normal one: correct to 2% from 4 degrees
    of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
