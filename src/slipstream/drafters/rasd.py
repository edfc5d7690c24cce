"""rasd: fuses a generator's tree with retrieved continuations, which are pruned by the generator's first tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slipstream import drafters as registry
from slipstream.budget import Budget
from slipstream.budget.calibration import Calibration, belief
from slipstream.checks import separated
from slipstream.compiled import compiled
from slipstream.drafters import _capabilities as can
from slipstream.drafters._joint import JointDrafter, JointSession
from slipstream.drafters.base import Drafter, DraftSession, Proposal
from slipstream.errors import OptionError
from slipstream.tree import TokenTree, fuse

if TYPE_CHECKING:
    from slipstream.targets.base import Target
    from slipstream.targets.captured.fixed_step import FixedStep

WIDER = 4  # retrievers may propose so many times the budget: many nodes are pruned, or are the generator's too


@dataclass(frozen=True)
class RasdOptions:
    generator: str = "eagle3"  # the drafter with probabilities: a trained head's, or model
    retrievers: str = "suffix"  # the drafters that retrieve continuations, by name, separated by commas
    drafter_path: Any = None  # the generator's head; for model, the draft model
    mode: str = ""  # the generator's; empty: its default
    store: Any = ""  # a store for retrievers that search one
    shared: int = 0  # tokens of earlier answers to retrieve from too
    length: int = 16  # tokens of a retrieved continuation
    top: int = 10  # with prune, a continuation must begin with one of so many likeliest tokens of the generator
    prune: bool = True  # False: all retrieved continuations may be verified
    fuse: bool = True  # False: prefixes that generator and retrievers share are verified once for each (an ablation)
    overlap: bool = True  # False: retrieve after the generator has drafted

    def __post_init__(self) -> None:
        if self.top < 1 or self.length < 1:
            raise OptionError(f"top and length must be at least 1, found {self.top} and {self.length}")
        if not self.names():
            raise OptionError(f"rasd retrieves: name at least one of {_known(False)} in retrievers=…")
        for name, generates in ((self.generator, True), *((name, False) for name in self.names())):
            kind = registry.find(name)
            if not _fits(kind, generates):
                role = "generator" if generates else "retriever"
                raise OptionError(
                    f"{name} can't be a {role}: name {'one' if generates else 'some'} of {_known(generates)}"
                )

    def names(self) -> list[str]:
        return separated(self.retrievers)


def _known(generates: bool) -> str:
    kinds = {name: registry.find(name) for name in registry.names() if name != "none"}
    return ", ".join(name for name, kind in kinds.items() if _fits(kind, generates))


def _fits(kind: type[Drafter], generates: bool) -> bool:
    """Whether a drafter can be a generator or a retriever. One made of other drafters can't, nor one that needs nodes
    beside the tree: these would be pruned here."""
    return can.generates(kind) == generates and not issubclass(kind, JointDrafter) and not hasattr(kind, "invests")


class RasdDrafter(JointDrafter):
    """A trained head or a draft model, fused with retrieval into one tree."""

    Options = RasdOptions

    def __init__(self, target: Target, tokenizer: Any, options: RasdOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.generator = self.parts[options.generator]
        # Retrievers that need tokens alone search while the generator drafts. Those that read states use its device,
        # where nothing else may run while a draft is captured: they search afterwards.
        self.aside = [name for name in options.names() if not can.layers(self.parts[name])]
        self.after = [name for name in options.names() if can.layers(self.parts[name])]
        self.names = list(self.parts)  # of the sources
        self.calibration = Calibration(self.names)
        self._worker = ThreadPoolExecutor(1, "slipstream-retrieval")

    def make_parts(self) -> dict[str, Drafter]:
        o = self.options
        head = {"drafter_path": o.drafter_path, "draft_model": o.drafter_path, "mode": o.mode}
        head["first"] = o.top if o.prune else 0
        found = {"store": o.store, "shared": o.shared, "length": o.length}
        parts = {o.generator: self.make_part(o.generator, head)}
        return parts | {name: self.make_part(name, found) for name in o.names()}

    def learn(self, tree: TokenTree, followed: Sequence[int], known: int) -> bool:
        return self.calibration.learn(tree, followed, known)

    def draft_ahead(self, sessions: Mapping[int, DraftSession], step: FixedStep) -> None:
        """The generator is always asked, so its draft can be started ahead. Retrievers need the host."""
        if self.options.overlap:
            mine, name = cast(Mapping[int, JointSession], sessions), self.options.generator
            can.draft_ahead(self.generator, {number: session.parts[name] for number, session in mine.items()}, step)

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        mine = cast(Sequence[JointSession], sessions)
        for session, root in zip(mine, roots, strict=True):
            session.label(root)
        drafted, retrieved = self._ask(mine, roots, budgets)
        return [
            Proposal(self._join(session, proposal, trees, budget))
            for session, proposal, trees, budget in zip(mine, drafted, retrieved, budgets, strict=True)
        ]

    # ---- asking

    def _ask(
        self, sessions: Sequence[JointSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> tuple[list[Proposal], list[list[TokenTree]]]:
        """The generator's proposals, and for each sequence the retrievers' trees."""
        own = [s.parts[self.options.generator] for s in sessions]
        if self.options.overlap:
            search = self._worker.submit(self._search, self.aside, sessions, roots, budgets)
            try:
                drafted = self.generator.propose(own, roots, budgets)
            finally:
                wait([search])  # after an error too: the search still uses the sessions
            found = search.result()
        else:
            drafted = self.generator.propose(own, roots, budgets)
            found = self._search(self.aside, sessions, roots, budgets)
        more = self._search(self.after, sessions, roots, budgets)
        return drafted, [one + other for one, other in zip(found, more, strict=True)]

    def _search(
        self, names: Sequence[str], sessions: Sequence[JointSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[list[TokenTree]]:
        wide = [Budget(WIDER * budget.nodes, budget.depth) for budget in budgets]
        found: list[list[TokenTree]] = [[] for _ in roots]
        for name in names:
            proposals = self.parts[name].propose([s.parts[name] for s in sessions], roots, wide)
            for trees, proposal, budget in zip(found, proposals, budgets, strict=True):
                trees.append(proposal.tree.cut(budget.depth))
        return found

    # ---- joining

    def _join(self, session: JointSession, drafted: Proposal, found: list[TokenTree], budget: Budget) -> TokenTree:
        if self.options.prune and drafted.first is not None:
            found = [beginning_with(drafted.first[: self.options.top], tree) for tree in found]
        found = [tree for tree in found if len(tree) > 1]
        trees = [drafted.tree, *found]
        whole = fuse(trees)
        session.proposed(whole)
        if not found:
            # The draft alone may keep its q: that nothing was found depends on the text and the generator's
            # probabilities, not on the tokens drawn.
            return drafted.tree
        if self.options.fuse:
            return self._believed(whole).top_k(budget.nodes)
        return side_by_side(best_of([self._believed(tree) for tree in trees], budget.nodes))

    def _believed(self, tree: TokenTree) -> TokenTree:
        """The tree with calibrated scores, which are comparable between sources."""
        columns, bins = self.calibration.columns(tree.sources), self.calibration.bins
        return tree.with_score(_beliefs(tree.depths, tree.raw, columns, bins))


def beginning_with(first: Sequence[int], tree: TokenTree) -> TokenTree:
    """The part of a tree whose first drafted token is one of these."""
    keep = np.ones(len(tree), np.bool_)
    for child in tree.children(0):
        keep[child] = int(tree.tokens[child]) in first
    return tree if keep.all() else tree.prune(keep)


def best_of(trees: Sequence[TokenTree], nodes: int) -> list[TokenTree]:
    """The most valuable nodes of several trees, `nodes` in all."""
    value = np.concatenate([tree.value[1:] for tree in trees])
    keep = np.zeros(len(value), np.bool_)
    keep[np.argsort(-value, kind="stable")[:nodes]] = True
    ends = np.cumsum([len(tree) - 1 for tree in trees])[:-1]
    return [tree.prune(np.concatenate([[True], kept])) for tree, kept in zip(trees, np.split(keep, ends), strict=True)]


def side_by_side(trees: Sequence[TokenTree]) -> TokenTree:
    """Several drafts of one root with all their nodes, shared ones included (the ablation fuse=False). A node that an
    earlier tree has too is added once more, without children: it costs time and changes nothing."""
    whole = fuse(trees)
    known, tokens, parents, scores = {0}, list[int](), list[int](), list[float]()
    for tree in trees:
        places = [0]  # of its nodes in the whole
        for token, parent, score in zip(
            tree.tokens[1:].tolist(), tree.parents[1:].tolist(), tree.score[1:], strict=True
        ):
            place = cast(int, whole.child(places[parent], token))
            places.append(place)
            if place in known:
                tokens.append(token)
                parents.append(places[parent])
                scores.append(float(score))
            known.add(place)
    return TokenTree(
        tokens=np.concatenate([whole.tokens, np.array(tokens, np.int32)]),
        parents=np.concatenate([whole.parents, np.array(parents, np.int32)]),
        raw=np.concatenate([whole.raw, np.full((len(tokens), whole.raw.shape[1]), np.nan, np.float32)]),
        score=np.concatenate([whole.score, np.array(scores, np.float32)]),
        sources=whole.sources,
    )


@compiled
def _beliefs(depths, raw, columns, bins):  # type: ignore[no-untyped-def]
    """(n,) P(right | parent right), by the source with the highest calibrated score."""
    score = np.ones(len(depths), np.float32)
    for i in range(1, len(depths)):
        best = 0.0
        for column in range(len(columns)):
            if not np.isnan(raw[i, column]):
                best = max(best, belief(bins, columns[column], depths[i], raw[i, column]))
        score[i] = best
    return score
