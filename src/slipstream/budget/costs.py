"""Costs: what a step of the target takes, by rows and batch. Measured once, followed ever after."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import transformers
from numba import njit
from numpy.typing import NDArray

from slipstream.converted import cache_folder
from slipstream.sampling import Sampler, Sampling
from slipstream.target.base import Slot, Target, Want
from slipstream.tree import TokenTree

# Close together where rows are few: on some CPUs four rows take nearly twice as long as three.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
PATIENCE, AGREE = 5, 1.1  # times as many repeats at most; and how near two of them must be
AT_MOST = 2.0  # seconds to measure for: users wait for it once per model, and steps correct what is off
TABLE = 128  # rows that a table has at least
FOLLOW = 0.05  # how much of what one step took goes into what the next is expected to take
MOST = 0.5  # more or less than expected, as a share of that, that one step is believed
LATELY = 1 - 1 / 64  # of how often a number of rows was seen of late, with each step
WILD = 3.0  # a step that took so many times what was expected says more about the machine than about the step,
BELIEVED = 8  # until so many in a row say the same


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
        self._off = 0  # steps in a row that were far from what was expected

    def seconds(self, rows: int, batch: int = 1) -> float:
        """Of a step with so many rows for each of `batch` sequences."""
        table = self._tables.get(batch)
        return float((table if table is not None and rows <= len(table) else self.upto(rows, batch))[rows - 1])

    def upto(self, rows: int, batch: int = 1) -> NDArray[np.float64]:
        """(rows,) of steps with 1, 2, … rows."""
        table = self._tables.get(batch)
        if table is None or len(table) < rows:
            table = self._tables[batch] = np.empty(max(rows, TABLE))
            _between(self._rows, self._curve(batch), table, self.padded)
        return table[:rows]

    def observe(self, rows: int, batch: int, seconds: float) -> None:
        """A step of that shape took so long. One that is far off, because it was compiled first or the machine was
        busy, says nothing, unless that is how it goes on."""
        expected = self.seconds(rows, batch)
        self._off = 0 if expected / WILD < seconds < expected * WILD else self._off + 1
        if 0 < self._off < BELIEVED:
            return
        if batch not in self._seen:
            self._seen[batch] = np.zeros(len(self._rows))
        more = min(MOST, max(-MOST, seconds / expected - 1))
        _follow(self._rows, self._curve(batch), self._tables[batch], self._seen[batch], rows, self.padded, more)

    def _curve(self, batch: int) -> NDArray[np.float64]:
        """Until something is known of a batch, its rows are taken to cost what as many rows of one sequence do."""
        if batch not in self._curves:
            rows = self._rows.astype(int) * batch
            self._curves[batch] = self.upto(rows[-1])[rows - 1]
        return self._curves[batch]


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _nearest(known, rows, padded):  # type: ignore[no-untyped-def]
    """Which of the known numbers a step of so many rows says something about."""
    best = len(known) - 1
    for i in range(len(known) - 1, -1, -1):
        if padded:
            if known[i] >= rows:
                best = i
        elif abs(np.log(known[i] / rows)) < abs(np.log(known[best] / rows)):
            best = i
    return best


@njit(cache=True, nogil=True)
def _follow(known, curve, table, seen, rows, padded, more):  # type: ignore[no-untyped-def]
    """A step took so much more than expected, as a share of that. seen: how often each known number of rows was.

    What was measured once may have been so on a busier machine, and most numbers of rows are rarely seen. So a step
    also says how fast the machine is at others, the more the less these were seen of late.
    """
    i = _nearest(known, rows, padded)
    weight = max(FOLLOW, 1 / (2 + seen[i]))  # the mean of the first ones
    for j in range(len(known)):
        curve[j] *= 1 + weight * more / (1 if j == i else 1 + seen[j])
    seen *= LATELY
    seen[i] += 1
    _between(known, curve, table, padded)


# ---- where they come from


def measure(target: Target, text: Sequence[int], repeats: int = 7, at_most: float = AT_MOST) -> dict[int, float]:
    """Seconds of a forward behind the text, by rows, the least of interleaved repeats: whatever else the machine does
    only ever adds to them. On a busy one there are more repeats, until the best two of each agree or time is up; a
    large model may have been timed once, for few numbers of rows."""
    slot = target.open()
    for _ in target.prefill(slot, text, Want()):
        pass
    sizes = [n for n in target.widths or ROWS if slot.length + n < target.context and (target.chains or n == 1)]
    sizes.sort(key=lambda n: abs(n - 16) if n > 1 else -1)  # should time be up: one row, and a usual draft's
    rng = np.random.default_rng(0)
    trees = {n: _trial(n, target, rng) for n in sizes}
    until, times = perf_counter() + at_most, dict[int, list[float]]()
    for repeat in range(1 + PATIENCE * repeats):
        for n in sizes:
            if len(times) > 1 and perf_counter() > until:
                break
            taken = _seconds(target, slot, trees[n])
            # The first time loads code, and counts as long as there is no other.
            times[n] = [taken] if repeat < 2 else sorted([*times[n], taken])
        else:
            if repeat < max(2, repeats) or any(taken[1] >= AGREE * taken[0] for taken in times.values()):
                continue
        break
    target.close(slot)
    return {n: taken[0] for n, taken in sorted(times.items())}


def _trial(rows: int, target: Target, rng: np.random.Generator) -> TokenTree:
    branches = 4 if target.trees else 1  # side by side
    parents = [max(i - branches, min(0, i - 1)) for i in range(rows)]
    return TokenTree.build(rng.integers(0, target.vocabulary, rows).tolist(), parents)


def _seconds(target: Target, slot: Slot, tree: TokenTree) -> float:
    """Of scoring it once."""
    trial = slot if target.trees else target.fork(slot)  # a chain can't be taken back
    start = perf_counter()
    target.score([trial], [tree], Want(samplers=(Sampler(Sampling(), []),)))
    taken = perf_counter() - start
    if trial is not slot:
        target.close(trial)
    return taken


def costs_of(target: Target) -> Costs:
    """This target's on this machine: measured once, kept in the cache folder."""
    file, key = cache_folder() / "costs.json", _described(target)
    known: dict[str, dict[str, float]] = {}
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text())
    padded = bool(target.widths)
    if key not in known:
        text = [1 + 389 * i % (target.vocabulary - 1) for i in range(min(64, target.context // 2))]
        known[key] = {str(n): s for n, s in measure(target, text, repeats=3).items()}
        with suppress(OSError):  # a cache folder that can't be written to costs a measurement each time
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.name}.{os.getpid()}")
            new.write_text(json.dumps(known, indent=1))
            new.replace(file)
    return Costs({int(n): s for n, s in known[key].items()}, padded)


def _described(target: Target) -> str:
    """Everything that a step's time depends on: the model's sizes, the machine, and the software."""
    model = getattr(target, "model", None)
    config = getattr(model, "config", None)
    sizes = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"} if config is not None else {}
    sizes_hash = hashlib.sha256(json.dumps(sizes, sort_keys=True, default=str).encode()).hexdigest()[:16]
    cuda = target.device.type == "cuda"
    where = torch.cuda.get_device_name(target.device) if cuda else f"{cpu_name()} × {torch.get_num_threads()}"
    way = type(target).__name__ + (" compiled" if getattr(target, "compile", "") else "")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return " | ".join(map(str, (type(model).__name__, sizes_hash, target.dtype, where, way, versions)))


@cache
def cpu_name() -> str:
    """As the system tells it: two CPUs of one architecture may differ by many times."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
