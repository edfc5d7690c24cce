"""GraphTarget: on a GPU, a step of fixed shape is captured once and replayed: inputs up, accepted keys moved into
place, forward, best tokens down. One launch instead of a thousand.

Attention reads a row's keys in order of absolute position, through a table of its path (`exact.py`), and all matrices
have the shape of the bucket, whatever is in it. So a row's logits depend, bit for bit, on its own tokens alone, and a
text does not depend on what was drafted, in bfloat16 either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba import njit
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.target.base import Scores, Slot, Want
from slipstream.target.cache import KeyValuePool
from slipstream.target.compiled import compiled_layers
from slipstream.target.ops import attend, write_keys
from slipstream.target.trees import TreeTarget, is_quantised
from slipstream.tree import TokenTree

log = logging.getLogger("slipstream")

NAME = "slipstream-exact"
ROWS = (1, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FIRST_CAPACITY = 1024  # every growth captures anew, and capacity that isn't used costs nothing but memory


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest size that n fits in; beyond them, a multiple of the largest."""
    for size in sizes:
        if n <= size:
            return size
    return -(-n // sizes[-1]) * sizes[-1]


@dataclass(frozen=True)
class Inputs:
    """What a step reads, as views of one tensor, so that it goes up in one copy."""

    flat: Any  # numpy on the host, torch on the device, int32
    ids: Any  # (b, n)
    positions: Any  # (b, n) absolute
    depths: Any  # (b, n) -1 for padding
    columns: Any  # (b, n) where each new key goes
    paths: Any  # (b, n, D) the columns of each row's ancestors
    lengths: Any  # (b,)
    rows: Any  # (b,) of the pool
    sources: Any  # (b, D) columns of the keys that the last step accepted
    places: Any  # (b, D) and the columns they belong in

    @classmethod
    def of(cls, flat: Any, batch: int, rows: int, depth: int) -> Inputs:
        shapes = [(batch, rows)] * 4 + [(batch, rows, depth), (batch,), (batch,), (batch, depth), (batch, depth)]
        ends = np.cumsum([int(np.prod(s)) for s in shapes])
        return cls(flat, *(flat[e - int(np.prod(s)) : e].reshape(s) for s, e in zip(shapes, ends, strict=True)))

    @staticmethod
    def size(batch: int, rows: int, depth: int) -> int:
        return batch * (4 * rows + rows * depth + 2 + 2 * depth)


class GraphLayer(CacheLayerMixin):
    """One layer's keys and values: the whole pool, written where the step's inputs say."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, inputs: Inputs) -> None:
        super().__init__()
        self.keys, self.values, self.inputs = keys, values, inputs  # (pool rows, heads, capacity, dim)
        self.is_initialized = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        write_keys(self.keys, self.values, keys, values, self.inputs.rows, self.inputs.columns)
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool is laid out beforehand."""

    def get_seq_length(self) -> int:
        return 0  # positions are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class FixedStep:
    """A step of one shape. On a GPU it is captured; elsewhere it runs as it is, which is how tests try it."""

    def __init__(self, target: GraphTarget, batch: int, rows: int, layers: tuple[int, ...]) -> None:
        self.target, self.batch, self.rows, self.layers = target, batch, rows, layers
        self.depth = rows  # no path is longer
        device, cuda = target.device, target.device.type == "cuda"
        size = Inputs.size(batch, rows, self.depth)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host = Inputs.of(self._host.numpy(), batch, rows, self.depth)
        self.inputs = Inputs.of(self._device, batch, rows, self.depth)
        target.blank(self.host)  # a capture runs too: it must not write into anyone's row
        self.answer = torch.zeros((2, batch, rows), dtype=torch.int32, pin_memory=cuda)  # best tokens, their logits
        pool = target.pool
        self._cache = Cache(layers=[GraphLayer(k, v, self.inputs) for k, v in pool.tensors()])
        self._mask = torch.zeros((batch, 1, rows, 1), dtype=target.dtype, device=device)  # nobody looks at it
        self._graph: Any = None
        nothing = torch.empty(0, device=device)
        self.scratch: Any = SimpleNamespace(stats=nothing, sums=nothing)
        if cuda:
            from slipstream.target.exact import scratch

            widest = max(v.shape[3] for _, v in pool.tensors())
            self.scratch = scratch(batch, rows, target.heads, pool.capacity, self.depth, widest, device)
            self._capture()

    def run(self) -> None:
        """Everything a step does, as the device sees it."""
        self._device.copy_(self._host, non_blocking=True)
        if self.rows > 1:
            self._move()
        i = self.inputs
        out = self.target.model(
            input_ids=i.ids.long(),
            position_ids=i.positions.long(),
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **({"output_hidden_states": True} if self.layers else {}),
        )
        self.logits = out.logits  # (b, n, V)
        self.hidden = {layer: out.hidden_states[layer] for layer in self.layers}
        best = self.logits.argmax(-1)
        value = self.logits.gather(-1, best[..., None])[..., 0].float()
        self.answer.copy_(torch.stack([best.int(), value.view(torch.int32)]), non_blocking=True)

    def _move(self) -> None:
        """Bring the keys that the last step accepted into place, in all layers at once."""
        i = self.inputs
        row, source, place = i.rows[:, None].long(), i.sources.long(), i.places.long()
        for store in self.target.pool.stores():  # (layers, rows, heads, capacity, dim)
            store[:, row, :, place] = store[:, row, :, source]

    def _capture(self) -> None:
        with self.target.exact_attention(self), self._compiled():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.run()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=self.target.memory):
                self.run()

    def _compiled(self) -> AbstractContextManager[None]:
        if not self.target.compile:
            return nullcontext()
        return compiled_layers(self.target.model, self._cache, self.target.compile)

    def __call__(self) -> None:
        if self._graph is None:
            with self.target.exact_attention(self), self._compiled():
                self.run()
        else:
            self._graph.replay()
            torch.cuda.current_stream().synchronize()


