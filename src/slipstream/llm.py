"""LLM: a model, its tokenizer and a drafter behind three verbs: generate, stream, chat."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from slipstream import drafters
from slipstream.accept import Rule, make_rule
from slipstream.budget import usual_draft
from slipstream.drafters.base import Drafter
from slipstream.engine import Engine, TokenLogprobs, check_prompt
from slipstream.engine import Sequence as Running
from slipstream.errors import OptionError, PromptError
from slipstream.grammar import GrammarProcessor, grammar_processor
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.stats import Stats
from slipstream.target import Slot, load_model, open_target
from slipstream.text import Detokenizer, Prompt, encode, split_batch
from slipstream.trace.record import Recorder

MAX_DRAFT_PREDICTED = 63  # where a long draft may be right as a whole; with the root, 64 rows


@dataclass(frozen=True)
class Result:
    """One answer."""

    text: str  # without the stop string that ended it
    tokens: list[int]  # every emitted token, the one that ended it included
    finish_reason: str  # stop, length, cancelled
    stats: Stats
    seed: int  # what it was drawn with: pass seed and sample again to draw it again
    sample: int = 0
    logprobs: list[TokenLogprobs] | None = None
    trace: list[dict[str, Any]] | None = None  # the lines of a trace file: see docs/trace-format.md

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "sample": self.sample,
            **({} if self.logprobs is None else {"logprobs": [asdict(entry) for entry in self.logprobs]}),
            "stats": self.stats.as_dict(),
        }


def load(
    model: Any = None,
    *,
    drafter: str | Drafter = "auto",
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    max_batch: int = 16,
    graphs: bool = True,
    compile: bool = False,
    model_options: dict[str, Any] | None = None,
    **drafter_options: Any,
) -> LLM:
    """A language model that answers faster.

    model: a hub id, a folder, a GGUF file, a transformers model already in memory, or nothing for the embedded one.
    drafter: a name from `slipstream drafters`; its options follow as keywords. `auto` asks those that earn their time.
    graphs, compile: on a GPU, whether steps are captured as CUDA graphs, and compiled before (slower to start).
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
    return LLM(model, tokenizer, drafter, max_batch=max_batch, graphs=graphs, compile=compile, **drafter_options)


