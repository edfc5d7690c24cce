"""Answers that follow a JSON schema or a regular expression, by the grammar library llguidance (extra `grammar`)."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from slipstream.errors import OptionError

# The grammar library's form of a tokenizer, by tokenizer, vocabulary and end tokens.
_wrapped: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


class GrammarProcessor:
    """A logits processor that rules out every token that the grammar does not allow next.

    It is stateful: it must be called once per token of the answer, in order, as in plain decoding.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._read: int | None = None  # length of the history already read

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        if self._read is not None:
            for token in input_ids[0, self._read :].tolist():
                self._matcher.consume_token(token)
        self._read = length
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if error := self._matcher.get_error():
            raise OptionError(f"the grammar can't be followed: {error.partition('<state>')[0].strip()}")
        allowed = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(np.bool_)
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def fresh(self) -> GrammarProcessor:
        """A copy at the grammar's beginning, for another answer."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarProcessor(matcher, self._vocabulary)


def grammar_processor(
    tokenizer: Any, vocabulary: int, eos: frozenset[int], json_schema: Any = None, regex: str | None = None
) -> GrammarProcessor:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise OptionError(
            "json_schema and regex need the grammar library: pip install 'slipstream-llm[grammar]'"
        ) from error
    if json_schema is not None and regex is not None:
        raise OptionError("give json_schema or regex, not both")
    if json_schema is not None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema_text(json_schema))
    elif isinstance(regex, str):
        grammar = llguidance.LLMatcher.grammar_from_regex(regex)
    else:
        raise OptionError(f"regex={regex!r} is a {type(regex).__name__}: give the expression as a string")
    if refused := llguidance.LLMatcher.validate_grammar(grammar):
        raise OptionError(f"the grammar is not understood: {refused}")
    known = _wrapped.setdefault(tokenizer, {})
    key = (vocabulary, tuple(sorted(eos)))
    if key not in known:  # takes a second for a large vocabulary
        known[key] = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(key[1]) or None)
    return GrammarProcessor(llguidance.LLMatcher(known[key], grammar), vocabulary)


def schema_text(schema: Any) -> str:
    """A JSON schema given as text, as a dict, or as a pydantic model."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict | bool):  # true and false are schemas
        raise OptionError(f"json_schema is a {type(schema).__name__}: give a dict, its text or a pydantic model")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise OptionError(f"json_schema can't be written as JSON: {error}") from error
