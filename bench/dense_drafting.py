"""rest against dresd, replayed over recorded texts: the part `drafting` of bench/dense.py.

The nearest positions do not depend on earlier drafts, so they are searched once, on the device; then every drafter and
shape is replayed in its own processes. Under `match` texts do not depend on drafts either, so a replay accepts exactly
what decoding would accept.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu import tell
from slipstream.budget import Budget, step_budget
from slipstream.datastores.dense.device import unpacked
from slipstream.datastores.dense.nearest import Drafts, Nearest
from slipstream.datastores.sparse.search import SearchShape
from slipstream.drafters._retrieval import RetrievalSession
from slipstream.drafters.base import Seen
from slipstream.drafters.dresd import tree_of
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from dense import EarlierAnswers, Given

STORES = ("own", "theirs", "code")
SHAPES = ((10, 6), (10, 10), (3, 20))  # drafts, tokens of each
LENGTHS, COUNTS = (2, 4, 6, 8, 10, 14, 20), (1, 2, 3, 5, 10, 20, 40)
BATCH = 16  # positions that are searched together
PAPER = "dresd, the paper's way"


@dataclass(frozen=True)
class Trial:
    drafter: str
    store: str
    of: str  # which prompts
    way: str  # greedy or nucleus
    drafts: int
    length: int

    def __str__(self) -> str:
        return f"{self.of} {self.way}, {self.store}, {self.drafts}×{self.length}, {self.drafter}"


def drafting(given: Given) -> dict[str, Any]:
    global known
    known = Known(given)
    trials = all_trials(list(dict.fromkeys(one.of for one in given.said)))
    for trial in trials[:2]:
        replay(trial)  # what is compiled, is compiled once
    # The processes inherit everything, and leave the GPU alone.
    with multiprocessing.get_context("fork").Pool(given.options.processes) as pool:
        results = pool.map(replay, trials, chunksize=1)
    told: dict[str, Any] = {}
    for trial, result in zip(trials, results, strict=True):
        told[str(trial)] = result
        tell(f"{trial!s:60}" + "  ".join(f"{k} {v}" for k, v in result.items()))
    return told


def all_trials(sets: Sequence[str]) -> list[Trial]:
    both = ("rest", "dresd")
    trials = [
        Trial(drafter, store, of, way, *shape)
        for store in ("own", "theirs")
        for of in sets
        for way in ("greedy", "nucleus")
        for shape in SHAPES
        for drafter in both
    ]
    trials += [Trial(drafter, "code", of, "greedy", 10, 10) for of in sets for drafter in both]  # Figure 6
    swept = [(10, length) for length in LENGTHS] + [(count, 10) for count in COUNTS]  # Figure 7
    trials += [Trial(drafter, "own", sets[0], "greedy", *shape) for shape in swept for drafter in both]
    trials += [Trial(PAPER, "own", of, "greedy", 10, 10) for of in sets]
    return list(dict.fromkeys(trials))


class Known:
    """The texts, and what is nearest at each of their positions."""

    def __init__(self, given: Given) -> None:
        self.said: list[EarlierAnswers] = given.said
        self.held = {name: given.held_by(name) for name in STORES}
        self.runs = {name: given.vectors(name).store.runs() for name in STORES}
        states = torch.cat(list(self._states(given))).to(given.device)
        # {store, whether all rows were searched: (answer tokens, MOST) of each text}
        self.keys = {(name, False): self._near(name, states, False) for name in STORES}
        self.keys["own", True] = self._near("own", states, True)

    def _states(self, given: Given) -> Iterator[torch.Tensor]:
        """Of each text, those that chose its answer's tokens: (len(answer), H)."""
        texts = [np.array([*one.prompt, *one.answer, 0]) for one in self.said]  # the last state chooses nothing
        rows = given.rows(texts, max(map(len, texts)))
        end = 0
        for one, text in zip(self.said, texts, strict=True):
            end += len(text) - 2
            yield rows[end - len(one.answer) : end]

    def _near(self, name: str, states: torch.Tensor, everything: bool) -> list[NDArray[np.int64]]:
        held = self.held[name]
        wanted = [not everything or one.way == "greedy" for one in self.said for _ in one.answer]
        roots = [root for one in self.said for root in one.answer]
        bounds = torch.tensor([(0, len(held)) if everything else held.group(root) for root in roots])
        bounds[~torch.tensor(wanted)] = 0
        spare = -len(states) % BATCH  # every batch has one shape
        states, bounds = torch.cat((states, states[:spare])), torch.cat((bounds, bounds[:spare]))
        batches = zip(states.split(BATCH), bounds.split(BATCH), strict=True)
        found = [held.search(bounds, states).copy() for states, bounds in batches]
        return np.split(np.concatenate(found), np.cumsum([len(one.answer) for one in self.said]))[:-1]

    def near(self, trial: Trial, number: int, at: int) -> Drafts:
        """What dresd finds for answer[at] of a text."""
        held, paper = self.held[trial.store], trial.drafter == PAPER
        similarity, rows = unpacked(self.keys[trial.store, paper][number][at, : trial.drafts])
        first, last = held.group(self.said[number].answer[at]) if paper else (0, len(held))
        keep = (first <= rows) & (rows < last)
        found = Nearest(similarity[keep], held.part[rows[keep]], held.row[rows[keep]])
        return held.view.read(found, trial.length)


known: Known


def replay(trial: Trial) -> dict[str, float]:
    steps = accepted = nodes = tokens = 0
    rates = []
    for number, one in enumerate(known.said):
        if (one.of, one.way) == (trial.of, trial.way):
            paths = list(steps_of(trial, number))
            kept, depth = sum(path for path, _ in paths), sum(tree.depth for _, tree in paths)
            rates.append(kept / depth if depth else 0.0)
            nodes += sum(len(tree) - 1 for _, tree in paths)
            steps, accepted, tokens = steps + len(paths), accepted + kept, tokens + len(one.answer) - 1
    return {
        "tokens_per_step": round(tokens / steps, 3),
        "acceptance_rate": round(float(np.mean(rates)), 4),
        "accepted_per_step": round(accepted / steps, 3),
        "nodes_per_step": round(nodes / steps, 1),
    }


def steps_of(trial: Trial, number: int) -> Iterator[tuple[int, TokenTree]]:
    """Tokens accepted, and the tree, of every step through a text. The root is answer[at]."""
    one = known.said[number]
    most = trial.drafts * trial.length
    shape = SearchShape(matches=trial.drafts, length=trial.length, nodes=most)
    session = RetrievalSession("rest", shape, partial(known.runs.__getitem__, trial.store))
    session.observe(Seen(one.prompt, 0))
    at = 0
    while at < len(one.answer) - 1:
        budget = step_budget(most, len(one.answer) - at - 1, 1 << 20)
        tree = budget.limit(proposed(trial, number, at, session, budget))
        node, path = 0, 0
        while (child := tree.child(node, one.answer[at + path + 1])) is not None:
            node, path = child, path + 1
        session.observe(Seen(one.answer[at : at + path + 1], 0))
        at += path + 1
        yield path, tree


def proposed(trial: Trial, number: int, at: int, session: RetrievalSession, budget: Budget) -> TokenTree:
    root = known.said[number].answer[at]
    if trial.drafter == "rest":
        return session.propose(root, budget).tree
    return tree_of(root, known.near(trial, number, at), budget.depth)
