"""auto: asks the drafters that pay, fuses their trees, and verifies as much of them as pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.drafters._parts import AutoOptions, make_parts, paths
from slipstream.drafters._piloted import PilotedDrafter, PilotedSession
from slipstream.drafters._rehearsal import rehearse
from slipstream.drafters.base import Drafter, DraftSession
from slipstream.errors import OptionError
from slipstream.kept import recall, remember
from slipstream.request import Request
from slipstream.targets.timing import costs_of, described


class AutoDrafter(PilotedDrafter):
    """Several drafters at once: those that are expected to pay."""

    Options = AutoOptions
    takes = ("prediction", "drafters")

    def __init__(self, target: Any, tokenizer: Any, options: AutoOptions) -> None:
        super().__init__(target, tokenizer, options, lambda: costs_of(target))
        self._answers = 0
        if getattr(target, "model", None) is not None:  # a recording can score its own text alone
            self._key = " | ".join([described(target), *self.parts, *paths(options)])
            self.pilot.recall(recall("auto", self._key))
            rehearse(self.target, self.pilot, self.parts, self.layers)

    def make_parts(self) -> dict[str, Drafter]:
        return make_parts(self)

    def begin(self, request: Request) -> DraftSession:
        if request.drafters is None and not request.prediction:  # by far most requests, and each microsecond counts
            return PilotedSession(self, request, [name for name in self.parts if name != "prediction"])
        names = set(self.parts) if request.drafters is None else set(request.drafters)
        if unknown := names - set(self.parts):
            raise OptionError(
                f"drafters names {', '.join(sorted(unknown))}: this model's auto asks {', '.join(self.parts)}"
            )
        names.discard("prediction")
        if request.prediction:  # asked whatever `drafters` says
            names.add("prediction")
            self.renewed("prediction")
        return PilotedSession(self, request, [name for name in self.parts if name in names])

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        super().ended(request, tokens)
        self._answers += 1
        if hasattr(self, "_key") and self._answers.bit_count() == 1:  # the first, second, fourth, eighth, …
            remember("auto", self._key, self.pilot.learnt())
