"""The report's charts as static SVG. Each is drawn for a width in pixels, so that its text is never scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any

from slipstream.bench.metrics import ALL

PLAIN = "none"  # plain decoding, the contestant the charts compare with
STAGES = ("draft", "verify", "host", "unaccounted")
LETTER = 6.8  # pixels of an average letter: without a script nothing can be measured
CROWD = 60  # points of a scatter beyond which only the large ones are labelled
HUES = 6
SHAPES = (  # fewer than hues, so that thirty contestants pass before a pair of the two comes again
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4H4V4H-4z",
    "M0-5.6L5.6 0L0 5.6L-5.6 0z",
    "M0-5L5.2 4H-5.2z",
    "M0 5L5.2-4H-5.2z",
)

Row = dict[str, Any]  # a metrics.Row on its way through JSON
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Look:
    """How a contestant is told apart: by colour and by shape."""

    hue: str
    shape: str

    def mark(self, x: float, y: float, size: float = 1, kind: str = "mark") -> str:
        at = f'transform="translate({x:.1f} {y:.1f}) scale({size})"'
        return f'<path class="{kind} {self.hue}" d="{self.shape}" {at}/>'


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Plain decoding is drawn in grey, the others in the order they come."""
    drafting = [name for name in names if name != PLAIN]
    found = {name: Look(f"c{i % HUES}", SHAPES[i % len(SHAPES)]) for i, name in enumerate(drafting)}
    return {PLAIN: Look("plain", SHAPES[0]), **found}


def known(value: Any) -> float | None:
    """The number; None where it is null, NaN or infinite."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def ratio(row: Row, baseline: str) -> tuple[float | None, float | None, float | None]:
    """The speed-up over a baseline and both ends of its interval."""
    found = (row.get("speedup") or {}).get(baseline) or {}
    return known(found.get("value")), known(found.get("low")), known(found.get("high"))


def stages(row: Row) -> dict[str, float]:
    """Milliseconds per step. Clocks that overlap by a hair must not give a stage less than nothing."""
    spent = {name: known((row.get("ms_per_step") or {}).get(name)) for name in STAGES}
    return {name: max(value, 0.0) for name, value in spent.items() if value is not None}


def lengths(row: Row) -> dict[int, int]:
    """Steps by the number of drafted tokens kept. JSON has made texts of the numbers."""
    return {int(length): steps for length, steps in (row.get("accepted_lengths") or {}).items()}


# ---- the charts: "" where there is nothing to draw


def speedups(rows: Sequence[Row], look: dict[str, Look], width: int) -> str:
    """A group per category, in it a line per contestant: the speed-up over plain decoding with its interval."""
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
            parts.append(text(0, y - 13, category, "strong", room=width))
        value, low, high = ratio(row, PLAIN)
        drawn = look[row["contestant"]]
        parts.append(text(12, y + 4, row["contestant"], room=left - 18))
        if value is not None:
            if low is not None and high is not None:
                whisker = f"M{x(low):.1f} {y:.1f}H{x(high):.1f}M{x(low):.1f} {y - 3:.1f}v6M{x(high):.1f} {y - 3:.1f}v6"
                parts.append(f'<path class="whisker {drawn.hue}" d="{whisker}"/>')
            parts.append(drawn.mark(x(value), y))
        shown = "–" if value is None else f"{value:.2f}×"
        parts.append(text(width, y + 4, shown, "end strong" if category == ALL else "end"))
        y += line
    y -= 4
    grid = [*(vertical(x(m), top, y, "grid") for m in marks), vertical(x(1), top, y, "one")]
    grid += [text(x(m), at, f"{m:g}×", "middle") for m in marks for at in (top - 8, y + 16)]
    return svg(width, y + 24, [*grid, *parts], "Speed-up over plain decoding, per category and contestant")


def steps(rows: Sequence[Row], look: dict[str, Look], width: int) -> str:
    """Tokens per step against milliseconds per step, a point per contestant and category of our own engine."""
    points = [(sum(stages(r).values()), known(r.get("tokens_per_step")) or 0.0, r) for r in rows]
    points = [point for point in points if point[0] > 0 and point[1] > 0]
    if not points:
        return ""
    left, right, top, bottom = 34, 34, 40, round(min(0.78 * width, 420))
    (x_low, x_high), (y_low, y_high) = padded([p[0] for p in points]), padded([p[1] for p in points])
    x_marks, y_marks = ticks(x_low, x_high, 6), ticks(y_low, y_high, 5)
    x, y = scale(x_low, x_high, left, width - right), scale(y_low, y_high, bottom, top)
    parts = [vertical(x(m), top, bottom, "grid") + text(x(m), bottom + 17, f"{m:g}", "middle") for m in x_marks]
    parts += [horizontal(y(m), left, width - right) + text(left - 7, y(m) + 4, f"{m:g}", "end") for m in y_marks]
    parts.append(text(0, 14, "tokens per step") + text(width - right, bottom + 34, "ms per step", "end"))
    # Equal tokens per second are lines through the origin, drawn where they cross the frame.
    for rate in filter(None, ticks(1e3 * y_low / x_high, 1e3 * y_high / x_low, 8)):
        start, end = max(x_low, 1e3 * y_low / rate), min(x_high, 1e3 * y_high / rate)
        if end - start < 0.12 * (x_high - x_low):  # a corner cut off
            continue
        ends = [(x(at), y(rate * at / 1e3)) for at in (start, end)]
        parts.append(f'<path class="iso" d="M{ends[0][0]:.1f} {ends[0][1]:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}"/>')
        at_top = ends[1][1] < top + 1
        label_x, label_y = (ends[1][0], top - 7) if at_top else (ends[1][0] + 5, ends[1][1] + 4)
        parts.append(text(label_x, label_y, f"{rate:g}/s", "iso middle" if at_top else "iso"))
    # What is drawn last lies on top: all prompts together, which are labelled first too.
    points.sort(key=lambda point: point[2]["category"] == ALL)
    taken = [(x(ms) - 5, y(tokens) - 5, x(ms) + 5, y(tokens) + 5) for ms, tokens, _ in points]
    for ms, tokens, row in reversed(points):
        whole = row["category"] == ALL
        label, kind = (row["contestant"], "strong") if whole else (row["category"], "small")
        if len(points) > CROWD and not whole:
            continue
        parts.append(beside(x(ms), y(tokens), fit(label, 120), kind, taken, (left, top, width - right, bottom)))
    for ms, tokens, row in points:
        whole = row["category"] == ALL
        parts.append(look[row["contestant"]].mark(x(ms), y(tokens), 1.5 if whole else 0.9))
    return svg(width, bottom + 40, parts, "Tokens per step against milliseconds per step")


def histograms(rows: Sequence[Row], look: dict[str, Look], width: int) -> str:
    """How many drafted tokens a step keeps: a panel per contestant that drafts, over all prompts, on equal axes."""
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
        parts.append(drawn.mark(x0 + 6, top - 18, kind="key") + text(x0 + 17, top - 14, row["contestant"], room=wide))
        for share in ticks(0, highest, 4):
            parts.append(horizontal(y(share), x0 + left, x0 + wide))
            parts.append(text(x0 + left - 6, y(share) + 4, f"{share:.0%}", "small end"))
        for length, count in sorted(counts.items()):
            at, up = x0 + left + bar * length, y(count / total)
            size = f'width="{max(bar - min(2, bar / 4), 0.5):.1f}" height="{bottom - up:.1f}"'
            parts.append(f'<rect class="bar {drawn.hue}" x="{at:.1f}" y="{up:.1f}" {size}/>')
        parts += [text(x0 + left + bar * (m + 0.45), bottom + 14, f"{m:g}", "small middle") for m in marks]
    deepest = 28 + (len(shown) - 1) // columns * deep + height
    return svg(width, deepest + 22, parts, "Drafted tokens kept per step, as a share of the steps")


def times(rows: Sequence[Row], look: dict[str, Look], width: int) -> str:
    """Where a step's time goes over all prompts: a bar per contestant of our own engine, a part per stage."""
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
            if end - start > 26:
                parts.append(text((start + end) / 2, top + thick + 13, f"{ms:.1f}", "small middle"))
            done += ms
        parts.append(text(width, top + thick - 3, f"{done:.1f} ms", "end strong"))
    return svg(width, len(shown) * line + 4, parts, "Milliseconds per step, by stage")


