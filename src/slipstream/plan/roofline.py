"""The roofline model: the time of a step on a chip, from what it reads (weights, keys) and computes.

A step reads the weights once and each sequence's keys once, however many rows it verifies, and computes every row. It
takes as long as the slower of the two, plus the launches of its layers. The host's time is not included; measured costs
(`--device here`) include it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from slipstream.errors import OptionError

# From steps of one row that were measured on an H200 (docs/benchmarks.md): 4.05 ms for 7B parameters in 32 layers and
# 0.80 for 135M in 30 give 86% of the bandwidth and 25 µs a layer. Copies there reach 87%.
REACHED = 0.86
LAUNCH = 25e-6


class Chip(NamedTuple):
    """Figures of a chip's data sheet."""

    bandwidth: float  # bytes per second
    peak: float  # dense operations per second of its matrix units, multiplying and adding counted as two, in `dtype`
    memory: float  # bytes
    dtype: str = "bfloat16"


# From the makers' data sheets, as repeated by vendors, clouds and computing centres; each was found in at least one
# such page. Sheets since the A100 give peaks with structured sparsity: the dense peak is half of that.
CHIPS: Mapping[str, Chip] = {
    "B200": Chip(8.0e12, 2250e12, 180e9),  # HGX board at 1,000 W, 4,500 sparse; 192 GB are built in, 180 sold
    "H200": Chip(4.8e12, 989e12, 141e9),  # SXM sheet, 1,979 sparse; the NVL card has 1,671
    "H100": Chip(3.35e12, 989e12, 80e9),  # SXM sheet, 1,979 sparse
    "A100": Chip(2.039e12, 312e12, 80e9),  # sheet of the 80 GB SXM module; as a PCIe card 1.935e12 bytes
    "L40S": Chip(864e9, 362e12, 48e9),  # sheet: 362.05, sparse 733
    "A6000": Chip(768e9, 154.8e12, 48e9),  # Ampere's RTX A6000; sheet: 309.7 sparse
    "RTX4090": Chip(1008e9, 165.2e12, 24e9),  # Ada white paper, sums in float32: twice that with sums in float16
    "L4": Chip(300e9, 121e12, 24e9),  # sheet: 242 sparse
    "V100": Chip(900e9, 125e12, 32e9, "float16"),  # SXM2 sheet; as a PCIe card 112
    "T4": Chip(320e9, 65e12, 16e9, "float16"),  # sheet; no sparsity yet
    "MI300X": Chip(5.3e12, 1307e12, 192e9),  # AMD's sheet, 2,615 sparse
}
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1, "int8": 1}  # bytes of a number


def chip(name: str) -> Chip:
    known = {each.lower(): each for each in CHIPS}
    if (found := known.get(name.lower().replace(" ", ""))) is None:
        raise OptionError(f"--device {name!r} is unknown: there are {', '.join(CHIPS)}, and `here` to measure")
    return CHIPS[found]


