"""A drafter of known quality: it has all answers, and each of its tokens is right with a given probability. It is added
like a drafter of another package."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream import drafters
from slipstream.budget import Budget
from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.request import Request
from slipstream.tree import TokenTree

NAME = "replayed"


class Replayed(Drafter):
    """What the model is known to say, right token by token with a probability."""

    right = 1.0
    answers: Mapping[tuple[int, ...], Sequence[int]] = {}  # by prompt

    def know(self, answers: Mapping[tuple[int, ...], Sequence[int]], right: float) -> None:
        self.answers, self.right = answers, right

    def begin(self, request: Request) -> DraftSession:
        prompt = tuple(request.tokens)
        answer = np.array(self.answers.get(prompt, [0] * request.max_new_tokens), np.int32)
        # A place is right or wrong by itself: the same in each repeat, and for every length of drafts.
        wrong = np.random.default_rng(prompt).random(len(answer)) >= self.right
        return ReplayedSession(np.where(wrong, (answer + 1) % self.target.vocabulary, answer), len(prompt), self.right)


class ReplayedSession(DraftSession):
    def __init__(self, says: NDArray[np.int32], prompt: int, right: float) -> None:
        self.says, self.prompt, self.right = says, prompt, right
        self.known = 0  # tokens of the text, the root not among them

    def observe(self, seen: Seen) -> None:
        self.known = seen.position + len(seen.tokens)

    def propose(self, root: int, budget: Budget) -> Proposal:
        place = self.known - self.prompt + 1
        tokens = self.says[place : place + min(budget.nodes, budget.depth)]
        return Proposal(TokenTree.chain(root, tokens, source=NAME, raw=[self.right] * len(tokens)))


def register() -> None:
    """As an installed package would be."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / f"{NAME}-1.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
        (package / "entry_points.txt").write_text(f"[{drafters.GROUP}]\n{NAME} = {__name__}:{Replayed.__name__}\n")
        sys.path.append(folder)
        drafters.added.cache_clear()
        drafters.names.cache_clear()
        drafters.added()  # which it is kept in
        sys.path.remove(folder)
