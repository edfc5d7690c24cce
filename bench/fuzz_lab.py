"""The objects of bench/fuzz.py: tiny models of every family, a tokenizer, and every drafter with random options.

They are made once. LLMs of one model share its target, so that state left by one LLM would affect the next.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream import LLM, Store, drafters
from slipstream.budget.costs import Costs
from slipstream.heads import HEADS
from slipstream.targets import open_target

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the models that the laws are tried on
from families import FAMILIES, STATEFUL, VOCABULARY, graphs, tiny_model
from oracle import Oracle, OracleSession
from trials import blurred, embedded_answers, store_of_answers, trial_folder

CONTEXT = 400
CHUNK = 48  # tokens of a prompt that are read at once, so that short prompts have several pieces
NO_STEPS = {"bloom", "falcon", "gpt_oss"}  # attention with terms that fixed steps don't know
FREE = {1: 0.010, 64: 0.0101}  # what `auto` takes steps to cost: as good as nothing, so that it dares to draft
VARIANTS = 2  # of a drafter's options, for each model
ORACLE = "oracle"  # no drafter of the library's: it knows the answer, and lies now and then


def targets() -> list[tuple[str, bool]]:
    """(family, whether its steps have a fixed shape, as on a GPU)."""
    return [(f, False) for f in (*FAMILIES, *STATEFUL)] + [(f, True) for f in FAMILIES if f not in NO_STEPS]


def tokenizer() -> Any:
    """Bytes, and pieces of several: some characters take several tokens, and one token ends within a character."""
    alphabet = 'é🙂 \nUAS{}":,.01234abcdefghijklmnopqrstuvwxyz'
    ((shown, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(alphabet)
    singles = [*dict.fromkeys(shown)]
    first, second = singles[:2]  # of é
    merges = [(first, second), ("c", first), ("a", "b"), ("ab", "a"), ("c", "d"), ("Ġ", "a"), ("e", "f"), ("ef", "ef")]
    merges += [("g", "h"), ("i", "j"), ("k", "l"), ("m", "n"), ("o", "p")]
    known = ["<0>", "<1>", "<2>", *singles, *(a + b for a, b in merges)]
    assert len(known) == VOCABULARY
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(known)}, merges, unk_token="<0>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<0>", bos_token="<1>", eos_token="<2>")
    fast.chat_template = (
        "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'system': 'S'}[m.role] }}{{ m.content }}<2>"
        "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    return fast


class Lab:
    """Models, heads, stores and LLMs, each made when first it is needed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.tokenizer = seed, tokenizer()
        self._models: dict[str, Any] = {}
        self._heads: dict[tuple[str, str, bool], Any] = {}
        self._stores: dict[tuple[str, bool], str] = {}
        self._blurred: dict[str, Any] = {}
        self._targets: dict[tuple[str, bool], Any] = {}
        self._llms: dict[tuple[Any, ...], LLM] = {}

    def model(self, family: str) -> Any:
        if family not in self._models:
            model = tiny_model(family, max_position_embeddings=CONTEXT, n_positions=CONTEXT)
            model.generation_config.eos_token_id = None  # each request says whether it ends there
            self._models[family] = model
        return self._models[family]

    def target(self, family: str, fixed: bool) -> Any:
        key = family, fixed
        if key not in self._targets:
            target = graphs(self.model(family)) if fixed else open_target(self.model(family))
            if target.trees:
                target.chunk = CHUNK
            self._targets[key] = watched(target)
        return self._targets[key]

    def plain(self, family: str) -> LLM:
        """The reference: a fresh one."""
        return LLM(self.model(family), self.tokenizer, "none")

    def llm(self, family: str, fixed: bool, name: str, variant: int) -> LLM:
        key = family, fixed, name, variant
        if key not in self._llms:
            if len(self._llms) >= 300:
                self._llms.pop(next(iter(self._llms)))
            self._llms[key] = self._make(family, fixed, name, variant)
        return self._llms[key]

    def forget(self, family: str) -> None:
        """After a failure: nothing of this family's is used again."""
        self._llms = {key: llm for key, llm in self._llms.items() if key[0] != family}
        for fixed in (False, True):
            self._targets.pop((family, fixed), None)

    def options(self, family: str, fixed: bool, name: str, variant: int) -> tuple[int, dict[str, Any]]:
        """max_batch, and a drafter's options."""
        rng = Random(f"{self.seed} {family} {fixed} {name} {variant}")
        return rng.choice([1, 2, 3, 4, 16]), self._draw(rng, family, name)

    def _make(self, family: str, fixed: bool, name: str, variant: int) -> LLM:
        most, options = self.options(family, fixed, name, variant)
        target, head = self.target(family, fixed), options.pop("head", None)
        known = "none" if name == ORACLE else name
        with (
            patch("slipstream.llm.open_target", lambda *_, **__: target),
            patch("slipstream.drafters.auto.costs_of", lambda _: Costs(dict(FREE), bool(target.widths))),
            patch("slipstream.drafters.auto.recall", lambda *_: None),  # a case is the same whatever was tried before
        ):
            llm = LLM(self.model(family), self.tokenizer, known, max_batch=most, **options)
        vars(llm.engine.drafter).pop("_key", None)  # and what it learns is nobody else's
        if head is not None:
            self._join(llm.engine.drafter, head, self.head(family, head, False))
        if name == ORACLE:
            llm.engine.drafter = Knowing(target, [])
        return llm

    def _join(self, auto: Any, kind: str, head: Any) -> None:
        """Heads of these models don't come with slipstream, so `auto` is given one by hand."""
        part = drafters.make(kind, auto.target, self.tokenizer, drafter_path=head)
        auto.parts = {**auto.parts, kind: part}
        auto.layers = part.layers
        costs = Costs(dict(FREE), bool(auto.target.widths))
        auto.pilot = type(auto.pilot)(costs, list(auto.parts), auto.target.trees, {kind: part.sizes})

    # ---- drafters and their options

    def _draw(self, rng: Random, family: str, name: str) -> dict[str, Any]:
        if name in HEADS:
            return self._draw_head(rng, family, name)
        drawn = getattr(self, f"_draw_{name}", None)
        if drawn is not None:
            return drawn(rng, family)
        if name in ("none", "prediction", ORACLE):
            return {}
        return {}  # one that was installed beside ours

    def _draw_head(self, rng: Random, family: str, kind: str) -> dict[str, Any]:
        options: dict[str, Any] = {
            "drafter_path": self.head(family, kind, rng.random() < 0.5),
            "mode": rng.choice(["best", "sample"]),
        }
        if kind in ("eagle", "eagle3"):
            options |= {"depth": rng.randint(1, 6), "width": rng.randint(1, 10), "nodes": rng.choice([1, 4, 16, 64])}
        if kind == "eagle":
            options["dynamic"] = rng.random() < 0.6
        if kind == "medusa":
            options |= {"nodes": rng.choice([1, 5, 16, 64]), "width": rng.randint(1, 6)}
            if rng.random() < 0.3:
                options["tree"] = [[0], [1], [0, 0], [1, 2], [0, 0, 1]]
        if kind in ("mlp", "redrafter"):
            options |= {"beams": rng.randint(1, 8), "length": rng.randint(1, 5)}
            options |= {"every": rng.random() < 0.5, "compress": rng.random() < 0.5}
        return options

    def _draw_model(self, rng: Random, family: str) -> dict[str, Any]:
        mode = rng.choice(["greedy", "sample", "beam"])
        sizes = {"depth": rng.randint(1, 6), "width": rng.randint(1, 5), "confidence": rng.choice([0.0, 0.0, 0.2])}
        return {"draft_model": self.blurred(family), "draft_tokenizer": self.tokenizer, "mode": mode, **sizes}

    def _draw_pld(self, rng: Random, _: str) -> dict[str, Any]:
        least = rng.randint(1, 3)
        return {"min_ngram": least, "max_ngram": least + rng.randint(0, 6), "candidates": rng.randint(1, 5)} | {
            "length": rng.randint(1, 12)
        }

    def _draw_suffix(self, rng: Random, family: str) -> dict[str, Any]:
        options = {"shared": rng.choice([0, 50, 5000]), **_searching(rng)}
        if rng.random() < 0.5:
            learn = rng.random() < 0.5
            options |= {"learn": learn, "store": self.own_store() if learn else self.store(family)}
        return options

    def _draw_rest(self, rng: Random, family: str) -> dict[str, Any]:
        learn = rng.random() < 0.4
        store = self.own_store() if learn else self.store(family)
        return {"store": store, "learn": learn, "random": rng.random() < 0.3, **_searching(rng)}

    def _draw_dresd(self, rng: Random, family: str) -> dict[str, Any]:
        sizes = {"drafts": rng.randint(1, 10), "length": rng.randint(1, 10)}
        way = rng.choice([{"live": True}, {"unfiltered": True}, {}])
        return {"store": self.store(family, vectors=True), **sizes, **way}

    def _draw_rasd(self, rng: Random, family: str) -> dict[str, Any]:
        generator = rng.choice([*HEADS, "model"])
        retrievers = rng.choice(["pld", "suffix", "rest", "pld,rest", "suffix,dresd"])
        options: dict[str, Any] = {"generator": generator, "retrievers": retrievers}
        options |= {name: rng.random() < 0.7 for name in ("prune", "fuse", "overlap")}
        options |= {"top": rng.choice([1, 10, 40]), "length": rng.randint(1, 16), "shared": rng.choice([0, 1000])}
        if generator == "model":
            options |= {"drafter_path": self.blurred(family), "mode": rng.choice(["", "greedy", "sample", "beam"])}
        else:
            options |= {"drafter_path": self.head(family, generator, False), "mode": rng.choice(["", "sample"])}
        if "rest" in retrievers or "dresd" in retrievers:
            options["store"] = self.store(family, vectors="dresd" in retrievers)
        return options

    def _draw_auto(self, rng: Random, family: str) -> dict[str, Any]:
        names = rng.choice(["pld", "suffix", "pld,suffix", "suffix,rest", "rest"])
        options: dict[str, Any] = {"drafters": names, "shared": rng.choice([0, 1000])}
        if "rest" in names:
            options["learn"] = rng.random() < 0.5
            options["store"] = self.own_store() if options["learn"] else self.store(family)
        if rng.random() < 0.5:
            options["head"] = rng.choice([*HEADS])
        return options

    # ---- what they draft with

    def head(self, family: str, kind: str, some: bool) -> Any:
        """some: of eagle3, one that can guess every other token alone."""
        key = family, kind, some and kind == "eagle3"
        if key not in self._heads:
            sizes = {"draft_ids": range(0, VOCABULARY, 2)} if key[2] else {}
            self._heads[key] = HEADS[kind].fresh(self.model(family), **sizes)
        return self._heads[key]

    def blurred(self, family: str) -> Any:
        """A draft model that is right often, not always; for models that can't draft, one that is seldom right."""
        family = "llama" if family in STATEFUL else family
        if family not in self._blurred:
            self._blurred[family] = blurred(self.model(family))
        return self._blurred[family]

    def store(self, family: str, vectors: bool = False) -> str:
        """Some of the model's own answers."""
        key = family, vectors
        if key not in self._stores:
            self._stores[key] = (embedded_answers if vectors else store_of_answers)(self.model(family))
        return self._stores[key]

    def own_store(self) -> Store:
        """An empty one, to be written to."""
        return Store.create(trial_folder(), VOCABULARY)


