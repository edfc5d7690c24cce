"""The teacher: the frozen target, read once per batch for its hidden states, and asked what it would have said."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.heads.base import Head
from slipstream.targets.states import asked_states
from slipstream.targets.trees import input_device, unwrapped


class Teacher:
    def __init__(self, model: Any, head: Head) -> None:
        """The head is bound to the model."""
        self.model, self.head = unwrapped(model).eval(), head
        self.device, self.vocabulary = input_device(model), head.lender.vocab_size
        self._last = head.lender.layers
        self._layers = head.layers(self._last)
        self._cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._draft_ids = head.draft_ids  # (V',)
        self._own: Tensor | None = None  # (V,) the head's id of each of the target's, -1 where it has none
        self._rows: Any = None  # (V', H) the output matrix for its ids alone, where it is no more than a matrix
        if self._draft_ids is not None:
            if type(head.lender.lm_head) is torch.nn.Linear and head.lender.lm_head.bias is None:
                self._rows = head.lender.matrix()[self._draft_ids]
            own = torch.full((self.vocabulary,), -1, device=self.device)
            own[self._draft_ids] = torch.arange(len(self._draft_ids), device=self.device)
            self._own = own
        self._check()

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(b, t) -> the states that the head reads (b, t, ·), and those that chose the next tokens (b, t, H)."""
        with asked_states(self.model, self._layers) as states:
            out = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return self.head.join(states(out)), out.hidden_states[self._last]

    @torch.no_grad()
    def distribution(self, last: Tensor) -> Tensor:
        """(n, H) -> (n, V') float32: what it would say next, among the tokens that the head can say."""
        if self._rows is not None:
            logits = self._capped(last @ self._rows.T)
        else:
            logits = self._logits(last)
            if self._draft_ids is not None:
                logits = logits.index_select(-1, self._draft_ids)
        return logits.softmax(-1, dtype=torch.float32)

    def labels(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) -> the head's own ids (n,), and which of the tokens it has (n,); where it hasn't, 0 stands in."""
        if self._own is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        own = self._own[tokens]
        return own.clamp(min=0), own >= 0

    def _logits(self, last: Tensor) -> Tensor:
        return self._capped(self.head.lender.logits(last, bias=True))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    @torch.no_grad()
    def _check(self) -> None:
        """What follows from the last states must be what the model says."""
        ids = torch.arange(8, device=self.device)[None] % self.vocabulary
        said, derived = (
            self.model(input_ids=ids, use_cache=False).logits.float(),
            self._logits(self.read(ids)[1]).float(),
        )
        if said.shape != derived.shape or not (said - derived).norm() <= 0.05 * said.norm():
            raise ModelError(
                f"{type(self.model).__name__} has more to its logits than an output matrix, a scale and a cap: "
                "heads for it can't be trained here"
            )
