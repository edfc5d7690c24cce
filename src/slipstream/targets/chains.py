"""ChainTarget: models whose state can't branch (linear attention, state spaces) verify single chains.

Each slot has the model's native cache. A recurrent state can't be rolled back, so a chain is scored on a copy of it. If
the whole chain is accepted, the copy becomes the state. Otherwise the accepted tokens are read again with the next
chain.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from slipstream.targets.base import Scores, Slot, Target, Want
from slipstream.targets.states import asked_states
from slipstream.targets.trees import context_length, input_device, is_exact, unwrapped
from slipstream.tree import TokenTree

CATCH_UP = 16  # accepted tokens that may be read again with each chain; more are read into the state first


@dataclass(eq=False)
class ChainSlot(Slot):
    cache: Any = None  # the model's native cache
    read: int = 0  # how many of `tokens` are in the cache
    trial: Any = None  # a cache that has also read the chain scored last
    reading: bool = False  # set during a forward: if still set, it was interrupted, and the cache is undefined


class ChainTarget(Target):
    trees = False

    def __init__(self, model: Any, vocabulary: int, chunk: int, why: str) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.context = context_length(model.config)
        self.device, self.dtype = input_device(model), model.dtype
        self.exact = self.exact_together = is_exact(model)
        accepted = inspect.signature(unwrapped(model).forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self.chunk = chunk
        name = type(unwrapped(model)).__name__
        if self._continues():
            self.notes = (f"{name} verifies single chains instead of trees: {why}",)
        else:
            self.chains = False
            self.chunk = self.context  # the prompt in one piece, then token by token
            self.notes = (f"{name} decodes without speculation: its cache can't be continued by several tokens",)

    # ---- slots

    def open(self) -> Slot:
        return ChainSlot(cache=self._new_cache())

    def close(self, slot: Slot) -> None:
        assert isinstance(slot, ChainSlot)
        slot.cache = slot.trial = None

    def fork(self, slot: Slot) -> Slot:
        assert isinstance(slot, ChainSlot)
        return ChainSlot(tokens=list(slot.tokens), cache=copy.deepcopy(slot.cache), read=slot.read)

    def truncate(self, slot: Slot, length: int) -> None:
        assert isinstance(slot, ChainSlot)
        interrupted = slot.reading or slot.tree is not None
        del slot.tokens[length:]
        slot.trial, slot.tree = None, None
        if interrupted or (slot.read > length and not self._can_crop(slot.cache)):
            slot.cache, slot.read, slot.reading = self._new_cache(), 0, False
        elif slot.read > length:
            slot.cache.crop(length - slot.read)
            slot.read = length

    def cuts(self, slot: Slot, length: int) -> bool:
        assert isinstance(slot, ChainSlot)
        # Without chains only an empty state can read several tokens (`prefill`), so a prefix of a text is of no use.
        return self.chains and (slot.read <= length or self._can_crop(slot.cache))

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        assert isinstance(slot, ChainSlot)
        assert slot.tree is not None, "commit follows score"
        drafted = len(slot.tree)
        slot.tokens.extend(slot.tree.tokens[list(path)].tolist())
        unwanted = drafted - len(path)
        if unwanted and self._can_crop(slot.trial):
            slot.trial.crop(-unwanted)
            unwanted = 0
        if unwanted == 0:
            slot.cache, slot.read = slot.trial, slot.length
        slot.trial = slot.tree = None

    # ---- forwards

    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        assert isinstance(slot, ChainSlot)
        for start in range(0, len(tokens), self.chunk):
            part = list(tokens[start : start + self.chunk])
            slot.tokens.extend(part)
            if not self.chains and slot.length - slot.read > 1:
                slot.cache, slot.read = self._new_cache(), 0  # only an empty state can read several tokens
            scores = self._read_unread(slot, want, keep=len(part))
            yield scores

    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        assert known == 0, "a chain is scored in one piece"
        try:
            return [self._score(slot, tree, want) for slot, tree in zip(slots, trees, strict=True)]
        except BaseException:
            for slot in slots:
                self.truncate(slot, slot.length)  # states that hold more than the text are made anew
            raise

    def _score(self, slot: Slot, tree: TokenTree, want: Want) -> Scores:
        assert isinstance(slot, ChainSlot)
        if slot.length - slot.read > CATCH_UP:
            self._read_unread(slot, Want(), keep=1)
        whole = len(tree) == 1 or self._can_crop(slot.cache)  # no copy: nothing to roll back, or it can be cropped
        slot.trial = slot.cache if whole else copy.deepcopy(slot.cache)
        slot.tree = tree
        unread = slot.tokens[slot.read :] + tree.tokens.tolist()
        return self._read(slot.trial, unread, want, slot.length, keep=len(tree), logits=len(tree))

    def _read_unread(self, slot: ChainSlot, want: Want, keep: int) -> Scores:
        """Read the committed text that is not in the cache yet. The last `keep` tokens give hidden states. After
        `truncate` replaced a state that can't be rolled back, this is the whole text, in several chunks."""
        slot.reading = True
        while (unread := slot.length - slot.read) > self.chunk:
            part = slot.tokens[slot.read : slot.read + min(self.chunk, unread - keep)]
            self._read(slot.cache, part, Want(), slot.read, keep=1, logits=1)
            slot.read += len(part)
        scores = self._read(slot.cache, slot.tokens[slot.read :], want, slot.length - 1, keep, logits=1)
        slot.read, slot.reading = slot.length, False
        return scores

    @torch.inference_mode()
    def _read(self, cache: Any, tokens: list[int], want: Want, position: int, keep: int, logits: int) -> Scores:
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([tokens], device=self.device),
            self._cache_name: cache,
            "use_cache": True,
        }
        if want.layers:
            inputs["output_hidden_states"] = True
        with asked_states(self.model, want.layers) as states:
            out = self.model(**inputs)
        hidden = {layer: h[0, -keep:] for layer, h in states(out).items()}
        scores = Scores(out.logits[0, -logits:], hidden, np.arange(position, position + logits))
        if want.argmax and self.device.type != "cpu":
            top = out.logits[0, -logits:].max(-1)
            scores.take(top.indices.tolist(), top.values.tolist())
        return scores

    def _new_cache(self) -> Any:
        return DynamicCache(config=self.model.config)

    @staticmethod
    def _can_crop(cache: Any) -> bool:
        return all(type(layer) is DynamicLayer for layer in cache.layers)

    def _continues(self) -> bool:
        """Whether reading several tokens onto a state gives the same as one pass over the whole text."""
        text = [1, 2, 3, 4, 5, 6]
        try:
            whole = self._read(self._new_cache(), text, Want(), 0, keep=1, logits=1).logits(0).float()
            cache = self._new_cache()
            self._read(cache, text[:3], Want(), 0, keep=1, logits=1)
            parts = self._read(copy.deepcopy(cache), text[3:], Want(), 0, keep=1, logits=1).logits(0).float()
        except Exception:  # some models raise
            return False
        allowed = (1e-3 if self.exact else 0.2) * float(whole.std())
        return torch.allclose(whole, parts, rtol=0, atol=allowed)
