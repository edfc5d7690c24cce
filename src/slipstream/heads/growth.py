"""Growth: how a tree grows depth by depth, along fixed ranks or wherever it turns out to be most probable.

Nodes are numbered as they are found: the children of the root, then those of each node that was read at depth 1, and
so on. Which are read and which are kept is decided on tensors of fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from slipstream.errors import OptionError
from slipstream.heads.ranks import RankPath, check_tree


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

    def chosen(self, depth: int, paths: Tensor) -> Tensor:
        """Which of a depth's nodes, whose paths have log-probabilities (b, c), are read: (b, w)."""
        if self.fixed:
            return self.fixed[depth].expand(len(paths), -1)
        return paths.topk(self.widths[depth]).indices

    def keep(self, tokens: Tensor, parents: Tensor, logp: Tensor, paths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all nodes found (b, N), their parents' numbers, log-probabilities and those of their paths, the tree:
        tokens, parents (-1: padding) and probabilities (b, n), the most probable paths first.

        A parent is at least as probable as its children and was found before them, so it stands before them, and
        none is kept without it.
        """
        if self.members is not None:
            paths = paths.where(self.members, -torch.inf)
        value, order = (x[:, : self.nodes] for x in paths.sort(dim=1, descending=True, stable=True))
        place = torch.arange(1, 1 + order.shape[1], device=order.device).expand_as(order)
        places = order.new_zeros(len(order), 1 + paths.shape[1]).scatter(
            1, 1 + order, place
        )  # by number; the root's is 0
        above = places.gather(1, parents.gather(1, order)).where(value > -torch.inf, -1)
        return tokens.gather(1, order), above, logp.gather(1, order).exp()
