"""Drafter and DraftSession: the interface of drafters. `begin` and `propose` are required."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    """{layer: (n, H)}, hidden states of the target on its device. Rows of a step's tensors are picked on access, which
    must come before the next forward."""

    def __init__(
        self, tensors: Mapping[int, torch.Tensor] | None = None, rows: list[int] | None = None, lasting: bool = False
    ) -> None:
        self.tensors = dict(tensors or {})  # {layer: (·, H)}
        self.rows = rows  # the rows of the tensors that are meant; None: all
        self.lasting = lasting  # whether these tensors outlast the step: later steps write into them
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
        """These states, of some of the layers."""
        if not self.tensors:
            return self
        return Hidden({layer: self.tensors[layer] for layer in layers}, self.rows, self.lasting)

    def copy(self) -> Hidden:
        """A copy of the picked rows, which no forward writes into."""
        return Hidden({layer: self[layer].clone() for layer in self})

    def safe(self) -> Hidden:
        """These states, copied if later steps would write into them."""
        return self.copy() if self.lasting else self

    @property
    def every(self) -> list[int]:
        """The rows of the tensors that are meant."""
        return list(range(len(next(iter(self.tensors.values()))))) if self.rows is None else self.rows

    def end(self, count: int) -> Hidden:
        """The last `count` rows."""
        return Hidden(self.tensors, self.every[-count:], self.lasting)

    def beginning(self, count: int) -> Hidden:
        """The first `count` rows."""
        return Hidden(self.tensors, self.every[:count], self.lasting)


class Seen(NamedTuple):
    """Tokens that became part of the text: a piece of the prompt, or an accepted path."""

    tokens: list[int]
    position: int  # of the first of them
    # (len(tokens), H) for each layer in the drafter's `layers`. Row i is the state that read token i; the last row is
    # the state that chose the next root.
    hidden: Hidden = Hidden()


class Proposal(NamedTuple):
    tree: TokenTree  # its node 0 is the root given to `propose`
    first: tuple[int, ...] | None = None  # the likeliest tokens after the root, in order, if the option `first` asks
    # Further nodes to verify, whatever they are worth: the drafter learns from the target's choices after them.
    beside: TokenTree | None = None


class Drafter(ABC):
    """What all sequences share, read-only: weights, stores. Optional members: see `_capabilities.py`."""

    Options: ClassVar[type] = NoOptions  # a frozen dataclass; its fields are the drafter's options

    def __init__(self, target: Target, tokenizer: Any, options: Any) -> None:
        self.target, self.tokenizer, self.options = target, tokenizer, options

    @abstractmethod
    def begin(self, request: Request) -> DraftSession:
        """A session for one sequence. The prompt arrives through `observe`."""

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        """Drafts for a batch. Override this where drafting together is cheaper than one by one, and let sessions be
        `BatchedSession`s."""
        return [s.propose(r, b) for s, r, b in zip(sessions, roots, budgets, strict=True)]


class DraftSession(ABC):
    """A drafter's state for one sequence."""

    def observe(self, seen: Seen) -> None:  # noqa: B027  (a drafter may have nothing to learn)
        """The text grew."""

    @abstractmethod
    def propose(self, root: int, budget: Budget) -> Proposal:
        """Possible continuations of the observed text followed by `root`."""

    def close(self) -> None:  # noqa: B027  (a session may hold nothing)
        """The sequence ended."""


class BatchedSession(DraftSession):
    """A session of a drafter whose `propose` drafts for several sequences together."""

    drafter: Drafter

    def propose(self, root: int, budget: Budget) -> Proposal:
        return self.drafter.propose([self], [root], [budget])[0]
