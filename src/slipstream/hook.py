"""A drop-in for those who already have a model.

    model.generate(**inputs, custom_generate=slipstream.speculate())

transformers prepares everything as ever (prompt, logits processors, stopping criteria) and hands over the decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from slipstream.budget import usual_draft
from slipstream.drafters import make
from slipstream.engine import Engine
from slipstream.errors import OptionError
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.target import open_target


def speculate(drafter: str = "auto", *, max_draft: int | None = None, **options: Any) -> Speculate:
    """A decoding method for transformers' `generate`: the same tokens when greedy, the same distribution when
    sampling. transformers hands no `streamer` to such methods: to stream, use `slipstream.load(model=…).stream`."""
    return Speculate(drafter, max_draft, options)


class Speculate:
    def __init__(self, drafter: str, max_draft: int | None, options: dict[str, Any]) -> None:
        self.drafter, self.max_draft, self.options = drafter, max_draft, options
        self._made: tuple[Any, ...] = ()  # for which model, in which state, the engine was made
        self._engine: Engine | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        refuse_what_cannot_be(generation_config, model_kwargs)
        engine = self._engine_for(model)
        # transformers draws from torch's global generator; one seed from there keeps `torch.manual_seed` meaningful.
        seed = int(torch.randint(2**62, ()).item()) if generation_config.do_sample else 0
        mask = model_kwargs.get("attention_mask")
        requests = []
        for i, row in enumerate(input_ids):
            padding = 0 if mask is None else left_padding(mask[i])
            # A stateful processor follows one text: each row of a batch gets its own.
            own = logits_processor if len(input_ids) == 1 else [for_row(p, i) for p in logits_processor]
            sampling = Sampling(
                temperature=1.0 if generation_config.do_sample else 0.0,
                processors=tuple(Padded(p, row[:padding]) for p in own),
            )
            requests.append(
                Request(
                    tokens=row[padding:].tolist(),
                    max_new_tokens=max(1, generation_config.max_length - len(row)),
                    sampling=sampling,
                    seed=seed,
                    sample=i,
                    stop=Criteria(stopping_criteria, row),
                    max_draft=usual_draft(engine.target) if self.max_draft is None else self.max_draft,
                )
            )
        answers = {id(s.request): s.tokens for s in engine.run(requests)}
        sequences = self._padded(input_ids, [answers[id(r)] for r in requests], generation_config)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _engine_for(self, model: Any) -> Engine:
        """One engine is kept, and made anew for another model, or for this one moved, cast or reconfigured."""
        state = (model, model.device, model.dtype, model.config.get_text_config()._attn_implementation)
        if self._engine is None or self._made[0] is not model or self._made[1:] != state[1:]:
            target = open_target(model)
            self._engine, self._made = Engine(target, make(self.drafter, target, **self.options), self.drafter), state
        return self._engine

    @staticmethod
    def _padded(input_ids: torch.Tensor, answers: list[list[int]], generation_config: Any) -> torch.Tensor:
        pad = generation_config._pad_token_tensor
        longest = max(map(len, answers))
        tail = input_ids.new_full((len(answers), longest), 0 if pad is None else int(pad))
        for row, answer in zip(tail, answers, strict=True):
            row[: len(answer)] = torch.tensor(answer)
        return torch.cat([input_ids, tail], dim=1)


class Padded:
    """A logits processor that sees the row as transformers would show it: with its left padding."""

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


def left_padding(mask: torch.Tensor) -> int:
    """How many tokens of a row are padding."""
    padding = int((mask == 0).sum())
    if bool((mask[padding:] == 0).any()):
        raise OptionError("the attention mask has holes or padding on the right: pad prompts on the left")
    return padding


def for_row(processor: Any, row: int) -> Any:
    """A processor for one row of a batch, which it will see as row 0."""
    if type(processor).__name__.startswith("Encoder"):
        raise OptionError(f"{type(processor).__name__} needs all rows of a batch at once: generate them one by one")
    own = copy.deepcopy(processor)
    if isinstance(own, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, tokens: allowed(row, tokens)
    return own


def refuse_what_cannot_be(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise OptionError(f"slipstream decodes greedily or by sampling, found {mode.value}: drop num_beams and its kin")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise OptionError(f"{name}=True can't be served while speculating: leave it out")
    known = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "token_type_ids")
    given = sorted(k for k, v in model_kwargs.items() if v is not None and k not in known)
    if given:
        raise OptionError(f"{', '.join(given)} can't be passed on while speculating: only text is continued")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise OptionError("slipstream keeps its own cache: don't pass past_key_values that hold a text")
