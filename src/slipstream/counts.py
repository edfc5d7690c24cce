"""Counters of a service: its requests, their tokens, and latencies."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.stats import Stats


@dataclass
class Spread:
    """A histogram of times, with Prometheus' kind of bounds."""

    bounds: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def see(self, seconds: float, times: int = 1) -> None:
        place = next((i for i, bound in enumerate(self.bounds) if seconds <= bound), len(self.bounds))
        self.counts[place] += times
        self.sum += times * seconds


@dataclass
class Counts:
    """Totals since the service began."""

    requests: int = 0
    refused: int = 0  # because too many were waiting
    put_back: int = 0  # preemptions: times that a request had to be read again, since pages had run out
    ended: dict[str, int] = field(default_factory=dict)  # by reason: stop, length, cancelled, failed, …
    prompt_tokens: int = 0
    found_tokens: int = 0  # prompt tokens whose keys were in the cache already
    new_tokens: int = 0
    steps: int = 0
    drafts: int = 0  # steps that verified at least one drafted node
    nodes: int = 0  # drafted nodes that were verified
    accepted: int = 0
    by_depth: list[int] = field(default_factory=list)  # drafted tokens that were accepted at depth 1, 2, …
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    first_token: Spread = field(default_factory=Spread)
    per_token: Spread = field(default_factory=Spread)

    def add(self, stats: Stats) -> None:
        self.prompt_tokens += stats.prompt_tokens
        self.new_tokens += stats.new_tokens
        self.steps += stats.steps
        self.nodes += stats.nodes_verified
        self.accepted += stats.accepted
        self.drafts += stats.drafts
        lengths = dict(stats.accepted_lengths)  # a copy: the answer may grow in another thread
        longest = max(lengths, default=0)
        self.by_depth += [0] * (longest - len(self.by_depth))
        for length, times in lengths.items():
            for depth in range(length):
                self.by_depth[depth] += times
        for name, counted in list(stats.by_source.items()):
            known = self.by_source.setdefault(name, {"proposed": 0, "accepted": 0})
            for what, times in counted.items():
                known[what] += times
