"""Static trees, written as rank paths: (0, 2) is the third-best second token after the best first token.

The best tree follows from how often a head's token of each rank is right. Depths are assumed to be independent, so a
path's worth is a product, and a tree's worth, the expected number of accepted tokens, is the sum over its paths.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import DrafterError, OptionError
from slipstream.heads.base import Head

FILE = "tree.json"  # next to a head's weights: rank paths, the best first

RankPath = tuple[int, ...]


def tune(accuracy: Sequence[Sequence[float]], nodes: int) -> list[RankPath]:
    """The best tree of so many nodes, the most valuable node first. accuracy (K, R): how often the rank-r token at
    depth k is right. A prefix of the list is the best smaller tree. Ranks that are never right are left out."""
    tree: list[RankPath] = []
    waiting: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]  # the root; a parent is worth at least its children
    while waiting and len(tree) <= nodes:
        worth, depth, path = heapq.heappop(waiting)
        tree.append(path)
        for rank, right in enumerate(accuracy[depth] if depth < len(accuracy) else ()):
            if right > 0:
                heapq.heappush(waiting, (worth * right, depth + 1, (*path, rank)))
    return tree[1:]


def assumed(depths: int, ranks: int) -> list[list[float]]:
    """Assumed accuracies of heads that were not measured."""
    return [[0.6 * 0.8**depth / (1 + rank) ** 2 for rank in range(ranks)] for depth in range(depths)]


@torch.no_grad()
def measure(head: Head, states: Tensor, tokens: Tensor, ranks: int = 10) -> list[list[float]]:
    """(K, R) how often each rank of each depth is right on texts: states (b, t, ·), tokens (b, t)."""
    depths = head.reach or 5
    table = []
    for depth, guess in enumerate(head.predict(states, tokens, depths)):
        about = tokens[:, 2 + depth :]  # the tokens to predict
        if not about.numel():
            raise OptionError(f"texts of {tokens.shape[1]} tokens are too short to measure {depths} depths")
        best = guess.logits[:, : about.shape[1]].topk(min(ranks, guess.logits.shape[-1])).indices  # (b, t', R)
        ids = best if head.draft_ids is None else head.draft_ids[best]
        table.append((ids == about[..., None]).double().mean((0, 1)).tolist())
    return table


def save_tree(paths: Sequence[RankPath], folder: str | Path) -> None:
    (Path(folder) / FILE).write_text(json.dumps([list(path) for path in paths]) + "\n", encoding="utf-8")


def read_tree(file: Path) -> list[RankPath]:
    try:
        return [tuple(path) for path in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise DrafterError(f"{file} can't be read as a list of rank paths: {error}") from error


def check_tree(paths: Sequence[RankPath], depths: int, ranks: int) -> list[int]:
    """The node number of each path's parent; node 0 is the root. Raise if the paths are no tree."""
    number: dict[RankPath, int] = {(): 0}
    parents = []
    for path in paths:
        if not path or len(path) > depths or not all(type(r) is int and 0 <= r < ranks for r in path):
            raise DrafterError(f"a rank path has 1 to {depths} ranks below {ranks}, found {list(path)}")
        if path in number or path[:-1] not in number:
            why = "stands there twice" if path in number else "must follow the path that it continues"
            raise DrafterError(f"{list(path)} {why}: order rank paths so that each begins with an earlier one")
        parents.append(number[path[:-1]])
        number[path] = len(number)
    return parents
