"""Copy drafted nodes to the host: packed into one tensor on the device, unpacked into a tree."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.compiled import compiled
from slipstream.kernels.ops import best_tokens
from slipstream.tree import TokenTree

FIRST = -2  # marks a token after packed nodes: no parent and no probability has these bits
FEW = 16  # up to so many best tokens the kernel is used


def pack(tokens: Tensor, parents: Tensor, probability: Tensor) -> Tensor:
    """Drafted nodes (b, n) as one (b, 3, n) int32. The first is node 1, since 0 is the root. parents: node numbers, -1
    for padding, which comes last. probability: the head's, of a node given its parent."""
    return torch.stack((tokens.int(), parents.int(), probability.float().view(torch.int32)), dim=1)


def unpack(root: int, nodes: NDArray[np.int32], source: str, most: int | None = None) -> TokenTree:
    """(3, n) of one sequence as a tree with at most `most` nodes, the first ones, which are the most probable."""
    tokens, parents, raw, score = _unpack(root, nodes, nodes.shape[1] if most is None else most)
    return TokenTree(tokens, parents, raw, score, (source,))


@compiled
def _unpack(root, nodes, most):  # type: ignore[no-untyped-def]
    count = 0
    while count < min(most, nodes.shape[1]) and nodes[1, count] >= 0:
        count += 1
    tokens, parents = np.empty(1 + count, np.int32), np.empty(1 + count, np.int32)
    score, raw = np.empty(1 + count, np.float32), np.empty((1 + count, 1), np.float32)
    tokens[0], parents[0], score[0], raw[0, 0] = root, -1, 1.0, np.nan  # the root was not drafted
    beliefs = nodes.view(np.float32)
    for i in range(count):
        tokens[1 + i], parents[1 + i] = nodes[0, i], nodes[1, i]
        score[1 + i] = raw[1 + i, 0] = beliefs[2, i]
    return tokens, parents, raw, score


def pack_chains(tokens: Tensor, probability: Tensor) -> Tensor:
    """Sampled chains (b, width, length) as one (b, 2, width·length) int32. Probability 0 marks unused entries."""
    return torch.stack((tokens.int(), probability.float().view(torch.int32)), dim=1).flatten(2)


def likeliest(logits: Tensor, count: int) -> Tensor:
    """(b, count) the most probable tokens after rows of logits (b, V), the best first; fewer if V is smaller."""
    count = min(count, logits.shape[-1])
    # The kernel finds tokens one after the other, which is fast only for few.
    return best_tokens(logits, count)[1] if count <= FEW else logits.topk(count).indices


def pack_first(packed: Tensor, tokens: Tensor | None) -> Tensor:
    """Append tokens (b, k) to the result (b, ·, n) of `pack` or `pack_chains`. They are marked with -2: no nodes."""
    if tokens is None:
        return packed
    mark = tokens.new_full(tokens.shape, FIRST, dtype=torch.int32)
    return torch.cat((packed, torch.stack((tokens.int(), *[mark] * (packed.shape[1] - 1)), dim=1)), dim=2)


def unpack_first(packed: NDArray[np.int32]) -> tuple[int, ...] | None:
    """The tokens that `pack_first` appended to one sequence's nodes (·, n); None: there are none."""
    return tuple(packed[0, packed[1] == FIRST].tolist()) or None
