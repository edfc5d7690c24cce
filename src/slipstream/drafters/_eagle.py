"""What drafters share whose heads keep keys of the text: reading it along with the target, and growing a tree after it.

The head reads pairs: the target's state that read token i, and token i+1. Pair i's key lies in column i of the
session's row. The last state waits for the token after it: each draft reads it with the root, again if the text did
not grow, and writes the keys of drafted tokens after it, where the next draft writes too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.drafters._beams import Carry, ChainDrafter
from slipstream.drafters._head import SMALL, HeadOptions, HeadSession
from slipstream.drafters.base import DraftSession, Hidden, Seen
from slipstream.errors import OptionError
from slipstream.heads.growth import Growth, new_record
from slipstream.heads.keys import KeyCache, extend_paths, first_places
from slipstream.heads.packing import likeliest
from slipstream.kernels.ops import best_tokens

if TYPE_CHECKING:
    from slipstream.request import Request
    from slipstream.targets.base import Target
    from slipstream.targets.captured.fixed_step import FixedStep


AT_ONCE = 1024  # states that wait for a draft; more are read before it


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
    """A tree whose nodes are guessed from features that the head itself predicted."""

    Options = FeatureOptions
    head: Any  # with a LayerConfig
    ordered = True
    rereads = 1  # the state before the first new token, whose pair that token completes

    def __init__(self, target: Target, tokenizer: Any, options: FeatureOptions) -> None:
        super().__init__(target, tokenizer, options)
        self._ids = self.head.draft_ids  # (V',)
        guessable = self.head.config.vocab_size if self._ids is None else len(self._ids)
        self.width, self.length = min(options.width, guessable), min(options.depth, self.head.reach or options.depth)
        self.growth = self.grows(guessable)
        self.cache = self.new_cache()
        self._captured_for = self.cache.generation
        self.waiting = self.length + 2  # states read along with a draft: of a whole path, and the one before it
        if not self.fixed:
            self.sizes = (SMALL,)

    def token_names(self) -> list[tuple[Tensor, Tensor]]:
        ids = self.head.draft_ids
        return [] if self._ids is None or ids is None else [(self._ids, ids)]

    def new_cache(self) -> KeyCache:
        return KeyCache(self.head.config, self.head.dtype, self.device)

    def columns_of(self, length: int) -> int:
        """How many columns the keys of a text of this length take."""
        return length

    def grows(self, guessable: int) -> Growth:
        """The shape of its trees; the head can guess this many tokens."""
        return Growth.dynamic(self.options.width, self.length, self.options.nodes, guessable)

    def begin(self, request: Request) -> FeatureSession:
        return FeatureSession(self, request)

    def release(self) -> None:
        super().release()
        self.cache.release()

    # ---- the text

    @torch.inference_mode()
    def read(self, session: FeatureSession) -> None:
        """Put all states whose next token is known into the cache. A key is made of its own pair alone, so nobody
        looks at anything here."""
        count = len(session.following)
        self.cache.reserve(self.columns_of(session.length + count))
        columns = torch.arange(session.length, session.length + count, dtype=torch.int32, device=self.device)[None]
        row = torch.tensor([session.row], dtype=torch.int32, device=self.device)
        tokens = torch.tensor([session.following], device=self.device)
        self.remember(session, tokens, self._states([session])[None, :count], row, columns)
        session.forget()

    def remember(self, session: FeatureSession, tokens: Tensor, states: Tensor, row: Tensor, columns: Tensor) -> None:  # noqa: ARG002
        """Keys of tokens (1, n) and the states before them (1, n, ·), to a row (1,) and its columns (1, n)."""
        self.head.draft(tokens, self.head.read(states), None, columns, self.cache.through(row, columns))

    def _states(self, sessions: Iterable[FeatureSession]) -> Tensor:
        """(rows, ·) what was seen and not read, one session after the other."""
        return torch.cat([self.head.join(piece) for session in sessions for piece in session.pieces])

    def inputs(self, table: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """(b, 3 + m) the table but for its end, and (b, m, ·) the states."""
        m = (table.shape[1] - 3) // 2
        return table[:, : 3 + m], self._picked(table[:, 3 + m :], states)

    @torch.inference_mode()
    def joined(self, sessions: Sequence[HeadSession], table: Tensor) -> Tensor:
        m = (table.shape[1] - 3) // 2
        return self._states(cast(Sequence[FeatureSession], sessions))[table[:, 3 + m :].to(self.device)]

    def given(self, sessions: Sequence[HeadSession], roots: Sequence[int], batch: int, lying: bool) -> Tensor:
        """(b, 3 + 2m) each sequence's row, how many keys are there, how many states wait, the tokens after those, and
        where each lies: in its step, or among all that wait. The latter two stand at the end of their m."""
        mine = cast(Sequence[FeatureSession], sessions)
        for session in mine:
            session.catch_up()
        m = self.waiting if self.fixed else max(1 + len(s.following) for s in mine)
        table = np.zeros((batch, 3 + 2 * m), np.int64)
        table[:, 2] = 1  # padding reads the first state there is, into the row of nobody
        start = 0
        for line, session, root in zip(table, mine, roots, strict=False):
            count = 1 + len(session.following)
            line[:3] = session.row, session.length, count
            line[3 + m - count : 3 + m] = [*session.following, root]
            places = session.pieces[0].rows if lying else None
            line[3 + 2 * m - count :] = places or range(start, start + count)
            start += count
        self._make_room(batch, int(table[:, 1:3].sum(1).max()))
        return torch.from_numpy(table)

    def draft_ahead(self, session: DraftSession, step: FixedStep) -> None:
        """Only where all tables are equally wide: else what it was made of can't be compared with what is decided."""
        if self.fixed:
            self._make_room(1, cast(FeatureSession, session).length + 1 + self.waiting)
            super().draft_ahead(session, step)

    def _make_room(self, batch: int, length: int) -> None:
        columns, most, depth = self.room()
        self.cache.reserve(self.columns_of(length) + columns)
        self.cache.prepare(batch, most, depth)
        if self._captured_for != self.cache.generation:  # the cache has moved
            self._captured_for = self.cache.generation
            for captured in (self.captured, self.captured_draws, self.captured_ahead):
                captured.clear()

    # ---- drafting

    def room(self) -> tuple[int, int, int]:
        """What a draft needs: columns after the text, tokens that look at a time, and how long their paths are."""
        drawn = self.width * (self.length - 1)
        most = max(self.width, *self.growth.widths, 1)
        return max(drawn, sum(self.growth.widths)), most, self.length

    def start(self, *inputs: Tensor) -> Carry:
        """Read what waits. Only the last pair looks at the others: these are there for their keys."""
        given, states = inputs
        rows, ends, columns = first_places(given, 1 + self.length)
        look = self.cache.through(rows, columns, ends[0], ends[0][:, None, None])
        after, normed = self.head.draft(given[:, 3:], self.head.read(states), None, columns, look)
        return Nodes(after, normed, rows, ends, rows.new_empty(len(rows), 1, 0), 0)

    def own_logits(self, carry: Carry, depth: int) -> Tensor:  # noqa: ARG002
        """(b, w, V') over the tokens that the head can guess."""
        return self.head.logits(carry.features) if carry.normed is None else self.head.output(carry.normed)

    def children(self, carry: Carry, depth: int, branch: int) -> tuple[Tensor, Tensor]:
        """Twice (b, w, branch): the log-probabilities of the best that follow each chain, and their own ids."""
        return best_tokens(self.own_logits(carry, depth), branch)

    def logits(self, carry: Carry, depth: int) -> Tensor:
        logits = self.own_logits(carry, depth)
        if self._ids is None:
            return logits
        every = logits.new_full((*logits.shape[:2], self.head.config.vocab_size), -torch.inf)
        return every.index_copy(2, self._ids, logits)

    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        b, w = tokens.shape
        free = carry.ends[1]
        paths = extend_paths(carry.paths, chain, free, carry.used)  # (b, w, depth)
        look = self.cache.through(carry.rows, paths[..., -1], free, paths)
        after, normed = self.head.draft(tokens, carry.features, chain, carry.ends[depth, :, None].expand(b, w), look)
        return Nodes(after, normed, carry.rows, carry.ends, paths, carry.used + w)

    def best(self, *inputs: Tensor) -> Tensor:
        carry, growth = self.start(*inputs), self.growth.within(self.most)
        record = new_record(len(inputs[0]), growth.found, self.device)
        number = first = None  # of the nodes that are read; None: the root
        for depth in range(growth.depth):
            if self.first and not depth:
                first = likeliest(self.own_logits(carry, 0)[:, 0], self.first)
                first = first if self._ids is None else self._ids[first]
            logp, ids = self.children(carry, depth, growth.branch)
            tokens, chain, number = growth.grow(depth, logp, ids, number, self._ids, record)
            if depth + 1 < growth.depth:
                carry = self.advance(carry, chain, tokens, depth + 1)
        return growth.keep(record, first)