# ---- what they are made of


def scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def ticks(low: float, high: float, most: int, around: bool = False) -> list[float]:
    """Round numbers from low to high, about `most` of them; with `around`, the two that lie outside as well."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(span / most))
    step = power * next(n for n in (1, 2, 5, 10) if n * power * most >= span * 0.999)
    first, last = (floor, ceil) if around else (ceil, floor)
    start, end = first(low / step + (1e-9 if around else -1e-9)), last(high / step + (-1e-9 if around else 1e-9))
    return [round(i * step, 9) for i in range(start, max(end, start + around) + 1)]


def padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of positive values with some room; still positive, for the axes are divided by each other."""
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 0.1 * high
    return max(low - room, low / 2), high + room


def beside(x: float, y: float, label: str, kind: str, taken: list[Any], frame: tuple[float, ...]) -> str:
    """The label at the first free place around its point. Where there is none it is left out: the table has it."""
    off, letter = (12, 7.8) if kind == "strong" else (8, 6.4)
    long, tall = letter * len(label), 13
    for anchor, dx, dy in (("", off, 0), ("end", -off, 0), ("middle", 0, -off - 5), ("middle", 0, off + 5)):
        start = x + dx - long * {"": 0, "middle": 0.5, "end": 1}[anchor]
        box = (start, y + dy - tall / 2, start + long, y + dy + tall / 2)
        inside = box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
        if inside and not any(b[0] < box[2] and box[0] < b[2] and b[1] < box[3] and box[1] < b[3] for b in taken):
            taken.append(box)
            return text(x + dx, y + dy + 4, label, f"{kind} halo {anchor}")
    return ""


def names_width(rows: Sequence[Row], width: int) -> int:
    """Pixels for the longest contestant's name, up to a third of the chart."""
    return min(max(round(LETTER * len(row["contestant"])) for row in rows) + 4, width // 3)


def fit(label: str, room: float) -> str:
    """Cut to about this many pixels, in the middle: swept contestants differ at the end. The table has the whole."""
    most = max(int(room / LETTER), 3)
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-(most - most // 2 - 1) :]}"


def text(x: float, y: float, label: str, kind: str = "", room: float = 400) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(fit(label, room))}</text>'


def vertical(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'


def horizontal(y: float, left: float, right: float) -> str:
    return f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'


def svg(width: int, height: float, parts: Iterable[str], label: str) -> str:
    size = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