class GraphTarget(TreeTarget):
    """A TreeTarget whose steps are replayed."""

    def __init__(self, *given: Any, compile: str = "", **options: Any) -> None:
        """compile: a backend of torch.compile for the decoder layers; empty: none."""
        super().__init__(*given, **options)
        self.compile = compile
        self.heads = int(self._config.num_attention_heads)
        self.exact = self.exact or by_row(self.model)
        self.memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._steps: dict[tuple[int, int, tuple[int, ...]], FixedStep] = {}
        self._drawn: tuple[int, int] = (0, 0)  # the pool's size that the steps were made for
        self._spare = self.open()  # where the padding of a batch writes
        self.pool.reserve(len(self._slots), min(FIRST_CAPACITY, self.context))

    @property
    def pool(self) -> KeyValuePool:
        return self._pool

    @contextmanager
    def exact_attention(self, step: FixedStep) -> Iterator[None]:
        """For one forward: attention by path."""
        global _step
        kept, _step = self._config._attn_implementation_internal, step
        self._config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            self._config._attn_implementation_internal, _step = kept, None

    @torch.inference_mode()
    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        if known:
            return super().score(slots, trees, want, known)
        n = bucket(max(want.rows, *(len(tree) for tree in trees)), ROWS)
        batch = bucket(len(slots), BATCHES)
        self.pool.reserve(len(self._slots), max(slot.length for slot in slots) + n)
        step = self._step(batch, n, want.layers)
        for slot, tree in zip(slots, trees, strict=True):
            if slot.pending is not None and (n == 1 or len(slot.pending) > step.depth):
                self._settle(slot)
            slot.tree = tree
        self._fill(step.host, slots, trees)
        step()
        best, value = step.answer[0].numpy().astype(np.int64), step.answer[1].view(torch.float32).numpy().copy()
        found = []
        for i, tree in enumerate(trees):
            hidden = {layer: h[i, : len(tree)] for layer, h in step.hidden.items()}
            positions = step.host.positions[i, : len(tree)].astype(np.int64)
            scores = Scores(step.logits[i, : len(tree)], hidden, positions)
            scores.take_argmax(best[i], value[i])
            found.append(scores)
        return found

    def _step(self, batch: int, rows: int, layers: tuple[int, ...]) -> FixedStep:
        if self._drawn != (self.pool.rows, self.pool.capacity):  # the cache has moved
            self._steps.clear()
            self._drawn = (self.pool.rows, self.pool.capacity)
        key = (batch, rows, layers)
        if key not in self._steps:
            self._steps[key] = FixedStep(self, batch, rows, layers)
        return self._steps[key]

    def blank(self, host: Inputs) -> None:
        """Padding alone: it reads nothing, and writes into the spare row."""
        host.ids[:], host.depths[:], host.positions[:], host.paths[:] = 0, -1, 0, 0
        host.lengths[:], host.rows[:] = 0, self._spare.row
        host.columns[:] = np.arange(host.columns.shape[1])
        host.sources[:] = host.places[:] = 0

    def _fill(self, host: Inputs, slots: Sequence[Slot], trees: Sequence[TokenTree]) -> None:
        self.blank(host)
        for i, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
            length, n = slot.length, len(tree)
            host.ids[i, :n] = tree.tokens
            host.depths[i, :n] = tree.depths
            host.positions[i] = length
            host.positions[i, :n] += tree.depths
            host.columns[i] += length
            host.lengths[i], host.rows[i] = length, slot.row
            _fill_paths(tree.parents, tree.depths, length, host.paths[i])
            if slot.pending is not None:
                kept, start = len(slot.pending), length - len(slot.pending)
                host.places[i, :kept] = start + np.arange(kept)
                host.sources[i, :kept] = start + np.asarray(slot.pending)
                # The rest moves the last of them once more: writing the same value twice is no race.
                host.places[i, kept:], host.sources[i, kept:] = host.places[i, kept - 1], host.sources[i, kept - 1]
                slot.pending = None


def by_row(model: Any) -> bool:
    """Whether a row's result depends on that row alone, given a fixed number of rows. Experts take rows in groups."""
    config = model.config.get_text_config()
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return not experts and not is_quantised(model)


@njit(cache=True, nogil=True)
def _fill_paths(parents, depths, length, paths):  # type: ignore[no-untyped-def]
    """paths[i, k]: the column of node i's ancestor at depth k."""
    for i in range(len(parents)):
        if i > 0:
            for k in range(depths[i]):
                paths[i, k] = paths[parents[i], k]
        paths[i, depths[i]] = length + i


_step: FixedStep | None = None  # whose inputs the attention of the forward under way reads


def attention_by_path(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,  # (b, heads, n, d)
    key: torch.Tensor,  # (pool rows, key heads, capacity, d)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise NotImplementedError("this model's attention has terms that attention by path does not know")
    assert _step is not None, "only within a fixed step"
    i = _step.inputs
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    room = _step.scratch
    out = attend(
        query, key, value, i.rows, i.lengths, i.depths, i.paths, room.stats, room.sums, scale, sliding_window, softcap
    )
    return out, None


AttentionInterface.register(NAME, attention_by_path)
