"""What a drafter and its sessions may offer beyond `begin` and `propose`.

Each capability is a protocol: a class that has its members offers it. The engine, and drafters made of other drafters,
look for capabilities through the functions below and nowhere else. A capability that is not offered costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slipstream.drafters.base import Drafter, DraftSession, Seen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.budget import Budget
    from slipstream.budget.pilot import Choice
    from slipstream.datastores.live import EarlierAnswers
    from slipstream.request import Request
    from slipstream.targets.base import Slot, Target
    from slipstream.targets.captured.fixed_step import FixedStep
    from slipstream.tree import TokenTree


# ---- of a drafter


class ReadsStates(Protocol):
    """Its sessions observe hidden states of the target."""

    layers: tuple[int, ...]  # which states: 0 the embeddings, L the last layer's (see `targets/states.py`)
    # For a session that resumes at a cached prefix: how many of the prefix's last tokens it must be shown again, with
    # their states. None, which is the default: all.
    rereads: int | None


class Rests(Protocol):
    """It needs the states of some steps only."""

    resting: int  # steps after the one proposed last without a draft; unless 0, that one's states are not needed


class Idles(Protocol):
    """It knows in advance that it will propose nothing. Then it is not asked, and the step may begin before the latest
    one is verified. Of steps that follow each other like this its sessions observe the last one only: if they want the
    tokens between, these are in their slot (`ReadsKeys`)."""

    idle: bool  # whether it will propose nothing for the next step

    def rests_with(self, sessions: Sequence[Any]) -> bool:
        """Whether it will propose nothing for the next step, though some of its sessions are new."""

    def rest(self) -> None:
        """That step begins, without asking it."""


class Generates(Protocol):
    """It is a language model: it has a probability for every token."""

    generates: bool  # True
    first: int  # how many of the likeliest first tokens `Proposal.first` names, in the tree or not
    sizes: tuple[int, ...]  # small numbers of nodes that it drafts in notably less time than a full draft


class KeepsKeys(Protocol):
    """Its sessions keep keys of their own in the pages of the text."""

    in_pages: bool  # whether they do, so that both are freed together


class TakesWishes(Protocol):
    """It uses fields of a request that are refused with other drafters."""

    takes: tuple[str, ...]  # of "prediction", "drafters"


class DraftsMuch(Protocol):
    """It sets how many nodes a step drafts at most if the request does not. The default is the target's."""

    default_draft: int


class Invests(Protocol):
    """Its proposals have nodes `beside` the tree, within the budget's `beside`. It learns from their scores, so that
    later drafts get better."""

    invests: int  # such nodes at most
    returns: NDArray[np.float64]  # relative gain in tokens per step, in the long run, of 0, 1, … such nodes


class Pads(Protocol):
    """It sets whether every step is padded to the widest one, so that in low precision a text does not depend on how
    much was drafted. The default is to pad; only plain decoding can do without."""

    pads: bool


@runtime_checkable
class ReadsAnswers(Protocol):
    """It drafts from earlier answers."""

    shared: int  # how many tokens of answers the engine keeps for it, per collection; 0: none

    def attach(self, answers: EarlierAnswers) -> None:
        """Called once, with the place to read the answers from."""


@runtime_checkable
class Learns(Protocol):
    """It learns from complete answers."""

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        """The request has ended; these tokens are its answer."""


@runtime_checkable
class Releases(Protocol):
    """It holds memory on a device."""

    def release(self) -> None:
        """It will not be used again: free the memory."""


class Decides(Protocol):
    """It decides how much is verified, by the measured times of steps."""

    @property
    def choice(self) -> Choice | None:
        """What it decided about the step that was proposed last."""

    def measured(self, rows: Sequence[int], forward: float, host: float) -> None:
        """The seconds of a step with so many rows per sequence: the target's forward, and what the host did besides
        without `propose`, as far as it did not overlap with a forward."""


class Peeks(Protocol):
    """While it rests, it can draft beside a plain step that is under way, to see whether to go on resting."""

    def peeks(self, session: Any) -> bool:
        """Whether it wants to for this session."""

    def peek(self, session: Any, root: int, budget: Budget) -> None:
        """A step of this sequence alone is under way, which scores this root."""


@runtime_checkable
class DraftsAhead(Protocol):
    """On a GPU it can queue the next draft while a step still runs there."""

    def draft_ahead(self, sessions: Mapping[int, Any], step: FixedStep) -> None:
        """A step runs on the device: queue the draft that reads its results. sessions: of all of its sequences or some,
        by their numbers in the step."""


# ---- of a session


@runtime_checkable
class HoldsStates(Protocol):
    """It holds states that lie in the target's own tensors."""

    def keep(self) -> None:
        """The next forward is about to overwrite the states of the last one: copy what is still needed."""


@runtime_checkable
class LetsGo(Protocol):
    """It can do without the states of a step that it was not asked to draft from."""

    def skip(self) -> None:
        """Instead of `keep`: drop the states of the last forward."""


