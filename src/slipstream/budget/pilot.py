"""Pilot: who is asked for drafts, and how much of them is verified, so that tokens per second are as many as can be.

A node is worth the probability that it and its ancestors are right, which `Calibration` knows; a step costs what
`Costs` says. The tree takes its most valuable nodes as long as expected tokens per second rise, none at all if need be.
Cheap sources are asked first, then each dear one that earns its time, and of trained heads, which say much the same,
the best if it does: that depends on how much is expected already, so it is judged for several levels of that. A source
that does not earn its time is only probed, as often as a small share of all time pays for what probes are likely to
lose. What was not verified is judged by the text that follows all the same.

Whatever is tried, an account keeps plain decoding in sight: once speculation has cost a few steps more than it gained,
nothing is verified until time has made up for that.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from slipstream.budget.calibration import Calibration, belief, blank, label
from slipstream.budget.costs import WILD, Costs
from slipstream.tree import TokenTree

# The account, in plain steps. It is forgotten bit by bit, so in the long run STAKE · FORGOTTEN of all time can be lost.
STAKE = 12.0  # that may be lost
GAINS_KEPT = 20.0  # past gains do not pay for more losses than that,
LOSSES_KEPT = 16.0  # and past losses do not forbid more
FORGOTTEN = 0.0015  # of the account, at each step
LATEST = 0.05  # weight of the latest look at whether a source earns what it takes,
SELDOM = 4  # as is done with every fourth of its drafts once it is known to
LEAST = 0.02  # of the rate: a probe is taken to lose that at least
ENOUGH = 8  # drafts by which a source is known,
HOPELESS = 0.1  # of the rate: or by the first few, if they lose that much
PROBING, HEADS_PROBING = 0.005, 0.001  # the share of all time that probes of one source, or head, may lose
FIRST_PROBES = 0.015  # and that they may take while it is not known
FREE = 3  # drafts of a source that are not counted: they load its code
SETTLED = 8  # drafts until which the fastest says what one takes
LATELY = 0.2  # weight of what the latest one took, behind that
FIRST_WAIT = 8  # plain steps that a source waits at most as long as its drafts don't count, then 4 times, 16 times, …
DEAR = 0.15  # of a plain step's time: sources that take more are asked later, by what others expect,
MARGIN = 0.03  # of the rate: if they are expected to raise it by so much, since what is expected is hoped for
# Where late drafts take longer, a few are a probe, since only the first of them is late; and that begins with a text,
# which a head has to know, or where one is so many tokens long.
TRIAL, LONG = 4, 256
BEFORE = 3.0  # tokens that every text is taken to have promised and given before it begins
KEPT = 0.99  # of what was promised and came, with each step
LEVELS = (1.25, 1.6, 2.2, 3.5)  # tokens per sequence that they expect, from one level to the next


@dataclass
class Usual:
    """What something usually takes, whatever one clock reading says. Its first times load code: until some are seen it
    counts as nothing, then as the fastest. One that takes many times as long as others was interrupted, and moves what
    is usual a little."""

    times: int = 0
    seconds: float = 0.0  # of one of them

    def count(self, seconds: float) -> float:
        """It took so long. Returns what that counts as."""
        if self.times < SETTLED:
            self.seconds = min(seconds, self.seconds) if self.times else seconds
        else:
            self.seconds += LATELY * (min(seconds, WILD * self.seconds) - self.seconds)
        self.times += 1
        return self.seconds if self.times > FREE else 0.0


@dataclass
class Source:
    """What is known of one drafter, or of one way to ask it."""

    name: str
    part: str  # the drafter
    calibration: Calibration  # of what it says, however it is asked
    most: int = sys.maxsize  # nodes that it is asked for
    head: bool = False  # of these one is asked at most, since two would say much the same
    drafting: Usual = field(default_factory=Usual)
    reading: float = 0.0  # seconds that count for the last one besides, as the first of a text or because it was late
    texts: Usual = field(default_factory=Usual)  # what it takes besides to read a text that it is asked about first,
    delays: Usual = field(default_factory=Usual)  # and to begin late
    # In the rate of tokens, by which asking it is better than not: by level of what others expect, and the first for a
    # cheap one. None: it was not asked there yet.
    advantages: list[float | None] = field(default_factory=lambda: [None] * (1 + len(LEVELS)))
    asked: list[int] = field(default_factory=lambda: [0] * (1 + len(LEVELS)))  # how often, by level
    pays: bool = False  # whether asking it is better than not at any level
    level: int = 0  # where it was asked last
    wait: int = 0  # steps before it is probed again

    @property
    def drafts(self) -> int:
        return self.drafting.times

    @property
    def seconds(self) -> float:
        """Of one of them."""
        return self.drafting.seconds

    @property
    def delay(self) -> float:
        return self.delays.seconds

    def __str__(self) -> str:
        levels = " ".join("-" if a is None else f"{a:.2f}" for a in self.advantages)
        return f"{self.name:12} {self.drafts} drafts of {self.seconds * 1e3:.3f} ms, worth {levels}"

    def renew(self) -> None:
        """Ask it again, whatever it was worth before."""
        self.advantages, self.asked = [None] * (1 + len(LEVELS)), [0] * (1 + len(LEVELS))
        self.pays, self.wait = False, 0

    def learn(self, advantage: float) -> float:
        """It was asked at its level, and worth so much. Returns what it usually is there."""
        usual, asked = self.advantage(), self.asked[self.level]
        usual += max(LATEST, 1 / (2 + asked)) * (advantage - usual)
        self.advantages[self.level], self.asked[self.level] = usual, asked + 1
        self.pays = any(a is not None and a > 0 for a in self.advantages)
        return usual

    def advantage(self) -> float:
        """At its level: as it was seen there, or where others expect a little less or more."""
        found = self.advantages[self.level]
        if found is not None:
            return found
        for level in (*range(self.level, -1, -1), *range(self.level + 1, len(self.advantages))):
            found = self.advantages[level]
            if found is not None:
                return found
        return 0.0


@dataclass
class Luck:
    """How much of what drafts promised about a text came true: what is right on the whole may be wrong for one text."""

    promised: float = 0.0  # tokens beyond plain decoding's, of late
    came: float = 0.0

    def see(self, promised: float, came: float) -> None:
        """Of one step."""
        self.promised = KEPT * self.promised + promised
        self.came = KEPT * self.came + came

    @property
    def share(self) -> float:
        """To be expected of the next promise. A text that gave more than was promised is not believed to go on so."""
        return min(1.0, (BEFORE + self.came) / (BEFORE + self.promised))


class Choice(NamedTuple):
    """What was decided about a step, and what was expected of it. Numbers are of all its sequences together."""

    asked: tuple[str, ...]  # sources
    resting: bool  # nothing is verified because speculation has lost too much time of late
    nodes: int  # to verify
    tokens: float  # expected
    rate: float  # expected tokens per second
    plain: float  # those of plain decoding


class Pilot:
    def __init__(
        self,
        costs: Costs,
        drafters: Sequence[str],
        trees: bool = True,
        heads: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """trees: whether a step can verify branches; else each draft's best chain counts. heads: which of the drafters
        are models of their own, and numbers of nodes that they may be asked for instead of all: each is a source of its
        own."""
        self.costs, self.trees = costs, trees
        self._counts = blank(len(drafters))  # of all calibrations
        self._number = dict[str, int]()  # of each source's calibration
        self.sources = dict[str, Source]()
        self._ways = dict[str, list[Source]]()  # by drafter
        for i, part in enumerate(drafters):
            calibration, head = Calibration(self._counts[i]), part in heads
            ways = [Source(f"{part}:{most}", part, calibration, most, head) for most in heads.get(part, ())]
            self._ways[part] = [*ways, Source(part, part, calibration, head=head)]
            for source in self._ways[part]:
                self.sources[source.name], self._number[source.name] = source, i
        self._known: dict[tuple[str, ...], NDArray[np.int64]] = {}  # numbers of sources, by names
        self.joining = Usual()  # what is done with a sequence's drafts: fusing, choosing, learning
        self._account = 0.0  # plain steps gained over plain decoding
        self._tried: Source | None = None  # who is probed,
        self._left = 0  # and the drafts that are left of that
        self._seen: list[TokenTree] = []  # the latest drafts
        self._ranked: list[_Ranked] = []
        self._unjudged: _Asked | None = None  # the latest step, until somebody has time for `judge`
        self.promised: list[float] = []  # tokens beyond one, of each sequence's chosen tree
        self.last: Choice | None = None

    # ---- before a step

    def begin(self) -> None:
        """Another text: what was gained on others does not pay for losses on it."""
        self._account = min(self._account, 0.0)

    @property
    def resting(self) -> bool:
        """Whether speculation has lost so much that nothing may be verified; probes go on."""
        return self._account < -STAKE

    def asks(
        self,
        names: Iterable[str],
        batch: int,
        expected: Callable[[], float],
        said: int = 0,
        late: Container[str] = frozenset(),
    ) -> Iterator[str]:
        """Whom to ask now of these drafters, one after the other: each cheap one that earns its time, then each dear
        one and the best head, in its best way, if they do; and now and then another, to see whether it would. expected:
        tokens per sequence from what was drafted so far, as `expects` tells it. said: tokens of the shortest text.
        late: whose draft could have been started before, and was not."""
        self.judge()
        step, resting = self.costs.seconds(1, batch), self.resting
        dear: list[Source] = []
        heads: list[Source] = []
        for source in chain.from_iterable(self._ways[name] for name in names):
            source.level = 0
            if source.wait:
                source.wait -= 1
            if source.head:
                heads.append(source)
            elif source.seconds > DEAR * step:
                dear.append(source)
            elif not source.wait or (not resting and source.advantage() > 0):
                yield source.name
        for source in dear:
            if not source.wait or source.pays:
                source.level = bisect(LEVELS, expected())
                if not source.wait or (not resting and source.advantage() > MARGIN):
                    yield source.name
        if any(not source.wait or source.pays or source is self._tried for source in heads):
            delays = {source.name: source.delay / step for source in heads if source.name in late}
            chosen = self._best_of(heads, bisect(LEVELS, expected()), delays, not 0 < said < LONG)
            if chosen is not None:
                yield chosen.name

    def _best_of(self, heads: list[Source], level: int, delays: dict[str, float], probes: bool) -> Source | None:
        """One at most. delays: by how much they must be better than others. probes: whether late ones may be probed."""
        for source in heads:
            source.level = level
        if self._left and self._tried in heads:
            self._left -= 1
            return self._tried
        self._tried = None
        if due := [source for source in heads if not source.wait and (probes or not source.delay)]:
            chosen = min(due, key=lambda source: source.drafts)
            if chosen.delay or not chosen.drafts:
                self._tried, self._left = chosen, TRIAL - 1
            return chosen
        best = max(heads, key=lambda source: source.advantage() - delays.get(source.name, 0.0))
        return best if best.advantage() > MARGIN and not self.resting else None

    def continues(self, name: str) -> bool:
        """Whether a source that was asked will probably be asked about the next step too."""
        return self.sources[name].pays or (self._left > 0 and self.sources[name] is self._tried)

    def expects(self, trees: Sequence[TokenTree], limits: Sequence[int]) -> float:
        """Tokens per sequence, from these drafts as far as they are worth verifying."""
        if all(len(tree) == 1 for tree in trees):
            return 1.0
        tokens = _tokens([r.worth for r in self._look_at(trees, limits)])
        width = _best(tokens, 1.0, self.costs.upto(len(tokens), len(trees)), 0.0, 0.0)
        return float(tokens[width]) / len(trees)

    def count(
        self, drafting: dict[str, float], new: Container[str] = (), late: Container[str] = ()
    ) -> dict[str, float]:
        """What drafting counts as that took so many seconds, see `Usual`. new: sources that had to read the
        text first; late: those that had to begin late."""
        counted = {}
        for name, seconds in drafting.items():
            source = self.sources[name]
            usual, source.reading = source.seconds, 0.0
            if source.drafts >= FREE and (name in new or name in late):
                besides = source.texts if name in new else source.delays
                source.reading = besides.count(max(0.0, seconds - usual))
                seconds = min(seconds, usual)
            counted[name] = source.drafting.count(seconds)
        return counted

    def joined(self, seconds: float, batch: int) -> None:
        """Making something of drafts took so long, besides drafting."""
        self.joining.count(seconds / batch)

    def spent(self, drafting: dict[str, float], batch: int) -> float:
        """All seconds that a step's drafts cost, those of reading texts included."""
        return sum([s + self.sources[name].reading for name, s in drafting.items()]) + self._joining(batch)

    def choose(
        self,
        trees: Sequence[TokenTree],
        limits: Sequence[int],
        drafting: dict[str, float],
        luck: Sequence[float] = (),
    ) -> list[TokenTree]:
        """What of these drafts, one per sequence, is worth verifying; at most `limits` nodes of each. drafting: seconds
        that each source which was asked took for them all, as `count` counts them. luck: of each, see `Luck`."""
        batch, resting = len(trees), self.resting
        spent, plain = sum(drafting.values()) + self._joining(batch), batch / self.costs.seconds(1, batch)
        ranked = self._look_at(trees, limits)
        worths = [r.worth for r in ranked]
        tokens = hoped = _tokens(worths)
        share = luck[0] if luck else 1.0
        if batch > 1 and luck:
            hoped, share = _tokens(worths, luck), 1.0
        seconds = self.costs.upto(len(tokens), batch)
        width = 0 if resting else _best(hoped, share, seconds, spent, plain)
        kept = [r.tree.first(width) for r in ranked]
        self.promised = [r.promised(width) for r in ranked]
        expected = float(tokens[width])
        rate = expected / (spent + float(seconds[width]))
        self.last = Choice(tuple(drafting), resting, sum(map(len, kept)) - batch, expected, rate, plain)
        self._unjudged = _Asked(list(trees), limits, ranked, drafting)
        return kept

    def judge(self) -> None:
        """What asking whoever was asked about the last step was worth, against the same step without them. That can
        wait until the step runs, but not until more is known."""
        asked, self._unjudged = self._unjudged, None
        if asked is None or all(self._settled(self.sources[name]) for name in asked.drafting):
            return
        batch, step = len(asked.trees), self.costs.seconds(1, len(asked.trees))
        joining = self._joining(batch)  # without anybody there is none of it
        spent, plain = sum(asked.drafting.values()) + joining, batch / step
        with_all = self._rate(_tokens([r.worth for r in asked.ranked]), batch, spent)
        if len(asked.drafting) == 1:
            (name,) = asked.drafting
            self._judge(self.sources[name], with_all / plain - 1, step, joining)
            return
        names = self._numbers(tuple(asked.drafting))
        without = np.zeros((len(names), max(map(len, asked.trees))))
        for tree, limit in zip(asked.trees, asked.limits, strict=True):
            columns = self._numbers(tree.sources)
            _add_without(without, names, tree.parents, tree.raw, columns, self._counts, limit, self.trees)
        for (name, seconds), tokens in zip(asked.drafting.items(), without, strict=True):
            rate = max(plain, self._rate(tokens, batch, spent - seconds))
            self._judge(self.sources[name], with_all / rate - 1, step, 0.0)

    def _settled(self, source: Source) -> bool:
        """Whether its latest draft can do without being judged."""
        known = source.asked[source.level] >= ENOUGH and source.drafts % SELDOM > 0
        return known and source.advantage() > 0 and not self.resting

    def _rate(self, tokens: NDArray[np.float64], batch: int, spent: float) -> float:
        """Tokens per second with the best number of nodes. tokens: expected with 0, 1, … of them."""
        rate: float = _best_rate(tokens, 1.0, self.costs.upto(len(tokens), batch), spent)
        return rate

    def _joining(self, batch: int) -> float:
        return batch * self.joining.seconds

    def _look_at(self, trees: Sequence[TokenTree], limits: Sequence[int]) -> list[_Ranked]:
        """Several ask about the same trees within a step."""
        if self._seen != trees:
            self._seen = list(trees)
            self._ranked = [self._rank(tree, limit) for tree, limit in zip(trees, limits, strict=True)]
        return self._ranked

    def _rank(self, tree: TokenTree, limit: int) -> _Ranked:
        tokens, parents, raw, score, worth = _rank(
            tree.tokens, tree.parents, tree.raw, self._numbers(tree.sources), self._counts, limit, self.trees
        )
        return _Ranked(TokenTree(tokens, parents, raw, score, tree.sources), worth)

    def _numbers(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """Which sources these are."""
        found = self._known.get(names)
        if found is None:
            found = self._known[names] = np.array([self._number[name] for name in names], np.int64)
        return found

    def _judge(self, source: Source, advantage: float, step: float, joining: float) -> None:
        """Asking this source changed the rate so much: when to probe it next, unless it is asked anyway. step: seconds
        of a plain one; joining: of what is done with drafts because of it."""
        usual = source.learn(advantage) if source.drafts > FREE else source.advantage()
        lost = source.seconds + joining  # all of it, as long as nothing is verified, or little is known
        known = source.drafts >= ENOUGH or (source.drafts > FREE and usual < -HOPELESS)
        whole = step + lost
        if known and not self.resting:
            lost = min(lost, max(LEAST, -min(usual, advantage)) * whole) + self._best_but(source) * whole
        lost *= TRIAL if source.delay else 1
        share = FIRST_PROBES if not known else HEADS_PROBING if source.head else PROBING
        source.wait = round((lost + source.reading) / (share * step))
        longest = FIRST_WAIT << 2 * min(source.drafts - FREE, SETTLED) if source.drafts > FREE else FIRST_WAIT
        source.wait = min(source.wait, longest)

    def _best_but(self, source: Source) -> float:
        """The advantage of the best head that could have been asked instead; nothing, if none has any."""
        others = [s for s in self.sources.values() if s is not source and s.head] if source.head else []
        return max([0.0, *(found for s in others if (found := s.advantages[source.level]) is not None)])

    def decline(self, batch: int) -> None:
        """Nobody was asked: the step will be a plain one."""
        plain = batch / self.costs.seconds(1, batch)
        self.last = Choice((), self.resting, 0, batch, plain, plain)

    # ---- after it

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int = 0) -> bool:
        """The text after the tree's root went on with these tokens, the first `known` of which it was told before.
        tree: everything that was proposed. Returns whether more of the text would say more about it."""
        self.judge()
        columns, text = self._numbers(tree.sources), np.array(followed, np.int32)
        return bool(label(tree.parents, tree.tokens, tree.raw, columns, text, known, self._counts))

    def charge(self, rows: int, batch: int, tokens: int, verifying: float, drafting: float) -> None:
        """A step of that many rows took so long, and gave so many tokens. It is charged what such steps usually cost:
        one clock reading may be due to anything."""
        self.judge()
        self.costs.observe(rows, batch, verifying)
        verifying, plain = self.costs.seconds(rows, batch), self.costs.seconds(1, batch)
        # A slow plain step is nobody's loss; and probes while it rests must not keep it from beginning anew.
        tried = rows > 1 or (drafting > 0 and not self.resting)
        gained = tokens / batch - (verifying + drafting) / plain if tried else 0.0
        self._account = max(-LOSSES_KEPT, min((1 - FORGOTTEN) * self._account + gained, GAINS_KEPT))


