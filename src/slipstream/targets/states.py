"""The hidden states that drafters read, by number: as in transformers 0 is the embeddings and L the last layer after
the final norm; L + 1 is the last layer's output before that norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slipstream.errors import ModelError

_NAMES = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm")


def final_norm(model: Any) -> nn.Module | None:
    """The norm between the last layer and the output matrix; None if it has no known name."""
    base = model.base_model
    for part in (base, getattr(base, "language_model", None), getattr(base, "decoder", None)):
        for name in _NAMES:
            if isinstance(norm := getattr(part, name, None), nn.Module):
                return norm
    return None


def layers_name(model: Any) -> str:
    """The name of a model's list of layers, with a dot at the end."""
    count = int(model.config.get_text_config().num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return f"{name}."
    raise ModelError(f"{type(model).__name__} has no list of {count} layers, so none can be cut out of it")


@contextmanager
def asked_states(model: Any, layers: Sequence[int]) -> Iterator[Callable[[Any], dict[int, Tensor]]]:
    """Entered around one forward. Yields a function from the forward's output to these states, (b, n, H) each."""
    last = int(model.config.get_text_config().num_hidden_layers)
    before: list[Tensor] = []
    # Looked up now: a stand-in may have replaced the norm for this forward.
    norm = final_norm(model) if last + 1 in layers else None
    hook = None if norm is None else norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    try:
        yield lambda out: {n: before[-1] if n == last + 1 else out.hidden_states[n] for n in layers}
    finally:
        if hook is not None:
            hook.remove()
