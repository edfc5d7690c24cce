"""The loop: propose a tree, score it in one forward, accept a path, commit it, observe, again.

The engine knows tokens, not text: tokenizers and stop strings live above it, models and caches below.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from slipstream.accept import Verdict, verify
from slipstream.datastores.live import EarlierAnswers
from slipstream.datastores.sparse.runs import token_type
from slipstream.drafters import _capabilities as can
from slipstream.drafters.base import Drafter, DraftSession, Hidden, Seen
from slipstream.errors import CacheFullError, ModelError, OptionError
from slipstream.request import Request, Step
from slipstream.sampling import Sampler
from slipstream.sequence import Due, Kept, Reading, Sequence, check_drafting, check_prompt, chooser, logprobs, twin_of
from slipstream.stats import Stats
from slipstream.stopwatch import Stopwatch
from slipstream.targets.base import Scores, Slot, Target, Want, shared
from slipstream.tree import TokenTree, fuse

log = logging.getLogger("slipstream")

WORTH = 32  # tokens that two texts must have in common for a copy to be worth it


class Engine:
    """Continues requests. Safe from several threads: those that use one model take turns, step by step."""

    def __init__(self, target: Target, drafter: Drafter, name: str = "", max_batch: int = 16) -> None:
        if max_batch < 1:
            raise OptionError(f"max_batch={max_batch}: at least one sequence must run at a time")
        self.target, self.drafter, self.name = target, drafter, name
        self.max_batch = max_batch
        self.answers: EarlierAnswers | None = None
        if kept := can.shared(drafter):
            self.answers = EarlierAnswers(token_type(target.vocabulary), kept)
            can.attach(drafter, self.answers)
        self._turns = target.turns
        self._open: list[Sequence] = []  # of all runs
        self._latest: list[Sequence] = []  # those of the latest step
        self.closed = False
        # Gives back the memory of a text that stayed read, if there is one: set by whoever keeps texts.
        self.spare: Callable[[], bool] = lambda: False
        self._left: deque[tuple[list[Sequence], Kept | None]] = deque()  # runs that ended early, to be retired

    def run(self, requests: Iterable[Request], kept: Kept | None = None) -> Iterator[Sequence]:
        """Continue all requests, at most max_batch at a time. Yields a sequence each time it has new tokens; its
        `finish` is set the last time. What the (only) request's prompt shares with the kept text is not read again,
        and its own text is kept there. requests: a deque may grow meanwhile."""
        self.check_open()
        waiting = requests if isinstance(requests, deque) else deque(requests)
        running, sound = list[Sequence](), True
        try:
            while waiting or running:
                with self.turn():
                    sound = False
                    told = self._round(waiting, running, kept)
                    for sequence in told:
                        if sequence.error is not None:
                            raise sequence.error
                    self.retire(running, kept)
                    sound = True
                yield from told
        finally:
            if running:
                for sequence in running:
                    sequence.finish = sequence.finish or "cancelled"
                # What broke off in the middle of a step can't be read on from.
                self._left.append((running, kept if sound else None))
                self._tidy()

    def _round(self, waiting: deque[Request], running: list[Sequence], kept: Kept | None) -> list[Sequence]:
        """Who has new tokens: those that wait, if they can begin, or else all that run."""
        if waiting and len(running) < self.max_batch:
            told = self._start(waiting, running, kept)
            running += told
            return told
        before = [(sequence, len(sequence.tokens)) for sequence in running]
        self._with_room(partial(self.step, running))
        return [sequence for sequence, had in before if len(sequence.tokens) > had or sequence.finish is not None]

    def _with_room(self, forward: Callable[[], None]) -> None:
        """A forward that does nothing if the cache is full. Then texts that nobody needs make room."""
        while True:
            try:
                return forward()
            except CacheFullError:
                if not self.spare():
                    raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else uses the model meanwhile."""
        with self._turns:
            yield
        self._tidy()

    @property
    def inside(self) -> bool:
        """Whether this thread has its turn: a function of the user's was called within a step."""
        return self._turns.mine

    def _tidy(self) -> None:
        """Retire runs that ended early: now, or at the end of the turn that somebody has now. A stream may be dropped
        anywhere, by Python's collector even within a step, so nothing waits here."""
        while self._left and self._turns.attempt():
            try:
                while self._left:
                    self.retire(*self._left.popleft())
            finally:
                self._turns.__exit__()

    def check_open(self) -> None:
        if self.closed:
            raise ModelError("this LLM was closed: make another to ask for answers")

    def close(self) -> None:
        """Let go of target and drafter, and with them of caches and captures."""
        with self.turn():
            if self._open:
                raise OptionError(
                    f"{len(self._open)} answers are still being written: read their streams to the end or close them, "
                    "then close this"
                )
            self.closed, self._latest = True, []
            can.release(self.drafter)
            self.target.release()
            del self.target, self.drafter

    def forget(self, kept: Kept) -> None:
        """Give back what a kept text holds."""
        if self.closed:
            return
        with self.turn():
            slot, session = kept.slot, kept.session
            kept.slot = kept.session = None
            if session is not None:
                session.close()
            if slot is not None:
                self.target.close(slot)

    def step(self, running: list[Sequence], readings: Collection[Reading] = ()) -> None:
        """One forward of the target for all running sequences: each gets at least one token further, or fails by
        itself. Where nobody drafts, a step looks at the tokens of the forward before, while the device is busy with the
        next one; who has just joined gets no token then. readings: who can be read along (`reads_along`)."""
        self._pause_all_but(running)
        if any(sequence.due is not None for sequence in running):
            self._step_ahead(running, readings)
            return
        clock = perf_counter()
        trees = self._propose(running)
        for sequence in running:
            can.keep(sequence.session)
        choice = can.choice(self.drafter)
        drafted, taken = perf_counter(), Stopwatch()
        during = None
        if len(running) == 1 and not readings:
            during = partial(can.draft_ahead, self.drafter, running[0].session)
        scores = self._forward(running, trees, readings, during)
        scored, forward = perf_counter(), taken.seconds()
        plain = all(len(tree) == 1 for tree in trees) and self._chosen_ahead(running)
        if plain and can.idle(self.drafter):
            if not readings:
                can.measured(self.drafter, [1] * len(running), forward)
            for sequence, tree, score in zip(running, trees, scores, strict=True):
                sequence.due = Due(tree, score, (scored - clock) / len(running))
            self._step_ahead(running)
            return
        verdicts = [self._decide(*each) for each in zip(running, trees, scores, strict=True)]
        if not readings:  # a plain step does not wait for the host, if others follow it
            can.measured(self.drafter, [len(tree) for tree in trees], forward if plain else taken.seconds())
        self._tell_exactness(running)
        times = (t / len(running) for t in (drafted - clock, scored - drafted, perf_counter() - scored))
        draft_seconds, verify_seconds, host_seconds = times
        for sequence, tree, verdict in zip(running, trees, verdicts, strict=True):
            if verdict is not None:
                self._advance(sequence, Step(tree, verdict, draft_seconds, verify_seconds, host_seconds, choice))

    def reads_along(self, running: Collection[Sequence], readings: Collection[Reading]) -> bool:
        """Whether pieces of these texts can be read in a step of the running sequences."""
        every = [*running, *(reading.sequence for reading in readings)]
        return self.target.mixes and all(self.target.chooses(chooser(sequence)) for sequence in every)

    def _forward(
        self,
        running: list[Sequence],
        trees: list[TokenTree],
        readings: Collection[Reading],
        during: Callable[[Any], None] | None,
    ) -> list[Scores]:
        """What the target says about the trees. Pieces of texts are read along, as far as there is room."""
        slots, samplers = [s.slot for s in running], tuple(chooser(s) for s in running)
        layers = can.step_layers(self.drafter)
        joining, pieces = self._pieces(readings, self.target.chunk - sum(map(len, trees)))
        if not pieces:
            rows = 1 + max(s.request.max_draft for s in running) if can.pads(self.drafter) else 1
            return self.target.score(slots, trees, Want(layers, rows, samplers, during))
        samplers += tuple(chooser(reading.sequence) for reading in joining)
        want = Want(self._reading_layers(joining) or layers, samplers=samplers, during=during)
        clock = perf_counter()
        scores, found = self.target.score_and_read(slots, trees, [r.slot for r in joining], pieces, want)
        self._take_all(joining, pieces, found, perf_counter() - clock)
        for score in scores:
            score.hidden = {layer: score.hidden[layer] for layer in layers}
        return scores

    def _may_run_ahead(self, running: list[Sequence]) -> bool:
        """Whether the next forward can begin as soon as the tokens of the latest one are there."""
        return can.idle(self.drafter) and self._chosen_ahead(running)

    def _chosen_ahead(self, running: list[Sequence]) -> bool:
        """Whether the tokens that a forward chose are all that a plain one after it needs."""
        return all(s.request.logprobs is None and self.target.chooses(chooser(s)) for s in running)

    def _step_ahead(self, running: list[Sequence], readings: Collection[Reading] = ()) -> None:
        """Begin the next forward, if all is there that it needs, and meanwhile take over what the latest one said."""
        due = self._due(running)
        room = all(sequence.slot.length < self.target.context for sequence in running)
        if len(due) == len(running) and room and self._may_run_ahead(running):
            try:
                self._score_ahead(running, due, readings)
            except Exception:
                if not due:
                    raise
                # It could not begin. Why, shows when it begins in the usual way.
        self._take_over(due)
        if not can.idle(self.drafter):  # it will be asked, and may want to know all
            self._take_over(self._due(running))

    def _due(self, running: list[Sequence]) -> deque[tuple[Sequence, Due]]:
        """What nobody has looked at yet. Roots become text."""
        due = deque((sequence, sequence.due) for sequence in running if sequence.due is not None)
        for sequence, _ in due:
            sequence.due = None
            self.target.commit(sequence.slot, [0])
        return due

    def _take_over(self, due: deque[tuple[Sequence, Due]]) -> None:
        while due:
            sequence, said = due.popleft()
            verdict = self._decide(sequence, said.tree, said.score, committed=True)
            if verdict is not None:
                self._advance(sequence, Step(said.tree, verdict, 0.0, said.seconds, 0.0))

    def _score_ahead(
        self, running: list[Sequence], due: deque[tuple[Sequence, Due]], readings: Collection[Reading]
    ) -> None:
        """A forward of roots alone, and of what is read along."""
        clock, taken = perf_counter(), Stopwatch()
        trees = [TokenTree.root(said.score.token(0, sequence.sampler)) for sequence, said in due]
        can.rest(self.drafter)
        scores = self._forward(running, trees, readings, lambda _: self._take_over(due))
        if not readings:
            can.measured(self.drafter, [1] * len(running), taken.seconds())
        self._tell_exactness(running)
        seconds = (perf_counter() - clock) / len(running)
        for sequence, tree, score in zip(running, trees, scores, strict=True):
            if sequence.finish is None:
                sequence.due = Due(tree, score, seconds)

    def _tell_exactness(self, running: list[Sequence]) -> None:
        if len(running) > 1 and not self.target.exact_together:
            for sequence in running:
                sequence.stats.exact = False

    def _decide(self, sequence: Sequence, tree: TokenTree, score: Scores, *, committed: bool = False) -> Verdict | None:
        """What is accepted of a tree. What raises here, as a user's processor may, concerns this sequence alone."""
        try:
            verdict = verify(sequence.request.accept, tree, score, sequence.sampler, sequence.over)
            if not committed:
                self.target.commit(sequence.slot, verdict.path)
            self._observe(sequence, tree, score, verdict)
        except Exception as error:
            sequence.error, sequence.finish = error, "failed"
            return None
        return verdict

    def _start(self, waiting: deque[Request], running: list[Sequence], kept: Kept | None) -> list[Sequence]:
        """Read prompts; the last row of each decides its first token. Where a forward takes rows of many texts, so many
        of those that wait begin together."""
        readings: list[Reading] = []
        try:
            while waiting and len(running) + len(readings) < self.max_batch:
                known = len(waiting[0].tokens) if twin_of(waiting[0], running) else 0
                if not self.may_join(waiting[0], readings, known):
                    break
                readings.append(self.read(waiting.popleft(), running, kept))
            while left := [reading for reading in readings if reading.left]:
                self._with_room(partial(self.read_on, left))
                for reading in readings:
                    if reading.error is not None:
                        raise reading.error
        except BaseException:
            for reading in readings:
                self.abandon(reading)
            raise
        return [reading.sequence for reading in readings]

    def takes_more(self, readings: Collection[Reading]) -> bool:
        """Whether the forward that reads these texts has rows for another."""
        return not readings or (self.target.flat and sum(reading.left for reading in readings) < self.target.chunk)

    def may_join(self, request: Request, readings: Collection[Reading], known: int) -> bool:
        """Whether a prompt can be read along with others, in one forward, and has nothing to gain from waiting for a
        copy of theirs; who is of another collection gets none, so must not wait. known: tokens of it that need not be
        read anyway."""
        mine = [reading.text for reading in readings if reading.sequence.request.collection == request.collection]
        gain = max((shared(text, request.tokens) for text in mine), default=0) - known
        return self.takes_more(readings) and (not readings or gain < min(WORTH, len(request.tokens)))

    def read(
        self,
        request: Request,
        running: Iterable[Sequence] = (),
        kept: Kept | None = None,
        like: Sequence | Kept | None = None,
    ) -> Reading:
        """A new sequence, whose prompt is to be read. What it begins with is not read again where a kept text, or a
        running sequence with the same prompt, has read it. like: whose text begins alike, of which a copy is made."""
        check_prompt(request, self.target)
        check_drafting(request, self.drafter)
        self._pause_all_but(())
        sampler = Sampler(request.sampling, request.tokens, request.seed, request.sample)
        stats = Stats(self.name, request.accept.lossless and self.target.exact, prompt_tokens=len(request.tokens))
        stats.processors = tuple(type(p).__name__ for p in request.sampling.processors)
        session = self.drafter.begin(request)
        try:
            slot = self._resumed(request, session, running, kept, like) or self.target.open()
        except BaseException:
            session.close()
            raise
        can.follow(session, slot)
        return Reading(Sequence(request, slot, session, sampler, stats), slot, request.tokens)

    def put_back(self, sequence: Sequence) -> None:
        """Its keys are given up until `reread`. Nothing else is lost."""
        sequence.due = None  # the next forward says it again
        can.pause(sequence.session)
        can.follow(sequence.session, None)
        self._latest = [other for other in self._latest if other is not sequence]
        self.target.close(sequence.slot)

    def reread(self, sequence: Sequence) -> Reading:
        """It goes on where it was put back."""
        text = [*sequence.request.tokens, *sequence.tokens[:-1]]  # the last is the root
        return Reading(sequence, self.target.open(), text, again=True)

    def read_on(self, readings: Collection[Reading]) -> None:
        """One forward for a piece of each text, as far as a forward goes. A reading of which nothing is left is over:
        its sequence has its next token. Who fails has the error; what concerns all is raised, and nothing was read."""
        self._pause_all_but(())
        joining, pieces = self._pieces(readings, self.target.chunk)
        samplers = tuple(chooser(reading.sequence) for reading in joining)
        clock = perf_counter()
        slots = [reading.slot for reading in joining]
        scores = self.target.read(slots, pieces, Want(self._reading_layers(joining), samplers=samplers))
        self._take_all(joining, pieces, scores, perf_counter() - clock)

    def _pieces(self, readings: Iterable[Reading], room: int) -> tuple[list[Reading], list[list[int]]]:
        """Who is read in a forward that has room for so many tokens, and of each what comes next."""
        joining, pieces = list[Reading](), list[list[int]]()
        for reading in readings:
            if room > 0:
                joining.append(reading)
                pieces.append(reading.text[reading.slot.length : reading.slot.length + room])
                room -= len(pieces[-1])
        return joining, pieces

    def _reading_layers(self, readings: Iterable[Reading]) -> tuple[int, ...]:
        """Whose states are wanted: none of a text that the drafter has seen."""
        return () if all(reading.again for reading in readings) else can.layers(self.drafter)

    def _take_all(self, readings: list[Reading], pieces: list[list[int]], scores: list[Scores], seconds: float) -> None:
        for reading, piece, score in zip(readings, pieces, scores, strict=True):
            reading.seconds += seconds / len(readings)
            try:
                self._take(reading, piece, score)
            except Exception as error:
                reading.error = error

    def _take(self, reading: Reading, piece: list[int], score: Scores) -> None:
        """What a piece of text shows: states, and behind the last one a token."""
        sequence, clock = reading.sequence, perf_counter()
        if reading.again:
            if not reading.left:
                sequence.slot = reading.slot
                can.follow(sequence.session, reading.slot)
            return
        start = reading.slot.length - len(piece)
        sequence.session.observe(Seen(piece, start, Hidden(score.hidden)))
        if reading.left:
            reading.seconds += perf_counter() - clock
            return
        tree = TokenTree.root(reading.text[-1])
        verdict = verify(sequence.request.accept, tree, score, sequence.sampler, sequence.over)
        self._report(sequence, tree, score, verdict)
        sequence.stats.first_token_seconds = perf_counter() - sequence.started
        self._advance(sequence, Step(tree, verdict, 0.0, reading.seconds, perf_counter() - clock))
        self._open.append(sequence)

    def abandon(self, reading: Reading) -> None:
        """Its text is not wanted any more. Whoever was put back still is."""
        if not reading.again:
            reading.sequence.session.close()
            self._open = [other for other in self._open if other is not reading.sequence]
        self.target.close(reading.slot)

    def _pause_all_but(self, running: Collection[Sequence]) -> None:
        """Sequences that have no part in the forward to come: what they hold of the latest one is copied."""
        for sequence in self._latest:
            if sequence.finish is None and sequence not in running:
                can.pause(sequence.session)
        self._latest = list(running)

    def _resumed(
        self,
        request: Request,
        session: DraftSession,
        running: Iterable[Sequence],
        kept: Kept | None,
        like: Sequence | Kept | None,
    ) -> Slot | None:
        """A slot that has read the beginning of the prompt, which the session has taken over; None: there is none."""
        again = can.rereads(self.drafter)
        if again is None:
            if kept is not None:
                self.forget(kept)
            return None
        if kept is not None and kept.slot is not None:
            slot, other = kept.slot, kept.session
            kept.slot = kept.session = None
        else:
            twin = like or twin_of(request, running)
            if twin is None or twin.slot is None:
                return None
            slot, other = self.target.fork(twin.slot), twin.session
        try:
            known = max(0, slot.shared(request.tokens[:-1]) - again)
            self.target.truncate(slot, known)
            if other is not None and known:
                can.resume(session, other, request.tokens[:known])
        except BaseException:
            self.target.close(slot)
            raise
        finally:
            if kept is not None and other is not None:
                other.close()
        return slot

    def _propose(self, running: list[Sequence]) -> list[TokenTree]:
        budgets = [s.budget(self.target) for s in running]
        proposals = self.drafter.propose([s.session for s in running], [s.root for s in running], budgets)
        trees = []
        for sequence, proposal, budget in zip(running, proposals, budgets, strict=True):
            proposal.tree.check(self.target.vocabulary, sequence.root)
            tree = budget.limit(proposal.tree)
            if proposal.beside is not None and budget.nodes:
                proposal.beside.check(self.target.vocabulary, sequence.root)
                tree = fuse([tree, proposal.beside.cut(budget.depth)])
            trees.append(tree if self.target.trees else tree.best_chain())
        return trees

    def _observe(self, sequence: Sequence, tree: TokenTree, score: Scores, verdict: Verdict) -> None:
        """Show the drafter what was accepted."""
        self._report(sequence, tree, score, verdict)
        can.choices(sequence.session, tree, score.chosen)
        if not can.observes(sequence.session):
            return
        position = sequence.slot.length - len(verdict.path)
        hidden = Hidden(score.hidden, score.rows(verdict.path), score.replayed)
        sequence.session.observe(Seen(tree.tokens[verdict.path].tolist(), position, hidden))

    def _report(self, sequence: Sequence, tree: TokenTree, score: Scores, verdict: Verdict) -> None:
        """Log probabilities, where they are asked for, while the logits are there."""
        if sequence.request.logprobs is not None:
            emitted = [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus]
            for node, token in zip(verdict.path, emitted, strict=True):
                sequence.logprobs.append(logprobs(score.logits(node), token, sequence.request.logprobs))

    def _advance(self, sequence: Sequence, step: Step) -> None:
        """Take a step over into the sequence and its statistics."""
        sequence.root = step.verdict.bonus
        sequence.stats.count(step.tree, step.verdict.path)
        sequence.stats.new_tokens = len(sequence.tokens)
        sequence.stats.draft_seconds += step.draft_seconds
        sequence.stats.verify_seconds += step.verify_seconds
        sequence.stats.host_seconds += step.host_seconds
        sequence.stats.sampling_seconds = sequence.sampler.seconds
        sequence.stats.seconds = perf_counter() - sequence.started
        if sequence.finish is None and sequence.slot.length >= self.target.context:
            sequence.finish = "length"  # the context is full: the root can't be read any more
        if sequence.finish is None and sequence.request.cancelled:
            sequence.finish = "cancelled"
        if sequence.request.watch is not None:
            sequence.request.watch(step)

    def retire(self, running: list[Sequence], kept: Kept | None = None) -> None:
        """Those that ended leave. Their answers are there: whatever a drafter fails at now is told, and costs nothing
        else."""
        for sequence in [s for s in running if s.finish is not None]:
            running.remove(sequence)
            self._open.remove(sequence)
            try:
                if self.answers is not None:
                    self.answers.publish(sequence.request.collection, sequence.tokens)
                can.ended(self.drafter, sequence.request, sequence.tokens)
                if kept is None:
                    sequence.session.close()
                else:
                    can.pause(sequence.session)
            except Exception as error:
                sequence.stats.warnings.append(f"{self.name or type(self.drafter).__name__}: {error}")
                log.warning("the answer is complete, but the drafter failed after it: %s", error, exc_info=error)
            finally:
                if kept is None:
                    self.target.close(sequence.slot)
                else:
                    kept.slot, kept.session = sequence.slot, sequence.session
