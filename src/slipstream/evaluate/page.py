"""A benchmark's document as one self-contained HTML page: charts, notes and every number. It holds no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from slipstream.evaluate import charts
from slipstream.evaluate.charts import PLAIN, STAGES, Mark, Row, known, ratio, stages
from slipstream.evaluate.glossary import explained, term
from slipstream.evaluate.metrics import ALL
from slipstream.evaluate.style import DEFINITIONS, STYLE
from slipstream.user_files import write_text

WIDE, NARROW = 540, 342  # pixels: each chart is drawn in both widths, the style sheet shows one
UNKNOWN = "–"


def write_page(document: dict[str, Any], path: Path) -> None:
    """Write the page for this document. It needs no other file."""
    # Names may hold lone surrogates, which can't be encoded.
    write_text(path, _page(document), errors="replace")


def _page(document: dict[str, Any]) -> str:
    rows: list[Row] = document.get("rows") or []
    return sheet(
        document, "benchmark", _measured(document), _figures(rows), _notes(document, rows), _charts(rows), _table(rows)
    )


def sheet(document: dict[str, Any], kind: str, measured: str, figures: str, notes: str, *main: str) -> str:
    """The whole page, from its parts as HTML."""
    provenance = document.get("provenance") or {}
    title, main_parts = escape(_plain(provenance.get("model", "slipstream"))), "\n".join(main)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · slipstream {kind}</title>
<style>{STYLE}</style>
</head>
<body>
{DEFINITIONS}
<div class="sheet">
<header>
<div><p class="kicker">slipstream {kind}</p><h1>{title}</h1><p class="measured">{measured}</p></div>
{figures}
</header>
{notes}
<dl class="provenance">{_provenance(document, provenance)}</dl>
<main>
{main_parts}
</main>
</div>
</body>
</html>
"""


# ---- the head


def _measured(document: dict[str, Any]) -> str:
    decoding = document.get("decoding") or {}
    how = "greedily"
    if decoding.get("temperature"):
        how = "at " + ", ".join(f"{k.replace('_', '-')} {decoding.get(k)}" for k in ("temperature", "top_p", "seed"))
    items, repeats = document.get("items"), document.get("repeats")
    often = "once" if repeats == 1 else f"{repeats} times"
    return escape(
        f"{items} question{'' if items == 1 else 's'}, each answered {often} by every contestant "
        f"with at most {decoding.get('max_new_tokens')} new tokens, decoded {how}."
    )


def _figures(rows: Sequence[Row]) -> str:
    """The best of slipstream's contestants, and what it is compared with."""
    whole = [row for row in rows if row["category"] == ALL and known(row.get("tokens_per_step")) is not None]
    drafting = [row for row in whole if row["contestant"] != PLAIN]
    best = max(drafting, key=lambda row: ratio(row, PLAIN)[0] or 0, default=None)
    figures = []
    if best and (value := ratio(best, PLAIN)[0]) is not None:
        _, low, high = ratio(best, PLAIN)
        over = term("speed-up", "over plain decoding", "head")
        interval = "" if low is None or high is None else f"{low:.2f}–{high:.2f} {charts.from_few(best)}".strip()
        surely = f" ({term('95%', '95%', 'head')}: {interval})" if interval else ""
        figures.append((f"{value:.2f}×", f"{escape(best['contestant'])} {over}{surely}"))
    for row in [best, *(row for row in whole if row["contestant"] == PLAIN)]:
        if row and (rate := known(row.get("tokens_per_second"))) is not None:
            name = "plain decoding" if row["contestant"] == PLAIN else row["contestant"]
            figures.append((f"{rate:.1f}", f"{term('tokens/s', 'tokens/s', f'head{len(figures)}')}, {escape(name)}"))
    return headline(figures)


def headline(figures: Sequence[tuple[str, str]]) -> str:
    """The headline numbers, each with its label."""
    pairs = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for value, label in figures)
    return f'<dl class="figures tips below">{pairs}</dl>' if figures else ""


