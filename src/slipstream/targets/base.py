"""Target: one frozen model on one device, as the engine sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.sampling import Sampler, check_choice
from slipstream.tree import TokenTree
from slipstream.turns import Turns

PIECE = 256  # tokens of two texts that are compared at a time


@dataclass(frozen=True)
class Want:
    """What a forward must give back."""

    layers: tuple[int, ...] = ()  # hidden states, by their numbers: see `states.py`
    rows: int = 1  # to compute at least, padding included: the same number for all steps gives the same bits
    # Who chooses the token after each sequence's nodes. Where it can, the forward chooses along with them, and logits
    # stay on the device; None: this sequence's logits are read.
    samplers: tuple[Sampler | None, ...] = ()
    # What reads nothing but what the forward leaves on the device can be started before the forward has ended: a target
    # that runs ahead of the host calls this then, with the step under way.
    during: Callable[[Any], None] | None = None

    @property
    def argmax(self) -> bool:
        """Whether the most probable tokens are all that is asked for."""
        return bool(self.samplers) and all(s is not None and s.sampling.plain for s in self.samplers)


@dataclass(eq=False)
class Slot:
    """One sequence's place in the target: the tokens it has read."""

    tokens: list[int] = field(default_factory=list)  # committed
    row: int = 0  # where in the cache
    pages: list[int] = field(default_factory=list)  # of the cache that it has read into, where that is cut into pages
    tree: TokenTree | None = None  # scored last, not yet committed
    pending: list[int] | None = None  # an accepted path whose rows still have to move into place
    asks: bool = False  # whether the next `score` should tell what its root attends to
    attended: torch.Tensor | None = None  # and what it told: weights by block of the text, over all layers and heads

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Of the token that comes next."""
        return self.length

    def accept(self, path: Sequence[int]) -> None:
        """Nodes of the tree that was scored last become text; their keys are moved later."""
        assert self.tree is not None, "commit follows score"
        self.pending = list(path)
        self.tokens.extend(self.tree.tokens[self.pending].tolist())
        self.tree = None

    def hear(self, weights: torch.Tensor) -> None:
        """What was asked for."""
        self.attended, self.asks = weights, False

    def shared(self, tokens: Sequence[int]) -> int:
        """How many tokens it begins with that a text begins with too."""
        return shared(self.tokens, tokens)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    begin, most = 0, min(len(one), len(other))
    while begin < most and list(one[begin : begin + PIECE]) == list(other[begin : begin + PIECE]):
        begin += PIECE  # many at a time, as far as they agree
    pairs = enumerate(zip(one[begin : begin + PIECE], other[begin : begin + PIECE], strict=False))
    return next((begin + i for i, (a, b) in pairs if a != b), most)


@dataclass(eq=False, kw_only=True)
class Part(Slot):
    """Some blocks of another slot's keys, to draft with: see `Target.select`. It ends before the text goes on."""

    whole: Slot
    blocks: list[int]  # which, in order

    @classmethod
    def of(cls, whole: Slot, blocks: Sequence[int], size: int, row: int) -> Part:
        """size: tokens of a block."""
        tokens = [token for block in blocks for token in whole.tokens[block * size : (block + 1) * size]]
        return cls(tokens=tokens, row=row, whole=whole, blocks=list(blocks))

    @property
    def position(self) -> int:
        return self.whole.length

    def positions(self, size: int) -> NDArray[np.int64]:
        """(length,) of its tokens, in the text."""
        each = np.asarray(self.blocks, np.int64)[:, None] * size + np.arange(size)
        return each.ravel()[: self.length]  # only the last block may be short


