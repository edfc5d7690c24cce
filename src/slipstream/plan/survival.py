"""Survival: how many drafted tokens steps accept, counted in traces, replays or live steps, or assumed from α."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import OptionError
from slipstream.plan import theory
from slipstream.plan.theory import Interval

if TYPE_CHECKING:
    from slipstream.request import Step

DEEPEST = 64  # deeper tokens are counted at this depth
GUESS = "a guess"
ENOUGH = 30  # fewer cases are not used


Reached = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass
class Tally:
    """Counts over the steps of one answer. The prompt's step, which has no draft, is left out."""

    category: str = ""
    steps: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * DEEPEST)  # by depth: steps that accepted at least that many
    nodes: list[int] = field(default_factory=lambda: [0] * DEEPEST)  # by depth: drafted nodes
    ranks: list[int] = field(default_factory=list)  # how often the 1st, 2nd, … of a node's children was accepted
    offered: list[int] = field(default_factory=list)  # how often there was such a child, and none before it was right
    drafting: float = 0.0  # seconds
    verifying: float = 0.0
    host: float = 0.0

    @property
    def tokens(self) -> int:
        return self.steps + sum(self.kept)

    @property
    def seconds(self) -> float:
        return self.drafting + self.verifying + self.host

    def count(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Count a step with this tree and this accepted path, both with the root."""
        self.steps += 1
        depths = [0] * len(parents)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if node:
                depths[node] = depths[parent] + 1
                self.nodes[min(depths[node], DEEPEST) - 1] += 1
                children.setdefault(parent, []).append(node)
        for depth in range(1, len(path)):
            self.kept[min(depth, DEEPEST) - 1] += 1
        for place, node in enumerate(path):
            after = path[place + 1] if place + 1 < len(path) else None
            for rank, child in enumerate(children.get(node, ())):
                if rank == len(self.ranks):
                    self.ranks.append(0)
                    self.offered.append(0)
                self.offered[rank] += 1
                if child == after:
                    self.ranks[rank] += 1
                    break

    def watch(self, step: Step) -> None:
        """Count a step of the engine, or of a replay."""
        if step.draft_seconds:  # not the prompt's step
            self.count(step.tree.parents.tolist(), step.verdict.path)


@dataclass(frozen=True)
class Survival:
    """Survival of one drafter, counted over several answers or assumed."""

    drafter: str
    reached: Reached  # probability that a step accepts at least 1, 2, … drafted tokens: value, and ends of the interval
    widths: tuple[float, ...]  # nodes at depth 1, 2, …, per step
    answers: tuple[Tally, ...] = ()  # that were counted; empty: assumed
    source: str = GUESS

    @property
    def depth(self) -> int:
        return len(self.reached[0])

    @property
    def chain(self) -> bool:
        """Whether it is assumed to be a chain, with one node per depth."""
        return not self.answers and self.source == GUESS

    def tokens(self, depth: int | None = None) -> Interval:
        """Tokens per step, of drafts down to this depth."""
        return Interval(*(theory.tokens_of(each[:depth]) for each in self.reached))

    def rows(self, depth: int | None = None) -> float:
        """Rows of a step: the root, and the nodes down to this depth."""
        return 1 + sum(self.widths[:depth])

    @property
    def alpha(self) -> Interval:
        """The α that gives as many tokens per step, if it were the same at all depths."""
        return Interval(*(theory.alpha_of(value, self.depth) for value in self.tokens()))


def counted(drafter: str, answers: Iterable[Tally], source: str, unseen: int | None = None) -> Survival:
    """Survival counted over several answers. The interval is for the mean over `unseen` other answers, by default as
    many as were counted."""
    tallies = tuple(tally for tally in answers if tally.steps)
    if not tallies:
        raise OptionError(f"{source} holds no step that drafts could be kept in: record longer answers")
    steps = sum(t.steps for t in tallies)
    deepest = max((k for t in tallies for k in range(1, DEEPEST + 1) if t.nodes[k - 1]), default=0)
    reached = tuple(sum(t.kept[k] for t in tallies) / steps for k in range(deepest))
    widths = tuple(sum(t.nodes[k] for t in tallies) / steps for k in range(deepest))
    tokens = per_step(tallies, unseen or len(tallies))
    gained = tokens.value - 1
    low, high = (
        tuple(min(1.0, r * max(0.0, end - 1) / gained) if gained else r for r in reached)
        for end in (tokens.low, min(tokens.high, deepest + 1.0))
    )
    return Survival(drafter, (reached, low, high), widths, tallies, source)


def per_step(tallies: Sequence[Tally], unseen: int) -> Interval:
    """Tokens per step, with the interval for so many unseen texts."""
    return theory.mean_ratio(
        [t.tokens for t in tallies], [t.steps for t in tallies], [t.category for t in tallies], unseen
    )


def guessed(drafter: str, alpha: Interval, gamma: int) -> Survival:
    """A chain whose tokens are accepted with probability α each."""
    value, low, high = (tuple(theory.survival(a, gamma)) for a in alpha)
    return Survival(drafter, (value, low, high), (1.0,) * gamma)


def fade(answers: Sequence[Tally]) -> float | None:
    """Acceptance of a node's second child, given that the first is wrong, divided by acceptance of the first. None:
    there were too few second children."""
    both = [tally for tally in answers if len(tally.ranks) > 1]
    (first, second), (of_first, of_second) = (
        [sum(counts[i] for counts in each) for i in (0, 1)]
        for each in ([tally.ranks for tally in both], [tally.offered for tally in both])
    )
    return (second / of_second) / (first / of_first) if of_second >= ENOUGH and first else None


def parse_alpha(given: str) -> Interval:
    """0.6, 0.6±0.1 or 0.6+-0.1."""
    found = re.fullmatch(r"\s*(\d*\.?\d+)\s*(?:(?:±|\+-|\+/-)\s*(\d*\.?\d+))?\s*", given)
    value, off = (float(found[1]), float(found[2] or 0)) if found else (-1.0, 0.0)
    if not 0 <= value <= 1:
        raise OptionError(f"--alpha {given!r}: give a chance between 0 and 1, with what it may be off by: 0.6±0.1")
    return Interval(value, max(0.0, value - off), min(1.0, value + off))


# ---- from files


def from_traces(paths: Sequence[Path]) -> list[Survival]:
    """Survival of each drafter in the traces."""
    from slipstream.trace.page import read

    by_drafter: dict[str, list[Tally]] = {}
    for path in paths:
        header, *lines = read(path)
        tally = Tally()
        for line in lines:
            if line.get("step"):  # neither the prompt's step nor the end
                tally.count([node["parent"] for node in line["nodes"]], line["path"])
                tally.drafting += line["draft_ms"] / 1e3
                tally.verifying += line["verify_ms"] / 1e3
                tally.host += line["host_ms"] / 1e3
        by_drafter.setdefault(header["drafter"], []).append(tally)
    return [counted(name, found, f"{len(found)} traces") for name, found in by_drafter.items()]


def together(several: Sequence[Survival]) -> Survival:
    """What was counted of one drafter in several places, as one."""
    if len(several) == 1:
        return several[0]
    answers = [tally for each in several for tally in each.answers]
    return counted(several[0].drafter, answers, ", ".join(each.source for each in several))


def from_recording(folder: Path, drafter: str, options: dict[str, Any], model: Any, tokenizer: Any) -> Survival:
    """Survival of a drafter on the recorded texts, with its time on this machine."""
    from slipstream.evaluate.replay import Recording

    recording = Recording.load(folder)
    return counted(drafter, replayed(recording, drafter, options, model, tokenizer), f"{folder.name}, replayed")


def replayed(
    recording: Any, drafter: str, options: dict[str, Any], model: Any, tokenizer: Any, nodes: int | None = None
) -> list[Tally]:
    """A tally for each recorded text. model: for drafters that need its weights. nodes: limit per step; None: the
    default on the machine where the texts were recorded."""
    from slipstream.evaluate.replay import Replayed

    contestant = Replayed(drafter, recording, tokenizer, model, **options)
    if nodes is not None:
        contestant.max_draft = nodes
    contestant.answer(recording.items[0].tokens, recording.decoding)  # warm-up: code is loaded or compiled
    found = []
    for item in recording.items:
        tally = Tally(item.category)
        contestant.watch = after_forward(tally.watch, model)
        stats = contestant.answer(item.tokens, recording.decoding).stats
        assert stats is not None
        verifying = stats.verify_seconds - item.first_token_seconds
        found.append(replace(tally, drafting=stats.draft_seconds, verifying=verifying, host=stats.host_seconds))
    return found


def after_forward(watch: Callable[[Step], None], model: Any) -> Callable[[Step], None]:
    """Reads all weights after each step of a replay, as decoding does before it drafts. Else what a drafter reads would
    stay in the caches, and drafts would be timed too short. No clock counts it."""
    if model is None or model.device.type != "cpu":
        return watch
    weights = [each.detach() for each in model.parameters()]

    def watch_cold(step: Step) -> None:
        watch(step)
        for each in weights:
            each.sum()

    return watch_cold
