"""GraphTarget: on a GPU, steps of fixed shape are captured once and replayed (`fixed_step.py`).

Attention reads a row's keys in order of absolute position, through a table of its path. Linear layers and norms treat
every row alike (`modules.py`). So a row's logits depend, bit for bit, on its own tokens alone: a text does not depend
on what was drafted, or on what else ran with it, in bfloat16 either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slipstream.compiled import compiled
from slipstream.kernels.draw import drawable, needs_history, noise_keys
from slipstream.sampling import Sampler
from slipstream.targets.base import Scores, Slot, Want
from slipstream.targets.cache import KeyValuePool
from slipstream.targets.captured import fixed_step as steps
from slipstream.targets.captured.fixed_step import BEST, DRAWN, DRAWN_WITH_HISTORY, FixedStep, Inputs
from slipstream.targets.captured.layers import fusable_layers, in_place
from slipstream.targets.captured.modules import StandIns
from slipstream.targets.captured.recording import preparing
from slipstream.targets.trees import TreeTarget, is_quantised
from slipstream.tree import TokenTree
from slipstream.turns import Turns

log = logging.getLogger("slipstream")

ROWS = (1, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
READING = (32, 128)  # rows of the steps that read prompts: few, since each is captured
ORDINARY = 25e-3  # seconds that an ordinary forward takes to launch, whatever it reads, as measured on an H200
ONE, EACH = 1e-3, 0.4e-12  # and those of a step that reads prompts: for itself, and for each byte of weights
# Every growth captures anew, and capacity that isn't used costs nothing but memory: as much at first as would leave
# most of the device's to others if so many sequences ran.
FIRST_CAPACITY = 1024  # at least
FIRST_SHARE, SEQUENCES = 0.25, 64


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest size that n fits in; beyond them, a multiple of the largest."""
    for size in sizes:
        if n <= size:
            return size
    return -(-n // sizes[-1]) * sizes[-1]


@dataclass
class Told:
    """What of a sequence's text the device knows, for its penalties."""

    slot: Slot
    sampler: Sampler
    emitted: int = 0  # tokens of the output


class GraphTarget(TreeTarget):
    """A TreeTarget whose steps are replayed."""

    widths = ROWS
    ahead = True

    def __init__(self, *given: Any, compile: str = "", **options: Any) -> None:
        """compile: a backend of torch.compile for the decoder layers; empty: none."""
        super().__init__(*given, **options)
        self.compile = compile
        self.heads = int(self._config.num_attention_heads)
        self.exact = self.exact or by_row(self.model)
        self.exact_together = self.exact
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        # Tokens of a prompt that are read by steps. It decides bits, so nothing is timed here.
        self.replayed = ROWS[-1] * max(1, round(ORDINARY / (ONE + EACH * weights)))
        self._stand_ins = StandIns(self.model)
        with self._stand_ins.in_place():
            self._fused = fusable_layers(self.model)
        self.memory: Any = None  # what all graphs take theirs from
        self._steps: dict[tuple[Any, ...], FixedStep] = {}
        self._drawn: tuple[int, int] = (0, 0)  # rows and capacity of the pool that the steps were made for
        self._histories: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._told: dict[int, Told] = {}  # by row of the pool
        self._alike: dict[tuple[int, int], bool] = {}  # by batch and rows
        self._sample: torch.Tensor | None = None  # logits that every shape of step should give its sample text
        self._spare = self.open()  # where the padding of a batch writes
        self.pool.reserve(len(self._slots), min(self._first_capacity(), self.context))

    @property
    def turns(self) -> Turns:
        """One for all of them: capturing, and which step is under way, concern the whole process."""
        return Turns.of(GraphTarget)

    @property
    def pool(self) -> KeyValuePool:
        return self._pool

    def _first_capacity(self) -> int:
        if self.device.type != "cuda":
            return FIRST_CAPACITY
        memory = torch.cuda.get_device_properties(self.device).total_memory
        fits = int(FIRST_SHARE * memory) // (SEQUENCES * self.pool.per_token)
        return max(FIRST_CAPACITY, 1 << fits.bit_length() - 1)

    @contextmanager
    def fixed(self, step: FixedStep) -> Iterator[None]:
        """For one forward: attention by path, and layers that treat every row alike."""
        kept, steps.under_way = self._config._attn_implementation_internal, step
        self._config._attn_implementation_internal = steps.NAME
        try:
            with self._stand_ins.in_place(), in_place(self._fused):
                yield
        finally:
            self._config._attn_implementation_internal, steps.under_way = kept, None

    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        """Short prompts, and the ends of long ones, in replayed steps too: an ordinary forward launches kernel after
        kernel, which takes a small model many times as long."""
        if any(s is not None and needs_history(s.sampling) for s in want.samplers):
            want = replace(want, samplers=())  # penalties of an output that has not begun: the sampler's own business
        bulk = -(-max(0, len(tokens) - self.replayed) // self.chunk) * self.chunk
        yield from super().prefill(slot, tokens[:bulk], want)
        for start in range(bulk, len(tokens), ROWS[-1]):
            part = tokens[start : start + ROWS[-1]]
            step = self._replay([slot], [TokenTree.chain(part[0], part[1:])], bucket(len(part), READING), want)
            self.commit(slot, range(len(part)))
            last = slice(len(part) - 1, len(part))
            # Copies: another sequence's prompt may be read before this one's states are looked at.
            hidden = {layer: h[: len(part)].clone() for layer, h in step.hidden[0].items()}
            scores = Scores(step.by_sequence[0][last], hidden, step.host.positions[0, last].copy())
            if self._followed(want.samplers, 1):
                scores.take(step.tokens[0, last], step.values[0, last])
            yield scores

    @torch.inference_mode()
    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        if known:
            return super().score(slots, trees, want, known)
        step = self._replay(slots, trees, self._rows(slots, trees, want), want)
        chosen, tokens, values = self._followed(want.samplers, len(slots)), step.tokens, step.values
        found = []
        for i in range(len(trees)):
            scores = Scores(step.by_sequence[i], step.hidden[i], step.host.positions[i].copy())
            scores.replayed = True
            if chosen:
                scores.take(tokens[i], values[i])
            found.append(scores)
        return found

    @torch.inference_mode()
    def _replay(self, slots: Sequence[Slot], trees: Sequence[TokenTree], rows: int, want: Want) -> FixedStep:
        """One step for all of them, done."""
        self.pool.reserve(len(self._slots), max(slot.length for slot in slots) + rows)
        samplers = self._followed(want.samplers, len(slots))
        step = self.step(bucket(len(slots), BATCHES), rows, want.layers, choice(samplers))
        for slot, tree in zip(slots, trees, strict=True):
            slot.tree = tree
        self._fill(step.host, slots, trees)
        self._tell(step, slots, trees, samplers)
        step(want.during if samplers else None)  # whoever decides on the host knows what follows only then
        return step

    def _followed(self, samplers: Sequence[Sampler | None], count: int) -> Sequence[Sampler | None]:
        """The samplers by whose rules a step chooses; nobody's, if one of them can't be followed."""
        able = len(samplers) == count and all(s is not None and drawable(s.sampling) for s in samplers)
        return samplers if able else ()

    def _rows(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want) -> int:
        """How many rows to compute. Fewer than wanted only where that changes no bit."""
        least, wanted = bucket(max(len(tree) for tree in trees), ROWS), bucket(want.rows, ROWS)
        batch = bucket(len(slots), BATCHES)
        if least < wanted and not all(self.alike(batch, rows, want.layers) for rows in (least, wanted)):
            least = wanted
        if batch > 1 and self.exact_together and not self.alike(batch, least, want.layers):
            self.exact_together = False
        return least

    def alike(self, batch: int, rows: int, layers: tuple[int, ...] = ()) -> bool:
        """Whether steps of this shape give a text the bits that other shapes give it. Tried once per shape, on a
        sample text; the first shape sets the example. layers: whose states are wanted, so that the step which is tried
        is one that will be used."""
        if (batch, rows) not in self._alike:
            with preparing:
                self._alike[batch, rows] = self._try(batch, rows, layers)
        return self._alike[batch, rows]

    def _try(self, batch: int, rows: int, layers: tuple[int, ...]) -> bool:
        slot, tree = self.open(), TokenTree.chain(1, [2, 3, 4][: rows - 1])
        for _ in self.prefill(slot, [1 + 389 * i % (self.vocabulary - 1) for i in range(40)], Want()):
            pass
        self.pool.reserve(len(self._slots), slot.length + rows)
        step = self.step(batch, rows, layers, BEST)
        self._fill(step.host, [slot], [tree])
        step()
        self.close(slot)
        found = step.logits[0, : len(tree)].clone()
        if self._sample is not None and len(self._sample) >= len(found):
            return torch.equal(self._sample[: len(found)], found)
        same = self._sample is None or torch.equal(self._sample, found[: len(self._sample)])
        self._sample = found if same else self._sample
        return same

    def step(self, batch: int, rows: int, layers: tuple[int, ...], chosen: str) -> FixedStep:
        if self._drawn != (self.pool.rows, self.pool.capacity):  # the cache has moved
            self._steps.clear()
            self._told.clear()
            self._histories = None
            # The graphs are gone, and with the last of them their memory.
            self.memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
            self._drawn = (self.pool.rows, self.pool.capacity)
            self._stand_ins.reach(self.pool.capacity, torch.empty(0, dtype=self.dtype, device=self.device))
        key = (batch, rows, layers, chosen)
        if key not in self._steps:
            self._steps[key] = FixedStep(self, *key)
        return self._steps[key]

    def histories(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For every row of the pool, over the vocabulary: whether the prompt has a token, how often the output has
        it, its bias. Made when first somebody needs them."""
        if self._histories is None:
            shape = (self.pool.rows, self.vocabulary)
            kinds = (torch.uint8, torch.int32, torch.float32)
            one, other, third = (torch.zeros(shape, dtype=kind, device=self.device) for kind in kinds)
            self._histories = one, other, third
        return self._histories

    def _tell(
        self,
        step: FixedStep,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        samplers: Sequence[Sampler | None],
    ) -> None:
        """How each sequence draws, its noise, and what is new in its text."""
        if step.choice == BEST:
            return
        host = step.host
        for i, (slot, tree, sampler) in enumerate(zip(slots, trees, samplers, strict=True)):
            assert sampler is not None, "a step that draws has all samplers"
            host.draws.put(i, sampler.sampling)
            positions = slot.length + tree.depths + 1  # of the tokens after the nodes
            host.draws.keys[i, : len(tree)] = noise_keys(sampler.seed, sampler.sample_index, positions)
            if step.history is None:
                continue
            told = self._told.get(slot.row)
            if told is None or told.slot is not slot or told.sampler is not sampler:
                step.history.begin(slot.row, sampler.prompt, sampler.sampling.logit_bias)
                told = self._told[slot.row] = Told(slot, sampler)
            new = sampler.output[told.emitted : -1]  # the last is the root, which the step reads itself
            told.emitted += len(new)
            late = new[: -host.reach] if len(new) > host.reach else []
            if late:
                row = torch.full((len(late),), slot.row, device=self.device)
                ids = torch.tensor(late, device=self.device)
                step.history.emitted.index_put_((row, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
            host.emitted[i, : len(new) - len(late)] = new[len(late) :]

    def blank(self, host: Inputs) -> None:
        """Padding alone: it reads nothing, and writes into the spare row."""
        for i in range(len(host.ids)):
            self._put(host, i, NO_NODES, NO_NODES, NO_NODES, 0, self._spare.row, NO_NODES)

    def _fill(self, host: Inputs, slots: Sequence[Slot], trees: Sequence[TokenTree]) -> None:
        for i, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
            if slot.pending is not None and len(slot.pending) > host.reach:
                self._settle(slot)
            moved = NO_NODES if slot.pending is None else np.array(slot.pending, np.int32)
            self._put(host, i, tree.tokens, tree.parents, tree.depths, slot.length, slot.row, moved)
            slot.pending = None
        for i in range(len(slots), len(host.ids)):
            self._put(host, i, NO_NODES, NO_NODES, NO_NODES, 0, self._spare.row, NO_NODES)

    def _put(self, host: Inputs, i: int, *of_one: Any) -> None:
        h = host
        tables = (h.ids, h.positions, h.depths, h.columns, h.paths, h.lengths, h.rows, h.moves, h.sources, h.places)
        _put(i, *tables, h.emitted, *of_one)


def by_row(model: Any) -> bool:
    """Whether a row's result depends on that row alone, given a fixed number of rows. Experts take rows in groups."""
    config = model.config.get_text_config()
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return not experts and not is_quantised(model)


def choice(samplers: Sequence[Sampler | None]) -> str:
    """How a step must choose for these sequences; none: nobody will look at what it chose."""
    asked = [s.sampling for s in samplers if s is not None]
    if all(s.plain for s in asked):
        return BEST
    return DRAWN_WITH_HISTORY if any(map(needs_history, asked)) else DRAWN


NO_NODES = np.empty(0, np.int32)


# fmt: off
@compiled
def _put(  # type: ignore[no-untyped-def]
    i, ids, positions, depths, columns, paths, lengths, rows, moves, sources, places, emitted,  # tables to fill in
    tokens, parents, node_depths, length, row, moved,  # one sequence
):
    # fmt: on
    """Sequence i of a step: its tree after `length` committed tokens, the rest padding; `moved` is the path of the
    tree before, whose keys stand in a row from here on."""
    lengths[i], rows[i] = length, row
    for j in range(ids.shape[1]):
        columns[i, j] = length + j
        if j >= len(tokens):
            ids[i, j], positions[i, j], depths[i, j] = 0, length, -1
            continue
        depth = node_depths[j]
        ids[i, j], positions[i, j], depths[i, j] = tokens[j], length + depth, depth
        for k in range(depth):
            paths[i, j, k] = paths[i, parents[j], k]
        paths[i, j, depth] = length + j
    start = length - len(moved)
    moves[i] = len(moved)
    for j in range(len(moved)):
        sources[i, j], places[i, j] = start + moved[j], start + j
    emitted[i, :] = -1
