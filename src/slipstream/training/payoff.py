"""Whether a draft model can pay: what drafting takes and gives, before anything is trained.

Drafting d tokens (`budget/chains.py` says what they give) takes d steps of the draft and one of the target, which
verifies d + 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.budget.chains import expected_tokens
from slipstream.budget.costs import Costs
from slipstream.errors import OptionError
from slipstream.targets import open_target
from slipstream.targets.timing import costs_of

# The best that is plausible: what draft models of a hundredth of their target's size reach on its easiest texts.
BEST_ACCEPTANCE = 0.9
DEPTHS = range(1, 17)  # drafts that are thought of; after sixteen tokens even 0.9 leaves 15%


@dataclass(frozen=True)
class Pair:
    """What steps of a target and of its draft take on this machine."""

    target: Costs
    draft: Costs

    @property
    def ratio(self) -> float:
        """A step of the draft in steps of the target."""
        return self.draft.seconds(1) / self.target.seconds(1)

    def gain(self, acceptance: float, depth: int) -> float:
        """How many times as fast as plain decoding."""
        seconds = depth * self.draft.seconds(1) + self.target.seconds(depth + 1)
        return expected_tokens(acceptance, depth) * self.target.seconds(1) / seconds

    def best_depth(self, acceptance: float) -> int:
        return max(DEPTHS, key=lambda depth: self.gain(acceptance, depth))

    def check(self) -> None:
        """Refuse what can't pay."""
        depth = self.best_depth(BEST_ACCEPTANCE)
        if (gain := self.gain(BEST_ACCEPTANCE, depth)) <= 1:
            raise OptionError(
                f"this pair can't pay: a step of the draft takes {1e3 * self.draft.seconds(1):.2f} ms, "
                f"{self.ratio:.2f} of the target's. Were {BEST_ACCEPTANCE:.0%} of its tokens accepted, it would give "
                f"{gain:.2f} × plain decoding at best, drafting {depth} at a time. Take fewer layers or a smaller "
                "draft, or train it all the same with --force"
            )


def measure_pair(model: Any, draft: Any) -> Pair:
    """Measured once on a machine, and kept."""
    found = []
    for each in (model, draft):
        target = open_target(each)
        found.append(costs_of(target))
        target.release()
    return Pair(*found)
