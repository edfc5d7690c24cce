"""Chooses the kind of target for a model: known for the families that tests cover, found by trial for all others."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from slipstream.errors import ModelError
from slipstream.loading.adapters import check_kind
from slipstream.targets.base import Target, Want
from slipstream.targets.cache import LayerShape
from slipstream.targets.chains import ChainTarget
from slipstream.targets.masks import MaskKind, mask_kinds
from slipstream.targets.trees import TreeTarget, input_device, is_exact, unwrapped
from slipstream.tree import TokenTree
from slipstream.turns import Turns, current

if TYPE_CHECKING:
    from slipstream.targets.captured.graph_target import GraphTarget

log = logging.getLogger("slipstream")

CHUNK = 512  # tokens of a prompt that an ordinary forward reads

# Model types for which the tests compare trees with one full forward per path.
PROVEN = {
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "olmo2", "smollm3", "stablelm", "cohere"),
    *("granite", "starcoder2", "gpt_oss"),
}


def open_target(
    model: Any, *, chunk: int | None = None, graphs: bool = True, compile: bool = False, memory: float = 0.9
) -> Target:
    """A Target for a causal language model of transformers. The model is put into evaluation mode.

    chunk: tokens that one forward reads at most.
    graphs: whether steps on a GPU are captured and replayed, if the model allows it.
    compile: whether captured steps go through torch.compile first: faster, after some seconds for each shape of step.
    memory: the share of a GPU's free memory that the cache may take.
    """
    target = _opened(model, chunk, graphs, compile, memory)
    target.share = memory
    return target


def _opened(model: Any, chunk: int | None, graphs: bool, compile: bool, memory: float) -> Target:
    config = check_model(model)
    vocabulary, shapes = _probe(model)
    kinds = mask_kinds(config)
    if kinds is None or shapes is None:
        return _chains(model, vocabulary, chunk or CHUNK, "its layers keep states that can't branch")
    if getattr(config, "alibi", False):
        return _chains(model, vocabulary, chunk or CHUNK, "its position bias follows a key's place in the cache")
    if getattr(config, "attn_temperature_tuning", False):
        why = "the temperature of its attention follows a key's place in the cache"
        return _chains(model, vocabulary, chunk or CHUNK, why)
    target = TreeTarget(model, shapes, kinds, vocabulary, chunk or CHUNK)
    if config.model_type not in PROVEN and not scores_trees(target):
        return _chains(model, vocabulary, chunk or CHUNK, "it does not honour a tree's mask and positions")
    if graphs and target.device.type == "cuda":
        return _graphs(model, shapes, kinds, vocabulary, chunk, compile, memory) or target
    return target


def _graphs(
    model: Any,
    shapes: list[LayerShape | None],
    kinds: Mapping[str, MaskKind],
    vocabulary: int,
    chunk: int | None,
    compile: bool,
    memory: float,
) -> Target | None:
    """A target that replays captured steps, if this model's steps can be captured and give correct logits."""
    name = type(unwrapped(model)).__name__
    layers = [shape for shape in shapes if shape is not None]
    if len(layers) < len(shapes) or len({s.device for s in layers}) > 1:
        log.info("%s lies on several devices or shares keys between layers: its steps are not captured", name)
        return None
    target: Target | None = None
    try:
        from slipstream.targets.captured.graph_target import GraphTarget

        if not tells_windows(model, kinds):
            log.info("%s limits what it attends to by its mask alone: its steps are not captured", name)
            return None
        gc.collect()  # frees the caches of LLMs that are no longer used but have reference cycles
        how: dict[str, Any] = {"chunk": chunk} if chunk else {}
        if compile:
            how["compile"] = "inductor"
        with Turns.of(GraphTarget), current(layers[0].device):  # no other thread may capture meanwhile
            target = GraphTarget(model, layers, vocabulary, memory=memory, **how)
            if scores_trees(target):
                return target
        why = "replayed steps gave other logits"
    except Exception as error:  # a model may fail in any way here, and still works uncaptured
        log.debug("capture failed", exc_info=error)
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
    if target is not None:
        target.release()  # its captures hold it, and it holds nearly all memory
    log.warning("%s: its steps can't be captured as CUDA graphs (%s), so they run as they are", name, why)
    return None


@torch.inference_mode()
def tells_windows(model: Any, kinds: Mapping[str, MaskKind]) -> bool:
    """Whether each layer tells its attention its window, as captured steps need, since they have no mask. A trial with
    texts would not notice in a window longer than they are."""
    if any(kind.chunk for kind in kinds.values()):
        return False
    windows = {kind.window for kind in kinds.values()} - {None}
    if not windows:
        return True
    from slipstream.targets.captured.layers import recorded_attention

    with recorded_attention(model.config.get_text_config()) as calls:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)))
    return windows == {call.options.get("sliding_window") for call in calls} - {None, 0}