class LLM:
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        drafter: str | Drafter = "auto",
        *,
        max_batch: int = 16,
        graphs: bool = True,
        compile: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        self.target = open_target(model, graphs=graphs, compile=compile)
        made = drafters.make(drafter, self.target, tokenizer, **options)
        name = drafter if isinstance(drafter, str) else type(drafter).__name__
        self.engine = Engine(self.target, made, name, max_batch)
        self.eos = end_tokens(model, tokenizer)
        # Greedy decoding by transformers applies this default of the model's, so ours does.
        default = getattr(getattr(model, "generation_config", None), "repetition_penalty", None)
        self._repetition_penalty = 1.0 if default is None else float(default)

    def generate(self, prompt: Prompt | Sequence[Prompt], *, n: int = 1, sample: int = 0, **options: Any) -> Any:
        """Answer. A Result for one prompt, a list of them for n > 1, and for a list of prompts a list of either.
        The i-th of n answers has the sample index sample + i.

        Options: max_new_tokens (256), temperature (0: greedy), top_k, top_p, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, logit_bias, bad_words, processors (transformers' LogitsProcessor objects),
        json_schema, regex, seed (one, or one per prompt), stop (strings), stop_tokens (ids, besides the model's own),
        ignore_eos, logprobs (alternatives to report), accept (match, rejection, typical, lenient), accept_options,
        collection (whose text may draft, in drafters that keep text), max_draft (nodes per step, 16, on a GPU 31, with
        a prediction 63; 0 turns speculation off), prediction (the answer that is expected, more or less, as text or
        token ids, for all prompts or a list of one for each: it is drafted first, and found again after an edit),
        drafters (names: whom `auto` may ask), template (False continues a string as it is), trace (record what
        happened at each step).
        """
        prompts, many = split_batch(prompt)
        if n < 1:
            raise OptionError(f"n={n}: ask for at least one answer")
        seeds = spread(options.pop("seed", None), len(prompts))
        prediction = options.pop("prediction", None)
        predictions = one_each(prediction, len(prompts)) if many else [prediction]
        options = self._with_grammar(options)
        alone = len(prompts) * n == 1
        requests = [
            self.request(p, sample=sample + i, seed=seed, prediction=expected, shared=not alone, **options)
            for p, seed, expected in zip(prompts, seeds, predictions, strict=True)
            for i in range(n)
        ]
        for request in requests:  # a mistake in the last one must not cost the answers of the first
            check_prompt(request, self.target)
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
        return Stream(self.engine, self.request(prompts[0], seed=seed, **self._with_grammar(options)))

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
        stop: str | Sequence[str] | None = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        accept: str | Rule = "match",
        accept_options: dict[str, Any] | None = None,
        collection: str = "default",
        max_draft: int | None = None,
        prediction: str | Sequence[int] | None = None,
        drafters: str | Sequence[str] | None = None,
        template: bool = True,
        processors: Sequence[Any] = (),
        bad_words: Sequence[str | Sequence[int]] = (),
        trace: bool | Callable[[dict[str, Any]], None] = False,
        shared: bool = False,
        **sampling: Any,
    ) -> Request:
        """What `generate` asks the engine for. shared: other answers use the same processor objects. trace: may be a
        function that receives each line of the trace as soon as it is final."""
        known = {f.name for f in fields(Sampling)}
        if unknown := set(sampling) - known:
            raise OptionError(
                f"generate has no option {', '.join(sorted(unknown))}; "
                f"those for sampling are {', '.join(sorted(known))}"
            )
        if max_draft is None:
            max_draft = usual_draft(self.target) if prediction is None else MAX_DRAFT_PREDICTED
        if max_draft < 0:
            usual = usual_draft(self.target)
            raise OptionError(f"max_draft={max_draft} is out of range: 0 turns speculation off, {usual} is usual")
        stop = (stop,) if isinstance(stop, str) else stop or ()
        if stop and self.tokenizer is None:
            raise OptionError("stop strings need a tokenizer: load the model with tokenizer=…")
        tokens = encode(prompt, self.tokenizer, template)
        eos = frozenset(stop_tokens) | (frozenset() if ignore_eos else self.eos)
        if shared:  # a stateful processor follows one answer
            processors = [p.fresh() if isinstance(p, GrammarProcessor) else copy.deepcopy(p) for p in processors]
        words = tuple(tuple(self._ids(w, "bad words")) for w in bad_words)
        bias = {int(token): float(value) for token, value in (sampling.pop("logit_bias", None) or {}).items()}
        if bad := sorted({*bias, *(t for w in words for t in w)} - set(range(self.target.vocabulary))):
            raise OptionError(f"logit_bias and bad_words name {bad[:5]}: ids lie in 0..{self.target.vocabulary - 1}")
        sampling.setdefault("repetition_penalty", self._repetition_penalty)
        request = Request(
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(processors=tuple(processors), bad_words=words, logit_bias=bias, **sampling),
            accept=make_rule(accept, **accept_options or {}),
            seed=seed,
            sample=sample,
            stop=Detokenizer(self.tokenizer, stop, eos),
            collection=collection,
            max_draft=max_draft,
            drafters=None if drafters is None else tuple(names(drafters)),
            prediction=None if prediction is None else list(self._ids(prediction, "a prediction")),
            logprobs=logprobs,
        )
        if trace:
            request.watch = self._recorder(prompt, request, None if trace is True else trace)
        return request

    def _recorder(self, prompt: Prompt, request: Request, sink: Callable[[dict[str, Any]], None] | None) -> Recorder:
        if not isinstance(prompt, str):
            prompt = self.tokenizer.decode(request.tokens) if self.tokenizer else " ".join(map(str, request.tokens))
        header = {
            "model": self.name,
            "drafter": self.engine.name,
            "accept": request.accept.name,
            "exact": request.accept.lossless and self.target.exact,
            "prompt": prompt,
            "prompt_tokens": len(request.tokens),
        }
        assert isinstance(request.stop, Detokenizer)
        return Recorder(header, request.stop, self.tokenizer, sink)

    def _with_grammar(self, options: dict[str, Any]) -> dict[str, Any]:
        """json_schema and regex turned into the processor that enforces them, made once for all answers."""
        schema, regex = options.pop("json_schema", None), options.pop("regex", None)
        if schema is None and regex is None:
            return options
        if self.tokenizer is None:
            raise OptionError("a grammar needs a tokenizer: load the model with tokenizer=…")
        made = grammar_processor(self.tokenizer, self.target.vocabulary, self.eos, schema, regex)
        return {**options, "processors": (*options.get("processors", ()), made)}

    def _ids(self, text: str | Sequence[int], what: str) -> Sequence[int]:
        """Tokens of a piece of an answer: nothing is added at its ends."""
        if not isinstance(text, str):
            return text
        if self.tokenizer is None:
            raise OptionError(f"{what} as text can't be read without a tokenizer: give token ids")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


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
    """A conversation: the messages so far, and a slot that has already read them. Close it, or use it in a `with`."""

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._slot: Slot | None = None

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, content: str, **options: Any) -> Result:
        stream = self.stream(content, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, content: str, **options: Any) -> Stream:
        """Say something and stream the answer. Both join the conversation as soon as there is an answer, even one that
        is cut short."""
        (seed,) = spread(options.pop("seed", None), 1)
        said = {"role": "user", "content": content}
        request = self.llm.request([*self.messages, said], seed=seed, **self.llm._with_grammar(options))
        check_prompt(request, self.llm.target)
        return ChatStream(self, said, request, self._rewound(request.tokens))

    def close(self) -> None:
        """Give the cache back. The conversation can go on: the next turn reads all of it again."""
        if self._slot is not None:
            self.llm.target.close(self._slot)
            self._slot = None

    def _rewound(self, tokens: list[int]) -> Slot:
        """The slot with what the new prompt begins with; a drafter that reads hidden states must see it all again."""
        self._slot = self._slot or self.llm.target.open()
        read = self._slot.tokens
        common = 0
        if not self.llm.engine.drafter.layers:
            while common < min(len(read), len(tokens) - 1) and read[common] == tokens[common]:
                common += 1
        self.llm.target.truncate(self._slot, common)
        return self._slot


