"""Pilot: who is asked for drafts, and how much of them is verified, so that tokens per second are as many as can be.

A node is worth the probability that it and its ancestors are right, which `Calibration` knows; a step costs what
`Costs` says. The tree takes its most valuable nodes as long as expected tokens per second rise, none at all if need be.

Sources are asked from the cheapest to the dearest, each if it gains something over a step without it; of trained heads,
which say much the same, the best one. What a source gains depends on how much is expected already, so it is known by
level of that. One that gains nothing is only tried, as often as a small share of all time pays for.

Never slower: decisions are by expectation, and what a text's drafts promise is believed as far as promises about it
came true (`Text.share`). Times are typical ones (`TypicalTime`), so that one outlier changes little.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.budget.calibration import NEWEST, Calibration
from slipstream.budget.costs import WILD, Costs
from slipstream.budget.worth import add_without, best_nodes, best_rate, rank
from slipstream.tree import TokenTree

LEVELS = 5  # of tokens that are expected already: less than 1.4, 2, 2.8, 4, more
TRIAL = 4  # drafts by which it is known what one takes: the first ones load code, or begin late
INVESTING = 32  # drafts of one that learns from what is verified beside them: its window fills, then finds something
INVESTED = 0.25  # of a plain step, that rows beside may take at most: what such a one finds is not worth more
EXPLORING = 0.01  # of all time, that trying sources may lose
CREDIT = 3.0  # tokens that every text is taken to have promised and given before it begins


@dataclass
class TypicalTime:
    """What something typically takes: the least of its first times, then a mean in which outliers are cut off."""

    times: int = 0
    seconds: float = 0.0

    def see(self, seconds: float) -> None:
        if self.times < TRIAL:
            self.seconds = min(seconds, self.seconds) if self.times else seconds
        else:
            self.seconds += NEWEST * (min(seconds, WILD * self.seconds) - self.seconds)
        self.times += 1


@dataclass(eq=False)
class Source:
    """What is known of one drafter, or of one way to ask it."""

    name: str
    drafter: str
    number: int  # of its calibration, which all ways share
    most: int = sys.maxsize  # nodes that it is asked for
    head: bool = False  # of these one is asked at most
    trial: int = TRIAL  # drafts before anything is known of it
    drafting: TypicalTime = field(default_factory=TypicalTime)  # of a draft for all sequences,
    starting: TypicalTime = field(default_factory=TypicalTime)  # and of one that has to begin with their texts
    gains: list[float] = field(default_factory=lambda: [0.0] * LEVELS)  # of the rate, by asking it
    looks: list[int] = field(default_factory=lambda: [0] * LEVELS)  # that this rests on
    waits: list[int] = field(default_factory=lambda: [0] * LEVELS)  # steps before it is tried again
    level: int = 0  # where it could be asked last

    def __str__(self) -> str:
        gains = " ".join(f"{gain:.2f}" if looks else "-" for gain, looks in zip(self.gains, self.looks, strict=True))
        return f"{self.name:12} {self.drafting.times} drafts of {self.drafting.seconds * 1e3:.3f} ms, gains {gains}"

    @property
    def known(self) -> bool:
        return self.drafting.times >= self.trial

    @property
    def beginning(self) -> float:
        """Seconds that a draft takes besides if it has to begin with the texts, or now."""
        return max(0.0, self.starting.seconds - self.drafting.seconds) if self.starting.times else 0.0

    @property
    def pays(self) -> bool:
        """At any level."""
        return max(self.gains) > 0

    def gain(self) -> float:
        """At its level: as it was seen there, or where others expect a little less or more."""
        for level in (*range(self.level, -1, -1), *range(self.level + 1, LEVELS)):
            if self.looks[level]:
                return self.gains[level]
        return 0.0

    def due(self, level: int) -> bool:
        """Whether it is to be tried at this level."""
        self.level = level
        self.waits[level] = max(0, self.waits[level] - 1)
        return not self.waits[level]

    def learn(self, gain: float) -> None:
        """It was asked at its level, and gained so much."""
        before, looks = self.gain(), self.looks[self.level]
        self.gains[self.level] = before + max(NEWEST, 1 / (2 + looks)) * (gain - before)
        self.looks[self.level] = looks + 1


@dataclass(eq=False)
class Text:
    """How much came of what drafts promised about one text: what is right on the whole may be wrong for it."""

    promised: float = 0.0  # tokens beyond plain decoding's, of late
    came: float = 0.0

    def see(self, promised: float, came: float) -> None:
        """Of one step that verified something."""
        self.promised += promised - NEWEST * self.promised
        self.came += came - NEWEST * self.came

    @property
    def share(self) -> float:
        """Of the next promise, that is to be expected. A text that gave more than was promised is not believed to go on
        so."""
        return min(1.0, (CREDIT + self.came) / (CREDIT + self.promised))


class Choice(NamedTuple):
    """What was decided about a step, and what was expected of it. Numbers are of all its sequences together."""

    asked: tuple[str, ...]  # sources
    resting: bool  # nothing is verified because too little came of what was promised of late
    nodes: int  # to verify
    tokens: float  # expected
    rate: float  # expected tokens per second
    plain: float  # those of plain decoding


class Draft(NamedTuple):
    """One sequence's draft, and its nodes in the order of their worth."""

    whole: TokenTree
    limit: int  # nodes of it that may be verified
    best: TokenTree  # the same as far as it may be verified, the most valuable nodes first
    worth: NDArray[np.float64]  # (n,) expected tokens with the first 0, 1, … of them
    share: float  # of what is promised, that this expects to come


