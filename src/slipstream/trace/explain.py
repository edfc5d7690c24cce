"""A trace's steps as sentences: which drafters were asked, what was expected, what was emitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from slipstream.trace.page import Line


def explain(lines: Sequence[Line]) -> Iterator[str]:
    """One sentence per step."""
    for line in lines:
        if "step" in line:
            yield f"step {line['step']}: " + "; ".join([*_decided(line), _came(line)])


def _decided(line: Line) -> list[str]:
    choice, nodes = line.get("choice"), len(line["nodes"]) - 1
    if choice is None:
        return [f"{nodes} drafted"] if line["step"] else ["the prompt"]
    if not choice["asked"]:
        return ["asked nobody: no draft is due"]
    faster = choice["rate"] / choice["plain"]
    asked = f"asked {', '.join(choice['asked'])}"
    if choice["resting"]:
        return [asked, "verified nothing: too little came of what this text's drafts promised"]
    return [asked, f"verified {nodes}, expecting {choice['tokens']:.2f} tokens at {faster:.2f} × plain speed"]


def _came(line: Line) -> str:
    """The emitted tokens, and the drafters of the accepted ones."""
    count, by = len(line["emitted"]), Counter(token["source"] for token in line["emitted"] if token["source"])
    drafted = f" ({', '.join(f'{n} by {name}' for name, n in by.items())})" if by else ""
    return f"came {count}{drafted}"
