"""What a drafter and its sessions may offer beyond `begin` and `propose`. Each capability is a protocol: who has its
members offers it.

The engine, and drafters that ask others, ask for them here and nowhere else. What is not offered costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slipstream.drafters.base import Drafter, DraftSession, Seen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.budget.pilot import Choice
    from slipstream.datastores.live import EarlierAnswers
    from slipstream.request import Request
    from slipstream.targets.base import Slot, Target
    from slipstream.targets.captured.fixed_step import FixedStep
    from slipstream.tree import TokenTree


# ---- of a drafter


class ReadsStates(Protocol):
    """Its sessions are shown hidden states of the target."""

    layers: tuple[int, ...]  # which: 0 the embeddings, L the last layer's
    # Where a text was read before: how many of its last tokens a session that resumes there must be shown again, with
    # their states. None, which is the default: all.
    rereads: int | None


class Rests(Protocol):
    """It asks for states of some steps only."""

    resting: int  # whether it goes without those of the step that was proposed last, and of how many more


class Idles(Protocol):
    """It knows beforehand when it will propose nothing. Then it need not be asked, and the step may begin before its
    sessions have observed the latest one."""

    idle: bool  # whether the next step is such a one

    def rest(self) -> None:
        """That step is taken."""


class Generates(Protocol):
    """It has a probability for every token."""

    generates: bool  # True
    first: int  # how many of the likeliest tokens its proposals name, whether they are in the tree or not
    sizes: tuple[int, ...]  # numbers of nodes that it drafts in notably less time than more


class TakesWishes(Protocol):
    """It makes something of fields of a request that others must refuse."""

    takes: tuple[str, ...]  # "prediction", "drafters"


class DraftsMuch(Protocol):
    """It says how many nodes a step drafts at most where a request does not. The default is the target's."""

    default_draft: int


class Invests(Protocol):
    """Its proposals have nodes `beside` the tree, no more than its budget says, and get better while it is asked."""

    invests: int  # how many at most
    returns: NDArray[np.float64]  # by what share 0, 1, … of them raise the tokens of a step, in the long run


class Pads(Protocol):
    """It says whether every step is computed as wide as the widest, so that in low precision a text does not depend on
    how much was drafted. The default is to pad: only plain decoding can do without."""

    pads: bool


@runtime_checkable
class ReadsAnswers(Protocol):
    """It drafts from what earlier requests were answered."""

    shared: int  # tokens of each collection that the engine keeps for it; 0: none

    def attach(self, answers: EarlierAnswers) -> None:
        """Called once: where the answers can be read."""


@runtime_checkable
class Learns(Protocol):
    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        """A request was answered with these tokens."""


@runtime_checkable
class Releases(Protocol):
    """It holds memory of a device."""

    def release(self) -> None:
        """Nobody will ask it again: the memory goes back."""


class Decides(Protocol):
    """It decides how much is verified, by what steps take."""

    @property
    def choice(self) -> Choice | None:
        """What it decided about the step that was proposed last."""

    def measured(self, rows: Sequence[int], seconds: float) -> None:
        """A step of so many rows of each sequence took so long after its drafts: the target's forward, and what came of
        it."""


@runtime_checkable
class DraftsAhead(Protocol):
    """On a GPU it queues drafts while a step still runs there."""

    def draft_ahead(self, session: Any, step: FixedStep) -> None:
        """A step of this sequence alone runs on the device: a draft that needs nothing else can be queued after it."""


# ---- of a session


@runtime_checkable
class HoldsStates(Protocol):
    """It holds states that lie in the target's own tensors."""

    def keep(self) -> None:
        """The next forward is about to run: whatever of the last one's states is still wanted must be copied."""


@runtime_checkable
class LetsGo(Protocol):
    def skip(self) -> None:
        """Instead of `keep`: nobody asked for a draft from these states, and it may do without them."""


@runtime_checkable
class SeesChoices(Protocol):
    """It learns from what the target chose after nodes of its own, accepted or not."""

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        """A step has verified this tree, which its draft is part of. chosen: the tokens that the target would put after
        some of its nodes; where a request's tokens are chosen on the host, the most probable ones. To be asked now."""


@runtime_checkable
class Pauses(Protocol):
    def pause(self) -> None:
        """Forwards for others come before the next of this sequence: what lies in the target's own tensors and is still
        wanted must be copied."""


