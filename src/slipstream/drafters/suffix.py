"""suffix: drafts what followed the last tokens earlier in this text and, if set, in earlier answers and in a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.datastores.durable.store import LEARNED
from slipstream.datastores.live import COLLECTIONS, EarlierAnswers, LiveText
from slipstream.datastores.sparse.runs import Runs, token_type
from slipstream.datastores.sparse.search import SearchShape
from slipstream.drafters._retrieval import RetrievalSession, close_store, open_store
from slipstream.drafters.base import Drafter, DraftSession
from slipstream.errors import OptionError

if TYPE_CHECKING:
    from slipstream.request import Request


@dataclass(frozen=True)
class SuffixOptions:
    shared: int = 0  # tokens of earlier answers, of the same collection, to draft from too; 0: none
    store: Any = ""  # the folder of a store to draft from too, or an open Store
    learn: bool = False  # append the model's answers to the store
    longest: int = 16  # tokens of context that are matched at most
    shortest: int = 1  # and at least
    matches: int = 512  # continuations to use at most; if there are more, evenly spread ones
    length: int = 10  # tokens of each
    nodes: int = 64  # of the tree, as far as the budget allows
    fill: bool = True  # whether shorter matches fill what the longest ones leave

    def __post_init__(self) -> None:
        if self.shared < 0:
            raise OptionError(f"shared={self.shared} is out of range: it is a number of tokens, 0 for none")
        if self.learn and not self.store:
            raise OptionError("learn=True needs a store=… to append to")
        self.shape()

    def shape(self) -> SearchShape:
        return SearchShape(self.longest, self.shortest, self.matches, self.length, self.nodes, self.fill)


class Suffix(Drafter):
    """Continuations of the longest earlier matches of the text's last tokens, above all in the same text."""

    Options = SuffixOptions

    def __init__(self, target: Any, tokenizer: Any, options: SuffixOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.shared, self.shape = options.shared, options.shape()
        self.store = open_store(options.store, target, tokenizer, options.learn) if options.store else None
        self.dtype = self.store.dtype if self.store is not None else token_type(target.vocabulary)
        self._answers: EarlierAnswers | None = None
        self._joined: dict[str, tuple[Runs, Runs, Runs]] = {}

    def attach(self, answers: EarlierAnswers) -> None:
        self._answers = answers

    def release(self) -> None:
        close_store(self.store, self.options.store)

    def begin(self, request: Request) -> DraftSession:
        if self.store is not None:
            self.store.refresh()
        return RetrievalSession("suffix", self.shape, partial(self._below, request.collection), LiveText(self.dtype))

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        if self.options.learn and self.store is not None:
            self.store.append(tokens, LEARNED, request.collection)

    def _below(self, collection: str) -> Runs:
        """The runs of earlier answers and of the store, joined; the same object until either changes."""
        answers = self._answers.runs(collection) if self._answers is not None else NOTHING
        store = self.store.runs(collection) if self.store is not None else NOTHING
        known = self._joined.get(collection)
        if known is None or known[0] is not answers or known[1] is not store:
            if len(self._joined) >= COLLECTIONS and known is None:
                self._joined.pop(next(iter(self._joined)), None)
            self._joined[collection] = known = (answers, store, Runs((*store.runs, *answers.runs), self.dtype))
        return known[2]


NOTHING = Runs(())
