"""Make a draft model from its target: some of its layers, between its embedding and its output matrix.

For targets without a smaller model of the same family. The draft shares no memory with the target, and must be trained,
since its layers read inputs that they were not trained on.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from slipstream.errors import ModelError, OptionError
from slipstream.targets.states import layers_name
from slipstream.targets.trees import unwrapped

CUTS = ("first", "last", "even")


def kept_layers(cut: str, layers: int, of: int) -> list[int]:
    """Which of the target's layers are kept. even: evenly spaced, including the first and the last."""
    if cut not in CUTS:
        raise OptionError(f"there is no cut {cut!r}: there are {', '.join(CUTS)}")
    if not 1 <= layers < of:
        raise OptionError(
            f"layers={layers} is out of range: the target has {of}, so 1 to {of - 1} can be cut out of it"
        )
    if cut == "first":
        return list(range(layers))
    if cut == "last":
        return list(range(of - layers, of))
    return [round(place) for place in np.linspace(0, of - 1, layers)]


@torch.no_grad()
def cut_out(model: Any, cut: str, layers: int) -> Any:
    """A causal language model of these layers of the target, in float32 on the target's device."""
    whole = unwrapped(model)
    config = whole.config
    if config.get_text_config() is not config:
        raise ModelError(f"{type(whole).__name__} is more than a language model: give a smaller one with --draft")
    of = config.num_hidden_layers
    kept = kept_layers(cut, layers, of)
    config = copy.deepcopy(config)
    for name, value in vars(config).items():  # lists with an entry per layer, such as layer_types
        if isinstance(value, list) and len(value) == of:
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = layers
    place = layers_name(whole)
    tensors = {new: value for name, value in whole.state_dict().items() if (new := _renamed(name, place, kept))}
    try:
        draft = type(whole)(config).to(torch.float32)
        draft.load_state_dict(tensors)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(
            f"layers can't be cut out of {type(whole).__name__} ({reason}): give a smaller model with --draft"
        ) from error
    if (generation := getattr(whole, "generation_config", None)) is not None:
        draft.generation_config = copy.deepcopy(generation)
    return draft.to(next(whole.parameters()).device).eval()


def _renamed(name: str, place: str, kept: list[int]) -> str | None:
    """A tensor's name in the draft. None: it belongs to a layer that is left out."""
    if not name.startswith(place):
        return name
    number, _, rest = name.removeprefix(place).partition(".")
    return f"{place}{kept.index(int(number))}.{rest}" if int(number) in kept else None
