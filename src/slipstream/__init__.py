"""slipstream: any Hugging Face causal language model, faster, with the same answers.

Importing this loads neither torch nor transformers: they come with the first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slipstream.errors import (
    BusyError,
    ClusterError,
    ContextError,
    DrafterError,
    ModelError,
    NumericalError,
    OptionError,
    PromptError,
    SlipstreamError,
    StoreError,
)
from slipstream.version import __version__ as __version__

if TYPE_CHECKING:
    from slipstream.answers import AsyncStream, Result, Stream
    from slipstream.datastores.durable.store import Store
    from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
    from slipstream.hook import speculate
    from slipstream.llm import LLM, Chat, load
    from slipstream.loading import embedded as embedded
    from slipstream.sampling import Sampling
    from slipstream.stats import Stats
    from slipstream.tree import TokenTree

_HOMES = {
    "LLM": "llm",
    "Chat": "llm",
    "AsyncStream": "answers",
    "Result": "answers",
    "Stream": "answers",
    "load": "llm",
    "speculate": "hook",
    "Sampling": "sampling",
    "Stats": "stats",
    "TokenTree": "tree",
    "Store": "datastores.durable.store",
    "Drafter": "drafters.base",
    "DraftSession": "drafters.base",
    "Proposal": "drafters.base",
    "Seen": "drafters.base",
}

__all__ = [
    "LLM",
    "AsyncStream",
    "BusyError",
    "Chat",
    "ClusterError",
    "ContextError",
    "DraftSession",
    "Drafter",
    "DrafterError",
    "ModelError",
    "NumericalError",
    "OptionError",
    "PromptError",
    "Proposal",
    "Result",
    "Sampling",
    "Seen",
    "SlipstreamError",
    "Stats",
    "Store",
    "StoreError",
    "Stream",
    "TokenTree",
    "load",
    "speculate",
]


def __getattr__(name: str) -> Any:
    if name == "embedded":
        return importlib.import_module("slipstream.loading.embedded")
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slipstream.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "embedded"])
