"""Checkpoints of heads: load a head from a folder, save one to a folder.

Every published layout is read. Slipstream's own files have the published layout too, without the tensors that are the
target's: `config.json` names these under `slipstream`, and the target is needed to load such a head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DrafterError, OptionError
from slipstream.heads.base import EMBEDDING, OUTPUT, Head, Lender
from slipstream.heads.checkpoint import WEIGHTS, find_folder, read_config, read_tensors, write
from slipstream.heads.configs import VERSION, published_config, speculators_config, spell_speculators
from slipstream.heads.dflash import DFlash
from slipstream.heads.eagle3 import Eagle3
from slipstream.heads.medusa import Medusa
from slipstream.heads.mlp import MLPSpeculator
from slipstream.heads.published import Published, Tensors
from slipstream.heads.readers import understand
from slipstream.heads.redrafter import ReDrafter

log = logging.getLogger("slipstream")

SHOWN = 8  # names in an error, at most
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_head(source: str | Path, model: Any = None, dtype: torch.dtype | str | None = None) -> Head:
    """Load the head from a folder, or from a name on the model hub, in any layout.

    With a model (its target, a transformers causal LM) the head is checked against it, bound, and put on its device.
    dtype: by default the model's; without a model or with "auto" the file's.
    """
    folder = find_folder(source)
    config = read_config(folder)
    found = find_head(folder, config, None if model is None else Lender.of(model).vocab_size)
    if model is None:
        if found.borrowed and "slipstream" in config:
            raise DrafterError(
                f"{folder} leaves out what its target has anyway ({', '.join(sorted(found.borrowed))}): "
                f"load it with its target, {found.config.target or 'the model it was trained for'}"
            )
    else:
        found = _share_embedding(found, model)
    head = blank_head(folder, found)
    head.load_state_dict(found.tensors, assign=True)
    if dtype is None and model is not None:
        dtype = model.dtype
    elif not isinstance(dtype, torch.dtype):
        floats = (tensor.dtype for tensor in found.tensors.values() if tensor.is_floating_point())
        dtype = reduce(torch.promote_types, floats)
    head.to(dtype)
    if model is not None:
        head.to(model.get_output_embeddings().weight.device).bind(model)
    return head


def find_head(folder: Path, config: Mapping[str, Any], vocabulary: int | None) -> Published:
    """The head that a folder's files describe. vocabulary: the target's, if known."""
    try:
        return understand(folder, config, read_tensors(folder), vocabulary)
    except KeyError as error:
        raise DrafterError(f"config.json of {folder} lacks {error}, which its layout has") from error
    except (TypeError, ValueError, AttributeError, OptionError) as error:
        raise DrafterError(f"{folder} can't be understood as a head: {error}") from error


def blank_head(folder: Path, found: Published) -> Head:
    """The head without values, after a check that the files' tensors fit."""
    try:
        head = found.kind.blank(found.config, found.borrowed)
    except (KeyError, OptionError) as error:
        raise DrafterError(f"{folder} can't be understood as a head: {error}") from error
    _check(folder, head, found)
    return head


def save_head(head: Head, folder: str | Path, tied: bool = True, dtype: torch.dtype | None = None) -> None:
    """Save in slipstream's own form. tied: leave out tensors that equal the target's, often most of a head. dtype: the
    head's by default."""
    tensors, shared = head.state_dict(), set(head.borrowed)
    if not tied:
        tensors, shared = _complete(head, head.borrowed), set()
    elif head.bound:
        shared |= {
            name for name in head.lendable(head.config) if name in tensors and _is_lent(head, name, tensors[name])
        }
    about = {
        "kind": head.kind,
        "version": VERSION,
        "tied": sorted(shared),
        "target": head.config.target,
        "target_layers": head.config.target_layers,
    }
    if isinstance(head, ReDrafter) and head.config.draft_vocab_size is not None:
        about["draft_vocab_size"] = head.config.draft_vocab_size
    kept = {name: tensor for name, tensor in tensors.items() if name not in shared}
    config = {**published_config(head), "slipstream": about}
    if dtype is not None:
        kept = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in kept.items()}
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    write(Path(folder), config, kept)


