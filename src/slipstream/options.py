"""The options of `generate`, `stream` and a chat's turns, and their types, so that type checkers see misspelt ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict

from slipstream.accept import Rule


class Options(TypedDict, total=False):
    """The options of an answer. The defaults are in brackets."""

    # How long, and where it ends.
    max_new_tokens: int  # (256)
    stop: str | Sequence[str] | None  # strings that end it, and are cut off
    stop_tokens: Sequence[int] | None  # ids that end it, besides the model's own
    ignore_eos: bool  # (False) go on after the model's own end token
    # How tokens are chosen.
    temperature: float  # (0: the most probable token)
    top_k: int  # (0: all)
    top_p: float  # (1)
    min_p: float  # (0)
    repetition_penalty: float  # (the model's own default, mostly 1) over prompt and answer, as in transformers
    presence_penalty: float  # (0) over the answer alone, as in OpenAI's API
    frequency_penalty: float  # (0)
    logit_bias: Mapping[int, float] | None  # added to the logits of these ids
    bad_words: Sequence[str | Sequence[int]] | None  # never said
    processors: Sequence[Any] | None  # transformers' LogitsProcessor objects
    json_schema: Any  # a dict, its text, or a pydantic model: the answer follows it
    regex: str | None  # the answer matches it
    seed: SupportsIndex | Sequence[SupportsIndex] | None  # (a fresh one, reported in the result) one, or one per prompt
    sample: int  # (0) which of the answers that this seed can give
    # How it is drafted and verified.
    max_draft: int | None  # (16, on a GPU 31, with a prediction 63) nodes per step; 0 turns speculation off
    prediction: str | Sequence[int] | Sequence[str | Sequence[int]] | None  # the expected answer, or one per prompt
    drafters: str | Sequence[str] | None  # names of the drafters that `auto` may ask
    collection: str  # ("default") whose text may draft, in drafters that keep text
    accept: str | Rule  # ("match") or rejection; typical and lenient are lossy
    accept_options: dict[str, Any] | None
    # What is read and reported.
    template: bool  # (True) False continues a string as it is, without the chat template
    logprobs: int | None  # alternatives to report for each token
    trace: (
        bool | Callable[[dict[str, Any]], None]
    )  # (False) record each step; a function gets each line when it is final
