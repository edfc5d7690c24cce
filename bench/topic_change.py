"""A stream of answers whose topic changes, and a head that learns it: tokens per step before, at and after the swap.

    python bench/topic_change.py --html topic.html

First general questions, then one kind of request that the head was hardly trained on. Training continues on the first
answers to those, and the new head is swapped in during an answer while the stream goes on. Every text is compared with
plain decoding. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream import LLM
from slipstream.colours import colour
from slipstream.evaluate.charts import SHAPES, Mark
from slipstream.evaluate.drawing import horizontal, scale, svg, text, ticks, vertical
from slipstream.evaluate.page import figure, headline, sheet
from slipstream.evaluate.report import provenance
from slipstream.evaluate.workloads import builtin
from slipstream.heads.registry import heads_for
from slipstream.loading.models import load_model
from slipstream.training.loop import TrainingPlan
from slipstream.training.train import Lesson, train

ASK = "Write an XML document that describes three {}."
THINGS = (
    *("books", "rivers", "employees", "orders", "planets", "recipes", "flights", "songs", "patients", "trees"),
    *("invoices", "teachers", "museums", "bicycles", "hotels", "elections", "bridges", "vaccines", "ships", "letters"),
    *(
        "comets",
        "bakeries",
        "parking lots",
        "violins",
        "volcanoes",
        "tickets",
        "gardens",
        "lighthouses",
        "maps",
        "tunnels",
    ),
)
PHASES = ("known topic", "new topic", "swapped within", "new topic, learnt")


@dataclass(frozen=True)
class Point:
    phase: str
    tokens: int
    steps: int
    same: bool  # as plain decoding

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--answers", type=int, default=8, help="of each phase")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--html", type=Path, help="where the page goes")
    given = parser.parse_args()
    model, tokenizer = load_model(given.model, dtype=given.dtype)
    kind, start = next(head for head in heads_for(model) if head[0] == "eagle3")
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(model, tokenizer, "none") as plain,
        LLM(model, tokenizer, kind, drafter_path=start) as llm,
    ):
        points, took = stream(llm, plain, start, Path(folder), given)
    found = {phase: mean([p for p in points if p.phase == phase]) for phase in PHASES}
    for phase, value in found.items():
        print(f"{phase:20} {value:.2f} tokens per step")
    same = sum(p.same for p in points)
    print(f"{same} of {len(points)} texts are those of plain decoding; training took {took:.0f} s")
    about = provenance(llm.name, model)
    if given.html is not None:
        given.html.write_text(page(points, {**about, "options": vars(given) | {"html": str(given.html)}}))
    line = {"phases": found, "same": same, "answers": len(points), "training_seconds": took}
    print(json.dumps({**line, "points": [asdict(p) for p in points], "provenance": about}, default=str))


def stream(llm: LLM, plain: LLM, start: Path, folder: Path, given: Any) -> tuple[list[Point], float]:
    """The answers in order, and the seconds of training."""
    n, new = given.answers, [ASK.format(thing) for thing in THINGS]
    points = [answer(llm, plain, p.turns[0], PHASES[0], given.tokens) for p in builtin()[:n]]
    lines = []
    for i, prompt in enumerate(new[:n]):
        points.append(answer(llm, plain, prompt, PHASES[1], given.tokens))
        # As `collect` writes it: the target's own words, which any exact drafter wrote.
        asked, said = llm.request(prompt).tokens, llm.generate(prompt, max_new_tokens=4 * given.tokens).tokens
        span = [[len(asked), len(asked) + len(said)]]
        lines.append({"id": str(i), "tokens": asked + said, "answers": span, "model": llm.name})
    data = folder / "answers.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    clock = perf_counter()
    every = max(1, given.steps)
    plan = TrainingPlan(
        steps=given.steps, batch_tokens=given.batch_tokens, rate=given.rate, warmup=5, eval_every=every, log_every=every
    )
    train(llm.model, [data], folder / "head", Lesson("eagle3"), plan, start=start)
    took = perf_counter() - clock
    points.append(answer(llm, plain, new[n], PHASES[2], given.tokens, folder / "head"))
    points += [answer(llm, plain, prompt, PHASES[3], given.tokens) for prompt in new[n + 1 : 2 * n + 1]]
    return points, took


def answer(llm: LLM, plain: LLM, prompt: str, phase: str, tokens: int, head: Path | None = None) -> Point:
    """head: swapped in while it is being written."""
    answering = llm.stream(prompt, max_new_tokens=tokens)
    for i, _ in enumerate(answering):
        if head is not None and i == 0:
            llm.swap_head(head)
    found = answering.result
    same = found.tokens == plain.generate(prompt, max_new_tokens=tokens).tokens
    return Point(phase, found.stats.new_tokens, found.stats.steps, same)


def mean(points: list[Point]) -> float:
    return sum(p.tokens for p in points) / max(1, sum(p.steps for p in points))


# ---- the page


def page(points: list[Point], about: dict[str, Any]) -> str:
    said = "A stream of answers whose topic changes, and a head that learns the new one and is swapped in."
    shown = [(f"{mean([p for p in points if p.phase == phase]):.2f}", escape(phase)) for phase in PHASES]
    marks = {phase: Mark(colour(name), SHAPES[i]) for i, (phase, name) in enumerate(zip(PHASES, NAMES, strict=True))}
    drawn = figure(
        "stream",
        "[tokens per step|Tokens per step]",
        "Answer by answer; the lines are the phases' means.",
        partial(chart, points, marks),
        {escape(phase): mark.mark(7, 6, kind="key") for phase, mark in marks.items()},
    )
    same = sum(p.same for p in points)
    notes = f'<ul class="notes"><li>{same} of {len(points)} texts are those of plain decoding.</li></ul>'
    return sheet({"provenance": about}, "topic change", said, headline(shown), notes, drawn, "")


NAMES = ("suffix", "pld", "eagle3", "model")  # whose colours stay apart for all eyes


def chart(points: list[Point], marks: dict[str, Mark], width: int) -> str:
    top, bottom, left, right = 26, 230, 34, 16
    levels = ticks(1.0, max(p.per_step for p in points), 5, around=True)
    x, y = scale(0, len(points) - 1, left + 8, width - right), scale(levels[0], levels[-1], bottom, top)
    parts = [horizontal(y(level), left, width - right) for level in levels]
    parts += [text(left - 7, y(level) + 4, f"{level:g}", "end") for level in levels]
    for phase, mark in marks.items():
        places = [i for i, p in enumerate(points) if p.phase == phase]
        middle = y(mean([points[i] for i in places]))
        parts.append(f'<path class="whisker" {mark.paint} d="M{x(places[0]):.1f} {middle:.1f}H{x(places[-1]):.1f}"/>')
        parts += [mark.mark(x(i), y(points[i].per_step)) for i in places]
        if phase == PHASES[2]:
            parts.append(vertical(x(places[0]), top, bottom, "grid") + text(x(places[0]), 14, "swap", "middle"))
    parts.append(text(width - right, bottom + 22, "answers", "end"))
    return svg(width, bottom + 30, parts, "Tokens per step, answer by answer")


if __name__ == "__main__":
    main()
