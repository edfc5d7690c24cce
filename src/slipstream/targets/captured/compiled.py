"""Decoder layers through torch.compile, during a capture only: the user's model stays as it is.

All layers of one class share one compiled function. For that they must look the same to the compiler: each gets a cache
of one layer, its own, and the layer number 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from transformers.cache_utils import Cache

SHAPES = 1024  # limit of recompilations: torch's own is low, and here every shape of step is compiled once


@contextmanager
def compiled_layers(model: Any, whole: Cache, backend: str) -> Iterator[None]:
    """Within this, decoder layers run compiled, each on its own part of the cache. Fused ones are left alone."""
    own_layers: list[tuple[Any, Any]] = [
        (layer, own)
        for layer, own in zip(decoder_layers(model), whole.layers, strict=True)
        if "forward" not in vars(layer)
    ]
    numbers: list[tuple[Any, int]] = [
        (m, m.layer_idx) for layer, _ in own_layers for m in layer.modules() if hasattr(m, "layer_idx")
    ]
    for layer, own in own_layers:
        kind: Any = type(layer)
        layer.forward = _on_its_own(layer, compiled(kind, backend), Cache(layers=[own]))
    for module, _ in numbers:
        module.layer_idx = 0
    try:
        with dynamo.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            yield
    finally:
        for layer, _ in own_layers:
            del layer.forward
        for module, number in numbers:
            module.layer_idx = number


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The list of layers in any transformers model."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise NotImplementedError("this model does not keep its layers in one list")


@cache
def compiled(kind: Any, backend: str) -> Callable[..., Any]:
    """A compiled forward of a layer class. Its kernels overlap as ours do (`kernels/overlap.py`), if torch can."""
    early: dict[str, Any] = (
        {"triton.enable_pdl": True} if backend == "inductor" and hasattr(inductor.triton, "enable_pdl") else {}
    )
    return torch.compile(kind.forward, backend=backend, dynamic=False, options=early or None)


def _on_its_own(layer: torch.nn.Module, forward: Callable[..., Any], own: Cache) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if named.get("past_key_values") is not None:
            named["past_key_values"] = own
        return forward(layer, *given, **named)

    return call
