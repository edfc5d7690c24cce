"""From the config.json and tensors of a published checkpoint to the head they describe: one reader per layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DrafterError
from slipstream.heads.base import Head
from slipstream.heads.configs import VERSION, spell_speculators
from slipstream.heads.eagle import Eagle, EagleConfig
from slipstream.heads.eagle3 import Eagle3, Eagle3Config
from slipstream.heads.medusa import Medusa, MedusaConfig
from slipstream.heads.mlp import MLPConfig, MLPSpeculator
from slipstream.heads.redrafter import ReDrafter, ReDrafterConfig

EMBEDDING = "embed_tokens.weight"

Json = Mapping[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """A checkpoint as understood: tensors by the head's own names."""

    kind: type[Head]
    config: Any
    tensors: Tensors
    borrowed: frozenset[str] = frozenset()
    spell: Callable[[str], str] = str  # a tensor's name in the file


def understand(folder: Path, config: Json, tensors: Tensors) -> Found:
    ours = config.get("slipstream")
    if ours is not None:
        kind, version = ours["kind"], ours["version"]
        if version > VERSION or kind not in _READERS:
            raise DrafterError(
                f"{folder} holds a {kind} head of version {version}, newer than this slipstream: update it"
            )
        found = _READERS[kind](config, tensors)
        about = replace(found.config, target=ours["target"], target_layers=ours["target_layers"])
        return replace(found, config=about, borrowed=frozenset(ours["tied"]))
    kind = _recognise(folder, config, tensors)
    if kind not in _READERS:
        raise DrafterError(f"{folder} is a {kind} head, which slipstream does not run yet")
    return _READERS[kind](config, tensors)


def _recognise(folder: Path, config: Json, tensors: Tensors) -> str:
    """The layout: one of _READERS, or the name of one that we know of and can't run."""
    names = " ".join(config.get("architectures") or ())
    if "dflash_config" in config or "DFlash" in names or config.get("speculators_model_type") == "dflash":
        return "DFlash"
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        return "speculators" if kind == "eagle3" else f"speculators {kind}"
    if "k_mask" in config or any(name.startswith("lstm.") for name in tensors):
        return "Falcon"
    if config.get("model_type") == "recurrent_drafting_drafter":
        return "redrafter"
    if config.get("model_type") == "mlp_speculator":
        return "mlp"
    if any(re.match(r"(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.", name) for name in tensors):
        return "medusa"
    if any(name.startswith("midlayer.") for name in tensors):
        return "eagle3"
    if "fc.weight" in tensors and any(name.startswith("layers.0.") for name in tensors):
        return "eagle"
    begin = ", ".join(sorted(tensors)[:4]) or "nothing"
    raise DrafterError(
        f"{folder} is no head that slipstream knows (EAGLE, EAGLE-3, Medusa, ReDrafter, MLP Speculator): "
        f"config.json says model_type {config.get('model_type')!r}, the weights begin with {begin}"
    )


def _read_medusa(config: Json, tensors: Tensors) -> Found:
    """The files say how many heads there are; published configs don't always."""
    vllm = any(name.startswith("blocks.") for name in tensors)
    block = r"blocks\.(\d+)\.layers\.(\d+)\.weight" if vllm else r"(\d+)\.(\d+)\.linear\.weight"
    output = r"lm_heads\.(\d+)\.weight" if vllm else r"(\d+)\.\d+\.weight"
    blocks = [m for name in tensors if (m := re.fullmatch(block, name))]
    outputs = [m for name in tensors if (m := re.fullmatch(output, name))]
    if not blocks:
        raise ValueError("a Medusa head must hold residual blocks, but its file has none")
    depth = len({m[2] for m in blocks})
    size, dtype = tensors[blocks[0].string].shape[0], tensors[blocks[0].string].dtype

    def spell(name: str) -> str:
        match = re.fullmatch(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)", name)
        if not vllm or match is None:
            return name
        head, part, what = match.groups()
        return f"lm_heads.{head}.weight" if int(part) == depth else f"blocks.{head}.layers.{part}.{what}"

    sizes = MedusaConfig(
        vocab_size=tensors[outputs[0].string].shape[0] if outputs else int(config["vocab_size"]),
        hidden_size=size,
        target=config.get("base_model_name_or_path"),
        heads=len({m[1] for m in blocks + outputs}),
        blocks=depth,
    )
    named = {spell(name): name for name in Medusa.blank(sizes).state_dict()}
    own = {named.get(name, name): tensor for name, tensor in tensors.items()}
    if vllm and not any(name.endswith(".bias") for name in tensors):  # there a bias is optional
        own |= {name: torch.zeros(size, dtype=dtype) for name in named.values() if name.endswith(".bias")}
    return Found(Medusa, sizes, own, spell=spell)


def _read_redrafter(config: Json, tensors: Tensors) -> Found:
    likely = (config.get("slipstream") or {}).get("draft_vocab_size")  # published heads have no such thing
    sizes = ReDrafterConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        exit_dim=int(config["exit_dim"]),
        num_draft_layers=int(config["num_draft_layers"]),
        rnn=bool(config.get("rnn", False)),
        draft_vocab_size=None if likely is None else int(likely),
    )
    own = dict(tensors)
    if likely is not None and "d2t" in own:
        own["d2t"] = own["d2t"].long()
        _draft_ids(own["d2t"], sizes.vocab_size)
    return Found(ReDrafter, sizes, own)


