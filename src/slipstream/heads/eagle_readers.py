"""Readers of the EAGLE family's layouts: EAGLE-1 and 2, EAGLE-3, and both as `speculators` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.heads.base import EMBEDDING, OUTPUT
from slipstream.heads.configs import spell_speculators
from slipstream.heads.eagle import Eagle, EagleConfig
from slipstream.heads.eagle3 import Eagle3, Eagle3Config
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

AUX = "eagle_aux_hidden_state_layer_ids"
OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


# ---- EAGLE-1


def read_eagle(config: Json, tensors: Tensors) -> Published:
    own = without_frequencies(tensors)
    odd: tuple[str, ...] = ()
    if OUTPUT in own:
        odd = (f"{OUTPUT} is in the file and not read: EAGLE-1 guesses through its target's",)
        del own[OUTPUT]
    sizes = EagleConfig(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        bias=bool(config.get("bias", "fc.bias" in tensors)),
        **layer_fields(config, tensors, "layers.0."),
    )
    return Published(Eagle, sizes, own, absent(EMBEDDING, own), layout="EAGLE-1/2, HASS (SafeAILab)", odd=odd)


def read_speculators_eagle(config: Json, tensors: Tensors) -> Published:
    """EAGLE-1 with other names."""
    if config.get("layernorms"):
        raise ValueError("it has the extra norms of `layernorms: true`, which EAGLE-1 does not have and we don't run")
    names = {"fusion_fc.": "fc.", "transformer.": "layers.0."}

    def renamed(name: str, pairs: Mapping[str, str]) -> str:
        return next((new + name[len(old) :] for old, new in pairs.items() if name.startswith(old)), name)

    own = {renamed(name, names): tensor for name, tensor in tensors.items()}
    layer = {**config["transformer_layer_config"], "bias": bool(config.get("fusion_bias", "fc.bias" in own))}
    found = read_eagle(layer, own)
    back = {new: old for old, new in names.items()}
    return replace(
        found,
        config=replace(found.config, target=verifier(config)),
        spell=lambda name: renamed(name, back),
        layout="EAGLE-1 (speculators)",
    )


# ---- EAGLE-3


def read_eagle3(config: Json, tensors: Tensors) -> Published:
    who = "ModelOpt" if any(name.startswith("layers.0.") for name in tensors) else "SafeAILab, SpecForge"
    return _eagle3(config, config, tensors, f"EAGLE-3 ({who})")


def read_speculators(config: Json, tensors: Tensors) -> Published:
    """Like `read_eagle3`, with the layer's sizes in a config of their own."""
    layer = config["transformer_layer_config"]
    version = config.get("speculators_version")
    found = _eagle3(config, layer, tensors, "EAGLE-3 (speculators" + (f" {version})" if version else ")"))
    return replace(found, config=replace(found.config, target=verifier(config)))


def _eagle3(config: Json, layer: Json, tensors: Tensors, layout: str) -> Published:
    nested: Json = config.get("eagle_config") or {}
    _refuse(config, nested, tensors)

    def field(name: str) -> Any:
        return config.get(name, nested.get(name))

    own, names = _eagle3_names(without_frequencies(tensors))
    width, vocabulary = count(layer, "hidden_size"), count(layer, "vocab_size")
    hidden = width if config.get("target_hidden_size") is None else count(config, "target_hidden_size")
    if OUTPUT not in own and EMBEDDING in own and layer.get("tie_word_embeddings"):
        own[OUTPUT] = own[EMBEDDING]
    sizes = Eagle3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        width=width,
        draft_vocab_size=count(config, "draft_vocab_size", count_drafts(own, vocabulary)),
        aux_layers=_aux_layers(config, nested, own.get("fc.weight"), hidden),
        norm_before_residual=bool(field("norm_before_residual")),
        norm_before_fc=_agreed("norm_before_fc", field("norm_before_fc"), "input_norm.weight", own),
        fc_norm=_agreed(
            "fc_norm", field("fc_norm" if field("use_aux_norm") is None else "use_aux_norm"), "fc_norm.0.weight", own
        ),
        norm_output=bool(field("norm_output")),
        **layer_fields(layer, own, "midlayer."),
    )
    read_ids(own, sizes.draft_vocab_size, vocabulary)
    borrowed = absent(EMBEDDING, own) | absent(OUTPUT, own) if width == hidden else frozenset[str]()
    spelled = any(name.startswith("layers.0.") for name in tensors)

    def spell(name: str) -> str:
        return names.get(name) or (spell_speculators(name) if spelled else name)

    return Published(Eagle3, sizes, own, borrowed, spell, layout)


def _refuse(config: Json, nested: Json, tensors: Tensors) -> None:
    """Raise for heads that look like EAGLE-3 and compute something else."""
    if nested.get("use_aux_hidden_state", True) is False:
        raise ValueError("it reads the target's last state alone (`use_aux_hidden_state: false`): that is no EAGLE-3")
    if "mask_hidden" in tensors or config.get("parallel_drafting"):
        raise ValueError("it is a P-EAGLE head (mask_hidden), which drafts all tokens at once and can't draft one")


def _eagle3_names(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """The tensors by the head's own names, and the file's name for each."""

    def own(name: str) -> str:
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
        name = re.sub(r"^aux_norm_(low|mid|high)\b", lambda m: OLD_NORMS[m[0]], name)
        # SGLang calls the norm of a further layer hidden_norm, vLLM input_layernorm.
        other = re.sub(r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm.", name)
        return name if other in tensors else other

    names = {own(name): name for name in tensors}
    return {mine: tensors[name] for mine, name in names.items()}, names


def _aux_layers(config: Json, nested: Json, fc: Tensor | None, hidden: int) -> tuple[int, ...] | None:
    """The states by transformers' numbers. Inside `eagle_config`, layers' outputs are counted from 0: one less."""
    ids = config.get(AUX) or [state_number(AUX, number) + 1 for number in nested.get(AUX) or ()]
    if ids:
        return tuple(state_number(AUX, number) for number in ids)
    if fc is not None and fc.ndim == 2 and fc.shape[1] % hidden == 0 and fc.shape[1] != 3 * hidden:
        reads = fc.shape[1] // hidden
        raise ValueError(f"fc.weight reads {reads} hidden states, and config.json does not say which ({AUX})")
    return None


def _agreed(name: str, value: Any, tensor: str, tensors: Tensors) -> bool:
    """Whether the head has this norm. config.json may be silent, but must not contradict the tensors."""
    if value is False and tensor in tensors:
        raise ValueError(f"config.json says {name}: false, but the file has {tensor}")
    return bool(value) or tensor in tensors
