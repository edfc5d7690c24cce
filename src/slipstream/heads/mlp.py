"""MLP Speculator: per depth, a projection of the last state plus an embedding of the last token, normed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.heads.base import HeadConfig, Lender, Unrolled, UnrolledHead, later


@dataclass(frozen=True, kw_only=True)
class MLPConfig(HeadConfig):
    inner_dim: int
    n_predict: int = 3
    tie_weights: bool = False  # one set of weights for all depths, except the first projection
    scale_input: bool = False


class MLPSpeculator(UnrolledHead):
    kind = "mlp"
    config: MLPConfig

    def __init__(self, config: MLPConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        vocabulary, inner = config.vocab_size, config.inner_dim
        sets = 1 if config.tie_weights else config.n_predict
        projections = 2 if config.tie_weights else config.n_predict
        self.speculator = nn.Module()
        self.speculator.emb = nn.ModuleList(nn.Embedding(vocabulary, inner) for _ in range(sets))
        self.speculator.proj = nn.ModuleList(
            nn.Linear(inner if k else config.hidden_size, inner, bias=False) for k in range(projections)
        )
        self.speculator.head = nn.ModuleList(nn.Linear(inner, vocabulary, bias=False) for _ in range(sets))
        self.speculator.ln = nn.ModuleList(_Norm(inner) for _ in range(sets))
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self._token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    @classmethod
    def fresh(
        cls,
        model: Any,
        *,
        inner_dim: int | None = None,
        n_predict: int = 3,
        tie_weights: bool = False,
        scale_input: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """inner_dim: by default the target's hidden size."""
        size = Lender.of(model)
        config = MLPConfig(
            **size.sizes(),
            inner_dim=size.hidden_size if inner_dim is None else inner_dim,
            n_predict=n_predict,
            tie_weights=tie_weights,
            scale_input=scale_input,
        )
        return cls.begin(config, (), model, seed, dtype).bind(model)

    @property
    def embedding(self) -> None:
        return None

    @property
    def reach(self) -> int | None:
        return None if self.config.tie_weights else self.config.n_predict

    def start(self, h: Tensor, root: Tensor) -> Tensor:
        """(…, H), (…) -> (…, inner) the state after reading the root."""
        h = h.to(self.dtype)
        return self.advance(_normal(h) / math.sqrt(2) if self.config.scale_input else h, root, 0)

    def advance(self, state: Tensor, token: Tensor, depth: int) -> Tensor:
        """(…, inner), (…) -> (…, inner) the state that predicts depth `depth`, after the last token `token`."""
        parts: Any = self.speculator
        same = 0 if self.config.tie_weights else depth
        projection = min(depth, 1) if self.config.tie_weights else depth
        z = parts.proj[projection](state) + self._token_weight * parts.emb[same](token)
        return functional.gelu(parts.ln[same](z))

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """(…, inner) -> (…, V)."""
        parts: Any = self.speculator
        return parts.head[0 if self.config.tie_weights else depth](state)

    def unroll(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Unrolled]:
        state = self.start(states, later(tokens, 1))  # (b, t, inner)
        for k in range(depths):
            if k:
                state = self.advance(state, later(tokens, 1 + k), k)
            yield Unrolled((state,), partial(self.logits, depth=k))


class _Norm(nn.Module):
    """Divides by the root mean square, then scales and shifts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * _normal(x) + self.bias


def _normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
