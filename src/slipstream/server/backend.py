"""What the protocol knows of the model behind it: the questions it may ask, and the values that come back.

The model may be in this process (`local`) or in another one (`remote`), so all of it can be pickled, and nothing here
imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from slipstream.counts import Counts
from slipstream.merged import Merged
from slipstream.server import schema as s
from slipstream.server.errors import Refused
from slipstream.server.tool_calls import Parser
from slipstream.stats import Stats


@dataclass(frozen=True)
class Limits:
    """What one request may cost."""

    body: int = 4 << 20  # bytes
    prompt: int | None = None  # tokens; None: as many as the model reads
    tokens: int = 4096  # of an answer
    waiting: int = 256  # requests
    seconds: float = 600.0  # for an answer, waiting included


@dataclass(frozen=True)
class About:
    """The model that is served."""

    name: str  # what clients call it
    context: int  # tokens
    vocabulary: int
    drafter: str
    device: str
    dtype: str
    started: float  # by `time`


@dataclass(frozen=True)
class Asked:
    """A call that was taken: its answers are to come."""

    count: int = 1
    prompt_tokens: int = 0  # of its prompts, each counted once
    parser: type[Parser] | None = None  # how tool calls are written, if there may be any
    forced: bool = False  # the answer is one call, as JSON
    predicted: int = 0  # tokens of the prediction


@dataclass(frozen=True)
class Logprob:
    """One token of an answer as text, with the alternatives it had."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass(frozen=True)
class Chunk:
    """What is new of an answer. `finish` comes once, with the last one; `refused` where it failed."""

    text: str
    logprobs: list[Logprob] = field(default_factory=list)
    # Of each token, if it was asked for: the characters of the whole answer that are certain after it, and its drafter.
    sources: list[tuple[int, str | None]] = field(default_factory=list)
    finish: str | None = None
    refused: Refused | None = None
    stats: Stats | None = None  # with the last one, if the prompt was read

    def then(self, later: Chunk) -> Chunk:
        """Both as one."""
        return replace(
            later,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
            sources=self.sources + later.sources,
        )


@dataclass(frozen=True)
class State:
    """What the service does now, and has done so far."""

    counts: Counts
    running: list[dict[str, Any]]  # a summary of each
    waiting: int
    max_batch: int
    filled: float  # share of the pages, or of the sequences


class Answers(Merged[Chunk]):
    """The answers of one call while they come."""

    def __init__(self, close: Callable[[], None]) -> None:
        """close: called when nobody reads them any more; it ends those that are not over."""
        super().__init__(sys.maxsize)  # how many there are is known from `begin` on
        self._closing = close
        self.asked = Asked()

    def begin(self, asked: Asked) -> None:
        """The call was taken. Chunks may have come before."""
        self.asked, self.count = asked, asked.count

    def close(self) -> None:
        self._closing()


# What may be asked beside answers: the tokens of a TokenizeRequest, the text of tokens, the `State`, a reload of heads.
Question = Literal["tokens", "text", "state", "reload_heads"]


class Backend(Protocol):
    """A model, from an event loop. What it refuses is raised as `Refused`."""

    @property
    def about(self) -> About: ...

    async def open(self) -> None:
        """Before the first question."""

    async def close(self) -> None:
        """After the last answer."""

    async def ask(self, body: s.Sampled) -> Answers:
        """Those to the body of a chat, a completion or a response."""

    async def find(self, what: Question, given: Any = None) -> Any: ...
