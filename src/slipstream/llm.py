"""LLM: a model, its tokenizer and a drafter, with three methods: generate, stream, chat."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from threading import Lock
from typing import Any, Literal, SupportsIndex, Unpack, overload

import torch

from slipstream import drafters
from slipstream.accept import Rule, make_rule
from slipstream.answers import AsyncStream, Result, Stream, answered, result, together
from slipstream.checks import biases, integer, listed, real, seeds, separated
from slipstream.drafters import _capabilities as can
from slipstream.drafters import _swapping as swapping
from slipstream.drafters._joint import JointDrafter
from slipstream.drafters._swapping import Reloaded
from slipstream.drafters.base import Drafter
from slipstream.engine import Engine
from slipstream.errors import OptionError, PromptError, SlipstreamError
from slipstream.grammar import GrammarProcessor, grammar_processor
from slipstream.heads import Head, load_head
from slipstream.heads.checkpoint import find_folder
from slipstream.options import Options
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.sequence import Kept, check_prompt
from slipstream.sequence import Sequence as Running
from slipstream.service import Service
from slipstream.targets import load_model, open_target
from slipstream.text import Detokenizer, Prompt, encode, end_tokens, predictions, split_batch, tokenised
from slipstream.trace.record import Recorder
from slipstream.turns import current

PROCESSORS = "transformers' LogitsProcessor objects"
CONTINUED = 4  # tokens of a continued text that the answer's are decoded behind: a character has no more
MAX_DRAFT_PREDICTED = 63  # with a prediction long drafts may be right as a whole; with the root, 64 rows


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
    memory: float = 0.9,
    model_options: dict[str, Any] | None = None,
    **drafter_options: Any,
) -> LLM:
    """A language model that answers faster.

        llm = slipstream.load()
        print(llm.generate("Write one sentence about the sea.").text)

    model: a hub id, a folder (a model's or a LoRA adapter's), a GGUF file, a transformers model already in memory, or
    nothing for the embedded one.
    tokenizer: for a model in memory, so that prompts and answers can be text; otherwise it comes with the model.
    drafter: a name from `slipstream drafters`; its options follow as keywords. `auto` asks the drafters that pay.
    max_batch: how many answers are written at a time at most.
    dtype, device, device_map, trust_remote_code, model_options: how to load the model; the last go to transformers'
    `from_pretrained`. A model in memory is taken as it is, and they are refused.
    graphs, compile: on a GPU, whether steps are captured as CUDA graphs, and compiled before (slower to start).
    memory: the share of a GPU's free memory that texts may take; a small model takes less.
    """
    max_batch = integer("max_batch", max_batch, 1)
    if isinstance(drafter, str):
        drafters.find(drafter)  # refuse a misspelt name before the model is loaded
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
    else:
        loading = {"dtype": dtype, "device": device, "device_map": device_map, "trust_remote_code": trust_remote_code}
        if ignored := [name for name, value in {**loading, "model_options": model_options}.items() if value]:
            raise OptionError(
                f"{', '.join(ignored)}: for loading a model, and this one is in memory already; move or cast it first"
            )
    how: dict[str, Any] = {"max_batch": max_batch, "graphs": graphs, "compile": compile, "memory": memory}
    return LLM(model, tokenizer, drafter, **how, **drafter_options)


class LLM:
    """A model, its tokenizer and a drafter. `load` makes one; a model in memory can be given here too.

        llm = slipstream.load("HuggingFaceTB/SmolLM2-135M-Instruct")
        llm.generate("Hello!").text                     # one answer
        llm.generate("Hello!", n=3, temperature=0.8)    # a list of three
        llm.generate(["Hello!", "Good bye!"])           # a list of one for each prompt
        for piece in llm.stream("Hello!"): ...          # as it is written
        await llm.agenerate("Hello!"); async for piece in llm.astream("Hello!"): ...    # in an event loop
        with llm.chat("You are brief.") as chat: ...    # a conversation that reads each turn once
        llm.close()                                     # caches are given back; or use it in a `with`

    Answers are those of the model alone, whatever the drafter: `Result.stats` tells what it gained.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        drafter: str | Drafter = "auto",
        *,
        max_batch: int = 16,
        graphs: bool = True,
        compile: bool = False,
        memory: float = 0.9,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        if not 0 < (memory := real("memory", memory)) < 1:
            raise OptionError(f"memory={memory}: a share of what is free, between 0 and 1")
        self.target = open_target(model, graphs=graphs, compile=compile, memory=memory)
        name = drafter if isinstance(drafter, str) else type(drafter).__name__
        made: Drafter | None = None
        try:
            with self.target.turns, current(self.target.device):  # it may measure and capture steps
                made = drafters.make(drafter, self.target, tokenizer, **options)
            self.engine = Engine(self.target, made, name, max_batch)
            # So that `reload_heads` knows which ones are new.
            named = any(part.named for part in swapping.heads_of(made).values())
            self._heads_before = swapping.on_record() if named else set[Path]()
        except BaseException:  # the error's traceback may be kept for long, and what it holds with it
            try:
                can.release(made)
            finally:
                self.target.release()
            raise
        self._service: Service | None = None
        self._serving = threading.Lock()  # held while the service is made
        self._first = threading.Lock()  # held by the first of the threads that call `generate` at the same time
        self.eos = end_tokens(model, tokenizer)
        # transformers applies this default of the model in greedy decoding too, so it is applied here.
        default = getattr(getattr(model, "generation_config", None), "repetition_penalty", None)
        self._repetition_penalty = 1.0 if default is None else float(default)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything except the model: caches, captured steps, the drafter. It can't be used after that. Running
        answers must be read to the end, or their streams closed, before."""
        if self.engine.closed:
            return
        if self._service is not None:
            self._service.close()
        self.engine.close()
        del self.target
        gc.collect()  # frees reference cycles, which Python may keep for long
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @overload
    def generate(self, prompt: Prompt, *, n: Literal[1] = 1, **options: Unpack[Options]) -> Result: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[Options]) -> list[Result]: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompt: Sequence[Prompt], *, n: Literal[1] = 1, **options: Unpack[Options]) -> list[Result]: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompt: Sequence[Prompt], *, n: int, **options: Unpack[Options]) -> list[list[Result]]: ...

    def generate(self, prompt: Prompt | Sequence[Prompt], *, n: int = 1, **options: Unpack[Options]) -> Any:
        """Answer one prompt, or several at once.

        prompt: a string (one user message to a model with a chat template), a list of token ids, or a list of chat
        messages such as {"role": "user", "content": "Hi!"}; or a list of these.

        n: how many answers to each. One prompt gives a `Result`, with n > 1 a list of them; a list of prompts gives a
        list of either.

        Options, in brackets what holds if they are left out:

        max_new_tokens (256); stop: strings that end the answer; stop_tokens: ids that do, besides the model's own;
        ignore_eos (False).

        temperature (0: greedy), top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        logit_bias: {id: added to its logit}, bad_words: never said, as text or token ids, processors: transformers'
        LogitsProcessor objects.

        json_schema: a dict, its text or a pydantic model that the answer follows; regex: that it matches.

        seed: one, or one per prompt (a fresh one, reported in the result); sample (0): the i-th of n answers has the
        sample index sample + i.

        max_draft: drafted nodes per step (16, on a GPU 31, with a prediction 63; 0 turns speculation off);
        prediction: the answer that is expected, more or less, as text or token ids, for all prompts or one for each:
        it is drafted first, and found again after an edit; drafters: names of those that `auto` may ask; collection:
        whose text may draft, in drafters that keep text; accept ("match"): or rejection, typical, lenient;
        accept_options.

        template (True): False continues a string as it is; logprobs: alternatives to report for each token; trace
        (False): record what happened at each step.
        """
        requests = self.requests(prompt, n=n, **options)
        return arranged([result(sequence) for sequence in self._answered(requests)], prompt, n)

    def _answered(self, requests: list[Request]) -> list[Running]:
        """Answer one request in this thread; several, or one while others are being answered, through the service."""
        first = self._first.acquire(blocking=False)
        try:
            others = not first or (self._service is not None and self._service.busy)
            if (others or len(requests) > 1) and not self.engine.inside:
                return together(self.service, requests, offline=len(requests) > 1)
            ended = {id(s.request): s for s in self.engine.run(requests) if s.finish is not None}
            return [ended[id(request)] for request in requests]
        finally:
            if first:
                self._first.release()

    async def agenerate(self, prompt: Prompt | Sequence[Prompt], *, n: int = 1, **options: Unpack[Options]) -> Any:
        """As `generate`, from an event loop. Answers requested at the same time run as a batch; cancelling a task ends
        its own."""
        requests = self._requests(prompt, n, {**options}, shared=True)
        tasks = [asyncio.ensure_future(answered(self.service, request)) for request in requests]
        try:
            return arranged(await asyncio.gather(*tasks), prompt, n)
        finally:
            for task in tasks:
                task.cancel()

    def requests(self, prompt: Prompt | Sequence[Prompt], *, n: int = 1, **options: Unpack[Options]) -> list[Request]:
        """The checked requests of a call of `generate`, in the order of its answers."""
        return self._requests(prompt, n, {**options})

    def _requests(
        self, prompt: Prompt | Sequence[Prompt], n: int, wishes: dict[str, Any], shared: bool = False
    ) -> list[Request]:
        """shared: answers of other calls may use the same processor objects."""
        prompts, many = split_batch(prompt)
        n = integer("n", n, 1)
        sample = integer("sample", wishes.pop("sample", 0), 0)
        each_seed = seeds(wishes.pop("seed", None), len(prompts))
        prediction = wishes.pop("prediction", None)
        expected = predictions(prediction, len(prompts)) if many else [prediction]
        wishes = self._with_grammar(wishes)
        shared = shared or len(prompts) * n > 1
        requests = [
            self.request(p, sample=sample + i, seed=seed, prediction=prediction, shared=shared, **wishes)
            for p, seed, prediction in zip(prompts, each_seed, expected, strict=True)
            for i in range(n)
        ]
        for request in requests:  # all are checked before the first is answered
            check_prompt(request, self.target)
        return requests

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece, with the options of `generate`: iterate over text; `.result` afterwards,
        `.cancel()` at any time."""
        return Stream(self.engine, self._one_request(prompt, {**options}))

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """As `stream`, in an event loop: `async for piece in llm.astream(…)`."""
        return AsyncStream(self.service, self._one_request(prompt, {**options}, shared=True))

    @property
    def service(self) -> Service:
        """The service that answers many callers at a time, from any thread or event loop."""
        self.engine.check_open()
        with self._serving:
            if self._service is None:
                self._service = Service(self.engine)
            return self._service

    def swap_head(self, source: str | Path | Head, name: str | None = None) -> str:
        """Replace a head by another of the same kind and shape from the next step on. Running answers continue; their
        texts don't change. name: which head to replace, if several of this kind draft. Returns the replaced name."""
        self.engine.check_open()
        folder = None if isinstance(source, Head) else find_folder(source)
        with self.target.turns, current(self.target.device):  # no memory is taken while another thread captures
            new = source.bind(self.model) if isinstance(source, Head) else load_head(source, self.model)
        drafter = self.engine.drafter
        running = swapping.heads_of(drafter)
        name = swapping.choose(running, new, name)
        swapping.check_alike(running[name].head, new)
        with self.engine.turn():  # between two steps
            running[name].swap(new, folder)
            if isinstance(drafter, JointDrafter):
                drafter.renewed(name)
        return name

    def reload_heads(self) -> Reloaded:
        """Take over heads that were registered for this model since it was loaded, for instance by `slipstream tune`:
        they replace those that a new start would not use any more. A head that does not fit is reported, with the
        reason."""
        self.engine.check_open()
        found, running = Reloaded(), swapping.heads_of(self.engine.drafter)
        successors = swapping.replaced(self.model, running, self._heads_before)
        self._heads_before = swapping.on_record()
        for name, folder in successors.items():
            try:
                self.swap_head(folder, name)
                running[name].named = False
                found.swapped[name] = str(folder)
            except SlipstreamError as error:
                found.refused[name] = str(error)
        return found

    def _one_request(self, prompt: Prompt, wishes: dict[str, Any], shared: bool = False) -> Request:
        prompts, many = split_batch(prompt)
        if many:
            raise PromptError(f"stream takes one prompt, found {len(prompts)}: call it once for each, or use generate")
        (seed,) = seeds(wishes.pop("seed", None), 1)
        return self.request(prompts[0], seed=seed, shared=shared, **self._with_grammar(wishes))

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its cache: each turn reads only what is new."""
        return Chat(self, system)

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        seed: SupportsIndex = 0,
        sample: int = 0,
        stop: str | Sequence[str] | None = (),
        stop_tokens: Sequence[int] | None = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        accept: str | Rule = "match",
        accept_options: dict[str, Any] | None = None,
        collection: str = "default",
        max_draft: int | None = None,
        prediction: str | Sequence[int] | None = None,
        drafters: str | Sequence[str] | None = None,
        template: bool = True,
        processors: Sequence[Any] | None = (),
        bad_words: Sequence[str | Sequence[int]] | None = (),
        trace: bool | Callable[[dict[str, Any]], None] = False,
        shared: bool = False,
        **sampling: Any,
    ) -> Request:
        """One request as `generate` makes it. shared: other answers use the same processor objects. trace: may be a
        function that receives each line of the trace as soon as it is final."""
        self.engine.check_open()
        known = {f.name for f in fields(Sampling)}
        if unknown := set(sampling) - known:
            raise OptionError(
                f"generate has no option {', '.join(sorted(unknown))}; "
                f"those for sampling are {', '.join(sorted(known))}"
            )
        if max_draft is None and prediction is not None:
            max_draft = MAX_DRAFT_PREDICTED
        elif max_draft is None:
            max_draft = can.default_draft(self.engine.drafter, self.target)
        stop = self._stop_strings(stop)
        tokens = encode(prompt, self.tokenizer, template)
        ends = {integer("stop_tokens", token) for token in listed("stop_tokens", stop_tokens, "token ids")}
        processors = listed("processors", processors, PROCESSORS)
        if shared:  # a processor may be stateful: each answer needs its own
            processors = [p.fresh() if isinstance(p, GrammarProcessor) else copied(p) for p in processors]
        words = tuple(tuple(self._ids(w, "bad_words")) for w in listed("bad_words", bad_words, "words"))
        bias = biases(sampling.pop("logit_bias", None))
        last = self.target.vocabulary - 1
        if bad := sorted(t for t in {*bias, *ends, *(t for w in words for t in w)} if not 0 <= t <= last):
            raise OptionError(f"logit_bias, bad_words or stop_tokens name {bad[:5]}: ids lie in 0..{last}")
        sampling.setdefault("repetition_penalty", self._repetition_penalty)
        continues = self.tokenizer is not None and (
            not template or (isinstance(prompt, str) and not self.tokenizer.chat_template)
        )
        tail = tokens[-CONTINUED:] if continues else []
        if any(not 0 <= token < min(self.target.vocabulary, len(self.tokenizer)) for token in tail):
            tail = []  # they have no text; `check_prompt` may refuse them
        request = Request(
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(processors=tuple(processors), bad_words=words, logit_bias=bias, **sampling),
            accept=make_rule(accept, **accept_options or {}),
            seed=integer("seed", seed),
            sample=sample,
            stop=Detokenizer(
                self.tokenizer,
                stop,
                frozenset(ends) | (frozenset() if ignore_eos else self.eos),
                after=tail,
            ),
            collection=collection,
            max_draft=max_draft,
            drafters=None if drafters is None else tuple(separated(drafters)),
            prediction=None if prediction is None else list(self._ids(prediction, "a prediction")),
            logprobs=logprobs,
        )
        if trace:
            request.watch = self._recorder(prompt, request, None if trace is True else trace)
        return request

    def _stop_strings(self, given: str | Sequence[str] | None) -> list[str]:
        stop = [given] if isinstance(given, str) else listed("stop", given, "strings")
        if wrong := [s for s in stop if not isinstance(s, str)]:
            raise OptionError(f"stop names {wrong[:5]}: give strings, and token ids as stop_tokens")
        if stop and self.tokenizer is None:
            raise OptionError("stop strings need a tokenizer: load the model with tokenizer=…")
        return stop

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

    def _with_grammar(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options with json_schema and regex replaced by a processor that enforces them, made once for all
        answers."""
        options = {**given}
        schema, regex = options.pop("json_schema", None), options.pop("regex", None)
        if schema is None and regex is None:
            return options
        if self.tokenizer is None:
            raise OptionError("a grammar needs a tokenizer: load the model with tokenizer=…")
        made = grammar_processor(self.tokenizer, self.target.vocabulary, self.eos, schema, regex)
        return {**options, "processors": (*listed("processors", options.get("processors"), PROCESSORS), made)}

    def _ids(self, text: str | Sequence[int], what: str) -> Sequence[int]:
        """The tokens of a piece of an answer, without special tokens."""
        if not isinstance(text, str):
            return [integer(what, token) for token in listed(what, text, "token ids")]
        if self.tokenizer is None:
            raise OptionError(f"{what} as text can't be read without a tokenizer: give token ids")
        return tokenised(text, self.tokenizer, special=False)


