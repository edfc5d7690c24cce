"""Linear layers with packed weights on a CPU, so that a few rows take little longer than one.

For a product of a few rows, as in verifying a draft, BLAS spends more time on reordering the weights than on
multiplying. Here oneDNN reorders (packs) them once. This takes memory for a second copy.
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

FEWEST, MOST = 4, 32  # rows for packed weights: with fewer, BLAS is limited by memory; with more, reordering is cheap
SMALL = 32 << 20  # bytes of weights that fit a core's cache, where reordering takes next to no time
SHARE = 4  # the copy may take 1/SHARE of the free memory
SEEN = 32  # weights per layer that are compared to notice a change, which changes all of them or nearly all
SAMPLE, TRIED = 8, 4  # rows, and layers of each shape, in the trial: the first start with a model waits for it
LESS = 0.85  # packed products must take at most this share of BLAS' time: clocks err by a tenth on a busy machine

_known = WeakValueDictionary[int, "PackedLayers"]()  # by the model's id: several targets may share it


class PackedLayers:
    """A model's linear layers with packed weights, put in place during a forward."""

    def __init__(self, model: nn.Module, layers: list[tuple[nn.Module, str, nn.Linear]]) -> None:
        """layers: of the model, each with the module that it is part of, and its name there."""
        self.model = model  # a reference, so that its id is not reused while this exists
        self._places = [(parent, name, layer, Packed(layer)) for parent, name, layer in layers]

    @classmethod
    def of(cls, model: nn.Module) -> PackedLayers:
        """The model's plain layers for which packing pays; possibly none."""
        known = _known.get(id(model))
        if known is None:
            known = _known[id(model)] = cls(model, worth_packing(model))
        return known

    def follow(self) -> None:
        """Pack weights again that were changed, for instance by training or by merging an adapter."""
        for *_, packed in self._places:
            packed.follow()

    def in_place(self) -> AbstractContextManager[None]:
        return standing_in(self._places)


class Packed(nn.Module):
    """One layer. With fewer or more rows than packing pays for, it uses the ordinary weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.layer.weight.detach(), SAMPLE)
        self._seen = self._some().clone()

    def _some(self) -> torch.Tensor:
        """(·,) a sample of its weights."""
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
    """Within this, layers are replaced. places: a module, the name of its layer, that layer, and the replacement."""
    for parent, name, _, other in places:
        parent._modules[name] = other
    try:
        yield
    finally:
        for parent, name, layer, _ in places:
            parent._modules[name] = layer


def is_plain(layer: Any) -> bool:
    """Whether a layer computes x·Wᵀ + b and nothing else: no adapter, no hook, no quantised weights."""
    return (
        type(layer) is nn.Linear
        and not (layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook"))
        and layer.weight.is_floating_point()
        and layer.weight.is_contiguous()
    )


def worth_packing(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The layers for which packing pays, each with the module that it is part of and its name there. Only float32:
    lower precision gains nothing on CPUs without instructions for it."""
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
    """Whether packing layers of this shape pays. Tried once on a machine and remembered: the last bits of logits depend
    on it, and must be the same at every start."""
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
    """Try whether a few rows are faster with packed weights, with the same result. layers: of one shape; several, so
    that weights come from memory as they do in a step."""
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
    least, unpacked = (min(each) for each in zip(*times, strict=True))
    return same and least < LESS * unpacked


def seconds(layers: Sequence[nn.Module], x: torch.Tensor) -> float:
    clock = perf_counter()
    for layer in layers:
        layer(x)
    return perf_counter() - clock


def free_memory() -> int:
    """Bytes that are available without swapping; 0 if the system does not report it."""
    try:
        with open("/proc/meminfo") as file:
            return 1024 * int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
