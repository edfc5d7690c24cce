"""Checks of what a user gives: wrong types are refused by the option's name."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from slipstream.errors import OptionError


def integer(name: str, value: Any, least: int | None = None, needs: str = "") -> int:
    """A whole number of any library's type, as a Python int."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise OptionError(f"{name}={value!r} is a {type(value).__name__}: it must be a whole number") from error
    if least is not None and number < least:
        raise OptionError(f"{name}={number} is out of range: it must be {needs or f'{least} or more'}")
    return number


def real(name: str, value: Any) -> float:
    """A finite number of any library's type, as a Python float. Strings are refused, even those that spell a number."""
    if not hasattr(value, "__float__"):
        raise OptionError(f"{name}={value!r} is a {type(value).__name__}: it must be a number")
    if not math.isfinite(number := float(value)):
        raise OptionError(f"{name}={number} is out of range: it must be a finite number")
    return number


def listed(name: str, value: Any, of: str) -> list[Any]:
    """The items of a list; None is an empty list. A string is refused, not taken for a list of letters."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise OptionError(f"{name}={value!r} is a {type(value).__name__}: give a list of {of}")
    return value.tolist() if hasattr(value, "tolist") else list(value)


def separated(given: str | Sequence[str]) -> list[str]:
    """The words of a list, or of a string that separates them by commas."""
    words = given.split(",") if isinstance(given, str) else given
    return [word.strip() for word in words if word.strip()]


def biases(given: Any) -> dict[int, float]:
    """A checked logit_bias: what is added to the logits of which ids. Minus infinity rules an id out."""
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"logit_bias={given!r} is a {type(given).__name__}: give a dict of ids and numbers")
    return {
        integer("logit_bias", token): value if value == -math.inf else real("logit_bias", value)
        for token, value in (given or {}).items()
    }


def seeds(seed: SupportsIndex | Sequence[SupportsIndex] | None, count: int) -> list[int]:
    """One seed per prompt, from one for all or from a list; None: fresh ones, reported in the results."""
    if seed is None:
        return [secrets.randbits(32) for _ in range(count)]
    seed = seed.tolist() if hasattr(seed, "tolist") else seed
    if not isinstance(seed, Sequence) or isinstance(seed, str | bytes):
        return [integer("seed", seed)] * count
    if len(seed) != count:
        raise OptionError(f"{len(seed)} seeds for {count} prompts: give one, or one per prompt")
    return [integer("seed", one) for one in seed]
