"""Several drafters at once: those that are expected to pay are asked, their trees fused and cut to what pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from slipstream.budget import Budget
from slipstream.budget.calibration import NEWEST
from slipstream.budget.costs import Costs, full
from slipstream.budget.pilot import Choice, Draft, Pilot, Source, Text
from slipstream.drafters import _capabilities as can
from slipstream.drafters._joint import JointDrafter, JointSession, begin_parts, in_turn
from slipstream.drafters.base import DraftSession, Proposal, Seen
from slipstream.stopwatch import Stopwatch
from slipstream.tree import TokenTree, fuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.request import Request
    from slipstream.targets.base import Slot
    from slipstream.targets.captured.fixed_step import FixedStep


class PilotedDrafter(JointDrafter):
    """A drafter of several parts. A `Pilot` decides which to ask, and what of their drafts to verify."""

    def __init__(self, target: Any, tokenizer: Any, options: Any, costs: Callable[[], Costs]) -> None:
        """costs: called once the parts are made, since keys of heads may move the target's, and so end captures."""
        super().__init__(target, tokenizer, options)
        heads = {name: can.sizes(part) for name, part in self.parts.items() if can.generates(part)}
        returns = {name: can.returns(part) for name, part in self.parts.items() if can.invests(part)}
        self.readers = {name for name, part in self.parts.items() if can.layers(part)}  # of the target's states
        self.models = heads.keys() - self.readers  # which read texts by themselves
        self.pilot = Pilot(costs(), list(self.parts), target.trees, heads, returns, self.readers)
        # Rows, batch and seconds of steps that `Costs` has not observed yet. After many steps without drafts, the
        # latest ones are enough.
        self._steps = deque[tuple[int, int, float]](maxlen=round(1 / NEWEST))
        self.resting = 0  # further plain steps, in which no part is asked
        self._declined = Declined(set(), set(), 0)  # what was decided about them
        self._alone: PilotedSession | None = None  # who rests, if it is one text, whose drafts can be looked at
        self._choosing: float | None = None  # seconds that the choice for the step under way took
        self._ahead = set[DraftSession]()  # the sessions whose drafts could be started while the last step ran

    def begin(self, request: Request) -> DraftSession:
        return PilotedSession(self, request, self.parts)

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int) -> bool:
        self.pilot.judge()
        return self.pilot.calibration.learn(tree, followed, known)

    @property
    def choice(self) -> Choice | None:
        """What was decided about the step that was proposed last."""
        return self.pilot.last

    @property
    def idle(self) -> bool:
        return self.resting > 0

    def rests_with(self, sessions: Sequence[DraftSession]) -> bool:
        mine = cast(Sequence[PilotedSession], sessions)
        return self.idle and self._alone in (None, *mine) and self._declined.holds_for(mine)

    def renewed(self, name: str) -> None:
        self.pilot.renew(name)
        self.resting = 0

    def rest(self) -> None:
        self.resting -= 1
        self.pilot.steps += 1

    def peeks(self, session: DraftSession) -> bool:
        return self.idle and session is self._alone

    def peek(self, session: DraftSession, root: int, budget: Budget) -> None:
        """End a text's rest if a draft from here would pay. It is not verified, since the step is under way."""
        session = cast(PilotedSession, session)
        try:
            session.catch_up()
            session.label(root)
            draft = SessionDraft(session, root, budget)
            sources = self.pilot.cheap(draft.able)
            for source in sources:
                self._ask(source, [draft], late=False)
            session.proposed(draft.tree)
            if self.pilot.pays(draft, sources):
                self.resting = 0
                for source in sources:
                    source.due[0] = 0
        except Exception:  # the next draft raises it again, where it is handled
            self.resting = 0

    def measured(self, rows: Sequence[int], forward: float, host: float = 0.0) -> None:
        batch = len(rows)
        if self._choosing is not None:
            self.pilot.handling[full(batch)].see(self._choosing + host)
            self._choosing = None
        self._steps.append((sum(rows) - batch + 1 if self.pilot.costs.flat else max(rows), batch, forward))

    def draft_ahead(self, sessions: Mapping[int, DraftSession], step: FixedStep) -> None:
        """Start drafts of the parts that were asked for this step: they will probably be asked for the next."""
        mine = cast(Mapping[int, PilotedSession], sessions)
        self._ahead = set(mine.values())
        for name in set().union(*(session.latest for session in mine.values())):
            asked = {number: session.parts[name] for number, session in mine.items() if name in session.latest}
            can.draft_ahead(self.parts[name], asked, step)
        self._look_back()  # here, since the device is busy
        for session in mine.values():
            session.label()

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        whole, mine = Stopwatch(), cast(Sequence[PilotedSession], sessions)
        self._choosing = None
        if self.rests_with(sessions):
            if self._alone is None:
                self.rest()
                return [Proposal(tree) for tree in TokenTree.roots(roots)]
            self._alone.text.ahead = False  # or nobody would ask while it rests
        self._alone = None
        ahead, self._ahead, self.resting = self._ahead.issuperset(sessions), set(), 0
        if not ahead:  # it was not done while the last step ran
            self._look_back()
            for session, root in zip(mine, roots, strict=True):
                session.label(root)
        drafts = [SessionDraft(*each) for each in zip(mine, roots, budgets, strict=True)]
        names = set().union(*(draft.able for draft in drafts))
        late, taken = self._late(mine, ahead), dict[Source, float]()
        for source in self.pilot.asks(names, drafts, late):
            able = [draft for draft in drafts if source.drafter in draft.able]
            taken[source] = self._ask(source, able, source.drafter in late)
        if not taken:
            self.resting = self.pilot.decline(names, len(mine))
            self._declined = Declined(set(mine), names, full(len(mine)))
            if len(mine) == 1 and mine[0].text.ahead and self.pilot.cheap(names):
                self._alone = mine[0]
                if mine[0].text.rests:
                    mine[0].text.futile = 1.0  # after this rest, one futile draft is enough for the next
                    self.resting = round(1 / NEWEST)
            return [Proposal(draft.tree) for draft in drafts]
        for draft in drafts:
            draft.session.proposed(draft.tree)
        kept = self.pilot.choose(drafts, taken)
        self._choosing = whole.seconds() - sum(taken.values())
        return [Proposal(tree, beside=draft.beside) for tree, draft in zip(kept, drafts, strict=True)]

    def _late(self, sessions: Sequence[PilotedSession], ahead: bool) -> set[str]:
        """The parts whose next draft takes longer: they missed steps, or no draft of theirs was started ahead though it
        could have been. ahead: whether drafts of these sessions could be started while the last step ran."""
        found = {name for session in sessions for name in session.names if session.lags(name)}
        if ahead:
            found |= {name for session in sessions for name, part in session.parts.items() if can.unstarted(part)}
        return found

    def _ask(self, source: Source, drafts: Sequence[SessionDraft], late: bool) -> float:
        """Add a source's proposals to the drafts. Returns the seconds that it took. late: see `_late`."""
        name, asking = source.drafter, Stopwatch()
        first = any([draft.session.show(name) for draft in drafts])
        found = self.parts[name].propose(
            [draft.session.parts[name] for draft in drafts],
            [draft.root for draft in drafts],
            [draft.budget.upto(source.most, source.beside) for draft in drafts],
        )
        seconds = asking.seconds()
        source.took(seconds, first or late)
        for draft, proposal in zip(drafts, found, strict=True):
            draft.add(proposal)
        return seconds

    def _look_back(self) -> None:
        """Learn from past steps: what the drafters of the last one gained, and how long steps took."""
        self.pilot.judge()
        while self._steps:
            self.pilot.costs.observe(*self._steps.popleft())


