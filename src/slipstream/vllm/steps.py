"""What vLLM's steps take. Nobody but vLLM can run one, so the first steps are used to find out: they have a few drafted
tokens more each time, of no meaning, which are verified and rejected like all others."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.budget.costs import Costs
from slipstream.budget.pilot import TRIAL, TypicalTime

# Drafted tokens of a step, of all its texts together. Few, since they are wasted; what lies between follows from them,
# and from what real drafts take later.
EXTRA = (0, 4, 16)
DEAR = 1.5  # a step that takes so many times a plain one's: more tokens are not tried


class StepCosts:
    """Times of steps by their rows, until a curve can be drawn through them."""

    def __init__(self, longest: int) -> None:
        """longest: drafted tokens of one text at most."""
        self.longest = longest
        self.batch = 0  # texts of the latest steps
        self._known: dict[int, dict[int, TypicalTime]] = {}  # by texts, then by rows: texts come and go
        self.done = False

    @property
    def times(self) -> dict[int, TypicalTime]:
        """By rows, of steps with as many texts as now."""
        return self._known.setdefault(self.batch, {})

    def trial(self, batch: int) -> list[int]:
        """How many tokens to draft for each of so many texts, so that a step is measured."""
        self.batch = batch
        total = next((n for n in self._tried() if self._times(n) < TRIAL), 0)
        return [total // batch + (i < total % batch) for i in range(batch)]

    def see(self, rows: Sequence[int], seconds: float) -> None:
        """A step with so many rows of each text took so long."""
        if len(rows) != self.batch:
            return
        self.times.setdefault(sum(rows), TypicalTime()).see(seconds)
        tried = self._tried()
        # A dear one is the last: what lies beyond it follows from the slope.
        plain, last = self.times.get(self.batch), self.times.get(sum(rows))
        dear = plain is not None and last is not None and last.times >= TRIAL and last.seconds > DEAR * plain.seconds
        self.done = plain is not None and (dear or all(self._times(n) >= TRIAL for n in tried))

    def costs(self) -> Costs:
        """A curve through what was measured. Times rise with rows: what says otherwise is noise."""
        seconds, longest = dict[int, float](), 0.0
        for rows in sorted(self.times):
            longest = seconds[rows] = max(longest, self.times[rows].seconds)
        if self.batch > 1:  # a single row costs no more than these, and what is not rows stays
            first, last = self.batch, max(seconds)
            slope = (seconds[last] - seconds[first]) / max(1, last - first)
            seconds[1] = max(seconds[first] - slope * (first - 1), seconds[first] / first)
        return Costs(dict(sorted(seconds.items())), flat=True)

    def _tried(self) -> list[int]:
        return [n for n in EXTRA if n <= self.batch * self.longest]

    def _times(self, extra: int) -> int:
        known = self.times.get(self.batch + extra)
        return known.times if known is not None else 0