class _Ranked(NamedTuple):
    """One sequence's draft in the order of its nodes' worth."""

    tree: TokenTree  # as far as it may be verified, the most valuable nodes first
    worth: NDArray[np.float64]  # (n,) expected tokens with the first 0, 1, … of them

    def promised(self, nodes: int) -> float:
        """Tokens beyond one, by the best so many nodes."""
        return float(self.worth[min(nodes, len(self.worth) - 1)]) - 1


class _Asked(NamedTuple):
    """What was asked about a step, and came of it."""

    trees: list[TokenTree]
    limits: Sequence[int]
    ranked: list[_Ranked]
    drafting: dict[str, float]  # seconds that each source cost


def _tokens(worths: Sequence[NDArray[np.float64]], luck: Sequence[float] = ()) -> NDArray[np.float64]:
    """(width,) expected of all sequences together if each gets at most 0, 1, … nodes. A step is as wide as the widest
    of its trees, so whoever gains less may as well have as many nodes as the others. luck: of each, how much of what
    drafts promise comes; none: all of it."""
    if len(worths) == 1 and not luck:
        return worths[0]
    tokens = np.full(max(map(len, worths)), float(len(worths)))
    for worth, share in zip(worths, luck or [1.0] * len(worths), strict=True):
        tokens[: len(worth)] += share * (worth - 1)
        tokens[len(worth) :] += share * (worth[-1] - 1)
    return tokens


