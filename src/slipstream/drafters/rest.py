"""rest: retrieval from a datastore. Drafts what followed the text's last tokens in stored documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.datastores.durable.store import LEARNED
from slipstream.datastores.sparse.search import SearchShape
from slipstream.drafters._retrieval import RetrievalSession, close_store, open_store
from slipstream.drafters.base import Drafter, DraftSession
from slipstream.errors import OptionError

if TYPE_CHECKING:
    from slipstream.request import Request


@dataclass(frozen=True)
class RestOptions:
    store: Any = ""  # the folder of a store, as `slipstream store build` makes it, or an open Store
    learn: bool = False  # append the model's answers to the store
    longest: int = 16  # tokens of context that are matched at most
    shortest: int = 1  # and at least
    matches: int = 40  # continuations to use at most; if there are more, evenly spread ones
    length: int = 10  # tokens of each
    nodes: int = 64  # of the tree, as far as the budget allows
    fill: bool = True  # whether shorter matches fill what the longest ones leave
    random: bool = False  # draft continuations chosen at random instead of the most frequent (the paper's ablation)

    def __post_init__(self) -> None:
        if not self.store:
            raise OptionError(
                "rest drafts from a datastore: give its folder as store=…; `slipstream store build SOURCES… --out "
                "FOLDER` makes one"
            )
        self.shape()

    def shape(self) -> SearchShape:
        return SearchShape(
            self.longest, self.shortest, self.matches, self.length, self.nodes, self.fill, random=self.random
        )


class Rest(Drafter):
    """Continuations of the longest matches of the text's last tokens in a datastore."""

    Options = RestOptions

    def __init__(self, target: Any, tokenizer: Any, options: RestOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.store = open_store(options.store, target, tokenizer, options.learn)
        self.shape = options.shape()
        self.source = "rest"  # its name in trees and statistics

    def release(self) -> None:
        close_store(self.store, self.options.store)

    def begin(self, request: Request) -> DraftSession:
        self.store.refresh()
        return RetrievalSession(self.source, self.shape, partial(self.store.runs, request.collection))

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        if self.options.learn:
            self.store.append(tokens, LEARNED, request.collection)
