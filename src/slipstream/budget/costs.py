"""Costs: what a step of the target takes, by rows and batch. Measured once, followed ever after."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.embedded import cache_folder
from slipstream.sampling import Sampler, Sampling
from slipstream.target.base import Target, Want
from slipstream.tree import TokenTree

ROWS = (1, 2, 4, 8, 16, 32, 64)
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


# ---- where they come from


def measure(target: Target, text: Sequence[int], rows: Sequence[int] = ROWS, repeats: int = 7) -> dict[int, float]:
    """Seconds of a forward behind the text, the median of interleaved repeats."""
    slot = target.open()
    for _ in target.prefill(slot, text, Want()):
        pass
    sizes = [n for n in rows if slot.length + n < target.context and (target.trees or n == 1)]
    rng = np.random.default_rng(0)
    greedy = Want(samplers=(Sampler(Sampling(), []),))
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(repeats + 1):
        for n in sizes:
            parents = [max(i - 4, min(0, i - 1)) for i in range(n)]  # four branches side by side
            tree = TokenTree.build(rng.integers(0, target.vocabulary, n).tolist(), parents)
            start = perf_counter()
            target.score([slot], [tree], greedy)
            if repeat:  # the first round warms up
                times[n].append(perf_counter() - start)
    target.close(slot)
    return {n: statistics.median(seconds) for n, seconds in times.items()}


def costs_of(target: Target) -> Costs:
    """This target's on this machine: measured once, kept in the cache folder."""
    file, key = cache_folder() / "costs.json", _described(target)
    known: dict[str, dict[str, float]] = {}
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text())
    padded = bool(target.widths)
    if key not in known:
        text = [1 + 389 * i % (target.vocabulary - 1) for i in range(min(64, target.context // 2))]
        known[key] = {str(n): s for n, s in measure(target, text, target.widths or ROWS, repeats=3).items()}
        with suppress(OSError):  # a cache folder that can't be written to costs a measurement each time
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.name}.{os.getpid()}")
            new.write_text(json.dumps(known, indent=1))
            new.replace(file)
    return Costs({int(n): s for n, s in known[key].items()}, padded)


def _described(target: Target) -> str:
    """Everything that a step's time depends on."""
    model = getattr(target, "model", None)
    sizes = getattr(model, "config", None)
    name = str(getattr(sizes, "_name_or_path", "")) or type(model).__name__
    shape = [getattr(sizes, s, None) for s in ("hidden_size", "num_hidden_layers", "vocab_size")]
    cuda = target.device.type == "cuda"
    where = torch.cuda.get_device_name(target.device) if cuda else f"{platform.machine()} × {torch.get_num_threads()}"
    way = type(target).__name__ + (" compiled" if getattr(target, "compile", "") else "")
    return " | ".join(map(str, (name, *shape, target.dtype, where, way, torch.__version__)))
