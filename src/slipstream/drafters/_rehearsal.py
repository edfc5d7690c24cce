"""Warm-up of `auto` before the first answer: every part drafts after a meaningless text. This loads and compiles code,
captures the steps and drafts of one sequence, and measures their times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.budget import Budget
from slipstream.budget.costs import TRIAL, Costs
from slipstream.budget.pilot import Draft, Pilot, Source, Text
from slipstream.datastores.live import SHORT
from slipstream.drafters import _capabilities as can
from slipstream.drafters._retrieval import RetrievalSession
from slipstream.drafters.base import Drafter, Hidden, Seen
from slipstream.request import Request
from slipstream.sampling import Sampler, Sampling
from slipstream.stopwatch import Stopwatch, preparing
from slipstream.targets.base import Scores, Target, Want
from slipstream.targets.timing import nonsense
from slipstream.tree import TokenTree, fuse, places

if TYPE_CHECKING:
    from slipstream.targets.captured.fixed_step import FixedStep


@torch.inference_mode()
def rehearse(target: Target, pilot: Pilot, parts: Mapping[str, Drafter], layers: tuple[int, ...]) -> None:
    prepared, rehearsal = preparing.seconds, Rehearsal(target, pilot, parts, layers)
    rehearsal.read_text()
    rehearsal.draft()
    rehearsal.compile_the_rest()
    rehearsal.capture_steps()
    rehearsal.draft_ahead()
    rehearsal.step_without_drafts()
    pilot.rehearsed()
    rehearsal.close()
    if preparing.seconds > prepared:  # compiling leaves much garbage: collect it before the first answer
        gc.collect()


class Rehearsal:
    """A meaningless text, and a session of every part for it."""

    def __init__(self, target: Target, pilot: Pilot, parts: Mapping[str, Drafter], layers: tuple[int, ...]) -> None:
        self.target, self.pilot, self.parts, self.layers = target, pilot, parts, layers
        self.words = nonsense(target)
        self.request = Request(self.words, max_new_tokens=len(self.words), prediction=self.words)
        self.sessions = {name: part.begin(self.request) for name, part in parts.items()}
        self.slot = target.open()
        for name, session in self.sessions.items():
            if can.in_pages(parts[name]):
                can.follow(session, self.slot)
        self.sources: list[Source] = []  # those that draft after this text
        self.root = self.words[0]
        self.room = target.context - len(self.words) - 1  # rows that a step after the text can have
        self.limit = Budget(target.default_draft, min(target.default_draft, self.room))
        self.sampler = Sampler(Sampling(), self.words)
        self.want = Want(layers, 1 + self.limit.nodes, (self.sampler,))  # as the engine's

    def read_text(self) -> None:
        """Read the text in two pieces, and show it to all parts."""
        target, slot, words = self.target, self.slot, self.words
        if target.widths:  # prompts are read by steps of several widths
            other = target.open()
            for _ in target.prefill(other, (words * 4)[: target.context // 2], Want(self.layers)):
                pass
            target.close(other)
        for piece in (words[: len(words) // 4], words[len(words) // 4 :]):
            for score in target.prefill(slot, piece, Want(self.layers)):
                start, hidden = slot.length - len(next(iter(score.hidden.values()), piece)), Hidden(score.hidden)
                for name, session in self.sessions.items():
                    layers = can.layers(self.parts[name])
                    session.observe(Seen(words[start : slot.length], start, hidden.of(layers)))
        every = self.pilot.sources().values()
        self.sources = [source for source in every if not can.silent(self.sessions[source.drafter])]

    def draft(self) -> None:
        """Draft with every source, and do with the drafts what a step does with them. Measures the time of drafts, but
        not of heads where these overlap with steps (`draft_ahead`)."""
        pilot, limit = self.pilot, self.limit
        scratch = Pilot(pilot.costs, pilot.drafters, pilot.trees, pilot.heads)  # this text teaches nothing
        for _ in range(TRIAL):
            trees = [TokenTree.root(self.root)]
            for source in self.sources:
                drafting = Stopwatch()
                tree = self._propose(source.drafter, self.root, limit.upto(source.most))
                if not (source.head and self.target.ahead):
                    source.took(drafting.seconds())
                trees.append(limit.limit(tree))
            whole = fuse(trees)
            whole.check(self.target.vocabulary, self.root)
            whole.proposed([0])
            scratch.choose([Draft(Text(), whole, limit.nodes)], scratch.sources().values())
            scratch.judge()
            scratch.calibration.learn(whole, self.words)

    def compile_the_rest(self) -> None:
        """Compile what drafts of this text did not need, and would delay the first answer: what corrects the costs of
        steps, cuts a draft, looks for nodes of one's own and follows a path; what sorts a long prompt, and merges a
        long answer into it."""
        Costs({1: 1.0, 2: 1.0}).observe(1, 1, 1.0)
        tree = TokenTree.chain(self.root, self.words[:1])
        tree.top_k(0)
        places(tree, tree)
        tree.child(0, self.words[0])
        text = self.words * (1 + SHORT // len(self.words))
        for name, session in self.sessions.items():
            if isinstance(session, RetrievalSession):
                longer = self.parts[name].begin(self.request)
                for piece in (text, text[: SHORT // 2], text[: SHORT // 2]):
                    longer.observe(Seen(piece, 0))
                longer.close()

    def capture_steps(self) -> None:
        """Take steps of every width, with heads' drafts: those started ahead, and those started after the step."""

        def start_all(step: FixedStep) -> None:
            for name in self.pilot.heads:
                can.draft_ahead(self.parts[name], {0: self.sessions[name]}, step)

        for rows in self.target.widths:
            if rows <= min(1 + self.limit.nodes, self.room):
                score = self._score(TokenTree.chain(self.root, self.words[1:rows]), start_all)
                for name in self.pilot.heads:  # a draft that was not started ahead has a capture of its own
                    self._accept_root(name, self.root, score)
                    self._propose(name, self.root, self.limit)

    def draft_ahead(self) -> None:
        """Measure drafts of heads that were queued behind their steps, which take less time than others."""
        for source in self.sources:
            if not (source.head and self.target.ahead):
                continue
            part, session, token = self.parts[source.drafter], self.sessions[source.drafter], self.root
            for _ in range(TRIAL):
                score = self._score(TokenTree.root(token), partial(can.draft_ahead, part, {0: session}))
                self._accept_root(source.drafter, token, score)
                token, drafting = score.token(0, self.sampler), Stopwatch()
                self._propose(source.drafter, token, self.limit)
                source.took(drafting.seconds())

    def step_without_drafts(self) -> None:
        self.target.score([self.slot], [TokenTree.root(self.root)], self.want._replace(layers=()))

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.target.close(self.slot)

    def _score(self, tree: TokenTree, during: Callable[[FixedStep], None]) -> Scores:
        (score,) = self.target.score([self.slot], [tree], self.want._replace(during=during))
        return score

    def _accept_root(self, name: str, root: int, score: Scores) -> None:
        """Show a part a step that accepted none of its drafts."""
        hidden = Hidden(score.hidden, score.rows([0]), score.replayed).of(can.layers(self.parts[name]))
        self.sessions[name].observe(Seen([root], self.slot.length, hidden))

    def _propose(self, name: str, root: int, budget: Budget) -> TokenTree:
        (proposal,) = self.parts[name].propose([self.sessions[name]], [root], [budget])
        return proposal.tree
