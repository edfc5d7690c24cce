"""TokenTree: a draft of several possible continuations that share their prefixes. Pure arrays, no model.

Nodes are in topological order: every parent comes before its children. Node 0 is the root, a token that is emitted but
whose keys are not cached yet. The other n - 1 nodes are drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.errors import DrafterError

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenTree:
    tokens: Ints  # (n,)
    parents: Ints  # (n,) parents[i] < i, the root's is -1
    raw: Floats  # (n, S) each source's own score of the node, NaN where it did not propose it
    score: Floats  # (n,) P(accepted | parent accepted)
    sources: tuple[str, ...] = ()  # the names of raw's S columns
    # The distributions that children were drawn from: row q_row[i] of q for the children of node i, -1 for none. Valid
    # only while those children are exactly the draws, in draw order, without replacement: see `prune`.
    q: torch.Tensor | None = None  # (m, V)
    q_row: Ints | None = None  # (n,)

    def __init__(
        self,
        tokens: Ints,
        parents: Ints,
        raw: Floats,
        score: Floats,
        sources: tuple[str, ...] = (),
        q: torch.Tensor | None = None,
        q_row: Ints | None = None,
    ) -> None:
        """The same as the decorator's, in a third of the time: a step makes several trees."""
        self.__dict__.update(
            tokens=tokens, parents=parents, raw=raw, score=score, sources=sources, q=q, q_row=q_row
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.tokens)

    # ---- making one

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """A tree without drafts: the root alone."""
        return cls.roots([token])[0]

    @classmethod
    def roots(cls, tokens: Sequence[int]) -> list[TokenTree]:
        """For each token a tree without drafts: batches make many of these."""
        trees = [cls.__new__(cls) for _ in tokens]
        for tree, token in zip(trees, np.array(tokens, np.int32).reshape(-1, 1), strict=True):
            tree.__dict__.update(_ROOT, tokens=token)
        return trees

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | Ints,
        parents: Sequence[int] | Ints,
        *,
        source: str = "",
        raw: Sequence[float] | Floats | None = None,
        q: torch.Tensor | None = None,
        q_row: Sequence[int] | Ints | None = None,
    ) -> TokenTree:
        """A tree from one source. raw[i]: its own probability that node i is right, given that its parent is."""
        n = len(tokens)
        column = np.ones(n, np.float32) if raw is None else np.asarray(raw, np.float32).copy()
        column[0] = np.nan  # no source proposed the root
        score = np.where(np.isnan(column), np.float32(1), column)
        return cls(
            tokens=np.asarray(tokens, np.int32),
            parents=np.asarray(parents, np.int32),
            raw=column[:, None] if source else np.empty((n, 0), np.float32),
            score=score,
            sources=(source,) if source else (),
            q=q,
            q_row=None if q_row is None else np.asarray(q_row, np.int32),
        )

    @classmethod
    def chain(
        cls, root: int, tokens: Sequence[int] | Ints, *, source: str = "", raw: Sequence[float] | None = None
    ) -> TokenTree:
        """A tree of one continuation."""
        whole = np.concatenate([[root], tokens]).astype(np.int32)
        column = None if raw is None else np.concatenate([[np.nan], raw])
        return cls.build(whole, np.arange(-1, len(whole) - 1, dtype=np.int32), source=source, raw=column)

    @classmethod
    def from_continuations(
        cls,
        root: int,
        continuations: Sequence[Sequence[int] | Ints],
        *,
        weights: Sequence[float] | None = None,
        source: str = "",
    ) -> TokenTree:
        """Several continuations with their common prefixes merged. A node's raw score is its share of its parent's
        weight: the conditional frequency."""
        lengths = np.array([len(c) for c in continuations], np.int64)
        flat = np.empty(int(lengths.sum()), np.int32)
        np.concatenate([np.asarray(c, np.int32) for c in continuations] or [flat], out=flat)
        weight = np.ones(len(lengths)) if weights is None else np.asarray(weights, np.float64)
        tokens, parents, share = _merge(root, flat, lengths, weight)
        return cls.build(tokens, parents, source=source, raw=share)

    # ---- reading one

    @cached_property
    def depths(self) -> Ints:
        """(n,) depths of the nodes; the root's is 0."""
        return _depths(self.parents)

    @cached_property
    def depth(self) -> int:
        """The depth of the deepest node: how many drafted tokens can be accepted at most."""
        return max(self.depths.tolist())

    @cached_property
    def mask(self) -> Bools:
        """(n, n) which nodes each node may attend to: its ancestors and itself."""
        return _ancestors(self.parents)

    @cached_property
    def value(self) -> NDArray[np.float64]:
        """(n,) P(the whole path down to the node is accepted): the product of the scores along it."""
        return _path_products(self.parents, self.score)

    def children(self, node: int) -> NDArray[np.intp]:
        return np.flatnonzero(self.parents == node)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`; of equal siblings the first."""
        found: int = _child(self.parents, self.tokens, node, token) if len(self.tokens) > 1 else 0
        return found or None

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while (node := int(self.parents[node])) >= 0:
            path.append(node)
        return path[::-1]

    def check(self, vocabulary: int, root: int) -> None:
        """Raise if this isn't a tree over the vocabulary that starts from `root`: a drafter's bug must not become a
        wrong answer."""
        if len(self.tokens) == 1 and self.tokens[0] == root and 0 <= root < vocabulary and self.parents[0] == -1:
            return  # nothing drafted
        if len(self) == 0 or self.parents[0] != -1 or self.tokens[0] != root:
            raise DrafterError(f"a draft must start with the root it was asked about, {root}, whose parent is -1")
        ordered, known = _is_tree(self.parents, self.tokens, vocabulary)
        if not ordered:
            raise DrafterError(
                f"parents must stand before their children, found {self.parents.tolist()}: order the nodes so"
            )
        if not known:
            bad = self.tokens[(self.tokens < 0) | (self.tokens >= vocabulary)]
            raise DrafterError(f"draft tokens must lie in 0..{vocabulary - 1}, found {bad.tolist()}")
        if self.q is not None and self.q.shape[1] != vocabulary:
            raise DrafterError(f"q must have {vocabulary} columns, the target's vocabulary; found {self.q.shape[1]}")

    # ---- changing one

    def cut(self, depth: int) -> TokenTree:
        """Drop nodes deeper than `depth`. This does not depend on tokens, so q stays valid."""
        if len(self.tokens) - 1 <= depth or self.depth <= depth:
            return self
        nodes = np.flatnonzero(self.depths <= depth)
        kept = self.take(nodes, self.score)
        return kept if self.q_row is None else replace(kept, q=self.q, q_row=self.q_row[nodes])

    def prune(self, keep: Bools) -> TokenTree:
        """Keep the marked nodes whose ancestors are all marked. The root always stays.

        Choosing by token or score changes the distribution that the remaining children are draws from. So q is dropped:
        from here on they count as certain.
        """
        return self.take(np.flatnonzero(_connected(self.parents, np.asarray(keep, np.bool_))), self.score)

    def top_k(self, k: int) -> TokenTree:
        """The k drafted nodes with the best path value; earlier nodes win ties, so parents come before children.

        q is dropped even if every node stays: whether a tree is small enough may depend on what was drawn.
        """
        if len(self) - 1 <= k:
            return self if self.q is None else replace(self, q=None, q_row=None)
        best = np.argsort(-self.value[1:], kind="stable")[:k] + 1
        keep = np.zeros(len(self), np.bool_)
        keep[best] = True
        return self.prune(keep)

    def best_chain(self) -> TokenTree:
        """The path of the best children, for targets that can't score branches."""
        path = [0]
        while len(children := self.children(path[-1])):
            path.append(int(children[np.argmax(self.score[children])]))
        if len(path) == len(self):
            return self
        keep = np.zeros(len(self), np.bool_)
        keep[path] = True
        return self.prune(keep)

    def take(self, nodes: NDArray[np.int64], score: Floats) -> TokenTree:
        """These nodes in this order, the root first and parents before their children. score: the new scores of all
        nodes. q is dropped, as in `prune`."""
        tokens, parents, raw, kept = _taken(self.tokens, self.parents, self.raw, score, nodes)
        return TokenTree(tokens, parents, raw, kept, self.sources)

    def with_score(self, score: Floats) -> TokenTree:
        return replace(self, score=score)

    def proposed(self, path: Sequence[int]) -> dict[str, tuple[int, int]]:
        """For each source, how many nodes it proposed, and how many of these are on the path."""
        counts = _count_sources(self.raw, np.array(path)).tolist()
        return {name: (every, kept) for name, (every, kept) in zip(self.sources, counts, strict=True)}

    def proposed_by(self) -> dict[str, Bools]:
        """For each source, which nodes (n,) it proposed."""
        return {name: ~np.isnan(self.raw[:, i]) for i, name in enumerate(self.sources)}


# What all trees share that are a root alone, and depths that need not be computed.
_ROOT = {
    "parents": np.array([-1], np.int32), "raw": np.empty((1, 0), np.float32), "score": np.ones(1, np.float32),
    "depths": np.zeros(1, np.int32), "depth": 0,
}  # fmt: skip


def places(tree: TokenTree, part: TokenTree) -> NDArray[np.int64]:
    """(m,) for each node of `part`, the equal node of `tree`; -1 if there is none."""
    found: NDArray[np.int64] = _places(tree.tokens, tree.parents, part.tokens, part.parents)
    return found


def fuse(trees: Sequence[TokenTree]) -> TokenTree:
    """Several drafts of one root as one tree: common prefixes are merged, and each node keeps all sources' raw scores.

    A node's score is its best one in any of the trees. q is dropped, as in `prune`.
    """
    if not trees:
        raise ValueError("nothing to fuse")
    if len(trees) == 1:
        return trees[0]
    whole = trees[0]
    for tree in trees[1:]:
        if tree.tokens[0] != whole.tokens[0]:
            roots = sorted({int(t.tokens[0]) for t in trees})
            raise DrafterError(f"only drafts of the same root can be fused, found roots {roots}")
        sources, mine, its = _columns(whole.sources, tree.sources)
        tokens, parents, raw, score = _overlay(
            *(whole.tokens, whole.parents, whole.raw, whole.score, mine),
            *(tree.tokens, tree.parents, tree.raw, tree.score, its),
            len(sources),
        )
        whole = TokenTree(tokens, parents, raw, score, sources)
    return whole


@lru_cache
def _columns(
    mine: tuple[str, ...], its: tuple[str, ...]
) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64]]:
    """The sources of two trees together, and for each tree which of them its columns are."""
    sources = tuple(dict.fromkeys((*mine, *its)))
    of_mine, of_its = (np.array([sources.index(name) for name in names], np.int64) for names in (mine, its))
    return sources, of_mine, of_its


# ---- the loops


@compiled
def _depths(parents):  # type: ignore[no-untyped-def]
    depths = np.zeros(len(parents), np.int32)
    for i in range(1, len(parents)):
        depths[i] = depths[parents[i]] + 1
    return depths


@compiled
def _child(parents, tokens, node, token):  # type: ignore[no-untyped-def]
    """0 if there is none."""
    for i in range(node + 1, len(parents)):
        if parents[i] == node and tokens[i] == token:
            return i
    return 0


@compiled
def _ancestors(parents):  # type: ignore[no-untyped-def]
    n = len(parents)
    mask = np.zeros((n, n), np.bool_)
    for i in range(n):
        node = i
        while node >= 0:
            mask[i, node] = True
            node = parents[node]
    return mask


@compiled
def _path_products(parents, score):  # type: ignore[no-untyped-def]
    value = np.ones(len(parents), np.float64)
    for i in range(1, len(parents)):
        value[i] = value[parents[i]] * score[i]
    return value


@compiled
def _is_tree(parents, tokens, vocabulary):  # type: ignore[no-untyped-def]
    """Whether parents stand before their children, and whether all tokens are in the vocabulary."""
    ordered, known = True, 0 <= tokens[0] < vocabulary
    for i in range(1, len(parents)):
        ordered = ordered and 0 <= parents[i] < i
        known = known and 0 <= tokens[i] < vocabulary
    return ordered, known


@compiled
def _count_sources(raw, path):  # type: ignore[no-untyped-def]
    """(S, 2) how many nodes each source proposed, in all and on the path."""
    counts = np.zeros((raw.shape[1], 2), np.int64)
    for source in range(raw.shape[1]):
        for i in range(raw.shape[0]):
            counts[source, 0] += not np.isnan(raw[i, source])
        for i in path:
            counts[source, 1] += not np.isnan(raw[i, source])
    return counts


@compiled
def _connected(parents, keep):  # type: ignore[no-untyped-def]
    kept = keep.copy()
    kept[0] = True
    for i in range(1, len(parents)):
        kept[i] = kept[i] and kept[parents[i]]
    return kept


@compiled
def _taken(tokens, parents, raw, score, nodes):  # type: ignore[no-untyped-def]
    """Tokens, parents, raw scores and scores of some nodes, in their order."""
    n = len(nodes)
    new_tokens, new_parents = np.empty(n, np.int32), np.empty(n, np.int32)
    new_raw, new_score = np.empty((n, raw.shape[1]), np.float32), np.empty(n, np.float32)
    place = np.empty(len(parents), np.int32)
    for k in range(n):
        node = nodes[k]
        place[node] = k
        new_tokens[k], new_score[k] = tokens[node], score[node]
        new_parents[k] = place[parents[node]] if k else -1
        for column in range(raw.shape[1]):
            new_raw[k, column] = raw[node, column]
    return new_tokens, new_parents, new_raw, new_score


@compiled
def _find_child(tokens, first, sibling, node, token):  # type: ignore[no-untyped-def]
    child = first[node]
    while child >= 0 and tokens[child] != token:
        child = sibling[child]
    return child


@compiled
def _add_child(first, last, sibling, node, child):  # type: ignore[no-untyped-def]
    if first[node] < 0:
        first[node] = child
    else:
        sibling[last[node]] = child
    last[node] = child


@compiled
def _merge(root, flat, lengths, weight):  # type: ignore[no-untyped-def]
    """A trie over the continuations, children linked as lists in order of appearance."""
    room = len(flat) + 1
    tokens = np.empty(room, np.int32)
    parents = np.empty(room, np.int32)
    mass = np.zeros(room, np.float64)
    first = np.full(room, -1, np.int32)
    last = np.full(room, -1, np.int32)
    sibling = np.full(room, -1, np.int32)
    tokens[0], parents[0], n, start = root, -1, 1, 0
    for c in range(len(lengths)):
        node = 0
        mass[0] += weight[c]
        for token in flat[start : start + lengths[c]]:
            child = _find_child(tokens, first, sibling, node, token)
            if child < 0:
                child = n
                n += 1
                tokens[child], parents[child] = token, node
                _add_child(first, last, sibling, node, child)
            mass[child] += weight[c]
            node = child
        start += lengths[c]
    share = np.ones(n, np.float32)
    for i in range(1, n):
        share[i] = mass[i] / mass[parents[i]]
    return tokens[:n], parents[:n], share


@compiled
def _overlay(  # type: ignore[no-untyped-def]
    tokens, parents, raw, score, columns, other_tokens, other_parents, other_raw, other_score, other_columns, width
):
    """Merge two trees. columns: which of the merged tree's `width` sources the columns of raw are. Returns the merged
    tokens, parents, raw and score."""
    room = len(tokens) + len(other_tokens)
    merged_tokens = np.empty(room, np.int32)
    merged_parents = np.empty(room, np.int32)
    merged_raw = np.full((room, width), np.float32(np.nan))
    merged_score = np.zeros(room, np.float32)
    merged = merged_tokens, merged_parents, merged_raw, merged_score
    links = np.full((3, room), -1, np.int32)
    merged_tokens[0], merged_parents[0] = tokens[0], -1
    n = _lay(tokens, parents, raw, score, columns, merged, links, np.int64(1))
    n = _lay(other_tokens, other_parents, other_raw, other_score, other_columns, merged, links, n)
    return merged_tokens[:n], merged_parents[:n], merged_raw[:n], merged_score[:n]


@compiled
def _lay(tokens, parents, raw, score, columns, merged, links, n):  # type: ignore[no-untyped-def]
    """Add a tree to the n merged nodes. Returns how many there are now."""
    merged_tokens, merged_parents, merged_raw, merged_score = merged
    first, last, sibling = links[0], links[1], links[2]
    places = np.zeros(len(tokens), np.int32)
    for i in range(len(tokens)):
        if i:
            node = places[parents[i]]
            place = _find_child(merged_tokens, first, sibling, node, tokens[i])
            if place < 0:
                place = n
                n += 1
                merged_tokens[place], merged_parents[place] = tokens[i], node
                _add_child(first, last, sibling, node, place)
            places[i] = place
        place = places[i]
        merged_score[place] = max(merged_score[place], score[i])
        for source in range(len(columns)):
            said = merged_raw[place, columns[source]]
            if np.isnan(said) or raw[i, source] > said:
                merged_raw[place, columns[source]] = raw[i, source]
    return n


@compiled
def _places(tokens, parents, part_tokens, part_parents):  # type: ignore[no-untyped-def]
    found = np.full(len(part_tokens), -1, np.int64)
    found[0] = 0
    for k in range(1, len(part_tokens)):
        above = found[part_parents[k]]
        if above < 0:
            continue
        for node in range(above + 1, len(tokens)):
            if parents[node] == above and tokens[node] == part_tokens[k]:
                found[k] = node
                break
    return found
