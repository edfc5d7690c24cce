"""Request: one sequence to continue, with everything that the engine needs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.accept import Match, Rule, Verdict
from slipstream.checks import integer
from slipstream.sampling import Sampling
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget.pilot import Choice

Stop = Callable[[int], str | None]


class Step(NamedTuple):
    """What one forward did for one sequence, as `Request.watch` is shown it. In a batch, times are its share of all."""

    tree: TokenTree
    verdict: Verdict
    draft_seconds: float
    verify_seconds: float
    host_seconds: float  # deciding, committing, observing
    choice: Choice | None = None  # what the drafter decided about this step, if it is one that decides


@dataclass
class Request:
    tokens: list[int]  # the prompt
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    accept: Rule = field(default_factory=Match)
    seed: int = 0
    sample: int = 0  # index among several answers to one prompt: each has noise of its own
    # Called once with every emitted token, in order; returns the reason if the text ends with it ("stop", "length").
    stop: Stop | None = None
    collection: str = "default"  # drafts use text of the same collection alone
    max_draft: int = 16  # drafted nodes per step at most; 0 turns speculation off
    drafters: tuple[str, ...] | None = None  # those that `auto` may ask for this request; None: all that it has
    prediction: list[int] | None = None  # the output that the caller expects, more or less; it is drafted first
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

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The prompt's tokens, for all that looks at each of them: a list takes ten times as long."""
        return np.fromiter(self.tokens, np.int64, len(self.tokens))

    def cancel(self) -> None:
        """End this request before its next step. Safe to call from another thread."""
        self.cancelled = True
