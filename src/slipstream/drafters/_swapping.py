"""Replaces a head by another of the same kind and shape while answers are running.

The weights are copied in place, so that captured drafts use them. Texts don't change, since drafts are verified.
Running answers keep the keys that the old head computed, and draft from both heads' keys until they end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.drafters._head import HeadDrafter
from slipstream.drafters._joint import JointDrafter
from slipstream.drafters.base import Drafter
from slipstream.errors import DrafterError
from slipstream.heads import Head
from slipstream.heads.registry import entries, heads_for, shipped


@dataclass(frozen=True)
class Reloaded:
    """The result of reloading heads, by name."""

    swapped: dict[str, str] = field(default_factory=dict)  # the new head's folder
    refused: dict[str, str] = field(default_factory=dict)  # why a new head was not taken


def heads_of(drafter: Drafter) -> dict[str, HeadDrafter]:
    """The parts that draft with a head, by the names that `auto` has for them."""
    if isinstance(drafter, HeadDrafter):
        return {drafter.source: drafter}
    parts = drafter.parts if isinstance(drafter, JointDrafter) else {}
    return {name: part for name, part in parts.items() if isinstance(part, HeadDrafter)}


def choose(running: Mapping[str, HeadDrafter], new: Head, name: str | None) -> str:
    """The name of the head to replace: the only one of the new head's kind, unless a name is given."""
    names = ", ".join(running) or "none"
    if name is not None and name not in running:
        raise DrafterError(f"no head is called {name!r} here: there is {names}")
    same = [each for each, part in running.items() if part.kind == new.kind and name in (None, each)]
    if not same:
        whose = names if name is None else f"{name} is {running[name].kind}"
        raise DrafterError(f"a head of the kind {new.kind} can't take the place of another kind: here {whose} drafts")
    if len(same) > 1:
        raise DrafterError(f"several {new.kind} heads draft here, {', '.join(same)}: say in whose place it comes")
    return same[0]


def check_alike(old: Head, new: Head) -> None:
    """Refuse a head of another shape, naming what differs."""
    before, now = (asdict(replace(head.config, target=None)) for head in (old, new))
    different = [f"{name} is {now[name]}, not {before[name]}" for name in before if before[name] != now[name]]
    for tied, head, other in (("borrows", new, old), ("has its own", old, new)):
        if more := sorted(head.borrowed - other.borrowed):
            different.append(f"it {tied} {', '.join(more)}")
    if different:
        raise DrafterError(
            f"this {new.kind} head has another shape than the one that drafts: {'; '.join(different)}. Use it from a "
            "new start on"
        )


def on_record() -> set[Path]:
    """The folders of all heads that are registered, for any model, or come with slipstream."""
    return {Path(entry.folder).resolve() for entry in entries()} | {folder.resolve() for _, folder in shipped()}


def replaced(model: Any, running: Mapping[str, HeadDrafter], before: Collection[Path]) -> dict[str, Path]:
    """Names of heads to be replaced, and the folders of their successors. A new start would use the first registered
    heads of each kind, as many as run now: these replace running heads that are not among them. before: the heads
    `on_record` when these were loaded. One that the user named is replaced only by one that was registered since."""
    wanted: dict[str, list[Path]] = {}
    for kind, folder in heads_for(model):
        wanted.setdefault(kind, []).append(folder)
    found: dict[str, Path] = {}
    for kind in {part.kind for part in running.values()}:
        mine = {name: part.folder for name, part in running.items() if part.kind == kind and part.folder is not None}
        first = wanted.get(kind, [])[: len(mine)]
        leaving = [name for name, folder in mine.items() if folder.resolve() not in [each.resolve() for each in first]]
        stay = [folder.resolve() for folder in mine.values()]
        coming = [each for each in first if each.resolve() not in stay]
        for name in leaving:
            older = before if running[name].named else ()
            if successor := next((each for each in coming if each.resolve() not in older), None):
                coming.remove(successor)
                found[name] = successor
    return found
