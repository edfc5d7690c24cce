"""Read published checkpoints: recognise the layout of a config.json and tensors, with one reader per layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.errors import DrafterError
from slipstream.heads.block_readers import read_dflash, read_falcon, read_speculators_dflash
from slipstream.heads.configs import VERSION
from slipstream.heads.eagle_readers import read_eagle, read_eagle3, read_speculators, read_speculators_eagle
from slipstream.heads.medusa_reader import NAMES as MEDUSA
from slipstream.heads.medusa_reader import read_medusa
from slipstream.heads.mlp import MLPConfig, MLPSpeculator
from slipstream.heads.published import Json, Published, Tensors, count, draft_ids, whole
from slipstream.heads.redrafter import ReDrafter, ReDrafterConfig
from slipstream.heads.spire_reader import read_spire


def understand(folder: Path, config: Json, tensors: Tensors, vocabulary: int | None) -> Published:
    """Read a checkpoint. vocabulary: the target's, if known, for layouts that don't have it."""
    ours = config.get("slipstream")
    if ours is not None:
        kind, version = ours["kind"], ours["version"]
        if version > VERSION or kind not in _READERS:
            raise DrafterError(
                f"{folder} holds a {kind} head of version {version}, newer than this slipstream: update it"
            )
        found = _read(kind, config, tensors, vocabulary)
        about = replace(found.config, target=ours["target"], target_layers=ours["target_layers"])
        return replace(found, config=about, borrowed=frozenset(ours["tied"]), layout="slipstream's own", odd=())
    kind = _recognise(folder, config, tensors)
    if kind not in _READERS:
        raise DrafterError(f"{folder} is a {kind} head, which slipstream does not run yet")
    return _read(kind, config, tensors, vocabulary)


def _read(kind: str, config: Json, tensors: Tensors, vocabulary: int | None) -> Published:
    if kind == "medusa" and "vocab_size" not in config and vocabulary is not None:
        config = {**config, "vocab_size": vocabulary}
    return _READERS[kind](config, tensors)


def _recognise(folder: Path, config: Json, tensors: Tensors) -> str:
    """The layout: a key of _READERS, or the name of a known layout that isn't supported."""
    names = " ".join(config.get("architectures") or ())
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        return "speculators" if kind == "eagle3" else f"speculators {kind}"
    if "dflash_config" in config or names == "Qwen3DSparkModel":
        return "dflash"
    if "spire_config" in config:
        return "spire"
    if "DFlash" in names or "DSpark" in names or any(name.startswith("markov_") for name in tensors):
        return f"DFlash or DSpark ({names})"
    if "k_mask" in config or any(name.startswith("lstm.") for name in tensors):
        return "falcon"
    if any(re.match(r"mtp\.|(.*\.)?eh_proj\.", name) for name in tensors):
        return "multi-token prediction (MTP)"
    if config.get("model_type") == "recurrent_drafting_drafter":
        return "redrafter"
    if config.get("model_type") == "mlp_speculator":
        return "mlp"
    if any(re.match(MEDUSA, name) for name in tensors):
        return "medusa"
    if any(name.startswith("midlayer.") for name in tensors):
        return "eagle3"
    fc = tensors.get("fc.weight")
    if fc is not None and any(name.startswith("layers.0.") for name in tensors):
        pairs = fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]  # EAGLE-1 joins an embedding and a state
        return "eagle" if pairs and "layers.0.hidden_norm.weight" not in tensors else "eagle3"
    begin = ", ".join(sorted(tensors)[:4]) or "nothing"
    raise DrafterError(
        f"{folder} is no head that slipstream knows (EAGLE, EAGLE-3, Falcon, DFlash, SPIRe, Medusa, ReDrafter, "
        f"MLP Speculator): config.json says model_type {config.get('model_type')!r}, the weights begin with {begin}"
    )


def _read_redrafter(config: Json, tensors: Tensors) -> Published:
    likely = (config.get("slipstream") or {}).get("draft_vocab_size")  # only in slipstream's own files
    sizes = ReDrafterConfig(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        exit_dim=count(config, "exit_dim"),
        num_draft_layers=count(config, "num_draft_layers"),
        rnn=bool(config.get("rnn", False)),
        draft_vocab_size=None if likely is None else int(likely),
    )
    own = dict(tensors)
    if likely is not None and "d2t" in own:
        own["d2t"] = whole("d2t", own["d2t"])
        draft_ids(own["d2t"], sizes.vocab_size)
    return Published(ReDrafter, sizes, own, layout="ReDrafter (apple)")


def _read_mlp(config: Json, tensors: Tensors) -> Published:
    inner = config.get("inner_dim") or config["emb_dim"]
    sizes = MLPConfig(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "emb_dim"),
        inner_dim=count({"inner_dim": inner}, "inner_dim"),
        n_predict=count(config, "n_predict"),
        tie_weights=bool(config.get("tie_weights", False)),
        scale_input=bool(config.get("scale_input", False)),
    )
    bare = not any(name.startswith("speculator.") for name in tensors)
    own = {f"speculator.{name}" if bare else name: tensor for name, tensor in tensors.items()}

    def spell(name: str) -> str:
        return name.removeprefix("speculator.") if bare else name

    if sizes.tie_weights:
        own = _one_of_each(own)
    return Published(MLPSpeculator, sizes, own, spell=spell, layout="MLP Speculator (fms-extras, vLLM)")


def _one_of_each(tensors: Tensors) -> Tensors:
    """A tied tensor may be in the file under any of its names: rename it to the first. Copies that differ keep their
    own names."""
    kept: Tensors = {}
    for name in sorted(tensors):
        match = re.fullmatch(r"(speculator\.(emb|proj|head|ln)\.)(\d+)(\..+)", name)
        first = 1 if match and match[2] == "proj" else 0
        one = name if match is None or int(match[3]) < first else f"{match[1]}{first}{match[4]}"
        if one not in kept:
            kept[one] = tensors[name]
        elif not torch.equal(kept[one], tensors[name]):
            kept[name] = tensors[name]
    return kept


_READERS: dict[str, Callable[[Json, Tensors], Published]] = {
    "medusa": read_medusa,
    "redrafter": _read_redrafter,
    "mlp": _read_mlp,
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "speculators": read_speculators,
    "speculators eagle": read_speculators_eagle,
    "dflash": read_dflash,
    "speculators dflash": read_speculators_dflash,
    "speculators dspark": read_speculators_dflash,
    "falcon": read_falcon,
    "spire": read_spire,
}
