"""A draft session that searches runs of text, shared by all retrieving drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.datastores.durable.manifest import NAME
from slipstream.datastores.durable.store import Store
from slipstream.datastores.ingest.encoding import tokenizer_fingerprint
from slipstream.datastores.live import LiveText
from slipstream.datastores.sparse.runs import Runs, token_type
from slipstream.datastores.sparse.search import SearchShape, draft
from slipstream.drafters.base import DraftSession, Proposal, Seen
from slipstream.errors import StoreError
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.targets.base import Target


class RetrievalSession(DraftSession):
    """Drafts what followed the text's last tokens in the given runs, and in the text itself if it is live."""

    def __init__(
        self, source: str, shape: SearchShape, below: Callable[[], Runs], live: LiveText | None = None
    ) -> None:
        self.source, self.shape, self._below, self._live = source, shape, below, live
        self._tail: list[int] = []
        self._within: tuple[Budget | None, SearchShape] = (None, shape)

    def observe(self, seen: Seen) -> None:
        self._tail = [*self._tail, *seen.tokens][-self.shape.longest :]
        if self._live is not None:
            self._live.extend(seen.tokens)

    def propose(self, root: int, budget: Budget) -> Proposal:
        if not budget.nodes:
            return Proposal(TokenTree.root(root))
        if self._within[0] != budget:
            nodes, length = min(budget.nodes, self.shape.nodes), min(budget.depth, self.shape.length)
            self._within = budget, replace(self.shape, nodes=nodes, length=length)
        below = self._below()
        runs = self._live.runs(below) if self._live is not None else below
        found = draft(runs, np.array([*self._tail, root], np.int32), self._within[1], self.source)
        return Proposal(found.tree)


def open_store(given: Any, target: Target, tokenizer: Any, write: bool) -> Store:
    """The store that a drafter's option names. One to be written to is created if it does not exist."""
    if isinstance(given, Store):
        check_vocabulary(given, target)
        return given
    fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer is not None else ""
    if write and not (Path(given) / NAME).exists():
        return Store.create(given, target.vocabulary, fingerprint)
    store = Store.open(given, write, fingerprint)
    try:
        check_vocabulary(store, target)
    except BaseException:
        store.close()
        raise
    return store


def close_store(store: Store | None, given: Any) -> None:
    """If it was opened by `open_store`. Its writer's lock would outlive the drafter."""
    if store is not None and not isinstance(given, Store):
        store.close()


def check_vocabulary(store: Store, target: Target) -> None:
    """Refuse a store with token ids that the model does not have, or with too few bits for the model's ids."""
    ids = store.manifest.vocabulary
    narrow = store.dtype.itemsize < token_type(target.vocabulary).itemsize
    if ids > target.vocabulary or narrow:
        bits = f" in {store.manifest.width} bits" if narrow else ""
        raise StoreError(
            f"{store.folder} holds ids up to {ids - 1}{bits}, the model knows {target.vocabulary} ids: the store was "
            "made with another tokenizer"
        )
