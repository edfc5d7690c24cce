"""Whether a draft model can be faster than plain decoding, from the costs of steps, before anything is trained.

Drafting d tokens takes d steps of the draft and one step of the target with d + 1 rows. `budget/chains.py` has the
expected number of accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.budget.chains import expected_tokens
from slipstream.budget.costs import Costs
from slipstream.errors import OptionError
from slipstream.targets import open_target
from slipstream.targets.timing import measure, nonsense

# An optimistic acceptance: what draft models of a hundredth of their target's size reach on the easiest texts.
BEST_ACCEPTANCE = 0.9
MEMORY = 0.2  # share of a GPU's free memory for the texts of each model; training needs the rest
DEPTHS = range(1, 17)  # depths considered; of a chain of 16 tokens with acceptance 0.9, 19% are accepted to the end


@dataclass(frozen=True)
class Pair:
    """The costs of steps of a target and of its draft on this machine."""

    target: Costs
    draft: Costs

    @property
    def ratio(self) -> float:
        """Time of a step of the draft, divided by one of the target."""
        return self.draft.seconds(1) / self.target.seconds(1)

    def gain(self, acceptance: float, depth: int) -> float:
        """The speed-up over plain decoding."""
        seconds = depth * self.draft.seconds(1) + self.target.seconds(depth + 1)
        return expected_tokens(acceptance, depth) * self.target.seconds(1) / seconds

    def best_depth(self, acceptance: float) -> int:
        return max(DEPTHS, key=lambda depth: self.gain(acceptance, depth))

    def check(self) -> None:
        """Raise if the draft can't be faster than plain decoding."""
        depth = self.best_depth(BEST_ACCEPTANCE)
        if (gain := self.gain(BEST_ACCEPTANCE, depth)) <= 1:
            raise OptionError(
                f"this pair can't pay: a step of the draft takes {1e3 * self.draft.seconds(1):.2f} ms, "
                f"{self.ratio:.2f} of the target's. Were {BEST_ACCEPTANCE:.0%} of its tokens accepted, it would give "
                f"{gain:.2f} × plain decoding at best, drafting {depth} at a time. Take fewer layers or a smaller "
                "draft, or train it all the same with --force"
            )


def measure_pair(model: Any, draft: Any) -> Pair:
    """Both are measured now: costs remembered from another time, when the machine was busy, may refuse a good pair."""
    found = []
    for each in (model, draft):
        target = open_target(each, memory=MEMORY)
        found.append(Costs(measure(target, nonsense(target)), bool(target.widths), target.flat))
        target.release()
    return Pair(*found)
