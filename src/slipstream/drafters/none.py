"""none: drafts nothing. Plain decoding, one token per step: what every speed-up is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.drafters.base import Drafter, DraftSession, Proposal
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request


@dataclass(frozen=True)
class NoDrafterOptions:
    exact: bool = False  # compute steps as wide as drafted ones: the same bits, so the same text, in bfloat16 on a GPU


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    Options = NoDrafterOptions
    idle = True

    def __init__(self, target: Any, tokenizer: Any, options: NoDrafterOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.pads = options.exact

    def begin(self, request: Request) -> DraftSession:  # noqa: ARG002
        return NoSession()

    def rests_with(self, sessions: Sequence[DraftSession]) -> bool:  # noqa: ARG002
        return True


class NoSession(DraftSession):
    def propose(self, root: int, budget: Budget) -> Proposal:  # noqa: ARG002
        return Proposal(TokenTree.root(root))
