"""Stand-ins for a model's linear layers and norms in fixed steps: kernels that compute every row in the same way.

Layers with the same input, such as q, k and v, become one product. Rotary angles are read from a table.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from slipstream.kernels.ops import linear, norm
from slipstream.targets.packed import is_plain, standing_in

LASTING = ("default", "linear", "llama3", "yarn")  # kinds of rotary embedding whose angles depend on position alone
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class StandIns:
    """Stand-ins for a model's linear layers, norms and rotary embeddings, put in place during a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, name, the layer, its stand-in
        for parent in model.modules():
            joined: dict[str, nn.Module] = {}
            for names in TOGETHER:
                layers = [getattr(parent, name, None) for name in names]
                if can_join(layers):
                    joined.update(zip(names, join(layers), strict=True))  # type: ignore[arg-type]
            for name, layer in parent.named_children():
                if is_plain(layer):
                    self._places.append((parent, name, layer, joined.get(name) or Product(layer)))
                elif (same := Norm.like(layer) or Angles.like(layer)) is not None:
                    self._places.append((parent, name, layer, same))

    def reach(self, positions: int, given: torch.Tensor) -> None:
        """Compute the angles of so many positions. given: any tensor of the model's device and dtype."""
        for _, _, _, other in self._places:
            if isinstance(other, Angles):
                other.reach(positions, given)

    def in_place(self) -> AbstractContextManager[None]:
        return standing_in(self._places)

    def release(self) -> None:
        """Free all memory."""
        self._places.clear()


def can_join(layers: list[Any]) -> bool:
    if not all(map(is_plain, layers)):
        return False
    shapes = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(shapes) == 1 and len({id(layer.weight) for layer in layers}) == len(layers)


@torch.no_grad()
def join(layers: list[nn.Linear]) -> list[JointPart]:
    """The layers as parts of one product, for which their weights are put next to each other in memory."""
    sizes = [layer.out_features for layer in layers]
    bias = together([layer.bias for layer in layers]) if layers[0].bias is not None else None
    whole, ends = Whole(together([layer.weight for layer in layers]), bias), torch.tensor(sizes).cumsum(0).tolist()
    return [JointPart(whole, end - size, end, end == ends[-1]) for size, end in zip(sizes, ends, strict=True)]


def together(parts: list[Any]) -> torch.Tensor:
    """These parameters as one tensor. Each becomes a view of its own part, so that none is held twice, neither by
    several targets of one model: where they are next to each other already, they stay where they are."""
    first, shape = parts[0].detach(), (sum(map(len, parts)), *parts[0].shape[1:])
    ends = [part.data_ptr() + part.nbytes for part in parts]
    memory = {part.untyped_storage().data_ptr() for part in parts}
    if len(memory) == 1 and ends[:-1] == [p.data_ptr() for p in parts[1:]] and all(p.is_contiguous() for p in parts):
        return first.as_strided(shape, first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, own in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = own
    return whole


class Product(nn.Module):
    """One linear layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Whole(nn.Module):
    """Several layers with the same input as one product. The output is kept until the last part has taken its share."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.made: tuple[torch.Tensor, torch.Tensor] | None = None  # input, output

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        made = self.made[1] if self.made is not None and self.made[0] is x else linear(x, self.weight, self.bias)
        self.made = None if last else (x, made)
        return made


class JointPart(nn.Module):
    """One of the layers of a `Whole`."""

    def __init__(self, whole: Whole, first: int, end: int, last: bool) -> None:
        super().__init__()
        self.whole, self.first, self.end = whole, first, end
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x, self.last)[..., self.first : self.end]


class Norm(nn.Module):
    """A norm: with or without subtracting the mean (`centre`), weight applied as it is or plus one (`shift`)."""

    def __init__(self, layer: Any, eps: float, centre: bool, shift: bool) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.eps, self.centre, self.shift = eps, centre, shift

    @classmethod
    @torch.no_grad()
    def like(cls, layer: Any) -> Norm | None:
        """A norm that agrees with `layer` on a few numbers, if there is one: models have norm classes of their own."""
        weight = getattr(layer, "weight", None)
        if "Norm" not in type(layer).__name__ or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
            return None
        eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
        if not isinstance(eps, float) or layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook"):
            return None
        x = torch.linspace(-3, 4, 3 * len(weight), device=weight.device, dtype=weight.dtype).reshape(3, -1)
        expected = layer(x)
        near = 4 * torch.finfo(weight.dtype).eps
        for centre, shift in ((False, False), (False, True), (True, False)):
            found = cls(layer, eps, centre, shift)
            if torch.allclose(found(x), expected, rtol=near, atol=near * float(expected.abs().max())):
                return found
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight, self.bias, self.eps, self.centre, self.shift)


class Angles(nn.Module):
    """A table of rotary cosines and sines, computed in advance by the model's own code (`reach`)."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.table = torch.empty(0)  # (positions, 2, d)

    @classmethod
    @torch.no_grad()
    def like(cls, layer: Any) -> Angles | None:
        way, frequencies = getattr(layer, "rope_type", None), getattr(layer, "inv_freq", None)
        if way not in LASTING or not isinstance(frequencies, torch.Tensor) or hasattr(layer, "_hf_hook"):
            return None
        found = cls(layer)
        some = torch.tensor([[5, 0, 2], [6, 6, 1]], device=frequencies.device)
        try:
            found.reach(7, frequencies)
            one, other = layer(frequencies, some)
        except (TypeError, ValueError):
            return None  # it takes other arguments
        cosines, sines = found(frequencies, some)
        found.table = found.table[:0]
        return found if torch.equal(cosines, one) and torch.equal(sines, other) else None

    def reach(self, positions: int, given: torch.Tensor) -> None:
        cosines, sines = self.layer(given, torch.arange(positions, device=given.device)[None])
        self.table = torch.stack([cosines[0], sines[0]], 1)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.dtype != self.table.dtype or not len(self.table):
            found: tuple[torch.Tensor, ...] = self.layer(x, position_ids)
            return found
        return self.table[position_ids].unbind(-2)
