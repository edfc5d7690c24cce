"""The report's charts as static SVG. Each is drawn for a width in pixels, so that text is not scaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from slipstream.colours import colour
from slipstream.evaluate.drawing import (
    Places,
    around,
    beside,
    fit,
    horizontal,
    padded,
    scale,
    svg,
    text,
    ticks,
    vertical,
    width_of,
)
from slipstream.evaluate.metrics import ALL

PLAIN = "none"  # plain decoding, the baseline of the charts
STAGES = ("draft", "verify", "host", "unaccounted")
CROWD = 60  # with more points in a scatter plot, only the large ones are labelled
SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4H4V4H-4z",
    "M0-5.6L5.6 0L0 5.6L-5.6 0z",
    "M0-5L5.2 4H-5.2z",
    "M0 5L5.2-4H-5.2z",
    "M-1.8-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8z",
    "M-4.5-4.5H4.5L-4.5 4.5H4.5z",
    "M-4.5-4.5V4.5L4.5-4.5V4.5z",
)

Row = dict[str, Any]  # a metrics.Row as JSON


@dataclass(frozen=True)
class Mark:
    """How a contestant is drawn: the colour of its drafter, and a shape."""

    colour: str  # a CSS variable
    shape: str
    plain: bool = False

    @property
    def paint(self) -> str:
        return f'style="--c: var({self.colour})"'

    def mark(self, x: float, y: float, size: float = 1, kind: str = "mark") -> str:
        at = f'transform="translate({x:.1f} {y:.1f}) scale({size})"'
        return f'<path class="{kind}{" plain" * self.plain}" {self.paint} d="{self.shape}" {at}/>'

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        """A line through these points; "" if there is only one."""
        joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        return f'<path class="whisker" {self.paint} d="M{joined}"/>' if len(points) > 1 else ""


def looks(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each name. Contestants of one drafter share its colour, so each gets the shape that was used least,
    counting its colour first."""
    found = {PLAIN: Mark(colour(PLAIN), SHAPES[0], plain=True)}
    taken: Counter[tuple[str, int]] = Counter()
    for name in names:
        hue = colour(name)
        if name not in found:
            shape = min(range(len(SHAPES)), key=lambda i: (taken[hue, i], taken["", i], i))
            taken.update([(hue, shape), ("", shape)])
            found[name] = Mark(hue, SHAPES[shape])
    return found