class Knowing(Oracle):
    """An oracle that is told the answers before each request."""

    answers: dict[tuple[int, ...], list[int]]  # by prompt

    def begin(self, request: Any) -> OracleSession:
        truth = [*request.tokens, *self.answers.get(tuple(request.tokens), ())]
        return OracleSession(self, truth, np.random.default_rng(self.seed))


def _searching(rng: Random) -> dict[str, Any]:
    least = rng.randint(1, 3)
    options = {"shortest": least, "longest": least + rng.randint(0, 13), "matches": rng.choice([1, 10, 512])}
    return options | {"length": rng.randint(1, 12), "nodes": rng.choice([1, 8, 64]), "fill": rng.random() < 0.5}


# ---- what must be given back


def watched(target: Any) -> Any:
    """A target that knows which of its slots are open."""
    target.opened = {}
    opening, forking, closing = target.open, target.fork, target.close

    def keep(slot: Any) -> Any:
        target.opened[id(slot)] = slot
        return slot

    def close(slot: Any) -> None:
        target.opened.pop(id(slot), None)
        closing(slot)

    target.open, target.fork, target.close = lambda: keep(opening()), lambda slot: keep(forking(slot)), close
    return target


def leaks(llm: LLM) -> list[str]:
    """What an LLM that runs nothing still holds."""
    found = [f"{len(llm.target.opened)} slots of the target are open"] if llm.target.opened else []
    drafter = llm.engine.drafter
    for part in (drafter, *getattr(drafter, "parts", {}).values()):
        draft, cache = getattr(part, "draft", None), getattr(part, "cache", None)
        if draft is not None and any(slot is not None for slot in draft._slots):
            found.append("slots of the draft model are open")
        if cache is not None and len(cache._free) != len(cache.keys) - 1:
            found.append("rows of a head's cache are open")
    attention = llm.model.config.get_text_config()._attn_implementation
    if attention not in ("eager", "sdpa"):
        found.append(f"the model's attention was left as {attention}")
    return found


def described(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they can be printed."""
    plain = (int, float, str, bool, list, dict, tuple, type(None))
    return {k: v if isinstance(v, plain) else type(v).__name__ for k, v in options.items()}
