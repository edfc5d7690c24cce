"""pld: prompt lookup. Drafts what followed the last few tokens earlier in the same text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.compiled import compiled
from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.errors import OptionError
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request


@dataclass(frozen=True)
class PromptLookupOptions:
    max_ngram: int = 8  # longest run of last tokens to look for
    min_ngram: int = 2  # shortest: shorter matches cost more checks than they save
    candidates: int = 3  # continuations drafted as one tree
    length: int = 10  # tokens of each

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise OptionError(f"pld needs 1 <= min_ngram <= max_ngram, found {self.min_ngram} and {self.max_ngram}")
        if self.candidates < 1 or self.length < 1:
            raise OptionError(f"pld needs at least one candidate of at least one token, found {self}")


class PromptLookup(Drafter):
    """Continuations of the longest earlier occurrences of the text's last tokens."""

    Options = PromptLookupOptions

    def begin(self, request: Request) -> DraftSession:  # noqa: ARG002
        return PromptLookupSession(self.options)


class PromptLookupSession(DraftSession):
    def __init__(self, options: PromptLookupOptions) -> None:
        self.options = options
        self._text = np.empty(1024, np.int32)
        self._length = 0

    def observe(self, seen: Seen) -> None:
        end = self._length + len(seen.tokens)
        if end + 1 > len(self._text):  # one place is kept for the root
            self._text = np.resize(self._text, 2 * end + 2)
        self._text[self._length : end] = seen.tokens
        self._length = end

    def propose(self, root: int, budget: Budget) -> Proposal:
        o = self.options
        self._text[self._length] = root
        text = self._text[: self._length + 1]
        ends, lengths = _suffix_matches(text, o.min_ngram, o.max_ngram, o.candidates)
        reach = min(o.length, budget.depth)
        continuations = [text[end + 1 : end + 1 + reach] for end in ends]
        # A longer match weighs more; of equally long ones the most recent comes first.
        tree = TokenTree.from_continuations(root, continuations, weights=[2.0**n for n in lengths], source="pld")
        return Proposal(tree.top_k(budget.nodes))


@compiled
def _suffix_matches(text, shortest, longest, most):  # type: ignore[no-untyped-def]
    """Up to `most` earlier places where the last tokens of `text` occur, given by the end of each match. The longest
    matches come first, and among equals the most recent."""
    ends = np.full(most, -1, np.int64)
    lengths = np.zeros(most, np.int64)
    last = len(text) - 1
    for end in range(last - 1, -1, -1):
        if text[end] != text[last]:
            continue
        n = 1
        while n < longest and n <= end and text[end - n] == text[last - n]:
            n += 1
        if n < shortest or n <= lengths[most - 1]:
            continue
        place = most - 1
        while place > 0 and lengths[place - 1] < n:
            ends[place], lengths[place] = ends[place - 1], lengths[place - 1]
            place -= 1
        ends[place], lengths[place] = end, n
        if lengths[most - 1] == longest:
            break
    found = np.sum(lengths > 0)
    return ends[:found], lengths[:found]
