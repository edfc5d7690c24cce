"""Survival: how many drafted tokens steps keep, counted from traces, replayed recordings or live steps, or guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import OptionError
from slipstream.plan import theory
from slipstream.plan.theory import Interval

if TYPE_CHECKING:
    from slipstream.request import Step

DEEPEST = 64  # drafted tokens of a step that are counted one by one
GUESS = "a guess"
ENOUGH = 30  # fewer cases say nothing


Reached = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass
class Tally:
    """What the steps of one answer kept. The prompt's own step, which drafts nothing, is left out."""

    category: str = ""
    steps: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * DEEPEST)  # by depth: steps that kept that many or more
    nodes: list[int] = field(default_factory=lambda: [0] * DEEPEST)  # by depth: nodes that were drafted there
    ranks: list[int] = field(default_factory=list)  # how often the 1st, 2nd, … of a node's children was kept
    offered: list[int] = field(default_factory=list)  # and how often there was one, and none before it was right
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
        """A step with this tree kept this path, both with the root."""
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
        """One step of the engine, or of a replay."""
        if step.draft_seconds:  # not the prompt's own
            self.count(step.tree.parents.tolist(), step.verdict.path)


@dataclass(frozen=True)
class Survival:
    """Of one drafter, over several answers, or as it is guessed."""

    drafter: str
    reached: Reached  # the chance that a step keeps at least 1, 2, … drafted tokens: as it is, at worst, at best
    widths: tuple[float, ...]  # nodes at depth 1, 2, …, per step
    answers: tuple[Tally, ...] = ()  # that it was counted from; none: a guess
    source: str = GUESS

    @property
    def depth(self) -> int:
        return len(self.reached[0])

    @property
    def chain(self) -> bool:
        """Guessed as a chain, with one node at each depth."""
        return not self.answers and self.source == GUESS

    def tokens(self, depth: int | None = None) -> Interval:
        """Per step, of drafts no deeper than that."""
        return Interval(*(theory.tokens_of(each[:depth]) for each in self.reached))

    def rows(self, depth: int | None = None) -> float:
        """That a step computes: the root, and the nodes down to that depth."""
        return 1 + sum(self.widths[:depth])

    @property
    def alpha(self) -> Interval:
        """The one chance that gives as many tokens as were counted, if all depths were alike."""
        return Interval(*(theory.alpha_of(value, self.depth) for value in self.tokens()))


def counted(drafter: str, answers: Iterable[Tally], source: str, unseen: int | None = None) -> Survival:
    """From the steps of several answers. The interval is that of the mean of so many unseen ones, as many as were
    counted if nothing is said."""
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
    """Tokens per step of so many unseen texts."""
    return theory.mean_ratio(
        [t.tokens for t in tallies], [t.steps for t in tallies], [t.category for t in tallies], unseen
    )


def guessed(drafter: str, alpha: Interval, gamma: int) -> Survival:
    """A chain whose tokens are accepted with α each."""
    value, low, high = (tuple(theory.survival(a, gamma)) for a in alpha)
    return Survival(drafter, (value, low, high), (1.0,) * gamma)


def fade(answers: Sequence[Tally]) -> float | None:
    """How much less a node's second child is right than its first, given that the first is wrong. None: there were
    hardly any seconds."""
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
    """Of each drafter that wrote some of them."""
    from slipstream.trace.page import read

    by_drafter: dict[str, list[Tally]] = {}
    for path in paths:
        header, *lines = read(path)
        tally = Tally()
        for line in lines:
            if line.get("step"):  # not the prompt's own, nor the end
                tally.count([node["parent"] for node in line["nodes"]], line["path"])
                tally.drafting += line["draft_ms"] / 1e3
                tally.verifying += line["verify_ms"] / 1e3
                tally.host += line["host_ms"] / 1e3
        by_drafter.setdefault(header["drafter"], []).append(tally)
    return [counted(name, found, f"{len(found)} traces") for name, found in by_drafter.items()]


def from_recording(folder: Path, drafter: str, options: dict[str, Any], model: Any, tokenizer: Any) -> Survival:
    """What a drafter would have had accepted of the recorded texts, and what it takes here."""
    from slipstream.evaluate.replay import Recording

    recording = Recording.load(folder)
    return counted(drafter, replayed(recording, drafter, options, model, tokenizer), f"{folder.name}, replayed")


def replayed(
    recording: Any, drafter: str, options: dict[str, Any], model: Any, tokenizer: Any, nodes: int | None = None
) -> list[Tally]:
    """A tally for each of its texts. model: for drafters that need its weights. nodes: that a step drafts at most;
    None: as it would where the texts were recorded."""
    from slipstream.evaluate.replay import Replayed

    contestant = Replayed(drafter, recording, tokenizer, model, **options)
    if nodes is not None:
        contestant.max_draft = nodes
    contestant.answer(recording.items[0].tokens, recording.decoding)  # code is loaded or compiled
    found = []
    for item in recording.items:
        tally = Tally(item.category)
        contestant.watch = tally.watch
        stats = contestant.answer(item.tokens, recording.decoding).stats
        assert stats is not None
        verifying = stats.verify_seconds - item.first_token_seconds
        found.append(replace(tally, drafting=stats.draft_seconds, verifying=verifying, host=stats.host_seconds))
    return found
