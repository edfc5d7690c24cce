"""What vLLM's steps take. Nobody but vLLM can run one, so the first steps are used to find out: they have a few drafted
tokens more each time, of no meaning, which are verified and rejected like all others. Every later step corrects it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.budget.calibration import NEWEST
from slipstream.budget.costs import WILD, Costs
from slipstream.budget.pilot import TRIAL

# Drafted tokens of a step, of all its texts together. Few, since they are wasted; what lies between follows from them,
# and from what real drafts take later.
EXTRA = (0, 4, 16)
DEAR = 1.5  # a step that takes so many times a plain one's: more tokens are not tried
STALE = round(1 / NEWEST)  # steps after which one without drafts is taken again, to know what it takes
SURE = round(1 / NEWEST)  # steps that what was measured first counts as, and that say how fast the machine is
SPEED = 1 / 8  # of that, the newest step: much more than of what certain rows take beside others
BEYOND = 2  # steps of more rows than so many times the most that were seen are not begun: nobody knows what they take


# In a large batch a drafted row must promise so many times what it takes. Of many promises the best-looking are picked,
# so they are the lucky ones; and where nobody takes the place of a text that ends, a batch lasts as long as its last
# text, so a token that comes earlier saves less than its share of a step.
CAUTION = 2.0


class StepCosts:
    """Times of steps by their rows, until a curve can be drawn through them."""

    def __init__(self, longest: int) -> None:
        """longest: drafted tokens of one text at most."""
        self.longest = longest
        self.batch = 0  # texts of the latest steps
        self._known: dict[int, dict[int, list[float]]] = {}  # by texts, then by rows: texts come and go
        self._dear: dict[int, int] = {}  # by texts: the fewest drafted tokens that are dear
        self.done = False

    @property
    def times(self) -> dict[int, list[float]]:
        """By rows, of steps with as many texts as now."""
        return self._known.setdefault(self.batch, {})

    def trial(self, batch: int) -> list[int]:
        """How many tokens to draft for each of so many texts, so that a step is measured. Each number twice, the fewest
        first, then they take turns: the very first steps take longer, and nothing must look cheap beside them."""
        self.batch = batch
        total = min(self._tried(), key=lambda extra: max(1, self._times(extra)))
        return [total // batch + (i < total % batch) for i in range(batch)]

    def see(self, rows: Sequence[int], seconds: float) -> None:
        """A step with so many rows of each text took so long."""
        if len(rows) != self.batch:
            return
        mine = self.times.setdefault(sum(rows), [])
        mine.append(seconds)
        # A dear one is the last: what lies beyond it follows from the slope.
        plain = self.times.get(self.batch)
        if plain is not None and min(len(mine), len(plain)) >= 2 and median_low(mine) > DEAR * median_low(plain):
            self._dear[self.batch] = min(sum(rows) - self.batch, self._dear.get(self.batch, sum(rows)))
        self.done = plain is not None and all(self._times(n) >= TRIAL for n in self._tried())

    def costs(self) -> RowCosts:
        """Curves through what was measured. Medians, since the least of few times would be too good to be true beside
        the mean of the many that follow."""
        found = {rows: median_low(times) for rows, times in self.times.items()}
        return RowCosts(self.batch, found.pop(self.batch), found)

    def _tried(self) -> list[int]:
        return [n for n in EXTRA if n <= min(self.batch * self.longest, self._dear.get(self.batch, max(EXTRA)))]

    def _times(self, extra: int) -> int:
        return len(self.times.get(self.batch + extra, ()))


class RowCosts(Costs):
    """By the rows of all texts together, which vLLM computes as one matrix. Plain steps and those that verify have a
    curve each: what verifying takes besides, whatever is verified, is in the latter."""

    def __init__(self, batch: int, plain: float, verifying: Mapping[int, float]) -> None:
        """Seconds of a plain step of so many texts, and by rows of steps that verify."""
        super().__init__({1: 1.0}, flat=True)
        if len(verifying) < 2:  # of a line, a plain step is the other end
            verifying = {batch: plain, **verifying}
        self._verifying = Curve(verifying)
        first = min(plain, max(plain / batch, plain - self._verifying.slope * (batch - 1)))
        # Plain steps of other batches take what as many rows take, until one was seen.
        self._plain = Curve({1: first, **verifying, batch: plain}, [batch])
        self._upto: dict[int, NDArray[np.float64]] = {}  # by batch, until the next step is seen

    def seconds(self, rows: int, batch: int = 1) -> float:
        return float(self.upto(rows, batch)[rows - 1])

    def upto(self, rows: int, batch: int = 1) -> NDArray[np.float64]:
        found = np.full(rows, np.inf)
        known = self._known(batch)[:rows]
        found[: len(known)] = known
        return found

    def _known(self, batch: int) -> NDArray[np.float64]:
        """As far as steps are begun."""
        if batch not in self._upto:
            plain = self._plain.at(batch)
            more = self._verifying.at(np.arange(batch + 1, BEYOND * max(batch, self._verifying.most) + 1))
            extra = np.maximum.accumulate(np.maximum(0.0, more - plain))  # times rise: what says otherwise is noise
            self._upto[batch] = np.concatenate([[plain], plain + CAUTION ** (1 - 1 / batch) * extra])
        return self._upto[batch]

    def observe(self, rows: int, batch: int, seconds: float) -> None:
        here, other = (self._plain, self._verifying) if rows == 1 else (self._verifying, self._plain)
        speed = here.observe(batch - 1 + rows, seconds)
        here.scale(speed)
        other.scale(speed)
        self._upto.clear()


class Curve:
    """Seconds by rows: a line from each number of rows that was seen to the next."""

    def __init__(self, seconds: Mapping[int, float], seen: Collection[int] | None = None) -> None:
        """seen: of these, the rows that were measured; None: all."""
        self._rows = sorted(seconds)
        self._seconds = [seconds[rows] for rows in self._rows]
        self._seen = [SURE if seen is None or rows in seen else 0 for rows in self._rows]

    @property
    def most(self) -> int:
        """Rows that were seen."""
        return self._rows[-1]

    @property
    def slope(self) -> float:
        """Seconds of one more row than that."""
        return self._slope(len(self._rows) - 1)

    def _slope(self, i: int) -> float:
        """From the one before to the i-th."""
        if len(self._rows) == 1:
            return 0.0
        return max(0.0, (self._seconds[i] - self._seconds[i - 1]) / (self._rows[i] - self._rows[i - 1]))

    def at(self, rows: Any) -> Any:
        """Of so many, or of each of several numbers. Beyond what was seen, the line goes on."""
        found = np.interp(rows, self._rows, self._seconds) + self.slope * np.maximum(0, np.subtract(rows, self.most))
        fewer = self._slope(1) * np.minimum(0, np.subtract(rows, self._rows[0]))
        return np.maximum(found + fewer, found * np.minimum(1, np.divide(rows, self._rows[0])))

    def observe(self, rows: int, seconds: float) -> float:
        """A step of so many rows took so long. What is known of such steps follows, at first quickly. Returns by what
        all times are to be multiplied, since the machine may be slower or faster now: what was often seen says that."""
        off = min(WILD, max(1 / WILD, seconds / self.at(rows))) - 1
        i = self._place(_rounded(rows))
        speed = 1 + SPEED * off if self._seen[i] >= SURE else 1.0
        self._seen[i] += 1
        self._seconds[i] *= 1 + max(NEWEST, 1 / (1 + self._seen[i])) * off
        return speed

    def scale(self, by: float) -> None:
        self._seconds = [seconds * by for seconds in self._seconds]

    def _place(self, rows: int) -> int:
        """Where so many rows are kept from now on."""
        i = bisect_left(self._rows, rows)
        if i == len(self._rows) or self._rows[i] != rows:
            seconds = self.at(rows)
            self._rows.insert(i, rows)
            self._seconds.insert(i, seconds)
            self._seen.insert(i, 0)
        return i


def _rounded(rows: int) -> int:
    """Four numbers to an octave: so few are seen often enough."""
    wide = 1 << max(0, rows.bit_length() - 3)
    return round(rows / wide) * wide
