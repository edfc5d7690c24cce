"""Pilot: who is asked for drafts, and how much of them is verified, so that tokens per second are as many as can be.

A node is worth the probability that it and its ancestors are right, which `Calibration` knows; a step costs what
`Costs` says. The tree takes its most valuable nodes as long as expected tokens per second rise, none at all if need be.
A source whose nodes do not earn the time they take is asked less and less often, down to a probe now and then, and
sooner again once a probe is right. A probe costs its drafting alone: what was not verified is judged by the text that
follows all the same.

Whatever is tried, an account keeps plain decoding in sight: once speculation has cost a small share of all time more
than it gained, nothing is drafted until time has made that share smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import njit
from numpy.typing import NDArray

from slipstream.budget.calibration import BINS, DEPTHS, Calibration, bin_of, depth_class
from slipstream.budget.costs import Costs
from slipstream.tree import TokenTree

AT_STAKE = 0.02  # of all time: what speculation may have lost in all
START = 100.0  # plain steps whose time counts as spent beforehand, so that the first drafts have something to lose
GAINS_KEPT = 20.0  # plain steps: past gains do not pay for more losses than that
LATEST = 0.1  # weight of the latest look at whether a source earns what it takes
ENOUGH = 20  # labels from which on a source is judged
SOONER = 4  # times as soon it is asked again after a probe that was right
RAREST = 64  # steps between probes of a source that does not earn, unless drafting is dear:
PROBING = 0.005  # the share of all time that probes of one source may take;
FIRST_PROBES = 0.02  # and the same while little is known of it


@dataclass
class Source:
    """What is known of one drafter."""

    name: str
    calibration: Calibration = field(default_factory=Calibration)
    seconds: float = 0.0  # of one draft
    advantage: float = 0.0  # in the rate of tokens, by which asking it is better than not
    period: int = 1  # asked every so many steps
    waited: int = 0


@dataclass(frozen=True)
class Choice:
    """What was expected of a step, for whoever wants to know."""

    asked: tuple[str, ...]
    nodes: int  # verified, of all sequences together
    tokens: float  # expected, of all sequences together
    rate: float  # expected tokens per second
    plain: float  # those of plain decoding


class Pilot:
    def __init__(self, costs: Costs, sources: Sequence[str]) -> None:
        self.costs = costs
        self.sources = {name: Source(name) for name in sources}
        self._spent = START * float(costs.seconds(1))
        self._account = 0.0  # seconds gained over plain decoding
        self.last: Choice | None = None

    # ---- before a step

    def asks(self) -> list[str]:
        """Whom to ask now."""
        if self._account < -AT_STAKE * self._spent:
            return []
        asked = []
        for source in self.sources.values():
            source.waited += 1
            if source.waited >= source.period:
                source.waited = 0
                asked.append(source.name)
        return asked

    def choose(self, trees: Sequence[TokenTree], limits: Sequence[int], drafting: dict[str, float]) -> list[TokenTree]:
        """What of these drafts, one per sequence, is worth verifying; at most `limits` nodes of each. drafting: seconds
        that each source which was asked took for them all."""
        for name, seconds in drafting.items():
            source = self.sources[name]
            source.seconds = seconds if not source.seconds else 0.8 * source.seconds + 0.2 * seconds
        batch = len(trees)
        grown = [_Grown.of(tree, limit, self._tables(tree)) for tree, limit in zip(trees, limits, strict=True)]
        rows, rate, tokens = self._best(grown, sum(drafting.values()))
        plain = batch / float(self.costs.seconds(1, batch))
        for name in drafting:
            self._judge(self.sources[name], trees, limits, rate, drafting, plain)
        kept = [g.tree(rows) for g in grown]
        nodes = sum(len(tree) - 1 for tree in kept)
        self.last = Choice(tuple(drafting), nodes, tokens, rate, plain)
        return kept

    def _best(self, grown: Sequence[_Grown], drafting: float) -> tuple[int, float, float]:
        """How many nodes at most each sequence should get, the tokens per second that this gives, and the tokens: a
        step is as wide as the widest of its trees."""
        widest = max(len(g.worth) for g in grown)
        tokens = np.zeros(widest)
        for g in grown:
            tokens[: len(g.worth)] += g.worth
            tokens[len(g.worth) :] += g.worth[-1]
        rates = tokens / (drafting + self.costs.seconds(1 + np.arange(widest), len(grown)))
        best = int(np.argmax(rates))
        return best, float(rates[best]), float(tokens[best])

    def _judge(
        self,
        source: Source,
        trees: Sequence[TokenTree],
        limits: Sequence[int],
        rate: float,
        drafting: dict[str, float],
        plain: float,
    ) -> None:
        """Whether it would have been better not to ask this source."""
        others = sum(seconds for name, seconds in drafting.items() if name != source.name)
        without = plain
        if len(drafting) > 1:
            grown = [
                _Grown.of(tree, limit, self._tables(tree, source.name))
                for tree, limit in zip(trees, limits, strict=True)
            ]
            without = max(plain, self._best(grown, others)[1])
        source.advantage += LATEST * (rate / without - 1 - source.advantage)
        if source.advantage > 0:
            source.period = 1
            return
        known = source.calibration.labelled >= ENOUGH
        share = PROBING if known else FIRST_PROBES
        pace = round(source.seconds / (share * float(self.costs.seconds(1, len(trees)))))  # steps that pay for a probe
        source.period = max(1, pace, min(RAREST, 2 * source.period) if known else 1)

    def _tables(self, tree: TokenTree, without: str = "") -> NDArray[np.float64]:
        """(S, DEPTHS, BINS) what each source's scores mean; a source left out says nothing."""
        tables = np.zeros((len(tree.sources), DEPTHS, BINS))
        for i, name in enumerate(tree.sources):
            if name != without:
                tables[i] = self.sources[name].calibration.probability
        return tables

    # ---- after it

    def learn(self, tree: TokenTree, followed: Sequence[int]) -> None:
        """The text after the tree's root went on with these tokens. tree: everything that was proposed."""
        for column, name in enumerate(tree.sources):
            source = self.sources[name]
            source.calibration.learn(tree, column, followed)
            first = tree.child(0, followed[0]) if followed else None
            if source.period > 1 and first is not None and not np.isnan(tree.raw[first, column]):
                source.period = max(1, source.period // SOONER)

    def charge(self, rows: int, batch: int, tokens: int, verifying: float, drafting: float) -> None:
        """A step of that many rows took so long, and gave so many tokens."""
        self.costs.observe(rows, batch, verifying)
        plain = float(self.costs.seconds(1, batch))
        taken = verifying + drafting if rows > 1 or drafting else plain  # a slow plain step is nobody's loss
        self._spent += taken
        gained = tokens / batch * plain - taken
        self._account = min(self._account + gained, GAINS_KEPT * plain)


@dataclass(frozen=True)
class _Grown:
    """One sequence's draft in the order of its nodes' worth."""

    whole: TokenTree
    score: NDArray[np.float32]  # (n,)
    order: NDArray[np.int64]  # (m,) drafted nodes, the most valuable first
    worth: NDArray[np.float64]  # (m + 1,) expected tokens with the first 0, 1, … of them

    @classmethod
    def of(cls, tree: TokenTree, limit: int, tables: NDArray[np.float64]) -> _Grown:
        score, order, worth = _grow(tree.parents, tree.raw, tables, limit)
        return cls(tree, score, order, worth)

    def tree(self, nodes: int) -> TokenTree:
        keep = np.zeros(len(self.whole), np.bool_)
        keep[self.order[:nodes]] = True
        return self.whole.with_score(self.score).prune(keep)


@njit(cache=True, nogil=True)
def _grow(parents, raw, tables, limit):  # type: ignore[no-untyped-def]
    n = len(parents)
    score = np.ones(n, np.float32)
    value = np.ones(n, np.float64)
    depth = np.zeros(n, np.int64)
    for i in range(1, n):
        depth[i] = depth[parents[i]] + 1
        best = 0.0
        for source in range(raw.shape[1]):
            if not np.isnan(raw[i, source]):
                best = max(best, tables[source, depth_class(depth[i]), bin_of(raw[i, source])])
        score[i] = best
        value[i] = value[parents[i]] * best
    order = np.argsort(-value[1:], kind="mergesort")[:limit] + 1  # stable: a parent before its children
    worth = np.ones(len(order) + 1)
    for k in range(len(order)):
        worth[k + 1] = worth[k] + value[order[k]]
    return score, order, worth
