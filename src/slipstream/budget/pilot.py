"""Pilot: chooses which sources draft a step, and how many drafted nodes to verify, to maximise tokens per second.

The value of a node is the probability that it and all its ancestors are accepted, estimated by `Calibration`. The time
of a step is estimated by `Costs`. Nodes are verified in order of value as long as the expected tokens per second rise;
possibly none.

Sources are asked from the cheapest to the most expensive, each only if it raises the expected tokens per second. Of
heads (trained heads and draft models), whose drafts are much alike, only the best is asked. What a source gains depends
on how many tokens the others' drafts already promise, so gains are kept by level of that. A source that gains nothing
is only tried now and then: trials may lose a small share of all time. Extra nodes beside the drafts, from which a
source learns (`Invests`), are an investment: as many are verified as pay in the long run.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.budget.calibration import NEWEST, Calibration
from slipstream.budget.costs import TRIAL, Costs, TypicalTime, full
from slipstream.budget.worth import best_nodes, rank
from slipstream.tree import TokenTree

Floats = NDArray[np.float64]

LEVELS = 5  # by tokens per sequence that a step is expected to give already: up to 1.4, 2, 2.8, 4, more
EXPLORING = 0.01  # share of all time that trying sources may lose
CREDIT = 3.0  # prior of `Text`: tokens that every text starts out with as promised, and as delivered
# Decay of a text's promised and delivered tokens in each step that verifies none of its drafts: else a text that began
# badly would never be tried again. With this, a hostile text costs 3% of the time; with NEWEST more than 5%.
FORGIVEN = 1 / 320


@dataclass(eq=False)
class Source:
    """What was measured of one drafter, or of one way to ask it."""

    name: str
    drafter: str
    number: int  # index in the calibration, which all ways to ask a drafter share
    most: int  # nodes that it is asked for at most
    head: bool  # whether it generates, as a trained head or a draft model does: at most one of these is asked per step
    # For a source that invests: the expected relative gain in tokens, in the long run, of 0, 1, … nodes beside its
    # drafts; how many such nodes pay now; seconds lost to them so far.
    returns: Floats | None = None
    beside: int = 0
    deficit: float = 0.0
    late_start: bool = False  # whether its latest draft had to read the texts first, or was not started ahead
    drafting: TypicalTime = field(default_factory=TypicalTime)  # of a draft for all sequences
    starting: TypicalTime = field(default_factory=TypicalTime)  # of a draft that had to start like that (`late_start`)
    # By level: the relative gain in tokens per second from asking it, the number of observations of that, and the step
    # at which it is tried again if it gains nothing.
    gains: list[float] = field(default_factory=lambda: [0.0] * LEVELS)
    observations: list[int] = field(default_factory=lambda: [0] * LEVELS)
    due: list[int] = field(default_factory=lambda: [0] * LEVELS)
    level: int = 0  # at which it was considered last

    @property
    def known(self) -> bool:
        return self.drafting.known

    @property
    def start_cost(self) -> float:
        """Additional seconds of a draft that has to read the texts first, or was not started ahead."""
        return max(0.0, self.starting.seconds - self.drafting.seconds)

    def took(self, seconds: float, late_start: bool = False) -> None:
        """Record a draft's time. late_start: it had to read the texts first (rare), or was not started ahead."""
        self.late_start = late_start
        if late_start:
            self.starting.see(seconds)
        if not (late_start and self.known):
            self.drafting.see(seconds)

    def gain(self, level: int | None = None) -> float:
        """The gain at a level (by default the current one), as seen there or else at the nearest level, lower ones
        first. 0 if it was never seen."""
        level = self.level if level is None else level
        nearest = (*range(level, -1, -1), *range(level + 1, LEVELS))
        return next((self.gains[level] for level in nearest if self.observations[level]), 0.0)

    def learn(self, gain: float) -> None:
        """Record the gain of asking it, at its current level."""
        before, observations = self.gain(), self.observations[self.level]
        self.gains[self.level] = before + max(NEWEST, 1 / (2 + observations)) * (gain - before)
        self.observations[self.level] = observations + 1


