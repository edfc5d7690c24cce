"""The contestants of a benchmark: this engine with any drafter, and transformers' methods, on one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from slipstream.errors import OptionError
from slipstream.llm import LLM
from slipstream.stats import Stats
from slipstream.text import end_tokens

PEERS = ("hf", "hf-pld", "hf-assisted")
ALONE = ("hf-pld", "hf-assisted")  # answer one prompt at a time
HF_LOOKUP_TOKENS = 10  # what transformers' documentation uses for prompt lookup


@dataclass(frozen=True)
class Decoding:
    """Decoding options, the same for every contestant."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float  # the whole call, the prompt included
    first_token_seconds: float
    stats: Stats | None = None  # only from slipstream's engine


class Contestant(ABC):
    name: str

    @abstractmethod
    def answers(self, prompts: Sequence[list[int]], decoding: Decoding) -> list[Answer]:
        """Answer the prompts together, timed. Each answer is charged its share of the time."""

    def answer(self, prompt: list[int], decoding: Decoding) -> Answer:
        (only,) = self.answers([prompt], decoding)
        return only


class Ours(Contestant):
    """This engine."""

    def __init__(self, name: str, llm: LLM, max_draft: int | None = None) -> None:
        """max_draft: as in `generate`."""
        self.name, self.llm, self.max_draft = name, llm, max_draft

    def answers(self, prompts: Sequence[list[int]], decoding: Decoding) -> list[Answer]:
        self.llm.engine.max_batch = max(self.llm.engine.max_batch, len(prompts))
        start = perf_counter()
        results = self.llm.generate(
            list(prompts),
            max_new_tokens=decoding.max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            seed=decoding.seed,
            max_draft=self.max_draft,
        )
        share = (perf_counter() - start) / len(prompts)
        return [Answer(r.tokens, share, r.stats.first_token_seconds, r.stats) for r in results]


class Peer(Contestant):
    """transformers' generate: plain (`hf`), with its prompt lookup (`hf-pld`) or a draft model (`hf-assisted`)."""

    def __init__(self, name: str, model: Any, draft_model: Any = None) -> None:
        if name not in PEERS:
            raise OptionError(f"peer {name!r} is unknown: there are {', '.join(PEERS)}")
        if name == "hf-assisted" and draft_model is None:
            raise OptionError("hf-assisted needs a draft model")
        self.name, self.model = name, model
        self._options: dict[str, Any] = {
            "hf": {},
            "hf-pld": {"prompt_lookup_num_tokens": HF_LOOKUP_TOKENS},
            "hf-assisted": {"assistant_model": draft_model},
        }[name]

    def answers(self, prompts: Sequence[list[int]], decoding: Decoding) -> list[Answer]:
        if len(prompts) > 1 and self.name in ALONE:
            raise OptionError(f"{self.name} answers one prompt at a time: leave it out of batches")
        pad = self.model.generation_config.pad_token_id or 0
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if decoding.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": decoding.temperature,
                "top_p": decoding.top_p,
                "top_k": 0,
            }
            torch.manual_seed(decoding.seed)
        watch = FirstToken()
        start = perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            pad_token_id=pad,
            max_new_tokens=decoding.max_new_tokens,
            streamer=watch if len(prompts) == 1 else None,  # transformers streams no batches
            **sampling,
            **self._options,
        )
        seconds = perf_counter() - start
        first = (watch.at or start + seconds) - start
        ends = end_tokens(self.model, None)
        return [Answer(until_end(row[longest:].tolist(), ends), seconds / len(prompts), first) for row in out]


def until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """The tokens without padding after the end."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


class FirstToken:
    """A streamer that measures the time of the first token. transformers puts the prompt first, then tokens."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._puts = 0

    def put(self, _tokens: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = perf_counter()

    def end(self) -> None:
        pass
