"""Drafter and DraftSession: what a drafter must do. One method each is required."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from slipstream.budget import Budget
    from slipstream.budget.pilot import Choice
    from slipstream.datastores.live import Said
    from slipstream.request import Request
    from slipstream.targets.base import Target
    from slipstream.targets.captured.fixed_step import FixedStep
    from slipstream.tree import TokenTree


@dataclass(frozen=True)
class NoOptions:
    """For drafters with nothing to set."""


class Hidden(Mapping[int, Any]):
    """{layer: (n, H)}, states of the target on its device. Those of a step are picked when somebody looks, which is
    possible until the next forward."""

    def __init__(
        self, tensors: Mapping[int, torch.Tensor] | None = None, rows: list[int] | None = None, lasting: bool = False
    ) -> None:
        self.tensors = dict(tensors or {})  # {layer: (·, H)}
        self.rows = rows  # which of their rows; None: all
        self.lasting = lasting  # whether later steps write into the same tensors
        self._index: torch.Tensor | None = None

    def __getitem__(self, layer: int) -> torch.Tensor:
        whole = self.tensors[layer]
        if self.rows is None:
            return whole
        first = self.rows[0]
        if self.rows == list(range(first, first + len(self.rows))):  # as after a step that accepted nothing
            return whole[first : first + len(self.rows)]
        if self._index is None:
            import torch

            self._index = torch.tensor(self.rows, device=whole.device)
        return whole.index_select(0, self._index)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def of(self, layers: Iterable[int]) -> Hidden:
        """Some of the layers."""
        if not self.tensors:
            return self
        return Hidden({layer: self.tensors[layer] for layer in layers}, self.rows, self.lasting)

    def copy(self) -> Hidden:
        """The same, for as long as it is needed."""
        return Hidden({layer: self[layer].clone() for layer in self})

    def safe(self) -> Hidden:
        """The same, and later steps don't write into it."""
        return self.copy() if self.lasting else self

    def end(self, count: int) -> Hidden:
        """The last rows alone."""
        rows = self.rows
        if rows is None:
            there = len(next(iter(self.tensors.values())))
            rows = list(range(max(0, there - count), there))
        return Hidden(self.tensors, rows[-count:], self.lasting)


@dataclass(frozen=True)
class Seen:
    """Tokens that became part of the text: a chunk of the prompt, or an accepted path."""

    tokens: list[int]
    position: int  # of the first of them
    # (len(tokens), H) of the layers the drafter asked for. Row i is the state that read token i; the state that chose
    # the next root is the last row.
    hidden: Hidden = field(default_factory=Hidden)


@dataclass(frozen=True)
class Proposal:
    tree: TokenTree  # its node 0 is the root that was asked about
    first: tuple[int, ...] | None = None  # the tokens likeliest after the root, in order, if `Drafter.first` asks


class Drafter(ABC):
    """Shared by all sequences and read-only: weights, stores."""

    Options: ClassVar[type] = NoOptions  # a frozen dataclass; its fields are the drafter's options
    layers: tuple[int, ...] = ()  # hidden states of the target it wants to see
    # Whether every step is computed as wide as the widest, so that in low precision a text does not depend on how much
    # was drafted: only plain decoding can do without.
    pads: bool = True
    takes: tuple[str, ...] = ()  # fields of a request, beyond the usual, that it makes something of: "prediction", …
    shared: int = 0  # tokens of earlier answers, of each collection, that the engine keeps for it
    # Whether it has a probability for every token, and if so, how many of the likeliest its proposals name, whether
    # they are in the tree or not. Whoever wants them sets this before anything is drafted.
    generates: ClassVar[bool] = False
    first: int = 0
    sizes: tuple[int, ...] = ()  # of such: numbers of nodes that it drafts in notably less time than more

    def __init__(self, target: Target, tokenizer: Any, options: Any) -> None:
        self.target, self.tokenizer, self.options = target, tokenizer, options

    @property
    def choice(self) -> Choice | None:
        """What it decided about the latest step, if it is one that decides."""
        return None

    @classmethod
    def trials(cls, model: Any) -> list[dict[str, Any]]:  # noqa: ARG003
        """Options with which the laws try this drafter on a target model. Override if it can't do without any."""
        return [{}]

    @abstractmethod
    def begin(self, request: Request) -> DraftSession:
        """A session for one sequence. The prompt arrives through `observe`."""

    @property
    def rereads(self) -> int | None:
        """Where a text was read before: how many of its last tokens a session that resumes there must be shown again,
        with their states. None: all of it, as whoever reads hidden states and can't resume."""
        return None if self.layers else 0

    def attach(self, said: Said) -> None:  # noqa: B027  (most drafters share nothing)
        """Called once by an engine, if `shared` is set: where what earlier requests were answered can be read."""

    def ended(self, request: Request, tokens: Sequence[int]) -> None:  # noqa: B027  (most drafters learn nothing)
        """A request was answered with these tokens."""

    def measured(self, batch: int, rows: int, seconds: float) -> None:  # noqa: B027  (most drafters don't count)
        """A step of that many sequences, and rows for each, took so long behind its drafts: the target's forward, and
        what came of it."""

    def behind(self, session: DraftSession, step: FixedStep) -> None:  # noqa: B027  (most draft on the host)
        """A step of this sequence alone runs on the device: what needs nothing else can be started behind it."""

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        """Drafts for a whole batch. Override where drafting together is cheaper than one by one."""
        return [s.propose(r, b) for s, r, b in zip(sessions, roots, budgets, strict=True)]


class DraftSession(ABC):
    """One sequence's state."""

    @property
    def late(self) -> bool:
        """Of one that drafts behind steps (`Drafter.behind`): whether nothing was started behind the last one."""
        return False

    def observe(self, seen: Seen) -> None:  # noqa: B027  (a drafter may have nothing to learn)
        """The text grew."""

    def keep(self) -> None:  # noqa: B027  (a session may hold nothing of the kind)
        """The next forward is about to run: whatever of the last one's states is still wanted must be copied."""

    def pause(self) -> None:  # noqa: B027  (likewise)
        """Forwards for others come before the next of this sequence: what lies in the target's own tensors and is still
        wanted must be copied."""

    def resume(self, other: DraftSession, tokens: list[int]) -> None:  # noqa: ARG002
        """Before anything else: the text begins with these tokens, as that of `other` does, which knows them. What is
        taken from there is copied."""
        self.observe(Seen(tokens, 0))

    def skip(self) -> None:
        """Instead of `keep`: nobody asked for a draft behind these states, and it may go without them."""
        self.keep()

    @abstractmethod
    def propose(self, root: int, budget: Budget) -> Proposal:
        """Possible continuations of the text that was observed, plus `root`."""

    def close(self) -> None:  # noqa: B027  (a session may hold nothing)
        """The sequence ended."""
