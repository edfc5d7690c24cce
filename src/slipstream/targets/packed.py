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

MOST = 32  # rows for packed weights: with more, reordering is cheap
# Rows that are tried, and from how many rows on packing is taken to pay if it does with these. On most CPUs it does not
# with less than four, where BLAS is limited by memory; on some it halves their time.
TRIALS = ((8, 4), (3, 3), (2, 2), (1, 1))
SMALL = 32 << 20  # bytes of weights that fit a core's cache, where reordering takes next to no time
SHARE = 4  # the copy may take 1/SHARE of the free memory
SEEN = 32  # weights per layer that are compared to notice a change, which changes all of them or nearly all
TRIED = 4  # layers of each shape in the trial: the first start with a model waits for it
LESS = 0.85  # packed products must take at most this share of BLAS' time: clocks err by a tenth on a busy machine

_known = WeakValueDictionary[int, "PackedLayers"]()  # by the model's id: several targets may share it


class PackedLayers:
    """A model's linear layers with packed weights, put in place during a forward."""

    def __init__(self, model: nn.Module, layers: list[tuple[nn.Module, str, nn.Linear, int]]) -> None:
        """layers: of the model, each with the module that it is part of, its name there, and from how many rows on
        packing pays."""
        self.model = model  # a reference, so that its id is not reused while this exists
        self._places = [(parent, name, layer, Packed(layer, fewest)) for parent, name, layer, fewest in layers]
        self.fewest = min((fewest for *_, fewest in layers), default=0)  # rows that any layer is packed for

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

    def __init__(self, layer: nn.Linear, fewest: int) -> None:
        super().__init__()
        self.layer, self.fewest = layer, fewest
        self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.layer.weight.detach(), TRIALS[0][0])
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
        if not self.fewest <= rows <= MOST:
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


def worth_packing(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear, int]]:
    """The layers for which packing pays, each with the module that it is part of, its name there, and from how many
    rows on it pays. Only float32: lower precision gains nothing on CPUs without instructions for it."""
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
    fewest = {shape: known_to_pay(some[:TRIED]) for shape, some in alike.items()}
    return [(*each, rows) for each in layers if (rows := fewest[each[2].weight.shape])]


def known_to_pay(layers: list[nn.Linear]) -> int:
    """From how many rows on packing layers of this shape pays; 0: never. Tried once on a machine and remembered: the
    last bits of logits depend on it, and must be the same at every start."""
    shape = "×".join(map(str, layers[0].weight.shape))
    where = f"{cpu_name()} × {torch.get_num_threads()}, torch {torch.__version__}"
    key = f"{len(layers)} layers {shape} | {where}"
    known = recall("packed", key)
    if type(known) is not int:  # earlier versions remembered a bool
        known = pays(layers)
        remember("packed", key, known)
    return known


@torch.inference_mode()
def pays(layers: list[nn.Linear]) -> int:
    """Try from how many rows on packed weights are faster, with the same result; 0: never. layers: of one shape;
    several, so that weights come from memory as they do in a step."""
    if not torch.backends.mkldnn.is_available():
        return 0
    found = 0
    try:
        packed = [Packed(layer, 1) for layer in layers]
        for rows, fewest in TRIALS:
            x = torch.randn(rows, layers[0].in_features)
            same = torch.allclose(packed[0](x), layers[0](x), rtol=1e-3, atol=1e-3)
            times = [[seconds(each, x) for each in (packed, layers)] for _ in range(3)]
            least, unpacked = (min(each) for each in zip(*times, strict=True))
            most = unpacked if found else LESS * unpacked  # for fewer rows the copy is there already
            if not same or least >= most:
                break
            found = fewest
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # a torch that has no such product
        log.debug("weights can't be packed: %s", error)
        return 0
    return found


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
