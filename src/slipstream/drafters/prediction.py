"""prediction: drafts from the output that a request expects, as in editing. Finds its place again after a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.tree import TokenTree, fuse

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request

Tokens = NDArray[np.int32]

# The agreement of a place is the number of tokens before it that equal the text's last tokens.
LONGEST = 16  # agreement is counted up to this
SURE = 3  # agreement from which on the text is taken to be back on the prediction
FIRM = 8  # agreement from which on no other places are drafted
REACH = 8  # tokens drafted from other places
CANDIDATES = 3  # other places at most

# A node's raw score, by agreement. It only has to tell cases apart: `Calibration` measures what they are worth.
BELIEF = (1 - 0.7 * np.exp(-np.arange(LONGEST + 1) / 3)).astype(np.float32)


class PredictionDrafter(Drafter):
    """The output that the request's `prediction` expects, as when a document is edited."""

    takes = ("prediction",)

    def begin(self, request: Request) -> DraftSession:
        return PredictionSession(request)


class PredictionSession(DraftSession):
    """A cursor into the prediction.

    After the text has left the prediction, the cursor continues where the text's last tokens agree with it, wherever
    that is: further on after a deletion, at the same place after an insertion, in between after a replacement. Of
    places with equal agreement the one nearest to where the text left is taken, since a paragraph may occur several
    times.
    """

    def __init__(self, request: Request) -> None:
        self._expected = np.array(request.prediction or (), np.int32)
        self._start = len(request.tokens)
        self._text = np.empty(256, np.int32)  # the output, with room for the root after it
        self._length = 0
        self._read = 0  # tokens of the output, roots included, that the cursor has followed
        self._cursor = 0  # the place of the token expected next; -1: unknown
        self._agreed = LONGEST  # agreement at the cursor; at the beginning it counts as full
        self._home, self._gone = 0, 0  # the last place with firm agreement, and tokens emitted since

    def observe(self, seen: Seen) -> None:
        if seen.position < self._start:
            return  # the prompt
        end = self._length + len(seen.tokens)
        if end + 1 > len(self._text):
            self._text = np.resize(self._text, 2 * end + 2)
        self._text[self._length : end] = seen.tokens
        self._length = end

    def propose(self, root: int, budget: Budget) -> Proposal:
        if not budget.nodes or not len(self._expected):
            return Proposal(TokenTree.root(root))
        self._text[self._length] = root
        text = self._text[: self._length + 1]
        self._cursor, self._agreed, self._home, self._gone = _follow(
            self._expected, text[self._read :], self._cursor, self._agreed, self._home, self._gone
        )
        self._read = len(text)
        if self._agreed >= FIRM:
            return Proposal(self._chain(root, self._cursor, self._agreed, min(budget.depth, budget.nodes)))
        return Proposal(self._search(root, text, budget).top_k(budget.nodes))

    def _search(self, root: int, text: Tokens, budget: Budget) -> TokenTree:
        """The text has left the prediction: draft from all places where it may be now; only the best has no limit."""
        places, agreed = _agreeing(self._expected, text, self._home, self._home + self._gone, CANDIDATES)
        found = dict(zip(places.tolist(), agreed.tolist(), strict=True))
        if self._cursor < 0 and len(places) and agreed[0] >= SURE:
            self._cursor, self._agreed = int(places[0]), int(agreed[0])
        # The tokens since then may be an insertion, or a replacement of equally many tokens.
        for place in (self._home, self._home + self._gone):
            found.setdefault(min(place, len(self._expected)), 0)
        chains = [self._chain(root, place, n, min(REACH, budget.depth)) for place, n in found.items()]
        if self._cursor >= 0:
            chains.append(self._chain(root, self._cursor, self._agreed, budget.depth))
        return fuse(chains)

    def _chain(self, root: int, place: int, agreed: int, length: int) -> TokenTree:
        tokens = self._expected[place : place + length]
        raw = BELIEF[np.minimum(agreed + np.arange(len(tokens)), LONGEST)]
        return TokenTree.chain(root, tokens, source="prediction", raw=raw.tolist())


@compiled
def _follow(expected, tokens, cursor, agreed, home, gone):  # type: ignore[no-untyped-def]
    """Move on by these tokens. Returns cursor, agreement, the last place with firm agreement, and tokens since."""
    for token in tokens:
        if 0 <= cursor < len(expected) and expected[cursor] == token:
            cursor, agreed = cursor + 1, min(LONGEST, agreed + 1)
        else:
            cursor, agreed = -1, 0
        gone += 1
        if agreed >= FIRM:
            home, gone = cursor, 0
    return cursor, agreed, home, gone


@compiled
def _agreeing(expected, text, near, far, most):  # type: ignore[no-untyped-def]
    """Up to `most` places in the prediction with the longest agreement, best first; among equals the nearest to the
    range near..far comes first. Returns the places and their agreements."""
    places = np.full(most, -1, np.int64)
    lengths = np.zeros(most, np.int64)
    away = np.zeros(most, np.int64)
    last = len(text) - 1
    for place in range(1, len(expected)):  # after the last token nothing is left to draft
        if expected[place - 1] != text[last]:
            continue
        n = 1
        while n < LONGEST and n < place and n <= last and expected[place - 1 - n] == text[last - n]:
            n += 1
        distance = max(0, near - place, place - far)
        i = most
        while i > 0 and (lengths[i - 1] < n or (lengths[i - 1] == n and away[i - 1] > distance)):
            i -= 1
        if i == most:
            continue
        for j in range(most - 1, i, -1):
            places[j], lengths[j], away[j] = places[j - 1], lengths[j - 1], away[j - 1]
        places[i], lengths[i], away[i] = place, n, distance
    found = np.sum(lengths > 0)
    return places[:found], lengths[:found]
