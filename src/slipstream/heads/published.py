"""The result of reading a published checkpoint, and helpers of the readers: names, counts, draft ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.heads.base import OUTPUT, Head

Json = Mapping[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """A checkpoint that was read: its config, and its tensors by the head's own names."""

    kind: type[Head]
    config: Any
    tensors: Tensors
    borrowed: frozenset[str] = frozenset()
    spell: Callable[[str], str] = str  # a tensor's name in the file
    layout: str = ""  # its name, and who writes it
    odd: tuple[str, ...] = ()  # remarks for the user


def count(config: Json, name: str, default: Any = None) -> int:
    """A size from config.json."""
    value = config[name] if default is None else config.get(name) or default
    if type(value) is not int:
        raise ValueError(f"{name} of a head must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} of a head must be 1 or more, not {value}")
    return value


def absent(name: str, tensors: Tensors) -> frozenset[str]:
    return frozenset() if name in tensors else frozenset({name})


def whole(name: str, numbers: Tensor) -> Tensor:
    """The numbers as int64. Raise if there are fractions."""
    if numbers.is_floating_point() and not bool((numbers == numbers.floor()).all()):
        raise ValueError(f"{name} holds fractions, but its numbers lead to token ids")
    return numbers.long()


def draft_ids(d2t: Tensor, vocabulary: int) -> Tensor:
    """(V',) the token ids that these differences encode. Raise unless each is in the vocabulary and occurs once."""
    return check_ids("d2t", d2t + torch.arange(len(d2t)), vocabulary)


def check_ids(name: str, ids: Tensor, vocabulary: int) -> Tensor:
    if len(ids) and int(ids.min()) < 0:
        raise ValueError(f"{name} reaches token id {int(ids.min())}, but ids begin with 0")
    if len(ids) and int(ids.max()) >= vocabulary:
        raise ValueError(f"{name} reaches token id {int(ids.max())}, but the vocabulary has {vocabulary}")
    named, times = ids.unique(return_counts=True)
    if len(named) < len(ids):
        raise ValueError(f"{name} names token id {int(named[times.argmax()])} more than once")
    return ids


def state_number(name: str, number: Any) -> int:
    """The number of a hidden state or of a layer, checked."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{name} must be whole numbers from 0 on, not {number!r}")
    return number


def count_drafts(tensors: Tensors, vocabulary: int) -> int:
    """The size of the head's vocabulary, if config.json doesn't say."""
    for name in (OUTPUT, "d2t"):
        if name in tensors:
            return len(tensors[name])
    return vocabulary


def read_ids(tensors: Tensors, drafts: int, vocabulary: int) -> None:
    """Check d2t and t2d and complete them."""
    if "d2t" not in tensors:
        return
    d2t = tensors["d2t"] = whole("d2t", tensors["d2t"])
    if drafts == vocabulary and not bool(d2t.any()):  # the identity
        del tensors["d2t"]
        tensors.pop("t2d", None)
        return
    ids = draft_ids(d2t, vocabulary)
    mine = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    theirs = tensors.setdefault("t2d", mine)  # it is redundant
    if theirs.shape == mine.shape:
        tensors["t2d"] = theirs.bool()
        if wrong := int((tensors["t2d"] != mine).sum()):
            raise ValueError(f"t2d and d2t disagree about {wrong} tokens: one of them belongs to another head")


def verifier(config: Json) -> str | None:
    """The target's name, as `speculators` writes it."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
