"""Decoder layers of the common form, computed by fused kernels in nine launches.

The common form: norm, attention over rotated queries and keys, residual; norm, gated MLP, residual. Whether a layer has
it is found out by a trial: the layer and the fused form must agree on a small input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from slipstream.kernels.ops import gate, gated_linear, linear, turn_keys
from slipstream.targets.captured import fixed_step as steps
from slipstream.targets.captured.compiled import decoder_layers
from slipstream.targets.captured.modules import JointPart, Norm, Product

NAME = "slipstream-asked"
ROWS = 3  # of the trial's input
NEAR = 4  # tolerance of the trial, in roundings of the largest number
LEAST = 1e-4  # tolerance at least, as a share of the largest number, where roundings are smaller


@dataclass
class AttentionCall:
    """The arguments with which a layer called its attention."""

    query: Tensor  # (b, heads, n, d)
    keys: Tensor  # (b, key heads, n, d)
    values: Tensor
    options: dict[str, Any]


@dataclass
class FusedLayer:
    """The fused form of a layer."""

    input_norm: Norm
    qkv: JointPart
    out: Product
    norm: Norm
    gate_up: JointPart
    down: Product
    number: int
    options: dict[str, Any] = field(default_factory=dict)  # of its attention

    @classmethod
    def like(cls, layer: Any) -> FusedLayer | None:
        """The fused form of `layer`, if both agree in the trial. The layer's products and norms must have been replaced
        by stand-ins already."""
        attention, gated = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if attention is None or gated is None or any(map(has_hooks, (attention, gated))) or "forward" in vars(layer):
            return None
        parts = (
            getattr(layer, "input_layernorm", None),
            getattr(attention, "q_proj", None),
            getattr(attention, "o_proj", None),
            getattr(layer, "post_attention_layernorm", None),
            getattr(gated, "gate_proj", None),
            getattr(gated, "down_proj", None),
        )
        kinds = (Norm, JointPart, Product, Norm, JointPart, Product)
        if not all(isinstance(part, kind) for part, kind in zip(parts, kinds, strict=True)):
            return None
        same = cls(*parts, getattr(attention, "layer_idx", 0))  # type: ignore[arg-type]
        try:
            return same if same._agrees_with(layer) else None
        except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return None  # it takes other arguments, or computes something else

    def __call__(self, hidden: Tensor, *_: Any, position_embeddings: Any, past_key_values: Any, **__: Any) -> Tensor:
        own = past_key_values.layers[self.number]
        query = self._queries(hidden, position_embeddings, own.keys, own.values, own.rows, own.inputs.columns)
        attended = steps.attention_by_path(self.qkv, query, own.keys, own.values, None, **self.options)
        return self._after(hidden, attended[0])

    def _queries(self, hidden: Tensor, angles: tuple[Tensor, Tensor], *cache: Tensor) -> Tensor:
        return turn_keys(self.qkv.whole(self.input_norm(hidden), True), *angles, *cache)

    def _after(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """seen: (b, n, heads, d)."""
        hidden = linear(seen.flatten(2), self.out.weight, self.out.bias, hidden)
        inner = gated_linear(self.norm(hidden), self.gate_up.whole.weight, self.gate_up.whole.bias)
        return linear(inner, self.down.weight, self.down.bias, hidden)

    @torch.no_grad()
    def _agrees_with(self, layer: Any) -> bool:
        """The trial: whether queries, keys, values and output equal the layer's own. The input is small, so that the
        residual does not hide what is added to it."""
        attention, weight = layer.self_attn, self.input_norm.weight
        generator = torch.Generator().manual_seed(0)
        x = 1e-2 * torch.randn(1, ROWS, len(weight), generator=generator).to(weight)
        turns = torch.rand(1, ROWS, attention.head_dim // 2, generator=generator).repeat(1, 1, 2)
        angles = turns.cos().to(weight), turns.sin().to(weight)
        with recorded_attention(attention.config) as calls:
            expected = layer(
                x, attention_mask=None, position_ids=None, past_key_values=None, position_embeddings=angles
            )
        (one,) = calls
        self.options = one.options
        keys, values = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (one.keys, one.values))
        places = torch.arange(ROWS, dtype=torch.int32, device=x.device)
        query = self._queries(x, angles, keys, values, places[:1], places[None])
        after = self._after(x, one.query.transpose(1, 2).contiguous())
        z = torch.linspace(-4, 4, 64).to(weight)
        pairs = [
            (query, one.query),
            (keys, one.keys),
            (values, one.values),
            (after, expected),
            (gate(torch.cat([z, torch.ones_like(z)])), layer.mlp.act_fn(z)),
        ]
        return all(is_near(*pair) for pair in pairs)


def fusable_layers(model: Any) -> list[tuple[Any, FusedLayer]]:
    """The decoder layers that have the common form, with their fused forms."""
    try:
        layers = decoder_layers(model)
    except NotImplementedError:
        return []
    return [(layer, same) for layer in layers if (same := FusedLayer.like(layer)) is not None]


def is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    near = max(LEAST, NEAR * torch.finfo(other.dtype).eps) * float(other.abs().max())
    return bool(((one - other).abs() <= near).all())  # False if there is a NaN


def has_hooks(module: Any) -> bool:
    """Whether the module has hooks other than transformers' own: these would not be called."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return hasattr(module, "_hf_hook") or any(not h.__module__.startswith("transformers.") for h in hooks)


@contextmanager
def in_place(fused: list[tuple[Any, FusedLayer]]) -> Iterator[None]:
    """Within this, these layers compute their fused forms. Only `forward` is replaced: transformers has hooks on the
    modules, to record hidden states."""
    for layer, same in fused:
        layer.forward = same
    try:
        yield
    finally:
        for layer, _ in fused:
            del layer.forward


_calls: list[AttentionCall] = []


@contextmanager
def recorded_attention(config: Any) -> Iterator[list[AttentionCall]]:
    """Within this, attention only records its arguments and returns the queries."""
    global _calls
    kept, config._attn_implementation_internal = config._attn_implementation_internal, NAME
    calls: list[AttentionCall] = []
    _calls = calls
    try:
        yield calls
    finally:
        config._attn_implementation_internal = kept
        _calls = []


def _record_call(
    module: torch.nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    **options: Any,
) -> tuple[Tensor, None]:
    _calls.append(AttentionCall(query, key, value, options))
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _record_call)
