"""ReDrafter: a recurrent network over the drafted tokens, beside the target's last state, which stays the same.

As the published code has it, the state before the root is zero: s = silu(W e + U s), so the first one is
silu(W e_root + the bias of U). Without recurrence (`rnn: false`) the state is the sum of the embeddings so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.heads.base import Head, HeadConfig, Lender, Prediction, Residual, later


@dataclass(frozen=True, kw_only=True)
class ReDrafterConfig(HeadConfig):
    exit_dim: int
    num_draft_layers: int = 2
    rnn: bool = True


class ReDrafter(Head):
    kind = "redrafter"
    Config = ReDrafterConfig
    config: ReDrafterConfig

    def __init__(self, config: ReDrafterConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        size, exit_dim = config.hidden_size, config.exit_dim
        if 2 * size != exit_dim:
            self.input_proj = nn.Linear(2 * size, exit_dim)
        parts: list[nn.Module] = [Residual(exit_dim) for _ in range(config.num_draft_layers)]
        if not self.borrowed:
            parts.append(nn.Linear(exit_dim, config.vocab_size, bias=False))
        self.lm_head = nn.ModuleList(parts)
        if config.rnn:
            self.rnn_u = nn.Linear(size, size)
            self.rnn_w = nn.Linear(size, size, bias=False)

    @classmethod
    def fresh(
        cls,
        model: Any,
        *,
        exit_dim: int | None = None,
        layers: int = 2,
        rnn: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """exit_dim: the target's hidden size unless told; then the output matrix is the target's and stays so, and the
        head starts by handing the target's state on to it."""
        size = Lender.of(model)
        config = ReDrafterConfig(
            **size.sizes(),
            exit_dim=size.hidden_size if exit_dim is None else exit_dim,
            num_draft_layers=layers,
            rnn=rnn,
        )
        head = cls.begin(config, cls.lendable(config), model, seed, dtype).bind(model)
        for module in head.modules():
            if isinstance(module, Residual):
                module.linear.weight.data.zero_()
        if config.exit_dim == config.hidden_size:
            head.input_proj.weight.data[:, : size.hidden_size] = torch.eye(size.hidden_size)
        return head

    @classmethod
    def lendable(cls, config: ReDrafterConfig) -> tuple[str, ...]:
        return (f"lm_head.{config.num_draft_layers}.weight",) if config.exit_dim == config.hidden_size else ()

    def lent(self, name: str) -> Tensor:  # noqa: ARG002
        return self.lender.matrix()

    def start(self, h: Tensor, root: Tensor) -> Tensor:  # noqa: ARG002
        """(…, H), (…) -> (…, H) the state after reading the root."""
        e = self.embed(root)
        return self._next(torch.zeros_like(e), e)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """(…, H), (…) -> (…, H) the state after one more token."""
        return self._next(state, self.embed(token))

    def _next(self, state: Tensor, e: Tensor) -> Tensor:
        return functional.silu(self.rnn_w(e) + self.rnn_u(state)) if self.config.rnn else e + state

    def logits(self, h: Tensor, state: Tensor) -> Tensor:
        """(…, H), (…, H) -> (…, V)."""
        x = torch.cat((h.to(state.dtype), state), dim=-1)  # (…, 2H)
        if 2 * self.config.hidden_size != self.config.exit_dim:
            x = self.input_proj(x)
        for part in self.lm_head:
            x = part(x)
        return self.lender.logits(x) if self.borrowed else x

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        self.check_depths(depths)
        state = self.start(states, later(tokens, 1))  # (b, t, H)
        for k in range(depths):
            if k:
                state = self.advance(state, later(tokens, 1 + k))
            yield Prediction(self.logits(states, state))
