"""lookahead: the target's idle rows find n-grams (Fu et al., 2024).

Beside each step's drafts the target reads a window of guesses about the text to come, and says what it would put after
each of them. That refines the guesses as Jacobi iterations do, and what stood in a row of the window is an n-gram that
the target itself wrote: these are kept in a pool, and drafted when the text comes to their first token.

The window has `width` columns and ngram - 1 levels:

    level 0   root  a1  a2  a3   a chain, whose first token is the root
    level 1    b0   b1  b2  b3   what the target put after level 0, each below its own column
    level 2    c0   c1  c2  c3   and after level 1

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

from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.errors import OptionError
from slipstream.tree import TokenTree, places

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request

Ngram = tuple[int, ...]

# Tokens that a window of one column adds to a step, and one twice as wide again: 0.36 with 7 columns, 0.44 with 15 were
# measured (docs/log/lookahead.md).
FIRST = 0.12


@dataclass(frozen=True)
class LookaheadOptions:
    ngram: int = 5  # tokens of an n-gram, its first included
    window: int = 7  # columns
    guesses: int = 7  # n-grams that are kept for each first token, and drafted
    shared: bool = False  # whether requests of one collection find each other's n-grams

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
        """The window's nodes: of its first column the root is there anyway."""
        return int((self.options.ngram - 1) * self.options.window) - 1

    @property
    def default_draft(self) -> int:
        return self.invests + int((self.options.ngram - 1) * self.options.guesses)

    @property
    def returns(self) -> NDArray[np.float64]:
        """Steps become fewer by the logarithm of the window's width, which is what the paper found too."""
        columns = (np.arange(self.invests + 1) + 1) // (self.options.ngram - 1)
        return FIRST * np.log2(1 + columns)

    def begin(self, request: Request) -> DraftSession:
        o = self.options
        # Where fewer nodes are allowed than it needs, half of them are the window's.
        room = (request.max_draft + 1) // (o.ngram - 1)
        width = min(o.window, max(room - o.guesses, room // 2))
        guesses = min(o.guesses, room - width)
        pool = self._pools.setdefault(request.collection, Pool(o.guesses)) if o.shared else Pool(o.guesses)
        noise = np.random.default_rng([request.seed % 2**64, request.sample])
        return LookaheadSession(o.ngram, width, guesses, pool, noise)


class LookaheadSession(DraftSession):
    def __init__(self, ngram: int, width: int, guesses: int, pool: Pool, noise: np.random.Generator) -> None:
        self.pool = pool
        self._ngram, self._width, self._guesses, self._noise = ngram, width, guesses, noise
        self.window: Window | None = None  # begins when the prompt is known
        self._prompt: list[int] = []
        self._cells: tuple[TokenTree, list[int]] | None = None  # the window as a tree, and its last level's nodes

    def observe(self, seen: Seen) -> None:
        if self.window is None:
            self._prompt += seen.tokens

    def propose(self, root: int, budget: Budget) -> Proposal:
        if self._width < 1 or budget.nodes < 1:
            return Proposal(TokenTree.root(root))
        ngrams = self.pool.about(root)[: self._guesses]
        weights = [0.5**age for age in range(len(ngrams))]  # the latest is the likeliest
        tree = TokenTree.from_continuations(root, ngrams, weights=weights, source="lookahead").cut(budget.depth)
        most = self._width if budget.beside is None else (budget.beside + 1) // (self._ngram - 1)
        width = min(self._width, most)
        if width < 1:
            return Proposal(tree)
        if self.window is None:
            self.window = Window(self._ngram, self._guess(width + self._ngram - 3, root))
        elif more := width - self.window.width:
            self.window.widen(more, [self._guess(more, root) for _ in self.window.levels])
        draft = Draft(root)
        last = self.window.put(draft)
        hopes = np.zeros(len(draft.tokens), np.float32)  # it is there to learn from
        cells = TokenTree.build(draft.tokens, draft.parents, source="lookahead", raw=hopes)
        self._cells = cells, last
        if (
            budget.beside is not None and len(cells) - 1 > budget.beside
        ):  # before it has all of its levels, a window may be a little larger
            cells = cells.prune(np.arange(len(cells)) <= budget.beside)
        return Proposal(tree, beside=cells)

    def _guess(self, count: int, root: int) -> list[int]:
        guessed: list[int] = self._noise.choice([*self._prompt, root], max(0, count)).tolist()
        return guessed

    def choices(self, tree: TokenTree, chosen: Callable[[Sequence[int]], NDArray[Any]]) -> None:
        """The target chose after each node of its window: it moves on, whatever was accepted."""
        if self._cells is None or self.window is None:
            return
        (cells, last), self._cells = self._cells, None
        nodes = places(tree, cells)[last].tolist()
        there = [node for node in nodes if node >= 0]
        found = dict(zip(there, chosen(there).tolist(), strict=True)) if there else {}
        for first, tokens in self.window.shift(int(tree.tokens[0]), [found.get(node) for node in nodes]):
            self.pool.add(first, tokens)


class Window:
    """Guesses about the text to come, level by level. The first step has level 0 alone, each of the next ones another,
    until there are ngram - 1."""

    def __init__(self, ngram: int, first: list[int]) -> None:
        """first: level 0 but for its first column, which is the root's. It is longer than the window, since each level
        that is new makes all of them shorter by one."""
        self.ngram = ngram
        self.levels = [first]

    @property
    def width(self) -> int:
        return len(self.levels[0]) + len(self.levels) + 2 - self.ngram

    def widen(self, more: int, guesses: list[list[int]]) -> None:
        """By so many columns at its end, of these guesses for each level; less than 0: it loses some."""
        self.levels = [
            level[:more] if more < 0 else level + new for level, new in zip(self.levels, guesses, strict=True)
        ]

    def put(self, draft: Draft) -> list[int]:
        """Into a draft: the nodes of the last level, column by column."""
        level = [0, *draft.add(0, self.levels[0])]
        if len(self.levels) == 1:
            return level[1:]
        for tokens in self.levels[1:]:
            level = [draft.child(node, token) for node, token in zip(level, tokens, strict=True)]
        return level

    def shift(self, root: int, choices: Sequence[int | None]) -> list[tuple[int, Ngram]]:
        """On by one step. choices: what the target put after the last level; None: that node was not verified, and the
        guess stays. Gives back the n-grams that were found, by their first tokens."""
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
    """N-grams by their first token: of each the latest."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._known: defaultdict[int, dict[Ngram, None]] = defaultdict(dict)  # the latest last

    def add(self, first: int, tokens: Ngram) -> None:
        known = self._known[first]
        known.pop(tokens, None)
        known[tokens] = None
        if len(known) > self._each:
            del known[next(iter(known))]

    def about(self, first: int) -> list[Ngram]:
        """The latest first."""
        return list(reversed(self._known[first])) if first in self._known else []


class Draft:
    """A tree that grows token by token: what is there already is not added twice."""

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
        """A chain after a node; its nodes."""
        path = []
        for token in tokens:
            node = self.child(node, token)
            path.append(node)
        return path
