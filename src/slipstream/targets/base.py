"""Target: one frozen model on one device, as the engine sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.sampling import Sampler, check_choice
from slipstream.tree import TokenTree
from slipstream.turns import Turns

PIECE = 256  # tokens of two texts that are compared at a time


class Want(NamedTuple):
    """What a forward must return."""

    layers: tuple[int, ...] = ()  # hidden states to return, by number: see `states.py`
    rows: int = 1  # of one tree: to compute at least, padding included. As many in all steps give the same bits
    # For each sequence, the sampler that chooses the tokens after its nodes. If the target can follow it, tokens are
    # chosen within the forward and logits stay on the device. None: the caller reads this sequence's logits.
    samplers: tuple[Sampler | None, ...] = ()
    # Called with the step while it still runs on the device, by targets that run ahead of the host (`Target.ahead`).
    # It may start work that reads what the step leaves on the device.
    during: Callable[[Any], None] | None = None

    @property
    def argmax(self) -> bool:
        """Whether every sequence just takes its most probable tokens."""
        return bool(self.samplers) and all(s is not None and s.sampling.plain for s in self.samplers)


@dataclass(eq=False)
class Slot:
    """One sequence's place in the target's cache, and the tokens read into it."""

    tokens: list[int] = field(default_factory=list)  # committed
    row: int = 0  # of the cache, or of its table of pages
    pages: list[int] = field(default_factory=list)  # that hold its keys, where the cache has pages
    tree: TokenTree | None = None  # scored last, not yet committed
    pending: list[int] | None = None  # an accepted path whose keys still have to move into place
    wants_attention: bool = False  # whether the next `score` must report what its root attends to
    attended: torch.Tensor | None = None  # that report: weights by block of the text, summed over all layers and heads

    @property
    def length(self) -> int:
        return len(self.tokens)

    position = length  # of the next token

    def accept(self, path: Sequence[int]) -> None:
        """Commit nodes of the tree that was scored last. Their keys are moved by the next forward."""
        assert self.tree is not None, "commit follows score"
        self.pending = list(path)
        self.tokens += map(self.tree.tokens.item, self.pending)
        self.tree = None

    def set_attended(self, weights: torch.Tensor) -> None:
        """Take the report of attention weights that `wants_attention` requested."""
        self.attended, self.wants_attention = weights, False

    def shared(self, tokens: Sequence[int]) -> int:
        """The length of the common prefix of its tokens and a text."""
        return shared(self.tokens, tokens)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two texts."""
    begin, most = 0, min(len(one), len(other))
    while begin < most and list(one[begin : begin + PIECE]) == list(other[begin : begin + PIECE]):
        begin += PIECE  # whole pieces first: comparing tokens one by one is slow
    pairs = enumerate(zip(one[begin : begin + PIECE], other[begin : begin + PIECE], strict=False))
    return next((begin + i for i, (a, b) in pairs if a != b), most)


@dataclass(eq=False, kw_only=True)
class Part(Slot):
    """Some blocks of another slot's keys, to draft with: see `Target.select`. Close it before that slot's next step."""

    whole: Slot
    blocks: list[int]  # their numbers, in order

    @classmethod
    def of(cls, whole: Slot, blocks: Sequence[int], size: int, row: int) -> Part:
        """size: tokens per block."""
        tokens = [token for block in blocks for token in whole.tokens[block * size : (block + 1) * size]]
        return cls(tokens=tokens, row=row, whole=whole, blocks=list(blocks))

    @property
    def position(self) -> int:
        return self.whole.length

    def positions(self, size: int) -> NDArray[np.int64]:
        """(length,) positions of its tokens in the text."""
        each = np.asarray(self.blocks, np.int64)[:, None] * size + np.arange(size)
        return each.ravel()[: self.length]  # only the last block may be short