def _read_mlp(config: Json, tensors: Tensors) -> Found:
    sizes = MLPConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["emb_dim"]),
        inner_dim=int(config["inner_dim"]) or int(config["emb_dim"]),
        n_predict=int(config["n_predict"]),
        tie_weights=bool(config.get("tie_weights", False)),
        scale_input=bool(config.get("scale_input", False)),
    )
    if sizes.tie_weights:  # files may repeat what is one tensor
        tensors = {name: t for name, t in tensors.items() if not _repeats(name, t, tensors)}
    return Found(MLPSpeculator, sizes, tensors)


def _repeats(name: str, tensor: Tensor, tensors: Tensors) -> bool:
    match = re.fullmatch(r"(speculator\.(emb|proj|head|ln)\.)(\d+)(\..+)", name)
    if match is None:
        return False
    first = 1 if match[2] == "proj" else 0
    one = tensors.get(f"{match[1]}{first}{match[4]}")
    return int(match[3]) > first and one is not None and torch.equal(one, tensor)


def _read_eagle(config: Json, tensors: Tensors) -> Found:
    sizes = EagleConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        bias=bool(config.get("bias", "fc.bias" in tensors)),
        **_layer_fields(config, tensors, "layers.0."),
    )
    return Found(Eagle, sizes, _without_frequencies(tensors), _absent_embedding(tensors))


def _read_eagle3(config: Json, tensors: Tensors) -> Found:
    return _eagle3(config, config, tensors, config.get("eagle_config") or config)


def _read_speculators(config: Json, tensors: Tensors) -> Found:
    """The layer's sizes stand apart, and the layer is called layers.0."""
    own = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    found = _eagle3(config, config["transformer_layer_config"], own, config)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return replace(found, config=replace(found.config, target=verifier.get("name_or_path")), spell=spell_speculators)


def _eagle3(config: Json, layer: Json, tensors: Tensors, read: Json) -> Found:
    width, vocabulary = int(layer["hidden_size"]), int(layer["vocab_size"])
    target = config.get("target_hidden_size")
    aux = read.get("eagle_aux_hidden_state_layer_ids")
    if aux is not None and len(aux) != 3:
        raise ValueError(f"an EAGLE-3 head reads three hidden states, not {aux}")
    sizes = Eagle3Config(
        vocab_size=vocabulary,
        hidden_size=width if target is None else int(target),
        width=width,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocabulary),
        aux_layers=None if aux is None else (int(aux[0]), int(aux[1]), int(aux[2])),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in tensors,
        **_layer_fields(layer, tensors, "midlayer."),
    )
    own = _without_frequencies(tensors)
    d2t = own.get("d2t")
    if sizes.draft_vocab_size == vocabulary and d2t is not None and not bool(d2t.any()):
        own = {name: t for name, t in own.items() if name not in ("d2t", "t2d")}  # every id stands for itself
    elif d2t is not None:
        own["d2t"] = d2t.long()
        ids = _draft_ids(own["d2t"], vocabulary)
        if "t2d" not in own:  # says nothing that d2t doesn't
            own["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    borrowed = _absent_embedding(tensors) if width == sizes.hidden_size else frozenset()
    return Found(Eagle3, sizes, own, borrowed)


def _draft_ids(d2t: Tensor, vocabulary: int) -> Tensor:
    """(V',) the ids that these differences stand for, all of them within the vocabulary."""
    ids = d2t + torch.arange(len(d2t))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ValueError(f"d2t reaches token id {int(ids.max())}, but the vocabulary has {vocabulary}")
    return ids


def _layer_fields(config: Json, tensors: Tensors, prefix: str) -> dict[str, Any]:
    """The fields of a LayerConfig from those of a Llama's config.json, old or new."""
    heads = int(config["num_attention_heads"])
    rope = dict(config.get("rope_parameters") or {})
    theta = config.get("rope_theta") or rope.pop("rope_theta", None) or 10000.0
    query = tensors.get(f"{prefix}self_attn.q_proj.weight")  # the surest witness of a head's size
    return {
        "intermediate_size": int(config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": query.shape[0] // heads if query is not None else int(config["hidden_size"]) // heads,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_theta": float(theta),
        "rope_scaling": config.get("rope_scaling") or rope or None,
        "max_position_embeddings": int(config.get("max_position_embeddings") or 2048),
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in tensors,
    }


def _absent_embedding(tensors: Tensors) -> frozenset[str]:
    return frozenset() if EMBEDDING in tensors else frozenset({EMBEDDING})


def _without_frequencies(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


_READERS: dict[str, Callable[[Json, Tensors], Found]] = {
    "medusa": _read_medusa,
    "redrafter": _read_redrafter,
    "mlp": _read_mlp,
    "eagle": _read_eagle,
    "eagle3": _read_eagle3,
    "speculators": _read_speculators,
}