@njit(cache=True, nogil=True)
def _rank(tokens, parents, raw, columns, counts, limit, trees):  # type: ignore[no-untyped-def]
    """Tokens, parents, raw scores and scores of the nodes that may be verified, the most valuable first, and what they
    are worth, as in `_Ranked`."""
    score, value = _values(parents, raw, columns, counts, -1)
    order = _order(parents, score, value, limit, trees)
    n = len(order) + 1
    new_tokens, new_parents = np.empty(n, np.int32), np.empty(n, np.int32)
    new_raw, new_score = np.empty((n, raw.shape[1]), np.float32), np.empty(n, np.float32)
    place = np.empty(len(parents), np.int32)
    for k in range(n):
        node = order[k - 1] if k else 0
        place[node] = k
        new_tokens[k], new_score[k] = tokens[node], score[node]
        new_parents[k] = place[parents[node]] if k else -1
        new_raw[k] = raw[node]
    return new_tokens, new_parents, new_raw, new_score, _worth(value, order)


@njit(cache=True, nogil=True)
def _add_without(tokens, asked, parents, raw, columns, counts, limit, trees):  # type: ignore[no-untyped-def]
    """Add to each row of tokens (sources, width) what a draft is worth with 0, 1, … nodes if one of the asked sources
    had said nothing."""
    for row in range(len(asked)):
        score, value = _values(parents, raw, columns, counts, asked[row])
        worth = _worth(value, _order(parents, score, value, limit, trees))
        for nodes in range(tokens.shape[1]):
            tokens[row, nodes] += worth[min(nodes, len(worth) - 1)]


