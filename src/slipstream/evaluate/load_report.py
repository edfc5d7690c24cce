"""The report of a load test: a table, one JSON document, and a page with charts by rate."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from rich.table import Table

from slipstream.evaluate.charts import SHAPES, Mark, known
from slipstream.evaluate.drawing import Places, Scale, horizontal, scale, svg, text, ticks, vertical, width_of
from slipstream.evaluate.glossary import term
from slipstream.evaluate.load import LoadPlan, Row
from slipstream.evaluate.page import figure, headline, number, numbers, row_of, sheet
from slipstream.evaluate.remote import Server
from slipstream.evaluate.report import commit, finite
from slipstream.targets.timing import cpu_name
from slipstream.user_files import write_text
from slipstream.version import __version__

NAME, VERSION = "slipstream load", 1
P50, P99 = Mark("--of-suffix", SHAPES[0]), Mark("--of-rest", SHAPES[2])
LATE = 20.0  # milliseconds by which requests may be sent late without a remark

Document = dict[str, Any]


def document(
    plan: LoadPlan, server: Server, rows: Sequence[Row], options: dict[str, Any], missing: str | None
) -> Document:
    """Everything measured, ready for JSON."""
    about = {
        "slipstream": __version__,
        "python": platform.python_version(),
        "model": server.model,
        "server": server.url,
        "sent from": cpu_name(),
        "commit": commit(),
        "options": options,
    }
    return finite(
        {
            "benchmark": NAME,
            "version": VERSION,
            "provenance": about,
            "decoding": {"max_new_tokens": plan.max_new_tokens, "temperature": 0.0},
            "prompts": len(plan.prompts),
            "rates": list(plan.rates),
            "seconds": plan.seconds,
            "seed": plan.seed,
            "complete": missing is None,
            "missing": missing,
            "rows": rows,
        }
    )


def table(rows: Sequence[Row]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    heads = ["requests/s", "sent", "answered", "refused", "failed", "first ms p50", "p99", "per token ms p50", "p99"]
    for name in [*heads, "tokens/s", "M"]:
        shown.add_column(name, justify="right")
    for row in rows:
        first, each = row["first_token_ms"], row["per_token_ms"]
        counts = [str(row[name]) for name in ("sent", "answered", "refused", "failed")]
        times = [number(first["p50"], 0), number(first["p99"], 0), number(each["p50"], 1), number(each["p99"], 1)]
        rates = [number(row["tokens_per_second"], 1), number(row["tokens_per_step"])]
        shown.add_row(f"{row['rate']:g}", *counts, *times, *rates)
    return shown


def remarks(rows: Sequence[Row]) -> list[str]:
    """Remarks on failures and on requests that were sent late."""
    sentences = []
    for row in rows:
        if row["failures"]:
            why = ", ".join(f"{times} × {reason}" for reason, times in list(row["failures"].items())[:3])
            sentences.append(f"{row['rate']:g} requests/s: {row['failed']} of {row['sent']} failed: {why}")
        if (late := known(row["late_ms"]["p99"])) is not None and late > LATE:
            sentences.append(
                f"{row['rate']:g} requests/s: sent up to {late:.0f} ms late; this machine is too busy to tell"
            )
    return sentences


# ---- the page


def write_page(document: Document, path: Path) -> None:
    write_text(path, _page(document), errors="replace")


def _page(document: Document) -> str:
    rows: list[Row] = document["rows"]
    seconds, most = document["seconds"], document["decoding"]["max_new_tokens"]
    measured = (
        f"Requests at random for {seconds:g} s at each rate, of {document['prompts']} prompts, "
        f"with at most {most} new tokens, decoded greedily, to {escape(document['provenance']['server'])}."
    )
    notes = [f'<li class="warning">Incomplete: {escape(document["missing"])}.</li>'] if document["missing"] else []
    notes += [f"<li>{escape(each)}.</li>" for each in remarks(rows)]
    listed = f'<ul class="notes">{"".join(notes)}</ul>' if notes else ""
    return sheet(document, "load", measured, _figures(rows), listed, _charts(rows), _table(rows))


def _figures(rows: Sequence[Row]) -> str:
    """The headline numbers, at the rate with the most tokens per second."""
    known_rows = [row for row in rows if known(row["tokens_per_second"]) is not None]
    best = max(known_rows, key=lambda row: row["tokens_per_second"], default=None)
    if best is None:
        return ""
    at = f"at {best['rate']:g} requests/s"
    figures = [
        (number(best["tokens_per_second"], 1), f"{term('tokens/s in all', 'tokens/s', 'head0')} {at}"),
        (number(best["first_token_ms"]["p50"], 0), f"{term('time to first token', 'ms to first token', 'head1')} {at}"),
    ]
    return headline(figures)


def _charts(rows: Sequence[Row]) -> str:
    both = {"p50": P50, "p99": P99}
    keys = {name: mark.mark(7, 6, kind="key") for name, mark in both.items()}
    first = [(mark, [known(row["first_token_ms"][name]) for row in rows]) for name, mark in both.items()]
    each = [(mark, [known(row["per_token_ms"][name]) for row in rows]) for name, mark in both.items()]
    written = [(P50, [known(row["tokens_per_second"]) for row in rows])]
    steps = [(P50, [known(row["tokens_per_step"]) for row in rows])]
    rates = [row["rate"] for row in rows]
    left = figure(
        "first",
        "Time to first token",
        "Milliseconds from when a request was due, waiting included, on a logarithmic scale.",
        partial(lines, rates, first, "ms", True),
        {term(name, name, "first"): key for name, key in keys.items()},
    ) + figure(
        "each",
        "Time per token after the first",
        "Milliseconds, on a logarithmic scale.",
        partial(lines, rates, each, "ms", True),
        {term(name, name, "each"): key for name, key in keys.items()},
    )
    right = figure(
        "written",
        "Tokens per second in all",
        "Tokens of all answers. Where the line turns flat, the server gives what it can, and requests wait.",
        partial(lines, rates, written, "tokens/s", False),
        {},
    ) + figure(
        "yield",
        "Tokens per step",
        "Tokens that one forward of the model gives an answer; plain decoding has 1.",
        partial(lines, rates, steps, "tokens per step", False),
        {},
    )
    return f'<div class="charts"><div>{left}</div><div>{right}</div></div>' if left or right else ""


def lines(
    rates: Sequence[float], series: Sequence[tuple[Mark, Sequence[float | None]]], unit: str, log: bool, width: int
) -> str:
    """A line for each series of values by rate. The x axis is logarithmic, since rates are usually doubled."""
    values = [value for _, found in series for value in found if value is not None and (value > 0 or not log)]
    if not values:
        return ""
    top, bottom, right = 34, 230, 16
    marks = decades(min(values), max(values)) if log else ticks(0, max(values) or 1.0, 5, around=True)
    left = 9 + max(width_of(f"{m:,g}") for m in marks)
    y = scaled(marks[0], marks[-1], bottom, top, log)
    x = scaled(min(rates), max(rates), left + 14, width - right, True)
    places = Places()
    parts = [horizontal(y(m), left, width) for m in marks]
    parts += [places.label(left - 7, y(m) + 4, f"{m:,g}", "end") for m in marks]
    for rate in sorted(set(rates)):
        parts.append(vertical(x(rate), top, bottom, "grid"))
        parts.append(places.label(x(rate), bottom + 17, f"{rate:g}", "middle"))
    parts.append(text(0, 14, unit) + text(width, bottom + 34, "requests/s", "end"))
    for mark, found in series:
        points = sorted((x(r), y(v)) for r, v in zip(rates, found, strict=True) if v is not None and (v > 0 or not log))
        parts.append(mark.line(points))
        parts += [mark.mark(at, up) for at, up in points]
    return svg(width, bottom + 40, parts, f"{unit} by requests per second")


def scaled(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    if not log:
        return scale(low, high, start, end)
    if low == high:
        return lambda _: (start + end) / 2
    straight = scale(log10(low), log10(high), start, end)
    return lambda value: straight(log10(value))


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around a range; only powers of ten if it is wide."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    every = [float(f"{n}e{p}") for p in powers for n in ((1, 2, 5) if len(powers) < 5 else (1,))]
    below = max((m for m in every if m <= low), default=every[0])
    above = min((m for m in every if m >= high and m > below), default=every[-1])
    return [m for m in every if below <= m <= above]


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    heads: list[tuple[tuple[str, str], ...]]
    heads = [(("rate", "requests/s"),), (("sent", "sent <small>asked before</small>"),)]
    heads += [((name, name),) for name in ("answered", "refused", "failed")]
    for word, shown in (
        ("time to first token", "first <small>token ms</small>"),
        ("time per token", "ms <small>per token</small>"),
    ):
        heads += [((word, shown), ("p50", "p50")), (("p99", "p99"),)]
    heads += [(("tokens", "tokens"),), (("tokens/s in all", "tokens/s"),)]
    heads += [(("tokens per step", "tokens <small>per step</small>"),), (("late", "late <small>ms</small>"),)]
    body = []
    for row in rows:
        first, each = row["first_token_ms"], row["per_token_ms"]
        cells = [f"{row['sent']} <small>{row['asked_before']}</small>"]
        cells += [str(row[name]) for name in ("answered", "refused", "failed")]
        cells += [number(first["p50"], 0), number(first["p99"], 0), number(each["p50"], 1), number(each["p99"], 1)]
        cells += [number(row["tokens"], 0), number(row["tokens_per_second"], 1), number(row["tokens_per_step"])]
        cells += [number(row["late_ms"]["p99"], 1)]
        body.append(row_of(f"{row['rate']:g}", cells))
    return numbers(heads, f"<tbody>{''.join(body)}</tbody>")
