"""A drop-in decoding method for transformers' `generate`.

    model.generate(**inputs, custom_generate=slipstream.speculate())

transformers prepares prompt, logits processors and stopping criteria as always, and slipstream does the decoding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from slipstream.checks import integer
from slipstream.drafters import make
from slipstream.engine import Engine
from slipstream.errors import OptionError
from slipstream.request import Request
from slipstream.rows import Rows
from slipstream.sampling import Sampling
from slipstream.sequence import check_prompt
from slipstream.stats import Stats
from slipstream.targets import open_target

# Criteria that judge each row by itself, without state between calls.
ROW_BY_ROW = (MaxLengthCriteria, EosTokenCriteria)
MAX_BATCH = 16


def speculate(drafter: str = "auto", *, max_draft: int | None = None, **options: Any) -> Speculate:
    """A decoding method for transformers' `generate`: the same tokens when greedy, the same distribution when
    sampling. What it can't serve is refused by name before anything runs.

    drafter: a name from `slipstream drafters`; its options follow as keywords. max_draft: drafted nodes per step.
    The object serves any number of calls; its `stats` are those of the last one, a `Stats` for each row.
    """
    if max_draft is not None:
        max_draft = integer("max_draft", max_draft, 0)
    return Speculate(drafter, max_draft, options)


class Speculate:
    """The decoding method that `speculate` returns. transformers calls it with the arguments of its own methods."""

    def __init__(self, drafter: str, max_draft: int | None, options: dict[str, Any]) -> None:
        self.drafter, self.max_draft, self.options = drafter, max_draft, options
        self.stats: list[Stats] = []  # of the last call, one for each row
        self._made: tuple[Any, ...] = ()  # the model, and its state, that the engine was made for
        self._engine: Engine | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        self.stats = []
        try:
            refuse_what_cannot_be(generation_config, model_kwargs)
            padding = left_padding(input_ids, model_kwargs.get("attention_mask"))
            check_positions(model_kwargs.get("position_ids"), input_ids, padding)
            rows = self._run(
                model, input_ids, padding, logits_processor, stopping_criteria, generation_config, streamer
            )
        finally:
            if streamer is not None:
                streamer.end()  # after an error too: its reader would wait forever
        self.stats = rows.stats
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=rows.sequences)
        return rows.sequences

    def _run(
        self,
        model: Any,
        input_ids: torch.Tensor,
        padding: list[int],
        processors: Any,
        criteria: Any,
        config: Any,
        streamer: Any,
    ) -> Rows:
        together = len(input_ids) > 1 and any(type(c) not in ROW_BY_ROW for c in criteria)
        own = [c for c in criteria if type(c) in ROW_BY_ROW] if together else criteria
        # transformers draws from torch's global generator. The seed is taken from there, so `torch.manual_seed` works.
        seed = int(torch.randint(2**62, ()).item()) if config.do_sample else 0
        requests = []
        for i, row in enumerate(input_ids):
            # A processor may be stateful: each row of a batch gets its own.
            following = processors if len(input_ids) == 1 else [for_row(p, i) for p in processors]
            requests.append(
                Request(
                    tokens=row[padding[i] :].tolist(),
                    max_new_tokens=max(1, config.max_length - len(row)),
                    sampling=Sampling(
                        temperature=1.0 if config.do_sample else 0.0,
                        processors=tuple(Padded(p, row[: padding[i]]) for p in following),
                    ),
                    seed=seed,
                    sample=i,
                    stop=Criteria(StoppingCriteriaList(own), row),
                )
            )
        engine = self._engine_for(model)
        for request in requests:
            request.max_draft = engine.target.default_draft if self.max_draft is None else self.max_draft
            check_prompt(request, engine.target)
        # Criteria that look at all rows need all rows to run at the same time.
        engine.max_batch = max(MAX_BATCH, len(requests) if together else 0)
        rows = Rows(input_ids, requests, criteria if together else None, padding_token(criteria, config), streamer)
        rows.follow(engine.run(requests))
        return rows

    def _engine_for(self, model: Any) -> Engine:
        """The engine, which is kept between calls. Made again for another model, or if this one was moved, cast or
        reconfigured."""
        state = (model, model.device, model.dtype, model.config.get_text_config()._attn_implementation)
        if self._engine is None or self._made[0] is not model or self._made[1:] != state[1:]:
            if self._engine is not None:  # its cache takes nearly all memory
                before, self._engine = self._engine, None
                before.close()
            target = open_target(model)
            self._engine, self._made = Engine(target, make(self.drafter, target, **self.options), self.drafter), state
        return self._engine


class Padded:
    """A logits processor that is shown the row as transformers would show it: with its left padding."""

    def __init__(self, processor: Callable[..., torch.Tensor], padding: torch.Tensor) -> None:
        self._processor, self._padding = processor, padding[None].clone()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._padding.shape[1]:
            input_ids = torch.cat([self._padding.to(input_ids.device), input_ids], dim=1)
        return self._processor(input_ids, scores)


class Criteria:
    """transformers' stopping criteria, asked after every emitted token."""

    def __init__(self, criteria: Any, row: torch.Tensor) -> None:
        self._criteria, self._ids = criteria, row[None].clone()

    def __call__(self, token: int) -> str | None:
        self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=1)
        return "stop" if bool(self._criteria(self._ids, None).all()) else None