@njit(cache=True, nogil=True)
def _values(parents, raw, columns, counts, left_out):  # type: ignore[no-untyped-def]
    """How probable each node is, given its parent, and together with all its ancestors. left_out: a source that does
    not count."""
    n = len(parents)
    score, value, depth = np.ones(n, np.float32), np.ones(n), np.zeros(n, np.int64)
    claimed = np.zeros(n)  # by all children of a node together
    for i in range(1, n):
        depth[i] = depth[parents[i]] + 1
        best = 0.0  # that any source says of it
        for column in range(len(columns)):
            if columns[column] != left_out and not np.isnan(raw[i, column]):
                best = max(best, belief(counts, columns[column], depth[i], raw[i, column]))
        score[i] = best
        claimed[parents[i]] += best
    for i in range(1, n):
        p = score[i]
        if claimed[parents[i]] > 1:
            p = min(p, _left_by_better(parents, score, i))
        value[i] = value[parents[i]] * p
    return score, value


@njit(cache=True, nogil=True)
def _left_by_better(parents, score, node):  # type: ignore[no-untyped-def]
    """The children of a node can't be right together: what those that are likelier than this one leave it."""
    left = 1.0
    for i in range(1, len(parents)):
        if parents[i] == parents[node] and (score[i] > score[node] or (score[i] == score[node] and i < node)):
            left -= score[i]
    return max(0.0, left)


