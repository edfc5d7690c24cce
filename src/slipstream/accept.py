"""The accept rules: which drafted path the target keeps, and the bonus token after it.

A rule only decides one thing: the next token at a node, given that everything above was accepted. `verify` walks the
tree with it. Lossless rules leave the target's distribution untouched; the others say that they don't.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from slipstream.errors import OptionError
from slipstream.sampling import Sampler, check_choice, drawn_by_share, uniform

if TYPE_CHECKING:
    from slipstream.targets.base import Scores
    from slipstream.tree import TokenTree


SMALLEST = 1e-300  # of a sum that is divided by


@dataclass(frozen=True)
class Verdict:
    """path + bonus are the step's len(path) new tokens: path[1:] were drafted, the bonus is the target's own."""

    path: list[int]  # accepted nodes, the root first
    bonus: int  # the token after the last of them: the next root


class Rule(ABC):
    name: ClassVar[str]
    lossless: ClassVar[bool]
    needs_logits: ClassVar[bool] = True  # False: tokens that were chosen where the logits are will do
    # Whether drawn drafts need noise of their own, and say what they were drawn from. Otherwise they share the target's
    # noise: both then tend to draw the same token.
    needs_q: ClassVar[bool] = True

    @abstractmethod
    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:
        """The token after `node`. If a child carries it, that child is accepted."""

    def chooser(self, tree: TokenTree, scores: Scores, sampler: Sampler) -> Callable[[int], int]:
        """`next_token` for the nodes that a walk passes. A rule may choose for all nodes beforehand."""
        return lambda node: self.next_token(tree, node, scores, sampler)


def verify(rule: Rule, tree: TokenTree, scores: Scores, sampler: Sampler, over: Callable[[int], bool]) -> Verdict:
    """Walk down while the rule's tokens are drafted ones. `over` is asked once per token, in order: a text that ends
    inside a draft ends exactly where plain decoding ends it."""
    path, choose = [0], rule.chooser(tree, scores, sampler)
    while True:
        token = choose(path[-1])
        sampler.push(token)
        child = tree.child(path[-1], token)
        if over(token) or child is None:
            return Verdict(path, token)
        path.append(child)


@dataclass(frozen=True)
class Match(Rule):
    """Sample as if nothing had been drafted; a draft counts if it says the same. Exact for every drafter."""

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = False
    needs_q: ClassVar[bool] = False

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:  # noqa: ARG002
        return scores.token(node, sampler)


@dataclass(frozen=True)
class Rejection(Rule):
    """Speculative sampling: accept a draft x with probability p(x) / q(x), else go on with the residual of p.

    Children are tried in draw order. Where they were drawn from q without replacement, q loses each rejected one.
    Where no q is known a child counts as certain, q(x) = 1: accepted with p(x), else removed from p.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True

    def leniency(self) -> float:
        return 1.0

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:
        p = sampler.distribution(scores.logits(node))
        q = drawn_from(tree, node, p)
        for draw, child in enumerate(tree.children(node)):
            x = int(tree.tokens[child])
            if sampler.flip(float(p[x] if q is None else p[x] / q[x]) / self.leniency(), draw):
                return x
            left, q = residual(p, q, x)
            if left is None:  # rounding alone gets here: x had all of p
                return x
            p = left
        return sampler.draw(p)

    def chooser(self, tree: TokenTree, scores: Scores, sampler: Sampler) -> Callable[[int], int]:
        """On a GPU, if no node's logits depend on the text before it, tokens are chosen after all nodes at once: what
        takes the time there is to ask for a number, and to wait for it."""
        rows = scores.every()
        if (
            rows.device.type != "cuda"
            or len(rows) < len(tree)
            or sampler.sampling.greedy
            or sampler.sampling.looks_back
        ):
            return super().chooser(tree, scores, sampler)
        tokens, tops = self.at_once(tree, rows, sampler)

        def choose(node: int) -> int:
            check_choice(tops[node], sampler.position)
            return tokens[node]

        return choose

    def at_once(self, tree: TokenTree, rows: torch.Tensor, sampler: Sampler) -> tuple[list[int], list[float]]:
        """The token after each node, and its largest logit, from rows (n, V) of logits: `next_token` in step."""
        children = [tree.children(node) for node in range(len(tree))]
        most, deepest = max(map(len, children)), int(tree.depths.max())
        tried = np.full((len(tree), most), -1)
        for node, below in enumerate(children):
            tried[node, : len(below)] = tree.tokens[below]
        keys = [[sampler.key(stream, depth) for depth in range(deepest + 1)] for stream in ("flip", "draw")]
        flips = np.array([[uniform(key, i) for i in range(most)] for key in keys[0]])[tree.depths] * self.leniency()
        draws = np.array([uniform(key, 0) for key in keys[1]])[tree.depths]
        x, flip, share = (torch.from_numpy(a).to(rows.device) for a in (tried, flips, draws[:, None]))

        p = sampler.distributions(rows)
        drawn, q = torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device), torch.zeros_like(p)
        if tree.q is not None and tree.q_row is not None:
            drawn = torch.from_numpy(tree.q_row >= 0).to(rows.device)[:, None]
            q = tree.q[torch.from_numpy(np.maximum(tree.q_row, 0)).to(tree.q.device)].to(p)
        chosen = torch.full_like(x[:, :1], -1) if most else torch.full((len(rows), 1), -1, device=rows.device)
        for i in range(most):
            token, open_ = x[:, i : i + 1].clamp_min(0), (x[:, i : i + 1] >= 0) & (chosen < 0)
            chance = p.gather(1, token)
            passed = flip[:, i : i + 1] < torch.where(drawn, chance / q.gather(1, token), chance)
            left = torch.where(drawn, (p - q).clamp_min(0.0), p).scatter(1, token, 0.0)
            others, mass = q.scatter(1, token, 0.0), left.sum(1, keepdim=True)
            chosen = torch.where(open_ & (passed | (mass <= 0)), token, chosen)
            rejected = open_ & (chosen < 0)
            p = torch.where(rejected, left / mass, p)
            q = torch.where(rejected, others / others.sum(1, keepdim=True).clamp_min(SMALLEST), q)
        chosen = torch.where(chosen < 0, drawn_by_share(p, share), chosen)
        found = torch.cat([chosen.double(), rows.amax(1, keepdim=True).double()], 1).cpu().numpy()
        return found[:, 0].astype(int).tolist(), found[:, 1].tolist()


def drawn_from(tree: TokenTree, node: int, p: torch.Tensor) -> torch.Tensor | None:
    """What a node's children were drawn from, like p; None: nobody said."""
    if tree.q is None or tree.q_row is None or tree.q_row[node] < 0:
        return None
    return tree.q[int(tree.q_row[node])].to(p)


def residual(p: torch.Tensor, q: torch.Tensor | None, x: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What is left of p, and of q, once x was rejected; of p None: nothing is."""
    left, others = p.clone() if q is None else (p - q).clamp_min(0.0), None
    left[x] = 0.0
    if q is not None:
        others = q.clone()
        others[x] = 0.0
        others /= others.sum().clamp_min(SMALLEST)
    mass = left.sum()
    return (left / mass if mass > 0 else None), others


@dataclass(frozen=True)
class Typical(Rule):
    """Medusa's rule: any child that the target finds plausible enough, p(x) > min(ε, δ·exp(−entropy)). LOSSY."""

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
