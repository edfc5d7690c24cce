"""A drop-in for those who already have a model.

    model.generate(**inputs, custom_generate=slipstream.speculate("pld"))

transformers prepares everything as ever (prompt, logits processors, stopping criteria) and hands over the decoding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from slipstream.accept import Match
from slipstream.drafters import make
from slipstream.engine import Engine
from slipstream.errors import OptionError
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.target import open_target


def speculate(drafter: str = "pld", *, max_draft: int = 16, **options: Any) -> Speculate:
    """A decoding method for transformers' `generate`: the same tokens when greedy, the same distribution when
    sampling."""
    return Speculate(drafter, max_draft, options)


class Speculate:
    def __init__(self, drafter: str, max_draft: int, options: dict[str, Any]) -> None:
        self.drafter, self.max_draft, self.options = drafter, max_draft, options
        self._engines: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()

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
        if model not in self._engines:
            target = open_target(model)
            self._engines[model] = Engine(target, make(self.drafter, target, **self.options), self.drafter)
        engine = self._engines[model]
        # transformers draws from torch's global generator; one seed from there keeps `torch.manual_seed` meaningful.
        seed = int(torch.randint(2**62, ()).item()) if generation_config.do_sample else 0
        mask = model_kwargs.get("attention_mask")
        requests = []
        for i, row in enumerate(input_ids):
            padding = 0 if mask is None else int((mask[i] == 0).sum())
            sampling = Sampling(
                temperature=1.0 if generation_config.do_sample else 0.0,
                processors=tuple(Padded(p, row[:padding]) for p in logits_processor),
            )
            requests.append(
                Request(
                    tokens=row[padding:].tolist(),
                    max_new_tokens=max(1, generation_config.max_length - len(row)),
                    sampling=sampling,
                    accept=Match(),
                    seed=seed,
                    sample=i,
                    stop=Criteria(stopping_criteria, row),
                    max_draft=self.max_draft,
                )
            )
        answers = {id(s.request): s.tokens for s in engine.run(requests)}
        sequences = self._padded(input_ids, [answers[id(r)] for r in requests], generation_config)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

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


def refuse_what_cannot_be(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise OptionError(f"slipstream decodes greedily or by sampling, found {mode.value}: drop num_beams and its kin")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise OptionError(f"{name}=True can't be served while speculating: leave it out")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise OptionError("slipstream keeps its own cache: don't pass past_key_values that hold a text")
