"""auto: asks whoever earns it, fuses what they say, and verifies as much of it as pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from slipstream import drafters as registry
from slipstream.budget.costs import costs_of
from slipstream.budget.pilot import Pilot
from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.errors import DrafterError, OptionError
from slipstream.tree import TokenTree, fuse

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.datastores.live import Said
    from slipstream.request import Request

HEADS = ("eagle3", "redrafter")  # asked too, where one comes with slipstream for the model


@dataclass(frozen=True)
class AutoOptions:
    drafters: str = ""  # whom to ask, by name, separated by commas; empty: everyone who needs no more than this model
    store: Any = ""  # a store for those who draft from one
    shared: int = 0  # tokens of earlier answers to draft from too

    def __post_init__(self) -> None:
        for name in self.names():
            if registry.find(name) is AutoDrafter:
                raise OptionError("auto asks others: leave it out of drafters=…")

    def names(self) -> list[str]:
        return [name.strip() for name in self.drafters.split(",") if name.strip()]


class AutoDrafter(Drafter):
    """Several drafters at once, each asked as far as it earns its time."""

    Options = AutoOptions

    def __init__(self, target: Any, tokenizer: Any, options: AutoOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.parts = dict(self._parts())
        self.layers = tuple(sorted({layer for part in self.parts.values() for layer in part.layers}))
        self.shared = max(part.shared for part in self.parts.values())
        self.pilot = Pilot(costs_of(target), list(self.parts))
        self._step: tuple[int, int, float] | None = None  # batch, rows, seconds of the step that was verified last
        self._drafting = 0.0  # seconds that its drafts took
        self.emitted = 0  # and tokens that it gave

    def _parts(self) -> list[tuple[str, Drafter]]:
        own: dict[str, Any] = {"store": self.options.store, "shared": self.options.shared}
        parts = []
        for name in self.options.names() or ("suffix", *HEADS):
            known = {field.name for field in fields(registry.find(name).Options)}
            given = {option: value for option, value in own.items() if option in known and value}
            try:
                parts.append((name, registry.make(name, self.target, self.tokenizer, **given)))
            except DrafterError:
                if self.options.names() or name not in HEADS:
                    raise
        return parts

    @classmethod
    def trials(cls, model: Any) -> list[dict[str, Any]]:  # noqa: ARG003
        return [{"drafters": "pld, suffix"}]

    def attach(self, said: Said) -> None:
        for part in self.parts.values():
            if part.shared:
                part.attach(said)

    def begin(self, request: Request) -> DraftSession:
        return AutoSession(self, {name: part.begin(request) for name, part in self.parts.items()})

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        for part in self.parts.values():
            part.ended(request, tokens)

    def measured(self, batch: int, rows: int, seconds: float) -> None:
        self._step = batch, rows, seconds

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        mine = cast(Sequence[AutoSession], sessions)
        self._settle()
        for session, root in zip(mine, roots, strict=True):
            session.label(root)
        drafts: list[list[TokenTree]] = [[TokenTree.root(root)] for root in roots]
        drafting: dict[str, float] = {}
        for name in self.pilot.asks() if any(b.nodes for b in budgets) else ():
            clock = perf_counter()
            found = self.parts[name].propose([s.parts[name] for s in mine], roots, budgets)
            for draft, proposal, budget in zip(drafts, found, budgets, strict=True):
                draft.append(proposal.tree.cut(budget.depth))
            drafting[name] = perf_counter() - clock
        trees = [fuse(draft) for draft in drafts]
        if not drafting:
            return [Proposal(tree) for tree in trees]
        self._drafting = sum(drafting.values())
        for session, tree in zip(mine, trees, strict=True):
            session.proposed(tree)
        kept = self.pilot.choose(trees, [b.nodes for b in budgets], drafting)
        return [Proposal(tree) for tree in kept]

    def _settle(self) -> None:
        """What the last step cost and gained."""
        if self._step is not None:
            batch, rows, seconds = self._step
            self.pilot.charge(rows, batch, self.emitted, seconds, self._drafting)
        self._step, self._drafting, self.emitted = None, 0.0, 0


class AutoSession(DraftSession):
    def __init__(self, drafter: AutoDrafter, parts: dict[str, DraftSession]) -> None:
        self.drafter, self.parts = drafter, parts
        self._said: list[int] = []  # tokens since the first root
        self._begun = False
        self._open: deque[tuple[TokenTree, int]] = deque()  # drafts that the text still has to judge, and their roots

    def observe(self, seen: Seen) -> None:
        if self._begun:
            self.drafter.emitted += len(seen.tokens)
            self._said += seen.tokens
        for name, part in self.parts.items():
            layers = self.drafter.parts[name].layers
            hidden = {layer: seen.hidden[layer] for layer in layers} if seen.hidden else {}
            part.observe(Seen(seen.tokens, seen.position, hidden))

    def propose(self, root: int, budget: Budget) -> Proposal:
        return self.drafter.propose([self], [root], [budget])[0]

    def proposed(self, tree: TokenTree) -> None:
        if len(tree) > 1:
            self._open.append((tree, len(self._said)))

    def label(self, root: int) -> None:
        """Judge the drafts that the text, which `root` comes next in, has outgrown."""
        self._begun = True
        while self._open and len(self._said) - self._open[0][1] >= self._open[0][0].depth:
            tree, place = self._open.popleft()
            self.drafter.pilot.learn(tree, [*self._said[place + 1 :], root])

    def close(self) -> None:
        for tree, place in self._open:
            self.drafter.pilot.learn(tree, self._said[place + 1 :])
        self._open.clear()
        for part in self.parts.values():
            part.close()