def _notes(document: dict[str, Any], rows: Sequence[Row]) -> str:
    notes = []
    if not document.get("complete"):
        missing = document.get("missing") or "the measurement did not get to its end"
        notes.append(f'<li class="warning">Incomplete: {escape(str(missing))}.</li>')
    if not rows:
        notes.append("<li>Nothing was measured.</li>")
    elif all(row["contestant"] != PLAIN for row in rows):
        notes.append("<li>Plain decoding was not measured, so no speed-up over it is known.</li>")
    for row in rows:
        equal, compared = row.get("texts_equal") or 0, row.get("texts_compared") or 0
        if row["category"] == ALL and equal < compared:
            differ = f"{compared - equal} of {compared} texts differ from plain decoding"
            notes.append(f'<li class="differs"><b>{escape(row["contestant"])}</b>: {differ}.</li>')
    return f'<ul class="notes">{"".join(notes)}</ul>' if notes else ""


def _provenance(document: dict[str, Any], provenance: dict[str, Any]) -> str:
    shown = {name: value for name, value in provenance.items() if name != "model"}
    if (memory := known(document.get("peak_memory_mb"))) is not None:
        shown["peak memory"] = f"{memory:,.0f} MB"
    # The command's options are long and come last.
    pairs = sorted(shown.items(), key=lambda pair: isinstance(pair[1], dict))
    return "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(_plain(v))}</dd></div>" for k, v in pairs)


def _plain(value: Any) -> str:
    """Any JSON as readable text, without empty fields of objects."""
    if isinstance(value, dict):
        return "; ".join(f"{k}: {_plain(v)}" for k, v in value.items() if v is not None) or UNKNOWN
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return UNKNOWN if value is None else str(value)


# ---- the charts


FIGURES: dict[str, tuple[Callable[[Sequence[Row], dict[str, Mark], int], str], str, str]] = {
    "speedups": (
        charts.speedups,
        "[speed-up|Speed-up] over plain decoding",
        "How many times as fast as plain decoding, which is the line at 1. Whiskers are [95%|95% intervals].",
    ),
    "steps": (
        charts.steps,
        "What a step yields and costs",
        "[tokens per step|Tokens per step] against [ms per step|milliseconds per step]. Up and to the left is faster; "
        "dotted lines join equal tokens per second. Large marks are all prompts, small ones the categories.",
    ),
    "lengths": (
        charts.histograms,
        "Drafted tokens [kept per step|kept per step]",
        "The share of steps that kept so many of the drafted tokens. Each step adds one token of its own.",
    ),
    "times": (
        charts.times,
        "[ms per step|Time per step]",
        "Milliseconds of one step over all prompts, by what they were spent on.",
    ),
}


def _charts(rows: Sequence[Row]) -> str:
    look = charts.looks(dict.fromkeys(row["contestant"] for row in rows))
    ours = dict.fromkeys(row["contestant"] for row in rows if stages(row))
    swatch = '<rect class="swatch" x=".5" y=".5" width="13" height="10" fill="url(#{})"/>'
    keys = {
        "steps": {escape(name): look[name].mark(7, 6, kind="key") for name in ours},
        "times": {term(stage, stage, "times"): swatch.format(stage) for stage in STAGES},
    }
    drawn = (
        figure(name, title, caption, partial(draw, rows, look), keys.get(name, {}))
        for name, (draw, title, caption) in FIGURES.items()
    )
    first, *rest = [each for each in drawn if each] or [""]
    return f'<div class="charts"><div>{first}</div><div>{"".join(rest)}</div></div>' if first else ""


def figure(name: str, title: str, caption: str, draw: Callable[[int], str], keys: dict[str, str]) -> str:
    """A chart in both widths; "" if there is nothing to draw. keys: the legend, SVG by label, which is HTML."""
    if not (wide := draw(WIDE)):
        return ""
    legend = "".join(
        f'<li><svg width="14" height="12" aria-hidden="true">{key}</svg>{label}</li>' for label, key in keys.items()
    )
    return (
        f'<figure id="{name}"><figcaption class="tips"><h2>{explained(title, name)}</h2>'
        f"<p>{explained(caption, name)}</p></figcaption>"
        + (f'<ul class="legend tips">{legend}</ul>' if legend else "")
        + f'<div class="wide">{wide}</div><div class="narrow">{draw(NARROW)}</div></figure>'
    )


# ---- the table


