"""ReDrafter: a recurrent network over the drafted tokens, next to the target's last state, which stays the same.

As in the published code, the state before the root is zero: s = silu(W e + U s), so the first state is
silu(W e_root + bias of U). Without recurrence (`rnn: false`) the state is the sum of the embeddings so far.

It is trained and sampled over the whole vocabulary. For greedy drafts, a subset of frequent tokens is enough:
`likely_ids`, which the published layout does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.errors import OptionError
from slipstream.heads.base import (
    HeadConfig,
    Lender,
    Residual,
    Unrolled,
    UnrolledHead,
    by_kernels,
    follow,
    later,
    product,
)
from slipstream.kernels.ops import linear


@dataclass(frozen=True, kw_only=True)
class ReDrafterConfig(HeadConfig):
    exit_dim: int
    num_draft_layers: int = 2
    rnn: bool = True
    draft_vocab_size: int | None = None  # number of likely ids, for `few`; None: all


class ReDrafter(UnrolledHead):
    kind = "redrafter"
    config: ReDrafterConfig
    d2t: Tensor

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
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self._made: dict[str, tuple[Any, Tensor]] = {}  # tensors derived from weights, for drafting: see `_keep`

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
        """exit_dim: by default the target's hidden size. Then the output matrix is the target's and is not trained, and
        the head is initialised to pass the target's state to it unchanged."""
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
        """Add blocks, initialised to the identity, so that the head's output does not change."""
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

    @property
    def likely_ids(self) -> Tensor | None:
        """(V',) the tokens of `few`, ascending. None: all. These are no `draft_ids`: everything else has the whole
        vocabulary."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def guess_only(self, ids: Sequence[int] | Tensor | None) -> None:
        """Set the tokens of `few`. None: all."""
        most = self.config.vocab_size
        chosen = range(most) if ids is None else ids
        few = torch.as_tensor(chosen, device="cpu").long().unique()  # sorted
        if not len(few) or int(few[0]) < 0 or int(few[-1]) >= most:
            raise OptionError(f"the likely ids must be token ids from 0 to {most - 1}, at least one of them")
        self._made.clear()
        self._buffers.pop("d2t", None)
        if len(few) < most:
            self.register_buffer("d2t", (few - torch.arange(len(few))).to(next(self.parameters()).device))
        self.config = replace(self.config, draft_vocab_size=len(few) if len(few) < most else None)

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
        """(…, H), (…) -> (…, H) the state after one more token. chain: which state each token follows, as in
        `base.follow`."""
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
        return self._output(self._refine(x, 0))

    def _refine(self, x: Tensor, done: int) -> Tensor:
        """(…, E) after `done` of the blocks -> (…, E) after all."""
        for block in list(self.lm_head)[done : self.config.num_draft_layers]:
            x = block(x)
        return x

    def _output(self, x: Tensor) -> Tensor:
        """(…, E) -> (…, V)."""
        return self.lender.logits(x) if self.borrowed else self.lm_head[-1](x)

    # ---- drafting: the part that depends on the target's state is computed once for all drafted tokens

    @property
    def _first_block(self) -> Any:
        return self.lm_head[0]

    def prepare(self, h: Tensor) -> tuple[Tensor, ...]:
        """(b, 1, H) -> the part of `guess` and `few` that depends on the target's state."""
        h = h.to(self.dtype)
        if 2 * self.config.hidden_size == self.config.exit_dim:
            return (h,)
        shift = linear(h, self.input_proj.weight[:, : self.config.hidden_size], self.input_proj.bias)  # (b, 1, E)
        return shift, self._first_block.linear(shift)

    def guess(self, prepared: tuple[Tensor, ...], state: Tensor) -> Tensor:
        """`logits` of states (b, w, H)."""
        return self._output(self._read(prepared, state))

    def few(self, prepared: tuple[Tensor, ...], state: Tensor) -> Tensor:
        """`guess` of the likely ids alone: (b, w, V')."""
        if self.config.draft_vocab_size is None:
            return self.guess(prepared, state)
        x, rows = self._read(prepared, state), self._rows()
        if rows is None:
            return self._output(x)[..., self.likely_ids]
        return product(x.to(rows.dtype), rows)

    def _read(self, prepared: tuple[Tensor, ...], state: Tensor) -> Tensor:
        """(b, w, H) -> (b, w, E) after all blocks."""
        if len(prepared) == 1:
            return self._refine(torch.cat((prepared[0].expand_as(state), state), dim=-1), 0)
        shift, shifted = prepared
        x, y = linear(state, self._joint(), None).chunk(2, -1)  # (b, w, E) each
        if by_kernels(x):
            from slipstream.heads.layer_kernel import add_silu

            return self._refine(add_silu(x, y, shift, shifted), 1)
        return self._refine(x + shift + functional.silu(y + shifted), 1)

    def _joint(self) -> Tensor:
        """(2E, H): the projection P of a state, and L P with the first block's matrix L. Since L (P s) = (L P) s, one
        product replaces two consecutive ones."""
        project, block = self.input_proj.weight, self._first_block.linear.weight

        def make() -> Tensor:
            wide = torch.promote_types(project.dtype, torch.float32)
            mine = project[:, self.config.hidden_size :].to(wide)
            return torch.cat((mine, block.to(wide) @ mine)).to(project.dtype)

        return self._keep("joint", make, project, block)

    def _rows(self) -> Tensor | None:
        """(V', E) the output matrix's rows for the likely ids. None: they can't be copied."""
        output: Any = self.lender.lm_head if self.borrowed else self.lm_head[-1]
        if self.borrowed and type(output) is not nn.Linear:
            return None
        whole = self.lender.matrix if self.borrowed else lambda: output.weight
        return self._keep("rows", lambda: whole()[self.likely_ids], output.weight, self.d2t)

    def _keep(self, name: str, make: Callable[[], Tensor], *of: Tensor) -> Tensor:
        """Cache a tensor derived from these, until they change. With gradients it is computed anew."""
        if torch.is_grad_enabled():
            return make()
        mark = [(t.data_ptr(), t.dtype, None if t.is_inference() else t._version) for t in of]
        if name not in self._made or self._made[name][0] != mark:
            self._made[name] = mark, make()
        return self._made[name][1]

    def refresh(self) -> None:
        before, self._made = self._made, {}
        for name, make in (("joint", self._joint), ("rows", self._rows)):
            if name in before and (now := make()) is not None:
                place = before[name][1]
                place.copy_(now)
                self._made[name] = self._made[name][0], place

    def unroll(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Unrolled]:
        state = self.start(states, later(tokens, 1))  # (b, t, H)
        for k in range(depths):
            if k:
                state = self.advance(state, later(tokens, 1 + k))
            yield Unrolled((states, state), self.logits)
