"""A drafter made of other drafters, its parts: how they are made, what they observe, and how their drafts are labelled
by the text that follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from slipstream import drafters as registry
from slipstream.drafters import _capabilities as can
from slipstream.drafters.base import BatchedSession, Drafter, DraftSession, Hidden, Seen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.datastores.live import EarlierAnswers
    from slipstream.request import Request
    from slipstream.targets.base import Slot
    from slipstream.tree import TokenTree


class JointDrafter(Drafter):
    """Several drafters as one."""

    def __init__(self, target: Any, tokenizer: Any, options: Any) -> None:
        super().__init__(target, tokenizer, options)
        self.parts = self.make_parts()
        self.layers = tuple(sorted({layer for part in self.parts.values() for layer in can.layers(part)}))
        self.in_pages = any(map(can.in_pages, self.parts.values()))
        self.shared = max(can.shared(part) for part in self.parts.values())
        again = [can.rereads(part) for part in self.parts.values()]
        self.rereads = None if None in again else max(n for n in again if n is not None)

    @abstractmethod
    def make_parts(self) -> dict[str, Drafter]:
        """The parts, by name."""

    def make_part(self, name: str, given: dict[str, Any]) -> Drafter:
        """A drafter with those of the given options that it has and that are set."""
        known = {field.name for field in fields(registry.find(name).Options)}
        own = {option: value for option, value in given.items() if option in known and value}
        return registry.make(name, self.target, self.tokenizer, **own)

    def release(self) -> None:
        in_turn([partial(can.release, part) for part in self.parts.values()])

    def renewed(self, name: str) -> None:
        """One of its parts has new weights."""

    @abstractmethod
    def learn(self, tree: TokenTree, followed: Sequence[int], known: int) -> bool:
        """Learn from a tree of `JointSession.proposed` and the tokens that followed its root. The first `known` of
        these were passed in an earlier call. Returns whether some nodes can't be labelled before more text follows."""

    def attach(self, answers: EarlierAnswers) -> None:
        for part in self.parts.values():
            can.attach(part, answers)

    def begin(self, request: Request) -> DraftSession:
        return JointSession(self, begin_parts(self.parts, request))

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        in_turn(partial(can.ended, part, request, tokens) for part in self.parts.values())


def in_turn(calls: Iterable[Callable[[], None]]) -> None:
    """Make all of these calls, though some fail. Then the first error is raised."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def begin_parts(parts: Mapping[str, Drafter], request: Request) -> dict[str, DraftSession]:
    """A session of each part, or of none if one of them can't begin."""
    begun: dict[str, DraftSession] = {}
    try:
        for name, part in parts.items():
            begun[name] = part.begin(request)
    except BaseException:
        for session in begun.values():
            session.close()
        raise
    return begun


class JointSession(BatchedSession):
    """One sequence: a session of each part, and the drafts whose nodes are not all labelled yet."""

    drafter: JointDrafter

    def __init__(self, drafter: JointDrafter, parts: dict[str, DraftSession]) -> None:
        self.drafter, self.parts = drafter, parts
        self.begun = False  # whether the prompt is read
        self._emitted: list[int] = []  # tokens since the first root
        self._open: list[tuple[TokenTree, int, int]] = []  # drafts, their roots' places, tokens labelled by so far

    def observe(self, seen: Seen) -> None:
        if self.begun:
            self._emitted += seen.tokens
        for name, part in self.parts.items():
            part.observe(self._for(name, seen))

    def _for(self, name: str, seen: Seen) -> Seen:
        """What a part observes, with the states that it reads."""
        layers = can.layers(self.drafter.parts[name])
        return Seen(seen.tokens, seen.position, seen.hidden.of(layers) if layers else Hidden())

    def reread(self, seen: Seen) -> None:
        for name, part in self.parts.items():
            if can.in_pages(self.drafter.parts[name]):
                can.reread(part, self._for(name, seen))

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        for part in self.parts.values():
            can.choices(part, tree, chosen)

    def keep(self) -> None:
        for part in self.parts.values():
            can.keep(part)

    def follow(self, slot: Slot | None) -> None:
        for part in self.parts.values():
            can.follow(part, slot)

    def pause(self) -> None:
        for part in self.parts.values():
            can.pause(part)

    def settled(self, length: int) -> int:
        return min([can.settled(part, length) for part in self.parts.values()], default=length)

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        known = cast(JointSession, other).parts
        for name, part in self.parts.items():
            if name in known:
                can.resume(part, known[name], tokens)
            else:
                part.observe(Seen(tokens, 0))

    def proposed(self, tree: TokenTree) -> None:
        """Remember a draft with each source's raw scores, verified or not, until the text labels it."""
        if len(tree) > 1:
            self._open.append((tree, len(self._emitted), 0))

    def label(self, *coming: int) -> None:
        """Label open drafts by the text that followed them. coming: the next root, if it is decided already: it labels
        one more node."""
        self.begun = True
        still = []
        for tree, place, known in self._open:
            followed = [*self._emitted[place:], *coming][1:]  # empty if the draft follows the coming root
            if len(followed) <= known or self.drafter.learn(tree, followed, known):
                still.append((tree, place, max(known, len(followed))))
        self._open = still

    def close(self) -> None:
        try:
            in_turn([self.label, *(part.close for part in self.parts.values())])
        finally:
            self._open = []