def check_model(model: Any) -> Any:
    """The text config of a supported model. An error otherwise, which names the reason."""
    name = type(unwrapped(model)).__name__
    if not hasattr(model, "config") or not hasattr(unwrapped(model), "get_output_embeddings"):
        raise ModelError(f"{name} is not a transformers model: pass an AutoModelForCausalLM")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model: slipstream continues text with decoder-only models")
    if unwrapped(model).get_output_embeddings() is None:
        raise ModelError(f"{name} has no language-modelling head: load it with AutoModelForCausalLM")
    config = model.config.get_text_config()
    attention = getattr(config, "_attn_implementation", "eager") or "eager"
    if attention not in ("eager", "sdpa"):
        raise ModelError(
            f"{name} runs attention with {attention!r}, which can't take a tree's mask: "
            "load it with attn_implementation='sdpa', or call model.set_attn_implementation('sdpa')"
        )
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        check_kind(name, kind, bool(getattr(adapter, "alora_invocation_tokens", None)))
    if model.training:
        model.eval()
    return config


@torch.inference_mode()
def _probe(model: Any) -> tuple[int, list[LayerShape | None] | None]:
    """Run one token through the model. Returns the number of logits, and what each layer stores per token; None for the
    latter if some layer stores anything but keys and values."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
    try:
        cache = DynamicCache(config=model.config)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    except TypeError:  # the argument for its cache has another name
        return model(input_ids=ids).logits.shape[-1], None
    shapes: list[LayerShape | None] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not hasattr(layer, "keys") or hasattr(layer, "conv_states"):
            return out.logits.shape[-1], None
        if keys is None or values is None or keys.numel() == 0:
            shapes.append(None)
        else:
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
    if not any(shapes):
        return out.logits.shape[-1], None
    return out.logits.shape[-1], shapes


@torch.inference_mode()
def scores_trees(target: TreeTarget | GraphTarget) -> bool:
    """Whether a small tree gets the same logits as its paths alone: after a short text, and in the same batch after one
    that is longer than any window in the config. Captured steps must even give the same bits."""
    windows = [v for k, v in target.model.config.to_dict().items() if "window" in k and isinstance(v, int)]
    long = min(target.context - 8, 600, max([24, *(w + 8 for w in windows)]))
    ids = [1 + 389 * i % (target.vocabulary - 1) for i in range(long + 5)]  # varied, so that a wrong mask is noticed
    texts = [[1, 2, 3], ids[5:]]
    tree, want = TokenTree.build(ids[:5], [-1, 0, 0, 1, 2]), Want(rows=8)
    slots = [target.open() for _ in texts]
    try:
        for slot, text in zip(slots, texts, strict=True):
            for _ in target.prefill(slot, text, Want()):
                pass
        for node in (3, 4):
            path = tree.path_to(node)
            # Copies: the next step of this shape writes its logits into the same memory.
            rows = [s.logits(node).to(torch.float32, copy=True) for s in target.score(slots, [tree] * 2, want)]
            chain = TokenTree.chain(ids[0], tree.tokens[path[1:]])
            alone = [s.logits(len(path) - 1).float() for s in target.score(slots, [chain] * 2, want)]
            if target.exact and not is_exact(target.model) and not all(map(torch.equal, rows, alone)):
                return False
            for row, text in zip(rows, texts, strict=True):
                right = _next_logits(target, text + tree.tokens[path].tolist())
                wrong = _next_logits(target, text + tree.tokens[: node + 1].tolist())  # as if all were one chain
                # The error of half precision depends on the model, so the limit is half the effect of a wrong mask.
                allowed = 1e-3 * right.std() if is_exact(target.model) else 0.5 * (row - wrong).norm()
                off = (row - right).abs().max() if is_exact(target.model) else (row - right).norm()
                if not off <= allowed:
                    log.debug("%s: off by %.3g where %.3g is allowed", type(target.model).__name__, off, allowed)
                    return False
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except Exception as error:  # an unknown model may fail in any way: then it gets chains
        log.debug("tree probe failed", exc_info=error)
        return False
    finally:
        for slot in slots:
            target.close(slot)
    return True


def _next_logits(target: TreeTarget | GraphTarget, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text], device=target.device)
    return target.model(input_ids=ids).logits[0, -1].float()


def _chains(model: Any, vocabulary: int, chunk: int, why: str) -> ChainTarget:
    target = ChainTarget(model, vocabulary, chunk, why)
    for note in target.notes:
        log.warning(note)
    return target
