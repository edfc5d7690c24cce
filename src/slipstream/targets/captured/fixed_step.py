"""Steps of one fixed shape: what they read and write, and everything the device does in between.

On a GPU a step is captured once and replayed: inputs up, accepted keys moved into place, forward, tokens chosen and
brought down. One launch instead of a thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.kernels.draw import draw
from slipstream.kernels.draw_inputs import Draws, History
from slipstream.kernels.ops import attend, best, move_keys, walk, write_keys
from slipstream.notices import doing
from slipstream.targets.captured.compiled import compiled_layers
from slipstream.targets.captured.recording import capture, preparing
from slipstream.targets.states import asked_states

if TYPE_CHECKING:
    from slipstream.targets.cache import KeyValuePool

NAME = "slipstream-exact"
REACH = 32  # accepted keys that a step can move into place, if it has not more rows than that

BEST, DRAWN, DRAWN_WITH_HISTORY = "best", "drawn", "drawn with history"  # how a step chooses tokens


@dataclass(frozen=True)
class Inputs:
    """What a step reads, as views of one tensor, so that it goes up in one copy."""

    flat: Any  # numpy on the host, torch on the device, int32
    ids: Any  # (b, n)
    positions: Any  # (b, n) absolute
    depths: Any  # (b, n) -1 for padding
    columns: Any  # (b, n) where each new key goes
    paths: Any  # (b, n, n) the columns of each row's ancestors, by depth
    lengths: Any  # (b,)
    rows: Any  # (b,) of the pool
    moves: Any  # (b,) how many keys the last step accepted
    sources: Any  # (b, R) their columns
    places: Any  # (b, R) and the columns they belong in
    emitted: Any  # (b, R) tokens new in the text before the root, -1 for none: for penalties
    draws: Draws

    @classmethod
    def of(cls, flat: Any, batch: int, rows: int) -> Inputs:
        reach = max(rows, REACH)
        shapes = [(batch, rows)] * 4 + [(batch, rows, rows)] + [(batch,)] * 3 + [(batch, reach)] * 3
        ends = np.cumsum([int(np.prod(s)) for s in shapes])
        views: list[Any] = [flat[e - int(np.prod(s)) : e].reshape(s) for s, e in zip(shapes, ends, strict=True)]
        views.append(Draws.of(flat[ends[-1] :], batch, rows))
        return cls(flat, *views)

    @staticmethod
    def size(batch: int, rows: int) -> int:
        return batch * (4 * rows + rows * rows + 3 + 3 * max(rows, REACH)) + Draws.size(batch, rows)

    @property
    def reach(self) -> int:
        return int(self.sources.shape[1])


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


class StepTarget(Protocol):
    """What a step needs of its target."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    heads: int
    compile: str  # a backend of torch.compile; "": none
    memory: Any  # what all captures take theirs from

    @property
    def pool(self) -> KeyValuePool: ...

    def fixed(self, step: FixedStep) -> AbstractContextManager[None]: ...

    def blank(self, host: Inputs) -> None: ...

    def histories(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class FixedStep:
    """A step of one shape. On a GPU it is captured; elsewhere it runs as it is, which is how tests try it."""

    def __init__(self, target: StepTarget, batch: int, rows: int, layers: tuple[int, ...], choice: str) -> None:
        self.target, self.layers, self.choice = target, layers, choice
        device, cuda = target.device, target.device.type == "cuda"
        size = Inputs.size(batch, rows)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host = Inputs.of(self._host.numpy(), batch, rows)
        self.inputs = i = Inputs.of(self._device, batch, rows)
        target.blank(self.host)  # a capture runs too: it must not write into anyone's row
        self.history: History | None = None
        if choice == DRAWN_WITH_HISTORY:
            self.history = History(*target.histories(), i.rows, i.lengths, i.ids, i.depths, i.paths)
        self.answer = torch.zeros((2, batch, rows), dtype=torch.int32, pin_memory=cuda)  # tokens, their logits
        pool = target.pool
        self._cache = Cache(layers=[GraphLayer(k, v, self.inputs) for k, v in pool.tensors()])
        self._mask = torch.zeros((batch, 1, rows, 1), dtype=target.dtype, device=device)  # nobody looks at it
        self._graph: Any = None
        self._ended: Any = torch.cuda.Event() if cuda else None
        nothing = torch.empty(0, device=device)
        self.scratch: Any = SimpleNamespace(stats=nothing, sums=nothing)
        if cuda:
            from slipstream.kernels.exact_attention import scratch

            widest = max(v.shape[3] for _, v in pool.tensors())
            self.scratch = scratch(batch, rows, target.heads, pool.capacity, rows, widest, device)
            self._capture()

    def run(self) -> None:
        """Everything a step does, as the device sees it."""
        self._device.copy_(self._host, non_blocking=True)
        i = self.inputs
        ids, positions = self._device[: 2 * i.ids.numel()].long().view(2, *i.ids.shape)  # they come first
        for keys, values in self.target.pool.stores():  # all layers of one shape
            move_keys(keys, values, i.rows, i.sources, i.places, i.moves)
        with asked_states(self.target.model, self.layers) as asked:
            out = self.target.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._mask,
                past_key_values=self._cache,
                use_cache=True,
                **({"output_hidden_states": True} if self.layers else {}),
            )
        self.logits = out.logits  # (b, n, V)
        self.by_sequence = list(out.logits)
        states = asked(out)
        self.hidden = [{layer: h[k] for layer, h in states.items()} for k in range(len(i.ids))]  # by sequence
        self.chosen = self._choose()
        self.answer.copy_(self.chosen, non_blocking=True)

    def walk(self, room: int) -> torch.Tensor:
        """(b, 1 + 2·room) int64, on the device: see `ops.walk`. What the host will accept, if its rule is to match."""
        i = self.inputs
        return walk(i.ids, i.depths, i.paths, i.lengths, self.chosen, room)

    def _choose(self) -> torch.Tensor:
        """(2, b, n) int32: the token after each row, and the bits of the logit it won with."""
        if self.choice == BEST:
            return best(self.logits)
        if self.history is not None:
            self.history.commit(self.inputs.emitted)
        tokens, value = draw(self.logits, self.inputs.draws, self.history)
        return torch.stack([tokens, value.view(torch.int32)])

    @property
    def tokens(self) -> NDArray[np.int64]:
        """(b, n) the tokens of the last run."""
        return self.answer[0].numpy().astype(np.int64)

    @property
    def values(self) -> NDArray[np.float32]:
        """(b, n) and the logits they won with."""
        return self.answer[1].view(torch.float32).numpy().copy()

    def _capture(self) -> None:
        batch, rows = self.inputs.ids.shape
        made = "compiling" if self.target.compile else "capturing"
        with preparing, doing(f"{made} a step of {batch} × {rows} rows"), self.target.fixed(self), self._compiled():
            self._graph, _ = capture(self.run, self.target.memory)

    def _compiled(self) -> AbstractContextManager[None]:
        if not self.target.compile:
            return nullcontext()
        return compiled_layers(self.target.model, self._cache, self.target.compile)

    def __call__(self, during: Callable[[FixedStep], None] | None = None) -> None:
        """during: called as soon as the device has its work."""
        if self._graph is None:
            with self.target.fixed(self), self._compiled():
                self.run()
        else:
            self._graph.replay()
            self._ended.record()
        if during is not None:
            during(self)
        if self._graph is not None:
            self._ended.synchronize()


under_way: FixedStep | None = None  # whose inputs the attention of the forward under way reads


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
    assert under_way is not None, "only within a fixed step"
    i = under_way.inputs
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    room = under_way.scratch
    out = attend(
        query, key, value, i.rows, i.lengths, i.depths, i.paths, room.stats, room.sums, scale, sliding_window, softcap
    )
    return out, None


AttentionInterface.register(NAME, attention_by_path)
