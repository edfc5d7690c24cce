"""Readers of the EAGLE family's layouts: EAGLE-1 and 2, EAGLE-3, and both as `speculators` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.heads.configs import spell_speculators
from slipstream.heads.eagle import Eagle, EagleConfig
from slipstream.heads.eagle3 import Eagle3, Eagle3Config
from slipstream.heads.published import EMBEDDING, OUTPUT, Json, Published, Tensors, absent, count, draft_ids, whole

AUX = "eagle_aux_hidden_state_layer_ids"
FULL, SLIDING = "full_attention", "sliding_attention"
OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


# ---- EAGLE-1


def read_eagle(config: Json, tensors: Tensors) -> Published:
    own = _without_frequencies(tensors)
    odd: tuple[str, ...] = ()
    if OUTPUT in own:
        odd = (f"{OUTPUT} is in the file and not read: EAGLE-1 guesses through its target's",)
        del own[OUTPUT]
    sizes = EagleConfig(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        bias=bool(config.get("bias", "fc.bias" in tensors)),
        **_layer_fields(config, tensors, "layers.0."),
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
        config=replace(found.config, target=_verifier(config)),
        spell=lambda name: renamed(name, back),
        layout="EAGLE-1 (speculators)",
    )


# ---- EAGLE-3


def read_eagle3(config: Json, tensors: Tensors) -> Published:
    who = "ModelOpt" if any(name.startswith("layers.0.") for name in tensors) else "SafeAILab, SpecForge"
    return _eagle3(config, config, tensors, f"EAGLE-3 ({who})")


def read_speculators(config: Json, tensors: Tensors) -> Published:
    """The layer's sizes stand apart."""
    layer = config["transformer_layer_config"]
    version = config.get("speculators_version")
    found = _eagle3(config, layer, tensors, "EAGLE-3 (speculators" + (f" {version})" if version else ")"))
    return replace(found, config=replace(found.config, target=_verifier(config)))


def _eagle3(config: Json, layer: Json, tensors: Tensors, layout: str) -> Published:
    nested: Json = config.get("eagle_config") or {}
    _refuse(config, nested, tensors)

    def says(name: str) -> Any:
        return config.get(name, nested.get(name))

    own, names = _eagle3_names(_without_frequencies(tensors))
    width, vocabulary = count(layer, "hidden_size"), count(layer, "vocab_size")
    hidden = width if config.get("target_hidden_size") is None else count(config, "target_hidden_size")
    if OUTPUT not in own and EMBEDDING in own and layer.get("tie_word_embeddings"):
        own[OUTPUT] = own[EMBEDDING]
    sizes = Eagle3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        width=width,
        draft_vocab_size=count(config, "draft_vocab_size", _drafts(own, vocabulary)),
        aux_layers=_aux_layers(config, nested, own.get("fc.weight"), hidden),
        norm_before_residual=bool(says("norm_before_residual")),
        norm_before_fc=_agreed("norm_before_fc", says("norm_before_fc"), "input_norm.weight", own),
        fc_norm=_agreed(
            "fc_norm", says("fc_norm" if says("use_aux_norm") is None else "use_aux_norm"), "fc_norm.0.weight", own
        ),
        norm_output=bool(says("norm_output")),
        **_layer_fields(layer, own, "midlayer."),
    )
    _read_ids(own, sizes.draft_vocab_size, vocabulary)
    borrowed = absent(EMBEDDING, own) | absent(OUTPUT, own) if width == hidden else frozenset[str]()
    spelled = any(name.startswith("layers.0.") for name in tensors)

    def spell(name: str) -> str:
        return names.get(name) or (spell_speculators(name) if spelled else name)

    return Published(Eagle3, sizes, own, borrowed, spell, layout)


def _refuse(config: Json, nested: Json, tensors: Tensors) -> None:
    """What looks like EAGLE-3 and computes something else."""
    if nested.get("use_aux_hidden_state", True) is False:
        raise ValueError("it reads the target's last state alone (`use_aux_hidden_state: false`): that is no EAGLE-3")
    if "mask_hidden" in tensors or config.get("parallel_drafting"):
        raise ValueError("it is a P-EAGLE head (mask_hidden), which drafts all tokens at once and can't draft one")


