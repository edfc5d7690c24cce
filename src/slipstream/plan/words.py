"""A plan in sentences, a table and bars, for the terminal and the page."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

Document = dict[str, Any]
BAR = 32  # letters of the longest bar


def advice(document: Document) -> list[str]:
    """All sentences of the plan, the best drafter first."""
    first, *others = best_first(document)
    return [*_step(document), _about(first), *map(_about, others), *_when(document, first), *_caveats(document)]


def summary(document: Document) -> list[str]:
    """The sentences about plain decoding and the best drafter only."""
    first, *_ = best_first(document)
    return [*_step(document), _about(first), *_when(document, first), *_caveats(document)]


def of_others(document: Document) -> list[str]:
    """The sentences that `summary` leaves out: about the other drafters."""
    return [_about(row) for row in best_first(document)[1:]]


def best_first(document: Document) -> list[dict[str, Any]]:
    """The plan's drafters, the fastest first."""
    return sorted(document["drafters"], key=lambda row: -_speedup(row)["value"])


def _step(document: Document) -> list[str]:
    plain, sentences = document["plain"], []
    parts = plain.get("parts_ms")
    if parts:
        shares = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        sentences.append(f"A plain step takes about {plain['ms']:.2f} ms, bound by {plain['bound']} (ms: {shares}).")
    else:
        sentences.append(
            f"A plain step takes {plain['ms']:.2f} ms here, one of 16 rows {_wide(plain):.1f} times as long."
        )
    if plain.get("fits") is False:
        sentences.append(
            f"Weights and keys take {plain['memory'] / 1e9:.0f} GB: they do not fit. Take another chip, several of "
            "them, a smaller --dtype, --batch or --context."
        )
    return sentences


def _wide(plain: dict[str, Any]) -> float:
    return float(plain["rows_ms"]["16"]) / float(plain["ms"])


def _about(row: dict[str, Any]) -> str:
    best, name, alpha = row["best"], row["drafter"], row["alpha"]
    if best is None:
        return f"{name}: it drafted nothing."
    found = best["speedup"]
    what = f"{name} {row['verdict']}: {found['value']:.2f} × ({found['low']:.2f}-{found['high']:.2f}), "
    how = f"{best['tokens']['value']:.2f} tokens per step when it drafts {best['depth']} ahead. "
    return what + how + _why(row, alpha["value"], row["c"]) + f" It needs {row['needs']}."


def _why(row: dict[str, Any], alpha: float, c: float) -> str:
    rows, tokens = row["best"]["rows"], row["best"]["tokens"]["value"]
    if row["verdict"] == "does not pay" and alpha <= c:
        return f"Nothing pays: a drafted token is right with α = {alpha:.2f} and takes c = {c:.2f} of a plain step."
    if row["best"]["speedup"]["value"] < 1:
        return f"Verifying {rows:.1f} rows for {tokens:.2f} tokens takes longer than it gives."
    tree = row["tree"]
    shape = ""
    if tree and tree["nodes"] > tree["depth"] and tree["speedup"] > 1.02 * row["best"]["speedup"]["value"]:
        shape = f" A tree of {tree['nodes']} nodes, {tree['depth']} deep, would give {tree['speedup']:.2f} ×."
    return f"α is {alpha:.2f}, c {c:.3f}; it computes {row['operations']:.1f} times as much per token.{shape}"


def _when(document: Document, best: dict[str, Any]) -> list[str]:
    """From which batch size on the drafter pays, and from which on it no longer does."""
    batches, name = document.get("batches") or [], best["drafter"]
    if not batches:
        return []
    sizes = [each["batch"] for each in batches]
    paying = [each["batch"] for each in batches if each["speedup"].get(name, 1) > 1]
    if not paying:
        return [f"{name} pays with no number of sequences at a time."]
    sentences = []
    if paying[0] > sizes[0]:
        sentences.append(f"{name} pays from {paying[0]} sequences at a time on.")
    losing = [size for size in sizes if size > paying[-1]]
    if losing:
        sentences.append(f"From {losing[0]} sequences at a time on, {name} no longer pays: rows are not free any more.")
    return sentences or [f"{name} still pays with {sizes[-1]} sequences at a time."]


def _caveats(document: Document) -> list[str]:
    sentences = []
    if any(not row["answers"] for row in document["drafters"]):
        sentences.append(
            "α is a guess. Record your own prompts: slipstream bench --record FOLDER, then --survival FOLDER."
        )
    if document["plain"].get("parts_ms"):
        sentences.append(
            "The roofline knows neither the host nor the tiles of kernels: small models and large batches are slower "
            "than this. --device here measures."
        )
    return sentences


def _speedup(row: dict[str, Any]) -> dict[str, float]:
    return row["best"]["speedup"] if row["best"] else {"value": 0.0, "low": 0.0, "high": 0.0}


# ---- the terminal


def table(document: Document) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "", "× plain", "interval", "", "tokens/step", "ahead", "rows", "α", "c", "operations"):
        shown.add_column(name, justify="right" if name else "left")
    rows = best_first(document)
    longest = max([1.0, *(_speedup(row)["high"] for row in rows)])
    for row in rows:
        best, found = row["best"], _speedup(row)
        if best is None:
            shown.add_row(row["drafter"], row["verdict"])
            continue
        interval = f"{found['low']:.2f}-{found['high']:.2f}"
        cells = [f"{best['tokens']['value']:.2f}", str(best["depth"]), f"{best['rows']:.1f}"]
        cells += [f"{row['alpha']['value']:.2f}", f"{row['c']:.3f}", f"{row['operations']:.1f}"]
        style = "bold" if row["verdict"] == "pays" else None
        drawn = bar(found["value"], found["low"], found["high"], longest)
        shown.add_row(row["drafter"], row["verdict"], f"{found['value']:.2f}", interval, drawn, *cells, style=style)
    return shown


def bar(value: float, low: float, high: float, longest: float) -> str:
    """A bar from 0 to the value, with the interval around its end, and | at 1, plain decoding."""
    at = [min(BAR - 1, math.floor(BAR * each / longest)) for each in (low, value, high, 1.0)]
    letters = ["█" if i <= at[1] else "─" if i <= at[2] else " " for i in range(BAR)]
    letters = ["▓" if at[0] < i <= at[1] else letter for i, letter in enumerate(letters)]
    letters[at[3]] = "|"
    return "".join(letters)
