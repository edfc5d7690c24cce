"""Growth: how a tree grows depth by depth, along fixed ranks or wherever it turns out to be most probable.

Nodes are numbered as they are found: the children of the root, then those of each node that was read at depth 1, and
so on. Which are read and which are kept is decided on tensors of fixed shape: on a GPU in Triton, one launch per depth
and one at the end, elsewhere in plain torch.
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

# Node i + 1 of each sequence in column i. (b, 2, N) int32: tokens, and their parents' numbers; (b, 2, N) float32: the
# log-probabilities of nodes given their parents, and of whole paths.
Record = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Growth:
    depth: int
    branch: int  # children found of every node that is read
    widths: tuple[int, ...]  # nodes of depth 1, 2, … that are read
    nodes: int  # kept at most
    fixed: tuple[Tensor, ...] = ()  # per depth (w,) which of the nodes found there are read; none: the best
    members: Tensor | None = None  # (N,) which of all nodes found may be kept; None: all

    @classmethod
    def dynamic(cls, width: int, depth: int, nodes: int, guessable: int) -> Self:
        """EAGLE-2: at each depth the `width` nodes with the most probable paths are read, and of all that were found
        the `nodes` most probable are kept."""
        most = min(width, nodes)  # what is not among the best of its depth is not among the best of all
        branch = min(most, guessable)
        widths = [branch]
        while len(widths) < depth:
            widths.append(min(most, widths[-1] * branch))
        return cls(depth, branch, tuple(widths[: depth - 1]), nodes)

    @classmethod
    def static(cls, paths: Sequence[RankPath], guessable: int, device: torch.device) -> Self:
        """EAGLE-1: the nodes of these ranks, parents first."""
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
        """For drafts of which so many are kept at most: what can't be among the best of so few need not be found."""
        if nodes >= self.nodes or self.members is not None:
            return self
        depth = min(self.depth, nodes)
        widths = tuple(min(width, nodes) for width in self.widths[: depth - 1])
        return replace(self, depth=depth, branch=min(self.branch, nodes), widths=widths, nodes=nodes)

    @property
    def found(self) -> int:
        """All nodes, kept or not."""
        return self.branch * (1 + sum(self.widths))

    def grow(
        self, depth: int, logp: Tensor, ids: Tensor, number: Tensor | None, names: Tensor | None, record: Record
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes found at a depth go into the record; the next to be read come back: see `grow_depth`."""
        start = self.branch * (1 + sum(self.widths[: depth - 1])) if depth else 0
        width = self.widths[depth] if depth < len(self.widths) else 0
        fixed = self.fixed[depth] if width and self.fixed else None
        return grow_depth(logp, ids, number, names, fixed, record, start, width, True)

    def keep(self, record: Record, first: Tensor | None = None) -> Tensor:
        """The tree, packed: see `keep_best`."""
        return keep_best(record, self.members, first, min(self.nodes, self.found))


def new_record(batch: int, count: int, device: torch.device) -> Record:
    """Room for that many nodes of each sequence."""
    nodes = torch.empty((batch, 2, count), dtype=torch.int32, device=device)
    return nodes, torch.empty((batch, 2, count), dtype=torch.float32, device=device)


def grow_depth(
    logp: Tensor,  # (b, w, branch) float32, of the best tokens after each node that was read
    ids: Tensor,  # (b, w, branch)
    number: Tensor | None,  # (b, w) int32, of those nodes; None: the root
    names: Tensor | None,  # (V',) the tokens that ids stand for; None: themselves
    fixed: Tensor | None,  # (width,) which of the w·branch are chosen; None: those with the most probable paths
    record: Record,  # of which the first `start` nodes are there
    start: int,
    width: int,  # how many are chosen
    every: bool,  # whether all that were found go into the record, in the order they were found; else the chosen alone
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the nodes that are chosen, the best first and of equals the one found first: tokens (b, width), which of the w
    each follows (b, width), and numbers (b, width) int32."""
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
    # A child above its parent would break the order; a head that overflows knows nothing.
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
    """The `count` most probable paths of a record, of equals those found first, as `pack` puts them: (b, 3, count), and
    after them tokens (b, k) as `pack_first` does. members (N,): who may be kept; None: all. What has no probability is
    padding.

    A parent is at least as probable as its children and was found before them, so it stands before them, and none is
    kept without it.
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
    places = nodes.new_zeros(len(order), 1 + paths.shape[1]).scatter(1, 1 + order, place)  # by number; the root's is 0
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
