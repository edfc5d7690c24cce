"""Pilot: who is asked for drafts, and how much of them is verified, so that tokens per second are as many as can be.

A node is worth the probability that it and its ancestors are right, which `Calibration` knows; a step costs what
`Costs` says. The most valuable nodes are verified as long as expected tokens per second rise, none at all if need be.

Sources are asked from the cheapest to the dearest, each if it gains something over a step without it; of trained heads,
which say much the same, the best one. What a source gains depends on how much is expected already, so it is known by
level of that. One that gains nothing is only tried, as often as a small share of all time pays for. Nodes beside its
drafts, for one that learns from them, are an investment: as many as pay, by what rows cost and what such nodes gave.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.budget.calibration import NEWEST, Calibration
from slipstream.budget.costs import WILD, Costs
from slipstream.budget.worth import best_nodes, rank
from slipstream.tree import TokenTree

Floats = NDArray[np.float64]

LEVELS = 5  # of tokens that are expected already: less than 1.4, 2, 2.8, 4, more
TRIAL = 4  # drafts by which it is known what one takes: the first ones load code, or begin late
EXPLORING = 0.01  # of all time, that trying sources may lose
CREDIT = 3.0  # tokens that every text is taken to have promised and given before it begins
# Of what a text's drafts promised and gave, by every step that verifies nothing of them: else a text that began badly
# would never be tried again. A hostile one costs 3% of the time with that; more than 5% if it is forgiven as NEWEST.
FORGIVEN = 1 / 320


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
    most: int  # nodes that it is asked for
    head: bool  # of these one is asked at most
    returns: Floats | None = None  # share of tokens that 0, 1, … nodes beside its drafts add in the end,
    worth: float = 1.0  # how much of that came of late,
    beside: int = 0  # nodes that pay,
    behind: float = 0.0  # and seconds that it has lost
    began: bool = False  # whether that had to begin with the texts, or late
    drafting: TypicalTime = field(default_factory=TypicalTime)  # of a draft for all sequences,
    starting: TypicalTime = field(default_factory=TypicalTime)  # and of one that has to begin
    gains: list[float] = field(default_factory=lambda: [0.0] * LEVELS)  # of the rate, by asking it
    looks: list[int] = field(default_factory=lambda: [0] * LEVELS)  # that this rests on
    due: list[int] = field(default_factory=lambda: [0] * LEVELS)  # steps of the pilot at which it is tried again
    level: int = 0  # where it could be asked last

    @property
    def known(self) -> bool:
        return self.drafting.times >= TRIAL

    @property
    def beginning(self) -> float:
        """Seconds that a draft takes besides if it has to begin."""
        return max(0.0, self.starting.seconds - self.drafting.seconds)

    def took(self, seconds: float, began: bool = False) -> None:
        """A draft took so long. began: it had to read the texts first, which is rare, or was not started before."""
        self.began = began
        if began:
            self.starting.see(seconds)
        if not (began and self.known):
            self.drafting.see(seconds)

    def gain(self, level: int | None = None) -> float:
        """At a level, or at its own: as it was seen there, or where others expect a little less or more."""
        level = self.level if level is None else level
        nearest = (*range(level, -1, -1), *range(level + 1, LEVELS))
        return next((self.gains[level] for level in nearest if self.looks[level]), 0.0)

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
    promise: float = 0.0  # of the step under way

    def see(self, came: float) -> None:
        """So many tokens beyond one came of that."""
        fading = NEWEST if self.promise else FORGIVEN
        self.promised += self.promise - fading * self.promised
        self.came += (came if self.promise else 0.0) - fading * self.came
        self.promise = 0.0

    @property
    def share(self) -> float:
        """Of the next promise, that is to be expected: no more than all, even if more came than was promised."""
        return min(1.0, (CREDIT + self.came) / (CREDIT + self.promised))


@dataclass(eq=False)
class Draft:
    """What was proposed about a text, for one step."""

    text: Text
    tree: TokenTree  # of all sources
    limit: int  # nodes of it that may be verified

    def __post_init__(self) -> None:
        self.share = self.text.share  # as long as this step is judged


class Choice(NamedTuple):
    """What was decided about a step, and what was expected of it. Numbers are of all its sequences together."""

    asked: tuple[str, ...]  # sources
    resting: bool  # nothing is verified because too little came of what was promised of late
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
        returns: Mapping[str, Floats] = MappingProxyType({}),
    ) -> None:
        """trees: whether a step can verify branches; else each draft's best chain counts. heads: which of the drafters
        are models of their own, and numbers of nodes that they may be asked for instead of all: each is a source of its
        own. returns: of those that invest (`Source.returns`)."""
        self.costs, self.trees, self.drafters, self.heads, self.returns = costs, trees, list(drafters), heads, returns
        self.calibration = Calibration(self.drafters)
        self.fusing = TypicalTime()  # what is done with a sequence's drafts: fusing, choosing, learning
        self.steps = 0  # that there were, with drafts or without
        self.usual = 0.0  # nodes of a sequence that a step verifies
        self.last: Choice | None = None
        self._by_batch = dict[int, dict[str, Source]]()
        self._trial: Source | None = None  # the head that is tried,
        self._left = 0  # and the drafts that are left of that
        self._levels = np.zeros(LEVELS)  # how often heads could be asked at each, of late
        # Until `judge` has time: who was asked about what, the best rate, seconds of the step, tokens expected of it.
        self._unjudged: tuple[list[Source], Sequence[Draft], float, float, float] | None = None

    def sources(self, batch: int = 1) -> dict[str, Source]:
        """Those of about so many sequences: what a draft takes and gains depends on how many there are."""
        found = self._by_batch.get(batch.bit_length())
        if found is None:
            found = self._by_batch[batch.bit_length()] = {}
            for i, name in enumerate(self.drafters):
                for most in (*self.heads.get(name, ()), sys.maxsize):
                    way = name if most == sys.maxsize else f"{name}:{most}"
                    found[way] = Source(way, name, i, most, name in self.heads, returns=self.returns.get(name))
        return found

    # ---- before a step

    def asks(self, names: Container[str], drafts: Sequence[Draft], unstarted: Container[str] = ()) -> Iterator[Source]:
        """Whom to ask now of these drafters, one after the other. drafts: one per sequence, to which is added what each
        of them says. unstarted: whose draft could have been started before, and was not."""
        self.judge()
        self.steps += 1
        self.usual += NEWEST * ((self.last.nodes / len(drafts) if self.last else 0) - self.usual)
        there = [s for s in self.sources(len(drafts)).values() if s.drafter in names]
        for source in sorted([s for s in there if not s.head], key=lambda s: s.drafting.seconds):
            if source.returns is None:  # else what it finds now is drafted later, whatever others expect then
                source.level = self._level(drafts)
            if (self.steps >= source.due[source.level] or source.gain() > 0) and self._invests(source, drafts):
                yield source
        if heads := [s for s in there if s.head]:
            level = self._level(drafts)
            for head in heads:
                head.level = level
            yield from self._best_head(heads, unstarted, self.costs.seconds(1, len(drafts)))

    def _level(self, drafts: Sequence[Draft]) -> int:
        """By tokens per sequence that are expected of these drafts, as far as they are worth verifying."""
        if max([len(draft.tree) for draft in drafts]) == 1:
            return 0
        expected, _ = self._together(self._rank(drafts, ())[0])
        nodes, _ = best_nodes(expected, self.costs.upto(len(expected), len(drafts)), 0.0, 0.0)
        return min(LEVELS - 1, int(2 * math.log2(expected[nodes] / len(drafts))))

    def _invests(self, source: Source, drafts: Sequence[Draft]) -> bool:
        """If it does: as many nodes beside its drafts as pay, half of all at most. Where none do, it has to wait."""
        if source.returns is None:
            return True
        tokens = 1 + source.worth * source.returns[: 1 + min([draft.limit for draft in drafts]) // 2]
        each, first = len(drafts) if self.costs.flat else 1, round(self.usual)
        seconds = self.costs.upto(1 + each * (first + len(tokens) - 1), len(drafts))[each * first :: each].copy()
        source.beside, rate = best_nodes(tokens, seconds, source.drafting.seconds, 0.0)
        # A window that returns nothing is no investment, even if steps of a few rows seem to take less than one of one.
        if source.returns[source.beside] > 0 and rate * seconds[0] > 1:
            return True
        source.worth, source.due[0] = 1.0, self.steps + round(TRIAL * len(self.sources()) / EXPLORING)
        return False

    def _best_head(self, heads: list[Source], unstarted: Container[str], step: float) -> list[Source]:
        """One or none. What it takes to begin with another head is paid once, and what that gains comes at every step,
        whatever its level: so the best is who gains most at the levels that there were of late."""
        self._levels *= 1 - NEWEST
        self._levels[heads[0].level] += NEWEST
        if self._left and self._trial is not None and self._trial in heads:
            self._left -= 1
            return [self._trial]
        self._trial = None
        usual = [sum(share * s.gain(level) for level, share in enumerate(self._levels)) for s in heads]
        begun = [s.beginning / step * NEWEST if s.drafter in unstarted else 0.0 for s in heads]
        best = heads[int(np.argmax(np.subtract(usual, begun)))]
        if due := [s for s in heads if self.steps >= s.due[s.level] and (s is not best or s.gain() <= 0)]:
            chosen = min(due, key=lambda s: s.drafting.times)
            if not chosen.known or chosen.drafter in unstarted:
                self._trial, self._left = chosen, TRIAL - 1
            return [chosen]
        return [best] if best.gain() > 0 else []

    def choose(self, drafts: Sequence[Draft], asked: Iterable[Source]) -> list[TokenTree]:
        """What of these drafts is worth verifying. asked: who has a part in them."""
        batch, sources = len(drafts), list(asked)
        plain = batch / self.costs.seconds(1, batch)
        worth, ranked = self._rank(drafts, sources)
        expected, owners = self._together(worth)
        spent, seconds = self._taken(sources, len(expected), batch)
        most, best = best_nodes(expected, seconds, spent, plain)
        widths = [most] * batch if owners is None else np.bincount(owners[:most], minlength=batch).tolist()
        kept = []
        for i, (draft, (nodes, score)) in enumerate(zip(drafts, ranked, strict=True)):
            kept.append(draft.tree.take(nodes[: widths[i] + 1], score))
            draft.text.promise = (float(worth[i, widths[i]]) - 1) / draft.share
        tokens, taken = float(expected[most]), spent + float(seconds[most])
        resting = not most and min([draft.share for draft in drafts]) < 1 / 2
        names, verified = tuple([s.name for s in sources]), sum(map(len, kept)) - batch
        self.last = Choice(names, resting, verified, tokens, tokens / taken, plain)
        self._unjudged = sources, drafts, best, taken, tokens
        return kept

    def decline(self, names: Container[str], batch: int) -> int:
        """None of these drafters was asked: the step will be a plain one. Returns for how many more steps that will be
        so; they count as `steps`."""
        plain = batch / self.costs.seconds(1, batch)
        self.last = Choice((), False, 0, batch, plain, plain)
        due = [s.due[0] for s in self.sources(batch).values() if s.drafter in names]
        return max(0, min(due, default=0) - self.steps - 1)

    def judge(self) -> None:
        """What the drafters that were asked about the last step gained, against the step without them. That can wait
        until the step runs, but not until calibration or costs learn more. Each is tried again when what it lost,
        against the best that could be asked instead, is little of all time."""
        if self._unjudged is None:
            return
        (sources, drafts, rate, taken, expected), self._unjudged = self._unjudged, None
        batch, group = len(drafts), self.sources(len(drafts)).values()
        step = self.costs.seconds(1, batch)
        for source in sources:
            if not source.known:
                continue
            tokens, without = float(batch), batch / step
            if others := [s for s in sources if s is not source]:
                worth, _ = self._together(self._rank(drafts, others, source.number)[0])
                spent, seconds = self._taken(others, len(worth), batch)
                nodes, without = best_nodes(worth, seconds, spent, 0.0)
                tokens = worth[nodes]
            gain = rate / without - 1
            source.learn(gain)
            rivals = [s.gains[source.level] for s in group if s.head and s is not source] if source.head else []
            lost = taken * (1 - (1 + gain) / (1 + max([0.0, *rivals])))
            if source.began or source is self._trial:
                lost += source.beginning
            if source.returns is not None:  # it finds nothing at first: it may be behind by as much as a trial loses
                came = (expected / tokens - 1) / source.returns[source.beside]
                source.worth += NEWEST * (came - source.worth)
                behind = max(0.0, source.behind + lost)
                lost, source.behind = (behind, 0.0) if behind > TRIAL * step else (0.0, behind)
            source.due[source.level] = self.steps + max(0, round(lost / step * len(group) / EXPLORING))

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
                mine = self.sources(1 << int(size) - 1)
                for name, (seconds, gains, looks) in group.items():
                    if name in mine and len(gains) == len(looks) == LEVELS:
                        mine[name].drafting = TypicalTime(TRIAL, seconds)
                        mine[name].gains, mine[name].looks = list(gains), list(looks)
                        if name in self.returns and mine[name].gain() <= 0:  # as if it had just been tried
                            mine[name].due[0] = self.steps + round(TRIAL * len(mine) / EXPLORING)

    def renew(self, name: str) -> None:
        """Ask this drafter again, whatever it gained before."""
        for group in self._by_batch.values():
            group[name].looks, group[name].due = [0] * LEVELS, [0] * LEVELS

    # ---- within

    def _taken(self, sources: Collection[Source], rows: int, batch: int) -> tuple[float, Floats]:
        """Seconds of these sources' drafts and what is done with them; (rows,) of steps with 0, 1, … nodes of them."""
        spent = sum([s.drafting.seconds for s in sources]) + batch * self.fusing.seconds
        beside = sum([s.beside for s in sources]) * (batch if self.costs.flat else 1)
        return spent, self.costs.upto(rows + beside, batch)[beside:]

    def _rank(self, drafts: Sequence[Draft], asked: Iterable[Source], without: int = -1) -> tuple[Floats, list[Any]]:
        """Tokens that each draft gives with 0, 1, … nodes if a source had proposed nothing, and its nodes in that order
        with the scores of all. asked: whose nodes beside drafts leave fewer of these."""
        ranked, bins, beside = [], self.calibration.bins, sum([s.beside for s in asked])
        worth = np.empty((len(drafts), max([len(draft.tree) for draft in drafts])))
        for draft, mine in zip(drafts, worth, strict=True):
            tree, limit, share = draft.tree, max(0, draft.limit - beside), draft.share
            columns = self.calibration.columns(tree.sources)
            ranked.append(rank(tree.parents, tree.raw, columns, bins, without, limit, self.trees, share, mine))
        return worth, ranked

    def _together(self, worth: Floats) -> tuple[Floats, NDArray[np.int64] | None]:
        """From the tokens of each sequence with 0, 1, … nodes of its own: those of all with 0, 1, … nodes, and whose
        the first, second, … node is. None: each has as many, since a step is as wide as the widest of its trees."""
        if len(worth) == 1:
            return worth[0], None
        if not self.costs.flat:
            return worth.sum(axis=0), None
        gains = np.diff(worth, axis=1)  # (sequences, nodes) what each node adds, never more than the one before it
        order = np.argsort(-gains, axis=None, kind="stable")
        tokens = len(worth) + np.concatenate([[0.0], np.cumsum(gains.ravel()[order])])
        return tokens, order // max(1, gains.shape[1])
