"""Costs: what a step of the target takes, by rows and batch. Measured once, followed ever after."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from slipstream.budget.calibration import NEWEST
from slipstream.compiled import compiled

WILD = 1.5  # a time that is more than so many times what is usual was interrupted, and counts as no more than that


class Costs:
    def __init__(self, seconds: Mapping[int, float], padded: bool = False) -> None:
        """seconds: of a step with one sequence, for some numbers of rows, 1 among them. padded: rows in between cost as
        many as the next larger number."""
        if 1 not in seconds or min(seconds.values()) <= 0:
            raise ValueError(f"a cost curve needs the time of one row, and times above 0: found {dict(seconds)}")
        self.padded = padded
        self._rows = np.array(sorted(seconds), np.float64)
        self._curves: dict[int, NDArray[np.float64]] = {1: np.array([seconds[int(r)] for r in self._rows])}
        self._tables: dict[int, NDArray[np.float64]] = {}  # the same for every number of rows
        self._seen: dict[int, NDArray[np.float64]] = {}  # by batch: how often each number of rows was, of late

    def seconds(self, rows: int, batch: int = 1) -> float:
        """Of a step with so many rows for each of `batch` sequences."""
        table = self._tables.get(batch)
        return float((table if table is not None and rows <= len(table) else self.upto(rows, batch))[rows - 1])

    def upto(self, rows: int, batch: int = 1) -> NDArray[np.float64]:
        """(rows,) of steps with 1, 2, … rows."""
        table = self._tables.get(batch)
        if table is None or len(table) < rows:
            table = self._tables[batch] = np.empty(max(rows, int(self._rows[-1])))
            _between(self._rows, self._curve(batch), table, self.padded)
        return table[:rows]

    def observe(self, rows: int, batch: int, seconds: float) -> None:
        """A step of that shape took so long.

        What was measured once may have been so on a busier machine, and most numbers of rows are rarely seen. So a step
        also says how fast the machine is at others, the more the less these were seen of late.
        """
        off = min(WILD, max(1 / WILD, seconds / self.seconds(rows, batch))) - 1
        if batch not in self._seen:
            self._seen[batch] = np.zeros(len(self._rows))
        _follow(self._rows, self._curve(batch), self._tables[batch], self._seen[batch], rows, self.padded, off)

    def _curve(self, batch: int) -> NDArray[np.float64]:
        """Until something is known of a batch, its rows are taken to cost what as many rows of one sequence do."""
        if batch not in self._curves:
            rows = self._rows.astype(int) * batch
            self._curves[batch] = self.upto(rows[-1])[rows - 1]
        return self._curves[batch]


@compiled
def _between(known, curve, table, padded):  # type: ignore[no-untyped-def]
    """Seconds of 1, 2, … rows from those of some numbers of rows."""
    last, slope = len(known) - 1, 0.0
    if last > 0:
        slope = max(0.0, (curve[last] - curve[last - 1]) / (known[last] - known[last - 1]))
    i = 0  # the first known number that is not less
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
def _follow(known, curve, table, seen, rows, padded, off):  # type: ignore[no-untyped-def]
    """A step took more than expected, by a share of that. seen: how often each known number of rows was of late."""
    here = len(known) - 1  # which of them the step says most about
    for i in range(here - 1, -1, -1):
        if known[i] >= rows if padded else abs(np.log(known[i] / rows)) < abs(np.log(known[here] / rows)):
            here = i
    weight = NEWEST if off > 0 else max(NEWEST, 1 / (2 + seen[here]))
    for i in range(len(known)):
        curve[i] *= 1 + weight * off / (1 if i == here else 1 + seen[i])
    for i in range(len(seen)):
        seen[i] *= 1 - NEWEST
    seen[here] += 1
    _between(known, curve, table, padded)