@runtime_checkable
class Resumes(Protocol):
    def resume(self, other: Any, tokens: list[int]) -> None:
        """Before anything else: the text begins with these tokens, as that of `other` does, which knows them. What is
        taken from there is copied."""


@runtime_checkable
class ReadsKeys(Protocol):
    """It drafts with the target's own keys of its text."""

    def follow(self, slot: Slot | None) -> None:
        """Where they lie from now on. None: they are given up, until it is told again."""


class KeepsSilent(Protocol):
    """There are texts that it can't gain anything in."""

    silent: bool  # whether this is one of them, as long as it is now: it need not be asked


# ---- asking


def _offers(one: Any, capability: type) -> bool:
    kind: Any = type(one)
    return _class_offers(kind, capability)


@cache
def _class_offers(kind: Any, capability: type) -> bool:
    """Remembered, since a look at its members takes microseconds, and some are asked in every step."""
    return issubclass(kind, capability)


def layers(drafter: Drafter | type[Drafter]) -> tuple[int, ...]:
    return getattr(drafter, "layers", ())


def step_layers(drafter: Drafter) -> tuple[int, ...]:
    """Whose states the step that was proposed last should give."""
    return () if getattr(drafter, "resting", False) else layers(drafter)


def idle(drafter: Drafter) -> bool:
    return getattr(drafter, "idle", False)


def rest(drafter: Any) -> None:
    if hasattr(drafter, "rest"):
        drafter.rest()


def rereads(drafter: Drafter) -> int | None:
    return getattr(drafter, "rereads", None if layers(drafter) else 0)


def default_draft(drafter: Drafter, target: Target) -> int:
    return getattr(drafter, "default_draft", target.default_draft)


def pads(drafter: Drafter) -> bool:
    return getattr(drafter, "pads", True)


def takes(drafter: Drafter) -> tuple[str, ...]:
    return getattr(drafter, "takes", ())


def generates(drafter: Drafter | type[Drafter]) -> bool:
    return getattr(drafter, "generates", False)


def sizes(drafter: Drafter) -> tuple[int, ...]:
    return getattr(drafter, "sizes", ())


def invests(drafter: Drafter) -> int:
    return getattr(drafter, "invests", 0)


def returns(drafter: Any) -> NDArray[np.float64]:
    found: NDArray[np.float64] = drafter.returns
    return found


def shared(drafter: Drafter) -> int:
    return getattr(drafter, "shared", 0)


def attach(drafter: Drafter, answers: EarlierAnswers) -> None:
    if isinstance(drafter, ReadsAnswers) and drafter.shared:
        drafter.attach(answers)


def ended(drafter: Drafter, request: Request, tokens: Sequence[int]) -> None:
    if isinstance(drafter, Learns):
        drafter.ended(request, tokens)


def choice(drafter: Any) -> Choice | None:
    return getattr(drafter, "choice", None)


def measured(drafter: Any, rows: Sequence[int], seconds: float) -> None:
    if hasattr(drafter, "measured"):
        drafter.measured(rows, seconds)


def observes(session: DraftSession) -> bool:
    """Whether it wants to see the text."""
    return getattr(session.observe, "__func__", None) is not DraftSession.observe


def release(drafter: Any) -> None:
    if _offers(drafter, Releases):
        drafter.release()


def draft_ahead(drafter: Any, session: DraftSession, step: FixedStep) -> None:
    if _offers(drafter, DraftsAhead):
        drafter.draft_ahead(session, step)


def unstarted(session: DraftSession) -> bool:
    """Of one that drafts ahead: whether no draft was queued after the last step."""
    return getattr(session, "unstarted", False)


def keep(session: Any) -> None:
    if _offers(session, HoldsStates):
        session.keep()


def choices(session: Any, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
    if _offers(session, SeesChoices):
        session.choices(tree, chosen)


def skip(session: Any) -> None:
    if _offers(session, LetsGo):
        session.skip()
    else:
        keep(session)


def pause(session: Any) -> None:
    if _offers(session, Pauses):
        session.pause()


def follow(session: Any, slot: Slot | None) -> None:
    if _offers(session, ReadsKeys):
        session.follow(slot)


def silent(session: Any) -> bool:
    return getattr(session, "silent", False)


def resume(session: Any, other: DraftSession, tokens: list[int]) -> None:
    """A session that can't take over what `other` knows is shown the tokens."""
    if _offers(session, Resumes):
        session.resume(other, tokens)
    else:
        session.observe(Seen(tokens, 0))
