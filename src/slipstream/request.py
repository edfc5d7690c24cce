"""Request: one sequence to continue, and what the engine needs to know to continue it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.accept import Match, Rule, Verdict
from slipstream.checks import integer
from slipstream.sampling import Sampling
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget.pilot import Choice

Stop = Callable[[int], str | None]


@dataclass(frozen=True)
class Step:
    """What one forward did for one sequence, for whoever watches. In a batch the times are its share of all."""

    tree: TokenTree
    verdict: Verdict
    draft_seconds: float
    verify_seconds: float
    host_seconds: float  # deciding, committing, observing
    choice: Choice | None = None  # what the drafter decided, if it decides anything


@dataclass
class Request:
    tokens: list[int]  # the prompt
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    accept: Rule = field(default_factory=Match)
    seed: int = 0
    sample: int = 0  # the i-th of several answers to one prompt draws its own noise
    # Called once with every emitted token, in order; names the reason if the text ends with it ("stop", "length").
    stop: Stop | None = None
    collection: str = "default"  # whose text may draft: nothing passes from one collection to another
    max_draft: int = 16  # drafted nodes per step at most; 0 turns speculation off
    drafters: tuple[str, ...] | None = None  # whom `auto` may ask for this request; None: everyone it has
    prediction: list[int] | None = None  # the output that is expected, more or less: it is drafted first
    logprobs: int | None = None  # report this many alternatives per emitted token
    watch: Callable[[Step], None] | None = None  # shown every step
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.max_new_tokens = integer("max_new_tokens", self.max_new_tokens)
        self.seed = integer("seed", self.seed)
        self.sample = integer("sample", self.sample, 0)
        self.max_draft = integer("max_draft", self.max_draft, 0, "0 (no speculation) or more")
        if self.logprobs is not None:
            self.logprobs = integer("logprobs", self.logprobs, 0, "0 (no alternatives) or more")

    def cancel(self) -> None:
        """End this request before its next step. Safe to call from another thread."""
        self.cancelled = True
