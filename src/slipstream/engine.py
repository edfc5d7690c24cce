"""The decoding loop: propose a tree, score it in one forward, accept a path, commit it, observe it, repeat.

The engine works on tokens. Text (tokenizers, stop strings) is handled above it, models and caches below it.
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
from slipstream.sequence import (
    Kept,
    PendingResult,
    Reading,
    Sequence,
    check_drafting,
    check_prompt,
    logprobs,
    same_prompt,
)
from slipstream.stats import Stats
from slipstream.stopwatch import Stopwatch
from slipstream.targets.base import Scores, Slot, Target, Want, shared
from slipstream.tree import TokenTree, fuse
from slipstream.turns import current

log = logging.getLogger("slipstream")

MIN_SHARED = 32  # a copy of a text's cache pays only if at least so many tokens of its prefix are shared
LOADED = 4  # with more texts, running or being read, prompts are read without states while the drafter rests


class Engine:
    """Continues requests. Threads may share an engine: those that use one model take turns, one step at a time."""

    def __init__(self, target: Target, drafter: Drafter, name: str = "", max_batch: int = 16) -> None:
        if max_batch < 1:
            raise OptionError(f"max_batch={max_batch}: at least one sequence must run at a time")
        self.target, self.drafter, self.name = target, drafter, name
        self.max_batch = max_batch
        self.answers: EarlierAnswers | None = None
        if kept := can.shared(drafter):
            self.answers = EarlierAnswers(token_type(target.vocabulary), kept)
            can.attach(drafter, self.answers)
        self._turns, self._device = target.turns, target.device
        self._open: list[Sequence] = []  # sequences of all runs that are not retired yet
        self._latest: list[Sequence] = []  # sequences of the latest step
        self.closed = False
        # Frees the cache of one kept text and returns True, or returns False if none is kept. Set by the service.
        self.evict: Callable[[], bool] = lambda: False
        self._abandoned: deque[tuple[list[Sequence], Kept | None]] = deque()  # runs that ended early, to be retired

    def run(self, requests: Iterable[Request], kept: Kept | None = None) -> Iterator[Sequence]:
        """Continue all requests, at most max_batch at a time. Yields a sequence each time it has new tokens; the last
        time its `finish` is set.

        requests: may be a deque that grows during the run.
        kept: only with a single request. The prefix that its prompt shares with the kept text is not read again, and
        its own text is kept there afterwards."""
        self.check_open()
        waiting = requests if isinstance(requests, deque) else deque(requests)
        running, consistent = list[Sequence](), True
        try:
            while waiting or running:
                with self.turn():
                    consistent = False
                    progressed = self._round(waiting, running, kept)
                    for sequence in progressed:
                        if sequence.error is not None:
                            raise sequence.error
                    self.retire(running, kept)
                    consistent = True
                yield from progressed
        finally:
            if running:
                for sequence in running:
                    sequence.finish = sequence.finish or "cancelled"
                # A run that broke off within a step has an undefined cache: its text is not kept.
                self._abandoned.append((running, kept if consistent else None))
                self._retire_abandoned()

    def _round(self, waiting: deque[Request], running: list[Sequence], kept: Kept | None) -> list[Sequence]:
        """Begin waiting requests if there is room in the batch, else take one step of all running sequences. Returns
        the sequences that have new tokens."""
        if waiting and len(running) < self.max_batch:
            progressed = self._start(waiting, running, kept)
            running += progressed
            return progressed
        before = [(sequence, len(sequence.tokens)) for sequence in running]
        self.with_room(partial(self.step, running))
        return [sequence for sequence, had in before if len(sequence.tokens) > had or sequence.finish is not None]

    def with_room(self, forward: Callable[[], None]) -> None:
        """Run a forward. If the cache is full, which it reports before it computes anything, free kept texts one by one
        and try again."""
        while True:
            try:
                return forward()
            except CacheFullError:
                if not self.evict():
                    raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the model: no other thread uses it within this. Runs that ended early were retired before."""
        outermost = not self._turns.mine
        with self._turns, current(self._device):
            if outermost:
                self._retire_all_abandoned()
            yield
        self._retire_abandoned()

    @property
    def inside(self) -> bool:
        """Whether this thread holds the model already: user code was called from within a step."""
        return self._turns.mine

    def _retire_abandoned(self) -> None:
        """Retire runs that ended early: now if the model is free, else when the current turn ends. It never waits,
        since Python's garbage collector may drop a stream within any step."""
        while self._abandoned and self._turns.attempt():
            try:
                self._retire_all_abandoned()
            finally:
                self._turns.__exit__()

    def _retire_all_abandoned(self) -> None:
        while self._abandoned:
            self.retire(*self._abandoned.popleft())

    def check_open(self) -> None:
        if self.closed:
            raise ModelError("this LLM was closed: make another to ask for answers")

    def close(self) -> None:
        """Release target and drafter, with their caches and captured steps."""
        with self.turn():
            if self._open:
                raise OptionError(
                    f"{len(self._open)} answers are still being written: read their streams to the end or close them, "
                    "then close this"
                )
            self.closed, self._latest = True, []
            try:
                can.release(self.drafter)
            finally:
                self.target.release()
                del self.target, self.drafter

    def forget(self, kept: Kept) -> None:
        """Free a kept text's slot and session."""
        if self.closed:
            return
        with self.turn():
            slot, session = kept.slot, kept.session
            kept.slot = kept.session = None
            if session is not None:
                close_session(session)
            if slot is not None:
                self.target.close(slot)

    def step(self, running: list[Sequence], readings: Collection[Reading] = ()) -> None:
        """One forward of the target for all running sequences. Each emits at least one token, or fails alone.

        Where nothing is drafted, the results of a forward stay pending: they are verified while the device runs the
        next one. A sequence that has just begun has no pending result, so it emits nothing in such a step.

        readings: prompts of which a piece is read in the same forward (see `reads_along`)."""
        self._pause_all_but(running)
        whole = Stopwatch()
        if any(sequence.pending is not None for sequence in running):
            self._step_ahead(running, whole, readings)
            return
        clock = perf_counter()
        trees, drafting = self._propose(running)
        for sequence in running:
            can.keep(sequence.session)
        choice = can.choice(self.drafter)
        drafted, taken = perf_counter(), Stopwatch()
        during = None
        if not readings:
            during = partial(can.draft_ahead, self.drafter, {i: sequence.session for i, sequence in enumerate(running)})
        scores = self._forward(running, trees, readings, during)
        scored, forward = perf_counter(), taken.seconds()
        plain = all(len(tree) == 1 for tree in trees) and self._chosen_on_device(running)
        if plain and can.idle(self.drafter):
            self._measured([1] * len(running), forward, readings)
            for sequence, tree, score in zip(running, trees, scores, strict=True):
                sequence.pending = PendingResult(tree, score, (scored - clock) / len(running))
            self._step_ahead(running, Stopwatch())
            return
        verdicts = [self._decide(*each) for each in zip(running, trees, scores, strict=True)]
        self._mark_inexact(running)
        times = (t / len(running) for t in (drafted - clock, scored - drafted, perf_counter() - scored))
        draft_seconds, verify_seconds, host_seconds = times
        for sequence, tree, verdict in zip(running, trees, verdicts, strict=True):
            if verdict is not None:
                self._advance(sequence, Step(tree, verdict, draft_seconds, verify_seconds, host_seconds, choice))
        self._measured([len(tree) for tree in trees], forward, readings, whole.seconds() - drafting - forward)

    def reads_along(self, running: Collection[Sequence], readings: Collection[Reading]) -> bool:
        """Whether a step of the running sequences can read pieces of these texts in its forward."""
        every = [*running, *(reading.sequence for reading in readings)]
        return self.target.mixes and all(self.target.chooses(sequence.chooser) for sequence in every)

    def _forward(
        self,
        running: list[Sequence],
        trees: list[TokenTree],
        readings: Collection[Reading],
        during: Callable[[Any], None] | None,
    ) -> list[Scores]:
        """Score the trees. As far as the forward has rows left, pieces of the prompts are read with them."""
        slots, samplers = [s.slot for s in running], tuple([s.chooser for s in running])
        layers = can.step_layers(self.drafter)
        included: list[Reading] = []
        if readings:
            included, pieces = self._pieces(readings, self.target.chunk - sum(map(len, trees)))
        if not included:
            rows = 1 + running[0].request.max_draft if len(running) == 1 and can.pads(self.drafter) else 1
            return self.target.score(slots, trees, Want(layers, rows, samplers, during))
        samplers += tuple(reading.sequence.chooser for reading in included)
        want = Want(self._reading_layers(included) or layers, samplers=samplers, during=during)
        clock = perf_counter()
        scores, found = self.target.score_and_read(slots, trees, [r.slot for r in included], pieces, want)
        self._record_pieces(included, pieces, found, perf_counter() - clock)
        for score in scores:
            score.hidden = {layer: score.hidden[layer] for layer in layers}
        return scores

    def _chosen_on_device(self, running: list[Sequence]) -> bool:
        return all([sequence.chosen_on_device for sequence in running])

    def _step_ahead(self, running: list[Sequence], whole: Stopwatch, readings: Collection[Reading] = ()) -> None:
        """Begin the next plain forward, if its inputs are known, and verify the pending results while it runs. whole:
        started with the step."""
        pending = self._take_pending(running)
        new = len(pending) < len(running)
        rests = can.rests_with(self.drafter, [sequence.session for sequence in running], new)
        known = rests and self._chosen_on_device(running)
        if known and all([sequence.slot.length < self.target.context for sequence in running]):
            try:
                self._score_ahead(running, pending, whole, readings)
            except Exception:
                if not pending:
                    raise
                # The forward did not start. The next ordinary step raises the same error where it is handled.
        self._verify_pending(pending)
        if not can.idle(self.drafter):  # the next step drafts: the drafter must have observed everything
            self._verify_pending(self._take_pending(running))

    def _take_pending(self, running: list[Sequence]) -> deque[tuple[Sequence, PendingResult]]:
        """Take the pending results of all running sequences. Their roots are committed."""
        pending = deque([(sequence, sequence.pending) for sequence in running if sequence.pending is not None])
        for sequence, _ in pending:
            sequence.pending = None
            self.target.commit(sequence.slot, [0])
        return pending

    def _verify_pending(self, pending: deque[tuple[Sequence, PendingResult]], overtaken: bool = False) -> None:
        """Verify pending results. overtaken: the next forward has started, so drafters that are idle will observe that
        one instead."""
        while pending:
            sequence, result = pending.popleft()
            verdict = self._decide(sequence, result.tree, result.score, committed=True, observed=not overtaken)
            if verdict is not None:
                self._advance(sequence, Step(result.tree, verdict, 0.0, result.seconds, 0.0))

    def _score_ahead(
        self,
        running: list[Sequence],
        pending: deque[tuple[Sequence, PendingResult]],
        whole: Stopwatch,
        readings: Collection[Reading],
    ) -> None:
        """Score the next roots, which the pending results chose, and read pieces of prompts. The pending results are
        verified while the device works. Sequences that have just begun have none: their roots are known."""
        clock = perf_counter()
        chosen = {sequence: result.score.token(0, sequence.sampler) for sequence, result in pending}
        trees = TokenTree.roots([chosen.get(sequence, sequence.root) for sequence in running])
        can.rest(self.drafter)
        scores = self._forward(running, trees, readings, lambda _: self._beside_step(running, pending))
        self._measured([1] * len(running), whole.seconds(), readings)
        self._mark_inexact(running)
        seconds = (perf_counter() - clock) / len(running)
        for sequence, tree, score in zip(running, trees, scores, strict=True):
            if sequence.finish is None:
                sequence.pending = PendingResult(tree, score, seconds)
        self._latest = []  # nobody has observed this step

    def _beside_step(self, running: list[Sequence], pending: deque[tuple[Sequence, PendingResult]]) -> None:
        """What is done while the device works on a step that was begun ahead."""
        self._verify_pending(pending, overtaken=True)
        (alone,) = running if len(running) == 1 else (None,)
        if alone is not None and alone.finish is None and can.peeks(self.drafter, alone.session):
            can.peek(self.drafter, alone.session, alone.root, alone.budget(self.target))

    def _measured(self, rows: list[int], forward: float, readings: Collection[Reading], host: float = 0.0) -> None:
        """Tell the drafter how long a step took. If it read prompts besides, this says nothing about other steps."""
        if not readings:
            can.measured(self.drafter, rows, forward, host)

    def _mark_inexact(self, running: list[Sequence]) -> None:
        if len(running) > 1 and not self.target.exact_together:
            for sequence in running:
                sequence.stats.exact = False

    def _decide(
        self, sequence: Sequence, tree: TokenTree, score: Scores, *, committed: bool = False, observed: bool = True
    ) -> Verdict | None:
        """Verify a tree, commit the accepted path and show it to the drafter. An error here, for instance in a user's
        processor, ends this sequence alone; then None."""
        try:
            verdict = verify(sequence.request.accept, tree, score, sequence.sampler, sequence.emit)
            if not committed:
                self.target.commit(sequence.slot, verdict.path)
            if observed:
                self._observe(sequence, tree, score, verdict)
        except Exception as error:
            sequence.error, sequence.finish = error, "failed"
            return None
        return verdict

    def _start(self, waiting: deque[Request], running: list[Sequence], kept: Kept | None) -> list[Sequence]:
        """Read prompts; the last row of each decides its first token. Where one forward can hold rows of several texts,
        as many waiting prompts as fit are read together."""
        readings: list[Reading] = []
        try:
            while waiting and len(running) + len(readings) < self.max_batch:
                known = len(waiting[0].tokens) if same_prompt(waiting[0], running) else 0
                if not self.should_read_with(waiting[0], readings, known):
                    break
                check_prompt(waiting[0], self.target)
                check_drafting(waiting[0], self.drafter)
                readings.append(self.read(waiting.popleft(), running, kept))
            while left := [reading for reading in readings if reading.left]:
                self.with_room(partial(self.read_on, left))
                for reading in readings:
                    if reading.error is not None:
                        raise reading.error
        except BaseException:
            for reading in readings:
                self.abandon(reading)
            raise
        return [reading.sequence for reading in readings]

    def has_rows_left(self, readings: Collection[Reading]) -> bool:
        """Whether the forward that reads these texts has rows left for another."""
        return not readings or (self.target.flat and sum(reading.left for reading in readings) < self.target.chunk)

    def should_read_with(self, request: Request, readings: Collection[Reading], known: int) -> bool:
        """Whether a prompt should be read in the same forward as these. It should wait if it shares a long prefix with
        one of them: once that is read, it is copied. Prefixes of other collections are never copied, so nothing waits
        for them. known: tokens of the prompt that are cached already."""
        mine = [reading.text for reading in readings if reading.sequence.request.collection == request.collection]
        gain = max((shared(text, request.tokens) for text in mine), default=0) - known
        return self.has_rows_left(readings) and (not readings or gain < min(MIN_SHARED, len(request.tokens)))

    def read(
        self,
        request: Request,
        running: Iterable[Sequence] = (),
        kept: Kept | None = None,
        copy_from: Sequence | Kept | None = None,
        known: int = 0,
    ) -> Reading:
        """A new sequence, and the reading of its prompt, which was checked. A prefix that a kept text or a running
        sequence has read already is reused. copy_from: the sequence or kept text to copy that prefix from. known: the
        prefix's length without the prompt's last token, if the caller has counted."""
        self._pause_all_but(())
        sampler = Sampler(request.sampling, request.tokens, request.seed, request.sample)
        stats = Stats(self.name, request.accept.lossless and self.target.exact, prompt_tokens=len(request.tokens))
        stats.processors = tuple(type(p).__name__ for p in request.sampling.processors)
        session = self.drafter.begin(request)
        try:
            slot = self._resumed(request, session, running, kept, copy_from, known) or self.target.open()
        except BaseException:
            session.close()
            raise
        can.follow(session, slot)
        sequence = Sequence(request, slot, session, sampler, stats)
        sequence.chosen_on_device = request.logprobs is None and self.target.chooses(sequence.chooser)
        return Reading(sequence, slot, request.tokens)

    def put_back(self, sequence: Sequence) -> None:
        """Preempt a sequence: free its keys until `reread`, those of heads in the same pages too. Its tokens and its
        drafter's session are kept."""
        sequence.pending = None  # the forward after `reread` computes it again
        can.pause(sequence.session)
        can.follow(sequence.session, None)
        self._latest = [other for other in self._latest if other is not sequence]
        self.target.close(sequence.slot)

    def reread(self, sequence: Sequence) -> Reading:
        """Read the text of a preempted sequence again, so that it can go on."""
        text = [*sequence.request.tokens, *sequence.tokens[:-1]]  # the last token is the root, still to be scored
        slot = self.target.open()
        can.follow(sequence.session, slot)
        return Reading(sequence, slot, text, again=True)

    def read_on(self, readings: Collection[Reading]) -> None:
        """Read the next piece of each text in one forward, as far as it has rows. A reading with nothing left is
        complete: its sequence has its next token. An error of one sequence is stored in its reading. An error of the
        whole forward is raised, and then nothing was read."""
        self._pause_all_but(())
        included, pieces = self._pieces(readings, self.target.chunk)
        samplers = tuple(reading.sequence.chooser for reading in included)
        clock = perf_counter()
        slots = [reading.slot for reading in included]
        scores = self.target.read(slots, pieces, Want(self._reading_layers(included), samplers=samplers))
        self._record_pieces(included, pieces, scores, perf_counter() - clock)

    def _pieces(self, readings: Iterable[Reading], room: int) -> tuple[list[Reading], list[list[int]]]:
        """The readings that a forward with room for so many tokens takes part in, and the next piece of each."""
        included, pieces = list[Reading](), list[list[int]]()
        for reading in readings:
            if room > 0:
                included.append(reading)
                pieces.append(reading.text[reading.slot.length : reading.slot.length + room])
                room -= len(pieces[-1])
        return included, pieces

    def _reading_layers(self, readings: Collection[Reading]) -> tuple[int, ...]:
        """The layers whose hidden states the drafter needs: none if it knows all of these texts, or if it rests under
        load. Should it be asked about these texts later, its drafts are somewhat worse."""
        known = all(reading.again for reading in readings) and not can.in_pages(self.drafter)
        wanted = can.layers if len(self._open) + len(readings) <= LOADED else can.step_layers
        return () if known else wanted(self.drafter)

    def _record_pieces(
        self, readings: list[Reading], pieces: list[list[int]], scores: list[Scores], seconds: float
    ) -> None:
        for reading, piece, score in zip(readings, pieces, scores, strict=True):
            reading.seconds += seconds / len(readings)
            try:
                self._record_piece(reading, piece, score)
            except Exception as error:
                reading.error = error

    def _record_piece(self, reading: Reading, piece: list[int], score: Scores) -> None:
        """Record a piece that was read. The drafter observes it; after the last piece the first token is decided."""
        sequence, clock = reading.sequence, perf_counter()
        seen = Seen(piece, reading.slot.length - len(piece), Hidden(score.hidden))
        if reading.again:
            if can.in_pages(self.drafter):
                can.reread(sequence.session, seen)
            if not reading.left:
                sequence.slot = reading.slot
            return
        sequence.session.observe(seen)
        if reading.left:
            reading.seconds += perf_counter() - clock
            return
        tree = TokenTree.root(reading.text[-1])
        verdict = verify(sequence.request.accept, tree, score, sequence.sampler, sequence.emit)
        self._report(sequence, tree, score, verdict)
        sequence.stats.first_token_seconds = perf_counter() - sequence.started
        self._advance(sequence, Step(tree, verdict, 0.0, reading.seconds, perf_counter() - clock))
        self._open.append(sequence)

    def abandon(self, reading: Reading) -> None:
        """Stop reading a text. A new sequence ends with it; a preempted one can still be read again later."""
        if reading.again:
            can.follow(reading.sequence.session, None)
        else:
            reading.sequence.session.close()
            self._open = [other for other in self._open if other is not reading.sequence]
        self.target.close(reading.slot)

    def _pause_all_but(self, running: Collection[Sequence]) -> None:
        """Before a forward that some sequences of the latest step have no part in: their sessions copy what they still
        need from the target's tensors."""
        if self._latest == running:
            return
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
        copy_from: Sequence | Kept | None,
        known: int,
    ) -> Slot | None:
        """A slot that has read a prefix of the prompt, with the session brought to the same point. None if there is no
        text to reuse."""
        if can.rereads(self.drafter) is None:
            if kept is not None:
                self.forget(kept)
            return None
        if kept is not None and kept.slot is not None:
            return self._take_over(kept, kept.slot, request, session, known)
        original = copy_from or same_prompt(request, running)
        if original is None or original.slot is None:
            return None
        known = self._resume(session, original.session, original.slot, request, known)
        if not known:
            return None
        slot = self.target.fork(original.slot)
        try:
            self.target.truncate(slot, known)
        except BaseException:
            self.target.close(slot)
            raise
        return slot

    def _take_over(self, kept: Kept, slot: Slot, request: Request, session: DraftSession, known: int) -> Slot:
        """The slot of a kept text, cut to the prefix. Its session ends."""
        other = kept.session
        kept.slot = kept.session = None
        try:
            self.target.truncate(slot, self._resume(session, other, slot, request, known))
        except BaseException:
            self.target.close(slot)
            raise
        finally:
            if other is not None:
                close_session(other)
        return slot

    def _resume(
        self, session: DraftSession, other: DraftSession | None, source: Slot, request: Request, known: int
    ) -> int:
        """Start a session from another, whose slot is `source`. Returns how many tokens of the prompt need not be read.
        known: see `read`."""
        known = max(0, (known or source.shared(request.tokens[:-1])) - (can.rereads(self.drafter) or 0))
        if other is not None and known:
            known = can.settled(other, known)
        if not self.target.cuts(source, known):
            return 0
        if other is not None and known:  # before pages are shared, since the other session may write keys there
            can.resume(session, other, request.tokens[:known])
        return known

    def _propose(self, running: list[Sequence]) -> tuple[list[TokenTree], float]:
        """A tree for each sequence, and the seconds that the drafter took."""
        budgets, drafting = [s.budget(self.target) for s in running], Stopwatch()
        proposals = self.drafter.propose([s.session for s in running], [s.root for s in running], budgets)
        trees, seconds = [], drafting.seconds()
        for sequence, proposal, budget in zip(running, proposals, budgets, strict=True):
            proposal.tree.check(self.target.vocabulary, sequence.root)
            tree = budget.limit(proposal.tree)
            if proposal.beside is not None and budget.nodes:
                proposal.beside.check(self.target.vocabulary, sequence.root)
                tree = fuse([tree, proposal.beside.cut(budget.depth)])
            trees.append(tree if self.target.trees else tree.best_chain())
        return trees, seconds

    def _observe(self, sequence: Sequence, tree: TokenTree, score: Scores, verdict: Verdict) -> None:
        """Show the drafter the accepted path."""
        self._report(sequence, tree, score, verdict)
        can.choices(sequence.session, tree, score.chosen)
        if not can.observes(sequence.session):
            return
        position = sequence.slot.length - len(verdict.path)
        hidden = Hidden(score.hidden, score.rows(verdict.path), score.replayed)
        sequence.session.observe(Seen(tree.tokens[verdict.path].tolist(), position, hidden))

    def _report(self, sequence: Sequence, tree: TokenTree, score: Scores, verdict: Verdict) -> None:
        """Record log-probabilities if the request wants them, while the logits are valid."""
        if sequence.request.logprobs is not None:
            emitted = [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus]
            for node, token in zip(verdict.path, emitted, strict=True):
                sequence.logprobs.append(logprobs(score.logits(node), token, sequence.request.logprobs))

    def _advance(self, sequence: Sequence, step: Step) -> None:
        """Record a step in the sequence and its statistics."""
        sequence.root = step.verdict.bonus
        sequence.stats.count(step.tree, step.verdict.path)
        sequence.stats.new_tokens = len(sequence.tokens)
        sequence.stats.draft_seconds += step.draft_seconds
        sequence.stats.verify_seconds += step.verify_seconds
        sequence.stats.host_seconds += step.host_seconds
        sequence.stats.sampling_seconds = sequence.sampler.seconds
        sequence.stats.seconds = perf_counter() - sequence.started
        if sequence.finish is None and sequence.slot.length >= self.target.context:
            sequence.finish = "length"  # the context is full: the root can't be scored any more
        if sequence.finish is None and sequence.request.cancelled:
            sequence.finish = "cancelled"
        if sequence.request.watch is not None:
            try:
                sequence.request.watch(step)
            except Exception as error:  # the user's: other sequences are between two steps
                sequence.error, sequence.finish = error, "failed"

    def retire(self, running: list[Sequence], kept: Kept | None = None) -> None:
        """Remove finished sequences and free what they hold. Their answers are complete: an error of the drafter is
        logged as a warning and changes nothing else."""
        for sequence in [s for s in running if s.finish is not None]:
            running.remove(sequence)
            self._open.remove(sequence)
            try:
                with self._only_warns(sequence):
                    if self.answers is not None:
                        self.answers.publish(sequence.request.collection, sequence.tokens)
                    can.ended(self.drafter, sequence.request, sequence.tokens)
                with self._only_warns(sequence):
                    if kept is None:
                        sequence.session.close()
                    else:
                        can.pause(sequence.session)
            finally:
                if kept is None:
                    self.target.close(sequence.slot)
                else:
                    kept.slot, kept.session = sequence.slot, sequence.session

    @contextmanager
    def _only_warns(self, sequence: Sequence) -> Iterator[None]:
        """An error of the drafter after a complete answer becomes a warning."""
        try:
            yield
        except Exception as error:
            sequence.stats.warnings.append(f"{self.name or type(self.drafter).__name__}: {error}")
            log.warning("the answer is complete, but the drafter failed after it: %s", error, exc_info=error)


def close_session(session: DraftSession) -> None:
    """Close the session of a text whose answer is complete: an error of the drafter is logged, and changes nothing."""
    try:
        session.close()
    except Exception as error:
        log.warning("the answer is complete, but its drafter failed after it: %s", error, exc_info=error)
