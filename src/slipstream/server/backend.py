"""The interface between HTTP and the model: what can be asked, and the values that come back.

The model may be in this process (`local`) or in another one (`remote`). So all values can be pickled, and nothing here
imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from slipstream.counts import Counts
from slipstream.merged import Merged
from slipstream.server import schema as s
from slipstream.server.errors import Refused
from slipstream.server.tool_calls import Parser
from slipstream.stats import Stats


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the queue."""

    body: int = 4 << 20  # bytes
    prompt: int | None = None  # tokens; None: only the model's context limits it
    tokens: int = 4096  # of an answer
    waiting: int = 256  # requests in the queue
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
    """What is known of a call's answers before they begin."""

    count: int = 1  # how many answers
    prompt_tokens: int = 0  # of all prompts, each different one counted once
    parser: type[Parser] | None = None  # of tool calls, if there may be any
    forced: bool = False  # the answer is one call, as JSON
    predicted: int = 0  # tokens of the prediction


class Spelled(NamedTuple):
    """A token. As text, what is only a part of a character is a replacement character."""

    text: str
    raw: bytes | None  # None: not known


@dataclass(frozen=True)
class Logprob:
    """One token of an answer, with its log-probability and alternatives."""

    token: Spelled
    logprob: float
    top: list[tuple[Spelled, float]]


@dataclass(frozen=True)
class Chunk:
    """New text of an answer. The last chunk has `finish`, and `refused` if the answer failed."""

    text: str
    logprobs: list[Logprob] = field(default_factory=list)
    # For each token, if asked for: how many characters of the whole answer are final after it, and its drafter.
    sources: list[tuple[int, str | None]] = field(default_factory=list)
    finish: str | None = None
    refused: Refused | None = None
    stats: Stats | None = None  # in the last chunk, if the prompt was read

    def then(self, later: Chunk) -> Chunk:
        """Both chunks as one."""
        return replace(
            later,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
            sources=self.sources + later.sources,
        )


@dataclass(frozen=True)
class State:
    """What the service is doing now, and its counts so far."""

    counts: Counts
    running: list[dict[str, Any]]  # a summary of each
    waiting: int
    max_batch: int
    filled: float  # share of the cache in use: of its pages, or without pages of its sequences


class Answers(Merged[Chunk]):
    """The chunks of a call's answers as they arrive."""

    def __init__(self, close: Callable[[], None]) -> None:
        """close: called when the reader stops; cancels the answers that have not ended."""
        super().__init__(sys.maxsize)  # until `begin` sets the real number
        self._closing = close
        self.asked = Asked()

    def begin(self, asked: Asked) -> None:
        """The call was admitted. Chunks may have arrived already."""
        self.asked, self.count = asked, asked.count

    def close(self) -> None:
        self._closing()


# Other things to ask for: the tokens of a TokenizeRequest, the text of tokens, the `State`, a reload of the heads.
Question = Literal["tokens", "text", "state", "reload_heads"]


class Backend(Protocol):
    """A model, for callers in an event loop. Errors are raised as `Refused`."""

    @property
    def about(self) -> About: ...

    async def open(self) -> None:
        """Called before the first request."""

    async def close(self) -> None:
        """Called after the last answer."""

    async def ask(self, body: s.Sampled) -> Answers:
        """Start the answers to the body of a chat, a completion or a response."""

    async def find(self, what: Question, given: Any = None) -> Any: ...
