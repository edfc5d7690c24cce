"""VocabularyHead: an output matrix of its own or the target's, over all tokens or over a smaller vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import OptionError
from slipstream.heads.base import OUTPUT, Head, product
from slipstream.heads.decoder import RMSNorm
from slipstream.targets.states import final_norm


class VocabularyHead(Head):
    """Its config has `draft_vocab_size`. Published as `lm_head`, `d2t` (differences between the target's ids and its
    own) and `t2d` (which of the target's it has)."""

    d2t: Tensor
    t2d: Tensor
    norm: RMSNorm

    def add_vocabulary(self, width: int) -> None:
        """Add the output matrix and the ids, for states of this width."""
        few, every = self.config.draft_vocab_size, self.config.vocab_size
        if OUTPUT not in self.borrowed:
            self.lm_head = nn.Linear(width, few, bias=False)
        if few != every:
            self.register_buffer("d2t", torch.zeros(few, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(every, dtype=torch.bool))
        self.register_buffer("_rows", None, persistent=False)  # (V', H) the target's output rows of its draft ids

    def start_vocabulary(self, model: Any, ids: Tensor) -> None:
        """Initialise a new head: bind it to its model, set its vocabulary (V',), copy the target's output matrix if it
        has its own, and copy the scale of the target's final norm, which this matrix was trained with."""
        if len(ids) < self.config.vocab_size:
            self.set_draft_ids(ids)
        if (scale := _final_scale(model)) is not None:
            self.norm.weight.data.copy_(scale)
        self.bind(model)
        if OUTPUT not in self.borrowed:
            self.lm_head.weight.data.copy_(self.lent(OUTPUT))

    def set_draft_ids(self, ids: Tensor) -> None:
        """(V',) ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    def refresh(self) -> None:
        if self._rows is not None:
            self._rows.copy_(self.lent(OUTPUT))

    @property
    def draft_ids(self) -> Tensor | None:
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def bind(self, model: Any) -> Self:
        super().bind(model)
        if OUTPUT in self.borrowed and self.draft_ids is not None:
            self._rows = self.lent(OUTPUT)
        return self

    def lent(self, name: str) -> Tensor:
        if name != OUTPUT:
            return super().lent(name)
        matrix, ids = self.lender.matrix(), self.draft_ids
        return matrix if ids is None else matrix[ids.to(matrix.device)]

    def output(self, x: Tensor) -> Tensor:
        """(…, H) after the last norm -> (…, V')."""
        if OUTPUT not in self.borrowed:
            return self.lm_head(x)
        return self.lender.logits(x) if self._rows is None else product(x.to(self._rows.dtype), self._rows)


def check_draft_ids(ids: Sequence[int] | Tensor | None, vocabulary: int) -> Tensor:
    """(V',) ascending, without duplicates. None: all."""
    chosen = torch.as_tensor(range(vocabulary) if ids is None else ids, device="cpu").long().unique()  # sorted
    if not len(chosen) or int(chosen[0]) < 0 or int(chosen[-1]) >= vocabulary:
        raise OptionError(f"draft_ids must be token ids from 0 to {vocabulary - 1}, at least one of them")
    return chosen


def _final_scale(model: Any) -> Tensor | None:
    """(H,) the factor by which the target's final norm, of any kind, multiplies a state of unit size."""
    norm: Any = final_norm(model)
    if norm is None or getattr(norm, "weight", None) is None:
        return None
    unit = torch.ones_like(norm.weight)
    unit[1::2] = -1  # mean zero, for norms that subtract the mean
    with torch.no_grad():
        return (norm(unit) - norm(-unit)) / 2 * unit