@njit(cache=True, nogil=True)
def _order(parents, score, value, limit, trees):  # type: ignore[no-untyped-def]
    """Drafted nodes that may be verified, the most valuable first."""
    length = min(limit, len(parents) - 1)
    return _by_value(value, np.arange(1, len(parents)))[:length] if trees else _best_chain(parents, score, length)


@njit(cache=True, nogil=True)
def _worth(value, order):  # type: ignore[no-untyped-def]
    """(n + 1,) expected tokens with the first 0, 1, … of these nodes."""
    worth = np.ones(len(order) + 1)
    for k in range(len(order)):
        worth[k + 1] = worth[k] + value[order[k]]
    return worth


@njit(cache=True, nogil=True)
def _by_value(value, nodes):  # type: ignore[no-untyped-def]
    """Sort nodes, the most valuable first; of equals the one that came before, so parents stay before their children.
    By insertion: they are few, and nearly in order."""
    for k in range(1, len(nodes)):
        node = nodes[k]
        while k > 0 and value[nodes[k - 1]] < value[node]:
            nodes[k] = nodes[k - 1]
            k -= 1
        nodes[k] = node
    return nodes


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
def _best_rate(tokens, share, seconds, spent):  # type: ignore[no-untyped-def]
    """Tokens per second with the best number of nodes, if drafting took so many seconds besides. share: that comes of
    what is expected beyond the first token."""
    rate = 0.0
    for nodes in range(len(tokens)):
        rate = max(rate, (tokens[0] + share * (tokens[nodes] - tokens[0])) / (spent + seconds[nodes]))
    return rate


@njit(cache=True, nogil=True)
def _best(tokens, share, seconds, spent, plain):  # type: ignore[no-untyped-def]
    """How many nodes are best. What drafting took is spent: where even the best does not make up for it, nodes still
    have to give more than plain decoding would in the time that they take."""
    best, most, worth = 0, -np.inf, max(_best_rate(tokens, share, seconds, spent), plain)
    for nodes in range(len(tokens)):
        gain = share * tokens[nodes] - worth * seconds[nodes]
        if gain > most:
            best, most = nodes, gain
    return best
