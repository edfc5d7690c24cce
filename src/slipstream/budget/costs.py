"""Costs: what a step of the target takes, by rows and batch. Measured once, followed ever after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLLOW = 0.05  # how much of what one step took goes into what the next is expected to take
WILD = 3.0  # a step that took so many times what was expected says more about the machine than about the step


class Costs:
    def __init__(self, seconds: Mapping[int, float], padded: bool = False) -> None:
        """seconds: of a step with one sequence, for some numbers of rows, 1 among them. padded: rows in between cost as
        many as the next larger number."""
        if 1 not in seconds or min(seconds.values()) <= 0:
            raise ValueError(f"a cost curve needs the time of one row, and times above 0: found {dict(seconds)}")
        self.padded = padded
        self._rows = np.array(sorted(seconds), np.float64)
        self._first = np.array([seconds[int(r)] for r in self._rows])
        self._curves: dict[int, NDArray[np.float64]] = {1: self._first.copy()}

    def seconds(self, rows: Any, batch: int = 1) -> Any:
        """Of a step with so many rows (a number or an array) for each of `batch` sequences."""
        curve = self._curve(batch)
        if self.padded:
            inside = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
            return np.where(rows <= self._rows[-1], curve[inside], curve[-1] * rows / self._rows[-1])
        near = np.interp(rows, self._rows, curve)
        if len(curve) < 2:
            return near
        slope = (curve[-1] - curve[-2]) / (self._rows[-1] - self._rows[-2])
        return near + np.maximum(0, slope) * np.maximum(0, rows - self._rows[-1])

    def observe(self, rows: int, batch: int, seconds: float) -> None:
        """A step of that shape took so long."""
        curve, expected = self._curve(batch), float(self.seconds(rows, batch))
        if not expected / WILD < seconds < expected * WILD:
            return
        if self.padded:
            i = min(int(np.searchsorted(self._rows, rows)), len(self._rows) - 1)
        else:
            i = int(np.argmin(np.abs(np.log(self._rows / rows))))
        curve[i] *= 1 + FOLLOW * (seconds / expected - 1)

    def _curve(self, batch: int) -> NDArray[np.float64]:
        """Until something is known of a batch, its rows are taken to cost what as many rows of one sequence do."""
        if batch not in self._curves:
            self._curves[batch] = np.array(self.seconds(self._rows * batch, 1), np.float64)
        return self._curves[batch]
