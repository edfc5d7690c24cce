"""Warm-up of `auto` before the first answer: every part drafts after a meaningless text. This loads and compiles code,
captures the steps and drafts of one sequence, and measures their times."""

from __future__ import annotations

import gc
from collections.abc import Mapping
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
from slipstream.targets.base import Target, Want
from slipstream.targets.timing import nonsense
from slipstream.tree import TokenTree, fuse, places

if TYPE_CHECKING:
    from slipstream.targets.captured.fixed_step import FixedStep


@torch.inference_mode()
def rehearse(target: Target, pilot: Pilot, parts: Mapping[str, Drafter], layers: tuple[int, ...]) -> None:
    words, prepared = nonsense(target), preparing.seconds
    request = Request(words, max_new_tokens=len(words), prediction=words)
    sessions = {name: part.begin(request) for name, part in parts.items()}
    slot = target.open()
    for name, session in sessions.items():
        if can.in_pages(parts[name]):
            can.follow(session, slot)
    if target.widths:  # prompts are read by steps of several widths
        other = target.open()
        for _ in target.prefill(other, (words * 4)[: target.context // 2], Want(layers)):
            pass
        target.close(other)
    for piece in (words[: len(words) // 4], words[len(words) // 4 :]):
        for score in target.prefill(slot, piece, Want(layers)):
            start, hidden = slot.length - len(next(iter(score.hidden.values()), piece)), Hidden(score.hidden)
            for name, session in sessions.items():
                session.observe(Seen(words[start : slot.length], start, hidden.of(can.layers(parts[name]))))
    room = target.context - slot.length - 1
    limit, root = Budget(target.default_draft, min(target.default_draft, room)), words[0]
    trial = Pilot(pilot.costs, pilot.drafters, pilot.trees, pilot.heads)  # a scratch one: this text teaches nothing
    Costs({1: 1.0, 2: 1.0}).observe(1, 1, 1.0)
    able = [source for source in pilot.sources().values() if not can.silent(sessions[source.drafter])]
    for _ in range(TRIAL):
        trees = [TokenTree.root(root)]
        for source in able:
            taken, budget = Stopwatch(), limit.upto(source.most)
            (found,) = parts[source.drafter].propose([sessions[source.drafter]], [root], [budget])
            if not (source.head and target.ahead):  # heads' drafts overlap with steps there: measured below
                source.took(taken.seconds())
            trees.append(limit.limit(found.tree))
        whole = fuse(trees)
        whole.check(target.vocabulary, root)
        whole.proposed([0])
        trial.choose([Draft(Text(), whole, limit.nodes)], trial.sources().values())
        trial.judge()
        trial.calibration.learn(whole, words)
    # What compiles in a first answer delays it: what cuts a draft that is too large, looks for nodes of its own and
    # follows a path; what sorts a long prompt, and merges a long answer into it.
    whole.top_k(1)
    places(whole, whole)
    TokenTree.chain(root, words[:1]).child(0, words[0])
    text = words * (1 + SHORT // len(words))
    for name, session in sessions.items():
        if isinstance(session, RetrievalSession):
            longer = parts[name].begin(request)
            for piece in (text, text[: SHORT // 2], text[: SHORT // 2]):
                longer.observe(Seen(piece, 0))
            longer.close()

    def start_all(step: FixedStep) -> None:
        for name in pilot.heads:
            can.draft_ahead(parts[name], {0: sessions[name]}, step)

    sampler = Sampler(Sampling(), words)
    want = Want(layers, 1 + limit.nodes, (sampler,), start_all)  # as the engine's
    for rows in target.widths:
        if rows <= min(1 + limit.nodes, room):
            (score,) = target.score([slot], [TokenTree.chain(root, words[1:rows])], want)
            for name in pilot.heads:  # a draft that was not started ahead has a capture of its own: capture it too
                hidden = Hidden(score.hidden, [0], score.replayed).of(can.layers(parts[name]))
                sessions[name].observe(Seen([root], slot.length, hidden))
                parts[name].propose([sessions[name]], [root], [limit])

    def started(source: Source, root: int) -> int:
        """Measure a draft that was queued after its step, which takes less than others. Returns the next token."""
        part, session = parts[source.drafter], sessions[source.drafter]
        during = partial(can.draft_ahead, part, {0: session})
        (score,) = target.score([slot], [TokenTree.root(root)], want._replace(during=during))
        hidden = Hidden(score.hidden, score.rows([0]), score.replayed).of(can.layers(part))
        session.observe(Seen([root], slot.length, hidden))
        token, taken = score.token(0, sampler), Stopwatch()
        part.propose([session], [token], [limit])
        source.took(taken.seconds())
        return token

    for source in able:
        if source.head and target.ahead:
            token = root
            for _ in range(TRIAL):
                token = started(source, token)
    target.score([slot], [TokenTree.root(root)], Want((), 1 + limit.nodes, want.samplers))  # a step without drafts
    pilot.rehearsed()
    for session in sessions.values():
        session.close()
    target.close(slot)
    if preparing.seconds > prepared:  # compiling leaves much garbage: collect it before the first answer
        gc.collect()
