"""The proposer's options. vLLM gives a proposer nothing but its own configuration, so they are in that, in the
environment, or in a file that either of these names."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slipstream.checks import integer
from slipstream.errors import OptionError

VARIABLE = "SLIPSTREAM_VLLM"
KEY = "slipstream"  # in vLLM's additional_config


@dataclass(frozen=True)
class ProposerOptions:
    stores: str | Sequence[str] = ()  # folders of stores, as `slipstream store build` makes them
    shared: int = 1_000_000  # tokens of earlier answers to draft from too; 0: none
    length: int = 0  # tokens of a draft at most; 0: num_speculative_tokens
    nodes: int = 32  # of a search's tree at most; its best chain is drafted

    def __post_init__(self) -> None:
        for name, least in (("shared", 0), ("length", 0), ("nodes", 1)):
            integer(name, getattr(self, name), least)

    @property
    def folders(self) -> list[str]:
        return [self.stores] if isinstance(self.stores, str) else list(self.stores)


def read_options(additional: Any = None) -> ProposerOptions:
    """From vLLM's additional_config, {"slipstream": …}, or else from the environment variable SLIPSTREAM_VLLM. Either
    is a JSON object, or the path of a file that holds one."""
    given = additional.get(KEY) if isinstance(additional, dict) else None
    where = f"additional_config[{KEY!r}]"
    if given is None:
        given, where = os.environ.get(VARIABLE, ""), VARIABLE
    if isinstance(given, str) and given:
        given = _parse(given, where)
    found = given or {}
    if not isinstance(found, dict):
        raise OptionError(f"{where} must be a JSON object or the path of a file with one, found {found!r}")
    known = [field.name for field in fields(ProposerOptions)]
    if unknown := sorted(found.keys() - set(known)):
        raise OptionError(f"{where} has unknown options {', '.join(unknown)}: there are {', '.join(known)}")
    return ProposerOptions(**found)


def _parse(given: str, where: str) -> Any:
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{where} names the file {given}, which can't be read: {error}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{where} holds no JSON: {error}") from error
