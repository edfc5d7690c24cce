"""Parts of charts: scales, ticks, and labels that don't overlap, as pieces of SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from unicodedata import east_asian_width

Scale = Callable[[float], float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


def scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def ticks(low: float, high: float, most: int, around: bool = False) -> list[float]:
    """Round numbers from low to high, about `most` of them; with `around`, also the next ones outside."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(span / most))
    step = power * next(n for n in (1, 2, 5, 10) if n * power * most >= span * 0.999)
    first, last = (floor, ceil) if around else (ceil, floor)
    start, end = first(low / step + (1e-9 if around else -1e-9)), last(high / step + (-1e-9 if around else 1e-9))
    return [round(i * step, 9) for i in range(start, max(end, start + around) + 1)]


def padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of positive values with a margin. Both ends stay positive, since the axes are divided by each other."""
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 0.1 * high
    return max(low - room, low / 2), high + room


class Places:
    """The boxes that are taken, so that labels don't cover anything."""

    def __init__(self, taken: Iterable[Box] = ()) -> None:
        self._taken = list(taken)

    def take(self, box: Box) -> bool:
        """Take a box. False: it is not free."""
        if any(b[0] < box[2] and box[0] < b[2] and b[1] < box[3] and box[1] < b[3] for b in self._taken):
            return False
        self._taken.append(box)
        return True

    def label(self, x: float, y: float, label: str, kind: str) -> str:
        """The label with its baseline at y; "" if it would cover something."""
        return text(x, y, label, kind) if self.take(box_of(x, y, label, kind)) else ""


def box_of(x: float, y: float, label: str, kind: str) -> Box:
    long, kinds = width_of(label, kind), kind.split()
    start = x - long * (1 if "end" in kinds else 0.5 if "middle" in kinds else 0)
    return start, y - 11, start + long, y + 4


def around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def beside(x: float, y: float, label: str, kind: str, places: Places, frame: Box) -> str:
    """The label at the first free place around its point; "" if there is none."""
    off = 13 if kind == "strong" else 8
    for anchor, dx, dy in (("", off, 0), ("end", -off, 0), ("middle", 0, -off - 5), ("middle", 0, off + 5)):
        at = (x + dx, y + dy + 4, label, f"{kind} halo {anchor}")
        box = box_of(*at)
        inside = box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
        if inside and places.take(box):
            return text(*at, room=box[2] - box[0] + 1)
    return ""


def width_of(label: str, kind: str = "") -> float:
    """An estimate of the largest width of a label in pixels, since without a script it can't be measured."""
    size = 11 if {"small", "iso"} & set(kind.split()) else 12
    return sum(map(_letter, label)) * size * (1.08 if "strong" in kind else 1)


def _letter(letter: str) -> float:
    """A letter's width as a share of the font's size."""
    if east_asian_width(letter) in "WF":
        return 1.25  # emoji are wider than high
    if letter in "mwMW@%—…×":
        return 0.95
    if letter in " iljtfrI.,:;|!'()[]/-":
        return 0.42
    return 0.74 if letter.isupper() or not letter.isascii() else 0.62


def fit(label: str, room: float, kind: str = "") -> str:
    """Shorten a label to this many pixels, in the middle, since contestants of a sweep differ at the end."""
    if width_of(label, kind) <= room:
        return label
    kept = len(label) - 1
    while kept > 2 and width_of(_cut(label, kept), kind) > room:
        kept -= 1
    return _cut(label, kept)


def _cut(label: str, kept: int) -> str:
    return f"{label[: kept // 2]}…{label[-(kept - kept // 2) :]}"


def text(x: float, y: float, label: str, kind: str = "", room: float = 400) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(fit(label, room, kind))}</text>'


def vertical(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'


def horizontal(y: float, left: float, right: float) -> str:
    return f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'


def svg(width: int, height: float, parts: Iterable[str], label: str) -> str:
    size = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
