"""The registry: a drafter is a file in this folder, and the file's name is the drafter's name.

Other packages add drafters through entry points of the group `slipstream.drafters`, each naming a Drafter class.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from slipstream.errors import DrafterError, OptionError

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter

GROUP = "slipstream.drafters"


@cache
def names() -> tuple[str, ...]:
    """The names of all drafters, built-in ones first."""
    own = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base" and not m.name.startswith("_"))
    return tuple(dict.fromkeys(own + sorted(added())))


@cache
def added() -> dict[str, EntryPoint]:
    """Drafters of other packages. Cached, since searching the installed packages takes milliseconds."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def find(name: str) -> type[Drafter]:
    """The class that a name stands for."""
    from slipstream.drafters.base import Drafter

    if name not in names():
        raise DrafterError(f"drafter {name!r} is unknown: there are {', '.join(names())}")
    if name in added():
        found = added()[name].load()
    else:
        module = importlib.import_module(f"{__name__}.{name}")
        (found,) = (
            c
            for c in vars(module).values()
            if isinstance(c, type) and issubclass(c, Drafter) and c.__module__ == module.__name__
        )
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise DrafterError(f"the entry point {name!r} of {GROUP} names {found!r}, which is no Drafter class")
    return found


def make(name: str | Drafter, target: Any, tokenizer: Any = None, **options: Any) -> Drafter:
    """A drafter for a target. Unknown options are refused by name."""
    from dataclasses import fields

    from slipstream.drafters.base import Drafter

    if isinstance(name, Drafter):
        if options:
            raise OptionError("options belong to a drafter's name; this drafter is already made")
        return name
    kind = find(name)
    known = [f.name for f in fields(kind.Options)]
    if unknown := set(options) - set(known):
        has = f"its options are {', '.join(known)}" if known else "it has none"
        raise OptionError(f"drafter {name!r} has no option {', '.join(sorted(unknown))}: {has}")
    return kind(target, tokenizer, kind.Options(**options))
