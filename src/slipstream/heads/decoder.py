"""Decoder layers like Llama's, and FeatureHead: heads of one or few such layers that predict states autoregressively.

A layer owns no cache: the caller passes `attend`, a function of queries, keys and values. `Chains` is used in training:
it attends as if a chain were drafted from every position at once. `keys.Attention` is used in drafting, and takes few
launches on a GPU.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from slipstream.heads.base import Prediction, Unrolled, UnrolledHead, by_kernels, follow, later
from slipstream.heads.keys import Attention
from slipstream.heads.layer_config import LayerConfig
from slipstream.heads.rotary import Rotary, rotate
from slipstream.targets.captured.modules import JointPart

# (b, heads, n, d), (b, kv, n, d), (b, kv, n, d) -> (b, w, heads, d) of the last w rows, the queries
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class FeatureHead(UnrolledHead):
    """A head that predicts the target's next state and reads its own prediction at the next depth, like EAGLE."""

    config: Any
    # Whether the next depth reads features after the last norm. Then `step` and `draft` return them normed.
    norm_output = False

    @abstractmethod
    def read(self, states: Tensor) -> Tensor:
        """(b, n, ·) the target's states, as `join` returns them -> (b, n, H) features."""

    @abstractmethod
    def enter(self, tokens: Tensor, features: Tensor, chain: Tensor | None) -> tuple[Tensor, Tensor]:
        """Arguments as in `draft` -> the layer's input (b, n, ·), and its residual (b, n, H)."""

    @property
    @abstractmethod
    def decoder(self) -> Layer:
        """Its first layer."""

    @property
    def further(self) -> Sequence[FurtherLayer]:
        """The layers after the first."""
        return ()

    @property
    def last_norm(self) -> RMSNorm | None:
        """The norm between features and the output matrix."""
        return None

    @abstractmethod
    def output(self, x: Tensor) -> Tensor:
        """(…, H) features, after the last norm if there is one -> (…, V')."""

    def logits(self, features: Tensor) -> Tensor:
        """(…, H) -> (…, V')."""
        norm = None if self.norm_output else self.last_norm
        return self.output(features if norm is None else norm(features))

    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, *attends: Attend) -> Tensor:
        """(b, n) tokens and (b, n, H) the features at the positions before them -> (b, n, H) the features at their own
        positions. attends: one for each layer."""
        after = torch.add(*self._carry(*self.enter(tokens, features, None), positions, attends))
        return self.last_norm(after) if self.norm_output and self.last_norm is not None else after

    def draft(
        self, tokens: Tensor, features: Tensor, chain: Tensor | None, positions: Tensor, look: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """Like `step`, for drafting. tokens (b, n); token j reads row chain[j] of features (b, ·, H); chain None: row
        j. Only the last w tokens are queries, as `look` has it. Returns their features, and the same after the last
        norm."""
        looks = look.for_layers(1 + len(self.further))
        rest, h = self._carry(*self.enter(tokens, features, chain), positions, looks)
        if self.last_norm is None:
            return h + rest, None
        after, normed = add_norm(rest, h, self.last_norm)
        return (normed if self.norm_output else after), normed

    def _carry(
        self, x: Tensor, residual: Tensor, positions: Tensor, attends: Sequence[Attend]
    ) -> tuple[Tensor, Tensor]:
        """`Layer.carry` through all layers: twice (b, w, H), whose sum is the result."""
        rest, h = self.decoder.carry(x, residual, positions, attends[0])
        for layer, attend in zip(self.further, attends[1:], strict=True):
            h, normed = add_norm(rest, h, layer.input_layernorm)
            rest, h = layer.carry(normed, h, positions, attend)
        return rest, h

    def side_by_side(
        self, tokens: Tensor, features: Tensor, chain: Tensor | None, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embeddings and features, each after its norm, concatenated (b, n, 2H); and the plain features (b, n, H)."""
        if by_kernels(features):
            from slipstream.heads.layer_kernel import enter

            weights, eps = ((norms[0].weight, norms[1].weight), norms[0].eps) if norms else ((None, None), 0.0)
            table = self.embedding
            if type(table) is nn.Embedding and table.weight.device == features.device:
                return enter(tokens, table.weight, features, chain, *weights, eps)
            return enter(None, self.embed(tokens).flatten(0, 1), features, chain, *weights, eps)
        embedding, features = self.embed(tokens), follow(features, chain)
        both = (norms[0](embedding), norms[1](features)) if norms else (embedding, features)
        return torch.cat(both, dim=-1), features

    def unroll(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Unrolled]:
        """From depth 1 on it reads its own features, and gradients flow through them. HASS calls this aligned contexts,
        EAGLE-3 training-time test."""
        features, attends = self.read(states), self.chains()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        for k in range(depths):
            features = self.step(later(tokens, 1 + k), features, positions + k, *attends)  # (b, t, H)
            yield Unrolled((features,), self.logits)

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        self.check_depths(depths)
        for (features,), read in self.unroll(states, tokens, depths):
            yield Prediction(read(features), features)

    def chains(self) -> list[Chains]:
        """Attention for each of its layers, for one `unroll`."""
        return [Chains(self.config.window(layer)) for layer in range(1 + len(self.further))]


class Chains:
    """Attention in chains drafted from every position at once, called once per depth.

    At depth k, the chain of position i sees the keys of depth 0 at positions up to i, which come from true states, and
    of each later depth only its own key. Its own position is i + k; a window is counted from there.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._keys: list[Tensor] = []  # per depth (b, kv, 1, t, d)
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys.append(key[:, :, None])
        self._values.append(value[:, :, None])
        if len(self._keys) == 1 and self._window is None:
            grouped = query.shape[1] != key.shape[1]
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            return out.transpose(1, 2)
        t, d = query.shape[2:]
        q = query.unflatten(1, (key.shape[1], -1)) / math.sqrt(d)  # (b, kv, g, t, d): g query heads share a key head
        past = q @ self._keys[0].transpose(-1, -2)  # (b, kv, g, t, t)
        past = past.masked_fill(self._hidden(t, q.device), -torch.inf)
        own = [(q * k).sum(-1, keepdim=True) for k in self._keys[1:]]  # (b, kv, g, t, 1) each
        if self._window is not None:
            gone = len(own) - self._window
            own = [torch.full_like(x, -torch.inf) if n < gone else x for n, x in enumerate(own)]
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = torch.cat((past, *own), dim=-1).softmax(-1, dtype=wide).to(q.dtype)
        mixed = weights[..., :t] @ self._values[0]  # (b, kv, g, t, d)
        for j, v in enumerate(self._values[1:]):
            mixed = mixed + weights[..., t + j, None] * v
        return mixed.flatten(1, 2).transpose(1, 2)

    def _hidden(self, t: int, device: torch.device) -> Tensor:
        """(t, t) which keys of depth 0 each position does not see."""
        place = torch.arange(t, device=device)
        ahead = place > place[:, None]
        if self._window is None:
            return ahead
        depth = len(self._keys) - 1
        return ahead | (place <= place[:, None] + depth - self._window)


class Layer(nn.Module):
    """Attention and a gated MLP. Each kind of head adds its own norms before the attention."""

    def __init__(self, config: LayerConfig, width: int, reads: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, width, reads)
        self.mlp = _MLP(config, width)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)

    def carry(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """(b, n, reads), (b, n, H), (b, n) -> twice (b, w, H), whose sum is the result for the last w positions, the
        queries. Of the other positions only keys and values are computed."""
        mixed = self.self_attn(x, positions, attend)
        silent = residual.shape[1] - mixed.shape[1]
        h, normed = add_norm(mixed, residual[:, silent:], self.post_attention_layernorm)
        return self.mlp(normed), h


class FurtherLayer(Layer):
    """A layer that reads the output of the layer before, after a norm."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__(config, width=width, reads=width)
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)


class _Attention(nn.Module):
    def __init__(self, config: LayerConfig, width: int, reads: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        rows, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(reads, rows, bias=config.qkv_bias)
        self.k_proj = nn.Linear(reads, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(reads, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(rows, width, bias=config.o_bias)
        self.normed = config.qk_norm
        if self.normed:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        products = (self.q_proj, self.k_proj, self.v_proj)
        if isinstance(attend, Attention) and by_kernels(x) and not self.normed:
            mixed = attend.turned(_together(products, x), positions, self.rotary.frequencies, self.rotary.scale)
        else:
            query, key, value = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in products)
            if self.normed:
                query, key = self.q_norm(query), self.k_norm(key)
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            cos, sin = self.rotary(positions)
            mixed = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)  # (b, w, heads, d)
        return self.o_proj(mixed.flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.silu = config.hidden_act == "silu"

    def forward(self, x: Tensor) -> Tensor:
        if self.silu and by_kernels(x):
            from slipstream.kernels.layer_pieces import gated

            return self.down_proj(gated(_together((self.gate_proj, self.up_proj), x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def add_norm(x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """(b, w, H) each -> their sum, and the sum after the norm."""
    if by_kernels(x):
        from slipstream.heads.layer_kernel import add_norm

        return add_norm(x, residual, norm.weight, norm.eps)
    total = residual + x
    return total, norm(total)


def _together(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """(b, n, ·) the outputs of several linear layers for x, concatenated."""
    if isinstance(layers[0], JointPart):  # their weights are one matrix already
        return layers[0].whole(x, True)
    return torch.cat([layer(x) for layer in layers], dim=-1)
