"""Costs on this machine: those that `auto` uses. They are measured once, and updated with every answer."""

from __future__ import annotations

from typing import Any

from slipstream.drafters.auto import AutoDrafter
from slipstream.errors import OptionError
from slipstream.llm import LLM
from slipstream.plan.advice import LOOKUP, LOOKUPS, NEEDS, Place
from slipstream.plan.survival import Survival
from slipstream.targets.timing import cpu_name, nonsense


def here(llm: LLM, batch: int, counted: dict[str, Survival]) -> Place:
    """llm: with `auto`, which timed all its drafters when it was made. counted: drafters with measured times."""
    auto = llm.engine.drafter
    assert isinstance(auto, AutoDrafter)
    costs, sources, whole = auto.pilot.costs, auto.pilot.sources(batch), auto.pilot.sources(1)

    def drafting(name: str, levels: int) -> float:
        source = sources.get(name)
        measured = source if source is not None and source.known else None  # with so many sequences
        taken = _counted(counted[name]) if name in counted else None  # with one sequence
        if taken and (batch == 1 or name in LOOKUPS or not measured):
            return taken * batch  # too much for what drafts for all sequences at once
        known = measured or whole.get(name)
        if known is not None and known.known:
            times = batch if name in LOOKUPS and not measured else 1
            return times * known.drafting.seconds * min(1.0, levels / _levels(auto.parts[name]))
        if name in LOOKUPS:
            return LOOKUP * batch
        raise OptionError(
            f"what `{name}` takes here is not known: `auto` asks {', '.join(auto.parts)}; give its --survival from a "
            f"recording or a trace, or a named --device ({', '.join(NEEDS)} can be planned for there)"
        )

    rows = lambda each: batch * (each - 1) + 1 if costs.flat else each  # noqa: E731

    def step(each: float) -> float:
        """Interpolated, since the mean number of rows over steps need not be an integer."""
        low = int(rows(each))
        share = rows(each) - low
        first = costs.seconds(low, batch)
        return first + share * (costs.seconds(low + 1, batch) - first) if share else first

    device, context = llm.target.device, len(nonsense(llm.target))
    name = cpu_name() if device.type == "cpu" else str(device)
    return Place(f"here ({name})", batch, context, str(llm.target.dtype).removeprefix("torch."), step, drafting)


def _counted(survival: Survival) -> float:
    """Seconds of a draft, the mean over the counted steps."""
    steps = sum(tally.steps for tally in survival.answers)
    return sum(tally.drafting for tally in survival.answers) / steps if steps else 0.0


def _levels(part: Any) -> int:
    """The depth of a full draft. Of a lookup 1, since it takes as long for any depth."""
    options = part.options
    return (
        getattr(options, "depth", None)
        or (getattr(options, "length", None) if hasattr(options, "beams") else None)
        or 1
    )
