"""A plan as one self-contained page: speed-ups with intervals, by depth and by batch, survival, and sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

from slipstream.evaluate.charts import PLAIN, Mark, looks, speedups
from slipstream.evaluate.drawing import Places, horizontal, scale, svg, text, ticks, vertical, width_of
from slipstream.evaluate.glossary import term
from slipstream.evaluate.page import figure, headline, number, numbers, row_of, sheet
from slipstream.plan.words import Document, best_first, of_others, summary
from slipstream.user_files import write_text

Series = list[tuple[str, list[tuple[float, float]]]]  # by drafter: points


def write_page(document: Document, path: Path) -> None:
    """Write the page. It needs no other file."""
    write_text(path, page(document), errors="replace")


def page(document: Document) -> str:
    place = f"on {document['device']}, {document['dtype']}"
    measured = (
        f"What speculation would give {place}, {document['batch']} at a time, after {document['context']:,} tokens. "
        "A forecast, not a measurement."
    )
    main = [_charts(document), _notes(of_others(document)), _table(document)]
    return sheet(document, "plan", escape(measured), _figures(document), _notes(summary(document)), *main)


def _notes(sentences: Sequence[str]) -> str:
    """A list, in which words in backticks become code."""
    items = [re.sub("`([^`]+)`", r"<code>\1</code>", escape(each)) for each in sentences]
    return f'<ul class="notes">{"".join(f"<li>{each}</li>" for each in items)}</ul>' if items else ""


def _figures(document: Document) -> str:
    best = best_first(document)[0]
    figures = []
    if best["best"]:
        found = best["best"]["speedup"]
        over = term("speed-up", "over plain decoding", "head")
        figures.append(
            (f"{found['value']:.2f}×", f"{escape(best['drafter'])} {over} ({found['low']:.2f}–{found['high']:.2f})")
        )
    figures.append((f"{document['plain']['ms']:.2f}", "ms of a plain step"))
    return headline(figures)


def _charts(document: Document) -> str:
    rows = [row for row in best_first(document) if row["best"]]
    look = looks(row["drafter"] for row in rows)
    keys = {escape(row["drafter"]): look[row["drafter"]].mark(7, 6, kind="key") for row in rows}
    as_rows = [
        {"contestant": row["drafter"], "category": "drafter", "speedup": {PLAIN: row["best"]["speedup"]}}
        for row in rows
    ]
    deep: Series = [(row["drafter"], [(at["depth"], at["speedup"]["value"]) for at in row["by_depth"]]) for row in rows]
    kept: Series = [(row["drafter"], list(enumerate(row["survival"], 1))) for row in rows]
    batches = document.get("batches") or []
    full: Series = [(row["drafter"], [(b["batch"], b["speedup"][row["drafter"]]) for b in batches]) for row in rows]
    left = figure(
        "speedups",
        "[speed-up|Speed-up] over plain decoding",
        "As forecast, with its interval; plain decoding is the line at 1.",
        partial(speedups, as_rows, look),
        {},
    )
    left += figure(
        "survival",
        "Survival",
        "The chance that a step keeps at least so many drafted tokens.",
        partial(lines, kept, look, "chance", "drafted tokens kept", False),
        keys,
    )
    right = figure(
        "depths",
        "Speed-up by depth",
        "How many tokens ahead to draft (γ): deeper drafts give ever less and take ever more.",
        partial(lines, deep, look, "× plain", "tokens ahead", False),
        keys,
    )
    right += figure(
        "batches",
        "Speed-up by batch",
        "Answers at a time: once a step computes as long as it reads, rows are no longer free.",
        partial(lines, full if batches else [], look, "× plain", "sequences at a time", True),
        keys,
    )
    return f'<div class="charts"><div>{left}</div><div>{right}</div></div>'


def lines(series: Series, look: dict[str, Mark], unit: str, across: str, doubling: bool, width: int) -> str:
    """A line for each drafter. doubling: values on the x axis are evenly spaced."""
    points = [point for _, found in series for point in found]
    if not points:
        return ""
    top, bottom, right = 34, 230, 16
    marks = ticks(0, max(y for _, y in points) or 1.0, 5, around=True)
    left = 9 + max(width_of(f"{m:g}") for m in marks)
    every = sorted({x for x, _ in points})
    place = {x: float(i) for i, x in enumerate(every)} if doubling else {x: x for x in every}
    y = scale(marks[0], marks[-1], bottom, top)
    x = scale(place[every[0]], place[every[-1]], left + 14, width - right)
    places = Places()
    parts = [horizontal(y(m), left, width) for m in marks]
    parts += [places.label(left - 7, y(m) + 4, f"{m:g}", "end") for m in marks]
    for each in every:
        parts.append(vertical(x(place[each]), top, bottom, "grid"))
        parts.append(places.label(x(place[each]), bottom + 17, f"{each:g}", "middle"))
    parts.append(text(0, 14, unit) + text(width, bottom + 34, across, "end"))
    if unit == "× plain":
        parts.append(f'<path class="one" d="M{left:.1f} {y(1):.1f}H{width}"/>')
    for name, found in series:
        at = [(x(place[a]), y(b)) for a, b in found]
        parts.append(look[name].line(at))
        parts += [look[name].mark(a, b, 0.8) for a, b in at]
    return svg(width, bottom + 40, parts, f"{unit} by {across}")


def _table(document: Document) -> str:
    heads: list[tuple[tuple[str, str], ...]]
    heads = [
        (("contestant", "drafter"),),
        (("speed-up", "× plain"),),
        (("tokens per step", "tokens <small>per step</small>"),),
    ]
    heads += [((word, word),) for word in ("ahead", "rows", "α", "c", "operations")]
    body = []
    for row in best_first(document):
        if not (best := row["best"]):
            continue
        speed, tokens, alpha = best["speedup"], best["tokens"], row["alpha"]
        cells = [_within(speed), _within(tokens), str(best["depth"]), number(best["rows"], 1), _within(alpha)]
        cells += [number(row["c"], 3), number(row["operations"], 1)]
        body.append(row_of(row["drafter"], cells))
    return numbers(heads, f"<tbody>{''.join(body)}</tbody>")


def _within(found: dict[str, float]) -> str:
    return f"{number(found['value'])} <small>{number(found['low'])}–{number(found['high'])}</small>"
