"""The parts of `auto`: drafters by name, the model's heads, a draft model, and those that search a store."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import drafters as registry
from slipstream.checks import separated
from slipstream.datastores.dense import vector_manifest as dense
from slipstream.drafters import _capabilities as can
from slipstream.drafters._head import HeadDrafter
from slipstream.drafters._joint import JointDrafter
from slipstream.drafters.base import Drafter
from slipstream.errors import DamagedError, DrafterError, OptionError, StoreError
from slipstream.heads import Head
from slipstream.heads.check import check_head
from slipstream.heads.registry import heads_for

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class AutoOptions:
    drafters: str = ""  # names, separated by commas; empty: suffix, lookahead, heads, and those that search the store
    heads: Any = ()  # folders of trained heads, separated by commas; empty: those registered for the model, or shipped
    draft_model: Any = None  # a smaller model with the same vocabulary, to be asked like a head
    store: Any = ""  # a store to draft from too: rest searches its text, and dresd its vectors where it has any
    learn: bool = False  # append the model's answers to the store
    shared: int = 0  # tokens of earlier answers to draft from too

    def __post_init__(self) -> None:
        for name in self.names():
            if issubclass(registry.find(name), JointDrafter):
                raise OptionError(f"{name} asks others: leave it out of drafters=…")

    def names(self) -> list[str]:
        return listed(self.drafters)


def make_parts(auto: JointDrafter) -> dict[str, Drafter]:
    """The parts, by name. If one can't be made, the others let go of their stores and memory."""
    parts: dict[str, Drafter] = {}
    try:
        for name, part in _made(auto):
            parts[name] = part
    except BaseException:
        for part in parts.values():
            can.release(part)
        raise
    return parts


def _made(auto: JointDrafter) -> Iterator[tuple[str, Drafter]]:
    """Searching a store takes longer than searching the text so far, so `rest` does the one and `suffix` the other;
    only without `rest` does `suffix` search both."""
    o = auto.options
    windows = auto.target.trees and getattr(auto.target, "model", None) is not None  # a recording can't score windows
    names = o.names() or ["suffix", *(["lookahead"] if windows else []), *(["rest"] if o.store else [])]
    given: dict[str, Any] = {"store": o.store, "shared": o.shared, "learn": o.learn}
    for name in names:
        alone = {"shared": o.shared} if name == "suffix" and "rest" in names else given
        yield name, auto.make_part(name, alone)
    for name, options in models(auto):
        try:
            part = registry.make(name.partition("-")[0], auto.target, auto.tokenizer, **options)
        except DrafterError as error:
            if o.heads or o.draft_model:
                raise
            log.warning("auto does without %s: %s", name, error)  # found by itself, not asked for by name
            continue
        if isinstance(part, HeadDrafter):
            part.source, part.named = name, bool(o.heads)
        yield name, part
    if not o.names() and has_vectors(o.store):
        try:
            yield "dresd", auto.make_part("dresd", given)
        except DamagedError:
            raise
        except (DrafterError, StoreError) as error:  # not asked for by name
            log.debug("auto does without dresd: %s", error)
    yield "prediction", registry.make("prediction", auto.target, auto.tokenizer)


def models(auto: JointDrafter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Heads and the draft model with their options, by the names that the option `drafters` uses: eagle3, eagle3-2, …,
    model."""
    o, model = auto.options, getattr(auto.target, "model", None)
    heads: list[tuple[str, Any]] = []
    if given := listed(o.heads):
        heads = [(check_head(head).kind if not isinstance(head, Head) else head.kind, head) for head in given]
    elif model is not None and not o.names() and model.get_output_embeddings() is not None:
        heads = [*heads_for(model)]
    kinds = Counter[str]()
    for kind, head in heads:
        kinds[kind] += 1
        yield kind if kinds[kind] == 1 else f"{kind}-{kinds[kind]}", {"drafter_path": head}
    if o.draft_model:
        yield "model", {"draft_model": o.draft_model}


def paths(options: AutoOptions) -> list[str]:
    """The paths of heads and of the draft model, where these are files."""
    return [str(each) for each in (*listed(options.heads), options.draft_model) if isinstance(each, str | Path)]


def listed(given: Any) -> list[Any]:
    """A list, from a list, from a single item, or from a string that separates items by commas."""
    if isinstance(given, str):
        return separated(given)
    return [given] if isinstance(given, Path | Head) else list(given)


def has_vectors(store: Any) -> bool:
    """Whether a store, open or given as a folder, has the vectors that `slipstream store embed` makes."""
    return bool(store) and (Path(getattr(store, "folder", store)) / dense.FOLDER / dense.NAME).exists()
