"""Readers of heads that predict blocks: DFlash and DSpark as z-lab, DeepSpec and `speculators` write them; Falcon."""

from __future__ import annotations

from typing import Any

from slipstream.heads.base import EMBEDDING, OUTPUT
from slipstream.heads.dflash import DFlash, DFlashConfig
from slipstream.heads.falcon import Falcon, FalconConfig
from slipstream.heads.layer_fields import layer_fields, without_frequencies
from slipstream.heads.published import (
    Json,
    Published,
    Tensors,
    absent,
    count,
    count_drafts,
    read_ids,
    state_number,
    verifier,
)

OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")  # `speculators` saves the target's


def read_dflash(config: Json, tensors: Tensors) -> Published:
    """As z-lab or DeepSpec writes it. Both count layers by their outputs, from 0: transformers' numbers are 1 more."""
    nested: Json = config.get("dflash_config") or {}
    deep = "dflash_config" not in config
    name = "target_layer_ids" if deep else "dflash_config.target_layer_ids"
    ids = nested.get("target_layer_ids") or config.get("target_layer_ids")
    if ids is None and not deep:
        ids = _spread(count(config, "num_target_layers"), count(config, "num_hidden_layers"))
    if not ids:
        raise ValueError(f"config.json does not say which states it reads ({name})")
    # To DeepSpec, -1 is the embedding.
    states = tuple(0 if deep and number == -1 else state_number(name, number) + 1 for number in ids)
    about = {"block_size": config.get("block_size") or nested.get("block_size")} | {
        key: nested.get(key, config.get(key)) for key in ("mask_token_id", "sample_from_anchor")
    }
    layout = "DFlash (z-lab)"
    if deep:
        layout = "DSpark (DeepSpec)" if config.get("markov_rank") else "DFlash (DeepSpec)"
    layers = config.get("num_target_layers")
    return _dflash({**config, **about}, config, tensors, states, deep, layout, target_layers=layers)


def read_speculators_dflash(config: Json, tensors: Tensors) -> Published:
    layer = config["transformer_layer_config"]
    if config.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise ValueError(
            f"it reads states of size {config['target_hidden_size']} and has {layer['hidden_size']} itself: "
            "a DFlash head reads its target's embedding, so both must be the same"
        )
    name = "aux_hidden_state_layer_ids"
    states = tuple(state_number(name, number) for number in config.get(name) or ())
    if not states:
        raise ValueError(f"config.json does not say which states it reads ({name})")
    kind, version = config["speculators_model_type"], config.get("speculators_version")
    layout = f"{'DSpark' if kind == 'dspark' else 'DFlash'} (speculators{f' {version}' if version else ''})"
    own = {key: tensor for key, tensor in tensors.items() if key not in OF_TRAINING}
    if kind == "dspark":  # defaults of `speculators`
        config = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True, **config}
    return _dflash(config, layer, own, states, kind == "dspark", layout, target=verifier(config))


def _dflash(
    config: Json, layer: Json, tensors: Tensors, states: tuple[int, ...], from_anchor: bool, layout: str, **known: Any
) -> Published:
    """from_anchor: unless config.json says something else."""
    own = without_frequencies(tensors)
    fields = layer_fields(layer, own, "layers.0.") | {"num_hidden_layers": count(layer, "num_hidden_layers")}
    if fields["windows"]:
        raise ValueError("some of its layers see a sliding window, which we don't run in a DFlash head")
    if config.get("mask_token_id") is None:
        raise ValueError("config.json does not say which token a mask is (mask_token_id)")
    anchor, vocabulary = config.get("sample_from_anchor"), count(layer, "vocab_size")
    rank, sure = config.get("markov_rank") or None, bool(config.get("enable_confidence_head"))
    sizes = DFlashConfig(
        vocab_size=vocabulary,
        hidden_size=count(layer, "hidden_size"),
        block_size=count(config, "block_size"),
        mask_token_id=state_number("mask_token_id", config["mask_token_id"]),
        aux_layers=states,
        draft_vocab_size=count(config, "draft_vocab_size", count_drafts(own, vocabulary)),
        from_anchor=from_anchor if anchor is None else bool(anchor),
        markov_rank=None if rank is None else count(config, "markov_rank"),
        markov_type="vanilla" if rank is None else str(config.get("markov_head_type") or "vanilla").lower(),
        confidence=sure,
        confidence_with_markov=sure and bool(config.get("confidence_head_with_markov")),
        **known,
        **fields,
    )
    read_ids(own, sizes.draft_vocab_size, vocabulary)
    return Published(DFlash, sizes, own, absent(EMBEDDING, own) | absent(OUTPUT, own), layout=layout)


def _spread(target: int, layers: int) -> list[int]:
    """z-lab's rule for which layers' outputs are read."""
    if layers == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (layers - 1)) for i in range(layers)]


def read_falcon(config: Json, tensors: Tensors) -> Published:
    own = without_frequencies(tensors)
    fields = layer_fields(config, own, "layers.0.") | {"num_hidden_layers": count(config, "num_hidden_layers", 1)}
    if fields["windows"]:
        raise ValueError("its layer sees a sliding window, which Falcon does not have")
    sizes = FalconConfig(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        block=count(config, "k_mask"),
        bias=bool(config.get("bias", "lstm.bias_ih_l0" in own)),
        **fields,
    )
    return Published(Falcon, sizes, own, absent(EMBEDDING, own), layout="Falcon (Bestpay)")
