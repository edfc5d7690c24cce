"""Times of a target's steps, measured once on a machine and remembered."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers

from slipstream.budget.costs import Costs
from slipstream.kept import recall, remember
from slipstream.sampling import Sampler, Sampling
from slipstream.stopwatch import Stopwatch
from slipstream.targets.base import Slot, Target, Want
from slipstream.tree import TokenTree
from slipstream.version import __version__

# Close together where rows are few: on some CPUs four rows take nearly twice as long as three.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
AT_MOST = 2.0  # seconds for measuring: users wait for it once per model, and running steps correct errors
REPEATS = 4  # after a first run, which loads code


def measure(target: Target, text: Sequence[int], at_most: float = AT_MOST) -> dict[int, float]:
    """Seconds of a forward after the text, by number of rows: the least of interleaved repeats, since other work on the
    machine only adds to them. A large model may be timed only once, and for few numbers of rows."""
    return {rows: min(times) for rows, times in timed(target, text, at_most, REPEATS).items()}


def timed(target: Target, text: Sequence[int], at_most: float, repeats: int) -> dict[int, list[float]]:
    """Seconds of forwards after the text, by number of rows: several of each, as many as there is time for."""
    slot = target.open()
    for _ in target.prefill(slot, text, Want()):
        pass
    sizes = [n for n in target.widths or ROWS if slot.length + n < target.context and (target.chains or n == 1)]
    sizes.sort(key=lambda n: abs(n - target.default_draft) if n > 1 else -1)  # the most important before time is up
    rng = np.random.default_rng(0)
    trees = {n: _trial(n, target, rng) for n in sizes}
    measuring, times = Stopwatch(), dict[int, list[float]]()
    for repeat in range(1 + repeats):
        # In turn forth and back, so that a step also follows one of its own size, as in decoding.
        for n in sizes if repeat < 2 or repeat % 2 else sizes[::-1]:
            if len(times) > 1 and measuring.seconds() > at_most:
                break
            taken = _seconds(target, slot, trees[n])
            times[n] = [taken] if repeat < 2 else [*times[n], taken]
    target.close(slot)
    return dict(sorted(times.items()))


def nonsense(target: Target) -> list[int]:
    """A meaningless text to measure after."""
    length = min(ROWS[-1], target.context // 2)
    found: list[int] = np.random.default_rng(0).integers(0, target.vocabulary, length).tolist()
    return found


def _trial(rows: int, target: Target, rng: np.random.Generator) -> TokenTree:
    branches = 2 if target.trees else 1  # side by side
    parents = [max(i - branches, min(0, i - 1)) for i in range(rows)]
    return TokenTree.build(rng.integers(0, target.vocabulary, rows).tolist(), parents)


def _seconds(target: Target, slot: Slot, tree: TokenTree) -> float:
    """Seconds of scoring a tree once."""
    trial = slot if target.trees else target.fork(slot)  # a scored chain can't be rolled back
    scoring = Stopwatch()  # does not count capturing and compiling, which the first run does
    target.score([trial], [tree], Want(samplers=(Sampler(Sampling(), []),)))
    taken = scoring.seconds()
    if trial is not slot:
        target.close(trial)
    return taken


def costs_of(target: Target) -> Costs:
    """The costs of this target on this machine, from the cache folder or measured now."""
    key = described(target)
    known = recall("costs", key)
    if known is None:
        known = {str(n): seconds for n, seconds in measure(target, nonsense(target)).items()}
        remember("costs", key, known)
    return Costs({int(n): seconds for n, seconds in known.items()}, bool(target.widths), target.flat)


def described(target: Target) -> str:
    """A key of everything that a step's time depends on: the model's sizes, the machine, and the software."""
    model = getattr(target, "model", None)
    config = getattr(model, "config", None)
    sizes = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"} if config is not None else {}
    sizes_hash = hashlib.sha256(json.dumps(sizes, sort_keys=True, default=str).encode()).hexdigest()
    cuda = target.device.type == "cuda"
    where = torch.cuda.get_device_name(target.device) if cuda else f"{cpu_name()} × {torch.get_num_threads()}"
    way = type(target).__name__ + (" compiled" if getattr(target, "compile", "") else "")
    way += f" packed from {rows} rows" if (rows := getattr(target, "packed_from", 0)) else ""
    versions = f"slipstream {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return " | ".join(map(str, (type(model).__name__, sizes_hash, target.dtype, where, way, versions)))


@cache
def cpu_name() -> str:
    """The CPU's model name: two CPUs of one architecture may differ in speed by many times."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