@dataclass(frozen=True)
class Nodes:
    """The drafted tokens of one depth, from which the next one's grow; before the first, the root."""

    features: Tensor  # (b, w, H) the predicted states that read them
    normed: Tensor | None  # (b, w, H) the same under the head's last norm, if it has one
    rows: Tensor  # (b,) int32, of the cache
    ends: Tensor  # (·, b) int32: the column of the text's last pair, which the root belongs to, and those after it
    paths: Tensor  # (b, w, depth) int32, the columns of drafted ancestors, their own last
    used: int  # columns after the text


class FeatureSession(HeadSession):
    """One sequence: its row of the cache, and the states that wait to be read."""

    drafter: FeatureDrafter

    def __init__(self, drafter: FeatureDrafter, request: Request) -> None:
        super().__init__(drafter, request)
        self.row = drafter.cache.open()
        self.pairs: list[int] = []  # the text's positions whose keys are there, by column
        self.pieces: list[Hidden] = []
        self.following: list[int] = []  # the tokens after these states, but for the last one
        self.root: int | None = None  # which the last state was read with; its key is there then
        self.prompt: tuple[list[Hidden], list[int], int] | None = None  # the same, to be read before the first draft
        self.begun = False  # whether the first draft was asked for, or not

    @property
    def length(self) -> int:
        """Keys there."""
        return len(self.pairs)

    def observe(self, seen: Seen) -> None:
        if self.root == seen.tokens[0]:
            self.pairs.append(self.read - 1)
            self.pieces.clear()
        self.root = None
        if not seen.hidden:  # a piece of the text that it goes without, and what waited for its first token
            self._let_go()
        self.read = seen.position + len(seen.tokens)
        if not seen.hidden:
            return
        if self.pieces:
            self.following.append(seen.tokens[0])
        self.pieces.append(seen.hidden)
        self.following += seen.tokens[1:]
        most = self.drafter.waiting
        if len(self.following) < most:
            return
        if seen.hidden.lasting and len(seen.tokens) >= most:  # a captured step accepted more than a draft is made for
            self.pieces, self.following = [seen.hidden.end(most)], seen.tokens[1 - most :]
        elif len(self.following) >= AT_ONCE:
            self.catch_up()

    def catch_up(self, everything: bool = False) -> None:
        """Before a draft: read what does not fit into it, or all that can be read."""
        if self.prompt is not None:
            latest = self.pieces, self.following, self.read
            self.pieces, self.following, self.read = self.prompt
            self.drafter.read(self)
            self.pieces, self.following, self.read = latest
            self.prompt = None
        if len(self.following) >= (1 if everything else self.drafter.waiting):
            self.drafter.read(self)

    @property
    def ready(self) -> bool:
        return bool(self.pieces)

    def lying(self) -> tuple[Tensor, ...]:
        one = self.pieces[0]
        return tuple(one.tensors.values()) if len(self.pieces) == 1 and one.lasting else ()

    def known(self) -> list[int] | None:
        """Its row, and the keys there once the draft's root is part of the text; if it has read all before that."""
        return None if self.root is None or self.prompt is not None else [self.row, self.length + 1]

    def asked(self, root: int) -> None:
        self.forget()
        self.root, self.begun = root, True

    def keep(self) -> None:
        super().keep()
        if self.root is None:  # no draft has read them
            self.pieces = [piece.safe() for piece in self.pieces]

    def pause(self) -> None:
        HeadSession.close(self)
        self.pieces = [piece.safe() for piece in self.pieces]

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        """The keys of the pairs that begin in these tokens: the last one's second token is the first that is read."""
        it = cast(FeatureSession, other)
        it.catch_up(everything=True)
        count = bisect_left(it.pairs, len(tokens))
        self.drafter.cache.copy(it.row, self.row, count)
        self.pairs, self.read = it.pairs[:count], len(tokens)

    def skip(self) -> None:
        super().keep()
        if self.root is None:
            self._let_go()

    def _let_go(self) -> None:
        """Of states that no draft has read, the prompt's alone are kept."""
        if not self.begun and self.following:
            self.prompt = self.pieces, self.following, self.read
        self.pieces, self.following, self.begun = [], [], True

    def forget(self) -> None:
        """All states but the last are in the cache."""
        self.pairs += range(self.read - 1 - len(self.following), self.read - 1)
        self.pieces, self.following = [self.pieces[-1].end(1)], []

    def close(self) -> None:
        super().close()
        if self.row:
            self.drafter.cache.close(self.row)
        self.row = 0