class Scores:
    """What the target says about one tree. Logits and hidden states are valid until the next forward."""

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
        self._begin = begin  # its row, in logits and hidden states: those of others may lie before and after
        self._positions = positions  # (n - first,) absolute
        self.hidden = hidden  # {layer: (·, H)} on the device
        self.replayed = False  # whether later forwards write into the same tensors
        self.captured: Callable[[Callable[..., Any]], Any] | None = None  # of a function of tensors, where steps are
        self.decided: Any = None  # what a rule has found out about all nodes at once
        self._tokens: list[int] | None = None  # chosen along with the forward
        self._values: list[float] | None = None

    def logits(self, node: int) -> torch.Tensor:
        """(V,) the logits of what follows `node`."""
        return self._logits[self._begin + node - self._first]

    @property
    def of_step(self) -> torch.Tensor:
        """(·, V) the logits of all rows of the step, where they lie."""
        return self._logits

    def every(self) -> torch.Tensor:
        """(n, V) those of all nodes that were computed."""
        return self._logits[self._begin : self._begin + len(self._positions)]

    def rows(self, nodes: Sequence[int]) -> list[int]:
        """Where the hidden states of these nodes lie."""
        return [self._begin + node - self._first for node in nodes]

    def take(self, tokens: list[int], values: list[float] | None) -> None:
        """The forward chose by itself: the token after each node, and the logit that it won with. None: all of these
        are numbers."""
        self._tokens, self._values = tokens, values

    def token(self, node: int, sampler: Sampler) -> int:
        """The token after `node`: chosen along with the forward, or now."""
        i = node - self._first
        if self._tokens is not None:
            if self._values is not None:
                check_choice(self._values[i], int(self._positions[i]) + 1)
            return self._tokens[i]
        return sampler.sample(self.logits(node))

    def chosen(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """(m,) the tokens after these nodes: chosen along with the forward, or else the most probable ones."""
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
    exact: bool = True  # False: too little precision for a text never to depend on what was drafted
    exact_together: bool = True  # the same for sequences that run as a batch, whose members come and go
    ahead: bool = False  # whether it calls `Want.during`, where it chooses tokens itself
    flat: bool = False  # whether a step has as many rows as its trees have together; else all count as the widest
    # Whether texts lie in pages: copies of a slot share them, and a text's bits are the same in whatever pieces it was
    # read, and how often.
    paged: bool = False
    mixes: bool = False  # whether it can `score_and_read`
    chunk: int = 1 << 30  # tokens that are read at a time at most
    block: int = 0  # tokens of a text that `select` takes or leaves together; 0: it can't select
    widths: tuple[int, ...] = ()  # a step is padded to one of these numbers of rows; empty: it is not
    notes: tuple[str, ...] = ()  # what a user should know about this model

    @property
    def default_draft(self) -> int:
        """Nodes that a step drafts at most, unless told: what a padded step has room for without another row."""
        return 31 if self.widths else 16

    @property
    def turns(self) -> Turns:
        """What threads that use this target's model wait at."""
        return Turns.of(getattr(self, "model", self))

    @abstractmethod
    def open(self) -> Slot:
        """An empty slot."""

    @abstractmethod
    def close(self, slot: Slot) -> None:
        """Give the slot's room back."""

    @abstractmethod
    def fork(self, slot: Slot) -> Slot:
        """A second slot that has read the same tokens."""

    @abstractmethod
    def truncate(self, slot: Slot, length: int) -> None:
        """Forget what was read after the first `length` tokens."""

    @abstractmethod
    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        """Read tokens, committed at once: one Scores per chunk, with the hidden states of the whole chunk. Only the
        chunk's last row has logits, as node 0."""

    def read(self, slots: Sequence[Slot], pieces: Sequence[Sequence[int]], want: Want) -> list[Scores]:
        """`prefill` of a piece of several texts, together no longer than a chunk; where steps are flat, in one
        forward."""
        found: list[Scores] = []
        for i, (slot, piece) in enumerate(zip(slots, pieces, strict=True)):
            found += self.prefill(slot, piece, replace(want, samplers=want.samplers[i : i + 1]))
        return found

    def chooses(self, sampler: Sampler | None) -> bool:  # noqa: ARG002
        """Whether `score` chooses by this sampler's rules, knowing of its text what was accepted alone, and calls
        `Want.during`."""
        return False

    @abstractmethod
    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        """ONE forward for the whole batch. The first `known` nodes of each tree were scored by the call before and
        are not computed again: that is how a tree grows level by level."""

    def score_and_read(
        self,
        slots: Sequence[Slot],
        trees: Sequence[TokenTree],
        readers: Sequence[Slot],
        pieces: Sequence[Sequence[int]],
        want: Want,
    ) -> tuple[list[Scores], list[Scores]]:
        """`score` of some texts and `read` of others in ONE forward, of at most a chunk of rows."""
        raise NotImplementedError(f"{type(self).__name__} reads prompts by forwards of their own")

    def extend(
        self, slots: Sequence[Slot], trees: Sequence[TokenTree], known: Sequence[int], want: Want
    ) -> list[Scores]:
        """`score` of trees of which different numbers of nodes are known; where steps are flat, in one forward."""
        each = zip(slots, trees, known, strict=True)
        return [self.score([slot], [tree], want, nodes)[0] for slot, tree, nodes in each]

    def draft_chains(
        self,
        slots: Sequence[Slot],  # noqa: ARG002
        chains: Sequence[Sequence[int]],  # noqa: ARG002
        depth: int,  # noqa: ARG002
        vocabulary: int,  # noqa: ARG002
    ) -> list[list[tuple[int, float]]] | None:
        """The `depth` tokens that follow each chain by its most probable one, and their log-probabilities: without the
        host between them. The chain and all but the last of these are read, as if `extend` had done it. vocabulary:
        tokens that may be drafted. None: it can't."""
        return None

    def select(self, slot: Slot, blocks: Sequence[int]) -> Part:
        """A slot that has read some blocks of a text, at their positions there, to be drafted with: `extend` it, then
        `close` it before the text goes on. blocks: their numbers, in order; the last is the one that the text ends in.
        """
        raise NotImplementedError(f"{type(self).__name__} can't draft from a part of a text")

    def attended(self, slot: Slot, count: int) -> torch.Tensor | None:
        """(length,) how much the last `count` tokens of a text attend to each of its tokens: weights, over all layers
        and heads. They are read once more for it. None: this model's attention does not tell."""
        twin = self.fork(slot)
        try:
            self.truncate(twin, max(0, slot.length - count))
            return self._watched(twin, slot.tokens[twin.length :])
        finally:
            self.close(twin)

    def _watched(self, slot: Slot, tokens: Sequence[int]) -> torch.Tensor | None:  # noqa: ARG002
        """(length,) how much these tokens, which are read, attend to each of the text's."""
        return None

    @property
    def filled(self) -> float | None:
        """The share of its pages that texts hold, kept ones included; None: it has none."""
        return None

    def release(self) -> None:  # noqa: B027  most have nothing to do
        """Nobody needs it any more: its memory goes back at once, whoever still refers to it."""

    @abstractmethod
    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """The path, from the root on, is now part of the text. Carried out inside the next forward."""
