"""A run of `tune` as one self-contained page: curves of training, the head's speed-up, and the time of each phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from slipstream.colours import colour
from slipstream.evaluate.charts import PLAIN, SHAPES, Mark, Row, speedups
from slipstream.evaluate.drawing import Places, horizontal, scale, svg, text, ticks, vertical, width_of
from slipstream.evaluate.glossary import term
from slipstream.evaluate.metrics import ALL
from slipstream.evaluate.page import by_category, figure, headline, number, numbers, sheet
from slipstream.evaluate.report import provenance
from slipstream.training import log
from slipstream.training.tuned import CONTESTANTS, OWN, Trial, Tuned, gained, interval
from slipstream.user_files import write_text

PAGE = "tune.html"
DEPTH_COLOURS = ("suffix", "pld", "eagle3", "model", "rest")  # five that colour-blind readers can tell apart
PHASES = ("preparing", "answering", "training", "trying")

Points = Sequence[tuple[float, float]]


def write_page(run: Tuned, model: Any, folder: Path) -> None:
    write_text(folder / PAGE, page(run, provenance(run.model, model), training_log(folder)), errors="replace")


def training_log(folder: Path) -> list[dict[str, Any]]:
    return log.read(folder / "head" / log.NAME)


def page(run: Tuned, about: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    expected = {} if run.plan is None else {"expected": run.plan.in_words(run.settings.minutes)}
    document = {"provenance": {**about, **expected, "options": asdict(run.settings)}}
    kind = run.settings.head
    texts = "prompts" if run.settings.store is None else "answers of a datastore"
    subtitle = f"A{'n' * (kind[0] in 'ae')} {kind} head from {run.prompts:,} {texts}, "
    subtitle += f"tried on {len(run.trials)} prompts that it had not seen."
    return sheet(document, "tune", escape(subtitle), _figures(run), _notes(run), _charts(run, lines), _table(run))


# ---- the head of the page


def _figures(run: Tuned) -> str:
    figures = []
    if run.trials:
        for over, name in (("plain", "plain decoding"), ("without", names(run)["without"])):
            low, high = run.interval(over)
            surely = f"({term('95%', '95%', f'head-{over}')}: {low:.2f}–{high:.2f})"
            faster = term("speed-up", f"over {escape(name)}", f"head-{over}")
            figures.append((f"{run.gain(over):.2f}×", f"{escape(names(run)['with'])} {faster} {surely}"))
    if run.accuracy:
        figures.append((f"{run.accuracy[0]:.0%}", "of the next tokens guessed right"))
    return headline(figures)


def _notes(run: Tuned) -> str:
    notes = []
    if run.registered is None:
        done = "answers are still being collected"
        if run.accuracy:
            done = "the head is trained, but not tried to the end"
        elif "training" in run.spent:
            done = "the head is not trained to the end"
        notes.append(f'<li class="warning">Incomplete: {done}. The same command goes on from here.</li>')
    elif run.registered:
        notes.append("<li>The head is registered: auto asks it for this model from now on.</li>")
    elif run.settings.start is not None:
        notes.append("<li>That the new head is better is not shown, so the old one stays.</li>")
    else:
        notes.append("<li>That the head pays is not shown, so it is not registered.</li>")
    if differ := sum(not trial.same for trial in run.trials):
        notes.append(f'<li class="differs">{differ} of {len(run.trials)} texts differ from plain decoding.</li>')
    return f'<ul class="notes">{"".join(notes)}</ul>'


# ---- the charts


def names(run: Tuned) -> dict[str, str]:
    """The contestants' names on the page."""
    kind = run.settings.head
    if run.settings.start is None:
        return {"plain": PLAIN, "without": "auto before", "with": f"auto with the {kind} head"}
    return {"plain": PLAIN, "without": "auto, old head", "with": "auto, new head"}


def looks(run: Tuned) -> dict[str, Mark]:
    plain, without, new = names(run).values()
    return {
        plain: Mark(colour(PLAIN), SHAPES[0], plain=True),
        without: Mark(colour("auto"), SHAPES[1]),
        new: Mark(colour(run.settings.head), SHAPES[2]),
    }


def _charts(run: Tuned, lines: Sequence[dict[str, Any]]) -> str:
    return f'<div class="charts"><div>{_training_charts(run, lines)}</div><div>{_trial_charts(run)}</div></div>'