@dataclass(eq=False)
class Text:
    """How many of the tokens that drafts promised for one text were accepted. A calibration that is right on average
    may be wrong for a single text."""

    ahead: bool = False  # whether its plain steps are begun before the host has seen the last one, as far as is known
    promised: float = 0.0  # tokens beyond one per step that were expected, older steps counting less
    delivered: float = 0.0  # tokens beyond one that these steps gave
    promise: float = 0.0  # expected of the step under way
    cost: float = 0.0  # of the step under way, if it has drafts but no head's: plain steps that it takes besides one
    futile: float = 0.0  # sum of such costs since drafts last gave a token

    def see(self, delivered: float) -> None:
        """The step under way gave so many tokens beyond one."""
        fading = NEWEST if self.promise else FORGIVEN
        self.promised += self.promise - fading * self.promised
        self.delivered += (delivered if self.promise else 0.0) - fading * self.delivered
        self.futile = 0.0 if delivered else self.futile + self.cost
        self.promise = self.cost = 0.0

    def rested(self, steps: int) -> None:
        """So many steps verified none of its drafts."""
        kept = (1 - FORGIVEN) ** steps
        self.promised, self.delivered = kept * self.promised, kept * self.delivered

    @property
    def rests(self) -> bool:
        """Whether to decode plainly until a draft made beside a step pays (`Pilot.pays`). That is noticed a step late,
        which costs about a plain step; so as much may be lost by futile drafts before."""
        return self.ahead and self.futile > 1

    @property
    def share(self) -> float:
        """The share of the next promise to expect: at most 1, even if more tokens came than were promised."""
        return min(1.0, (CREDIT + self.delivered) / (CREDIT + self.promised))


@dataclass(eq=False)
class Draft:
    """The draft for one text in one step."""

    text: Text
    tree: TokenTree  # of all sources, fused
    limit: int  # nodes of it that may be verified at most

    def __post_init__(self) -> None:
        self.share = self.text.share  # fixed until this step is judged, though the text moves on before


class Choice(NamedTuple):
    """What was decided about a step, and what was expected of it. Numbers are totals over its sequences."""

    asked: tuple[str, ...]  # sources
    resting: bool  # nothing is verified because too few promised tokens were accepted recently
    nodes: int  # to verify
    tokens: float  # expected
    rate: float  # expected tokens per second
    plain: float  # tokens per second of plain decoding


class Unjudged(NamedTuple):
    """A step whose sources are not judged yet."""

    sources: list[Source]  # that were asked
    drafts: Sequence[Draft]
    rate: float  # the best expected tokens per second
    seconds: float  # expected, drafting included