@dataclass(frozen=True)
class Shape:
    """The properties of a model that a step's time depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    dense: int  # parameters that every row goes through, the output matrix among them
    experts: int = 0  # parameters of all experts
    chosen: float = 1.0  # share of the experts that a row goes through
    windows: tuple[int | None, ...] = ()  # positions that each layer attends to; None: all; 0: it has no keys
    again: int = 0  # parameters that every row goes through a second time

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    def looked_at(self, context: int) -> float:
        """Positions attended to, summed over all layers."""
        return float(sum(context if window is None else min(window, context) for window in self.windows))


# Names of the number of experts in configs.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def shape_of(config: Any, parameters: Mapping[str, int]) -> Shape:
    """config: transformers'. parameters: how many numbers each named one has."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    tied = getattr(text, "tie_word_embeddings", False)
    parameters = {name: size for name, size in parameters.items() if not (tied and name.startswith("lm_head"))}
    total = sum(parameters.values())
    experts = sum(size for name, size in parameters.items() if ".experts." in name)
    embedding = sum(size for name, size in parameters.items() if "embed" in name or ".wte" in name)
    count = next((n for n in [getattr(text, k, None) for k in EXPERTS] if n), 1)
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if not getattr(text, "layer_types", None) and window:
        types = ["sliding_attention"] * text.num_hidden_layers
    looks = {"full_attention": None, "sliding_attention": window, "chunked_attention": window}
    return Shape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        dense=total - experts - (0 if tied else embedding),  # of an embedding only single rows are read
        experts=experts,
        chosen=(getattr(text, "num_experts_per_tok", None) or count) / count if experts else 1.0,
        windows=tuple(looks.get(kind, 0) for kind in types),
    )


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, by cause."""

    weights: float
    keys: float
    arithmetic: float
    launches: float

    @property
    def seconds(self) -> float:
        return max(self.weights + self.keys, self.arithmetic) + self.launches

    @property
    def bound(self) -> str:
        """The cause that takes most of the time."""
        if self.launches > max(self.weights + self.keys, self.arithmetic):
            return "launches"
        if self.arithmetic > self.weights + self.keys:
            return "arithmetic"
        return "weights" if self.weights >= self.keys else "keys"


def step_cost(
    shape: Shape, on: Chip, rows: float = 1, batch: int = 1, context: int = 512, dtype: str = "bfloat16"
) -> StepCost:
    """The cost of a step with so many rows for each of `batch` sequences of `context` tokens."""
    size, every = SIZES[dtype], rows * batch
    touched = 1 - (1 - shape.chosen) ** every if shape.experts else 0.0  # share of the experts that are used by any row
    weights = size * (shape.dense + touched * shape.experts)
    keys = size * batch * 2 * shape.kv_heads * shape.head_size * shape.looked_at(context)
    through = 2 * every * (shape.dense + shape.again + shape.chosen * shape.experts)
    attention = 4 * every * shape.heads * shape.head_size * shape.looked_at(context)
    # In float8 or int8 the peak is twice as high. In float32, tensor cores don't help; half the peak is assumed.
    peak = on.peak * 2 / size
    return StepCost(
        weights / (REACHED * on.bandwidth),
        keys / (REACHED * on.bandwidth),
        (through + attention) / (REACHED * peak),
        shape.layers * LAUNCH,
    )


def on_part(target: Shape, keys: int) -> Shape:
    """A target that attends to so many of its keys at most."""
    return replace(target, windows=tuple(keys if window is None else min(window, keys) for window in target.windows))


def drafting_on_part(
    target: Shape, on: Chip, batch: int, context: int, keys: int, depth: int, tokens: float, dtype: str = "bfloat16"
) -> float:
    """The speed-up of a target that drafts for itself with `keys` of its keys, `depth` tokens, one forward each.
    tokens: per step, including the bonus token."""
    return drafting_by(target, on_part(target, keys), on, batch, context, depth, tokens, dtype)


def drafting_by(
    target: Shape,
    draft: Shape,
    on: Chip,
    batch: int,
    context: int,
    depth: int,
    tokens: float,
    dtype: str = "bfloat16",
    launches: bool = True,
) -> float:
    """The same for a draft model, `depth` tokens with one step each. launches: False leaves out the time of launches,
    as published cost models do."""

    def seconds(shape: Shape, rows: float) -> float:
        cost = step_cost(shape, on, rows, batch, context, dtype)
        return cost.seconds - (0 if launches else cost.launches)

    return tokens * seconds(target, 1) / (depth * seconds(draft, 1) + seconds(target, depth + 1))


def spire_shape(target: Shape, layers: int, window: int | None = 64, sinks: int = 1, feedback: bool = True) -> Shape:
    """A step of a spire draft: the target's last layers, attending to the first and the latest tokens
    (`drafters/spire.py`). With feedback memory, keys are computed twice for each token."""
    body = (target.dense - target.hidden * target.vocabulary) * layers // target.layers
    keys = 2 * layers * target.hidden * target.kv_heads * target.head_size
    return replace(
        target,
        layers=layers,
        dense=body + target.hidden * target.vocabulary,
        experts=target.experts * layers // target.layers,
        windows=(None if window is None else sinks + window,) * layers,
        again=keys if feedback else 0,
    )


def memory(shape: Shape, batch: int, context: int, dtype: str) -> float:
    """Bytes of the weights and of all keys."""
    keys = batch * 2 * shape.kv_heads * shape.head_size * shape.looked_at(context)
    return SIZES[dtype] * (shape.parameters + keys)


# ---- shapes of heads

DRAFT_VOCABULARY = 32_000  # the vocabulary of EAGLE-3's published heads


def head_shape(target: Shape, kind: str) -> Shape:
    """The shape of one level of a trained head's draft."""
    h, v = target.hidden, target.vocabulary
    attention = h * target.head_size * (2 * target.heads + 2 * target.kv_heads)
    layer = max(attention, (target.dense - h * v) // max(1, target.layers))
    sizes = {
        "eagle3": (
            layer + attention // 2 + 3 * h * h + min(v, DRAFT_VOCABULARY) * h,
            1,
        ),  # reads two states side by side
        "eagle": (layer + 2 * h * h + v * h, 1),
        "redrafter": (2 * h * h + 4 * 4 * h * h + v * h, 1),  # a recurrence, and four blocks on both states
        "medusa": (h * h + v * h, 0),  # a block and an output matrix; all levels at once
        "mlp": (3 * h * h + v * h, 1),
    }
    dense, layers = sizes[kind]
    own = (None,) if kind.startswith("eagle") else ()
    return replace(target, layers=layers, dense=dense, experts=0, chosen=1.0, windows=own)
