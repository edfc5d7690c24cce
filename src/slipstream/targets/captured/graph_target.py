"""GraphTarget: on a GPU, steps of fixed shape are captured once as CUDA graphs and replayed (`fixed_step.py`).

Attention reads a row's keys in order of absolute position, through a table of the row's path. Linear layers and norms
compute every row in the same way (`modules.py`). So a row's logits depend, bit for bit, on its own tokens alone. A text
then does not depend on drafts or on other sequences in its batch, not even in bfloat16.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from slipstream.errors import ModelError
from slipstream.kernels.draw import noise_keys
from slipstream.kernels.sizes import PAGE, TILE, WIDE
from slipstream.sampling import BEST, DRAWN, DRAWN_WITH_HISTORY, WAYS, Sampler
from slipstream.stopwatch import preparing
from slipstream.targets.base import Part, Scores, Slot, Target, Want
from slipstream.targets.cache import LayerShape
from slipstream.targets.captured import fixed_step as steps
from slipstream.targets.captured.arena import MEMORY, Added, Arena
from slipstream.targets.captured.chain import FixedChain
from slipstream.targets.captured.fixed_step import FixedStep
from slipstream.targets.captured.function import Captured
from slipstream.targets.captured.inputs import DEEPEST, Shape, fill, growing_chains
from slipstream.targets.captured.layers import fusable_layers, in_place
from slipstream.targets.captured.modules import StandIns
from slipstream.targets.trees import context_length, input_device, is_exact, is_quantised, unwrapped
from slipstream.targets.watching import Watched
from slipstream.tree import TokenTree
from slipstream.turns import Turns

log = logging.getLogger("slipstream")

# Sizes that steps are padded to. Few, since each combination is captured by itself.
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)  # rows of steps
LONE = ROWS[:6]  # rows of steps of one sequence
READING = (32, 128, 512, 2048)  # rows of steps that read prompts
SEQUENCES = (1, 64, 512)  # sequences that a step has room for
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sequences that heads draft for together
HISTORIES = (4, 16, 64, 320, 1024)  # sequences that the tables for penalties have room for; 320: 64 and 256 kept
TILES = tuple(8 << n for n in range(10))  # tiles of attention, in steps of several long texts
DEPTHS = (32, DEEPEST)  # nodes of the longest path, in steps that read prompts or where it exceeds the step's rows
SAMPLE = 1, (2, 3, 4)  # root and chain after the sample text by which steps of different widths are compared
LONG = 32 * PAGE  # tokens of a text from which on reading its keys takes long
DIVISIBLE = 1 << 24  # rows × positions of a step of long texts, at most: dividing it among programs takes memory
BEYOND = 512  # positions after a full context, for a step's padding and drafts


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that n fits in; beyond the largest, a multiple of it."""
    for size in sizes:
        if n <= size:
            return size
    return -(-n // sizes[-1]) * sizes[-1]


def are_long(slots: Sequence[Slot]) -> bool:
    """Whether several sequences have long texts. Attention divides its work by the number of tiles that a step may
    have: with one for each row, a batch that verifies drafts of long texts would keep a quarter of the GPU busy."""
    return len(slots) > 1 and max([slot.length for slot in slots]) >= LONG


@dataclass
class HistoryState:
    """How much of a sequence's output the device's tables for penalties contain."""

    slot: Slot
    sampler: Sampler
    emitted: int = 0  # tokens of the output that were sent


class GraphTarget(Target):
    """A target whose steps are replayed."""

    widths = LONE
    flat = paged = ahead = mixes = True
    block = PAGE

    def __init__(
        self,
        model: Any,
        shapes: Sequence[LayerShape],
        vocabulary: int,
        chunk: int = READING[-1],
        *,
        compile: str = "",
        memory: float = MEMORY,
    ) -> None:
        """chunk: tokens that one forward reads at most. compile: a backend of torch.compile for the decoder layers, or
        empty for none. memory: the share of the device's free memory that the cache may take."""
        self.model, self.vocabulary, self.chunk, self.compile = model, vocabulary, chunk, compile
        self.context = context_length(model.config)
        self.device, self.dtype = input_device(model), model.dtype
        self._config = model.config.get_text_config()
        self.exact = self.exact_together = is_exact(model) or by_row(model)
        self._heads, self._shapes = int(self._config.num_attention_heads), tuple(dict.fromkeys(shapes))
        # Before the arena: weights that are moved would lie in the rests of its memory, which then can't be given back.
        self._stand_ins = StandIns(model)
        self.arena = Arena(shapes, self.context + BEYOND, memory, self._scratch_bytes())
        self.groups = tuple(dict.fromkeys(self._heads // shape.heads for shape in self._shapes))
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters
        self._limit_context()
        with self._stand_ins.in_place():
            self._fused = fusable_layers(model)
        self._stand_ins.reach(self.arena.longest, torch.empty(0, dtype=self.dtype, device=self.device))
        self._steps: dict[tuple[Any, ...], FixedStep] = {}
        self._functions: dict[Callable[..., Any], Captured] = {}
        self._chains: dict[tuple[Any, ...], FixedChain | None] = {}
        self._scratch: Any = None
        self._forget_captures()
        self._histories: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._history_states: dict[int, HistoryState] = {}  # by row of the arena's table
        self._may_be_wide = same_bits_in_wide_tiles(self.device, self.dtype)
        self._alike: dict[tuple[int, bool], bool] = {}  # see `alike`: by number of rows, and whether they read text
        self._sample: torch.Tensor | None = None  # the logits that steps of every width should give the sample text

    @property
    def turns(self) -> Turns:
        """One lock for all GraphTargets: capturing, and the variable `under_way`, concern the whole process."""
        return Turns.of(GraphTarget)

    @contextmanager
    def fixed(self, step: FixedStep) -> Iterator[None]:
        """For one forward: attention by path, and layers that compute every row in the same way."""
        kept, steps.under_way = self._config._attn_implementation_internal, step
        self._config._attn_implementation_internal = steps.NAME
        try:
            with self._stand_ins.in_place(), in_place(self._fused):
                yield
        finally:
            self._config._attn_implementation_internal, steps.under_way = kept, None

    # ---- slots

    def open(self) -> Slot:
        return self.arena.open()

    def close(self, slot: Slot) -> None:
        self.arena.close(slot)

    @property
    def filled(self) -> float:
        return 1 - self.arena.free / (self.arena.pages - 1)

    def add_layers(self, shapes: Sequence[LayerShape], spare: int) -> list[Added]:
        """Keep keys of a head in the pages of its texts: see `Arena.add`. If the arena moves, steps are captured
        again."""
        added = self.arena.add(shapes, spare, self._forget_captures)
        self._limit_context()
        return added

    def _limit_context(self) -> None:
        """Where memory limits a text, a step's padding and drafts need room behind it too."""
        longest = self.arena.longest
        self.context = min(self.context, longest - min(BEYOND, longest // 2))

    def _forget_captures(self) -> None:
        """Drop all captures. Their memory pool ends with the last of them."""
        self._steps.clear()
        self._functions.clear()
        self._chains.clear()
        # Shared by captures.
        self.memory: Any = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def release(self) -> None:
        self._forget_captures()
        self._history_states.clear()
        self._histories = self._scratch = self._sample = self.memory = None
        self._stand_ins.release()
        self.arena.release()

    def fork(self, slot: Slot) -> Slot:
        self._move_pending(slot)
        twin = self.open()
        twin.tokens = list(slot.tokens)
        self.arena.share(slot, twin)
        return twin

    def truncate(self, slot: Slot, length: int) -> None:
        self._move_pending(slot)
        del slot.tokens[length:]
        slot.tree = None
        self.arena.shorten(slot, length)

    def select(self, slot: Slot, blocks: Sequence[int]) -> Part:
        """The slot's own pages, not copied. Layers with a window count places in the selection, not in the text."""
        self._move_pending(slot)
        return self.arena.select(slot, blocks)

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        slot.accept(path)

    def _move_pending(self, slot: Slot) -> None:
        if slot.pending == list(range(len(slot.pending or ()))):
            slot.pending = None  # the accepted nodes are the first ones: their keys are in place already
        if slot.pending is not None:
            count, start = len(slot.pending), slot.length - len(slot.pending)
            columns = self.arena.columns(slot, start, max(slot.pending) + 1)
            self.arena.move(columns[slot.pending], columns[:count])
            slot.pending = None

    # ---- forwards

    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        for start in range(0, len(tokens), self.chunk):
            yield from self.read([slot], [tokens[start : start + self.chunk]], want)

    def read(self, slots: Sequence[Slot], pieces: Sequence[Sequence[int]], want: Want) -> list[Scores]:
        """By steps whose rows are text, not nodes."""
        if way_of(want.samplers) == DRAWN_WITH_HISTORY:
            want = want._replace(samplers=())  # the host chooses the first token: it has no output to penalise yet
        return self.score_and_read([], [], slots, pieces, want)[1]

    @torch.inference_mode()
    def score_and_read(
        self,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        readers: Sequence[Slot],
        pieces: Sequence[Sequence[int]],
        want: Want,
    ) -> tuple[list[Scores], list[Scores]]:
        rows = bucket(sum(map(len, trees)) + sum(map(len, pieces)), READING)
        if trees and self.exact_together and not self.alike(rows, want.layers, text=True):
            self.exact_together = False
        chains = [TokenTree.chain(piece[0], piece[1:]) for piece in pieces]
        every, known = [*slots, *readers], [0] * (len(slots) + len(readers))
        step, chosen = self._replay(every, [*trees, *chains], rows, want, known, len(pieces))
        # Copies: drafts that read a step's own tensors are captured for each such step.
        sizes, scored = [len(tree) for tree in trees], list[Scores]()
        nodes = sum(sizes)
        if trees:
            hidden = {layer: h[:nodes].clone() for layer, h in step.hidden.items()}
            scored = self._scored(step, sizes, known[: len(trees)], chosen, hidden)
        return scored, self._read(step, readers, pieces, nodes, chosen)

    def _read(
        self, step: FixedStep, slots: Sequence[Slot], pieces: Sequence[Sequence[int]], begin: int, chosen: bool
    ) -> list[Scores]:
        """The scores after each piece. begin: the first piece's row, which equals the number of nodes before it."""
        found, first = [], begin
        for i, (slot, piece) in enumerate(zip(slots, pieces, strict=True)):
            slot.tokens.extend(piece)
            slot.tree = None
            stop = begin + len(piece)
            end = first + i if step.shape.ends < step.shape.rows else stop - 1
            # Copies: another prompt may be read before these states are used.
            hidden = {layer: h[begin:stop].clone() for layer, h in step.hidden.items()}
            scores = Scores(step.logits[end : end + 1], hidden, np.array([slot.length - 1]))
            if chosen:
                scores.take(step.tokens[end : end + 1].tolist(), step.values[end : end + 1].tolist())
            found.append(scores)
            begin = stop
        return found

    @torch.inference_mode()
    def _watched(self, slot: Slot, tokens: Sequence[int]) -> torch.Tensor | None:
        """By a step that is not captured, since it is rare."""
        shape = self._shape(1, bucket(len(tokens), READING), 1, ends=1)
        step = FixedStep(self, shape, (), BEST, captured=False)
        self.arena.reach(slot, slot.length + len(tokens))
        tree = TokenTree.chain(tokens[0], tokens[1:])
        fill(step.host, self.arena.table, self.groups, [slot], [tree], [0], texts=1)
        self.arena.upload_table()
        step.watched = seen = Watched(1, slot.length + len(tokens))
        step()
        return seen.weights[0]

    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        return self.extend(slots, trees, [known] * len(slots), want)

    @torch.inference_mode()
    def extend(
        self, slots: Sequence[Slot], trees: Sequence[TokenTree], known: Sequence[int], want: Want
    ) -> list[Scores]:
        if any([slot.position + tree.depth >= self.context for slot, tree in zip(slots, trees, strict=True)]):
            raise ModelError(f"a draft reaches past the model's {self.context} positions: the engine must cut it")
        sizes = [len(tree) - before for tree, before in zip(trees, known, strict=True)]
        step, chosen = self._replay(slots, trees, self._rows(sizes, want), want, known)
        found = self._scored(step, sizes, known, chosen, step.hidden)
        for scores in found:
            scores.replayed, scores.captured = True, self.captured
        return found

    @torch.inference_mode()
    def draft_chains(
        self, slots: Sequence[Slot], chains: Sequence[Sequence[int]], depth: int, vocabulary: int
    ) -> list[list[tuple[int, float]]] | None:
        sizes = [len(chain) for chain in chains]
        if any(slot.position + size - 1 + depth > self.context for slot, size in zip(slots, sizes, strict=True)):
            return None
        # At least ROWS[1] rows, which take no longer than one: then nearly all drafts have the same shape.
        rows = bucket(max(ROWS[1], sum(sizes)), ROWS)
        long = are_long(slots)
        first = self._shape(len(slots), rows, max(sizes), each=sizes if long else None)
        one = [1] * len(slots) if long else None
        later = self._shape(len(slots), bucket(len(slots), ROWS), max(sizes) + depth - 1, each=one)
        made = self._chain(first, later, depth, vocabulary)
        if made is None:
            return None
        for slot, size in zip(slots, sizes, strict=True):
            self.arena.reach(slot, slot.length + size + depth)
            if slot.pending is not None and len(slot.pending) > first.reach:
                self._move_pending(slot)
        for i, (step, grown) in enumerate(zip(made.steps, growing_chains(chains, depth - 1), strict=True)):
            known = [size + i - 1 if i else 0 for size in sizes]
            fill(step.host, self.arena.table, self.groups, slots, grown, known, 0, step.shape.tile)
        self.arena.upload_table()
        found = made((np.cumsum(sizes) - 1).tolist())  # (depth, 2, sequences)
        drafts = [[(int(token), float(logp)) for token, logp in found[:, :, i]] for i in range(len(slots))]
        for slot, chain, draft in zip(slots, chains, drafts, strict=True):
            if not isinstance(slot, Part):  # nothing is committed to a part
                slot.tree = TokenTree.chain(chain[0], [*chain[1:], *(token for token, _ in draft[:-1])])
        return drafts

    def _chain(self, *key: Any) -> FixedChain | None:
        if key not in self._chains:
            try:
                self._chains[key] = FixedChain(self, *key)
            except RuntimeError as error:
                log.warning("drafts can't be captured whole and go level by level: %s", str(error).splitlines()[0])
                self._chains[key] = None
        return self._chains[key]

    def captured(self, function: Callable[..., Any]) -> Captured:
        """A function of a step's logits, captured."""
        if function not in self._functions:
            self._functions[function] = Captured(function, self.device)
        return self._functions[function]

    def _scored(
        self,
        step: FixedStep,
        sizes: Sequence[int],
        known: Sequence[int],
        chosen: bool,
        hidden: dict[int, torch.Tensor],
    ) -> list[Scores]:
        """The scores of trees. sizes: how many rows each has, which are the step's first."""
        tokens, values, positions = step.tokens.tolist(), step.values.copy(), step.host.positions[0].copy()
        finite = bool(np.isfinite(values[: sum(sizes)]).all())
        found, begin = [], 0
        for size, before in zip(sizes, known, strict=True):
            end = begin + size
            scores = Scores(step.logits, hidden, positions[begin:end], before, begin)
            if chosen:
                scores.take(tokens[begin:end], None if finite else values[begin:end].tolist())
            found.append(scores)
            begin = end
        return found

    def _replay(
        self,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        rows: int,
        want: Want,
        known: Sequence[int],
        texts: int = 0,
    ) -> tuple[FixedStep, bool]:
        """Run one step for all trees. Returns it, and whether it chose tokens by the rules of all samplers. known:
        nodes of each tree that were computed before. texts: how many of the last trees are chains that are read as
        text."""
        way = way_of(want.samplers)
        drafts = trees[: len(trees) - texts]
        depth = max([tree.depth for tree in drafts], default=0) + 1
        ends = sum(map(len, drafts)) + texts if texts else None
        reports_attention = not texts and any([slot.wants_attention for slot in slots])
        each = None
        if not texts and are_long(slots):
            each = [len(tree) - before for tree, before in zip(trees, known, strict=True)]
        shape = self._shape(len(slots), rows, depth, ends, each)
        step = self.step(shape, want.layers, way or BEST, reports_attention)
        movable = step.shape.reach
        for slot, tree in zip(slots, trees, strict=True):
            self.arena.reach(slot, slot.length + len(tree))
            slot.tree = tree
            if slot.pending is not None and len(slot.pending) > movable:
                self._move_pending(slot)
        fill(step.host, self.arena.table, self.groups, slots, trees, known, texts, step.shape.tile)
        self._fill_draws(step, slots, trees, want.samplers, known, texts)
        self.arena.upload_table()
        step(want.during if way else None)  # tokens chosen on the host are not known while the step runs
        if reports_attention:
            self._report_attention(step, slots, trees, known)
        return step, way is not None

    def _report_attention(
        self, step: FixedStep, slots: Sequence[Slot], trees: Sequence[TokenTree], known: Sequence[int]
    ) -> None:
        """Report attention weights to the slots that asked. A sequence's first row is its root."""
        row = 0
        for slot, tree, before in zip(slots, trees, known, strict=True):
            if slot.wants_attention and not before:
                slot.set_attended(step.attended[row, : slot.length // PAGE + 1].clone())
            row += len(tree) - before

    def _shape(
        self, sequences: int, rows: int, depth: int, ends: int | None = None, each: Sequence[int] | None = None
    ) -> Shape:
        """The shape of a step with enough room. ends: for a step that reads text, the number of rows after which a
        token is wanted; None for a step of trees, where that is every row. each: the rows of each sequence, if the step
        should be captured for about as many tiles as they need, see `are_long`."""
        text = ends is not None
        sequences = bucket(sequences, SEQUENCES)
        products = rows * min(self.groups)
        many = products >= 2 * WIDE if text else sequences == 1 and products >= WIDE
        tile = WIDE if many and self._may_be_wide else TILE
        tiles: tuple[int, ...] = ()
        if sequences > 1:  # at most: each sequence has at most one tile that is not full, and no tile is empty
            tiles = tuple(min(rows * -(-g // tile), -(-rows * g // tile) + sequences) for g in self.groups)
            if each is not None and rows * self.arena.longest <= DIVISIBLE:
                needed = [bucket(sum(-(-n * g // tile) for n in each), TILES) for g in self.groups]
                tiles = tuple(map(min, tiles, needed))
        ends = min(rows, bucket(ends, SEQUENCES)) if ends is not None and self._takes_logits_to_keep else rows
        most = min(rows, DEEPEST)
        if text:  # coarser sizes, for few shapes: rows are many, and paths of drafts among them short
            depth = bucket(depth, (1, *DEPTHS))
        else:
            depth = most if depth <= most else bucket(depth, DEPTHS)
        return Shape(sequences, rows, depth, ends, tiles, tile)

    def chooses(self, sampler: Sampler | None) -> bool:
        return way_of([sampler]) in (BEST, DRAWN)

    def _rows(self, sizes: Sequence[int], want: Want) -> int:
        """How many rows to compute for trees of so many. For one sequence fewer than `want.rows` only if that changes
        no bit."""
        least, wanted = bucket(sum(sizes), ROWS), bucket(want.rows, ROWS)
        if len(sizes) == 1 and least < wanted and not all(self.alike(n, want.layers) for n in (least, wanted)):
            least = wanted
        if len(sizes) > 1 and self.exact_together and not self.alike(least, want.layers):
            self.exact_together = False
        return least

    def alike(self, rows: int, layers: tuple[int, ...] = (), *, text: bool = False) -> bool:
        """Whether steps of so many rows give the same bits as steps of other widths. Tried once for each width, on a
        sample text; the first width tried is the reference. layers: the wanted states, so that the step which is
        captured for the trial will be used later. text: whether it is a step that reads text."""
        if (rows, text) not in self._alike:
            with preparing:
                self._alike[rows, text] = self._text_alike(rows, layers) if text else self._tree_alike(rows, layers)
        return self._alike[rows, text]

    @torch.inference_mode()
    def _text_alike(self, rows: int, layers: tuple[int, ...]) -> bool:
        """Try a width of steps that read text."""
        self.alike(ROWS[1], layers)  # makes the reference
        assert self._sample is not None
        slot, tree = self._sample_text(), TokenTree.chain(SAMPLE[0], SAMPLE[1][: len(self._sample) - 1])
        try:
            step, _ = self._replay([slot], [tree], rows, Want(layers), [0], texts=1)
        finally:
            self.close(slot)
        end = 0 if step.shape.ends < step.shape.rows else len(tree) - 1
        return torch.equal(self._sample[-1], step.logits[end])

    def _sample_text(self) -> Slot:
        slot = self.open()
        try:
            for _ in self.prefill(slot, [1 + 389 * i % (self.vocabulary - 1) for i in range(40)], Want()):
                pass
        except BaseException:
            self.close(slot)
            raise
        return slot

    @torch.inference_mode()
    def _tree_alike(self, rows: int, layers: tuple[int, ...]) -> bool:
        """Try a width of steps that score trees."""
        slot, tree = self._sample_text(), TokenTree.chain(SAMPLE[0], SAMPLE[1][: rows - 1])
        try:
            step, _ = self._replay([slot], [tree], rows, Want(layers), [0])
        finally:
            self.close(slot)
        found = step.logits[: len(tree)].clone()
        if self._sample is not None and len(self._sample) >= len(found):
            return torch.equal(self._sample[: len(found)], found)
        same = self._sample is None or torch.equal(self._sample, found[: len(self._sample)])
        self._sample = found if same else self._sample
        return same

    def step(self, shape: Shape, layers: tuple[int, ...], way: str, reports_attention: bool = False) -> FixedStep:
        if way == DRAWN_WITH_HISTORY and self._histories is not None and self.arena.rows > len(self._histories[0]):
            self._steps = {key: step for key, step in self._steps.items() if key[2] != DRAWN_WITH_HISTORY}
            self._history_states.clear()
            self._histories = None
        key = (shape, layers, way, reports_attention)
        if key not in self._steps:
            self._steps[key] = FixedStep(self, *key)
        return self._steps[key]

    def _scratch_bytes(self) -> int:
        """What attention needs beside the arena at most, about: where it reads a prompt."""
        if self.device.type != "cuda":
            return 0
        from slipstream.kernels.exact_attention import partials

        longest, widest = self.context + BEYOND, max(s.value_dim for s in self._shapes)
        sizes = [(rows, self._heads, s.heads, longest, 0) for s in self._shapes for rows in READING]
        return 4 * (2 + widest) * max(partials(1, *size, tile=WIDE) for size in sizes)

    def scratch(self, shape: Shape) -> Any:
        """Working memory for the attention of such a step, shared by all steps."""
        if self.device.type != "cuda":
            nothing = torch.empty(0, device=self.device)
            return SimpleNamespace(stats=nothing, sums=nothing)
        from slipstream.kernels.exact_attention import Scratch, partials

        needed, widest = 0, max(s.value_dim for s in self._shapes)
        for layer in self._shapes:
            tiles = shape.tiles[self.groups.index(self._heads // layer.heads)] if shape.tiles else 0
            size = self._heads, layer.heads, self.arena.longest, shape.depth, tiles, shape.tile
            needed = max(needed, partials(1, shape.rows, *size))
        if self._scratch is None or self._scratch.stats.numel() < 2 * needed:
            self._scratch = Scratch.of(needed, widest, self.device)
        return self._scratch

    def histories(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tables for penalties, for every sequence and token: whether the prompt has it, how often the output has it,
        its bias. Made on first use."""
        if self._histories is None:
            shape = (bucket(self.arena.rows, HISTORIES), self.vocabulary)
            kinds = (torch.uint8, torch.int32, torch.float32)
            one, other, third = (torch.zeros(shape, dtype=kind, device=self.device) for kind in kinds)
            self._histories = one, other, third
        return self._histories

    def _fill_draws(
        self,
        step: FixedStep,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        samplers: Sequence[Sampler | None],
        known: Sequence[int],
        texts: int,
    ) -> None:
        """Fill in how each sequence draws its tokens, its noise, and its new tokens for the tables for penalties."""
        if step.way == BEST and not texts:
            return
        host, drafts = step.host, len(trees) - texts
        sizes = np.array([len(tree) - before for tree, before in zip(trees, known, strict=True)])  # rows of each
        if texts:
            nodes = sizes[:drafts].sum()
            host.ends[:] = 0
            host.ends[:nodes] = np.arange(nodes)
            host.ends[nodes : nodes + texts] = sizes.cumsum()[drafts:] - 1
        if step.way == BEST:
            return
        every = [sampler for sampler in samplers if sampler is not None]  # a step that draws has all samplers
        positions = host.positions[0]
        if step.shape.ends < step.shape.rows:
            positions, sizes[drafts:] = positions[host.ends], 1
        host.draws.put([sampler.sampling for sampler in every], sizes)
        keys = noise_keys([(sampler.seed, sampler.sample_index) for sampler in every], sizes, positions + 1)
        host.draws.keys[: len(keys), 0] = keys
        if step.history is None:
            return
        for i, (slot, sampler) in enumerate(zip(slots, every, strict=True)):
            state = self._history_states.get(slot.row)
            if state is None or state.slot is not slot or state.sampler is not sampler:
                step.history.begin(slot.row, sampler.prompt, sampler.sampling.logit_bias)
                state = self._history_states[slot.row] = HistoryState(slot, sampler)
            new = sampler.output[state.emitted : -1]  # the last token is the root, which is a row of the step
            state.emitted += len(new)
            reach = step.shape.reach
            overflow = new[:-reach] if len(new) > reach else []
            if overflow:
                row = torch.full((len(overflow),), slot.row, device=self.device)
                ids = torch.tensor(overflow, device=self.device)
                step.history.emitted.index_put_((row, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
            host.emitted[i, : len(new) - len(overflow)] = new[len(overflow) :]


def by_row(model: Any) -> bool:
    """Whether a row's result depends on that row alone, for a fixed number of rows. Not so with experts, which compute
    rows in groups."""
    config = model.config.get_text_config()
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return not experts and not is_quantised(model)


def same_bits_in_wide_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether wide products on this GPU's tensor cores round as narrow ones do: measured on Hopper (9); Ampere and Ada
    (8) have only one kind."""
    return device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device)[0] in (8, 9)


def way_of(samplers: Sequence[Sampler | None]) -> str | None:
    """How a step must choose tokens for these sequences. None: the host chooses them."""
    ways = {None if sampler is None else sampler.sampling.within_step for sampler in samplers}
    return None if None in ways else max(ways, key=WAYS.index, default=None)