class Unjudged(NamedTuple):
    """A step whose sources are still to be judged."""

    sources: list[Source]
    drafts: list[Draft]
    taken: float  # seconds, as expected
    begun: list[float]  # by source: seconds that it took to begin with the texts
    beside: int  # nodes that were verified for investors


class Pilot:
    def __init__(
        self,
        costs: Costs,
        drafters: Sequence[str],
        trees: bool = True,
        heads: Mapping[str, Sequence[int]] = MappingProxyType({}),
        investors: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """trees: whether a step can verify branches; else each draft's best chain counts. heads: which of the drafters
        are models of their own, and numbers of nodes that they may be asked for instead of all: each is a source of its
        own. investors: those that have nodes verified beside the tree, and how many."""
        self.costs, self.trees, self.drafters, self.heads = costs, trees, list(drafters), heads
        self.investors = investors
        self.calibration = Calibration(self.drafters)
        self.fusing = TypicalTime()  # what is done with a sequence's drafts: fusing, choosing, learning
        self._by_batch = dict[int, dict[str, Source]]()
        self._numbers_of: dict[tuple[str, ...], NDArray[np.int64]] = {}
        self._trial: Source | None = None  # the head that is tried,
        self._left = 0  # and the drafts that are left of that
        self._drafts: list[Draft] = []  # for the step that comes
        self._unjudged: Unjudged | None = None  # until `judge` has time
        self.promised: list[float] = []  # tokens beyond one, of each sequence's chosen tree
        self.last: Choice | None = None

    def sources(self, batch: int = 1) -> dict[str, Source]:
        """Those of about so many sequences: what a draft takes and gains depends on how many there are."""
        found = self._by_batch.get(batch.bit_length())
        if found is None:
            found = self._by_batch[batch.bit_length()] = {}
            for i, name in enumerate(self.drafters):
                for most in self.heads.get(name, ()):
                    found[f"{name}:{most}"] = Source(f"{name}:{most}", name, i, most, True)
                trial = INVESTING if name in self.investors else TRIAL
                found[name] = Source(name, name, i, head=name in self.heads, trial=trial)
        return found

    # ---- before a step

    def asks(
        self, names: Container[str], batch: int, expected: Callable[[], float], unstarted: Container[str] = ()
    ) -> Iterator[Source]:
        """Whom to ask now of these drafters, one after the other. expected: tokens per sequence from what was drafted
        so far, as `expects` tells it. unstarted: whose draft could have been started before, and was not."""
        self.judge()
        there = [s for s in self.sources(batch).values() if s.drafter in names]
        for source in sorted([s for s in there if not s.head], key=lambda s: s.drafting.seconds):
            if self._affords(source, batch) and (source.due(_level(expected())) or source.gain() > 0):
                yield source
        if heads := [s for s in there if s.head]:
            level = _level(expected())
            due, step = [s for s in heads if s.due(level)], self.costs.seconds(1, batch)
            chosen = self._best_head(heads, due, unstarted, step)
            if chosen is not None:
                yield chosen

    def _affords(self, source: Source, batch: int) -> bool:
        rows = self.investors.get(source.drafter, 0)
        return not rows or self.costs.seconds(1 + rows, batch) <= (1 + INVESTED) * self.costs.seconds(1, batch)

    def _best_head(
        self, heads: list[Source], due: list[Source], unstarted: Container[str], step: float
    ) -> Source | None:
        """A head gives way to another only if that gains more than it takes to begin."""
        if self._left and self._trial in heads:
            self._left -= 1
            return self._trial
        self._trial = None
        best = max(heads, key=lambda s: s.gain() - s.beginning * (s.drafter in unstarted) / step)
        if due := [s for s in due if s is not best or s.gain() <= 0]:
            chosen = min(due, key=lambda s: s.drafting.times)
            if not chosen.known or chosen.drafter in unstarted:
                self._trial, self._left = chosen, TRIAL - 1
            return chosen
        return best if best.gain() > 0 else None

    def continues(self, source: Source) -> bool:
        """Whether a source that was asked will probably be asked about the next step too."""
        return source.pays or (self._left > 0 and source is self._trial)

    def expects(self, texts: Sequence[Text], trees: Sequence[TokenTree], limits: Sequence[int]) -> float:
        """Tokens per sequence, from these drafts as far as they are worth verifying."""
        if all(len(tree) == 1 for tree in trees):
            return 1.0
        expected = _together(self._rank(texts, trees, limits))
        nodes = best_nodes(expected, self.costs.upto(len(expected), len(trees)), 0.0, 0.0)
        return float(expected[nodes]) / len(trees)

    def took(self, seconds: Mapping[Source, float], unstarted: Container[str] = ()) -> None:
        """Drafts took so long. unstarted: drafters that had to begin now, or to read the text first, which is rare."""
        for source, taken in seconds.items():
            begins = source.drafter in unstarted
            if begins:
                source.starting.see(taken)
            if not (begins and source.known):
                source.drafting.see(taken)

    def choose(
        self,
        texts: Sequence[Text],
        trees: Sequence[TokenTree],
        limits: Sequence[int],
        asked: Iterable[Source],
        unstarted: Container[str] = (),
        beside: int = 0,
    ) -> list[TokenTree]:
        """What of these drafts, one per text, is worth verifying; at most `limits` nodes of each. beside: nodes of each
        that are verified besides, for the investors that were asked."""
        batch, sources = len(trees), list(asked)
        spent, plain = self._spent(sources, batch), batch / self.costs.seconds(1, batch)
        drafts = self._rank(texts, trees, limits)
        expected = _together(drafts)
        seconds = self._seconds(expected, batch, beside)
        width = int(best_nodes(expected, seconds, spent, plain))
        kept = [draft.best.first(width) for draft in drafts]
        self.promised = [(float(d.worth[len(tree) - 1]) - 1) / d.share for d, tree in zip(drafts, kept, strict=True)]
        resting = not width and any(2 * d.share < 1 for d in drafts)
        nodes, tokens = sum(map(len, kept)) - batch, float(expected[width])
        rate = tokens / (spent + float(seconds[width]))
        self.last = Choice(tuple(s.name for s in sources), resting, nodes, tokens, rate, plain)
        begun = [s.beginning * (s.drafter in unstarted or s is self._trial) for s in sources]
        self._unjudged = Unjudged(sources, drafts, spent + float(seconds[width]), begun, beside)
        return kept

    def decline(self, names: Container[str], batch: int) -> int:
        """None of these drafters was asked: the step will be a plain one. Returns for how many more steps that will be
        so: `rested` is to be told how many there were."""
        plain = batch / self.costs.seconds(1, batch)
        self.last = Choice((), False, 0, batch, plain, plain)
        waits = [s.waits[0] for s in self.sources(batch).values() if s.drafter in names and self._affords(s, batch)]
        return max(0, min(waits, default=0) - 1)

    def rested(self, steps: int, batch: int) -> None:
        """There were so many plain steps without a question."""
        if steps:
            for source in self.sources(batch).values():
                source.waits[0] = max(0, source.waits[0] - steps)

    def judge(self) -> None:
        """What the drafters that were asked about the last step gained, against the step without them. That can wait
        until the step runs, but not until more is known."""
        if self._unjudged is None:
            return
        (sources, drafts, taken, begun, beside), self._unjudged = self._unjudged, None
        batch, spent = len(drafts), self._spent(sources, len(drafts))
        step = self.costs.seconds(1, batch)
        plain, with_all = batch / step, self._rate(_together(drafts), batch, spent, beside)
        without = np.zeros((len(sources), max(len(draft.whole) for draft in drafts)))
        if len(sources) > 1:
            numbers = np.array([s.number for s in sources], np.int64)
            for tree, limit, _, _, share in drafts:
                columns, bins = self._numbers(tree.sources), self.calibration.bins
                add_without(without, numbers, tree.parents, tree.raw, columns, bins, limit, self.trees, share)
        for source, expected, beginning in zip(sources, without, begun, strict=True):
            rows = 0 if source.drafter in self.investors else beside
            rate = self._rate(expected, batch, spent - source.drafting.seconds, rows) if len(sources) > 1 else plain
            if source.known:
                self._judge(source, with_all / rate - 1, taken / step, beginning / step, self.sources(batch).values())

    def _judge(self, source: Source, gain: float, steps: float, begun: float, beside: Collection[Source]) -> None:
        """Asking this source changed the rate so much, in the time of so many plain steps, besides those in which it
        began: it is tried again when what that lost is little of all time."""
        source.learn(gain)
        instead = [s.gains[source.level] for s in beside if s.head and s is not source] if source.head else []
        lost = begun + steps * (1 - (1 + gain) / (1 + max(0.0, *instead, 0.0)))
        source.waits[source.level] = max(0, round(lost * len(beside) / EXPLORING))

    # ---- after it

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int = 0) -> bool:
        """The text after the tree's root went on with these tokens, see `Calibration.learn`. tree: everything that was
        proposed."""
        self.judge()
        return self.calibration.learn(tree, self._numbers(tree.sources), followed, known)

    # ---- from one process to the next

    def known(self) -> dict[str, Any]:
        """What was learnt, for `recall`."""
        sources = {
            str(size): {s.name: [s.drafting.seconds, s.gains, s.looks] for s in group.values() if s.known}
            for size, group in self._by_batch.items()
        }
        calibration = dict(zip(self.drafters, np.round(self.calibration.bins, 4).tolist(), strict=True))
        return {"calibration": calibration, "sources": sources}

    def recall(self, known: Any) -> None:
        """Begin with that. What does not fit, because another version kept it, is left out."""
        with suppress(KeyError, TypeError, ValueError):
            for i, name in enumerate(self.drafters):
                bins = np.array(known["calibration"].get(name))
                if bins.shape == self.calibration.bins[i].shape:
                    self.calibration.bins[i] = bins
            for size, group in known["sources"].items():
                for name, (seconds, gains, looks) in group.items():
                    source = self.sources(1 << int(size) - 1).get(name)
                    if source is not None and len(gains) == len(looks) == LEVELS:
                        source.drafting, source.gains, source.looks = (
                            TypicalTime(source.trial, seconds),
                            list(gains),
                            list(looks),
                        )

    def renew(self, name: str) -> None:
        """Ask this drafter again, whatever it gained before."""
        for group in self._by_batch.values():
            group[name].looks, group[name].waits = [0] * LEVELS, [0] * LEVELS

    # ---- within

    def _spent(self, sources: Iterable[Source], batch: int) -> float:
        """Seconds that drafts of these sources take, and what is done with them."""
        return sum(s.drafting.seconds for s in sources) + batch * self.fusing.seconds

    def _rate(self, expected: NDArray[np.float64], batch: int, spent: float, beside: int) -> float:
        return float(best_rate(expected, self._seconds(expected, batch, beside), spent))

    def _seconds(self, expected: NDArray[np.float64], batch: int, beside: int) -> NDArray[np.float64]:
        """Of steps with 0, 1, … nodes, and those beside them."""
        return self.costs.upto(len(expected) + beside, batch)[beside:]

    def _rank(self, texts: Sequence[Text], trees: Sequence[TokenTree], limits: Sequence[int]) -> list[Draft]:
        """Several ask about the same trees within a step."""
        if [(draft.whole, draft.limit) for draft in self._drafts] != list(zip(trees, limits, strict=True)):
            self._drafts = []
            for text, tree, limit in zip(texts, trees, limits, strict=True):
                columns, bins, share = self._numbers(tree.sources), self.calibration.bins, text.share
                found = rank(tree.tokens, tree.parents, tree.raw, columns, bins, limit, self.trees, share)
                best = TokenTree(found[0], found[1], found[2], found[3], tree.sources)
                self._drafts.append(Draft(tree, limit, best, found[4], share))
        return self._drafts

    def _numbers(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """Whose calibrations these are."""
        found = self._numbers_of.get(names)
        if found is None:
            found = self._numbers_of[names] = np.array([self.drafters.index(name) for name in names], np.int64)
        return found


def _level(expected: float) -> int:
    return min(LEVELS - 1, int(2 * math.log2(max(1.0, expected))))


def _together(drafts: Sequence[Draft]) -> NDArray[np.float64]:
    """(width,) tokens of all sequences if each gets at most 0, 1, … nodes. A step is as wide as the widest of its
    trees, so a sequence that gains less may as well have as many nodes as the others."""
    if len(drafts) == 1:
        return drafts[0].worth
    tokens = np.zeros(max([len(draft.worth) for draft in drafts]))
    for draft in drafts:
        tokens[: len(draft.worth)] += draft.worth
        tokens[len(draft.worth) :] += draft.worth[-1]
    return tokens
