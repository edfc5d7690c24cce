"""Traces as one self-contained HTML page: `read` checks a file, `write_page` puts the page together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from slipstream import colours
from slipstream.errors import OptionError
from slipstream.user_files import write_text

FORMAT, VERSION = "slipstream-trace", 1
# Concatenated in this order.
SCRIPTS = ("tokens.js", "runs.js", "answer.js", "timeline.js", "step.js", "play.js", "page.js")
STYLES = ("tokens.css", "page.css")

Line = dict[str, Any]

NUMBER = (int, float)
HEADER = {"model": str, "drafter": str, "accept": str, "exact": bool, "prompt": str, "prompt_tokens": int}
STEP = {"step": int, "first": int, "nodes": list, "path": list, "emitted": list}
TIMES = {"draft_ms": NUMBER, "verify_ms": NUMBER, "host_ms": NUMBER}
NODE = {"token": int, "text": str, "parent": int, "score": (*NUMBER, type(None)), "sources": dict}
CHOICE = {"asked": list, "resting": bool, "nodes": int, "tokens": NUMBER, "rate": NUMBER, "plain": NUMBER}
EMITTED = {"token": int, "text": str, "source": (str, type(None))}
END = {"finish": str, "text": str, "stats": dict}

# In JSON these characters only occur inside strings, where an escape is equivalent. Without them no text can end the
# script element or open a comment in it. The json module escapes everything outside ASCII.
ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


class _BrokenError(Exception):
    """A fault in a line; `read` adds the file and the line's number."""


def read(path: str | Path) -> list[Line]:
    """The lines of a trace: header, steps, and the end if the run was completed."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"{path}: can't read the trace: {error.strerror}. Give a file written as a trace") from error
    *whole, rest = raw.split(b"\n")
    lines: list[Line] = []
    steps = emitted = 0
    for number, data in enumerate(whole if _is_cut(rest) else [*whole, rest], start=1):
        try:
            line = _parse(data)
            if not lines:
                _check_header(line)
            elif "end" in lines[-1]:
                raise _BrokenError("something follows the end of the trace; keep one trace per file")
            elif "end" in line:
                _check_end(line)
            else:
                _check_step(line, steps, emitted)
                steps, emitted = steps + 1, emitted + len(line["emitted"])
        except _BrokenError as error:
            raise OptionError(f"{path}, line {number}: {error}") from error
        lines.append(line)
    if not lines:
        raise OptionError(f"{path}, line 1: no whole header, so nothing to show; record the generation again")
    return lines


def write_page(lines: Sequence[Line], path: Path, against: Sequence[Line] | None = None) -> None:
    """Write the page for a trace, next to a second one if there is one. It needs no other file."""
    runs = [list(lines)] if against is None else [list(lines), list(against)]
    shown = {"runs": runs, "colours": {name: colours.colour(name) for run in runs for name in sorted(_drafters(run))}}
    data = json.dumps(shown, allow_nan=False, separators=(",", ":")).translate(ESCAPES)
    page = part("page.html").replace("@STYLE@", colours.STYLE + "\n".join(map(part, STYLES)))
    page = page.replace("@SCRIPT@", "\n".join(map(part, SCRIPTS)))
    # The data is inserted last, so that its text is not searched for placeholders.
    before, after = page.split("@TRACE@")
    write_text(path, before + data + after)


def part(name: str) -> str:
    """A file that pages are made of."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip()


def _drafters(lines: Sequence[Line]) -> set[str]:
    """All drafters in a trace: its own, and the sources of nodes and tokens."""
    steps = [line for line in lines if "step" in line]
    proposed = {name for step in steps for node in step["nodes"] for name in node["sources"]}
    kept = {
        name for step in steps for token in step["emitted"] if token["source"] for name in token["source"].split("+")
    }
    return {lines[0]["drafter"]} | proposed | kept


# ---- checking


def _is_cut(rest: bytes) -> bool:
    """Whether the text after the last line break is incomplete. A complete line without a line break is accepted."""
    try:
        _parse(rest)
    except _BrokenError:
        return True
    return False


def _parse(data: bytes) -> Line:
    try:
        line = json.loads(data.decode(), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise _BrokenError(f"not JSON ({error}); give a trace file, or record the generation again") from error
    if not isinstance(line, dict):
        raise _BrokenError(f"found {_kind(line)}, needed an object; give a trace file")
    return line


def _finite(number: str) -> float:
    """Refuse NaN, Infinity and 1e999, which Python's json reads and a browser's does not."""
    if not isfinite(value := float(number)):
        raise ValueError(f"{number} is no finite number; write null for what isn't known")
    return value


def _check_header(line: Line) -> None:
    if line.get("format") != FORMAT:
        raise _BrokenError(f'not a trace: its first line must say "format": "{FORMAT}"; give a trace file')
    if line.get("version") != VERSION:
        raise _BrokenError(
            f"version {line.get('version')!r} of the format, this slipstream reads {VERSION}; "
            "use the slipstream that wrote it, or record the generation again"
        )
    _check_keys(line, HEADER, "the header")


def _check_step(line: Line, steps: int, emitted: int) -> None:
    _check_keys(line, STEP | TIMES, "the step")
    _need(line["step"] == steps, f"step {line['step']}, needed {steps}: lines are missing or out of order")
    _need(line["first"] == emitted, f"first is {line['first']}, but {emitted} tokens were emitted before")
    nodes, path = line["nodes"], line["path"]
    for i, node in enumerate(nodes):
        _check_keys(node, NODE, f"node {i}")
        _need(node["parent"] == -1 if i == 0 else 0 <= node["parent"] < i, f"node {i} has parent {node['parent']}")
        for name, score in node["sources"].items():
            _need(score is None or _is(score, NUMBER), f"node {i} has {_kind(score)} as the score from {name!r}")
    _need(path[:1] == [0], "the path must start at node 0, the root")
    for i, node in enumerate(path):
        _need(_is(node, int) and 0 <= node < len(nodes), f"the path goes to node {node!r} of {len(nodes)}")
        _need(
            i == 0 or nodes[node]["parent"] == path[i - 1], f"the path goes to node {node}, no child of the one before"
        )
    if line.get("choice") is not None:
        _check_keys(line["choice"], CHOICE, "the choice")
        _need(all(isinstance(name, str) for name in line["choice"]["asked"]), "asked must be names of sources")
    for i, token in enumerate(line["emitted"]):
        _check_keys(token, EMITTED, f"emitted token {i}")
    _need(len(line["emitted"]) == len(path), f"{len(line['emitted'])} tokens emitted on a path of {len(path)} nodes")


def _check_end(line: Line) -> None:
    _need(line["end"] is True, '"end" must be true')
    _check_keys(line, END, "the end")


def _check_keys(found: Any, needed: dict[str, Any], what: str) -> None:
    _need(isinstance(found, dict), f"{what} is {_kind(found)}, needed an object")
    for key, kind in needed.items():
        _need(key in found, f'{what} lacks "{key}"')
        _need(_is(found[key], kind), f'{what} has {_kind(found[key])} as "{key}"')


def _is(value: Any, kind: Any) -> bool:
    """isinstance, except that true and false are not numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _BrokenError(f"{otherwise}; record the generation again")
