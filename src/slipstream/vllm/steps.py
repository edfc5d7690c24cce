"""Times of vLLM's steps. A proposer can't run steps itself, so vLLM's first ones are measured: they get drafts of
several lengths and of no meaning, which are verified like all others."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.budget.costs import TRIAL, Costs, TypicalTime

# Drafted tokens of a measured step, for all its texts together. Few sizes, since these drafts are wasted: times between
# them are interpolated, and corrected by those of real drafts later.
EXTRA = (0, 4, 16)
SLOW = 1.5  # a step that takes this many times as long as a plain one: larger ones are not tried


class StepCosts:
    """Times of steps by their number of rows, collected until there are enough for a curve."""

    def __init__(self, longest: int) -> None:
        """longest: drafted tokens of one text at most."""
        self.longest = longest
        self.batch = 0  # number of texts in the latest step
        self._known: dict[int, dict[int, TypicalTime]] = {}  # by number of texts, which changes, then by rows
        self.done = False

    @property
    def times(self) -> dict[int, TypicalTime]:
        """Times by number of rows, for steps with as many texts as now."""
        return self._known.setdefault(self.batch, {})

    def trial(self, batch: int) -> list[int]:
        """How many tokens to draft for each text, so that the next step is one to be measured."""
        self.batch = batch
        total = next((n for n in self._tried() if self._times(n) < TRIAL), 0)
        return [total // batch + (i < total % batch) for i in range(batch)]

    def see(self, rows: Sequence[int], seconds: float) -> None:
        """Record the time of a step. rows: of each of its texts."""
        if len(rows) != self.batch:
            return
        self.times.setdefault(sum(rows), TypicalTime()).see(seconds)
        tried = self._tried()
        # A slow size is the last one: times of more rows are extrapolated.
        plain, last = self.times.get(self.batch), self.times.get(sum(rows))
        slow = plain is not None and last is not None and last.times >= TRIAL and last.seconds > SLOW * plain.seconds
        self.done = plain is not None and (slow or all(self._times(n) >= TRIAL for n in tried))

    def costs(self) -> Costs:
        """A curve through the measured times. Times rise with rows: a shorter one is noise, and is raised."""
        seconds, longest = dict[int, float](), 0.0
        for rows in sorted(self.times):
            longest = seconds[rows] = max(longest, self.times[rows].seconds)
        if self.batch > 1:  # a single row is extrapolated, and takes at least its share of a plain step
            first, last = self.batch, max(seconds)
            slope = (seconds[last] - seconds[first]) / max(1, last - first)
            seconds[1] = max(seconds[first] - slope * (first - 1), seconds[first] / first)
        return Costs(dict(sorted(seconds.items())), flat=True)

    def _tried(self) -> list[int]:
        return [n for n in EXTRA if n <= self.batch * self.longest]

    def _times(self, extra: int) -> int:
        known = self.times.get(self.batch + extra)
        return known.times if known is not None else 0
