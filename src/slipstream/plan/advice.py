"""Compute a plan from survival and costs: the speed-up of each drafter, its best depth, and whether it pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import OptionError
from slipstream.plan import theory
from slipstream.plan.roofline import LAUNCH, SIZES, Chip, Shape, StepCost, head_shape, memory, on_part, step_cost
from slipstream.plan.survival import Survival, fade, guessed
from slipstream.plan.theory import Interval

LOOKUP = 60e-6  # seconds to search the text or a store for one sequence (docs/benchmarks.md)
LEVEL_ROWS = 8  # rows of one level of a head's draft: its width
TREE_WIDTH = 8  # children of a node that are considered
FADE = 0.5  # acceptance of a node's second child over that of its first: an assumption, `fade` measures it in traces
GAMMA = 8  # depth of a chain if only α is given
LENIENCES = (1.0, 0.5, 0.3, 0.1)  # values of lenience in the table
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

LOOKUPS = ("pld", "suffix", "rest")
HEADS = ("redrafter", "eagle3", "medusa")
NEEDS = {
    "pld": "nothing: it copies from the text so far",
    "suffix": "nothing: it copies from the text so far, and from earlier answers if you like",
    "rest": "a datastore of texts like the answers",
    "medusa": "a trained head",
    "redrafter": "a trained head",
    "eagle3": "a trained head (`slipstream tune` makes one)",
    "model": "a smaller model with the same vocabulary",
    "magicdec": "nothing: the target drafts for itself with part of its keys",
}
PART = 512  # keys that magicdec drafts with: its default
# Used if nothing was measured: the α that gives the embedded model's tokens per step on Spec-Bench, with drafts of so
# many levels and nodes (docs/benchmarks.md, docs/heads.md; `model`: T5's table in the speculative decoding paper;
# `magicdec`: how often drafts on part of the keys equal the target's token, docs/log/long-texts.md). The half-width of
# the interval is a judgement: repetitive texts have a much higher α, prose a much lower one.
GUESSES: Mapping[str, tuple[float, float, int, int]] = {  # α, half-width, levels, nodes
    "pld": (0.48, 0.2, 10, 10),
    "suffix": (0.55, 0.2, 10, 31),
    "rest": (0.45, 0.2, 10, 31),
    "medusa": (0.45, 0.1, 4, 31),
    "redrafter": (0.58, 0.1, 5, 31),
    "eagle3": (0.68, 0.1, 6, 31),
    "model": (0.65, 0.1, 5, 5),
    "magicdec": (0.7, 0.15, 4, 4),
}


@dataclass(frozen=True)
class Place:
    """A device, and the costs of steps and drafts on it."""

    name: str
    batch: int
    context: int
    dtype: str
    step: Callable[[float], float]  # seconds of a step, by rows of each sequence
    draft: Callable[[str, int], float]  # seconds of a draft for all sequences, by drafter and levels
    parts: StepCost | None = None  # of a plain step, if it is computed by the roofline

    @property
    def plain(self) -> float:
        return self.step(1)


def on_chip(
    name: str, chip: Chip, shape: Shape, batch: int, context: int, dtype: str, draft: Shape | None = None
) -> Place:
    """A chip, with costs by the roofline. draft: shape of the model that `model` drafts with."""

    def cost(of: Shape, rows: float) -> float:
        return step_cost(of, chip, rows, batch, context, dtype).seconds

    def drafting(drafter: str, levels: int) -> float:
        if drafter in LOOKUPS:
            return LOOKUP * batch
        if drafter == "model":
            if draft is None:
                raise OptionError("what `model` takes depends on the draft model: name one with --draft-model")
            return levels * cost(draft, 1)
        if drafter == "magicdec":
            return levels * cost(on_part(shape, PART), 1)
        if drafter == "medusa":  # all levels at once
            return LAUNCH + levels * cost(head_shape(shape, drafter), 1)
        if drafter in HEADS:
            return levels * cost(head_shape(shape, drafter), LEVEL_ROWS)
        raise OptionError(f"--drafter {drafter!r} can't be planned for: there are {', '.join(NEEDS)}")

    parts = step_cost(shape, chip, 1, batch, context, dtype)
    return Place(name, batch, context, dtype, lambda rows: cost(shape, rows), drafting, parts)


def guess(drafter: str, alpha: Interval | None) -> Survival:
    """Survival of chains with this α; without α, what GUESSES has for the drafter."""
    if alpha is not None:
        return guessed(drafter, alpha, GAMMA)
    value, off, levels, nodes = GUESSES[drafter]
    found = guessed(drafter, Interval(value, value - off, value + off), levels)
    return replace(found, widths=(nodes / levels,) * levels, source="what the embedded model has")


# ---- one drafter


def consider(survival: Survival, place: Place, share: float | None = None) -> dict[str, Any]:
    """The speed-up by depth, and the best. share: operations per drafted token, divided by those per target token."""
    name, plain = survival.drafter, place.plain
    by_depth = [_at_depth(survival, place, depth) for depth in range(1, survival.depth + 1)]
    best = max(by_depth, key=lambda one: one["speedup"]["value"], default=None)
    depth = best["depth"] if best else 0
    c = place.draft(name, depth) / depth / plain if depth else 0.0
    found = {
        "drafter": name,
        "needs": NEEDS.get(name, ""),
        "source": survival.source,
        "answers": len(survival.answers),
        "alpha": survival.alpha._asdict(),
        "survival": [round(r, 4) for r in survival.reached[0]],
        "c": c,
        "by_depth": by_depth,
        "best": best,
        "tree": _best_tree(survival, place) if survival.chain and name not in LOOKUPS else None,
        "fade": fade(survival.answers),
        "operations": (best["rows"] + depth * (share or 0.0)) / best["tokens"]["value"] if best else 1.0,
    }
    return found | {"verdict": verdict(best["speedup"]) if best else "does not pay"}


def _at_depth(survival: Survival, place: Place, depth: int) -> dict[str, Any]:
    tokens, rows = survival.tokens(depth), survival.rows(depth)
    seconds = place.draft(survival.drafter, depth) + place.step(rows)
    speedup = Interval(*(each * place.plain / seconds for each in tokens))
    return {"depth": depth, "rows": rows, "tokens": tokens._asdict(), "speedup": speedup._asdict()}


def _best_tree(survival: Survival, place: Place) -> dict[str, Any]:
    """The best tree instead of a chain: the most probable nodes, as many as pay."""
    children = theory.ranks(survival.alpha.value, TREE_WIDTH, FADE)
    plain = place.plain
    parents, speedup = theory.best_nodes(
        children, lambda levels: place.draft(survival.drafter, levels) / plain, lambda rows: place.step(rows) / plain
    )
    return {"nodes": len(parents) - 1, "depth": theory.depth_of(parents), "speedup": speedup}


def verdict(speedup: Mapping[str, float]) -> str:
    if speedup["low"] > 1:
        return "pays"
    return "may pay" if speedup["high"] > 1 else "does not pay"


# ---- the whole plan


def lenience(alpha: float, c: float, place: Place) -> list[dict[str, Any]]:
    """For several values of lenience: the range of α, and the best speed-up at both ends."""
    steps = lambda rows: place.step(rows) / place.plain  # noqa: E731
    found = []
    for each in LENIENCES:
        low, high = theory.lenient_range(alpha, each)
        speedups = [theory.best_gamma(a, c, steps, 2 * GAMMA)[1] for a in (low, high)]
        found.append({"lenience": each, "alpha": [low, high], "speedup": speedups})
    return found


def by_batch(survivals: Sequence[Survival], at: Callable[[int], Place]) -> list[dict[str, Any]]:
    """The best speed-up of each drafter by number of sequences."""

    def best(one: Survival, place: Place) -> float:
        depths = range(1, one.depth + 1)
        return max((_at_depth(one, place, depth)["speedup"]["value"] for depth in depths), default=1.0)

    return [
        {"batch": n, "plain_ms": 1e3 * at(n).plain, "speedup": {one.drafter: best(one, at(n)) for one in survivals}}
        for n in BATCHES
    ]


def plain_step(place: Place, shape: Shape | None, chip: Chip | None) -> dict[str, Any]:
    found: dict[str, Any] = {"ms": 1e3 * place.plain, "tokens_per_second": place.batch / place.plain}
    found["rows_ms"] = {str(rows): 1e3 * place.step(rows) for rows in (1, 2, 4, 8, 16, 32, 64)}
    if place.parts is not None:
        parts = {part: 1e3 * getattr(place.parts, part) for part in ("weights", "keys", "arithmetic", "launches")}
        found |= {"bound": place.parts.bound, "parts_ms": parts}
    if shape is not None:
        found["parameters"] = shape.parameters
        if chip is not None and place.dtype in SIZES:
            found["memory"] = memory(shape, place.batch, place.context, place.dtype)
            found["fits"] = found["memory"] < chip.memory
    return found