@dataclass
class Declined:
    """That no part is asked depends on the size of the batch and on who could draft, not on the texts. So it holds as
    texts come and go."""

    sessions: set[PilotedSession]
    parts: set[str]  # that could draft
    size: int  # of the batch, see `full`

    def holds_for(self, sessions: Sequence[PilotedSession]) -> bool:
        """Whether it does. New sessions are labelled here, since nobody else will before the rest ends."""
        if full(len(sessions)) != self.size:
            return False
        new = [session for session in sessions if session not in self.sessions]
        if any(not session.able <= self.parts for session in new):
            return False
        if new:
            for session in new:
                session.label()
            self.sessions = set(sessions)
        return True


class SessionDraft(Draft):
    """The draft for one session in one step."""

    def __init__(self, session: PilotedSession, root: int, budget: Budget) -> None:
        super().__init__(session.text, TokenTree.root(root), budget.nodes)
        self.session, self.root, self.budget = session, root, budget
        self.beside: TokenTree | None = None  # further nodes to verify: see `Proposal`
        self.able = session.able if budget.nodes else set[str]()

    def add(self, proposal: Proposal) -> None:
        new = proposal.tree.cut(self.budget.depth)
        if len(new) > 1:
            self.tree = fuse([self.tree, new]) if len(self.tree) > 1 else new
        self.beside = proposal.beside or self.beside


