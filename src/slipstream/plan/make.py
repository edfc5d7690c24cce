"""Make the plan's document from the command's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import OptionError
from slipstream.evaluate.report import commit, finite
from slipstream.llm import LLM
from slipstream.loading import embedded
from slipstream.loading.models import blank_model, load_model
from slipstream.plan import advice
from slipstream.plan.here import here
from slipstream.plan.roofline import SIZES, Shape, chip, head_shape, shape_of
from slipstream.plan.survival import Survival, from_recording, from_traces, together
from slipstream.plan.theory import Interval
from slipstream.version import __version__

NAME, VERSION = "slipstream plan", 1
CONTEXT = 512  # tokens of a text, if none are asked for


@dataclass(frozen=True)
class Asked:
    """What to plan for: the command's options."""

    model: str | None = None  # None: the embedded one
    drafters: list[str] = field(default_factory=list)  # none: all that can be planned for
    batch: int = 1
    context: int | None = None  # None: `CONTEXT`, or here the text that `auto` was timed after
    device: str = "here"
    dtype: str | None = None
    survival: list[Path] = field(default_factory=list)  # traces and recordings
    alpha: Interval | None = None
    draft_model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of drafters that are replayed


def make(asked: Asked) -> dict[str, Any]:
    """The plan, ready for JSON."""
    llm = _loaded(asked) if asked.device == "here" else None
    shape = shape_of_model(asked.model) if llm is None else _shape(llm.model)
    counted = _counted(asked, llm)
    small = shape_of_model(asked.draft_model) if asked.draft_model else None
    on = at = None  # the chip, and the place by batch: of a named device
    if llm is not None:
        place = here(llm, asked.batch, counted)
        known = {*llm.engine.drafter.parts, "pld", "suffix"}  # type: ignore[attr-defined]
    else:
        on = chip(asked.device)
        dtype = asked.dtype or on.dtype
        if dtype not in SIZES:
            raise OptionError(f"--dtype {dtype!r} is unknown: use {', '.join(SIZES)}")
        at = partial(
            advice.on_chip, asked.device, on, shape, context=asked.context or CONTEXT, dtype=dtype, draft=small
        )
        place = at(asked.batch)
        known = set(advice.NEEDS) - ({"model"} if small is None else set())
    if unknown := [name for name in asked.drafters if name not in advice.NEEDS and name not in counted]:
        raise OptionError(f"--drafter {unknown[0]!r} can't be planned for: there are {', '.join(advice.NEEDS)}")
    names = asked.drafters or list(counted) or [name for name in advice.NEEDS if name in known]
    survivals = [counted.get(name) or advice.guess(name, asked.alpha) for name in names]
    rows = [advice.consider(one, place, _share(shape, one.drafter, small)) for one in survivals]
    best = max(rows, key=lambda row: row["best"]["speedup"]["value"] if row["best"] else 0.0)
    return finite(
        {
            "plan": NAME,
            "version": VERSION,
            "provenance": {"slipstream": __version__, "model": asked.model or embedded.NAME, "commit": commit()},
            "device": place.name,
            "dtype": place.dtype,
            "batch": place.batch,
            "context": place.context,
            "plain": advice.plain_step(place, shape, on),
            "drafters": rows,
            "lenience": advice.lenience(best["alpha"]["value"], best["c"], place),
            "batches": [] if at is None else advice.by_batch(survivals, at),
        }
    )


def _loaded(asked: Asked) -> LLM:
    """The model itself, whose `auto` times its drafters when it is made."""
    if asked.context is not None:
        raise OptionError(
            f"--context {asked.context}: on this machine steps are timed after a short text, whatever is asked for. "
            "Give a named --device, or leave --context out"
        )
    return LLM(*load_model(asked.model, dtype=asked.dtype), "auto", draft_model=asked.draft_model)


def shape_of_model(source: str | None) -> Shape:
    """A model's shape, from its config alone."""
    return _shape(blank_model(embedded.ensure() if source is None else source))


def _shape(model: Any) -> Shape:
    return shape_of(model.config, {name: parameter.numel() for name, parameter in model.named_parameters()})


def _counted(asked: Asked, llm: LLM | None) -> dict[str, Survival]:
    """By drafter: survival counted in all of the given traces and recordings."""
    traces = [path for path in asked.survival if not path.is_dir()]
    found = from_traces(traces) if traces else []
    folders = [path for path in asked.survival if path.is_dir()]
    if folders and not asked.drafters:
        raise OptionError("a recording can be replayed with any drafter: name some with --drafter")
    for folder in folders:
        # Heads and draft models need the target's weights, whatever device is planned for.
        model, tokenizer = (llm.model, llm.tokenizer) if llm is not None else load_model(asked.model)
        for name in asked.drafters:
            options = asked.options if name == asked.drafters[0] else {}
            found.append(from_recording(folder, name, options, model, tokenizer))
    by_drafter: dict[str, list[Survival]] = {}
    for each in found:
        by_drafter.setdefault(each.drafter, []).append(each)
    return {name: together(several) for name, several in by_drafter.items()}


def _share(shape: Shape, drafter: str, small: Shape | None) -> float:
    """Operations per drafted token, divided by those per token of the target."""
    if drafter == "model" and small is not None:
        return small.parameters / shape.parameters
    if drafter == "magicdec":
        return 1.0
    if drafter in advice.HEADS:
        return head_shape(shape, drafter).dense / shape.parameters
    return 0.0
