"""Costs: seconds of a step of the target, by rows and sequences. Measured once, then updated while steps run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.budget.calibration import NEWEST
from slipstream.compiled import compiled

OUTLIER = 1.5  # outliers: a time longer than this multiple of the typical one was interrupted, and is capped there
TRIAL = 4  # times until a typical one is known: the first ones load code, or start late


@dataclass
class TypicalTime:
    """A typical duration: the least of the first times, then a running mean in which outliers are capped."""

    times: int = 0
    seconds: float = 0.0
    falling: float = NEWEST  # the weight of a time that is shorter than the mean

    @property
    def known(self) -> bool:
        return self.times >= TRIAL

    def see(self, seconds: float) -> None:
        if not self.known:
            self.seconds = min(seconds, self.seconds) if self.times else seconds
        else:
            weight = self.falling if seconds < self.seconds else NEWEST
            self.seconds += weight * (min(seconds, OUTLIER * self.seconds) - self.seconds)
        self.times += 1


def full(batch: int) -> int:
    """The next power of two. Batches between two of them count as alike, since most are full or nearly so."""
    return 1 << (batch - 1).bit_length()


class Costs:
    def __init__(self, seconds: Mapping[int, float], padded: bool = False, flat: bool = False) -> None:
        """seconds: of a step with one sequence, for some numbers of rows, 1 among them.
        padded: numbers of rows in between cost as much as the next larger one.
        flat: a step of several sequences has as many rows as these have together; else it has for each sequence as many
        as the widest one needs."""
        if 1 not in seconds or min(seconds.values()) <= 0:
            raise ValueError(f"a cost curve needs the time of one row, and times above 0: found {dict(seconds)}")
        self.padded, self.flat = padded, flat
        self._rows = np.array(sorted(seconds), np.float64)
        self._curve = np.array([seconds[int(r)] for r in self._rows])
        self._table = np.empty(int(self._rows[-1]))  # the curve for every number of rows
        self._seen = np.zeros(len(self._rows))  # observations of each number of rows, recent ones counting more
        # What steps of several sequences take, as a multiple of equally many rows of one: by whether they verify, and
        # by about how many sequences they have.
        self._multiples = dict[tuple[bool, int], TypicalTime]()
        _between(self._rows, self._curve, self._table, padded)

    def seconds(self, rows: int, batch: int = 1) -> float:
        """Seconds of a step of `batch` sequences that verifies rows - 1 nodes: of each sequence, or if flat, in all."""
        return float((self._table if batch == 1 and rows <= len(self._table) else self.upto(rows, batch))[rows - 1])

    def upto(self, rows: int, batch: int = 1) -> NDArray[np.float64]:
        """(rows,) seconds of steps that verify 0, 1, … nodes."""
        every = self._every(rows, batch)
        if len(self._table) < every:
            self._table = np.empty(every)
            _between(self._rows, self._curve, self._table, self.padded)
        if batch == 1:
            return self._table[:rows]
        every_rows = self._table[batch - 1 : every : 1 if self.flat else batch]
        found = every_rows * self._multiple(True, batch)
        found[0] = every_rows[0] * self._multiple(False, batch)
        return found

    def _multiple(self, verifies: bool, batch: int) -> float:
        """As seen in batches of about this size, or else of the nearest one, smaller ones first. 1 if in none: so plain
        steps count as cheap until they are known, and are known soon."""
        size = full(batch)
        known = [other for (kind, other), seen in self._multiples.items() if kind == verifies and seen.known]
        if not known:
            return 1.0
        return self._multiples[verifies, min(known, key=lambda other: (other > size, abs(other - size)))].seconds

    def observe(self, rows: int, batch: int, seconds: float) -> None:
        """Record the time of a step. A step of one sequence also corrects other numbers of rows, the more the less
        recently these were seen: the machine may have been busy when they were measured."""
        if batch == 1:
            off = min(OUTLIER, max(1 / OUTLIER, seconds / self.seconds(rows))) - 1
            _follow(self._rows, self._curve, self._seen, rows, self.padded, off)
            _between(self._rows, self._curve, self._table, self.padded)
            return
        # Where drafts are verified, plain steps are rare, and something may delay each of them. If they were believed
        # to take longer than they do, drafts would go on that gain nothing.
        new = TypicalTime(falling=NEWEST if rows > 1 else 1 / TRIAL)
        multiple = self._multiples.setdefault((rows > 1, full(batch)), new)
        multiple.see(seconds / self.seconds(self._every(rows, batch)))

    def _every(self, rows: int, batch: int) -> int:
        """The rows of all sequences together."""
        return batch - 1 + rows if self.flat else batch * rows


@compiled
def _between(known, curve, table, padded):  # type: ignore[no-untyped-def]
    """Fill the table: seconds of 1, 2, … rows, interpolated from the numbers of rows that were measured."""
    last, slope = len(known) - 1, 0.0
    if last > 0:
        slope = max(0.0, (curve[last] - curve[last - 1]) / (known[last] - known[last - 1]))
    i = 0  # the first measured number of rows that is not less
    for rows in range(1, len(table) + 1):
        while i < last and known[i] < rows:
            i += 1
        if known[last] < rows:
            table[rows - 1] = curve[last] * rows / known[last] if padded else curve[last] + slope * (rows - known[last])
        elif padded or known[i] == rows:
            table[rows - 1] = curve[i]
        else:
            share = (rows - known[i - 1]) / (known[i] - known[i - 1])
            table[rows - 1] = curve[i - 1] + share * (curve[i] - curve[i - 1])


@compiled
def _follow(known, curve, seen, rows, padded, off):  # type: ignore[no-untyped-def]
    """Update the curve by a step that took `off` more than expected, as a share. seen: recent observations of each
    measured number of rows."""
    here = len(known) - 1  # the measured number of rows that is nearest to the step's
    for i in range(here - 1, -1, -1):
        if known[i] >= rows if padded else abs(np.log(known[i] / rows)) < abs(np.log(known[here] / rows)):
            here = i
    weight = NEWEST if off > 0 else max(NEWEST, 1 / (2 + seen[here]))
    for i in range(len(known)):
        curve[i] *= 1 + weight * off / (1 if i == here else 1 + seen[i])
        seen[i] *= 1 - NEWEST
    seen[here] += 1
