"""One request while it is being continued: its sequence, the reading of its text, and a text kept for the next one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch

from slipstream.budget import Budget, step_budget
from slipstream.drafters import _capabilities as can
from slipstream.drafters.base import Drafter, DraftSession
from slipstream.errors import ContextError, OptionError, PromptError
from slipstream.request import Request
from slipstream.sampling import Sampler
from slipstream.stats import Stats
from slipstream.targets.base import Scores, Slot, Target
from slipstream.tree import TokenTree


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of one emitted token under the target's raw distribution, and of its alternatives."""

    token: int
    logprob: float
    top: dict[int, float]


class PendingResult(NamedTuple):
    """The result of a forward for one sequence's root, not verified yet."""

    tree: TokenTree
    score: Scores
    seconds: float  # that the forward took


@dataclass(eq=False)
class Sequence:
    """One request while it is being continued."""

    request: Request
    slot: Slot
    session: DraftSession
    sampler: Sampler
    stats: Stats
    root: int = -1  # the last token: emitted, not scored by the target yet
    tokens: list[int] = field(default_factory=list)  # emitted
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None  # why it ended: stop, length, cancelled, failed, or a reason of the request's own
    error: Exception | None = None  # what made this sequence alone fail
    started: float = field(default_factory=perf_counter)
    pending: PendingResult | None = None  # the pending result of the latest forward
    # The sampler by which the target may choose tokens itself; None if the accept rule needs logits.
    chooser: Sampler | None = field(init=False)
    chosen_on_device: bool = False  # whether it does, within its forward: a plain forward after it needs nothing else

    def __post_init__(self) -> None:
        self.chooser = None if self.request.accept.needs_logits else self.sampler

    def emit(self, token: int) -> bool:
        """Emit `token`. Returns whether the text ends with it."""
        self.tokens.append(token)
        if self.request.stop is not None:
            self.finish = self.request.stop(token)
        if self.finish is None and len(self.tokens) >= self.request.max_new_tokens:
            self.finish = "length"
        return self.finish is not None

    def budget(self, target: Target) -> Budget:
        left = self.request.max_new_tokens - len(self.tokens)
        return step_budget(self.request.max_draft if target.chains else 0, left, target.context - self.slot.length)


@dataclass(eq=False)
class Reading:
    """A text that is being read into the cache: the prompt of a new sequence, or all of a preempted one."""

    sequence: Sequence
    slot: Slot
    text: list[int]
    again: bool = False  # of a preempted sequence: its drafter knows the text, and the token after it is decided
    seconds: float = 0.0  # that forwards took
    error: Exception | None = None  # what made this reading alone fail

    @property
    def left(self) -> int:
        return len(self.text) - self.slot.length


@dataclass(eq=False)
class Kept:
    """A text whose cache is kept from one request to the next, as in a chat: its slot and its drafter's session."""

    slot: Slot | None = None
    session: DraftSession | None = None


def same_prompt(request: Request, running: Iterable[Sequence]) -> Sequence | None:
    """A running sequence with the same prompt. Only within the request's collection: else the time that a request takes
    would reveal what other collections asked."""
    own = [s for s in running if s.request.collection == request.collection]
    return next((s for s in own if s.request.tokens == request.tokens), None)


def check_prompt(request: Request, target: Target) -> None:
    if not request.tokens:
        raise PromptError("the prompt is empty: give at least one token to continue")
    if request.max_new_tokens < 1:
        raise PromptError(f"max_new_tokens={request.max_new_tokens}: ask for at least one token")
    if len(request.tokens) >= target.context:
        raise ContextError(
            f"the prompt has {len(request.tokens)} tokens, the model reads {target.context} including what it writes: "
            "shorten the prompt"
        )
    fits = lies_within(request, target.vocabulary)
    for what, tokens in {"prompt": [] if fits else request.tokens, "prediction": request.prediction or []}.items():
        if bad := [t for t in tokens if not 0 <= t < target.vocabulary]:
            raise PromptError(f"{what} tokens must lie in 0..{target.vocabulary - 1}, found {bad[:5]}")


def lies_within(request: Request, vocabulary: int) -> bool:
    """Whether all tokens of the prompt are below this number."""
    try:
        return int(request.ids.min()) >= 0 and int(request.ids.max()) < vocabulary
    except OverflowError:
        return False


def check_drafting(request: Request, drafter: Drafter) -> None:
    """Refuse options of a request that its drafter would ignore."""
    if request.prediction is not None and "prediction" not in can.takes(drafter):
        raise OptionError(f"{type(drafter).__name__} makes no use of a prediction: draft with auto, or with prediction")
    if request.drafters is not None and "drafters" not in can.takes(drafter):
        raise OptionError(f"{type(drafter).__name__} asks no other drafters: drafters=… is for auto")


def logprobs(row: torch.Tensor, token: int, k: int) -> TokenLogprobs:
    logp = torch.log_softmax(row.float(), -1)
    top = torch.topk(logp, min(k, len(logp)))
    return TokenLogprobs(token, float(logp[token]), dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
