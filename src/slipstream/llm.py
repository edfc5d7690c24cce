"""LLM: a model, its tokenizer and a drafter behind three verbs: generate, stream, chat."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from slipstream import drafters
from slipstream.accept import Rule, make_rule
from slipstream.drafters.base import Drafter
from slipstream.engine import Engine, TokenLogprobs
from slipstream.engine import Sequence as Running
from slipstream.errors import OptionError, PromptError
from slipstream.grammar import GrammarProcessor, grammar_processor
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.stats import Stats
from slipstream.target import Slot, load_model, open_target
from slipstream.text import Detokenizer, Prompt, encode, split_batch


@dataclass(frozen=True)
class Result:
    """One answer."""

    text: str  # without the stop string that ended it
    tokens: list[int]  # every emitted token, the one that ended it included
    finish_reason: str  # stop, length, cancelled
    stats: Stats
    seed: int  # what it was drawn with: pass it again to draw it again
    logprobs: list[TokenLogprobs] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": self.stats.as_dict(),
        }


def load(
    model: Any = None,
    *,
    drafter: str | Drafter = "pld",
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    max_batch: int = 16,
    model_options: dict[str, Any] | None = None,
    **drafter_options: Any,
) -> LLM:
    """A language model that answers faster.

    model: a hub id, a folder, a GGUF file, a transformers model already in memory, or nothing for the embedded one.
    drafter: a name from `slipstream drafters`; its options follow as keywords.
    model_options go to transformers' `from_pretrained`.
    """
    if isinstance(drafter, str):
        drafters.find(drafter)  # a misspelt name should not cost a model's loading time
    if model is None or isinstance(model, str | Path):
        model, found = load_model(
            model,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            **model_options or {},
        )
        tokenizer = tokenizer or found
    return LLM(model, tokenizer, drafter, max_batch=max_batch, **drafter_options)


class LLM:
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        drafter: str | Drafter = "pld",
        *,
        max_batch: int = 16,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.target = open_target(model)
        made = drafters.make(drafter, self.target, tokenizer, **options)
        name = drafter if isinstance(drafter, str) else type(drafter).__name__
        self.engine = Engine(self.target, made, name, max_batch)
        self.eos = end_tokens(model, tokenizer)

    def generate(self, prompt: Prompt | Sequence[Prompt], *, n: int = 1, **options: Any) -> Any:
        """Answer. A Result for one prompt, a list of them for n > 1, and for a list of prompts a list of either.

        Options: max_new_tokens (256), temperature (0: greedy), top_k, top_p, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, logit_bias, bad_words, processors (transformers' LogitsProcessor objects),
        json_schema, regex, seed (one, or one per prompt), stop (strings), stop_tokens (ids, besides the model's own),
        ignore_eos, logprobs (alternatives to report), accept (match, rejection, typical, lenient), accept_options,
        max_draft (nodes per step; 0 turns speculation off), template (False continues a string as it is).
        """
        prompts, many = split_batch(prompt)
        if n < 1:
            raise OptionError(f"n={n}: ask for at least one answer")
        seeds = spread(options.pop("seed", None), len(prompts))
        alone = len(prompts) * n == 1
        requests = [
            self.request(p, sample=i, seed=seed, shared=not alone, **options)
            for p, seed in zip(prompts, seeds, strict=True)
            for i in range(n)
        ]
        ended: dict[int, Running] = {}
        for sequence in self.engine.run(requests):
            if sequence.finish is not None:
                ended[id(sequence.request)] = sequence
        results = [result(ended[id(r)]) for r in requests]
        if n == 1:
            return results if many else results[0]
        groups = [results[i : i + n] for i in range(0, len(results), n)]
        return groups if many else groups[0]

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Answer piece by piece: iterate over text; `.result` afterwards, `.cancel()` at any time."""
        prompts, many = split_batch(prompt)
        if many:
            raise PromptError(f"stream takes one prompt, found {len(prompts)}: call it once for each, or use generate")
        (seed,) = spread(options.pop("seed", None), 1)
        return Stream(self.engine, self.request(prompts[0], seed=seed, **options))

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its cache: each turn reads only what is new."""
        return Chat(self, system)

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        seed: int = 0,
        sample: int = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        accept: str | Rule = "match",
        accept_options: dict[str, Any] | None = None,
        max_draft: int = 16,
        template: bool = True,
        json_schema: Any = None,
        regex: str | None = None,
        processors: Sequence[Any] = (),
        bad_words: Sequence[str | Sequence[int]] = (),
        shared: bool = False,
        **sampling: Any,
    ) -> Request:
        """What `generate` asks the engine for. shared: other answers use the same processor objects."""
        known = {f.name for f in fields(Sampling)}
        if unknown := set(sampling) - known:
            raise OptionError(
                f"generate has no option {', '.join(sorted(unknown))}; "
                f"those for sampling are {', '.join(sorted(known))}"
            )
        if max_draft < 0:
            raise OptionError(f"max_draft={max_draft} is out of range: 0 turns speculation off, 16 is usual")
        if (stop or json_schema is not None or regex is not None) and self.tokenizer is None:
            raise OptionError("stop strings and grammars need a tokenizer: load the model with tokenizer=…")
        tokens = encode(prompt, self.tokenizer, template)
        eos = frozenset(stop_tokens) | (frozenset() if ignore_eos else self.eos)
        if json_schema is not None or regex is not None:
            made = grammar_processor(self.tokenizer, self.target.vocabulary, self.eos, json_schema, regex)
            processors = (*processors, made)
        if shared:  # a stateful processor follows one answer
            processors = [p.fresh() if isinstance(p, GrammarProcessor) else copy.deepcopy(p) for p in processors]
        words = tuple(tuple(self._word(w)) for w in bad_words)
        return Request(
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(processors=tuple(processors), bad_words=words, **sampling),
            accept=make_rule(accept, **accept_options or {}),
            seed=seed,
            sample=sample,
            stop=Detokenizer(self.tokenizer, (stop,) if isinstance(stop, str) else stop, eos),
            max_draft=max_draft,
            logprobs=logprobs,
        )

    def _word(self, word: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(word, str):
            return word
        if self.tokenizer is None:
            raise OptionError("bad words as text need a tokenizer: give token ids")
        return list(self.tokenizer(word, add_special_tokens=False)["input_ids"])


class Stream:
    """Pieces of text while they come. Leaving the loop, or Ctrl-C in it, ends the generation; what was said stays."""

    def __init__(self, engine: Engine, request: Request, slot: Slot | None = None) -> None:
        self._request = request
        self._running: Running | None = None
        self._steps = engine.run([request], slot)

    def __iter__(self) -> Iterator[str]:
        text = self._request.stop
        assert isinstance(text, Detokenizer)
        sent = 0
        try:
            for running in self._steps:
                self._running = running
                now = text.visible() if running.finish is None else text.finish()
                if len(now) > sent:
                    yield now[sent:]
                    sent = len(now)
        finally:
            self._steps.close()  # type: ignore[attr-defined]

    def cancel(self) -> None:
        """End it after the step under way. Safe from another thread."""
        self._request.cancel()

    @property
    def stats(self) -> Stats | None:
        """So far."""
        return self._running.stats if self._running else None

    @property
    def result(self) -> Result:
        """What was said, up to now or to the end."""
        if self._running is None:
            raise PromptError("nothing was generated yet: iterate over the stream first")
        return result(self._running)


class Chat:
    """A conversation: the messages so far, and a slot that has already read them."""

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._slot = llm.target.open()

    def send(self, content: str, **options: Any) -> Result:
        stream = self.stream(content, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, content: str, **options: Any) -> Stream:
        """Say something and stream the answer. It joins the conversation even if it is cut short."""
        (seed,) = spread(options.pop("seed", None), 1)
        messages = [*self.messages, {"role": "user", "content": content}]
        request = self.llm.request(messages, seed=seed, **options)
        self.messages = messages
        self._rewind(request.tokens)
        return ChatStream(self, self.llm.engine, request, self._slot)

    def close(self) -> None:
        self.llm.target.close(self._slot)

    def _rewind(self, tokens: list[int]) -> None:
        """Keep what the new prompt begins with; a drafter that reads hidden states must see the prompt again."""
        read = self._slot.tokens
        common = 0
        if not self.llm.engine.drafter.layers:
            while common < min(len(read), len(tokens) - 1) and read[common] == tokens[common]:
                common += 1
        self.llm.target.truncate(self._slot, common)


class ChatStream(Stream):
    def __init__(self, chat: Chat, engine: Engine, request: Request, slot: Slot) -> None:
        super().__init__(engine, request, slot)
        self._chat = chat

    def __iter__(self) -> Iterator[str]:
        try:
            yield from super().__iter__()
        finally:
            if self._running is not None:
                self._chat.messages.append({"role": "assistant", "content": self.result.text})


def result(sequence: Running) -> Result:
    text = sequence.request.stop
    return Result(
        text=text.finish() if isinstance(text, Detokenizer) else "",
        tokens=list(sequence.tokens),
        finish_reason=sequence.finish or "cancelled",
        stats=sequence.stats,
        seed=sequence.request.seed,
        logprobs=list(sequence.logprobs) if sequence.request.logprobs is not None else None,
    )


def spread(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One seed per prompt, from one for all, from a list, or from nowhere: then fresh ones, told in the results."""
    if seed is None:
        return [secrets.randbits(32) for _ in range(count)]
    if isinstance(seed, int):
        return [seed] * count
    if len(seed) != count:
        raise OptionError(f"{len(seed)} seeds for {count} prompts: give one, or one per prompt")
    return list(seed)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends an answer: of the generation config, the model's config and the tokenizer."""
    ends: set[int] = set()
    for place in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(place, "eos_token_id", None)
        ends.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(ends)
