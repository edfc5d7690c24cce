"""Medusa: one head per depth, each a few residual blocks and an output matrix on the target's last state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.heads.base import HeadConfig, Lender, Residual, Unrolled, UnrolledHead


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    heads: int = 5
    blocks: int = 1
    draft_vocab_size: int | None = None  # size of its own vocabulary; None: the target's


class Medusa(UnrolledHead):
    kind = "medusa"
    config: MedusaConfig
    token_map: Tensor

    def __init__(self, config: MedusaConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        for k, name in enumerate(self.lendable(config)):  # "0", "1", …: the published names
            parts: list[nn.Module] = [Residual(config.hidden_size) for _ in range(config.blocks)]
            if name not in self.borrowed:
                parts.append(nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False))
            self.add_module(str(k), nn.ModuleList(parts))
        if config.draft_vocab_size is not None:  # as vLLM has it
            self.register_buffer("token_map", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @classmethod
    def fresh(
        cls,
        model: Any,
        *,
        heads: int = 5,
        blocks: int = 1,
        tied: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Every head starts equal to the target's: its blocks start at 0. tied: the output matrices stay the target's,
        and only the blocks are trained."""
        size = Lender.of(model)
        config = MedusaConfig(**size.sizes(), heads=heads, blocks=blocks)
        head = cls.begin(config, cls.lendable(config) if tied else (), model, seed, dtype).bind(model)
        for module in head.modules():
            if isinstance(module, Residual):
                module.linear.weight.data.zero_()
        if not tied:
            for name in cls.lendable(config):
                head.get_parameter(name).data.copy_(head.lent(name))
        return head

    @classmethod
    def lendable(cls, config: MedusaConfig) -> tuple[str, ...]:
        return tuple(f"{k}.{config.blocks}.weight" for k in range(config.heads))

    def lent(self, name: str) -> Tensor:  # noqa: ARG002
        matrix, ids = self.lender.matrix(), self.draft_ids
        return matrix if ids is None else matrix[ids.to(matrix.device)]

    @property
    def draft_ids(self) -> Tensor | None:
        return self._buffers.get("token_map")

    @property
    def embedding(self) -> None:
        return None

    @property
    def reach(self) -> int:
        return self.config.heads

    def heads(self, h: Tensor) -> Tensor:
        """(b, H) -> (b, K, V') the logits of all heads."""
        return torch.stack([self.logits(h, k) for k in range(self.config.heads)], dim=1)

    def logits(self, h: Tensor, k: int) -> Tensor:
        """(…, H) -> (…, V') the logits of head k."""
        parts: Any = self._modules[str(k)]
        x = h.to(self.dtype)
        for part in parts:
            x = part(x)
        if len(parts) > self.config.blocks:
            return x
        logits, ids = self.lender.logits(x), self.draft_ids
        return logits if ids is None else logits.index_select(-1, ids)

    def unroll(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Unrolled]:  # noqa: ARG002
        for k in range(depths):
            yield Unrolled((states,), partial(self.logits, k=k))
