"""The target's own layers, for heads that start from them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.heads.base import Lender
from slipstream.targets.states import layers_name
from slipstream.targets.trees import unwrapped


def last_layers(model: Any, count: int) -> dict[str, Tensor]:
    """The tensors of a target's last layers, renamed to `layers.0.…` and so on."""
    whole = unwrapped(model)
    place, first = layers_name(whole), Lender.of(model).layers - count
    found = {}
    for name, tensor in whole.state_dict().items():
        number, _, rest = name.removeprefix(place).partition(".")
        if name.startswith(place) and int(number) >= first:
            found[f"layers.{int(number) - first}.{rest}"] = tensor
    return found