def _table(rows: Sequence[Row]) -> str:
    """Every number of every row."""
    if not rows:
        return ""
    baselines = list(dict.fromkeys(name for row in rows for name in row.get("speedup") or {}))
    heads: list[tuple[tuple[str, str], ...]]
    heads = [(("contestant", "contestant"),), (("answers", "answers"),), (("tokens", "tokens"),)]
    heads += [(("tokens/s", "tokens/s <small>slowest–fastest</small>"),)]
    heads += [(("speed-up", f"× {escape(name)}"), ("95%", "<small>95% of</small>")) for name in baselines]
    heads += [(("tokens per step", "tokens <small>per step</small>"),), (("acceptance", "accep&shy;tance"),)]
    heads += [(("node yield", "node <small>yield</small>"),)]
    heads += [((stage, f"{stage} <small>ms/step</small>"),) for stage in STAGES[:3]]
    heads += [(("unaccounted", "unac&shy;counted <small>ms/step</small>"),)]
    heads += [(("first token", "first <small>token ms</small>"),), (("same texts", "same <small>texts</small>"),)]
    return numbers(heads, by_category(rows, len(heads), lambda row: _cells(row, baselines)))


def by_category(
    rows: Sequence[Row], columns: int, cells: Callable[[Row], Sequence[str]], called: Callable[[str], str] = str
) -> str:
    """The rows of a table, grouped by category with a heading. called: turns a category into its heading."""
    groups = []
    for category, own in groupby(rows, key=lambda row: row["category"]):
        heading = f'<th class="category" scope="rowgroup" colspan="{columns}">{escape(called(category))}</th>'
        lines = [f"<tr>{heading}</tr>", *(row_of(row["contestant"], cells(row)) for row in own)]
        groups.append(f"<tbody>{''.join(lines)}</tbody>")
    return "".join(groups)


def row_of(name: str, cells: Sequence[str]) -> str:
    return f'<tr class="row"><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def numbers(heads: Sequence[Sequence[tuple[str, str]]], body: str) -> str:
    """The section of the table. heads: the columns' terms. body: the rows as HTML."""
    return (
        '<section class="numbers"><h2>All numbers</h2><div class="tips"><div class="scroll" tabindex="0" role="region" '
        f'aria-label="All numbers"><table><thead><tr>{_heads(heads)}</tr></thead>{body}</table></div></div></section>'
    )


def _heads(heads: Sequence[Sequence[tuple[str, str]]]) -> str:
    """The head row: terms of the glossary, and how they are shown."""
    cells = []
    for i, terms in enumerate(heads):
        shown = " ".join(term(word, shown, f"column{i}", 100 * i / len(heads)) for word, shown in terms)
        cells.append(f'<th scope="col">{shown}</th>')
    return "".join(cells)


def _cells(row: Row, baselines: Sequence[str]) -> list[str]:
    slowest, fastest = row.get("spread") or (None, None)
    spent, share = row.get("ms_per_step") or {}, known(row.get("unaccounted"))
    compared = row.get("texts_compared")
    return [
        number(row.get("answers"), 0),
        number(row.get("tokens"), 0),
        f"{number(row.get('tokens_per_second'), 1)} {_interval(slowest, fastest, 1)}",
        *(_speedup(row, name) for name in baselines),
        *(number(row.get(name)) for name in ("tokens_per_step", "acceptance_rate", "node_yield")),
        *(number(spent.get(stage)) for stage in STAGES[:3]),
        number(spent.get("unaccounted")) + ("" if share is None else f" <small>{share:.1%}</small>"),
        number(row.get("first_token_ms"), 1),
        f"{row.get('texts_equal') or 0}/{compared}" if compared else UNKNOWN,
    ]


def _speedup(row: Row, baseline: str) -> str:
    value, low, high = ratio(row, baseline)
    return f"{number(value)} {_interval(low, high, of=((row.get('speedup') or {}).get(baseline) or {}).get('items'))}"


def number(value: Any, digits: int = 2) -> str:
    return UNKNOWN if (number := known(value)) is None else f"{number:,.{digits}f}"


def _interval(low: Any, high: Any, digits: int = 2, of: int | None = None) -> str:
    """An interval as HTML. of: number of questions that it comes from."""
    if known(low) is None or known(high) is None:
        return ""
    return f"<small>{number(low, digits)}–{number(high, digits)}{f' of {of}' if of else ''}</small>"
