"""Pilot: who is asked for drafts, and how much of them is verified, so that tokens per second are as many as can be.

A node is worth the probability that it and its ancestors are right, which `Calibration` knows; a step costs what
`Costs` says. The tree takes its most valuable nodes as long as expected tokens per second rise, none at all if need be.
A source whose nodes do not earn the time they take is asked less and less often, down to a probe now and then, and
sooner again once a probe is right. A probe costs its drafting alone: what was not verified is judged by the text that
follows all the same. Cheap sources are asked first; whether a dear one earns its time depends on how much they expect
already, so it is judged for several levels of that.

Whatever is tried, an account keeps plain decoding in sight: once speculation has cost a small share of all time more
than it gained, nothing is drafted until time has made that share smaller.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import njit
from numpy.typing import NDArray

from slipstream.budget.calibration import Calibration, belief, blank, label
from slipstream.budget.costs import Costs
from slipstream.tree import TokenTree

AT_STAKE = 0.02  # of all time: what speculation may have lost in all
START = 100.0  # plain steps whose time counts as spent beforehand, so that the first drafts have something to lose
GAINS_KEPT = 20.0  # plain steps: past gains do not pay for more losses than that
LATEST = 0.1  # weight of the latest look at whether a source earns what it takes
ENOUGH = 20  # drafts, or labels, from which on a source is judged
SOONER = 4  # times as soon it is asked again after a probe that was right
PROBING = 0.005  # the share of all time that probes of one source may take, which sets a pace for dear ones;
FIRST_PROBES = 0.02  # and the same while little is known of it
SLOWER = 8  # times that pace: a source that does not earn is asked no more rarely than that,
RAREST = 64  # nor, unless the pace itself is slower, than once in so many steps
DEAR = 0.02  # of a plain step's time: a source that takes more is asked by what the others expect
LEVELS = (1.25, 1.6, 2.2, 3.5)  # tokens per sequence that they expect, from one level to the next


@dataclass
class Habit:
    """How a source is asked."""

    advantage: float = 0.0  # in the rate of tokens, by which asking it is better than not
    period: int = 1  # asked every so many steps
    waited: int = 0


@dataclass
class Source:
    """What is known of one drafter."""

    name: str
    calibration: Calibration
    drafts: int = 0
    seconds: float = 0.0  # of one of them
    habits: list[Habit] = field(default_factory=list)  # by level of what others expect; the first is all of a cheap one
    level: int = 0  # where it was asked last

    def __post_init__(self) -> None:
        self.renew()

    @property
    def habit(self) -> Habit:
        return self.habits[self.level]

    def renew(self) -> None:
        """Ask it again, whatever it was worth before."""
        self.habits = [Habit() for _ in range(1 + len(LEVELS))]


@dataclass(frozen=True)
class Choice:
    """What was decided about a step, and what was expected of it. Numbers are of all its sequences together."""

    asked: tuple[str, ...]  # sources
    resting: bool  # nobody was asked because speculation has lost too much time of late
    nodes: int  # to verify
    tokens: float  # expected
    rate: float  # expected tokens per second
    plain: float  # those of plain decoding


class Pilot:
    def __init__(self, costs: Costs, sources: Sequence[str], trees: bool = True) -> None:
        """trees: whether a step can verify branches; else each draft's best chain counts."""
        self.costs, self.trees = costs, trees
        self._counts = blank(len(sources))  # of all calibrations
        self.sources = {name: Source(name, Calibration(self._counts[i])) for i, name in enumerate(sources)}
        self._columns: dict[tuple[str, ...], NDArray[np.int64]] = {}
        self._spent = START * costs.seconds(1)
        self._account = 0.0  # seconds gained over plain decoding
        self.last: Choice | None = None

    # ---- before a step

    @property
    def resting(self) -> bool:
        """Whether speculation has lost so much that nothing may be drafted."""
        return self._account < -AT_STAKE * self._spent

    def order(self, among: Iterable[str] | None = None) -> list[str]:
        """Whom to think of asking, of those that have something to do: the cheapest first."""
        if self.resting:
            return []
        return sorted(self.sources if among is None else among, key=lambda name: self.sources[name].seconds)

    def wants(self, name: str, batch: int, expected: Callable[[], float]) -> bool:
        """Whether to ask this source now. expected: tokens per sequence from what others have drafted, as `expects`
        tells it."""
        source = self.sources[name]
        dear = source.seconds > DEAR * self.costs.seconds(1, batch)
        source.level = bisect(LEVELS, expected()) if dear else 0
        habit = source.habit
        habit.waited += 1
        if habit.waited < habit.period:
            return False
        habit.waited = 0
        return True

    def expects(self, trees: Sequence[TokenTree], limits: Sequence[int]) -> float:
        """Tokens per sequence, from these drafts as far as they are worth verifying."""
        if all(len(tree) == 1 for tree in trees):
            return 1.0
        grown = [self._grow(tree, limit) for tree, limit in zip(trees, limits, strict=True)]
        tokens = _tokens(grown, ())
        width, _ = _best(tokens, self.costs.upto(tokens.shape[1], len(trees)), np.zeros(len(tokens)))
        return float(tokens[0, width]) / len(trees)

    def count(self, drafting: dict[str, float], batch: int) -> dict[str, float]:
        """The seconds that drafting took, less what is nobody's fault: a source's first draft loads and compiles code,
        and one that takes longer than a whole step was interrupted."""
        counted = {}
        for name, seconds in drafting.items():
            source = self.sources[name]
            seconds = min(seconds, self.costs.seconds(1, batch)) if source.drafts else 0.0
            source.seconds = seconds if source.drafts < 2 else 0.8 * source.seconds + 0.2 * seconds
            source.drafts += 1
            counted[name] = seconds
        return counted

    def choose(self, trees: Sequence[TokenTree], limits: Sequence[int], drafting: dict[str, float]) -> list[TokenTree]:
        """What of these drafts, one per sequence, is worth verifying; at most `limits` nodes of each. drafting: seconds
        that each source which was asked took for them all, as `count` counts them."""
        batch, spent = len(trees), sum(drafting.values())
        plain = batch / self.costs.seconds(1, batch)
        grown = [self._grow(tree, limit) for tree, limit in zip(trees, limits, strict=True)]
        tokens = _tokens(grown, list(drafting))  # (1 + sources, width)
        took = np.array([spent, *(spent - seconds for seconds in drafting.values())])
        width, rates = _best(tokens, self.costs.upto(tokens.shape[1], batch), took)
        rate, *without = rates.tolist()
        for name, other in zip(drafting, without, strict=True):
            self._judge(self.sources[name], rate / max(plain, other) - 1, batch)
        kept = [g.tree(tree, width) for g, tree in zip(grown, trees, strict=True)]
        nodes = sum(map(len, kept)) - batch
        self.last = Choice(tuple(drafting), self.resting, nodes, float(tokens[0, width]), rate, plain)
        return kept

    def _grow(self, tree: TokenTree, limit: int) -> _Grown:
        columns = self._columns_of(tree)
        score, order, worth = _grow(tree.parents, tree.raw, columns, self._counts, limit, self.trees)
        return _Grown(score, order, worth, tree.sources)

    def _columns_of(self, tree: TokenTree) -> NDArray[np.int64]:
        """Which source each column of the tree's raw scores belongs to."""
        found = self._columns.get(tree.sources)
        if found is None:
            numbers = {name: i for i, name in enumerate(self.sources)}
            found = self._columns[tree.sources] = np.array([numbers[name] for name in tree.sources], np.int64)
        return found

    def _judge(self, source: Source, advantage: float, batch: int) -> None:
        """Asking this source changed the rate so much: when to ask it next."""
        habit = source.habit
        habit.advantage += LATEST * (advantage - habit.advantage)
        if habit.advantage > 0:
            habit.period = 1
            return
        known = source.drafts >= ENOUGH or source.calibration.labelled >= ENOUGH
        share = PROBING if known else FIRST_PROBES
        pace = round(source.seconds / (share * self.costs.seconds(1, batch)))  # steps that pay for a probe
        rarest = min(RAREST, SLOWER * max(1, pace))
        habit.period = max(1, pace, min(rarest, 2 * habit.period) if known else 1)

    def decline(self, batch: int) -> None:
        """Nobody was asked: the step will be a plain one."""
        plain = batch / self.costs.seconds(1, batch)
        self.last = Choice((), self.resting, 0, batch, plain, plain)

    # ---- after it

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int = 0) -> bool:
        """The text after the tree's root went on with these tokens, the first `known` of which it was told before.
        tree: everything that was proposed. Returns whether more of the text would say more about it."""
        columns, text = self._columns_of(tree), np.array(followed, np.int32)
        began, more = label(tree.parents, tree.tokens, tree.raw, columns, text, known, self._counts)
        for name, right in zip(tree.sources, began.tolist(), strict=True):
            habit = self.sources[name].habit
            if right and habit.period > 1:
                habit.period = max(1, habit.period // SOONER)
        return bool(more)

    def charge(self, rows: int, batch: int, tokens: int, verifying: float, drafting: float) -> None:
        """A step of that many rows took so long, and gave so many tokens."""
        verifying = self.costs.observe(rows, batch, verifying)
        plain = self.costs.seconds(1, batch)
        taken = verifying + drafting if rows > 1 or drafting else plain  # a slow plain step is nobody's loss
        self._spent += taken
        gained = tokens / batch * plain - taken
        self._account = min(self._account + gained, GAINS_KEPT * plain)


@dataclass(frozen=True)
class _Grown:
    """One sequence's draft in the order of its nodes' worth."""

    score: NDArray[np.float32]  # (n,)
    order: NDArray[np.int64]  # (m,) drafted nodes, the most valuable first
    # (1 + S, m + 1) expected tokens with the first 0, 1, … of them, and in the rows below without each source
    worth: NDArray[np.float64]
    sources: tuple[str, ...]

    def without(self, name: str) -> NDArray[np.float64]:
        return self.worth[1 + self.sources.index(name) if name in self.sources else 0]

    def tree(self, whole: TokenTree, nodes: int) -> TokenTree:
        """The best of it. q goes, as in `TokenTree.prune`."""
        if nodes == 0 or len(self.order) == 0:
            return TokenTree.root(int(whole.tokens[0]))
        tokens, parents, raw, score = _take(whole.tokens, whole.parents, whole.raw, self.score, self.order[:nodes])
        return TokenTree(tokens, parents, raw, score, whole.sources)


def _tokens(grown: Sequence[_Grown], names: Sequence[str]) -> NDArray[np.float64]:
    """(1 + names, width) expected of all sequences together if each gets at most 0, 1, … nodes: with everything, and
    without each of the sources. A step is as wide as the widest of its trees, so whoever gains less may as well have as
    many nodes as the others."""
    if len(grown) == 1 and grown[0].sources == tuple(names):
        return grown[0].worth
    tokens = np.zeros((1 + len(names), max(g.worth.shape[1] for g in grown)))
    for g in grown:
        width = g.worth.shape[1]
        for row, worth in enumerate([g.worth[0], *map(g.without, names)]):
            tokens[row, :width] += worth
            tokens[row, width:] += worth[-1]
    return tokens


@njit(cache=True, nogil=True)
def _grow(parents, raw, columns, counts, limit, trees):  # type: ignore[no-untyped-def]
    """Scores, order and worth, as in `_Grown`."""
    n = len(parents)
    length = min(limit, n - 1)
    score = np.ones(n, np.float32)
    first = np.empty(length, np.int64)
    worth = np.ones((1 + len(columns), length + 1))
    depth = np.zeros(n, np.int64)
    here = np.ones(n, np.float32)
    value = np.ones(n, np.float64)
    for i in range(1, n):
        depth[i] = depth[parents[i]] + 1
    for left_out in range(-1, len(columns)):
        for i in range(1, n):
            best = 0.0
            for column in range(len(columns)):
                if column != left_out and not np.isnan(raw[i, column]):
                    best = max(best, belief(counts, columns[column], depth[i], raw[i, column]))
            here[i] = best
            value[i] = value[parents[i]] * best
        order = _by_value(value, length) if trees else _best_chain(parents, here, length)
        for k in range(length):
            gain = value[order[k]] if k < len(order) else 0.0
            worth[left_out + 1, k + 1] = worth[left_out + 1, k] + gain
        if left_out < 0:
            score[:] = here
            length = len(order)
            first = order
            worth = worth[:, : length + 1].copy()
    return score, first, worth


@njit(cache=True, nogil=True)
def _by_value(value, length):  # type: ignore[no-untyped-def]
    """The drafted nodes of most value. Of equals the first, so parents come before their children."""
    return np.argsort(-value[1:], kind="mergesort")[:length] + 1


@njit(cache=True, nogil=True)
def _best_chain(parents, score, length):  # type: ignore[no-untyped-def]
    """The nodes on the way to the best child, its best child, …"""
    heir = np.full(len(parents), -1, np.int64)
    for i in range(1, len(parents)):
        if heir[parents[i]] < 0 or score[i] > score[heir[parents[i]]]:
            heir[parents[i]] = i
    chain = np.empty(length, np.int64)
    n, node = 0, heir[0]
    while node >= 0 and n < length:
        chain[n] = node
        n, node = n + 1, heir[node]
    return chain[:n]


@njit(cache=True, nogil=True)
def _best(tokens, seconds, took):  # type: ignore[no-untyped-def]
    """At how many nodes tokens per second are most in row 0, and how many they are at best in each row. took: (rows,)
    seconds that drafting took besides."""
    best, rates = 0, np.zeros(len(tokens))
    for row in range(len(tokens)):
        for nodes in range(tokens.shape[1]):
            rate = tokens[row, nodes] / (took[row] + seconds[nodes])
            if rate > rates[row]:
                rates[row] = rate
                if row == 0:
                    best = nodes
    return best, rates


@njit(cache=True, nogil=True)
def _take(tokens, parents, raw, score, chosen):  # type: ignore[no-untyped-def]
    """The root and the chosen nodes, which hold no node without its parent, in their order in the tree."""
    place = np.full(len(tokens), -1, np.int32)
    place[0] = 0
    for node in chosen:
        place[node] = 1
    n = 0
    for i in range(len(tokens)):
        if place[i] >= 0:
            place[i] = n
            n += 1
    new_tokens = np.empty(n, np.int32)
    new_parents = np.empty(n, np.int32)
    new_raw = np.empty((n, raw.shape[1]), np.float32)
    new_score = np.empty(n, np.float32)
    for i in range(len(tokens)):
        j = place[i]
        if j >= 0:
            new_tokens[j], new_score[j] = tokens[i], score[i]
            new_parents[j] = place[parents[i]] if i else -1
            new_raw[j] = raw[i]
    return new_tokens, new_parents, new_raw, new_score
