"""Sampling on the logits' device: one token for every row of a step, by the rules and with the noise of `sampling.py`.

All inputs are tensors of fixed shape and nothing goes through the host, so a captured CUDA graph can serve other
requests at every replay. A row's token depends on that row's logits, options, history and key alone. In Triton on a GPU
(`draw_triton.py`), in plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.kernels.draw_inputs import Draws, History
from slipstream.sampling import gumbel


def draw(logits: torch.Tensor, draws: Draws, history: History | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """From logits (b, n, V): tokens (b, n) int32, and the logit of each after biases and penalties, (b, n) float32. The
    logit is NaN where any of the row's is, -inf where no token was possible; `check_choice` raises for these."""
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
    slots = history.slots.long()
    emitted = history.emitted[slots][:, None].repeat(1, x.shape[1], 1)  # (b, n, V)
    on = torch.arange(history.paths.shape[2], device=x.device) <= history.depths[..., None]  # (b, n, D)
    token = history.ids.flatten()[history.paths.where(on, 0).long()].long()  # (b, n, D)
    emitted.scatter_add_(2, token, on.int())
    x = x + history.bias[slots][:, None]
    penalty = draws.repetition[:, None, None]
    seen = (history.prompt[slots][:, None] > 0) | (emitted > 0)
    x = torch.where(x < 0, x * penalty, x / penalty).where(seen, x)
    minus = draws.presence[:, None, None].double() + draws.frequency[:, None, None].double() * emitted
    return torch.where(emitted > 0, x - minus.float(), x)


def _most_probable(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Which of x (b, n, V) are among the k largest, including ties with the k-th."""
    size = x.shape[-1]
    at = (k.long() - 1).clamp(0, size - 1).expand(*x.shape[:-1], 1)
    return (x >= torch.sort(x, dim=-1, descending=True).values.gather(-1, at)) | (k <= 0)


def _nucleus(p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Which of p (b, n, V) are in the smallest set that reaches `mass`, by falling probability, then by token id."""
    ordered, order = torch.sort(p, dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before < mass) | (mass >= 1)


# ---- noise keys, for a whole step at once


def noise_keys(
    seeds: Sequence[tuple[int, int]], sizes: NDArray[np.int64], positions: NDArray[np.integer[Any]]
) -> NDArray[np.int32]:
    """(n, 2): the low and the high half of `noise_key(seed, sample, position)`: of the first `sizes[0]` positions with
    the first seed and sample index, and so on."""
    mask = 0xFFFFFFFFFFFFFFFF
    known = np.array([(seed & mask, sample & mask) for seed, sample in seeds], np.uint64)
    keys: NDArray[np.uint64] = _keys(known, sizes, positions)
    return keys.astype("<u8").view("<i4").reshape(-1, 2)


@compiled
def _keys(seeds, sizes, positions):  # type: ignore[no-untyped-def]
    keys, i = np.empty(sizes.sum(), np.uint64), 0
    for number in range(len(sizes)):
        start = _mixed(_mixed(seeds[number, 0]) ^ seeds[number, 1])
        for _ in range(sizes[number]):
            keys[i] = _mixed(start ^ np.uint64(positions[i]))
            i += 1
    return keys


@compiled
def _mixed(x):  # type: ignore[no-untyped-def]
    """One round of the splitmix64 finaliser."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