class ChatStream(Stream):
    def __init__(self, chat: Chat, said: dict[str, str], request: Request, slot: Slot) -> None:
        super().__init__(chat.llm.engine, request, slot)
        self._chat, self._said = chat, said

    def __iter__(self) -> Iterator[str]:
        try:
            yield from super().__iter__()
        finally:
            if self._running is not None:
                self._chat.messages += [self._said, {"role": "assistant", "content": self.result.text}]


def result(sequence: Running) -> Result:
    text, watch = sequence.request.stop, sequence.request.watch
    return Result(
        text=text.finish() if isinstance(text, Detokenizer) else "",
        tokens=list(sequence.tokens),
        finish_reason=sequence.finish or "cancelled",
        stats=sequence.stats,
        seed=sequence.request.seed,
        sample=sequence.request.sample,
        logprobs=list(sequence.logprobs) if sequence.request.logprobs is not None else None,
        trace=watch.end(sequence) if isinstance(watch, Recorder) and sequence.finish else None,
    )


def names(given: str | Sequence[str]) -> list[str]:
    """Names from a list, or from a string that separates them by commas."""
    words = given.split(",") if isinstance(given, str) else given
    return [word.strip() for word in words if word.strip()]


def spread(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One seed per prompt, from one for all, from a list, or from nowhere: then fresh ones, told in the results."""
    if seed is None:
        return [secrets.randbits(32) for _ in range(count)]
    if isinstance(seed, int):
        return [seed] * count
    if len(seed) != count:
        raise OptionError(f"{len(seed)} seeds for {count} prompts: give one, or one per prompt")
    return list(seed)


def one_each(prediction: Any, count: int) -> list[Any]:
    """One prediction per prompt, from one for all or from a list."""
    if prediction is None or isinstance(prediction, str) or all(isinstance(t, Integral) for t in prediction):
        return [prediction] * count
    if len(prediction) != count:
        raise OptionError(f"{len(prediction)} predictions for {count} prompts: give one, or one per prompt")
    return list(prediction)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends an answer: of the generation config, the model's config and the tokenizer."""
    ends: set[int] = set()
    for place in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(place, "eos_token_id", None)
        ends.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(ends)
