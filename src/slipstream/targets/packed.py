"""Linear layers whose weights lie as a CPU's products read them, so that a few rows take little more than one.

A product of a few rows, which verifying a draft is, takes BLAS longer to lay out the weights for than to multiply. Here
they are laid out once, by oneDNN. The price is a second copy of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.functional import linear

from slipstream.kept import recall, remember
from slipstream.targets.timing import cpu_name

log = logging.getLogger("slipstream")

FEWEST, MOST = 4, 32  # rows: fewer BLAS multiplies as quickly as weights can be read, more are worth the laying out
SMALL = 32 << 20  # bytes of weights that a core's own cache may hold, where laying them out takes next to nothing
SHARE = 4  # of the memory that is free, the copy takes no more than this part
SEEN = 32  # weights of a layer by which a change of them is seen: it changes all of them, or nearly
SAMPLE, TRIED = 8, 4  # rows, and layers of a shape, that are tried: the first start with a model waits for it
LESS = 0.85  # of BLAS' time that they must take: clocks err by a tenth on a busy machine

_known = WeakValueDictionary[int, "PackedLayers"]()  # by the model's id: several targets may share it


class PackedLayers:
    """A model's linear layers with packed weights, put in their places for the length of a forward."""

    def __init__(self, model: nn.Module, layers: list[tuple[nn.Module, str, nn.Linear]]) -> None:
        """layers: of the model, each with the module that it is part of, and its name there."""
        self.model = model  # it lives as long as this does, so its id stays its own
        self._places = [(parent, name, layer, Packed(layer)) for parent, name, layer in layers]

    @classmethod
    def of(cls, model: nn.Module) -> PackedLayers:
        """All that are plain; none where that gains nothing."""
        known = _known.get(id(model))
        if known is None:
            known = _known[id(model)] = cls(model, worth_packing(model))
        return known

    def follow(self) -> None:
        """Weights that were changed meanwhile, as training does, or merging an adapter, are packed again."""
        for *_, packed in self._places:
            packed.follow()

    def in_place(self) -> AbstractContextManager[None]:
        return standing_in(self._places)


class Packed(nn.Module):
    """One layer. Few rows and many are multiplied with its own weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.layer.weight.detach(), SAMPLE)
        self._seen = self._some().clone()

    def _some(self) -> torch.Tensor:
        """(·,) of its own weights, from all over them."""
        weights = self.layer.weight.detach().view(-1)
        return weights[:: 1 + len(weights) // SEEN]

    def follow(self) -> None:
        if not torch.equal(self._some(), self._seen):
            self._pack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if not FEWEST <= rows <= MOST:
            return linear(x, self.layer.weight, self.layer.bias)
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.layer.bias, "none", [], "")
        return found


@contextmanager
def standing_in(places: Sequence[tuple[nn.Module, str, nn.Module, nn.Module]]) -> Iterator[None]:
    """places: a module, the name of a layer of it, that layer, and what takes its place meanwhile."""
    for parent, name, _, other in places:
        parent._modules[name] = other
    try:
        yield
    finally:
        for parent, name, layer, _ in places:
            parent._modules[name] = layer


def is_plain(layer: Any) -> bool:
    """A linear layer that computes x·Wᵀ + b and nothing else: no adapter, no hook, no quantised weights."""
    return (
        type(layer) is nn.Linear
        and not (layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook"))
        and layer.weight.is_floating_point()
        and layer.weight.is_contiguous()
    )


def worth_packing(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Each with the module that it is part of, and its name there. Where a CPU has no instructions for it, lower
    precision gains nothing."""
    layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and is_plain(layer)
        if layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
    ]
    if not SMALL < sum(layer.weight.nbytes for *_, layer in layers) < free_memory() / SHARE:
        return []
    alike: dict[torch.Size, list[nn.Linear]] = {}
    for *_, layer in layers:
        alike.setdefault(layer.weight.shape, []).append(layer)
    paying = {shape for shape, some in alike.items() if known_to_pay(some[:TRIED])}
    return [each for each in layers if each[2].weight.shape in paying]


def known_to_pay(layers: list[nn.Linear]) -> bool:
    """Tried once on a machine, and kept: the last bits of logits depend on it, and are the same at every start."""
    shape = "×".join(map(str, layers[0].weight.shape))
    where = f"{cpu_name()} × {torch.get_num_threads()}, torch {torch.__version__}"
    key = f"{len(layers)} layers {shape} | {where}"
    known = recall("packed", key)
    if not isinstance(known, bool):
        known = pays(layers)
        remember("packed", key, known)
    return known


@torch.inference_mode()
def pays(layers: list[nn.Linear]) -> bool:
    """Tried on this machine: whether a few rows take less with packed weights, and come to the same. Layers of one
    shape, several if there are, so that their weights come from memory as they do in a step."""
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.randn(SAMPLE, layers[0].in_features)
    try:
        packed = [Packed(layer) for layer in layers]
        same = torch.allclose(packed[0](x), layers[0](x), rtol=1e-3, atol=1e-3)
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # a torch that has no such product
        log.debug("weights can't be packed: %s", error)
        return False
    times = [[seconds(each, x) for each in (packed, layers)] for _ in range(3)]
    least, usual = (min(each) for each in zip(*times, strict=True))
    return same and least < LESS * usual


def seconds(layers: Sequence[nn.Module], x: torch.Tensor) -> float:
    clock = perf_counter()
    for layer in layers:
        layer(x)
    return perf_counter() - clock


def free_memory() -> int:
    """Bytes that can be had without swapping, where the system says so."""
    try:
        with open("/proc/meminfo") as file:
            return 1024 * int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