class Scores:
    """The target's results for one tree. Logits and hidden states are valid until the next forward."""

    replayed = False  # whether later forwards write into the same tensors
    # Where steps are captured: captures a function of tensors too (`Captured`).
    captured: Callable[[Callable[..., Any]], Any] | None = None
    decided: Any = None  # decisions of an accept rule for all nodes at once, if it made them
    _tokens: list[int] | None = None  # chosen within the forward
    _values: list[float] | None = None

    def __init__(
        self,
        logits: torch.Tensor,
        hidden: dict[int, torch.Tensor],
        positions: NDArray[Any],
        first: int = 0,
        begin: int = 0,
    ) -> None:
        self._logits = logits  # (·, V)
        self._first = first  # the first node that was computed
        self._begin = begin  # that node's row in logits and hidden states, which may hold other trees' rows too
        self._positions = positions  # (n - first,) absolute
        self.hidden = hidden  # {layer: (·, H)} on the device

    def logits(self, node: int) -> torch.Tensor:
        """(V,) the logits of the token after `node`."""
        return self._logits[self._begin + node - self._first]

    @property
    def of_step(self) -> torch.Tensor:
        """(·, V) the logits of all rows of the step, other sequences' included, not copied."""
        return self._logits

    def every(self) -> torch.Tensor:
        """(n, V) the logits of all nodes that were computed."""
        return self._logits[self._begin : self._begin + len(self._positions)]

    def rows(self, nodes: Sequence[int]) -> list[int]:
        """The rows of these nodes' hidden states."""
        return [self._begin + node - self._first for node in nodes]

    def take(self, tokens: list[int], values: list[float] | None) -> None:
        """Set the tokens that were chosen within the forward, one after each node, and their logits. values: None if
        all logits are known to be finite."""
        self._tokens, self._values = tokens, values

    def token(self, node: int, sampler: Sampler) -> int:
        """The token after `node`: chosen within the forward, or else sampled now."""
        i = node - self._first
        if self._tokens is not None:
            if self._values is not None:
                check_choice(self._values[i], int(self._positions[i]) + 1)
            return self._tokens[i]
        return sampler.sample(self.logits(node))

    def chosen(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """(m,) the tokens after these nodes: chosen within the forward, or else the most probable ones."""
        rows = np.asarray(nodes, np.int64) - self._first
        if self._tokens is not None:
            return np.array(self._tokens, np.int64)[rows]
        found: NDArray[np.int64] = self._logits[torch.from_numpy(rows) + self._begin].argmax(-1).cpu().numpy()
        return found


class Target(ABC):
    """One frozen model on one device. A batch is a list of slots."""

    vocabulary: int  # how many logits a row has
    context: int  # how many tokens the model can read
    device: torch.device
    dtype: torch.dtype
    trees: bool = True  # False: only chains can be scored
    chains: bool = True  # False: only the root can be scored
    exact: bool = True  # False: precision is too low to guarantee that a text does not depend on what was drafted
    exact_together: bool = True  # the same for a batch, whose other members change
    ahead: bool = False  # whether it calls `Want.during`, where it chooses tokens itself
    flat: bool = False  # whether a step has as many rows as its trees have nodes together; else each has the widest's
    # Whether the cache has pages: copies of a slot share them, and a text's bits do not depend on the pieces in which
    # it was read.
    paged: bool = False
    mixes: bool = False  # whether it has `score_and_read`
    chunk: int = 1 << 30  # tokens that one forward reads at most
    block: int = 0  # tokens of a text that `select` takes or leaves together; 0: it can't select
    widths: tuple[int, ...] = ()  # numbers of rows that steps are padded to; empty: they are not padded
    notes: tuple[str, ...] = ()  # remarks about this model for its user
    share: float = 0.9  # of a GPU's free memory that its cache may take, and that of a draft model beside it

    @property
    def default_draft(self) -> int:
        """Nodes that a step drafts at most if a request does not say: with the root, a padded step of 32 rows."""
        return 31 if self.widths else 16

    @property
    def turns(self) -> Turns:
        """The lock that threads using this target's model take turns at."""
        return Turns.of(getattr(self, "model", self))

    @abstractmethod
    def open(self) -> Slot:
        """An empty slot."""

    @abstractmethod
    def close(self, slot: Slot) -> None:
        """Free the slot's room in the cache."""

    @abstractmethod
    def fork(self, slot: Slot) -> Slot:
        """A copy of a slot: it has read the same tokens."""

    @abstractmethod
    def truncate(self, slot: Slot, length: int) -> None:
        """Forget everything after the first `length` tokens."""

    def cuts(self, slot: Slot, length: int) -> bool:  # noqa: ARG002
        """Whether `truncate` to this length keeps what was read. If not, all of it must be read again."""
        return True

    @abstractmethod
    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        """Read tokens and commit them: one Scores per chunk, with the hidden states of the whole chunk. Only the
        chunk's last row has logits, as node 0."""

    def read(self, slots: Sequence[Slot], pieces: Sequence[Sequence[int]], want: Want) -> list[Scores]:
        """`prefill` of one piece of each of several texts, together no longer than a chunk. Where steps are flat, this
        is one forward."""
        found: list[Scores] = []
        for i, (slot, piece) in enumerate(zip(slots, pieces, strict=True)):
            found += self.prefill(slot, piece, want._replace(samplers=want.samplers[i : i + 1]))
        return found

    def chooses(self, sampler: Sampler | None) -> bool:  # noqa: ARG002
        """Whether `score` chooses this sampler's tokens within the forward, from the committed text alone, and calls
        `Want.during`. Then the next forward may begin before the host has verified the latest one."""
        return False

    @abstractmethod
    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        """Score trees in ONE forward for the whole batch. The first `known` nodes of each tree were scored by the call
        before and are not computed again: so a draft model grows a tree level by level."""

    def score_and_read(
        self,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        readers: Sequence[Slot],
        pieces: Sequence[Sequence[int]],
        want: Want,
    ) -> tuple[list[Scores], list[Scores]]:
        """`score` some texts and `read` others in ONE forward of at most `chunk` rows."""
        raise NotImplementedError(f"{type(self).__name__} reads prompts by forwards of their own")

    def extend(
        self, slots: Sequence[Slot], trees: Sequence[TokenTree], known: Sequence[int], want: Want
    ) -> list[Scores]:
        """`score` trees with different numbers of known nodes. Where steps are flat, this is one forward."""
        each = zip(slots, trees, known, strict=True)
        return [self.score([slot], [tree], want, nodes)[0] for slot, tree, nodes in each]

    def draft_chains(
        self,
        slots: Sequence[Slot],  # noqa: ARG002
        chains: Sequence[Sequence[int]],  # noqa: ARG002
        depth: int,  # noqa: ARG002
        vocabulary: int,  # noqa: ARG002
    ) -> list[list[tuple[int, float]]] | None:
        """Draft greedily on the device, without the host between tokens: the `depth` most probable tokens after each
        chain, one after the other, with their log-probabilities. The chain and all but the last of them are read, as
        `extend` would. vocabulary: number of tokens that may be drafted. None: this target can't."""
        return None

    def select(self, slot: Slot, blocks: Sequence[int]) -> Part:
        """A slot to draft with that has only some blocks of a text's keys, at their positions in the text. `extend` it,
        and `close` it before the text's next step. blocks: their numbers, in order; the last one ends the text."""
        raise NotImplementedError(f"{type(self).__name__} can't draft from a part of a text")

    def attended(self, slot: Slot, count: int) -> torch.Tensor | None:
        """(length,) how much the last `count` tokens of a text attend to each of its tokens: weights, summed over all
        layers and heads. These tokens are read once more for it. None: this model does not report attention."""
        twin = self.fork(slot)
        try:
            self.truncate(twin, max(0, slot.length - count))
            return self._watched(twin, slot.tokens[twin.length :])
        finally:
            self.close(twin)

    def _watched(self, slot: Slot, tokens: Sequence[int]) -> torch.Tensor | None:  # noqa: ARG002
        """(length,) read these tokens and return how much they attend to each token of the text, or None."""
        return None

    @property
    def filled(self) -> float | None:
        """The share of its pages that texts hold, kept texts included; None if it has no pages."""
        return None

    def release(self) -> None:  # noqa: B027  most have nothing to do
        """Free the memory at once, even if there are still references to this target. It can't be used any more."""

    @abstractmethod
    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """Make a path, the root first, part of the text. Keys are moved inside the next forward."""
