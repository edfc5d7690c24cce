"""Several drafters at once, each asked as far as it earns its time, their trees fused and cut to what pays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from slipstream.budget import Budget
from slipstream.budget.costs import Costs
from slipstream.budget.pilot import Choice, Pilot, Source, Text
from slipstream.drafters import _capabilities as can
from slipstream.drafters._joint import JointDrafter, JointSession
from slipstream.drafters.base import DraftSession, Proposal, Seen
from slipstream.stopwatch import Stopwatch
from slipstream.tree import TokenTree, fuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.request import Request
    from slipstream.targets.captured.fixed_step import FixedStep


class PilotedDrafter(JointDrafter):
    """What to ask whom, and what of it to verify, is up to a `Pilot`."""

    def __init__(self, target: Any, tokenizer: Any, options: Any) -> None:
        super().__init__(target, tokenizer, options)
        heads = {name: can.sizes(part) for name, part in self.parts.items() if can.generates(part)}
        self.pilot = Pilot(self.costs(), list(self.parts), target.trees, heads)
        self._step: tuple[int, int, float] | None = None  # rows, batch, seconds of the step that was verified last
        self._unlearnt: tuple[Sequence[PilotedSession], Sequence[int]] | None = None  # whose texts say more of drafts
        self._rest = self._rested = self._batch = 0  # plain steps to come, those that were, and of how many sequences

    @abstractmethod
    def costs(self) -> Costs:
        """What steps of the target take."""

    def begin(self, request: Request) -> DraftSession:
        return self.session({name: part.begin(request) for name, part in self.parts.items()})

    def session(self, parts: dict[str, DraftSession]) -> PilotedSession:
        """Of a new sequence, which these parts draft for. Nobody knows yet whether that pays, so nobody rests."""
        self._rest = 0
        return PilotedSession(self, parts)

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int) -> bool:
        return self.pilot.learn(tree, followed, known)

    @property
    def choice(self) -> Choice | None:
        """What was decided about the step that was proposed last."""
        return self.pilot.last

    @property
    def resting(self) -> bool:
        return self._rest > 0

    def measured(self, rows: Sequence[int], seconds: float) -> None:
        batch = len(rows)
        step = sum(rows) - batch + 1 if self.pilot.costs.flat else max(rows), batch, seconds
        if self._rested:
            self.pilot.costs.observe(*step)
        else:
            self._step = step

    def draft_ahead(self, session: DraftSession, step: FixedStep) -> None:
        """Those that were asked about this step will probably be asked about the next."""
        mine = cast(PilotedSession, session)
        mine.ahead = True
        for source in mine.latest:
            can.draft_ahead(self.parts[source.drafter], mine.parts[source.drafter], step)
        self._look_back()  # while the device works

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        mine = cast(Sequence[PilotedSession], sessions)
        if self._rest and len(mine) == self._batch and all([session.begun for session in mine]):
            self._rest, self._rested = self._rest - 1, self._rested + 1
            return [Proposal(TokenTree.root(root)) for root in roots]
        whole = Stopwatch()
        self.pilot.rested(self._rested, self._batch)
        self._rest, self._rested, self._batch = 0, 0, len(mine)
        if self._unlearnt is not None:  # nobody had time for it
            self._look_back()
        self._unlearnt = mine, roots
        if len(mine) > 1 or not self.target.ahead:
            self._look_back()
        texts, limits = [session.text for session in mine], [budget.nodes for budget in budgets]
        trees = [TokenTree.root(root) for root in roots]
        able = [session.able() if limit else set() for session, limit in zip(mine, limits, strict=True)]
        names = set().union(*able)
        unstarted = {name for name, part in mine[0].parts.items() if can.unstarted(part)} if mine[0].ahead else set()
        taken: dict[Source, float] = {}
        beside: list[TokenTree | None] = [None] * len(mine)
        expected = lambda: self.pilot.expects(texts, trees, limits) if taken else 1.0  # noqa: E731
        for source in self.pilot.asks(names, len(mine), expected, unstarted):
            who = [i for i, parts in enumerate(able) if source.drafter in parts]
            asking = Stopwatch()
            if any([mine[i].show(source) for i in who]):
                unstarted.add(source.drafter)
            found = self.parts[source.drafter].propose(
                [mine[i].parts[source.drafter] for i in who],
                [roots[i] for i in who],
                [budgets[i].upto(source.most) for i in who],
            )
            taken[source] = asking.seconds()
            source.beside = max([len(each.beside) - 1 for each in found if each.beside is not None], default=0)
            for i, proposal in zip(who, found, strict=True):
                draft = proposal.tree.cut(budgets[i].depth)
                if len(draft) > 1:
                    trees[i] = fuse([trees[i], draft]) if len(trees[i]) > 1 else draft
                beside[i] = proposal.beside or beside[i]
        for session in mine:
            session.begun, session.ahead, session.promised = True, False, 0.0
        if not taken:
            self._rest = self.pilot.decline(names, len(mine))
            return [Proposal(tree) for tree in trees]
        self.pilot.took(taken, unstarted)
        rows = max([source.beside for source in taken])
        limits = [max(0, limit - rows) for limit in limits]
        kept = self.pilot.choose(texts, trees, limits, taken, unstarted)
        for session, tree, promised in zip(mine, trees, self.pilot.promised, strict=True):
            session.promised = promised
            session.proposed(tree)
        self.pilot.fusing.see((whole.seconds() - sum(taken.values())) / len(mine))
        return [Proposal(tree, beside=window) for tree, window in zip(kept, beside, strict=True)]

    def _look_back(self) -> None:
        """What the drafters of a step gained, what the one before cost, and what the text says about drafts."""
        self.pilot.judge()
        if self._step is not None:
            self.pilot.costs.observe(*self._step)
            self._step = None
        if self._unlearnt is not None:
            (sessions, roots), self._unlearnt = self._unlearnt, None
            for session, root in zip(sessions, roots, strict=True):
                session.label(root)


class PilotedSession(JointSession):
    """Parts are shown the text when they are asked."""

    drafter: PilotedDrafter

    def __init__(self, drafter: PilotedDrafter, parts: dict[str, DraftSession]) -> None:
        super().__init__(drafter, parts)
        self.text = Text()
        self.asked: set[Source] = set()  # for the step that comes
        self.latest: set[Source] = set()  # and for the one under way
        self.ahead = False  # whether drafts could be started while it runs
        self.promised = 0.0  # tokens that the step's tree is expected to give beyond one
        self._last: Seen | None = None  # the latest step's tokens and states
        self._shown: dict[str, int] = {}  # by drafter: tokens since the first root that it was shown

    def observe(self, seen: Seen) -> None:
        """The prompt is for every part, the rest for those that are asked."""
        if not self.begun:
            super().observe(seen)
            return
        if self.promised:
            self.text.see(self.promised, len(seen.tokens) - 1)
        self._emitted += seen.tokens
        self._last = seen

    def able(self) -> set[str]:
        """Parts that may have something to say."""
        return {name for name, part in self.parts.items() if not can.silent(part)}

    def show(self, source: Source) -> bool:
        """It is asked: what its drafter has not seen of the text. The states of all but the last step are gone; without
        them it knows less, but hardly guesses worse. Returns whether it is asked about this text for the first time."""
        name, last = source.drafter, self._last
        first, new = name not in self._shown, self._emitted[self._shown.get(name, 0) :]
        self._shown[name] = len(self._emitted)
        self.asked.add(source)
        if new and last is not None:
            part, layers = self.parts[name], can.layers(self.drafter.parts[name])
            missed = len(new) - len(last.tokens) if layers else len(new)
            if missed:
                part.observe(Seen(new[:missed], last.position + len(last.tokens) - len(new)))
            if layers:
                part.observe(Seen(last.tokens, last.position, last.hidden.of(layers)))
        return first

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        for source in self.latest:
            can.choices(self.parts[source.drafter], tree, chosen)

    def keep(self) -> None:
        if not self.asked and not self.latest:  # as in large batches, where every microsecond counts for each
            return
        asked = {source.drafter for source in self.asked}
        for name in asked:
            can.keep(self.parts[name])
        for name in {source.drafter for source in self.latest} - asked:
            can.skip(self.parts[name])
        self.latest, self.asked = self.asked, set()

    def pause(self) -> None:
        super().pause()
        if self._last is not None:
            self._last = replace(self._last, hidden=self._last.hidden.safe())
