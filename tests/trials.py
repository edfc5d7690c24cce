"""With which options the laws try each drafter on a model. Those that need none have one trial, without any."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from functools import lru_cache
from typing import Any

import torch

from slipstream.datastores.dense.build import EmbedSettings, embed
from slipstream.datastores.durable.store import Document, Store
from slipstream.drafters.magicdec import tells_attention
from slipstream.errors import ModelError
from slipstream.heads import HEADS
from slipstream.targets import open_target

Options = dict[str, Any]


def trials(name: str, model: Any) -> list[Options]:
    match name:
        case "auto":
            return [{"drafters": "pld, suffix"}]
        case "suffix":
            return [{}, {"shared": 1000, "store": store_of_answers(model)}]
        case "rest":
            store = store_of_answers(model)
            return [{"store": store, "shortest": 2}, {"store": store, "random": True}]
        case "dresd":
            store = embedded_answers(model)
            return [{"store": store, "live": True}, {"store": store, "unfiltered": True, "drafts": 3}]
        case "model":
            draft = blurred(model)
            return [{"draft_model": draft, "mode": mode, "depth": 3} for mode in ("greedy", "sample", "beam")]
        case "magicdec":  # half of a text, however short
            own = {"shortest": 0, "keys": 0.5, "sinks": 1, "window": 2}
            told = {"selection": "attended"} if tells_attention(open_target(model)) else {}
            return [own | {"mode": "sample"}, own | told | {"mode": "beam", "keys": 4}]
        case "eagle":
            return [{"drafter_path": HEADS["eagle"].fresh(model), "depth": 4, "width": 4}]
        case "eagle3":  # one that can't guess every token, and draws where the request does
            some = range(0, model.get_output_embeddings().weight.shape[0], 2)
            head = HEADS["eagle3"].fresh(model, draft_ids=some)
            return [{"drafter_path": head, "mode": "sample", "depth": 4, "width": 4}]
        case "rasd":
            eagle, medusa = HEADS["eagle"].fresh(model), HEADS["medusa"].fresh(model)
            return [
                {"generator": "eagle", "drafter_path": eagle, "retrievers": "pld,rest"}
                | {"store": store_of_answers(model)},
                {"generator": "medusa", "drafter_path": medusa, "mode": "sample", "top": 40}
                | {"fuse": False, "overlap": False},
            ]
        case "dflash":  # as z-lab has it, and with all that DSpark adds
            some = range(0, model.get_output_embeddings().weight.shape[0], 2)
            spark = HEADS["dflash"].fresh(model, block=4, bias=4, confidence=True, markov_type="gated", draft_ids=some)
            return [
                {"drafter_path": HEADS["dflash"].fresh(model, block=4)},
                {"drafter_path": spark, "mode": "sample", "width": 3},
            ]
        case "spire":  # a few tokens of the text, and all that the ablation leaves out
            return [
                {"drafter_path": cut_head(model, window=3), "width": 3},
                {"drafter_path": HEADS["spire"].fresh(model, pruned=False, window=0, feedback=False, activations=False)}
                | {"mode": "sample", "depth": 3, "width": 2},
            ]
        case name if name in HEADS:  # untrained; where the request is greedy, it drafts as in the other mode
            return [{"drafter_path": HEADS[name].fresh(model), "mode": "sample"}]
    return [{}]


def cut_head(model: Any, **sizes: Any) -> Any:
    """A spire head of the model's own layers, or of random ones where its layers are no Llama's."""
    try:
        return HEADS["spire"].fresh(model, **sizes)
    except ModelError:
        return HEADS["spire"].fresh(model, pruned=False, **sizes)


def blurred(model: Any) -> Any:
    """A copy with noise on its weights: right often, not always."""
    other = copy.deepcopy(model)
    noise = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise, device=weight.device)
    return other


@lru_cache(4)
def store_of_answers(model: Any) -> str:
    """A small store, in a temporary folder, of a model's greedy answers to prompts of one token."""
    folder = trial_folder()
    with Store.create(folder, model.config.get_text_config().vocab_size) as store:
        store.extend(Document(text) for text in answers(model))
    return folder


@lru_cache(4)
def embedded_answers(model: Any) -> str:
    """The same with vectors."""
    folder = trial_folder()
    with Store.create(folder, model.config.get_text_config().vocab_size) as store:
        store.extend(Document(text) for text in answers(model))
        embed(store, [lambda: model], EmbedSettings(dims=8))
    return folder


@lru_cache(4)
def answers(model: Any) -> list[list[int]]:
    prompts = torch.arange(4, 8, device=model.device)[:, None]
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=32, do_sample=False)
    return texts.tolist()


def trial_folder() -> str:
    """A temporary folder, which goes when Python ends."""
    folder = tempfile.mkdtemp(prefix="slipstream-trial-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
