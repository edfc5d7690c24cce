"""Compare two benchmark documents: what got faster or slower beyond noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import OptionError

# What must be equal for two runs to be comparable.
SAME = ("model", "dtype", "device", "threads", "replayed")
OPTIONS = ("prompts", "limit", "categories", "batch", "draft_model")


def compare_files(before: Path, after: Path) -> Iterator[str]:
    """Sentences: warnings first, then one per contestant and category."""
    one, other = load(before), load(after)
    for key in SAME:
        a, b = one["provenance"].get(key), other["provenance"].get(key)
        if a != b:
            yield f"not the same {key}: {a} and {b}"
    for key in OPTIONS:
        a, b = ((document["provenance"].get("options") or {}).get(key) for document in (one, other))
        if a != b:
            yield f"not the same {key}: {a} and {b}"
    for key in ("decoding", "items", "repeats"):
        if one.get(key) != other.get(key):
            yield f"not the same {key}: {one.get(key)} and {other.get(key)}"
    for document, path in ((one, before), (other, after)):
        if document["missing"]:
            yield f"{path} is not complete: {document['missing']}"
    found = {(r["contestant"], r["category"]): r for r in one["rows"]}
    for row in other["rows"]:
        if (old := found.get((row["contestant"], row["category"]))) is not None:
            yield f"{row['category']:20} {row['contestant']:20} {verdict(old, row)}"


def verdict(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Compare two rows by their speed-ups over plain decoding in the same run, if both have it, so that a busier
    machine makes no difference. Otherwise by the spreads of the repeats. Without measured noise, nothing is said."""
    a, b = old["speedup"].get("none"), new["speedup"].get("none")
    if new["contestant"] != "none" and a and b and None not in (a["value"], b["value"]):
        change = f"{a['value']:.2f} → {b['value']:.2f} × plain"
        before, after = (a["low"], a["high"]), (b["low"], b["high"])
    else:
        change = f"{old['tokens_per_second']:.1f} → {new['tokens_per_second']:.1f} tokens/s"
        before, after = old["spread"], new["spread"]
    if before[0] == before[1] or after[0] == after[1]:  # of one repeat, or of one item, the noise is not known
        return f"{change}: too little was measured to tell"
    faster, slower = after[0] > before[1], after[1] < before[0]
    word = "FASTER" if faster else "SLOWER" if slower else "no difference beyond noise"
    return f"{change}: {word}"


def load(path: Path) -> dict[str, Any]:
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        document = json.loads(lines[-1]) if lines else None  # a saved output ends with the document
    except OSError as error:
        raise OptionError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"{path} does not end with a benchmark's JSON line: {error}") from error
    if not isinstance(document, dict) or document.get("benchmark") != "slipstream":
        raise OptionError(
            f"{path} is not a benchmark's document: give what `slipstream bench --json FILE` wrote, without --serve"
        )
    return document