def _training_charts(run: Tuned, lines: Sequence[dict[str, Any]]) -> str:
    depths = [Mark(colour(DEPTH_COLOURS[i % 5]), SHAPES[i % len(SHAPES)]) for i in range(len(run.accuracy) or 5)]
    loss = [(line["seconds"] / 60, line["loss"]) for line in lines if "loss" in line]
    looked = [line for line in lines if "accuracy" in line]
    right = [
        (mark, [(line["seconds"] / 60, line["accuracy"][i]) for line in looked if i < len(line["accuracy"])])
        for i, mark in enumerate(depths)
    ]
    found = figure(
        "loss",
        "Loss",
        "Of training, over its minutes.",
        partial(curves, [(Mark(colour(run.settings.head), SHAPES[0]), loss)], "loss", False),
        {},
    ) + figure(
        "right",
        "Right guesses while training",
        "The share of tokens of held-out answers that the head guessed right, so many tokens ahead.",
        partial(curves, right, "right guesses", True),
        {f"t+{i}": mark.mark(7, 6, kind="key") for i, mark in enumerate(depths, 1)},
    )
    ends = {f"t+{i}": share for i, share in enumerate(run.accuracy, 1)}
    found += figure(
        "ends",
        "Right guesses at the end",
        "By how many tokens ahead.",
        partial(bars, ends, [mark.colour for mark in depths], "{:.0%}"),
        {},
    )
    return found


def _trial_charts(run: Tuned) -> str:
    look, called = looks(run), names(run)
    found = figure(
        "speedups",
        "[speed-up|Speed-up] over plain decoding",
        "On prompts that the head has not seen: own ones, like those it learnt from, and built-in ones by category. "
        "Whiskers are [95%|95% intervals].",
        partial(speedups, rows(run), look),
        {},
    )
    found += figure(
        "yield",
        "[tokens per step|Tokens per step]",
        "On the same prompts, by category.",
        partial(yields, run),
        {escape(called[who]): look[called[who]].mark(7, 6, kind="key") for who in CONTESTANTS},
    )
    spent = {phase: run.spent[phase] / 60 for phase in PHASES if phase in run.spent}
    found += figure(
        "phases",
        "Where the time went",
        "Minutes of each phase.",
        partial(bars, spent, [colour(PLAIN)] * len(spent), "{:.1f} min"),
        {},
    )
    return found


def curves(series: Sequence[tuple[Mark, Points]], unit: str, share: bool, width: int) -> str:
    """A line for each series over minutes. The axis begins at 0, so that a small change looks small."""
    points = [point for _, found in series for point in found]
    if not points:
        return ""
    top, bottom, right = 34, 210, 16
    show = "{:.0%}" if share else "{:g}"
    marks = ticks(0, max(y for _, y in points) or 1.0, 5, around=True)
    left = 9 + max(width_of(show.format(m)) for m in marks)
    minutes = ticks(0, max(x for x, _ in points) or 1.0, 6, around=True)
    x, y = scale(0, minutes[-1], left, width - right), scale(marks[0], marks[-1], bottom, top)
    places = Places()
    parts = [horizontal(y(m), left, width - right) for m in marks]
    parts += [places.label(left - 7, y(m) + 4, show.format(m), "end") for m in marks]
    parts += [vertical(x(m), top, bottom, "grid") for m in minutes]
    parts += [places.label(x(m), bottom + 17, f"{m:g}", "middle") for m in minutes]
    parts.append(text(0, 14, unit) + text(width - right, bottom + 34, "minutes", "end"))
    for mark, found in series:
        parts.append(mark.line([(x(at), y(up)) for at, up in found]))
        parts += [mark.mark(x(at), y(up), 0.8) for at, up in (found if len(found) < 20 else found[-1:])]
    return svg(width, bottom + 40, parts, f"{unit} by minutes of training")


def bars(values: dict[str, float], colours: Sequence[str], show: str, width: int) -> str:
    """A bar for each value; the largest fills the width."""
    if not values:
        return ""
    left, right, line, thick = 14 + max(width_of(name) for name in values), 64, 24, 14
    x = scale(0, max(values.values()) or 1.0, left, width - right)
    parts = []
    for i, (name, value) in enumerate(values.items()):
        top = 4 + i * line
        size = f'width="{max(x(value) - left, 0.5):.1f}" height="{thick}"'
        parts.append(text(0, top + 11, name))
        parts.append(f'<rect class="bar" style="--c: var({colours[i]})" x="{left:.1f}" y="{top}" {size}/>')
        parts.append(text(x(value) + 7, top + 11, show.format(value), "strong"))
    return svg(width, len(values) * line + 4, parts, ", ".join(f"{n} {show.format(v)}" for n, v in values.items()))