def known(value: Any) -> float | None:
    """The number; None if it is null, NaN or infinite."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def ratio(row: Row, baseline: str) -> tuple[float | None, float | None, float | None]:
    """The speed-up over a baseline and both ends of its interval."""
    found = (row.get("speedup") or {}).get(baseline) or {}
    return known(found.get("value")), known(found.get("low")), known(found.get("high"))


def stages(row: Row) -> dict[str, float]:
    """Milliseconds per step by stage. Never negative, even if clocks overlap slightly."""
    spent = {name: known((row.get("ms_per_step") or {}).get(name)) for name in STAGES}
    return {name: max(value, 0.0) for name, value in spent.items() if value is not None}


def lengths(row: Row) -> dict[int, int]:
    """Steps by the number of accepted tokens. In JSON the keys are strings."""
    return {int(length): steps for length, steps in (row.get("accepted_lengths") or {}).items()}


# ---- the charts: "" if there is nothing to draw


def speedups(rows: Sequence[Row], look: dict[str, Mark], width: int) -> str:
    """A group per category with a line per contestant: the speed-up over plain decoding with its interval."""
    rows = [row for row in rows if row["contestant"] != PLAIN]
    numbers = [n for row in rows for n in ratio(row, PLAIN) if n is not None]
    if not numbers:
        return ""
    left, right, line, top = 24 + names_width(rows, width), 46, 17, 24
    most = min((width - left - right) // 42, 6)
    marks = ticks(min(1.0, *numbers), max(1.0, *numbers), most, around=True)
    x = scale(marks[0], marks[-1], left, width - right)
    parts, y, category = [], float(top), None
    for row in rows:
        if row["category"] != category:
            y += 26 if category is None else 34
            category = row["category"]
            parts.append(text(0, y - 13, category, "strong", room=width - 110))
            parts.append(text(width, y - 13, from_few(row), "small end"))
        value, low, high = ratio(row, PLAIN)
        drawn = look[row["contestant"]]
        parts.append(text(12, y + 4, row["contestant"], room=left - 18))
        if value is not None:
            if low is not None and high is not None:
                whisker = f"M{x(low):.1f} {y:.1f}H{x(high):.1f}M{x(low):.1f} {y - 3:.1f}v6M{x(high):.1f} {y - 3:.1f}v6"
                parts.append(f'<path class="whisker" {drawn.paint} d="{whisker}"/>')
            parts.append(drawn.mark(x(value), y))
        shown = "–" if value is None else f"{value:.2f}×"
        parts.append(text(width, y + 4, shown, "end strong" if category == ALL else "end"))
        y += line
    y -= 4
    grid = [*(vertical(x(m), top, y, "grid") for m in marks), vertical(x(1), top, y, "one")]
    places = Places()
    grid += [places.label(x(m), at, f"{m:g}×", "middle") for at in (top - 8, y + 16) for m in marks]
    return svg(width, y + 24, [*grid, *parts], "Speed-up over plain decoding, per category and contestant")


def steps(rows: Sequence[Row], look: dict[str, Mark], width: int) -> str:
    """Tokens per step against milliseconds per step, a point per contestant and category of slipstream's engine."""
    points = [(sum(stages(r).values()), known(r.get("tokens_per_step")) or 0.0, r) for r in rows]
    points = [point for point in points if point[0] > 0 and point[1] > 0]
    if not points:
        return ""
    (x_low, x_high), (y_low, y_high) = padded([p[0] for p in points]), padded([p[1] for p in points])
    x_marks, y_marks = ticks(x_low, x_high, 6), ticks(y_low, y_high, 5)
    rates = [rate for rate in ticks(1e3 * y_low / x_high, 1e3 * y_high / x_low, 8) if rate]
    left = 9 + max(width_of(f"{m:g}") for m in y_marks)
    right = 7 + max((width_of(f"{rate:g}/s", "iso") for rate in rates), default=0)
    top, bottom = 40, round(min(0.78 * width, 420))
    x, y = scale(x_low, x_high, left, width - right), scale(y_low, y_high, bottom, top)
    places = Places(around(x(ms), y(tokens), 8.5 if whole(row) else 5) for ms, tokens, row in points)
    parts = [vertical(x(m), top, bottom, "grid") for m in x_marks]
    parts += [places.label(x(m), bottom + 17, f"{m:g}", "middle") for m in x_marks]
    parts += [horizontal(y(m), left, width - right) for m in y_marks]
    parts += [places.label(left - 7, y(m) + 4, f"{m:g}", "end") for m in y_marks]
    parts.append(text(0, 14, "tokens per step") + text(width - right, bottom + 34, "ms per step", "end"))
    # Equal tokens per second are lines through the origin, drawn where they cross the frame.
    for rate in rates:
        start, end = max(x_low, 1e3 * y_low / rate), min(x_high, 1e3 * y_high / rate)
        if end - start < 0.12 * (x_high - x_low):  # too short to show
            continue
        ends = [(x(at), y(rate * at / 1e3)) for at in (start, end)]
        parts.append(f'<path class="iso" d="M{ends[0][0]:.1f} {ends[0][1]:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}"/>')
        at_top = ends[1][1] < top + 1
        label_x, label_y = (ends[1][0], top - 7) if at_top else (ends[1][0] + 5, ends[1][1] + 4)
        parts.append(places.label(label_x, label_y, f"{rate:g}/s", "iso middle" if at_top else "iso"))
    # Points for all prompts together are drawn last, on top of the others, and are labelled first.
    points.sort(key=lambda point: whole(point[2]))
    for ms, tokens, row in reversed(points):
        label, kind = (row["contestant"], "strong") if whole(row) else (row["category"], "small")
        if len(points) > CROWD and not whole(row):
            continue
        frame = (left, top, width - right, bottom)
        parts.append(beside(x(ms), y(tokens), fit(label, 120, kind), kind, places, frame))
    for ms, tokens, row in points:
        parts.append(look[row["contestant"]].mark(x(ms), y(tokens), 1.5 if whole(row) else 0.9))
    return svg(width, bottom + 40, parts, "Tokens per step against milliseconds per step")


