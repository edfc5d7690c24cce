"""The report of a benchmark: a table, and one JSON document with the numbers and their provenance."""

from __future__ import annotations

import json
import math
import platform
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from slipstream.evaluate.contestants import Decoding
from slipstream.evaluate.metrics import ALL, Ratio, Row
from slipstream.targets import Target
from slipstream.targets.timing import cpu_name
from slipstream.version import __version__

VERSION = 1


def document(
    rows: Sequence[Row],
    provenance: dict[str, Any],
    device: torch.device,
    decoding: Decoding,
    items: int,
    repeats: int,
    options: dict[str, Any],
    missing: str | None,
) -> dict[str, Any]:
    """Everything measured, ready for JSON."""
    return finite(
        {
            "benchmark": "slipstream",
            "version": VERSION,
            "provenance": {**provenance, "options": options},
            "decoding": asdict(decoding),
            "items": items,
            "repeats": repeats,
            "complete": missing is None,
            "missing": missing,
            "peak_memory_mb": round(peak_memory(device) / 1e6, 1),
            "rows": [asdict(row) for row in rows],
        }
    )


def provenance(model: str, target: Target) -> dict[str, Any]:
    device = target.device
    return {
        "slipstream": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "model": model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the checkout that this runs from, with + if files were changed; None outside of a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes, of the GPU or else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(rows: Sequence[Row]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    speeds = ("tokens/s", "spread", "× none", "95% (of)", "× hf")
    for name in ("", "", *speeds, "M", "accepted", "yield", "first ms", "equal"):
        shown.add_column(name, justify="right" if name else "left")
    last = None
    for row in rows:
        none, hf = row.speedup.get("none"), row.speedup.get("hf")
        shown.add_row(
            row.category if row.category != last else "",
            row.contestant,
            f"{row.tokens_per_second:.1f}",
            f"{row.spread[0]:.1f}-{row.spread[1]:.1f}",
            _times(none),
            f"{none.low:.2f}-{none.high:.2f} ({none.items})" if none else "",
            _times(hf),
            _number(row.tokens_per_step),
            _number(row.acceptance_rate),
            _number(row.node_yield),
            f"{row.first_token_ms:.0f}",
            f"{row.texts_equal}/{row.texts_compared}" if row.texts_compared else "",
            style="bold" if row.category == ALL else None,
        )
        last = row.category
    return shown


def stages(rows: Sequence[Row]) -> list[str]:
    """The time of a step by stage, for each contestant that measures it."""
    sentences = []
    for row in rows:
        if row.category == ALL and row.unaccounted is not None:
            parts = ", ".join(f"{name} {ms:.2f}" for name, ms in row.ms_per_step.items())
            sentences.append(f"{row.contestant}: ms per step: {parts} ({row.unaccounted:.1%})")
    return sentences


def _times(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}" if ratio else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def finite(value: Any) -> Any:
    """Replace NaN and infinite numbers, which JSON doesn't have, by null, and round the others."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def line(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False)
