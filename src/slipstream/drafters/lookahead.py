"""lookahead: n-grams that the target finds in rows that would be idle (Fu et al., 2024).

Beside each step's drafts the target scores a window of guesses about the coming text, and its choices after them are
the next guesses, as in Jacobi iteration. A column of the window is then an n-gram that the target itself wrote. These
n-grams are kept in a pool, and drafted when the root equals their first token.

The window has `width` columns and ngram - 1 levels:

    level 0   root  a1  a2  a3   a chain, whose first token is the root
    level 1    b0   b1  b2  b3   the target's choices after level 0, column by column
    level 2    c0   c1  c2  c3   its choices after level 1

So it is a token tree: c2 follows b2, which follows root a1 a2. After a step, column 2 gives the n-gram a2 b2 c2 and the
target's choice after c2. Then every level moves up by one, and the choices are the new last level.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.live import COLLECTIONS
from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.errors import OptionError
from slipstream.tree import TokenTree, places

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request

Ngram = tuple[int, ...]

# Relative gain in tokens per step from a window of one column; each doubling of the width adds as much again. Measured:
# 0.36 with 7 columns, 0.44 with 15 (docs/log/lookahead.md).
FIRST = 0.12


@dataclass(frozen=True)
class LookaheadOptions:
    ngram: int = 5  # tokens of an n-gram, its first included
    window: int = 7  # columns
    guesses: int = 7  # n-grams that are kept for each first token, and drafted
    shared: bool = False  # whether requests of one collection share their n-grams

    def __post_init__(self) -> None:
        if self.ngram < 3 or self.window < 1 or self.guesses < 1:
            raise OptionError(
                f"lookahead needs n-grams of at least 3 tokens, a window and guesses of at least 1, found "
                f"{self.ngram}, {self.window} and {self.guesses}"
            )


class Lookahead(Drafter):
    """N-grams that the target wrote into its own window."""

    Options = LookaheadOptions

    def __init__(self, target: Any, tokenizer: Any, options: LookaheadOptions) -> None:
        super().__init__(target, tokenizer, options)
        self._pools: dict[str, Pool] = {}  # by collection

    @property
    def invests(self) -> int:
        """The window's nodes, without the root."""
        return int((self.options.ngram - 1) * self.options.window) - 1

    @property
    def default_draft(self) -> int:
        return self.invests + int((self.options.ngram - 1) * self.options.guesses)

    @property
    def returns(self) -> NDArray[np.float64]:
        """The gain grows with the logarithm of the window's width, as in the paper."""
        columns = (np.arange(self.invests + 1) + 1) // (self.options.ngram - 1)
        return FIRST * np.log2(1 + columns)

    def begin(self, request: Request) -> DraftSession:
        o = self.options
        # With fewer nodes than it needs, half of them are the window's.
        room = (request.max_draft + 1) // (o.ngram - 1)
        width = min(o.window, max(room - o.guesses, room // 2))
        guesses = min(o.guesses, room - width)
        pool = self._shared_pool(request.collection) if o.shared else Pool(o.guesses)
        noise = np.random.default_rng([request.seed % 2**64, request.sample])
        return LookaheadSession(o.ngram, width, guesses, pool, noise)

    def _shared_pool(self, collection: str) -> Pool:
        pool = self._pools.pop(collection, None) or Pool(self.options.guesses)
        self._pools[collection] = pool  # the most recently used last
        if len(self._pools) > COLLECTIONS:
            del self._pools[next(iter(self._pools))]
        return pool


class LookaheadSession(DraftSession):
    def __init__(self, ngram: int, width: int, guesses: int, pool: Pool, noise: np.random.Generator) -> None:
        self.pool = pool
        self._ngram, self._width, self._guesses, self._noise = ngram, width, guesses, noise
        self.window: Window | None = None  # made when the prompt is known
        self._prompt: list[int] = []
        self._cells: tuple[TokenTree, list[int]] | None = None  # the window as a tree, and its last level's nodes

    def observe(self, seen: Seen) -> None:
        if self.window is None:
            self._prompt += seen.tokens

    def propose(self, root: int, budget: Budget) -> Proposal:
        if self._width < 1 or budget.nodes < 1:
            return Proposal(TokenTree.root(root))
        ngrams = self.pool.about(root)[: self._guesses]
        weights = [0.5**age for age in range(len(ngrams))]  # the most recent is the likeliest
        tree = TokenTree.from_continuations(root, ngrams, weights=weights, source="lookahead").cut(budget.depth)
        most = self._width if budget.beside is None else (budget.beside + 1) // (self._ngram - 1)
        width = min(self._width, most)
        if width < 1:
            return Proposal(tree)
        if self.window is None:
            self.window = Window(self._ngram, self._guess(width + self._ngram - 3, root))
        elif more := width - self.window.width:
            self.window.widen(more, [self._guess(more, root) for _ in self.window.levels])
        trie = Trie(root)
        last = self.window.put(trie)
        hopes = np.zeros(len(trie.tokens), np.float32)  # raw scores: the window is not expected to be accepted
        cells = TokenTree.build(trie.tokens, trie.parents, source="lookahead", raw=hopes)
        self._cells = cells, last
        # A window that does not have all of its levels yet may be a little larger than the budget.
        if budget.beside is not None and len(cells) - 1 > budget.beside:
            cells = cells.prune(np.arange(len(cells)) <= budget.beside)
        return Proposal(tree, beside=cells)

    def _guess(self, count: int, root: int) -> list[int]:
        guessed: list[int] = self._noise.choice([*self._prompt, root], max(0, count)).tolist()
        return guessed

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        """Move the window on by the target's choices after its last level, whatever was accepted."""
        if self._cells is None or self.window is None:
            return
        (cells, last), self._cells = self._cells, None
        nodes = places(tree, cells)[last].tolist()
        there = [node for node in nodes if node >= 0]
        found = dict(zip(there, chosen(there).tolist(), strict=True)) if there else {}
        for first, tokens in self.window.shift(int(tree.tokens[0]), [found.get(node) for node in nodes]):
            self.pool.add(first, tokens)


class Window:
    """Guesses about the coming text, level by level. The first step has level 0 alone; each later one adds a level,
    until there are ngram - 1."""

    def __init__(self, ngram: int, first: list[int]) -> None:
        """first: level 0 without its first column, the root. It is longer than the window, since each new level
        shortens all levels by one."""
        self.ngram = ngram
        self.levels = [first]

    @property
    def width(self) -> int:
        return len(self.levels[0]) + len(self.levels) + 2 - self.ngram

    def widen(self, more: int, guesses: list[list[int]]) -> None:
        """Add so many columns at the end, with these guesses for each level; if `more` is negative, remove some."""
        self.levels = [
            level[:more] if more < 0 else level + new for level, new in zip(self.levels, guesses, strict=True)
        ]

    def put(self, trie: Trie) -> list[int]:
        """Add the window to a trie. Returns the nodes of the last level, column by column."""
        level = [0, *trie.add(0, self.levels[0])]
        if len(self.levels) == 1:
            return level[1:]
        for tokens in self.levels[1:]:
            level = [trie.child(node, token) for node, token in zip(level, tokens, strict=True)]
        return level

    def shift(self, root: int, choices: Sequence[int | None]) -> list[tuple[int, Ngram]]:
        """Move on by one step. choices: the target's tokens after the last level; None where a node was not verified:
        there the guess stays. Returns the n-grams that were found, with their first tokens."""
        before = self.levels[-1]
        new = [old if choice is None else choice for old, choice in zip(before, choices, strict=True)]
        if len(self.levels) == 1:
            self.levels = [self.levels[0][1:], new]
            return []
        if len(self.levels) < self.ngram - 1:
            self.levels = [*(level[1:] for level in self.levels), new[1:]]
            return []
        columns = zip([root, *self.levels[0]], *self.levels[1:], choices, strict=True)
        found = [(first, tuple(rest)) for first, *rest in columns if rest[-1] is not None]
        self.levels = [self.levels[1][1:], *self.levels[2:], new]
        return found


class Pool:
    """N-grams by their first token: the most recent ones of each."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._known: defaultdict[int, dict[Ngram, None]] = defaultdict(dict)  # the most recent last

    def add(self, first: int, tokens: Ngram) -> None:
        known = self._known[first]
        known.pop(tokens, None)
        known[tokens] = None
        if len(known) > self._each:
            del known[next(iter(known))]

    def about(self, first: int) -> list[Ngram]:
        """N-grams with this first token, the most recent first."""
        return list(reversed(self._known[first])) if first in self._known else []


class Trie:
    """A tree that grows token by token, without duplicates among the children of a node."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, node: int, token: int) -> int:
        found = self._children.get((node, token))
        if found is None:
            found = self._children[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return found

    def add(self, node: int, tokens: Sequence[int]) -> list[int]:
        """Add a chain after a node. Returns its nodes."""
        path = []
        for token in tokens:
            node = self.child(node, token)
            path.append(node)
        return path
