"""Growth: how a tree grows depth by depth, along fixed ranks (static) or along its most probable paths (dynamic).

A node that is "read" is passed through the head, which finds its children. Nodes are numbered in the order they are
found: the children of the root, then the children of each node that is read at depth 1, and so on. Which nodes are read
and kept is computed on tensors of fixed shape: in Triton on a GPU, with one launch per depth and one at the end; in
plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from slipstream.errors import OptionError
from slipstream.heads.packing import pack, pack_first
from slipstream.heads.ranks import RankPath, check_tree

# All nodes found; node i + 1 of each sequence is in column i. (b, 2, N) int32: tokens, and numbers of their parents.
# (b, 2, N) float32: log-probabilities of nodes given their parents, and of whole paths.
Record = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Growth:
    depth: int
    branch: int  # children found for every node that is read
    widths: tuple[int, ...]  # how many nodes are read at depth 1, 2, …
    nodes: int  # nodes kept at most
    fixed: tuple[Tensor, ...] = ()  # per depth (w,), which of the nodes found are read; empty: the most probable
    members: Tensor | None = None  # (N,) which of all nodes found may be kept; None: all

    @classmethod
    def dynamic(cls, width: int, depth: int, nodes: int, guessable: int) -> Self:
        """EAGLE-2: at each depth the `width` nodes with the most probable paths are read, and of all nodes found the
        `nodes` most probable are kept."""
        most = min(width, nodes)  # a node below the `nodes` best of its depth can't be among the `nodes` best of all
        branch = min(most, guessable)
        widths = [branch]
        while len(widths) < depth:
            widths.append(min(most, widths[-1] * branch))
        return cls(depth, branch, tuple(widths[: depth - 1]), nodes)

    @classmethod
    def static(cls, paths: Sequence[RankPath], guessable: int, device: torch.device) -> Self:
        """EAGLE-1: the nodes with these rank paths, parents first."""
        if not paths:
            raise OptionError("the tree has no rank paths: give at least [[0]]")
        depth, branch = max(map(len, paths)), 1 + max(map(max, paths))
        check_tree(paths, depth, guessable)
        kept = set(paths)
        read: list[RankPath] = [()]
        fixed, members = [], []
        for level in range(1, depth + 1):
            found = {(*path, rank): i * branch + rank for i, path in enumerate(read) for rank in range(branch)}
            members.append(torch.tensor([path in kept for path in found]))
            read = sorted({path[:-1] for path in kept if len(path) == level + 1})
            fixed.append(torch.tensor([found[path] for path in read], dtype=torch.long, device=device))
        widths = tuple(map(len, fixed[:-1]))
        return cls(depth, branch, widths, len(paths), tuple(fixed[:-1]), torch.cat(members).to(device))

    def within(self, nodes: int) -> Self:
        """The same growth for drafts that keep at most this many nodes: it skips nodes that can't be among them."""
        if nodes >= self.nodes or self.members is not None:
            return self
        depth = min(self.depth, nodes)
        widths = tuple(min(width, nodes) for width in self.widths[: depth - 1])
        return replace(self, depth=depth, branch=min(self.branch, nodes), widths=widths, nodes=nodes)

    @property
    def found(self) -> int:
        """Number of all nodes found, kept or not."""
        return self.branch * (1 + sum(self.widths))

    def grow(
        self, depth: int, logp: Tensor, ids: Tensor, number: Tensor | None, names: Tensor | None, record: Record
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the nodes found at a depth into the record and return those to read next: see `grow_depth`."""
        start = self.branch * (1 + sum(self.widths[: depth - 1])) if depth else 0
        width = self.widths[depth] if depth < len(self.widths) else 0
        fixed = self.fixed[depth] if width and self.fixed else None
        return grow_depth(logp, ids, number, names, fixed, record, start, width, True)

    def keep(self, record: Record, first: Tensor | None = None) -> Tensor:
        """The tree, packed: see `keep_best`."""
        return keep_best(record, self.members, first, min(self.nodes, self.found))


def new_record(batch: int, count: int, device: torch.device) -> Record:
    """A record with room for `count` nodes of each sequence."""
    nodes = torch.empty((batch, 2, count), dtype=torch.int32, device=device)
    return nodes, torch.empty((batch, 2, count), dtype=torch.float32, device=device)


def grow_depth(
    logp: Tensor,  # (b, w, branch) float32, of the best tokens after each of the w nodes that were read
    ids: Tensor,  # (b, w, branch) these tokens
    number: Tensor | None,  # (b, w) int32, node numbers of the w nodes; None: the root
    names: Tensor | None,  # (V',) the token id of each of the head's ids; None: they are the same
    fixed: Tensor | None,  # (width,) which of the w·branch are chosen; None: those with the most probable paths
    record: Record,  # its first `start` nodes are filled
    start: int,
    width: int,  # how many are chosen
    every: bool,  # True: record all nodes found, in that order; False: record the chosen ones only
) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen nodes, the most probable first, in a tie the one found first: tokens (b, width), the index of their
    parents among the w nodes (b, width), and node numbers (b, width) int32."""
    grow = grow_launch if logp.is_cuda else grow_plain
    return grow(logp, ids, number, names, fixed, *record, start, width, every)


def grow_plain(
    logp: Tensor,
    ids: Tensor,
    number: Tensor | None,
    names: Tensor | None,
    fixed: Tensor | None,
    nodes: Tensor,
    odds: Tensor,
    start: int,
    width: int,
    every: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`grow_depth` in plain torch."""
    b, _, branch = logp.shape
    if number is None:
        number, value = nodes.new_zeros(b, 1), logp.new_zeros(b, 1)
    else:
        value = odds[:, 1].gather(1, number.long() - 1)
    # A child must not be more probable than its parent. NaN, from a head that overflows, counts as impossible.
    own = logp.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)
    paths = (value[..., None] + own).flatten(1)  # (b, w·branch)
    tokens = (ids if names is None else names[ids]).flatten(1)
    if fixed is None:
        chosen = paths.sort(dim=1, descending=True, stable=True).indices[:, :width]
    else:
        chosen = fixed.expand(b, -1)
    chain, following = chosen // branch, tokens.gather(1, chosen)
    if every:
        found = tokens, number[..., None].expand_as(ids).flatten(1), own.flatten(1), paths
        numbers = (1 + start + chosen).int()
    else:
        found = following, number.gather(1, chain), own.flatten(1).gather(1, chosen), paths.gather(1, chosen)
        numbers = torch.arange(1 + start, 1 + start + width, dtype=torch.int32, device=ids.device).repeat(b, 1)
    here = slice(start, start + found[0].shape[1])
    nodes[:, 0, here], nodes[:, 1, here], odds[:, 0, here], odds[:, 1, here] = found
    return following, chain, numbers


@torch.library.custom_op("slipstream::grow", mutates_args=("nodes", "odds"))
def grow_launch(
    logp: Tensor,
    ids: Tensor,
    number: Tensor | None,
    names: Tensor | None,
    fixed: Tensor | None,
    nodes: Tensor,
    odds: Tensor,
    start: int,
    width: int,
    every: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`grow_depth` on a GPU, as an operation that torch.compile leaves alone."""
    from slipstream.heads.grow_kernel import grow_rows

    return grow_rows(logp, ids, number, names, fixed, nodes, odds, start, width, every)


@grow_launch.register_fake
def _grown_shapes(
    logp: Tensor,
    ids: Tensor,
    _number: Tensor | None,
    _names: Tensor | None,
    _fixed: Tensor | None,
    nodes: Tensor,
    _odds: Tensor,
    _start: int,
    width: int,
    _every: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """For tracing: the shapes alone."""
    shape = (len(logp), width)
    return ids.new_empty(shape), ids.new_empty(shape), nodes.new_empty(shape)


def keep_best(record: Record, members: Tensor | None, first: Tensor | None, count: int) -> Tensor:
    """The `count` nodes of a record with the most probable paths, packed as by `pack`: (b, 3, count). In a tie, those
    found first. members (N,): which may be kept; None: all. first: tokens (b, k) to append, as by `pack_first`. Nodes
    of probability 0 become padding.

    A parent is at least as probable as its children and was found before them. So it comes before them, and no node is
    kept without its parent.
    """
    keep = keep_launch if record[0].is_cuda else keep_plain
    return keep(*record, members, first, count)


def keep_plain(nodes: Tensor, odds: Tensor, members: Tensor | None, first: Tensor | None, count: int) -> Tensor:
    """`keep_best` in plain torch."""
    (tokens, parents), (logp, paths) = nodes.unbind(1), odds.unbind(1)  # (b, N) each
    if members is not None:
        paths = paths.where(members, -torch.inf)
    value, order = (x[:, :count] for x in paths.sort(dim=1, descending=True, stable=True))
    place = torch.arange(1, 1 + count, dtype=torch.int32, device=order.device).expand_as(order)
    # New numbers, by old number; the root keeps 0.
    places = nodes.new_zeros(len(order), 1 + paths.shape[1]).scatter(1, 1 + order, place)
    above = places.gather(1, parents.gather(1, order).long()).where(value > -torch.inf, -1)
    return pack_first(pack(tokens.gather(1, order), above, logp.gather(1, order).exp()), first)


@torch.library.custom_op("slipstream::keep", mutates_args=())
def keep_launch(nodes: Tensor, odds: Tensor, members: Tensor | None, first: Tensor | None, count: int) -> Tensor:
    """`keep_best` on a GPU, as an operation that torch.compile leaves alone."""
    from slipstream.heads.grow_kernel import keep_rows

    return keep_rows(nodes, odds, members, first, count)


@keep_launch.register_fake
def _kept_shape(nodes: Tensor, _odds: Tensor, _members: Tensor | None, first: Tensor | None, count: int) -> Tensor:
    """For tracing: the shape alone."""
    return nodes.new_empty(len(nodes), 3, count + (0 if first is None else first.shape[1]))