def _eagle3_names(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """By the head's own names, and those of the file for each."""

    def own(name: str) -> str:
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
        name = re.sub(r"^aux_norm_(low|mid|high)\b", lambda m: OLD_NORMS[m[0]], name)
        # SGLang calls the norm of a further layer hidden_norm, vLLM input_layernorm.
        other = re.sub(r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm.", name)
        return name if other in tensors else other

    names = {own(name): name for name in tensors}
    return {mine: tensors[name] for mine, name in names.items()}, names


def _aux_layers(config: Json, nested: Json, fc: Tensor | None, hidden: int) -> tuple[int, ...] | None:
    """Transformers' numbers. Inside `eagle_config` layers are counted by their outputs, from 0: one less."""
    ids = config.get(AUX) or [_state(number) + 1 for number in nested.get(AUX) or ()]
    if ids:
        return tuple(_state(number) for number in ids)
    if fc is not None and fc.ndim == 2 and fc.shape[1] % hidden == 0 and fc.shape[1] != 3 * hidden:
        reads = fc.shape[1] // hidden
        raise ValueError(f"fc.weight reads {reads} hidden states, and config.json does not say which ({AUX})")
    return None


def _state(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{AUX} must be whole numbers from 0 on, not {number!r}")
    return number


def _agreed(name: str, said: Any, tensor: str, tensors: Tensors) -> bool:
    """Whether there is this norm: config.json may leave it to the tensors to say so, but not say the opposite."""
    if said is False and tensor in tensors:
        raise ValueError(f"config.json says {name}: false, but the file has {tensor}")
    return bool(said) or tensor in tensors


def _drafts(tensors: Tensors, vocabulary: int) -> int:
    """How many tokens it guesses among, where config.json doesn't say."""
    for name in (OUTPUT, "d2t"):
        if name in tensors:
            return len(tensors[name])
    return vocabulary


def _read_ids(tensors: Tensors, drafts: int, vocabulary: int) -> None:
    """d2t and t2d as they should be."""
    if "d2t" not in tensors:
        return
    d2t = tensors["d2t"] = whole("d2t", tensors["d2t"])
    if drafts == vocabulary and not bool(d2t.any()):  # every id stands for itself
        del tensors["d2t"]
        tensors.pop("t2d", None)
        return
    ids = draft_ids(d2t, vocabulary)
    mine = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    theirs = tensors.setdefault("t2d", mine)  # it says nothing that d2t doesn't
    if theirs.shape == mine.shape:
        tensors["t2d"] = theirs.bool()
        if wrong := int((tensors["t2d"] != mine).sum()):
            raise ValueError(f"t2d and d2t disagree about {wrong} tokens: one of them belongs to another head")


def _verifier(config: Json) -> str | None:
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


# ---- a Llama layer's config


def _layer_fields(config: Json, tensors: Tensors, prefix: str) -> dict[str, Any]:
    """The fields of a LayerConfig from those of a Llama's config.json, old or new."""
    heads = count(config, "num_attention_heads")
    further = {match[1] for name in tensors if (match := re.match(r"layers\.([1-9]\d*)\.", name))}
    types = [_layer_type(config, n) for n in range(1 + len(further))]
    theta, scaling = _rope(config, types)
    query = tensors.get(f"{prefix}self_attn.q_proj.weight")  # the surest witness of a head's size
    return {
        "intermediate_size": count(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": count(config, "num_key_value_heads", heads),
        "head_dim": query.shape[0] // heads if query is not None else count(config, "hidden_size") // heads,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": count(config, "max_position_embeddings", 2048),
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in tensors,
        "o_bias": f"{prefix}self_attn.o_proj.bias" in tensors,
        "qk_norm": f"{prefix}self_attn.q_norm.weight" in tensors,
        "num_hidden_layers": len(types),
        "windows": tuple(_window(config, kind) for kind in types) if SLIDING in types else (),
    }


def _layer_type(config: Json, layer: int) -> str:
    """How a layer attends. Without `layer_types` a `sliding_window` means nothing, as in vLLM and speculators."""
    types = config.get("layer_types") or ()
    kind = types[layer] if layer < len(types) else FULL
    if kind not in (FULL, SLIDING):
        raise ValueError(f"layer {layer} is of the type {kind!r}: known are {FULL} and {SLIDING}")
    return kind


def _window(config: Json, kind: str) -> int | None:
    return count(config, "sliding_window") if kind == SLIDING else None


def _rope(config: Json, types: list[str]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta, and what else there is to rotary positions. The former may stand by itself, in `rope_scaling`, or in
    `rope_parameters`; the latter may be different by layer type."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if any(isinstance(value, Mapping) for value in given.values()):
            given = _of_type(name, given, types)
        found |= given
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    share = found.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1
    if share != 1:
        raise ValueError(f"it rotates a share of {share} of each head (partial_rotary_factor): we rotate all")
    for name in ("mrope_section", "mrope_interleaved"):  # of pictures: the three positions of a token of text are one
        found.pop(name, None)
    found = {name: "default" if value == "mrope" else value for name, value in found.items()}
    kind = found.get("rope_type") or found.get("type") or "default"
    return float(theta), None if kind == "default" else found


def _of_type(name: str, given: Json, types: list[str]) -> Json:
    chosen = [given.get(kind) for kind in types]
    if len(given) == 1:
        chosen = list(given.values())
    if None in chosen or any(each != chosen[0] for each in chosen):
        raise ValueError(f"{name} differ by layer type ({', '.join(given)}), and none is that of all its layers")
    return dict(chosen[0] or {})


def _without_frequencies(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