class Chat:
    """A conversation: `messages` so far, and a cache that has already read them. Close it, or use it in a `with`.

    Only one stream at a time: the next answer depends on the one before. `messages` may be edited between two answers:
    the prefix that the next prompt shares with the cached text is not read again.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._kept = Kept()
        self._reading = Lock()  # held while a stream is being consumed

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, content: str, **options: Unpack[Options]) -> Result:
        """Send a message and get the answer."""
        stream = self.stream(content, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, content: str, **options: Unpack[Options]) -> Stream:
        """Send a message and stream the answer. Both are added to the conversation once there is an answer, even one
        that is cut short. The message follows everything that is in the conversation when the stream is first read."""
        (options["seed"],) = seeds(options.get("seed"), 1)
        return ChatStream(self, {"role": "user", "content": content}, self.llm._with_grammar(options))

    def close(self) -> None:
        """Free the cache. The conversation can go on: the next turn reads all of it again."""
        if not self._reading.acquire(blocking=False):
            raise PromptError(STILL_OPEN)
        try:
            self.llm.engine.forget(self._kept)
        finally:
            self._reading.release()


STILL_OPEN = "a stream of this conversation is still being read: read it to its end, or call its close(), first"


class ChatStream(Stream):
    def __init__(self, chat: Chat, message: dict[str, str], options: dict[str, Any]) -> None:
        self._chat, self._message, self._options = chat, message, options
        super().__init__(chat.llm.engine, self._asked())

    def _asked(self) -> Request:
        """The request: the conversation as it is now, and the new message."""
        self._before = [dict(message) for message in self._chat.messages]
        request = self._chat.llm.request([*self._before, self._message], **self._options)
        check_prompt(request, self._chat.llm.target)
        return request

    def _begin(self) -> Iterator[Running]:
        chat = self._chat
        if not chat._reading.acquire(blocking=False):
            raise PromptError(STILL_OPEN)
        try:
            if chat.messages != self._before:  # the conversation has gone on since this was asked for
                cancelled, self._request = self._request.cancelled, self._asked()
                self._request.cancelled = cancelled
            yield from self._engine.run([self._request], chat._kept)
        finally:
            if self._running is not None:
                chat.messages += [self._message, {"role": "assistant", "content": self.result.text}]
            chat._reading.release()


def arranged(results: list[Result], prompt: Any, n: int) -> Any:
    """Results in the form that `generate` returns: one for one prompt, else lists."""
    groups: list[Any] = results if n == 1 else [results[i : i + n] for i in range(0, len(results), n)]
    return groups if split_batch(prompt)[1] else groups[0]


def copied(processor: Any) -> Any:
    try:
        return copy.deepcopy(processor)
    except Exception as error:
        raise OptionError(
            f"{type(processor).__name__} can't be copied ({error}), and answers that are written together each need a "
            "processor of their own: ask for them one by one, with generate"
        ) from error
