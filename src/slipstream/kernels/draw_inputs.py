"""Inputs of sampling on the device: each sequence's options and noise, and the text that penalties depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.sampling import Sampling


@dataclass(frozen=True)
class Draws:
    """Sampling options of each sequence, as views of one int32 tensor: numpy on the host, torch on the device. All
    zeros: greedy."""

    temperature: Any  # (b,) float32
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    top_k: Any  # (b,) int32, 0: all
    keys: Any  # (b, n, 2) int32, the noise of the token AFTER each row: see `noise_keys`

    @classmethod
    def of(cls, flat: Any, batch: int, rows: int) -> Draws:
        """flat: (size,) int32."""
        real: Any = np.float32 if isinstance(flat, np.ndarray) else torch.float32
        *options, top_k = (flat[i * batch : (i + 1) * batch] for i in range(7))
        return cls(*[f.view(real) for f in options], *[top_k, flat[7 * batch :].reshape(batch, rows, 2)])

    @staticmethod
    def size(batch: int, rows: int) -> int:
        return batch * (7 + 2 * rows)

    def put(self, samplings: Sequence[Sampling], sizes: NDArray[np.int64]) -> None:
        """On the host: the first `sizes[0]` sequences draw by the first of these, and so on."""
        options = np.array([
            (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.top_k)
            for s in samplings
        ])  # fmt: skip
        real = self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency
        _put(*real, self.top_k, options, sizes)


@compiled
def _put(temperature, top_p, min_p, repetition, presence, frequency, top_k, options, sizes):  # type: ignore[no-untyped-def]
    i = 0
    for number in range(len(sizes)):
        for _ in range(sizes[number]):
            temperature[i], top_p[i], min_p[i] = options[number, 0], options[number, 1], options[number, 2]
            repetition[i], presence[i], frequency[i] = options[number, 3], options[number, 4], options[number, 5]
            top_k[i] = min(options[number, 6], 2**31 - 1)
            i += 1


@dataclass(frozen=True)
class History:
    """What biases and penalties depend on: the text of each slot, and the drafted path to each row.

    `prompt` and `emitted` hold the committed tokens, as the cache does. The root and all drafted tokens are in `ids`;
    a row finds its ancestors and itself there by its path. So a step writes nothing here: accepted tokens are added by
    `commit`, along with the accepted keys.
    """

    prompt: torch.Tensor  # (slots, V) uint8, whether the prompt has the token
    emitted: torch.Tensor  # (slots, V) int32, how often the committed output has it
    bias: torch.Tensor  # (slots, V) float32
    slots: torch.Tensor  # (b,) int32, each sequence's
    ids: torch.Tensor  # int32, the tokens of all rows
    depths: torch.Tensor  # (b, n) int32, negative for padding
    paths: torch.Tensor  # (b, n, D) int32, [s, i, k]: index in `ids` of row i's ancestor at depth k, itself at the end

    def begin(self, slot: int, prompt: Sequence[int], logit_bias: Mapping[int, float]) -> None:
        """`slot` gets a new sequence. Call between steps only."""
        for state in (self.prompt, self.emitted, self.bias):
            state[slot] = 0
        self.prompt[slot, torch.tensor(list(prompt), dtype=torch.long)] = 1
        self.bias[slot, torch.tensor(list(logit_bias), dtype=torch.long)] = torch.tensor(
            list(logit_bias.values()), dtype=torch.float32, device=self.bias.device
        )

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """tokens: (s, m) int32, newly committed by the sequences in these slots (s,); negative: padding."""
        at = slots[:, None].long() * self.emitted.shape[1] + tokens.clamp(min=0)
        self.emitted.view(-1).scatter_add_(0, at.flatten(), (tokens >= 0).int().flatten())
