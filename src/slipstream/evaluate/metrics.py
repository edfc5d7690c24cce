"""Compute metrics from runs. Every metric is defined in docs/benchmarks.md and computed only here."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.evaluate.contestants import Answer
from slipstream.evaluate.measure import MeasuredRun

ALL = "all"
BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Ratio:
    """The speed-up over another contestant, with a 95% interval."""

    value: float
    low: float
    high: float
    items: int = 0  # answered by both


@dataclass(frozen=True)
class Row:
    """One contestant in one category."""

    contestant: str
    category: str
    answers: int
    tokens: int
    tokens_per_second: float  # the median over repeats
    spread: tuple[float, float]  # the slowest and the fastest repeat
    speedup: dict[str, Ratio]  # over each baseline
    first_token_ms: float
    texts_equal: int
    texts_compared: int
    # Only for slipstream's engine:
    tokens_per_step: float | None = None  # M
    acceptance_rate: float | None = None
    node_yield: float | None = None
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    ms_per_step: dict[str, float] = field(default_factory=dict)  # draft, verify, host, unaccounted
    unaccounted: float | None = None  # share of the time that belongs to no stage


def summarise(runs: Sequence[MeasuredRun], baselines: Sequence[str] = ("none", "hf")) -> list[Row]:
    """A row per contestant for all items together, then per category."""
    names = list(dict.fromkeys(r.contestant for r in runs))
    categories = list(dict.fromkeys(r.category for r in runs))
    rows = []
    for category in [ALL, *(categories if len(categories) > 1 else [])]:
        here = [r for r in runs if category in (ALL, r.category)]
        by_name = {name: [r for r in here if r.contestant == name] for name in names}
        for name in [name for name in names if by_name[name]]:  # after Ctrl-C some may not have come so far
            over = {b: speedup(by_name[name], by_name[b]) for b in baselines if by_name.get(b)}
            rows.append(_row(name, category, by_name[name], over))
    return rows


def speedup(runs: Sequence[MeasuredRun], baseline: Sequence[MeasuredRun]) -> Ratio:
    """Seconds per token of the baseline divided by ours, paired by item and repeat. Items that were answered together
    count as one, as they share one reading of the clock. It counts by the median of its repeats, so that an outlier has
    no effect. The interval is a bootstrap over these groups and over each one's repeats."""
    theirs = {(r.item, r.repeat): r.answer for r in baseline}
    both_answered = [(r, theirs[r.item, r.repeat]) for r in runs if (r.item, r.repeat) in theirs]
    pairs = _pairs(both_answered)
    if not pairs:
        return Ratio(float("nan"), float("nan"), float("nan"))
    most = max(map(len, pairs))
    both = np.array([[pair[i % len(pair)] for i in range(most)] for pair in pairs])  # (groups, repeats, 4)

    def ratio(sums: np.ndarray) -> Any:
        seconds, tokens, base_seconds, base_tokens = np.moveaxis(sums, -1, 0)
        return (base_seconds / base_tokens) / (seconds / tokens)

    rng = np.random.default_rng(0)
    groups = rng.integers(0, len(both), (BOOTSTRAPS, len(both)))
    low, high = np.quantile(ratio(both[groups, rng.integers(0, most, groups.shape)].sum(1)), [0.025, 0.975])
    typical = np.array([np.median(np.array(pair), axis=0) for pair in pairs])
    items = len({run.item for run, _ in both_answered})
    return Ratio(float(ratio(typical.sum(0))), float(low), float(high), items)


def _pairs(answered: Sequence[tuple[MeasuredRun, Answer]]) -> list[list[np.ndarray]]:
    """For each group: (4,) seconds and tokens, ours and the baseline's, of each repeat, summed over its items."""
    found: dict[int, dict[int, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(4)))
    for run, other in answered:
        ours = run.answer
        found[run.group][run.repeat] += [ours.seconds, len(ours.tokens), other.seconds, len(other.tokens)]
    return [list(repeats.values()) for repeats in found.values()]


def _row(name: str, category: str, runs: Sequence[MeasuredRun], over: dict[str, Ratio]) -> Row:
    repeats: dict[int, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        repeats[run.repeat].append(run)
    rates = [
        sum(len(r.answer.tokens) for r in group) / sum(r.answer.seconds for r in group) for group in repeats.values()
    ]
    compared = [r.equal for r in runs if r.equal is not None]
    return Row(
        contestant=name,
        category=category,
        answers=len(runs),
        tokens=sum(len(r.answer.tokens) for r in runs),
        tokens_per_second=statistics.median(rates),
        spread=(min(rates), max(rates)),
        speedup=over,
        first_token_ms=1e3 * statistics.median(r.answer.first_token_seconds for r in runs),
        texts_equal=sum(compared),
        texts_compared=len(compared),
        **_of_the_engine(runs),
    )


def _of_the_engine(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    stats = [r.answer.stats for r in runs if r.answer.stats is not None]
    if not stats:
        return {}
    steps = sum(s.steps for s in stats)
    nodes = sum(s.nodes_verified for s in stats)
    drafting = [s for s in stats if s.drafted_depth]
    lengths: Counter[int] = Counter()
    for s in stats:
        lengths.update(s.accepted_lengths)
    seconds = sum(r.answer.seconds for r in runs)
    stages = {name: sum(getattr(s, f"{name}_seconds") for s in stats) for name in ("draft", "verify", "host")}
    stages["unaccounted"] = seconds - sum(stages.values())
    return {
        "tokens_per_step": sum(s.new_tokens for s in stats) / steps,
        "acceptance_rate": statistics.mean(s.acceptance_rate for s in drafting) if drafting else None,
        "node_yield": sum(s.accepted for s in stats) / nodes if nodes else None,
        "accepted_lengths": dict(sorted(lengths.items())),
        "ms_per_step": {name: 1e3 * value / steps for name, value in stages.items()},
        "unaccounted": stages["unaccounted"] / seconds,
    }
