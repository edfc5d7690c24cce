"""Sampling where the logits are: one token for every row of a step, by the rules and the noise of `sampling.py`.

Everything is read from tensors of fixed shape and nothing goes through the host, so a captured CUDA graph can draw for
other requests at every replay. What a row draws depends on that row's logits, options, history and key alone. On a GPU
the work is done in Triton (`draw_triton.py`), elsewhere in plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.sampling import Sampling, gumbel


def drawable(sampling: Sampling) -> bool:
    """Whether tokens can be drawn here: what calls user code or looks for words stays with `Sampler`."""
    return not (sampling.processors or sampling.bad_words)


def needs_history(sampling: Sampling) -> bool:
    return bool(sampling.logit_bias) or sampling.penalises


@dataclass(frozen=True)
class Draws:
    """How each sequence draws, as views of one int32 tensor: numpy on the host, torch on the device. Zeros: greedy."""

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

    def put(self, i: int, sampling: Sampling) -> None:
        """On the host: sequence i draws like this."""
        self.temperature[i], self.top_p[i], self.min_p[i] = sampling.temperature, sampling.top_p, sampling.min_p
        self.repetition[i] = sampling.repetition_penalty
        self.presence[i], self.frequency[i] = sampling.presence_penalty, sampling.frequency_penalty
        self.top_k[i] = min(sampling.top_k, 2**31 - 1)


@dataclass(frozen=True)
class History:
    """What biases and penalties look at: per slot the text so far, per row the drafted path that leads to it.

    The boundary is the committed length. `prompt` and `said` hold what was committed, as the cache does; the root and
    all drafts, decided or not, are in `ids`, and each row finds those before it, and itself, by its path. So a step
    writes nothing here: what was accepted is added by `commit`, along with the accepted keys.
    """

    prompt: torch.Tensor  # (slots, V) uint8, whether the prompt has the token
    said: torch.Tensor  # (slots, V) int32, how often the committed output has it
    bias: torch.Tensor  # (slots, V) float32
    rows: torch.Tensor  # (b,) int32, each sequence's slot
    lengths: torch.Tensor  # (b,) int32, committed tokens
    ids: torch.Tensor  # (b, n) int32, the step's tokens
    depths: torch.Tensor  # (b, n) int32, -1 for padding
    paths: (
        torch.Tensor
    )  # (b, n, D) int32, [s, i, k]: length + the row of row i's ancestor at depth k, itself at the end

    def begin(self, slot: int, prompt: Sequence[int], logit_bias: Mapping[int, float]) -> None:
        """`slot` holds a new sequence. Between steps, not within one."""
        for state in (self.prompt, self.said, self.bias):
            state[slot] = 0
        self.prompt[slot, torch.tensor(list(prompt), dtype=torch.long)] = 1
        self.bias[slot, torch.tensor(list(logit_bias), dtype=torch.long)] = torch.tensor(
            list(logit_bias.values()), dtype=torch.float32, device=self.bias.device
        )

    def commit(self, tokens: torch.Tensor) -> None:
        """tokens: (b, m) int32, what each sequence of the batch has newly committed; negative: nothing."""
        at = self.rows[:, None].long() * self.said.shape[1] + tokens.clamp(min=0)
        self.said.view(-1).scatter_add_(0, at.flatten(), (tokens >= 0).int().flatten())


def draw(logits: torch.Tensor, draws: Draws, history: History | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """From logits (b, n, V): tokens (b, n) int32, and (b, n) float32 the logit that each won with, after biases and
    penalties: NaN where the row has one, -inf where nothing was possible. `check_choice` judges it."""
    if logits.device.type == "cuda":
        from slipstream.kernels.draw_triton import draw_rows

        return draw_rows(logits, draws, history)
    return draw_plain(logits, draws, history)


def draw_plain(logits: torch.Tensor, draws: Draws, history: History | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` in plain torch, on any device."""
    adjusted = _adjusted(logits, draws, history)  # (b, n, V) float32
    t = draws.temperature[:, None, None]
    x = adjusted / torch.where(t > 0, t, 1.0)
    kept = _most_probable(x, draws.top_k[:, None, None])
    kept = kept & _nucleus(torch.softmax(x.where(kept, -torch.inf), -1), draws.top_p[:, None, None])
    p = torch.softmax(x.where(kept, -torch.inf), -1)
    kept = kept & (p >= draws.min_p[:, None, None] * p.amax(-1, keepdim=True))
    halves = draws.keys[..., None, :].long()  # (b, n, 1, 2)
    key = halves[..., 1] << 32 | halves[..., 0] & 0xFFFFFFFF
    noisy = x + gumbel(cast(Any, key), torch.arange(x.shape[-1], device=x.device))
    drawn = noisy.where(kept, -torch.inf).argmax(-1, keepdim=True)
    tokens = torch.where(t > 0, drawn, adjusted.argmax(-1, keepdim=True))
    value = adjusted.gather(-1, tokens).where(~adjusted.isnan().any(-1, keepdim=True), torch.nan)
    return tokens[..., 0].int(), value[..., 0]


def _adjusted(logits: torch.Tensor, draws: Draws, history: History | None) -> torch.Tensor:
    """(b, n, V) with biases and penalties."""
    x = logits.float()
    if history is None:
        return x
    slots = history.rows.long()
    said = history.said[slots][:, None].repeat(1, x.shape[1], 1)  # (b, n, V)
    on = torch.arange(history.paths.shape[2], device=x.device) <= history.depths[..., None]  # (b, n, D)
    row = (history.paths - history.lengths[:, None, None]).where(on, 0).long()
    token = history.ids.long()[:, None].expand(-1, x.shape[1], -1).gather(2, row)
    said.scatter_add_(2, token, on.int())
    x = x + history.bias[slots][:, None]
    penalty = draws.repetition[:, None, None]
    seen = (history.prompt[slots][:, None] > 0) | (said > 0)
    x = torch.where(x < 0, x * penalty, x / penalty).where(seen, x)
    minus = draws.presence[:, None, None].double() + draws.frequency[:, None, None].double() * said
    return torch.where(said > 0, x - minus.float(), x)


def _most_probable(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Which of x (b, n, V) are among the k largest, ties with the last of them included."""
    size = x.shape[-1]
    at = (k.long() - 1).clamp(0, size - 1).expand(*x.shape[:-1], 1)
    return (x >= torch.sort(x, dim=-1, descending=True).values.gather(-1, at)) | (k <= 0)


def _nucleus(p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Which of p (b, n, V) are the fewest that together reach `mass`: the most probable first, then by token id."""
    ordered, order = torch.sort(p, dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before < mass) | (mass >= 1)


# ---- noise keys, for a whole step at once


def noise_keys(seed: int, sample: int, positions: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """(n, 2) the low and the high half of `noise_key(seed, sample, position)` for each position (n,)."""
    mask = 0xFFFFFFFFFFFFFFFF
    keys: NDArray[np.uint64] = _keys(np.uint64(seed & mask), np.uint64(sample & mask), positions.astype(np.uint64))
    return keys.astype("<u8").view("<i4").reshape(-1, 2)


@compiled
def _keys(seed, sample, positions):  # type: ignore[no-untyped-def]
    start = _mixed(_mixed(seed) ^ sample)
    keys = np.empty(len(positions), np.uint64)
    for i in range(len(positions)):
        keys[i] = _mixed(start ^ positions[i])
    return keys


@compiled
def _mixed(x):  # type: ignore[no-untyped-def]
    """One round of the splitmix64 finaliser."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