def histograms(rows: Sequence[Row], look: dict[str, Mark], width: int) -> str:
    """How many drafted tokens a step accepts: a panel per contestant that drafts, over all prompts, on equal axes."""
    shown = [(row, lengths(row)) for row in rows if row["category"] == ALL and row["contestant"] != PLAIN]
    shown = [(row, counts) for row, counts in shown if sum(counts.values())]
    if not shown:
        return ""
    columns, gap, left, height, deep = 2 if width < 400 or len(shown) < 3 else 3, 18, 30, 92, 154
    wide = (width - gap * (columns - 1)) / columns
    longest = max(max(counts) for _, counts in shown)
    highest = max(max(counts.values()) / sum(counts.values()) for _, counts in shown)
    bar = (wide - left) / (longest + 1)
    marks = [m for m in ticks(0, longest, 6) if m == int(m)]
    parts = []
    for i, (row, counts) in enumerate(shown):
        x0, top = i % columns * (wide + gap), 28 + i // columns * deep
        bottom, total, drawn = top + height, sum(counts.values()), look[row["contestant"]]
        y = scale(0, highest, bottom, top)
        parts.append(drawn.mark(x0 + 6, top - 18, kind="key"))
        parts.append(text(x0 + 17, top - 14, row["contestant"], room=wide - 17))
        places = Places()
        for share in ticks(0, highest, 4):
            parts.append(horizontal(y(share), x0 + left, x0 + wide))
            parts.append(places.label(x0 + left - 6, y(share) + 4, f"{share:.0%}", "small end"))
        for length, count in sorted(counts.items()):
            at, up = x0 + left + bar * length, y(count / total)
            size = f'width="{max(bar - min(2, bar / 4), 0.5):.1f}" height="{bottom - up:.1f}"'
            parts.append(f'<rect class="bar" {drawn.paint} x="{at:.1f}" y="{up:.1f}" {size}/>')
        for m in marks:
            parts.append(places.label(x0 + left + bar * (m + 0.45), bottom + 14, f"{m:g}", "small middle"))
    deepest = 28 + (len(shown) - 1) // columns * deep + height
    return svg(width, deepest + 22, parts, "Drafted tokens kept per step, as a share of the steps")


def times(rows: Sequence[Row], look: dict[str, Mark], width: int) -> str:
    """The time of a step over all prompts: a bar per contestant of slipstream's engine, with a part per stage."""
    shown = [(row, stages(row)) for row in rows if row["category"] == ALL and stages(row)]
    longest = max((sum(spent.values()) for _, spent in shown), default=0)
    if longest <= 0:
        return ""
    left, right, line, thick = 29 + names_width([row for row, _ in shown], width), 68, 42, 15
    x = scale(0, longest, left, width - right)
    parts = []
    for i, (row, spent) in enumerate(shown):
        top, done = 6 + i * line, 0.0
        parts.append(look[row["contestant"]].mark(6, top + thick / 2, kind="key"))
        parts.append(text(17, top + thick - 3, row["contestant"], room=left - 23))
        for stage, ms in spent.items():
            start, end = x(done), x(done + ms)
            size = f'width="{end - start:.2f}" height="{thick}"'
            parts.append(f'<rect class="part {stage}" x="{start:.2f}" y="{top}" {size} fill="url(#{stage})"/>')
            if end - start > width_of(f"{ms:.1f}", "small"):
                parts.append(text((start + end) / 2, top + thick + 13, f"{ms:.1f}", "small middle"))
            done += ms
        parts.append(text(width, top + thick - 3, f"{done:.1f} ms", "end strong"))
    return svg(width, len(shown) * line + 4, parts, "Milliseconds per step, by stage")


# ---- about rows


def whole(row: Row) -> bool:
    """Whether the row is over all prompts."""
    return bool(row["category"] == ALL)


def from_few(row: Row) -> str:
    """How many questions a row's interval comes from; "" if the document doesn't say."""
    items = ((row.get("speedup") or {}).get(PLAIN) or {}).get("items")
    return f"from {items} question{'' if items == 1 else 's'}" if items else ""


def names_width(rows: Sequence[Row], width: int) -> int:
    """Pixels for the longest contestant's name, up to a third of the chart."""
    return min(max(round(width_of(row["contestant"])) for row in rows) + 4, width // 3)
