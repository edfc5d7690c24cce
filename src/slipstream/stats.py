"""Stats: what one generation cost and gained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who only reads numbers, as the server's protocol does, needs neither numpy nor numba
    from slipstream.tree import TokenTree


@dataclass
class Stats:
    drafter: str
    exact: bool  # the text can't depend on what was drafted: the rule is lossless, and logits are precise enough
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0  # forwards that gave tokens, the prompt's included
    accepted: int = 0  # drafted tokens that were accepted
    drafted_depth: int = 0  # depths of all steps' trees, summed
    nodes_verified: int = 0
    drafts: int = 0  # steps that verified at least one drafted node
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0  # deciding, committing, observing
    processors: tuple[str, ...] = ()  # the user's own: with these, a GPU's step can't choose tokens itself
    sampling_seconds: float = 0.0  # part of host_seconds: choosing tokens outside the step
    accepted_lengths: dict[int, int] = field(default_factory=dict)  # {drafted tokens accepted: steps}
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # what failed after the answer was complete

    def count(self, tree: TokenTree, path: list[int]) -> None:
        """One verified step."""
        accepted, nodes = len(path) - 1, len(tree) - 1
        self.steps += 1
        self.accepted += accepted
        self.accepted_lengths[accepted] = self.accepted_lengths.get(accepted, 0) + 1
        self.drafted_depth += tree.depth
        self.nodes_verified += nodes
        self.drafts += nodes > 0
        for name, (proposed, kept) in tree.proposed(path).items() if tree.sources else ():
            source = self.by_source.setdefault(name, {"proposed": 0, "accepted": 0})
            source["proposed"] += proposed
            source["accepted"] += kept

    @property
    def tokens_per_step(self) -> float:
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per token of draft depth."""
        return self.accepted / self.drafted_depth if self.drafted_depth else 0.0

    @property
    def node_yield(self) -> float:
        """Accepted tokens per node verified."""
        return self.accepted / self.nodes_verified if self.nodes_verified else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "seconds": round(self.seconds, 6),
            "first_token_seconds": round(self.first_token_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "accepted": self.accepted,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "node_yield": round(self.node_yield, 4),
            "nodes_verified": self.nodes_verified,
            "draft_seconds": round(self.draft_seconds, 6),
            "verify_seconds": round(self.verify_seconds, 6),
            "host_seconds": round(self.host_seconds, 6),
            "sampling_seconds": round(self.sampling_seconds, 6),
            "processors": list(self.processors),
            "exact": self.exact,
            "accepted_lengths": {str(k): v for k, v in sorted(self.accepted_lengths.items())},
            "by_source": self.by_source,
            **({"warnings": self.warnings} if self.warnings else {}),
        }
