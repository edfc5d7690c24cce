"""ReDrafter: a recurrent network over the drafted tokens, beside the target's last state, which stays the same.

As the published code has it, the state before the root is zero: s = silu(W e + U s), so the first one is
silu(W e_root + the bias of U). Without recurrence (`rnn: false`) the state is the sum of the embeddings so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.errors import OptionError
from slipstream.heads.base import Head, HeadConfig, Lender, Prediction, Residual, by_kernels, follow, later
from slipstream.target.ops import linear


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

    def deepen(self, layers: int) -> None:
        """More blocks. They hand on what they get until they have learnt something, so the head says the same."""
        count, parts = self.config.num_draft_layers, list(self.lm_head)
        like: Any = self._first_block.linear.weight
        if layers < count:
            raise OptionError(f"layers={layers} is out of range: this head has {count} already")
        new = [Residual(self.config.exit_dim).to(like) for _ in range(layers - count)]
        for block in new:
            nn.init.zeros_(block.linear.weight)
            nn.init.zeros_(block.linear.bias)
        self.lm_head = nn.ModuleList([*parts[:count], *new, *parts[count:]])
        self.config = replace(self.config, num_draft_layers=layers)
        self.borrowed = frozenset(self.lendable(self.config)) if self.borrowed else self.borrowed

    @classmethod
    def lendable(cls, config: ReDrafterConfig) -> tuple[str, ...]:
        return (f"lm_head.{config.num_draft_layers}.weight",) if config.exit_dim == config.hidden_size else ()

    def lent(self, name: str) -> Tensor:  # noqa: ARG002
        return self.lender.matrix()

    def start(self, h: Tensor, root: Tensor) -> Tensor:  # noqa: ARG002
        """(…, H), (…) -> (…, H) the state after reading the root."""
        e = self.embed(root)
        return self._next(torch.zeros_like(e), e)

    def advance(self, state: Tensor, token: Tensor, chain: Tensor | None = None) -> Tensor:
        """(…, H), (…) -> (…, H) the state after one more token. chain: as `base.follow` has it, which state."""
        return self._next(state, self.embed(token), chain)

    def _next(self, state: Tensor, e: Tensor, chain: Tensor | None = None) -> Tensor:
        if not self.config.rnn:
            return e + follow(state, chain)
        new, old = self.rnn_w(e), self.rnn_u(state)
        if by_kernels(new):
            from slipstream.heads.layer_kernel import silu_sum

            return silu_sum(new, old, chain)
        return functional.silu(new + follow(old, chain))

    def logits(self, h: Tensor, state: Tensor) -> Tensor:
        """(…, H), (…, H) -> (…, V)."""
        x = torch.cat((h.to(state.dtype), state), dim=-1)  # (…, 2H)
        if 2 * self.config.hidden_size != self.config.exit_dim:
            x = self.input_proj(x)
        return self._end(x, 0)

    def _end(self, x: Tensor, done: int) -> Tensor:
        """(…, E) behind so many of the blocks -> (…, V)."""
        for part in list(self.lm_head)[done:]:
            x = part(x)
        return self.lender.logits(x) if self.borrowed else x

    # ---- drafting: what comes of the target's state is computed once for all drafted tokens

    @property
    def _first_block(self) -> Any:
        return self.lm_head[0]

    def prepare(self, h: Tensor) -> tuple[Tensor, ...]:
        """(b, 1, H) -> what `guess` needs of it."""
        h = h.to(self.dtype)
        if 2 * self.config.hidden_size == self.config.exit_dim:
            return (h,)
        shift = linear(h, self.input_proj.weight[:, : self.config.hidden_size], self.input_proj.bias)  # (b, 1, E)
        return shift, self._first_block.linear(shift)

    def guess(self, prepared: tuple[Tensor, ...], state: Tensor) -> Tensor:
        """`logits` of states (b, w, H)."""
        if len(prepared) == 1:
            return self.logits(prepared[0].expand_as(state), state)
        shift, shifted = prepared
        x = linear(state, self.input_proj.weight[:, self.config.hidden_size :], None)  # (b, w, E)
        y = linear(x, self._first_block.linear.weight, None)
        if by_kernels(x):
            from slipstream.heads.layer_kernel import add_silu

            return self._end(add_silu(x, y, shift, shifted), 1)
        return self._end(x + shift + functional.silu(y + shifted), 1)

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        self.check_depths(depths)
        state = self.start(states, later(tokens, 1))  # (b, t, H)
        for k in range(depths):
            if k:
                state = self.advance(state, later(tokens, 1 + k))
            yield Prediction(self.logits(states, state))
