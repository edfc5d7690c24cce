"""Describe and check the head in a folder without running it. Of its target only the sizes are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import DrafterError
from slipstream.heads.base import Head, Lender
from slipstream.heads.checkpoint import find_folder, read_config
from slipstream.heads.dflash import DFlash
from slipstream.heads.eagle3 import Eagle3
from slipstream.heads.layer_config import LayerConfig
from slipstream.heads.layouts import blank_head, find_head
from slipstream.heads.medusa import Medusa
from slipstream.heads.published import Published
from slipstream.heads.spire import Spire


@dataclass(frozen=True)
class HeadReport:
    kind: str
    layout: str
    target: str | None  # the name in its files
    reads: str
    guesses: str
    parameters: int  # its own
    size: int  # bytes of the parameters in the files
    precision: str
    borrows: tuple[str, ...]  # tensors taken from its target
    odd: tuple[str, ...]
    misfit: str | None = None  # why it can't draft for the given model; None: it can, or no model was given


def check_head(source: str | Path, model: Any = None) -> HeadReport:
    """Raises if the head can't be loaded. model: its target, whose weights may be missing (on the meta device)."""
    folder = find_folder(source)
    config = read_config(folder)
    found = find_head(folder, config, None if model is None else Lender.of(model).vocab_size)
    head, misfit = blank_head(folder, found), None
    target = head.config.target
    if model is not None:
        try:
            head.bind(model)
        except DrafterError as error:
            misfit = str(error)
    parameters = [found.tensors[name] for name, _ in head.named_parameters()]
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters})
    return HeadReport(
        kind=head.kind,
        layout=found.layout,
        target=target,
        reads=_reads(head),
        guesses=_guesses(head),
        parameters=sum(tensor.numel() for tensor in parameters),
        size=sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        precision=" and ".join(types),
        borrows=tuple(sorted(head.borrowed)),
        odd=(*found.odd, *_odd(config, found, head), *_other_name(target, model)),
        misfit=misfit,
    )


def _reads(head: Head) -> str:
    """Which states the head reads, and how far back it attends."""
    text = "the last hidden state"
    if isinstance(head, Eagle3):
        text = f"hidden states {_states(head)}"
    elif isinstance(head, DFlash | Spire):
        text = f"hidden states {', '.join(map(str, head.config.aux_layers))}"
    config = head.config
    if isinstance(config, LayerConfig):
        count = config.num_hidden_layers
        text += f", through {count} layer{'s' if count > 1 else ''}"
        seen = sorted({window for window in config.windows if window is not None})
        if isinstance(head, Spire) and head.config.recent is not None:
            text += f", of the first {head.config.sinks:,} and the latest {head.config.recent:,} tokens"
        if seen:
            text += f" that see{'s' if count == 1 else ''} the last {seen[0]:,} positions"
    return text


def _states(head: Eagle3) -> str:
    """The states by transformers' numbers, or the rule for them."""
    count = head.config.target_layers
    if head.config.aux_layers is None and (count is None or count < 6):
        return "2, L/2 and L - 3 of a target with L layers"
    numbers = head.config.aux_layers or head.aux_ids(count or 0)
    return ", ".join(f"{n} (before the final norm)" if n == count else str(n) for n in numbers)


def _guesses(head: Head) -> str:
    ahead = "any number of tokens" if head.reach is None else f"{head.reach} tokens"
    few = getattr(head.config, "draft_vocab_size", None) or head.config.vocab_size
    among = f"{few:,} of {head.config.vocab_size:,}" if few < head.config.vocab_size else f"all {few:,}"
    return f"{ahead} ahead, among {among}"


def _odd(config: Mapping[str, Any], found: Published, head: Head) -> list[str]:
    """Possible mistakes, as sentences."""
    odd = []
    if isinstance(head, Medusa) and "slipstream" not in config:
        stated = config.get("medusa_num_heads", config.get("num_heads"))
        if stated is not None and stated != head.config.heads:
            odd.append(f"config.json says {stated} heads, the file holds {head.config.heads}: these count")
    nothing = [found.spell(n) for n, t in found.tensors.items() if t.ndim == 2 and not bool(t.any())]
    if nothing:
        odd.append(f"all numbers of {', '.join(sorted(nothing)[:4])} are 0: is it untrained?")
    if len({t.dtype for name, t in found.tensors.items() if t.is_floating_point()}) > 1:
        odd.append("its tensors have several precisions: it runs in its target's")
    return odd


def _other_name(target: str | None, model: Any) -> list[str]:
    if target is None or model is None or target == (name := Lender.of(model).name):
        return []
    return [f"its files name {target} as its target, not {name}"]


def short(count: int) -> str:
    """5,123,456 -> 5.1M."""
    power = min(int(math.log10(max(count, 1))) // 3, 3)
    return f"{count / 1000**power:.3g}{('', 'K', 'M', 'B')[power]}"