class Pilot:
    def __init__(
        self,
        costs: Costs,
        drafters: Sequence[str],
        trees: bool = True,
        heads: Mapping[str, Sequence[int]] = MappingProxyType({}),
        returns: Mapping[str, Floats] = MappingProxyType({}),
        readers: Collection[str] = (),
    ) -> None:
        """trees: whether a step can verify branches; else only each draft's best chain counts.
        heads: the drafters that generate (trained heads, draft models), each with the smaller numbers of nodes that it
        may be asked for instead of all. Each of these ways is a source of its own.
        returns: for drafters that invest, see `Source.returns`.
        readers: the drafters that read the target's states."""
        self.costs, self.trees, self.drafters, self.heads, self.returns = costs, trees, list(drafters), heads, returns
        self.readers = readers
        self.calibration = Calibration(self.drafters)
        # By size of the batch: the host's part of a step with drafts. Plain steps hide theirs behind the next forward.
        self.handling = defaultdict[int, TypicalTime](TypicalTime)
        self.steps = 0  # so far, with drafts or without
        self.mean_nodes = 0.0  # running mean of the nodes that a step verifies per sequence
        self.last: Choice | None = None
        self._by_batch = dict[int, dict[str, Source]]()
        self._plain_due = dict[int, int]()  # by size of the batch: the step from which plain ones are measured again
        self._trial: Source | None = None  # the head on trial
        self._trial_left = 0  # drafts that are left of its trial
        self._levels = np.zeros(LEVELS)  # how often heads were considered at each level, recent steps counting more
        self._unjudged: Unjudged | None = None  # the latest step, until `judge`

    def sources(self, batch: int = 1) -> dict[str, Source]:
        """The sources for batches of about this size: the time and gain of a draft depend on it."""
        size = full(batch)
        if size not in self._by_batch:
            smaller = self._by_batch.get(max((known for known in self._by_batch if known < size), default=0), {})
            self._by_batch[size] = {source.name: source for source in self._new_sources()}
            for name, before in smaller.items():
                self._inherit(self._by_batch[size][name], before, batch)
        return self._by_batch[size]

    def _new_sources(self) -> Iterator[Source]:
        for i, name in enumerate(self.drafters):
            for most in (*self.heads.get(name, ()), sys.maxsize):
                way = name if most == sys.maxsize else f"{name}:{most}"
                yield Source(way, name, i, most, name in self.heads, returns=self.returns.get(name))

    def _inherit(self, source: Source, before: Source, batch: int) -> None:
        """Start from what is known of a source in smaller batches. A further row costs more in a larger batch, so where
        it gained nothing, it is not tried at once."""
        if before.known:
            source.drafting = TypicalTime(TRIAL - 2, math.inf)  # code is loaded: two drafts tell enough
        if any(before.observations):
            self._postpone(source, before.drafting.seconds / self.costs.seconds(1, batch))
            source.due = [0 if before.gain(level) > 0 else due for level, due in enumerate(source.due)]

    def _wait(self, lost: float) -> int:
        """Steps after which a source is tried again that lost the time of so many plain steps (`EXPLORING`)."""
        return max(0, round(lost * len(self.sources()) / EXPLORING))

    def _postpone(self, source: Source, steps: float = 1.0) -> None:
        """Don't try it now, but as if a trial had just been lost. steps: plain steps that one of its drafts takes."""
        source.due = [self.steps + self._wait(TRIAL * steps)] * LEVELS

    # ---- before a step

    def asks(self, names: Container[str], drafts: Sequence[Draft], late: Container[str] = ()) -> Iterator[Source]:
        """The sources to ask for this step, one after the other. drafts: one per sequence; the caller adds each
        source's proposals before it takes the next source. names: drafters that can propose something. late: those
        whose next draft takes longer than usual."""
        self.judge()
        self.steps += 1
        if self._measures_plain(len(drafts)) or (len(drafts) == 1 and drafts[0].text.rests and self.cheap(names)):
            return
        there = [s for s in self.sources(len(drafts)).values() if s.drafter in names]
        for source in sorted([s for s in there if not s.head], key=lambda s: s.drafting.seconds):
            if source.returns is None:  # one that invests gains in later steps, at whatever level they have
                source.level = self._level(drafts)
            if (self.steps >= source.due[source.level] or source.gain() > 0) and self._invests(source, drafts):
                yield source
        if heads := [s for s in there if s.head]:
            level = self._level(drafts)
            for head in heads:
                head.level = level
            yield from self._best_head(heads, late, self.costs.seconds(1, len(drafts)))

    def _level(self, drafts: Sequence[Draft]) -> int:
        """The level of these drafts: by the tokens per sequence that are expected of their nodes worth verifying."""
        if max([len(draft.tree) for draft in drafts]) == 1:
            return 0
        expected, _ = self._batch_tokens(self._rank(drafts, ())[0])
        nodes, _ = best_nodes(expected, self.costs.upto(len(expected), len(drafts)), 0.0, 0.0)
        return min(LEVELS - 1, int(2 * math.log2(expected[nodes] / len(drafts))))

    def _invests(self, source: Source, drafts: Sequence[Draft]) -> bool:
        """Whether to ask the source. For one that invests, sets how many nodes beside its drafts pay, at most half of
        all nodes. If none do, it is not asked until a later trial."""
        if source.returns is None:
            return True
        room = min([draft.limit for draft in drafts if draft.limit], default=0) // 2
        tokens = 1 + source.returns[: 1 + room]
        if tokens.max() == 1:  # too little room for any, which says nothing of what it gains
            return False
        drafting = 0.0 if math.isinf(source.drafting.seconds) else source.drafting.seconds  # not drafted yet
        each, first = len(drafts) if self.costs.flat else 1, round(self.mean_nodes)
        seconds = self.costs.upto(1 + each * (first + len(tokens) - 1), len(drafts))[each * first :: each].copy()
        source.beside, rate = best_nodes(tokens, seconds, drafting, 0.0)
        # Without a return it is no investment, even if steps of a few rows were measured as faster than one of one row.
        if source.returns[source.beside] > 0 and rate * seconds[0] > 1:
            return True
        self._postpone(source)
        return False

    def _best_head(self, heads: list[Source], late: Container[str], step: float) -> list[Source]:
        """The head to ask, if any. Switching to another head costs its start once and gains in every later step, at
        whatever level. So heads are compared by their gains averaged over the recent levels."""
        self._levels *= 1 - NEWEST
        self._levels[heads[0].level] += NEWEST
        if self._trial_left and self._trial is not None and self._trial in heads:
            self._trial_left -= 1
            return [self._trial]
        self._trial = None
        expected_gains = [sum(share * s.gain(level) for level, share in enumerate(self._levels)) for s in heads]
        start_costs = [s.start_cost / step * NEWEST if s.drafter in late else 0.0 for s in heads]
        best = heads[int(np.argmax(np.subtract(expected_gains, start_costs)))]
        if due := [s for s in heads if self.steps >= s.due[s.level] and (s is not best or s.gain() <= 0)]:
            chosen = min(due, key=lambda s: s.drafting.times)
            if not chosen.known or chosen.drafter in late:
                drafts = TRIAL if chosen.known else TRIAL - chosen.drafting.times
                self._trial, self._trial_left = chosen, drafts - 1
            return [chosen]
        return [best] if best.gain() > 0 else []

    def choose(self, drafts: Sequence[Draft], asked: Iterable[Source]) -> list[TokenTree]:
        """The part of each draft that is worth verifying. asked: the sources that were asked for them."""
        batch, sources = len(drafts), list(asked)
        plain = batch / self.costs.seconds(1, batch)
        worth, ranked = self._rank(drafts, sources)
        expected, owners = self._batch_tokens(worth)
        spent, seconds = self._expected_seconds(sources, len(expected), batch)
        most, best = best_nodes(expected, seconds, spent, plain)
        widths = [most] * batch if owners is None else np.bincount(owners[:most], minlength=batch).tolist()
        kept = []
        for i, (draft, (nodes, score)) in enumerate(zip(drafts, ranked, strict=True)):
            kept.append(draft.tree.take(nodes[: widths[i] + 1], score))
            draft.text.promise = (float(worth[i, widths[i]]) - 1) / draft.share
        tokens, taken = float(expected[most]), spent + float(seconds[most])
        if batch == 1 and not any([source.head for source in sources]):
            drafts[0].text.cost = taken * plain - 1
        resting = not most and min([draft.share for draft in drafts]) < 1 / 2
        names, verified = tuple([s.name for s in sources]), sum(map(len, kept)) - batch
        self.mean_nodes += NEWEST * (verified / batch - self.mean_nodes)
        self.last = Choice(names, resting, verified, tokens, tokens / taken, plain)
        self._unjudged = Unjudged(sources, drafts, best, taken)
        return kept

    def decline(self, names: Container[str], batch: int) -> int:
        """None of these drafters is asked: the step is a plain one. Returns for how many further steps none will be."""
        plain = batch / self.costs.seconds(1, batch)
        self.mean_nodes *= 1 - NEWEST
        self.last = Choice((), False, 0, batch, plain, plain)
        due = [s.due[0] for s in self.sources(batch).values() if s.drafter in names]
        left = max(min(due, default=0) - self.steps, TRIAL if self._measures_plain(batch) else 1)
        self._plain_due[full(batch)] = self.steps + left + round(TRIAL / EXPLORING)
        return left - 1

    def cheap(self, names: Container[str]) -> list[Source]:
        """Those sources of these drafters that can draft beside a plain step of one sequence: the host has the time,
        and they need nothing from the step."""
        step, free = self.costs.seconds(1), [s for s in self.sources().values() if not s.head and s.returns is None]
        mine = [s for s in free if s.drafter in names and s.drafter not in self.readers]
        return [s for s in mine if s.known and s.drafting.seconds < step]

    def pays(self, draft: Draft, asked: Collection[Source]) -> bool:
        """Whether verifying a draft of these sources would give more tokens per second than plain decoding."""
        return self._best_rate([draft], asked) * self.costs.seconds(1) > 1

    def _measures_plain(self, batch: int) -> bool:
        """Whether to decode plainly for some steps, after many with drafts, in order to know what drafts must beat. One
        sequence needs no such steps, since all of its steps correct the curve."""
        due = self._plain_due.setdefault(full(batch), self.steps + round(TRIAL / EXPLORING))
        return batch > 1 and self.steps >= due

    def judge(self) -> None:
        """Compute what each source asked for the last step gained, compared with the step without it. This may wait
        until the step runs on the device, but must come before calibration or costs are updated. Each source is due
        again once what it lost, compared with the best alternative, is a small share of the time since (`EXPLORING`).
        """
        if self._unjudged is None:
            return
        step, self._unjudged = self._unjudged, None
        batch = len(step.drafts)
        plain = self.costs.seconds(1, batch)
        for source in step.sources:
            if not source.known:
                continue
            others = [s for s in step.sources if s is not source]
            rate = self._best_rate(step.drafts, others, source.number) if others else batch / plain
            gain = step.rate / rate - 1
            source.learn(gain)
            every = self.sources(batch).values() if source.head else ()
            rivals = [s.gains[source.level] for s in every if s.head and s is not source]
            lost = step.seconds * (1 - (1 + gain) / (1 + max([0.0, *rivals])))
            if source is self._trial:  # one that counts for all its drafts, whichever of them is judged
                lost *= TRIAL
            if source.late_start or source is self._trial:
                lost += source.start_cost
            if source.returns is not None:  # it finds nothing at first: what it lost counts once a trial may lose it
                source.deficit = max(0.0, source.deficit + lost)
                lost = source.deficit if source.deficit > TRIAL * plain else 0.0
                source.deficit -= lost
            source.due[source.level] = self.steps + self._wait(lost / plain)
            if source.head and gain <= 0:  # the more tokens are expected already, the less a head adds
                for level in range(source.level + 1, LEVELS):
                    if not source.observations[level]:
                        source.due[level] = max(source.due[level], source.due[source.level])

    def rehearsed(self) -> None:
        """Before the first answer, once drafting times are known: a head's draft that takes longer than a plain step
        must give more than a token besides. So it is not tried at once."""
        step = self.costs.seconds(1)
        for source in self.sources().values():
            if source.head and source.drafting.seconds > step and not any(source.observations):
                self._postpone(source, source.drafting.seconds / step)

    # ---- from one process to the next

    def learnt(self) -> dict[str, Any]:
        """What was learnt, in the form that `recall` takes."""
        sources = {
            str(size): {s.name: [s.drafting.seconds, s.gains, s.observations] for s in group.values() if s.known}
            for size, group in self._by_batch.items()
        }
        calibration = dict(zip(self.drafters, np.round(self.calibration.bins, 4).tolist(), strict=True))
        return {"calibration": calibration, "sources": sources}

    def recall(self, known: Any) -> None:
        """Start from what an earlier process learnt. What does not fit, since another version wrote it, is ignored."""
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            for i, name in enumerate(self.drafters):
                bins = np.array(known["calibration"].get(name))
                if bins.shape == self.calibration.bins[i].shape:
                    self.calibration.bins[i] = bins
            for size, group in known["sources"].items():
                mine = self.sources(int(size))
                for name, (seconds, gains, observations) in group.items():
                    if name in mine and len(gains) == len(observations) == LEVELS:
                        mine[name].drafting = TypicalTime(TRIAL, seconds)
                        mine[name].gains, mine[name].observations = list(gains), list(observations)
                        if name in self.returns and mine[name].gain() <= 0:  # as if it was just tried
                            self._postpone(mine[name])

    def renew(self, name: str) -> None:
        """Forget what this drafter gained, so that it is tried again: it has new weights, or a new prediction."""
        for source in [s for group in self._by_batch.values() for s in group.values() if s.drafter == name]:
            source.observations, source.due = [0] * LEVELS, [0] * LEVELS

    # ---- expected tokens and times

    def _expected_seconds(self, sources: Collection[Source], rows: int, batch: int) -> tuple[float, Floats]:
        """Seconds that drafting by these sources and the host take, and (rows,) seconds of steps that verify 0, 1, …
        nodes of their drafts."""
        host = self.handling[full(batch)]
        spent = sum([s.drafting.seconds for s in sources]) + (host.seconds if host.known else 0.0)
        beside = sum([s.beside for s in sources]) * (batch if self.costs.flat else 1)
        return spent, self.costs.upto(rows + beside, batch)[beside:]

    def _best_rate(self, drafts: Sequence[Draft], asked: Collection[Source], without: int = -1) -> float:
        """The most tokens per second that a step with these drafts can give. without: see `_rank`."""
        expected, _ = self._batch_tokens(self._rank(drafts, asked, without)[0])
        spent, seconds = self._expected_seconds(asked, len(expected), len(drafts))
        return float(best_nodes(expected, seconds, spent, 0.0)[1])

    def _rank(self, drafts: Sequence[Draft], asked: Iterable[Source], without: int = -1) -> tuple[Floats, list[Any]]:
        """For each draft: the expected tokens with 0, 1, … nodes verified; its nodes in that order, and all scores.
        without: the number of a source whose proposals don't count. asked: the sources whose nodes beside the drafts
        take part of the limit."""
        ranked, bins, beside = [], self.calibration.bins, sum([s.beside for s in asked])
        worth = np.empty((len(drafts), max([len(draft.tree) for draft in drafts])))
        for draft, mine in zip(drafts, worth, strict=True):
            tree, limit, share = draft.tree, max(0, draft.limit - beside), draft.share
            columns = self.calibration.columns(tree.sources)
            ranked.append(rank(tree.parents, tree.raw, columns, bins, without, limit, self.trees, share, mine))
        return worth, ranked

    def _batch_tokens(self, worth: Floats) -> tuple[Floats, NDArray[np.int64] | None]:
        """Expected tokens of the batch with 0, 1, … nodes verified, from those of each sequence; and which sequence
        the first, second, … node belongs to. None instead where a step is as wide as its widest tree: then each
        sequence has equally many nodes."""
        if len(worth) == 1:
            return worth[0], None
        if not self.costs.flat:
            return worth.sum(axis=0), None
        gains = np.diff(worth, axis=1)  # (sequences, nodes) what each node adds, never more than the one before it
        order = np.argsort(-gains, axis=None, kind="stable")
        tokens = len(worth) + np.concatenate([[0.0], np.cumsum(gains.ravel()[order])])
        return tokens, order // max(1, gains.shape[1])