class PilotedSession(JointSession):
    """One sequence. A part is shown the text only when it is asked, since that costs time too."""

    drafter: PilotedDrafter

    def __init__(self, drafter: PilotedDrafter, request: Request, names: Collection[str]) -> None:
        """names: of the parts that may be asked. Draft models begin now, those that read states when there are some,
        and whoever has not begun when it is asked for the first time: in large batches that is often never."""
        models = {name: drafter.parts[name] for name in names if name in drafter.models}
        super().__init__(drafter, begin_parts(models, request))
        self.request, self.names = request, names
        self.text = Text(ahead=True)
        self.asked: set[str] = set()  # parts that were asked for the next step
        self.latest: set[str] = set()  # parts that were asked for the step under way
        self._prompt: list[int] = []
        self._slot: Slot | None = None
        self._last: Seen | None = None  # the latest step's tokens and states
        self._shown: dict[str, int] = {}  # by part: how many of the tokens since the first root it was shown
        self._reread = 0  # how many of them were read again
        self._rereading = list[str]()  # by these parts, which have keys in the text's pages

    def follow(self, slot: Slot | None) -> None:
        self.catch_up()
        self._slot = slot
        super().follow(slot)

    def observe(self, seen: Seen) -> None:
        """The prompt is shown to the parts that have begun; the tokens after it wait until a part is asked (`show`)."""
        if not self.begun:
            if seen.hidden:
                for name in self.names:
                    if name in self.drafter.readers and name not in self.parts:
                        self._begin(name)
            super().observe(seen)
            self._prompt += seen.tokens
            return
        self.catch_up(seen.position)
        self.text.see(len(seen.tokens) - 1)
        self._emitted += seen.tokens
        self._last = seen

    def catch_up(self, position: int | None = None) -> None:
        """Take the tokens before a position, by default all, from the slot, where no step since was observed."""
        if self.begun and self._slot is not None:
            known = len(self._prompt) + len(self._emitted)
            if missed := self._slot.tokens[known:position]:
                self._emitted += missed
                self._last = None  # its states are of an earlier step
                self.text.rested(len(missed))

    def _begin(self, name: str) -> None:
        """A part begins, in which it is shown the prompt as far as it is read, without states."""
        self.parts[name] = part = self.drafter.parts[name].begin(self.request)
        if self._prompt:
            part.observe(Seen(self._prompt, 0))
        can.follow(part, self._slot)

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        it = cast(PilotedSession, other)
        it.pass_over()
        for name in it.parts:
            if name in self.drafter.readers and name in self.names:
                self._begin(name)
        super().resume(it, tokens)
        self._prompt = list(tokens)

    def pass_over(self) -> None:
        """Tell the parts that were never asked about this text that their first chance has passed."""
        self.catch_up()
        if self._emitted:
            for name in self.parts.keys() - self._shown.keys():
                can.skip(self.parts[name])

    @property
    def able(self) -> set[str]:
        """The parts that can propose something."""
        return {name for name in self.names if name not in self.parts or not can.silent(self.parts[name])}

    def lags(self, name: str) -> bool:
        """Whether a part that reads states has not seen all steps before the latest one."""
        if self._last is None or not can.layers(self.drafter.parts[name]):
            return False
        return len(self._emitted) - self._known(name) > len(self._last.tokens)

    def _known(self, name: str) -> int:
        """How many of the tokens since the first root a part knows."""
        return self._shown.get(name, self._reread if name in self._rereading else 0)

    def show(self, name: str) -> bool:
        """Before a part is asked: show it the tokens that it has not seen. Only the last step's states are still there;
        without the others its drafts are hardly worse. Returns whether it is asked about this text for the first time.
        """
        if name not in self.parts:
            self._begin(name)
        part, layers, known = self.parts[name], can.layers(self.drafter.parts[name]), self._known(name)
        first, new, last = name not in self._shown, self._emitted[known:], self._last if layers else None
        self._shown[name] = len(self._emitted)
        self.asked.add(name)
        if missed := new[: len(new) - len(last.tokens) if last is not None else None]:
            part.observe(Seen(missed, len(self._prompt) + known))
        if new and last is not None:
            part.observe(Seen(last.tokens, last.position, last.hidden.of(layers)))
        return first

    def reread(self, seen: Seen) -> None:
        super().reread(seen)
        self._rereading = [name for name in self.parts if can.in_pages(self.drafter.parts[name])]
        for name in self._rereading:
            self._shown.pop(name, None)
        self._reread = len(self._emitted)

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        for name in self.latest:
            can.choices(self.parts[name], tree, chosen)

    def keep(self) -> None:
        if not self.asked and not self.latest:  # frequent in large batches, where each sequence's microseconds add up
            return
        for name in self.asked:
            can.keep(self.parts[name])
        for name in self.latest - self.asked:
            can.skip(self.parts[name])
        self.latest, self.asked = self.asked, set()

    def close(self) -> None:
        last = [self.catch_up] if self._open else []  # the last drafts are labelled
        in_turn([*last, super().close])

    def pause(self) -> None:
        super().pause()
        if self._last is not None:
            self._last = self._last._replace(hidden=self._last.hidden.safe())
