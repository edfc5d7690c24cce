"""The base of drafters whose heads have a key cache of the text: reading the text, and growing a tree after it.

The head reads pairs of the target's state that read token i, and token i+1. The key of pair i is the i-th of the
session, or comes earlier if states of the text before it were missed. The last state's next token is the root, so each
draft reads that pair first. The keys of drafted tokens are overwritten by the next draft.

    pages of the text     token 0 │ token 1 │ … │ token n-1
    its keys there        pair 0  │ pair 1  │ … │ (state n-1, root)      the head's; one pair behind the target's

Where the target's keys are in pages, so are the head's, in layers of their own (`heads/keys.py`). A text that shares
pages then shares the head's keys in them. So a session writes the keys of all pairs that it can before its text is
copied (`resume`), and reads a text again whose pages were freed (`reread`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.drafters._beams import Carry, ChainDrafter
from slipstream.drafters._head import SMALL, HeadOptions, HeadSession
from slipstream.drafters.base import DraftSession, Hidden, Proposal, Seen
from slipstream.errors import CacheFullError, OptionError
from slipstream.heads.growth import Growth, new_record
from slipstream.heads.keys import KeyCache, Keys, PagedKeys, extend_paths
from slipstream.heads.packing import likeliest
from slipstream.kernels.ops import best_tokens
from slipstream.targets.captured.graph_target import BATCHES
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets.base import Slot, Target
    from slipstream.targets.captured.fixed_step import FixedStep


AT_ONCE = 1024  # unread states that may wait for a draft; more are read at once
# Where drafts are captured, at most so many tokens of a shared prefix are read again by the target, so that a head gets
# their states from there. To write their keys by itself would take it longer; such rows are often padding.
AGAIN = 32


@dataclass(frozen=True)
class FeatureOptions(HeadOptions):
    depth: int = 5  # tokens ahead
    width: int = 8  # nodes per depth that are continued, by as many children each; mode=sample: chains
    nodes: int = 64  # of the tree; what exceeds a request's max_draft is cut by the head's probabilities

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.depth, self.width, self.nodes) < 1:
            raise OptionError(
                f"depth, width and nodes must be at least 1, found {self.depth}, {self.width} and {self.nodes}"
            )


class FeatureDrafter(ChainDrafter):
    """A tree whose nodes are predicted from features that the head itself predicted."""

    Options = FeatureOptions
    head: Any  # with a LayerConfig
    ordered = True
    rereads = 1  # the last state of the prefix, whose pair the first new token completes

    def __init__(self, target: Target, tokenizer: Any, options: FeatureOptions) -> None:
        super().__init__(target, tokenizer, options)
        guessable = self.head.config.vocab_size if self.names is None else len(self.names)
        self.width, self.length = min(options.width, guessable), min(options.depth, self.head.reach or options.depth)
        self.growth = self.grows(guessable)
        self.cache: Keys = self.new_cache()
        self.in_pages = isinstance(self.cache, PagedKeys)
        self._captured_for, self.outdated = self.cache.generation, False
        self.max_states = self.length + 2  # a whole accepted path's, and one before it
        if not self.fixed:
            self.sizes = (SMALL,)

    def new_cache(self) -> Keys:
        config, dtype = self.head.config, self.head.dtype
        if not getattr(self.target, "paged", False) or self.target.device != self.device:
            return KeyCache(config, dtype, self.device)
        return PagedKeys(cast(Any, self.target), config, dtype, self.device, max(1, self.room()[0]), BATCHES[-1])

    def columns_of(self, length: int) -> int:
        """How many cache columns the keys of a text of this length take."""
        return length

    def grows(self, guessable: int) -> Growth:
        """The shape of its trees. guessable: how many different tokens the head can predict."""
        return Growth.dynamic(self.options.width, self.length, self.options.nodes, guessable)

    def begin(self, request: Request) -> FeatureSession:
        return FeatureSession(self, request)

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        try:
            return super().propose(sessions, roots, budgets)
        except CacheFullError:  # a shared page can't be copied now: the step may still succeed
            return [Proposal(TokenTree.root(root)) for root in roots]

    def release(self) -> None:
        super().release()
        self.cache.release()

    # ---- the text

    @torch.inference_mode()
    def read(self, session: FeatureSession) -> None:
        """Put the keys of all states whose next token is known into the cache. A key depends on its own pair alone, so
        this needs no attention."""
        count = len(session.following)
        try:
            session.reach(count)
        except CacheFullError:  # a shared page can't be copied now: these states are missed
            session.following, session.pieces = [], [session.pieces[-1].end(1)]
            return
        positions = torch.arange(session.length, session.length + count, dtype=torch.int32, device=self.device)[None]
        row = torch.tensor([session.row], dtype=torch.int32, device=self.device)
        tokens = torch.tensor([session.following], device=self.device)
        self.remember(session, tokens, self._states([session])[None, :count], row, positions)
        session.forget()

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, positions: Tensor) -> None:
        """Write the keys of tokens (1, n) and the states before them (1, n, ·) to positions (1, n) of a row (1,)."""
        look = self.cache.through(row, self.cache.columns(session.row, positions), None, None, positions)
        self.head.draft(tokens, self.head.read(states), None, positions, look)

    def _states(self, sessions: Iterable[FeatureSession]) -> Tensor:
        """(rows, ·) the unread states, one session after the other."""
        return torch.cat([self.head.join(piece) for session in sessions for piece in session.pieces])

    def inputs(self, table: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """(b, 3 + m) the table without the last m columns, and (b, m, ·) the states."""
        m = (table.shape[1] - 3) // 2
        return table[:, : 3 + m], self._select_states(table[:, 3 + m :], states)

    @torch.inference_mode()
    def joined(self, sessions: Sequence[HeadSession], table: Tensor) -> Tensor:
        m = (table.shape[1] - 3) // 2
        return self._states(cast(Sequence[FeatureSession], sessions))[table[:, 3 + m :].to(self.device)]

    def make_table(self, sessions: Sequence[HeadSession], roots: Sequence[int], batch: int, from_step: bool) -> Tensor:
        """(b, 3 + 2m) for each sequence: its row, its number of keys, its number of unread states, the tokens after
        these, and their rows: in their step, or among all unread states. The latter two are aligned at the end of
        their m columns."""
        mine = cast(Sequence[FeatureSession], sessions)
        for session in mine:
            session.catch_up()
        m = self.max_states if self.fixed else max(1 + len(s.following) for s in mine)
        table = np.zeros((batch, 3 + 2 * m), np.int64)
        table[:, 0], table[:, 2] = self.cache.nobody, 1  # padding reads the first state there is
        start = 0
        for line, session, root in zip(table, mine, roots, strict=False):
            count = 1 + len(session.following)
            session.reach(count, self.max_states)  # and what a draft that is queued after the next step will write
            line[:3] = session.row, session.length, count
            line[3 + m - count : 3 + m] = [*session.following, root]
            places = session.pieces[0].rows if from_step else None
            line[3 + 2 * m - count :] = places or range(start, start + count)
            start += count
        self._make_room(batch, int(table[:, 1:3].sum(1).max()))
        return torch.from_numpy(table)

    def draft_ahead(self, sessions: Mapping[int, DraftSession], step: FixedStep) -> None:
        """Only where all tables have the same width: else the host could not compare inputs."""
        if self.fixed:
            super().draft_ahead(sessions, step)

    def known(self, sessions: Sequence[HeadSession], batch: int) -> NDArray[np.int64]:
        """Each sequence's row, and its number of keys once the last draft's root is committed."""
        known = np.array([[self.cache.nobody, 0]] * batch, np.int64)
        known[: len(sessions)] = [(s.row, s.length + 1) for s in cast(Sequence[FeatureSession], sessions)]
        self._make_room(batch, int(known[:, 1].max()) + self.max_states)
        return known

    def _make_room(self, batch: int, length: int) -> None:
        columns, most, depth = self.room()
        self.cache.reserve(self.columns_of(length) + columns)
        self.cache.prepare(batch, max(most, self.max_states), depth)  # below a last layer all states are queries
        if self.outdated or self._captured_for != self.cache.generation:  # captures refer to what was there before
            self.outdated, self._captured_for = False, self.cache.generation
            for captured in (self.captured, self.captured_draws, self.captured_ahead):
                captured.clear()

    # ---- drafting

    def room(self) -> tuple[int, int, int]:
        """What a draft needs: columns after the text, tokens that attend at a time, and the length of their paths."""
        drawn = self.width * (self.length - 1)
        most = max(self.width, *self.growth.widths, 1)
        return max(drawn, sum(self.growth.widths)), most, self.length

    def start(self, *inputs: Tensor) -> Carry:
        """Read the unread pairs. Only the last one attends; the others just need their keys."""
        given, states = inputs
        rows, ends, positions, columns, free = self.cache.places(given, 1 + self.length)
        look = self.cache.through(rows, columns, ends[0], columns[:, -1:, None], positions)
        after, normed = self.head.draft(given[:, 3:], self.head.read(states), None, positions, look)
        return Nodes(after, normed, rows, ends, free, rows.new_empty(len(rows), 1, 0), 0)

    def own_logits(self, carry: Carry, depth: int) -> Tensor:  # noqa: ARG002
        """(b, w, V') logits over the tokens that the head can predict."""
        return self.head.logits(carry.features) if carry.normed is None else self.head.output(carry.normed)

    def children(self, carry: Carry, depth: int, branch: int) -> tuple[Tensor, Tensor]:
        """Twice (b, w, branch): the best tokens after each chain, as log-probabilities and as the head's own ids."""
        return best_tokens(self.own_logits(carry, depth), branch)

    def logits(self, carry: Carry, depth: int) -> Tensor:
        logits = self.own_logits(carry, depth)
        if self.names is None:
            return logits
        every = logits.new_full((*logits.shape[:2], self.head.config.vocab_size), -torch.inf)
        return every.index_copy(2, self.names, logits)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        b, w = tokens.shape
        paths = extend_paths(carry.paths, chain, carry.free, carry.used)  # (b, w, depth)
        positions = carry.ends[depth, :, None].expand(b, w)
        look = self.cache.through(carry.rows, paths[..., -1], carry.ends[1], paths, positions)
        after, normed = self.head.draft(tokens, carry.features, chain, positions, look)
        return replace(carry, features=after, normed=normed, paths=paths, used=carry.used + w)

    def best(self, *inputs: Tensor) -> Tensor:
        carry, growth = self.start(*inputs), self.growth.within(self.most)
        record = new_record(len(inputs[0]), growth.found, self.device)
        number = first = None  # number: of the nodes that are continued; None: the root
        for depth in range(growth.depth):
            if self.first and not depth:
                first = likeliest(self.own_logits(carry, 0)[:, 0], self.first)
                first = first if self.names is None else self.names[first]
            logp, ids = self.children(carry, depth, growth.branch)
            tokens, chain, number = growth.grow(depth, logp, ids, number, self.names, record)
            if depth + 1 < growth.depth:
                carry = self.advance(carry, chain, tokens, depth + 1)
        return growth.keep(record, first)


@dataclass(frozen=True)
class Nodes:
    """The drafted tokens of one depth, which the next depth continues; at first the root."""

    features: Tensor  # (b, w, H) the predicted states that read them
    normed: Tensor | None  # (b, w, H) the same under the head's last norm, if it has one
    rows: Tensor  # (b,) int32, of the cache
    ends: Tensor  # (·, b) int32: the position of the text's last pair, whose token is the root, and those after it
    free: Tensor  # (b,) int32, the first column for drafts
    paths: Tensor  # (b, w, depth) int32, the columns of drafted ancestors, their own last
    used: int  # columns used from there on


class FeatureSession(HeadSession):
    """One sequence: its row of the cache, and its unread states."""

    drafter: FeatureDrafter

    def __init__(self, drafter: FeatureDrafter, request: Request) -> None:
        super().__init__(drafter, request)
        self.row = drafter.cache.open()
        self.slot: Slot | None = None  # the text's, where its pages hold the keys
        self.pairs: list[int] = []  # by key: the position in the text whose pair it is of
        self.pieces: list[Hidden] = []  # unread states
        self.following: list[int] = []  # the tokens after these states, except after the last one
        self.root: int | None = None  # the root that the last draft read with the last state; that key is written
        # Unread states of the prompt, their following tokens and the text's length then: read before the first draft.
        self.prompt: tuple[list[Hidden], list[int], int] | None = None
        self.begun = False  # whether the first draft was made, or the chance to make it has passed

    @property
    def length(self) -> int:
        """Number of keys in the cache."""
        return len(self.pairs)

    def follow(self, slot: Slot | None) -> None:
        """Where keys are in pages: those of this text. None: they were freed, and nothing is known of the text."""
        if not self.drafter.in_pages:
            return
        if slot is None:
            self.pairs, self.pieces, self.following, self.prompt = [], [], [], None
            self.root, self.begun = None, False
        self.slot, self.row = slot, self.drafter.cache.nobody if slot is None else slot.row

    def reread(self, seen: Seen) -> None:
        self.observe(seen)

    def reach(self, count: int, later: int = 0) -> None:
        """Make room for so many more keys of the text. later: see `Keys.reach`."""
        cache, end = self.drafter.cache, self.length + count
        cache.reserve(self.drafter.columns_of(end))
        cache.reach(self.slot, self.length, end, later)

    def observe(self, seen: Seen) -> None:
        if self.root == seen.tokens[0]:
            self.pairs.append(self.read - 1)
            self.pieces.clear()
        self.root = None
        if not seen.hidden:  # these tokens can't be read, nor the state that waits for the first of them
            self._drop_states()
        self.read = seen.position + len(seen.tokens)
        if not seen.hidden:
            return
        if self.pieces:
            self.following.append(seen.tokens[0])
        self.pieces.append(seen.hidden)
        self.following += seen.tokens[1:]
        most = self.drafter.max_states
        if len(self.following) < most:
            return
        if seen.hidden.lasting and len(seen.tokens) >= most:  # a captured step accepted more than a draft can read
            self.pieces, self.following = [seen.hidden.end(most)], seen.tokens[1 - most :]
        elif len(self.following) >= AT_ONCE:
            self.catch_up()

    def catch_up(self, everything: bool = False) -> None:
        """Read states before a draft: those that the draft can't read itself, or all whose next token is known."""
        if self.prompt is not None:
            latest = self.pieces, self.following, self.read
            self.pieces, self.following, self.read = self.prompt
            self.drafter.read(self)
            self.pieces, self.following, self.read = latest
            self.prompt = None
        if len(self.following) >= (1 if everything else self.drafter.max_states):
            self.drafter.read(self)

    @property
    def ready(self) -> bool:
        return bool(self.pieces)

    def step_states(self) -> tuple[Tensor, ...]:
        one = self.pieces[0]
        return tuple(one.tensors.values()) if len(self.pieces) == 1 and one.lasting else ()

    @property
    def startable(self) -> bool:
        """Not if there was no draft for the step, or if the prompt is not read yet."""
        return super().startable and self.root is not None and self.prompt is None

    def drafted(self, root: int) -> None:
        self.forget()
        self.root, self.begun = root, True

    def keep(self) -> None:
        super().keep()
        if self.root is None:  # no draft has read these states
            self.pieces = [piece.safe() for piece in self.pieces]

    def pause(self) -> None:
        self.drop_ahead()
        self.pieces = [piece.safe() for piece in self.pieces]

    @property
    def unread(self) -> int:
        """The position of the first pair that is not read yet."""
        _, following, read = self.prompt or (self.pieces, self.following, self.read)
        return read - 1 - len(following)

    def settled(self, length: int) -> int:
        first = self.unread
        return first if self.drafter.fixed and 0 < first < length <= first + AGAIN else length

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        """Copy the keys of the pairs whose first token is in the prefix; in pages they will be there. The second token
        of the last one is the first to be read; both texts have it in common (`rereads`)."""
        it = cast(FeatureSession, other)
        if it.unread < len(tokens):
            if it.prompt is None:
                it.catch_up(everything=True)
            else:  # nobody has asked for its drafts, so perhaps nobody will
                self._take_states(it.prompt, len(tokens))
        count = bisect_left(it.pairs, len(tokens))
        self.drafter.cache.copy(it.row, self.row, count)
        self.pairs, self.read = it.pairs[:count], len(tokens)

    def _take_states(self, unread: tuple[list[Hidden], list[int], int], length: int) -> None:
        """Take over the unread states of a text's first `length` tokens."""
        pieces, following, read = unread
        left = min(length, read) - (read - 1 - len(following))
        self.following = following[: left - 1]
        for piece in pieces:
            if left > 0:
                self.pieces.append(piece.beginning(left))
                left -= len(piece.every)
        if length > read:  # the states of what follows were missed
            self.read = read
            self._drop_states()

    def skip(self) -> None:
        super().keep()
        if self.root is None:
            self._drop_states()

    def _drop_states(self) -> None:
        """Drop states that no draft has read, except the prompt's."""
        if not self.begun and self.following:
            self.prompt = self.pieces, self.following, self.read
        self.pieces, self.following, self.begun = [], [], True

    def forget(self) -> None:
        """All states except the last were read into the cache: drop them."""
        self.pairs += range(self.read - 1 - len(self.following), self.read - 1)
        self.pieces, self.following = [self.pieces[-1].end(1)], []

    def close(self) -> None:
        super().close()
        self.drafter.cache.close(self.row)
        self.row, self.slot = self.drafter.cache.nobody, None