def padding_token(criteria: Any, config: Any) -> int | None:
    """The token that pads a row after its end; None if transformers lets rows continue."""
    if not any(hasattr(c, "eos_token_id") for c in criteria):
        return None
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def left_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """How many tokens of each row are padding."""
    if mask is None:
        return [0] * len(input_ids)
    if mask.shape != input_ids.shape:
        raise OptionError(f"the attention mask's shape is {tuple(mask.shape)}, the prompts' {tuple(input_ids.shape)}")
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise OptionError("the attention mask has holes or padding on the right: pad prompts on the left")
    return (mask == 0).sum(1).tolist()


def check_positions(position_ids: torch.Tensor | None, input_ids: torch.Tensor, padding: list[int]) -> None:
    """Refuse positions that don't count from 0 after the padding."""
    if position_ids is None:
        return
    expected = torch.arange(input_ids.shape[1]) - torch.tensor(padding)[:, None]
    given = position_ids.cpu()
    if given.shape[-1] != expected.shape[1] or bool(((given != expected) & (expected >= 0)).any()):
        raise OptionError("position_ids that don't count from 0 behind the padding can't be served: leave them out")


def for_row(processor: Any, row: int) -> Any:
    """A copy of a processor for one row of a batch, which it will be shown as row 0."""
    if type(processor).__name__.startswith("Encoder"):
        raise OptionError(f"{type(processor).__name__} needs all rows of a batch at once: generate them one by one")
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        return guidance_for_row(processor, row)
    own = copy.deepcopy(processor)
    if isinstance(own, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, tokens: allowed(row, tokens)
    if isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, torch.Tensor):
        own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]  # since transformers 5.23: its padding
    return own


def guidance_for_row(processor: Any, row: int) -> Any:
    """Guidance by one row's negative prompt. It gets a cache of its own; the model is shared."""
    own, context = copy.copy(processor), dict(processor.unconditional_context)
    for name in ("input_ids", "attention_mask"):
        if context[name] is not None:
            context[name] = context[name][row : row + 1]
            if not len(context[name]):
                raise OptionError("negative_prompt_ids has fewer rows than there are answers: give one for each")
    own.unconditional_context = context
    return own


def refuse_what_cannot_be(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise OptionError(f"slipstream decodes greedily or by sampling, found {mode.value}: drop num_beams and its kin")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise OptionError(f"{name}=True can't be served while speculating: leave it out")
    if model_kwargs.pop("synced_gpus", False):
        raise OptionError("synced_gpus=True can't be served: speculating processes make different numbers of forwards")
    # transformers has already used the tokenizer, for stop strings and healing.
    caches = ("past_key_values", "cache_params")
    known = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "tokenizer", *caches)
    given = sorted(k for k, v in model_kwargs.items() if v is not None and k not in known)
    if given:
        raise OptionError(f"{', '.join(given)} can't be passed on while speculating: only text is continued")
    for name in caches:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise OptionError(f"slipstream keeps its own cache and would leave yours as it is: don't pass {name}")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise OptionError("slipstream keeps its own cache: don't pass past_key_values that hold a text")
    if generation_config.cache_implementation == "quantized":
        raise OptionError(
            "cache_implementation='quantized' can't be served: slipstream keeps its own cache, unquantised"
        )


def hand_over_everything() -> None:
    """Make transformers call `Speculate` with all arguments of its own decoding methods.

    It withholds `streamer`, `tokenizer` and `assistant_model` from a callable `custom_generate`, and then lacks the
    tokenizer itself, for stop strings. This makes it treat `Speculate` like a method of its own; other callables are
    not affected.
    """
    extract = GenerationMixin._extract_generation_mode_kwargs

    @functools.wraps(extract)
    def extract_for(self: Any, custom_generate: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        own = None if isinstance(custom_generate, Speculate) else custom_generate
        return extract(self, own, *args, **kwargs)

    GenerationMixin._extract_generation_mode_kwargs = extract_for


hand_over_everything()
