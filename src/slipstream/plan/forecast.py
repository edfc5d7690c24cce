"""Forecasts of tokens per step and speed-up on unseen texts, with intervals, and their comparison with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.plan import theory
from slipstream.plan.survival import Tally, per_step
from slipstream.plan.theory import Interval

FAR = 0.15  # relative errors above this are explained
# By how much steps that verify differ, next to plain ones, between two moments of one machine: it adds to the interval
# of a forecast whose times were not taken in turn with plain decoding.
APART = 0.05
STAGES = ("drafting", "verifying", "host")
REASONS = {
    "drafting": "drafting took {measured:.2f} ms a step, not {expected:.2f}: a draft that overlaps with steps takes "
    "less than one by itself, on a busy host it takes more",
    "verifying": "a forward took {measured:.2f} ms, not {expected:.2f}: steps that were captured or compiled on the "
    "way, other lengths of text, or a machine that was busy when costs were measured",
    "host": "the host took {measured:.2f} ms a step, not {expected:.2f}: what it does around a step is in no roofline",
}


@dataclass(frozen=True)
class Times:
    """Seconds of a step by stage, and of a plain step."""

    drafting: float
    verifying: float
    host: float
    plain: float


@dataclass(frozen=True)
class Forecast:
    tokens: Interval  # per step
    speedup: Interval  # over plain decoding, without prompts, which take as long in both
    times: Times


@dataclass(frozen=True)
class Outcome:
    """What was measured, in the fields of a forecast."""

    tokens: float
    speedup: float
    times: Times


def forecast(known: Sequence[Tally], plain: float, unseen: int, replayed: bool = False) -> Forecast:
    """A forecast for so many unseen texts like the known ones. plain: seconds of a plain step. replayed: the known
    texts were not decoded in turn with plain decoding, so their steps were timed at another moment."""
    steps = sum(t.steps for t in known)
    speedup = theory.mean_ratio(
        [t.tokens * plain for t in known], [t.seconds for t in known], [t.category for t in known], unseen
    )
    times = _times(known, steps, plain)
    return Forecast(per_step(known, unseen), speedup.wider(APART) if replayed else speedup, times)


def outcome(tallies: Sequence[Tally], plain: Sequence[Tally]) -> Outcome:
    """Measured results of a drafter's answers and of plain answers to the same prompts."""
    steps, tokens = sum(t.steps for t in tallies), sum(t.tokens for t in tallies)
    each = sum(t.seconds for t in plain) / sum(t.tokens for t in plain)
    speedup = each / (sum(t.seconds for t in tallies) / tokens)
    return Outcome(tokens / steps, speedup, _times(tallies, steps, each))


def _times(tallies: Sequence[Tally], steps: int, plain: float) -> Times:
    drafting, verifying, host = (sum(getattr(t, stage) for t in tallies) / steps for stage in STAGES)
    return Times(drafting, verifying, host, plain)


def why(expected: Forecast, found: Outcome) -> list[str]:
    """Causes of a forecast's error, the largest first; none if the error is small."""
    off = found.speedup / expected.speedup.value - 1
    if abs(off) <= FAR:
        return []
    causes: list[tuple[float, str]] = []
    tokens = found.tokens / expected.tokens.value
    causes.append((tokens - 1, f"the texts gave {found.tokens:.2f} tokens per step, not {expected.tokens.value:.2f}"))
    step = sum(getattr(found.times, stage) for stage in STAGES)
    for stage in STAGES:
        now, then = getattr(found.times, stage), getattr(expected.times, stage)
        sentence = REASONS[stage].format(measured=1e3 * now, expected=1e3 * then)
        causes.append(((then - now) / step, sentence))
    plain = found.times.plain / expected.times.plain
    sentence = f"a plain step took {1e3 * found.times.plain:.2f} ms, not {1e3 * expected.times.plain:.2f}"
    causes.append((plain - 1, sentence))
    # Causes in the direction of the error that explain at least a third of it.
    main = sorted([c for c in causes if c[0] * off > 0 and abs(c[0]) > abs(off) / 3], key=lambda c: -abs(c[0]))
    return [sentence for _, sentence in main] or ["nothing alone: every stage was a little off"]


def as_row(name: str, expected: Forecast, found: Outcome) -> dict[str, Any]:
    """Forecast and outcome together, for JSON."""
    return {
        "drafter": name,
        "tokens": {**expected.tokens._asdict(), "measured": found.tokens, "held": expected.tokens.holds(found.tokens)},
        "speedup": {
            **expected.speedup._asdict(),
            "measured": found.speedup,
            "held": expected.speedup.holds(found.speedup),
        },
        "ms": {
            "expected": {k: 1e3 * v for k, v in asdict(expected.times).items()},
            "measured": {k: 1e3 * v for k, v in asdict(found.times).items()},
        },
        "why": why(expected, found),
    }