def yields(run: Tuned, width: int) -> str:
    """A line per category with a mark per contestant: tokens per step."""
    look, called = looks(run), names(run)
    found: list[tuple[str, list[tuple[str, float]]]] = []
    for kind in [ALL, *run.kinds()]:
        measured = [(who, run.tokens_per_step(who, None if kind == ALL else kind)) for who in CONTESTANTS]
        found.append((kind, [(who, known) for who, known in measured if known is not None]))
    values = [value for _, each in found for _, value in each]
    if not values:
        return ""
    left = min(14 + round(max(width_of(kind, "strong") for kind, _ in found)), width // 3)
    right, line, top = 46, 24, 24
    marks = ticks(1.0, max(values), min((width - left - right) // 42, 6), around=True)
    x = scale(marks[0], marks[-1], left, width - right)
    bottom = top + line * len(found)
    parts = [vertical(x(m), top, bottom, "grid") for m in marks]
    places = Places()
    parts += [places.label(x(m), at, f"{m:g}", "middle") for at in (top - 8, bottom + 16) for m in marks]
    for i, (kind, each) in enumerate(found):
        y, weight = top + line * (i + 0.5), "strong" if kind == ALL else ""
        parts.append(text(0, y + 4, kind, weight, room=left - 8) + horizontal(y, left, width - right))
        parts += [look[called[who]].mark(x(value), y) for who, value in each]
        shown = f"{each[-1][1]:.2f}" if each and each[-1][0] == "with" else "–"
        parts.append(text(width, y + 4, shown, f"end {weight}"))
    return svg(width, bottom + 24, parts, "Tokens per step by category of prompt")


# ---- the numbers


def rows(run: Tuned) -> list[Row]:
    """Rows like a benchmark's, for its charts."""
    if not run.trials:
        return []
    found = []
    for kind in [ALL, *run.kinds()]:
        trials = [trial for trial in run.trials if kind in (ALL, trial.kind)]
        found += [_row(run, kind, who, trials) for who in CONTESTANTS]
    return found


def _row(run: Tuned, kind: str, who: str, trials: Sequence[Trial]) -> Row:
    over = {
        names(run)[other]: dict(
            zip(("value", "low", "high"), (gained(trials, other, who), *interval(trials, other, who)), strict=True),
            items=len(trials),
        )
        for other in ("plain", "without")
        if other != who
    }
    return {
        "contestant": names(run)[who],
        "category": kind,
        "answers": len(trials),
        "speedup": over,
        "tokens_per_step": run.tokens_per_step(who, None if kind == ALL else kind),
        "ms_per_token": 1e3 * sum(trial.seconds[who] for trial in trials) / len(trials),
        "texts_equal": sum(trial.same for trial in trials),
    }


def _table(run: Tuned) -> str:
    if not run.trials:
        return ""
    heads: list[tuple[tuple[str, str], ...]]
    heads = [(("contestant", "contestant"),), (("answers", "answers"),)]
    heads += [
        (("tokens per step", "tokens <small>per step</small>"),),
        (("time per token", "ms <small>a token</small>"),),
    ]
    heads += [
        (("speed-up", f"× {escape(names(run)[over])}"), ("95%", "<small>95%</small>")) for over in CONTESTANTS[:2]
    ]
    heads += [(("same texts", "same <small>texts</small>"),)]

    def cells(row: Row) -> list[str]:
        found = [str(row["answers"]), number(row["tokens_per_step"]), number(row["ms_per_token"], 1)]
        for over in CONTESTANTS[:2]:
            ratio = row["speedup"].get(names(run)[over])
            found.append(
                f"{ratio['value']:.2f} <small>{ratio['low']:.2f}–{ratio['high']:.2f}</small>" if ratio else "–"
            )
        return [*found, f"{row['texts_equal']}/{row['answers']}"]

    called = {OWN: "own prompts"}
    return numbers(heads, by_category(rows(run), len(heads), cells, lambda name: called.get(name, name)))
