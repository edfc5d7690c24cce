"""How well short vectors represent states: the part `quality` of bench/dense.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpu import tell
from slipstream.datastores.dense import index
from slipstream.datastores.dense.transform import Moments, Transform

if TYPE_CHECKING:
    from dense import Given

SAME = 2**-11  # how far half precision rounds: keys that differ by less in similarity count as equal
CURVE = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # dimensions


def quality(given: Given) -> dict[str, Any]:
    device, o = given.device, given.options
    documents = [d for d in given.documents("own") if len(d) > 4]
    room = np.searchsorted(np.cumsum([len(d) - 4 for d in documents]), o.positions, side="right")
    documents = documents[: max(1, int(room))]
    stored, after = given.states(documents, [0] * len(documents))
    held, truth = given.queries
    own = sample(len(stored), len(held), 1).to(device)
    moments = Moments(stored.shape[1], device)
    moments.add(stored[sample(len(stored), o.sample, 2).to(device)])
    whole = moments.fit(stored.shape[1])
    right = full_neighbours(whole.to(device), stored, held)
    kept = whole.explained.cumsum(0).tolist()
    told: dict[str, Any] = {"stored": len(stored), "queries": len(held)}
    told["explained"] = {
        n: round(kept[n - 1], 4) for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256) if n <= len(kept)
    }
    group = middle_group(after[:, 0], 1 << 16)
    given.vectors("own")
    given.use_libraries()
    variants = [(str(dims), dims, True, True) for dims in (32, 64, 96, 128)]
    variants += [("64, no z-scores", 64, False, True), ("64, no unit length", 64, True, False)]
    variants += [("64, neither", 64, False, False)]
    for name, dims, standardise, unit in variants:
        transform = moments.fit(dims, standardise).to(device)
        reduce = transform if unit else transform.project
        keys = torch.cat([reduce(part).half() for part in stored.split(1 << 16)])
        told[name] = {
            "explained": round(float(transform.explained.sum()), 4),
            "mrr_self": mrr(keys, reduce(stored[own]), own),
            "mrr_full": mrr(keys, reduce(held), right),
            **agree(keys, reduce(held), after, truth),
            "mrr_self_graph": through_graph(keys[group].cpu(), reduce(stored[group]).cpu(), len(held) // 5),
        }
        tell(f"{name:20}" + "  ".join(f"{k} {v}" for k, v in told[name].items()))
        del keys
    return told


def sample(n: int, count: int, seed: int) -> torch.Tensor:
    """So many of n, at random."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(n)[:count])


def middle_group(following: torch.Tensor, size: int) -> torch.Tensor:
    """The positions that one token followed: a token of about so many."""
    counts = torch.bincount(following)
    return torch.nonzero(following == (counts - size).abs().argmin())[:, 0]


def full_neighbours(whole: Transform, stored: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """(q,) the nearest of all by the cosine of z-scores in all dimensions."""

    def unit(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize((states.float() - whole.mean) * whole.scale)

    best = torch.full((len(queries),), -torch.inf, device=queries.device)
    which = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    asked, size = unit(queries), 1 << 16
    for start in range(0, len(stored), size):
        top = (asked @ unit(stored[start : start + size]).T).max(1)
        better = top.values > best
        best, which = torch.where(better, top.values, best), torch.where(better, top.indices + start, which)
    return which


def blocks(keys: torch.Tensor, queries: torch.Tensor, size: int = 64) -> Iterator[tuple[int, torch.Tensor]]:
    wide = keys.float()
    for start in range(0, len(queries), size):
        yield start, queries[start : start + size].float() @ wide.T  # (q, n)


def mrr(keys: torch.Tensor, queries: torch.Tensor, right: torch.Tensor) -> float:
    """Equation 4: one over the rank of the right key. Equals share a rank."""
    total = 0.0
    for start, near in blocks(keys, queries):
        mine = near.gather(1, right[start : start + len(near), None])
        total += float((1 / (1 + (near > mine + SAME).sum(1))).sum())
    return round(total / len(queries), 4)


def agree(keys: torch.Tensor, queries: torch.Tensor, after: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """How often the best key, or one of those equally good, was followed by the four tokens that truly follow: of all
    keys, and of those that the first of the four followed, which are all that dresd looks at."""
    hits = {"agree_at_4": 0, "agree_at_4_in_group": 0}
    for start, near in blocks(keys, queries):
        right = truth[start : start + len(near)]
        for name in hits:
            best = near >= near.max(1, keepdim=True).values - SAME
            query, row = torch.nonzero(best & near.isfinite(), as_tuple=True)
            hits[name] += len(query[(after[row] == right[query]).all(1)].unique())
            near = near.masked_fill(after[:, 0] != right[:, :1], -torch.inf)
    return {name: round(count / len(queries), 4) for name, count in hits.items()}


def through_graph(keys: torch.Tensor, queries: torch.Tensor, count: int) -> float | None:
    """MRR of keys themselves as the graph of their group finds them among the ten nearest; None without a library."""
    if not index.installed():
        return None
    data, looked = index.graph_of(keys.numpy())
    graph = index.Graph(data, keys.shape[1], looked)
    total, some = 0.0, sample(len(keys), count, 3).tolist()
    for i in some:
        near = keys[torch.from_numpy(graph.near(queries[i].numpy(), 10))].float() @ queries[i]
        mine = float(keys[i].float() @ queries[i])
        if bool((near >= mine - SAME).any()):
            total += 1 / (1 + int((near > mine + SAME).sum()))
    return round(total / len(some), 4)
