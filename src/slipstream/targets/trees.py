"""TreeTarget: any transformer with ordinary attention scores trees, through its own cache and a 4-D mask."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ModelError
from slipstream.targets import watching
from slipstream.targets.alibi import alibi_by_position
from slipstream.targets.attention import our_attention
from slipstream.targets.base import Part, Scores, Slot, Target, Want
from slipstream.targets.cache import KeyValuePool, LayerShape, Window
from slipstream.targets.masks import MaskKind, additive_masks, key_positions, visible
from slipstream.targets.packed import PackedLayers
from slipstream.targets.states import asked_states
from slipstream.tree import TokenTree

TREE = 256  # room for keys of drafts and padding after a full context


class TreeTarget(Target):
    block = 1

    def __init__(
        self,
        model: Any,
        shapes: Sequence[LayerShape | None],
        kinds: dict[str, MaskKind],
        vocabulary: int,
        chunk: int = 512,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.context = context_length(model.config)
        self.device, self.dtype = input_device(model), model.dtype
        self.exact = self.exact_together = is_exact(model)
        self.chunk = chunk
        self._config, self._kinds = model.config.get_text_config(), kinds
        self._pool = KeyValuePool(shapes, self.context + TREE)
        self._slots: list[Slot | None] = []  # by row
        accepted = inspect.signature(unwrapped(model).forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._packed = PackedLayers.of(model)
        self.packed_from = self._packed.fewest

    # ---- slots

    def open(self) -> Slot:
        slot = Slot(row=self._row())
        self._slots[slot.row] = slot
        return slot

    def _row(self) -> int:
        """A free row of the pool."""
        if None not in self._slots:
            self._pool.reserve(len(self._slots) + 1, 1)
            self._slots.append(None)
        return self._slots.index(None)

    def close(self, slot: Slot) -> None:
        if slot.row < len(self._slots) and self._slots[slot.row] is slot:
            self._slots[slot.row] = None

    def fork(self, slot: Slot) -> Slot:
        self._move_pending(slot)
        twin = self.open()
        twin.tokens = list(slot.tokens)
        self._pool.copy(slot.row, twin.row, slot.length)
        return twin

    def truncate(self, slot: Slot, length: int) -> None:
        self._move_pending(slot)
        del slot.tokens[length:]
        slot.tree = None

    def select(self, slot: Slot, blocks: Sequence[int]) -> Part:
        """A copy of these blocks' keys."""
        self._move_pending(slot)
        part = Part.of(slot, blocks, self.block, self._row())
        self._slots[part.row] = part
        self._pool.pick(slot.row, part.row, part.positions(self.block))
        return part

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        slot.accept(path)

    def _move_pending(self, slot: Slot) -> None:
        if slot.pending is not None:
            self._pool.move(slot.row, slot.length - len(slot.pending), slot.pending)
            slot.pending = None

    # ---- forwards

    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        self._packed.follow()
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            tree = TokenTree.chain(part[0], part[1:])
            (scores,) = self._forward([slot], [tree], want, known=0, last_only=True)
            self.commit(slot, range(len(part)))
            yield scores

    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        order = self._gather(slots)
        slots, trees = [slots[i] for i in order], [trees[i] for i in order]
        if known or not any(slot.wants_attention for slot in slots):
            scores = self._forward(slots, trees, want, known)
        else:
            width = max(slot.length for slot in slots) + max(map(len, trees))
            with watching.watching(len(slots), width, watching.ROOTS) as seen:
                scores = self._forward(slots, trees, want, known)
            for slot, weights in zip(slots, seen.weights, strict=True):
                if slot.wants_attention:
                    slot.set_attended(weights[: slot.length + 1])
        back = np.argsort(order)
        return [scores[i] for i in back]

    def extend(
        self, slots: Sequence[Slot], trees: Sequence[TokenTree], known: Sequence[int], want: Want
    ) -> list[Scores]:
        """One forward for each group of slots in neighbouring rows with equally many known nodes. No row is moved for a
        draft."""
        groups: list[list[int]] = []
        for i in sorted(range(len(slots)), key=lambda i: (known[i], slots[i].row)):
            last = groups[-1][-1] if groups else None
            if last is not None and known[i] == known[last] and slots[i].row == slots[last].row + 1:
                groups[-1].append(i)
            else:
                groups.append([i])
        found: dict[int, Scores] = {}
        for group in groups:
            scores = self.score([slots[i] for i in group], [trees[i] for i in group], want, known[group[0]])
            found.update(zip(group, scores, strict=True))
        return [found[i] for i in range(len(slots))]

    def _watched(self, slot: Slot, tokens: Sequence[int]) -> torch.Tensor | None:
        with watching.watching(1, slot.length + len(tokens)) as seen:
            for _ in self.prefill(slot, tokens, Want()):
                pass
        return seen.weights[0] if seen.layers else None

    @torch.inference_mode()
    def _forward(
        self,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        want: Want,
        known: int,
        last_only: bool = False,
    ) -> list[Scores]:
        """One forward. The slots must be in neighbouring rows, in order."""
        lengths = [slot.length for slot in slots]
        rows = max(len(tree) for tree in trees) - known
        width = max(length + known for length in lengths) + rows
        if any(slot.position + tree.depth >= self.context for slot, tree in zip(slots, trees, strict=True)):
            raise ModelError(f"a draft reaches past the model's {self.context} positions: the engine must cut it")
        self._pool.reserve(len(self._slots), width)
        for slot, tree in zip(slots, trees, strict=True):
            self._move_pending(slot)
            slot.tree = tree
        starts = tuple(length + known for length in lengths)
        self._pool.look(Window(slots[0].row, starts, rows, width))

        ids = np.zeros((len(slots), rows), np.int64)
        query = np.zeros((len(slots), rows), np.int64)
        for i, tree in enumerate(trees):
            ids[i, : len(tree) - known] = tree.tokens[known:]
            query[i] = slots[i].position
            query[i, : len(tree) - known] += tree.depths[known:]
        key = key_positions(slots, trees, width)
        see = visible(lengths, trees, known, rows, width)
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids).to(self.device),
            "attention_mask": additive_masks(self._kinds, see, query, key, self.dtype, self.device),
            "past_key_values": self._pool,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = torch.from_numpy(query).to(self.device)
        if last_only and self._takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        if want.layers:
            inputs["output_hidden_states"] = True
        watched = watching.watched() if self._config._attn_implementation == "eager" else None
        if watched is not None:  # eager attention does not report weights itself
            inputs["output_attentions"] = True
        asked = asked_states(self.model, want.layers)
        attention, alibi = our_attention(self._config), alibi_by_position(self.model, key)
        with attention, alibi, self._packed.in_place(), asked as states:
            out = self.model(**inputs)
        if watched is not None:
            for weights in out.attentions or ():
                watched.add(weights)
        return self._scores(out.logits, states(out), trees, want, query, known, last_only)

    def _scores(
        self,
        logits: torch.Tensor,
        states: dict[int, torch.Tensor],
        trees: Sequence[TokenTree],
        want: Want,
        query: NDArray[np.int64],
        known: int,
        last_only: bool,
    ) -> list[Scores]:
        logits = logits[:, -1:] if last_only else logits  # (b, rows, V)
        bring = want.argmax and self.device.type != "cpu"
        if bring:
            top = logits.max(-1)
            best, value = top.indices.cpu().numpy(), top.values.float().cpu().numpy()
        found = []
        for i, tree in enumerate(trees):
            n = len(tree) - known
            hidden = {layer: h[i, :n] for layer, h in states.items()}
            rows = slice(n - 1, n) if last_only else slice(0, n)
            scores = Scores(logits[i, :1] if last_only else logits[i, :n], hidden, query[i, rows], known)
            if bring:
                scores.take(best[i].tolist(), value[i].tolist())
            found.append(scores)
        return found

    def _gather(self, slots: Sequence[Slot]) -> list[int]:
        """Move the batch into neighbouring rows, moving as few as possible. Returns its order by row."""
        order = sorted(range(len(slots)), key=lambda i: slots[i].row)
        rows = [slots[i].row for i in order]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return order
        free = sorted(set(range(len(slots))) - set(rows))
        for i in order:
            slot = slots[i]
            if slot.row >= len(slots):
                to, other = free.pop(0), slot.row
                guest = self._slots[to]
                # Whole rows are exchanged, since keys of trees not yet committed lie after the length.
                if guest is None:
                    self._pool.copy(other, to, self._pool.capacity)
                else:
                    self._pool.swap(to, other, self._pool.capacity)
                    guest.row = other
                self._slots[to], self._slots[other] = slot, guest
                slot.row = to
        return sorted(range(len(slots)), key=lambda i: slots[i].row)


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def input_device(model: Any) -> torch.device:
    """The device for token ids: the embedding's, which may differ from the rest by a device map."""
    device = model.get_input_embeddings().weight.device
    hook = getattr(model, "hf_device_map", None)
    if device.type == "meta" and hook:  # offloaded weights: accelerate moves inputs by itself
        return torch.device("cpu")
    return device


def context_length(config: Any) -> int:
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx"):
        if isinstance(length := getattr(text, name, None), int):
            return length
    return 1 << 20  # Bloom and similar: position biases have no limit


def is_exact(model: Any) -> bool:
    """Whether everything is computed in full precision. Half precision rounds differently by number of rows."""
    return model.dtype in (torch.float32, torch.float64) and not is_quantised(model)


def is_quantised(model: Any) -> bool:
    """Whether the model computes with quantised values, which may be scaled over all rows together."""
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    if getattr(model, "is_quantized", False) and getattr(method, "value", method) != "gguf":
        return True  # GGUF weights were dequantised on loading
    return any("quantized" in type(module).__module__ for module in model.modules())
