"""none: drafts nothing. Plain decoding, one token per step: what every speed-up is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.drafters.base import Drafter, DraftSession, Proposal
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    def begin(self, request: Request) -> DraftSession:  # noqa: ARG002
        return NoSession()


class NoSession(DraftSession):
    def propose(self, root: int, budget: Budget) -> Proposal:  # noqa: ARG002
        return Proposal(TokenTree.root(root))