@runtime_checkable
class SeesChoices(Protocol):
    """It learns from the tokens that the target chose after nodes of its draft, accepted or not."""

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        """A step has verified this tree, which contains its draft. chosen: gives the target's choices after some of the
        nodes; where a request's tokens are chosen on the host, the most probable tokens. Valid during this call."""


@runtime_checkable
class Pauses(Protocol):
    """It holds data that lies in tensors of the target, or of a captured draft."""

    def pause(self) -> None:
        """Forwards of other sequences come before the next one of this: copy what they would overwrite."""


@runtime_checkable
class Resumes(Protocol):
    """It can start from another session that has observed the same prefix."""

    def resume(self, other: Any, tokens: list[int]) -> None:
        """Called first, on a new session: both texts begin with these tokens, which `other` has observed. Copy what is
        known of them from there."""


@runtime_checkable
class Settles(Protocol):
    """It has work left to do before another session can start from it."""

    def settled(self, length: int) -> int:
        """How many of the first `length` tokens another session should start with: fewer if it is better to read the
        last of them again than to do what is left."""


@runtime_checkable
class ReadsKeys(Protocol):
    """It drafts with the target's own keys of its text, or has keys in the same pages."""

    def follow(self, slot: Slot | None) -> None:
        """The slot that holds the keys from now on. None: they were freed, until the next call."""


class Rereads(Protocol):
    """It has keys in the pages of its text (`KeepsKeys`)."""

    def reread(self, seen: Seen) -> None:
        """`observe`, once more from the beginning: the pages were freed and are written again."""


class KeepsSilent(Protocol):
    """There are texts that it proposes nothing for, for instance short ones."""

    silent: bool  # whether it proposes nothing now, so that it need not be asked


# ---- using capabilities


def _offers(one: Any, capability: type) -> bool:
    kind: Any = type(one)
    return _class_offers(kind, capability)


@cache
def _class_offers(kind: Any, capability: type) -> bool:
    """Cached: looking at a class's members takes microseconds, and some are looked for in every step."""
    return issubclass(kind, capability)


def layers(drafter: Drafter | type[Drafter]) -> tuple[int, ...]:
    return getattr(drafter, "layers", ())


def step_layers(drafter: Drafter) -> tuple[int, ...]:
    """The layers whose states the step that was proposed last must give."""
    return () if getattr(drafter, "resting", False) else layers(drafter)


def idle(drafter: Drafter) -> bool:
    return getattr(drafter, "idle", False)


def rests_with(drafter: Any, sessions: Sequence[DraftSession], new: bool) -> bool:
    """new: whether some of the sessions have just begun."""
    return idle(drafter) and (drafter.rests_with(sessions) if hasattr(drafter, "rests_with") else not new)


def rest(drafter: Any) -> None:
    if hasattr(drafter, "rest"):
        drafter.rest()


def rereads(drafter: Drafter) -> int | None:
    return getattr(drafter, "rereads", None if layers(drafter) else 0)


def in_pages(drafter: Drafter) -> bool:
    return getattr(drafter, "in_pages", False)


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


def ended(drafter: Any, request: Request, tokens: Sequence[int]) -> None:
    if _offers(drafter, Learns):
        drafter.ended(request, tokens)


def choice(drafter: Any) -> Choice | None:
    return getattr(drafter, "choice", None)


def measured(drafter: Any, rows: Sequence[int], forward: float, host: float) -> None:
    if hasattr(drafter, "measured"):
        drafter.measured(rows, forward, host)


def peeks(drafter: Any, session: DraftSession) -> bool:
    return hasattr(drafter, "peeks") and drafter.peeks(session)


def peek(drafter: Any, session: DraftSession, root: int, budget: Budget) -> None:
    drafter.peek(session, root, budget)


def observes(session: DraftSession) -> bool:
    """Whether the session overrides `observe`."""
    return getattr(session.observe, "__func__", None) is not DraftSession.observe


def release(drafter: Any) -> None:
    if _offers(drafter, Releases):
        drafter.release()


def draft_ahead(drafter: Any, sessions: Mapping[int, DraftSession], step: FixedStep) -> None:
    if _offers(drafter, DraftsAhead):
        drafter.draft_ahead(sessions, step)


def unstarted(session: DraftSession) -> bool:
    """For a session that can draft ahead: whether no draft was queued after the last step."""
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


def reread(session: Any, seen: Seen) -> None:
    session.reread(seen)


def silent(session: Any) -> bool:
    return getattr(session, "silent", False)


def settled(session: Any, length: int) -> int:
    return session.settled(length) if _offers(session, Settles) else length


def resume(session: Any, other: DraftSession, tokens: list[int]) -> None:
    """Start from `other`'s knowledge of a prefix. A session that can't is shown its tokens instead."""
    if _offers(session, Resumes):
        session.resume(other, tokens)
    else:
        session.observe(Seen(tokens, 0))
