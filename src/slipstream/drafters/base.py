"""Drafter and DraftSession: what a drafter must do. `begin` and `propose` are required."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets.base import Target
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
    first: tuple[int, ...] | None = None  # the tokens likeliest after the root, in order, if somebody wants them named
    # Nodes that are verified too, whatever they are worth: their drafter wants to know what the target says of them.
    beside: TokenTree | None = None


class Drafter(ABC):
    """Shared by all sequences and read-only: weights, stores. What else one may offer: `_capabilities.py`."""

    Options: ClassVar[type] = NoOptions  # a frozen dataclass; its fields are the drafter's options

    def __init__(self, target: Target, tokenizer: Any, options: Any) -> None:
        self.target, self.tokenizer, self.options = target, tokenizer, options

    @abstractmethod
    def begin(self, request: Request) -> DraftSession:
        """A session for one sequence. The prompt arrives through `observe`."""

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        """Drafts for a whole batch. Override where drafting together is cheaper than one by one."""
        return [s.propose(r, b) for s, r, b in zip(sessions, roots, budgets, strict=True)]


class DraftSession(ABC):
    """One sequence's state."""

    def observe(self, seen: Seen) -> None:  # noqa: B027  (a drafter may have nothing to learn)
        """The text grew."""

    @abstractmethod
    def propose(self, root: int, budget: Budget) -> Proposal:
        """Possible continuations of the text that was observed, plus `root`."""

    def close(self) -> None:  # noqa: B027  (a session may hold nothing)
        """The sequence ended."""
