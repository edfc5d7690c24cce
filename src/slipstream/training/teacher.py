"""The teacher: the frozen target. It is run once per batch for its hidden states, and gives its distributions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.heads.base import Head, Lender
from slipstream.targets.states import asked_states
from slipstream.targets.trees import input_device, unwrapped


class Speaker:
    """A model split into last states and logits, so that logits can be computed at few positions at a time."""

    def __init__(self, model: Any) -> None:
        self.model, self.lender = unwrapped(model).eval(), Lender.of(model)
        self.device, self.vocabulary = input_device(model), self.lender.vocab_size
        self.columns = self.vocabulary  # logits that are computed for a position
        self._cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._check()

    def last(self, tokens: Tensor) -> Tensor:
        """(b, t) -> (b, t, H) the last states, from which logits are computed."""
        states: Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def logits(self, last: Tensor) -> Tensor:
        """(n, H) -> (n, V). Gradients reach the output matrix too."""
        out: Tensor = self.lender.lm_head(last) * self.lender.scale
        return self.capped(out)

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    @torch.no_grad()
    def _check(self) -> None:
        """Raise unless logits computed from the last states equal the model's own."""
        ids = torch.arange(8, device=self.device)[None] % self.vocabulary
        expected, derived = (
            self.model(input_ids=ids, use_cache=False).logits.float(),
            self.logits(self.last(ids)).float(),
        )
        if expected.shape != derived.shape or not (expected - derived).norm() <= 0.05 * expected.norm():
            raise ModelError(
                f"{type(self.model).__name__} has more to its logits than an output matrix, a scale and a cap: "
                "heads and drafts for it can't be trained here"
            )


class Teacher(Speaker):
    def __init__(self, model: Any, head: Head) -> None:
        """head: bound to the model."""
        super().__init__(model)
        self.head = head
        self._last = head.lender.layers
        self._layers = head.layers(self._last)
        self._draft_ids = head.draft_ids  # (V',)
        self._own: Tensor | None = None  # (V,) the head's id for each of the target's ids, -1: it has none
        self._rows: Any = None  # (V', H) the output matrix's rows for the head's ids, if it is a plain matrix
        if self._draft_ids is not None:
            if type(head.lender.lm_head) is torch.nn.Linear and head.lender.lm_head.bias is None:
                self._rows = head.lender.matrix()[self._draft_ids]
                self.columns = len(self._draft_ids)
            own = torch.full((self.vocabulary,), -1, device=self.device)
            own[self._draft_ids] = torch.arange(len(self._draft_ids), device=self.device)
            self._own = own

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(b, t) -> the states that the head reads (b, t, ·), and the last states (b, t, H)."""
        with asked_states(self.model, self._layers) as states:
            out = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return self.head.join(states(out)), out.hidden_states[self._last]

    @torch.no_grad()
    def distribution(self, last: Tensor) -> Tensor:
        """(n, H) -> (n, V') float32: the target's distribution, restricted to the head's vocabulary."""
        if self._rows is not None:
            logits = self.capped(last @ self._rows.T)
        else:
            logits = self.logits(last)
            if self._draft_ids is not None:
                logits = logits.index_select(-1, self._draft_ids)
        return logits.softmax(-1, dtype=torch.float32)

    def labels(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) -> the head's own ids (n,), 0 for tokens outside its vocabulary; and which are inside (n,)."""
        if self._own is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        own = self._own[tokens]
        return own.clamp(min=0), own >= 0
