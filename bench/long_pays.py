"""Where drafts with few keys pay: python bench/long_pays.py --accepted LOG… --shape LOG [--svg FILE]

Joins what `bench/long_texts.py accepted --json` and `shape --json` printed: tokens per step that were accepted on a
real text, from the first log that has a drafter with as many keys, and the time of steps of the 8B shape. Prints tokens
per step, the speed-up over plain decoding and how many tokens a step must give to pay, for every cell and depth; with
--svg also draws the best speed-up by batch, a line for each length of text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from long_texts import table
from slipstream.colours import COLOURS
from slipstream.evaluate.drawing import horizontal, scale, svg, text, ticks, vertical

Row = dict[str, Any]
STYLE = """text { font: 12px system-ui, sans-serif; fill: #24292f } .grid { stroke: #d0d7de; fill: none }
.one { stroke: #57606a; fill: none } .small { font-size: 11px; fill: #57606a } .end { text-anchor: end }
.middle { text-anchor: middle } .strong { font-weight: 600 }"""


def rows_of(log: Path) -> list[Row]:
    """The rows in a log, each once."""
    found: dict[str, Row] = {}
    for line in log.read_text("utf-8").split("\n"):
        if line.startswith('{"'):
            for row in json.loads(line).get("rows", []):
                found[json.dumps(row, sort_keys=True)] = row
    return list(found.values())


def name_of(drafter: str) -> str:
    """Without the depth."""
    return drafter.partition(" ×")[0]


def tokens_per_step(counts: Sequence[int], depth: int) -> float:
    """If drafts had ended at this depth."""
    return 1 + sum(min(n, depth) * count for n, count in enumerate(counts)) / sum(counts)


def joined(accepted: Sequence[Row], shape: Sequence[Row]) -> list[Row]:
    """The acceptance is that of the longest text which is no longer than the cell's, else of the shortest."""
    found = list[Row]()
    for row in shape:
        name = "spire" if row["drafter"].startswith("spire") else name_of(row["drafter"])
        known = [a for a in accepted if name_of(a["drafter"]) == name and "counts" in a]
        if row["drafter"] == "plain" or not known:
            continue
        near = min(known, key=lambda a: (a["context"] > row["context"], abs(a["context"] - row["context"])))
        tau, least = tokens_per_step(near["counts"], row["depth"]), row["pays from"]
        where = {key: row[key] for key in ("context", "batch", "drafter")}
        found.append({**where, "τ": tau, "of": near["context"], "× plain": tau / least, "pays from": least})
    return found


def best(rows: Sequence[Row], kind: str) -> dict[int, list[tuple[int, float]]]:
    """The best speed-ups of a kind of draft, by length of text: (batch, speed-up)."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["drafter"].startswith(kind):
            own = found.setdefault(row["context"], {})
            own[row["batch"]] = max(own.get(row["batch"], 0.0), row["× plain"])
    return {context: sorted(own.items()) for context, own in sorted(found.items())}


def chart(rows: Sequence[Row], width: int = 520, height: int = 300) -> str:
    """Speed-up by batch, on equal steps from one batch to the next."""
    kinds = [kind for kind in ("magicdec", "spire") if best(rows, kind)]
    batches = sorted({row["batch"] for row in rows})
    highest = max(1.2, *(row["× plain"] for row in rows))
    x, y = scale(0, len(batches) - 1, 40, width - 150), scale(0, highest, height - 36, 14)
    marks = ticks(0, highest, 6)
    parts = [f"<style>{escape(STYLE)}</style>", *(horizontal(y(m), 40, width - 150) for m in marks)]
    parts += [text(34, y(m) + 4, f"{m:g}×", "end") for m in marks]
    parts += [text(x(i), height - 18, str(batch), "middle") for i, batch in enumerate(batches)]
    parts += [f'<path class="one" d="M40 {y(1):.1f}H{width - 150}"/>', vertical(40, 14, height - 36, "grid")]
    parts.append(text((40 + width - 150) / 2, height - 3, "sequences", "small middle"))
    for kind in kinds:
        for number, (context, line) in enumerate(best(rows, kind).items()):
            points = [(x(batches.index(batch)), y(value)) for batch, value in line]
            dash = f'stroke-dasharray="{2 + 3 * number} {3 * number}"' if number else ""
            look = f'stroke="{COLOURS[kind][0]}" stroke-width="2" fill="none" {dash}'
            parts.append(f'<path {look} d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in points)}"/>')
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[kind][0]}"/>' for a, b in points]
            parts.append(text(points[-1][0] + 8, points[-1][1] + 4, f"{kind}, {context:,}", "small"))
    drawn = svg(width, height, parts, "Speed-up over plain decoding by batch, for each length of text")
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accepted", nargs="+", type=Path, required=True)
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    accepted = next(rows for log in given.accepted if (rows := rows_of(log)))
    for log in given.accepted[1:]:
        known = {name_of(row["drafter"]) for row in accepted}
        accepted += [row for row in rows_of(log) if name_of(row["drafter"]) not in known]
    rows = joined(accepted, rows_of(given.shape))
    table(rows)
    if given.svg:
        given.svg.write_text(chart(rows), "utf-8")


if __name__ == "__main__":
    main()
