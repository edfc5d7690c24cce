"""A step of one fixed shape: its inputs, its outputs, and everything that the device does in between.

On a GPU a step is captured once and replayed, one launch instead of a thousand: copy inputs to the device, move
accepted keys into place, run the forward, choose tokens, copy them to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.kernels.draw import draw
from slipstream.kernels.draw_inputs import History
from slipstream.kernels.ops import attend, attend_and_tell, best, move_keys, write_keys
from slipstream.kernels.sizes import BLOCK, PAGE
from slipstream.notices import doing
from slipstream.sampling import BEST, DRAWN_WITH_HISTORY
from slipstream.stopwatch import preparing
from slipstream.targets.captured.compiled import compiled_layers
from slipstream.targets.captured.inputs import TEXT, Inputs, Shape, fill
from slipstream.targets.captured.recording import capture
from slipstream.targets.states import asked_states
from slipstream.targets.watching import Watched

if TYPE_CHECKING:
    from slipstream.targets.captured.arena import Arena

NAME = "slipstream-exact"


class GraphLayer(CacheLayerMixin):
    """One layer's keys and values in the whole arena, written to the columns in the step's inputs."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, inputs: Inputs) -> None:
        super().__init__()
        self.keys, self.values, self.inputs = keys, values, inputs  # (1, heads, columns, dim)
        self.rows = torch.zeros(1, dtype=torch.int32, device=keys.device)  # the arena is one row
        self.is_initialized = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        write_keys(self.keys, self.values, keys, values, self.rows, self.inputs.columns)
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arena exists already."""

    def get_seq_length(self) -> int:
        return 0  # unused: positions are passed in

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class StepTarget(Protocol):
    """What a step needs from its target."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    arena: Arena
    groups: tuple[int, ...]  # query heads per key head, of all layers
    compile: str  # a backend of torch.compile; "": none
    memory: Any  # the memory pool of all captures

    def fixed(self, step: FixedStep) -> AbstractContextManager[None]: ...

    def histories(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def scratch(self, shape: Shape) -> Any: ...


class FixedStep:
    """A step of one shape. On a GPU it is captured; elsewhere it runs uncaptured, as in tests."""

    def __init__(
        self,
        target: StepTarget,
        shape: Shape,
        layers: tuple[int, ...],
        way: str,
        reports_attention: bool = False,
        captured: bool = True,
    ) -> None:
        """way: how it chooses tokens, one of `sampling.WAYS`. reports_attention: whether it also reports what the roots
        attend to."""
        self.target, self.shape, self.layers, self.way = target, shape, layers, way
        self.reports_attention = reports_attention
        device, cuda, history = target.device, target.device.type == "cuda", way == DRAWN_WITH_HISTORY
        size = Inputs.size(shape, history)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host = Inputs.of(self._host.numpy(), shape, history)
        self.inputs = i = Inputs.of(self._device, shape, history)
        fill(self.host, target.arena.table, target.groups, [], [], [])  # capturing runs the step, on padding alone
        self.tables = target.arena.tables
        self.history: History | None = None
        if history:
            self.history = History(*target.histories(), i.slots[0], i.ids, i.depths[0][:, None], i.ancestors)
        self.answer = torch.zeros((2, 1, shape.ends), dtype=torch.int32, pin_memory=cuda)
        # Of the last run, (e,) each: the chosen tokens, and their logits.
        self.tokens: NDArray[np.int32] = self.answer[0, 0].numpy()
        self.values: NDArray[np.float32] = self.answer[1, 0].view(torch.float32).numpy()
        self._cache = Cache(layers=[GraphLayer(k, v, self.inputs) for k, v in target.arena.tensors()])
        self._mask = torch.zeros((1, 1, shape.rows, 1), dtype=target.dtype, device=device)  # not read by our attention
        self._rows = torch.zeros(shape.sequences, dtype=torch.int32, device=device)  # of the arena, which is one row
        pages = self.tables.shape[1]
        self.attended = torch.zeros((shape.rows if reports_attention else 0, pages), pin_memory=cuda)  # by row and page
        self.watched: Watched | None = None  # collects what rows of text attend to, in uncaptured steps
        self._graph: Any = None
        self._ended: Any = torch.cuda.Event() if cuda else None
        self.scratch = target.scratch(shape)
        if cuda and captured:
            self._capture()

    def run(self, tokens: torch.Tensor | None = None) -> None:
        """Everything the device does in a step. tokens: of its first rows, if they are known on the device alone."""
        self._device.copy_(self._host, non_blocking=True)
        i = self.inputs
        if tokens is not None:
            i.ids[0, : len(tokens)] = tokens
        ids, positions = self._device[: 2 * i.ids.numel()].long().view(2, *i.ids.shape)  # the first two inputs
        for keys, values in self.target.arena.stores():  # all layers of one shape
            move_keys(keys, values, self._rows, i.sources, i.places, i.moves)
        if self.reports_attention:
            rows, heads = self.shape.rows, self.target.model.config.get_text_config().num_attention_heads
            pages, device = self.tables.shape[1], self._device.device
            self.attention_scratch = torch.empty((pages * PAGE // BLOCK, rows, heads), device=device)
            self.page_weights = torch.zeros((rows, heads, pages), device=device)
        options: dict[str, Any] = {"output_hidden_states": True} if self.layers else {}
        if self.shape.ends < self.shape.rows:
            options["logits_to_keep"] = i.ends.long()
        with asked_states(self.target.model, self.layers) as asked:
            out = self.target.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._mask,
                past_key_values=self._cache,
                use_cache=True,
                **options,
            )
        self.logits = out.logits[0]  # (e, V)
        self.hidden = {layer: h[0] for layer, h in asked(out).items()}  # (n, H)
        self.chosen = self._choose()
        self.answer.copy_(self.chosen, non_blocking=True)
        if self.reports_attention:
            self.attended.copy_(self.page_weights.sum(1), non_blocking=True)

    @property
    def roots(self) -> NDArray[np.int64]:
        """The row of each tree's root, in a step whose trees have no known nodes."""
        return np.flatnonzero(self.host.depths[0] == 0)

    def _choose(self) -> torch.Tensor:
        """(2, 1, e) int32: the token after each end, and the bits of its logit."""
        if self.way == BEST:
            return best(self.logits[None])
        if self.history is not None:
            self.history.commit(self.inputs.owners, self.inputs.emitted)
        tokens, value = draw(self.logits[:, None], self.inputs.draws, self.history)
        return torch.stack([tokens, value.view(torch.int32)]).transpose(1, 2)

    def tiles(self, groups: int) -> torch.Tensor | None:
        """The tiles of rows for a layer with so many query heads per key head; None in steps of one sequence."""
        return self.inputs.tiles[self.target.groups.index(groups)] if self.shape.tiles else None

    def _capture(self) -> None:
        made = "compiling" if self.target.compile else "capturing"
        with preparing, doing(f"{made} a step of {self.shape.rows} rows"), self.target.fixed(self), self._compiled():
            self._graph, _ = capture(self.run, self.target.memory)

    def _compiled(self) -> AbstractContextManager[None]:
        if not self.target.compile or self.watched is not None:
            return nullcontext()
        return compiled_layers(self.target.model, self._cache, self.target.compile)

    def run_within(self, tokens: torch.Tensor | None = None) -> None:
        """`run` without a capture of its own: directly, or within another capture."""
        with self.target.fixed(self), self._compiled():
            self.run(tokens)

    def __call__(self, during: Callable[[FixedStep], None] | None = None) -> None:
        """during: called as soon as the device has been given its work."""
        if self._graph is None:
            self.run_within()
            if self._ended is not None:
                self._ended.record()
                self._ended.synchronize()
        else:
            self._graph.replay()
            self._ended.record()
        if during is not None:
            during(self)
        if self._graph is not None:
            self._ended.synchronize()


under_way: FixedStep | None = None  # the step whose forward is running: attention reads its inputs


def attention_by_path(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,  # (1, heads, n, d)
    key: torch.Tensor,  # (1, key heads, columns, d)
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
    if under_way.watched is not None:
        _report_text_attention(under_way, under_way.watched, query, key, scale, sliding_window, softcap)
    room = under_way.scratch
    rows = i.slots, i.lengths, i.depths, i.paths, under_way.tables, under_way.tiles(query.shape[1] // key.shape[1])
    how = scale, sliding_window, softcap, under_way.shape.tile
    if under_way.reports_attention:
        attention_scratch = under_way.attention_scratch, under_way.page_weights
        return attend_and_tell(query, key, value, *rows, room.stats, room.sums, *attention_scratch, *how), None
    return attend(query, key, value, *rows, room.stats, room.sums, *how), None


def _report_text_attention(
    step: FixedStep,
    watched: Watched,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Report what the rows of text of a step of one sequence attend to."""
    i, width = step.inputs, watched.weights.shape[1]
    text = i.depths[0] == TEXT
    at = torch.arange(width, device=key.device)
    table = step.tables[i.slots[0, 0]].long()
    ends = i.lengths[0, text][:, None]  # (rows, 1) how many positions each row sees
    hidden = at >= ends
    if window is not None:
        hidden |= at < ends - window
    mask = torch.zeros(hidden.shape, device=key.device).masked_fill(hidden, -torch.inf)
    keys = key[:, :, table[at // PAGE] * PAGE + at % PAGE]
    watched.see(query[:, :, text], keys, mask[None, None], scale, soft_cap)


AttentionInterface.register(NAME, attention_by_path)
