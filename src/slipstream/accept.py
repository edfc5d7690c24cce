"""The accept rules: which drafted path is accepted, and the bonus token after it.

A rule decides one thing: the next token at a node, given that everything above was accepted. `verify` walks down the
tree with it. Lossless rules don't change the target's distribution; lossy ones are marked as such.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from slipstream.errors import OptionError
from slipstream.residuals import SMALLEST, decide
from slipstream.sampling import Sampler

if TYPE_CHECKING:
    from slipstream.targets.base import Scores
    from slipstream.tree import TokenTree


class Verdict(NamedTuple):
    """path + bonus are the step's len(path) new tokens: path[1:] were drafted, the bonus is the target's own."""

    path: list[int]  # accepted nodes, the root first
    bonus: int  # the token after the last of them: the next root


class Rule(ABC):
    name: ClassVar[str]
    lossless: ClassVar[bool]
    needs_logits: ClassVar[bool] = True  # False: the tokens that the target chose within its forward are enough
    # Whether drafts must be drawn with noise of their own, and come with the distribution q that they were drawn from.
    # Otherwise they are drawn with the target's noise: then both tend to draw the same token.
    needs_q: ClassVar[bool] = True

    @abstractmethod
    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:
        """The token after `node`. If a child carries it, that child is accepted."""


def verify(rule: Rule, tree: TokenTree, scores: Scores, sampler: Sampler, emit: Callable[[int], bool]) -> Verdict:
    """Walk down the tree as long as the rule's next token is a drafted child. `emit` is called once per token, in
    order, so that a text which ends inside a draft ends exactly where plain decoding would end it."""
    path = [0]
    while True:
        token = rule.next_token(tree, path[-1], scores, sampler)
        sampler.push(token)
        child = tree.child(path[-1], token)
        if emit(token) or child is None:
            return Verdict(path, token)
        path.append(child)


@dataclass(frozen=True)
class Match(Rule):
    """Sample as if nothing had been drafted; a drafted token is accepted if it is the sampled one. Exact for every
    drafter."""

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = False
    needs_q: ClassVar[bool] = False

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:  # noqa: ARG002
        return scores.token(node, sampler)


@dataclass(frozen=True)
class Rejection(Rule):
    """Speculative sampling: accept a draft x with probability p(x) / q(x), else continue with the residual of p.

    Children are tried in draw order. If they were drawn from q without replacement, each rejected one is removed from
    q. If no q is known, a child counts as certain, q(x) = 1: accepted with probability p(x), else removed from p.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True

    def leniency(self) -> float:
        return 1.0

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:
        if node == 0:
            scores.decided = decide(tree, scores, sampler)
        tokens = [int(tree.tokens[child]) for child in tree.children(node)]
        chances, masses, drawn = (
            self._decide(tree, node, tokens, scores, sampler) if scores.decided is None else scores.decided.at(node)
        )
        for i, x in enumerate(tokens):
            # If no mass is left, x had all of p: only rounding can have rejected it.
            if sampler.flip(chances[i] / self.leniency(), i) or masses[i] <= 0:
                return x
        return sampler.taken(*drawn)

    def _decide(
        self, tree: TokenTree, node: int, tokens: list[int], scores: Scores, sampler: Sampler
    ) -> tuple[list[float], list[float], list[float]]:
        """The children's chances, the mass left of p after each, and the token drawn from what all of them leave. All
        are computed at once, before any is needed: on a GPU, waiting for single numbers takes longer."""
        p = sampler.distribution(scores.logits(node))
        left = p[None] if (q := drawn_from(tree, node, p)) is None else torch.stack([p, q])
        chances, masses = [p.new_empty(0)], [p.new_empty(0)]
        for x in tokens:
            chances.append(left[:1, x] if q is None else left[:1, x] / left[1, x])
            left, mass = residual(left, x)
            masses.append(mass)
        numbers = torch.cat([*chances, *masses, sampler.drawn(left[0])]).tolist()
        return numbers[: len(tokens)], numbers[len(tokens) : -2], numbers[-2:]


def drawn_from(tree: TokenTree, node: int, p: torch.Tensor) -> torch.Tensor | None:
    """The distribution that a node's children were drawn from, like p; None if it is not known."""
    if tree.q is None or tree.q_row is None or tree.q_row[node] < 0:
        return None
    return tree.q[int(tree.q_row[node])].to(p)


def residual(p_and_q: torch.Tensor, x: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of p, and of q if there is one, (1 or 2, V), after x was rejected; and the mass (1,) that was left
    of p before it was normalised. If that is 0, the result is not a distribution."""
    left = p_and_q.clone()
    if len(left) == 2:
        left[0].sub_(left[1]).clamp_min_(0.0)
    left[:, x] = 0.0
    masses = left.sum(1)
    return left / masses[:, None].clamp_min(SMALLEST), masses[:1]


@dataclass(frozen=True)
class Typical(Rule):
    """Medusa's rule: accept the likeliest child if p(x) > min(ε, δ·exp(−entropy)). LOSSY."""

    epsilon: float = 0.09
    delta: float = 0.3
    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (0 < self.epsilon <= 1 and self.delta > 0):
            raise OptionError(f"typical needs 0 < epsilon <= 1 and delta > 0, found {self.epsilon} and {self.delta}")

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:
        p = sampler.distribution(scores.logits(node))
        children = tree.tokens[tree.children(node)]
        if len(children):
            shares = p[children.tolist()]
            best = int(shares.argmax())
            if shares[best] > min(self.epsilon, self.delta * math.exp(-float(torch.special.entr(p).sum()))):
                return int(children[best])
        return sampler.draw(p)


@dataclass(frozen=True)
class Lenient(Rejection):
    """Rejection with a lenience factor l: drafts pass with min(1, p / (l·q)), greedily when p(x) ≥ l·max p. LOSSY."""

    lenience: float = 0.5
    name: ClassVar[str] = "lenient"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise OptionError(
                f"lenience={self.lenience} is out of range: above 0 (anything passes) and at most 1 (exact)"
            )

    def leniency(self) -> float:
        return self.lenience

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:
        if not sampler.sampling.greedy:
            return super().next_token(tree, node, scores, sampler)
        logits = sampler.warped(scores.logits(node))  # p(x) / max p is exp(x's logit - the best one)
        best = sampler.best(logits)
        children = tree.tokens[tree.children(node)]
        if len(children):
            ratio = (logits[children.tolist()] - logits[best]).exp()
            if ratio.max() >= self.lenience:
                return int(children[int(ratio.argmax())])
        return best


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Match, Rejection, Typical, Lenient)}


def make_rule(name: str | Rule, **options: Any) -> Rule:
    if isinstance(name, Rule):
        return name
    if name not in RULES:
        raise OptionError(f"accept rule {name!r} is unknown: there are {', '.join(RULES)}")
    known = [f.name for f in fields(RULES[name])]  # type: ignore[arg-type]
    if unknown := set(options) - set(known):
        has = f"its options are {', '.join(known)}" if known else "it has none"
        raise OptionError(f"accept rule {name!r} has no option {', '.join(sorted(unknown))}: {has}")
    return RULES[name](**options)