def export_head(head: Head, folder: str | Path, layout: str | None = None) -> None:
    """Save in the published layout of the head's kind, complete, for other software. layout: "speculators" is an
    alternative for eagle3 and dflash, which vLLM loads."""
    tensors = _complete(head, head.borrowed - _taken(head, layout))
    if isinstance(head, ReDrafter):
        tensors.pop("d2t", None)  # unknown to others
    elif isinstance(head, MLPSpeculator) and head.config.tie_weights:  # vLLM ties all but the output matrices
        for k in range(1, head.config.n_predict):
            tensors[f"speculator.head.{k}.weight"] = tensors["speculator.head.0.weight"].clone()
    elif isinstance(head, Eagle3):
        tensors |= _output_biases(head)
    elif isinstance(head, Medusa) and head.config.blocks > 1:
        log.warning(
            "the %d blocks of each Medusa head are computed one after the other, as vLLM does it: FasterDecoding's own "
            "code repeats a single one, and would draft something else",
            head.config.blocks,
        )
    if layout is None:
        name = "medusa_lm_head.pt" if isinstance(head, Medusa) else WEIGHTS
        write(Path(folder), published_config(head), tensors, name)
    elif layout == "speculators" and isinstance(head, Eagle3 | DFlash):
        write(Path(folder), speculators_config(head), {spell_speculators(name): t for name, t in tensors.items()})
    else:
        known = '"speculators" or none' if isinstance(head, Eagle3 | DFlash) else "none: there is one"
        raise OptionError(f"layout {layout!r} of {head.kind} heads is unknown: give {known}")


def _taken(head: Head, layout: str | None) -> set[str]:
    """Tensors that other software takes from the target, so exports leave them out."""
    if isinstance(head, Eagle3):  # in both of its layouts
        return {EMBEDDING}
    if not isinstance(head, DFlash) or head.config.from_anchor or layout is not None:
        return set()
    if head.config.markov_rank is not None or head.config.confidence or head.draft_ids is not None:
        raise OptionError(
            "z-lab's layout has no place for a bias, a confidence or draft ids: export this head with layout "
            '"speculators"'
        )
    return {EMBEDDING, OUTPUT}


def _output_biases(head: Eagle3) -> Tensors:
    """Zero biases for the output projections: other software reads `attention_bias` as biases of all four projections,
    this head may have only three."""
    if not head.config.qkv_bias or head.config.o_bias:
        return {}
    names = [name for name, _ in head.named_parameters() if name.endswith("self_attn.o_proj.weight")]
    return {name.replace("weight", "bias"): torch.zeros(head.config.width, dtype=head.dtype) for name in names}


def _share_embedding(found: Published, model: Any) -> Published:
    """Borrow the embedding if the file repeats the target's, to hold it in memory once."""
    own = found.tensors.get(EMBEDDING)
    if own is None or EMBEDDING not in found.kind.lendable(found.config) or not _same(own, Lender.of(model).table()):
        return found
    rest = {name: tensor for name, tensor in found.tensors.items() if name != EMBEDDING}
    return replace(found, tensors=rest, borrowed=found.borrowed | {EMBEDDING})


def _check(folder: Path, head: Head, found: Published) -> None:
    """Raise unless the file has every tensor of the head, in the right shape, and no others."""
    wanted = {name: tuple(t.shape) for name, t in head.state_dict().items()}
    has = {name: tuple(t.shape) for name, t in found.tensors.items()}
    wrong = [
        f"{found.spell(name)} is {has[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in has and has[name] != shape
    ]
    wrong += [
        f"{found.spell(name)} holds {found.tensors[name].dtype}, not floating point"
        for name, _ in head.named_parameters()
        if name in has and found.tensors[name].dtype not in _DTYPES
    ]
    missing = sorted(found.spell(name) for name in wanted.keys() - has.keys())
    extra = sorted(found.spell(name) for name in has.keys() - wanted.keys())
    faults = []
    if missing:
        faults.append(f"lacks {_some(missing)}")
    if extra:
        faults.append(f"has {_some(extra)}, unknown to this layout")
    if wrong:
        faults.append(f"doesn't hold what its config.json says: {_some(wrong)}")
    elif broken := sorted(found.spell(name) for name, t in found.tensors.items() if not bool(t.isfinite().all())):
        faults.append(
            f"holds values in {_some(broken)} that are infinite or no numbers: fetch it again or train it anew"
        )
    if faults:
        raise DrafterError(f"{folder} looks like {head.kind}, but {'; '.join(faults)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _complete(head: Head, borrowed: Iterable[str]) -> Tensors:
    """The head's tensors, and copies of the borrowed ones."""
    lent = {name: head.lent(name).to(head.dtype, copy=True) for name in sorted(borrowed)}
    return {**head.state_dict(), **lent}


def _is_lent(head: Head, name: str, tensor: Tensor) -> bool:
    try:
        return _same(tensor, head.lent(name))
    except DrafterError:  # the target's values can't be read
        return False


def _same(mine: Tensor, its: Tensor) -> bool:
    if mine.shape != its.shape:
        return False
    wide = torch.promote_types(mine.dtype, its.dtype)
    return torch.equal(mine.to(its.device, wide), its.to(wide))
