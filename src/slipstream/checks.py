"""Checks of numbers and lists that a user gives: wrong types are refused by the option's name."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

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
