"""Service: many callers, one engine. A thread of its own drives it and delivers answers to their callers as they grow.

Requests wait in the order of priority, then of arrival. Each round reads a piece of the next prompt, or of several
where one forward can hold them, and takes one step of all running answers, in the same forward where the target can.
So a running answer never waits for more than a piece of other prompts. Only `generate` of a list reads prompts until
the batch is full before it takes steps. An error ends the request that caused it, and no other.

Texts are kept in the cache for a while after their answers. A request that shares a prefix with a kept text, or on
paged targets with a running one, reads only the rest. Prefixes are never shared between collections: the time that a
request takes would reveal what others asked. On paged targets, shared prefixes share their pages. When pages run out,
kept texts are freed first, the least recently used before the others; then the youngest request is preempted and read
again later.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from copy import deepcopy
from functools import partial
from time import monotonic, sleep

import torch

from slipstream.counts import Counts
from slipstream.engine import MIN_SHARED, Engine
from slipstream.errors import BusyError, CacheFullError, ModelError
from slipstream.jobs import Job, Mailbox, Update, Wakes
from slipstream.kept_texts import KeptTexts
from slipstream.request import Request
from slipstream.sequence import Kept, Reading, Sequence, check_drafting, check_prompt
from slipstream.turns import current

log = logging.getLogger("slipstream")

# A running answer's updates are delivered in the first step of every 20 ms. Readers do not notice. A small model on a
# GPU writes a token of each answer every millisecond or two, and delivering each takes as long as writing it.
PACE = 0.02
# Seconds to sleep after a first token was delivered, as short as can be: this lets its reader take Python's lock, which
# the next step holds for milliseconds where its draft takes the host that long.
MOMENT = 1e-6
IDLE_SECONDS = 5.0  # seconds without work after which the thread ends; the next request starts another
MAX_KEPT = 4  # kept texts at most, without pages: each holds memory for its whole length
# Kept texts at most, with pages: these are freed when others need them. Each text has its drafter's session and a row
# of the table of pages, which has 1,024.
MAX_KEPT_PAGED = 256


class Service:
    def __init__(self, engine: Engine, max_waiting: int | None = None) -> None:
        """max_waiting: how many requests may wait; more are refused with BusyError. None: any number."""
        self.engine, self.max_waiting = engine, max_waiting
        self.counts = Counts()
        self.running: list[Job] = []
        self.reading: list[Job] = []
        self._waiting: list[Job] = []  # a heap: the next to be read first
        self._begun: list[Job] = []  # whose prompts are read, until they are over: running, or preempted
        self._numbers = itertools.count()
        self.kept = KeptTexts(engine)
        self._mailboxes = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]()
        self._to_wake: set[Wakes] = set()  # receivers with new updates
        self._pages_short = False  # after a preemption: no request begins before another has ended
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing: float | None = None  # once it is closing: when running answers are cancelled
        others = engine.evict  # services of one engine share its cache: `Server` and `LLM.service` make one each
        engine.evict = lambda: self._evict() or others()

    # ---- for callers, from any thread

    def submit(self, job: Job) -> Job:
        """Queue a request. One that can't be answered is refused at once."""
        self.submit_all([job])
        return job

    def submit_all(self, jobs: Collection[Job]) -> None:
        """Queue requests, none of which is answered before all are there. They are refused together too."""
        for job in jobs:
            check_prompt(job.request, self.engine.target)
            check_drafting(job.request, self.engine.drafter)
        with self._changed:
            if self._closing is not None:
                raise ModelError("this service is closing: it takes no more requests")
            if self.max_waiting is not None and len(self._waiting) + len(jobs) > self.max_waiting:
                self.counts.refused += len(jobs)
                raise BusyError(f"{len(self._waiting)} requests wait already, which is as many as may: try again later")
            self.counts.requests += len(jobs)
            for job in jobs:
                job.number = next(self._numbers)
                heapq.heappush(self._waiting, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="slipstream", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """End a request before its next step."""
        job.request.cancel()
        with self._changed:
            self._changed.notify_all()

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The mailbox of the caller's event loop, one for all requests of that loop."""
        with self._changed:
            return self._mailboxes.setdefault(loop, Mailbox(loop))

    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting, being read or running."""
        return bool(self._waiting or self.running or self.reading)

    def so_far(self) -> Counts:
        """The counts of ended requests and of those that have begun, each counted once."""
        with self._counting:
            counts = deepcopy(self.counts)
            for job in list(self._begun):
                if job.sequence is not None:
                    counts.add(job.sequence.stats)
        return counts

    def close(self, within: float = 0.0) -> None:
        """Take no more requests and cancel those that wait. Running ones may finish within so many seconds."""
        with self._changed:
            self._closing = monotonic() + within
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.kept.shrink(0)

    # ---- the thread

    def _work(self) -> None:
        with current(self.engine.target.device):  # a new thread's current GPU is the first, wherever the model is
            self._rounds()

    def _rounds(self) -> None:
        while True:
            with self._changed:
                idle = not self.busy
                if idle and self._closing is None:
                    self._changed.wait(IDLE_SECONDS)
                    idle = not self._waiting
                if idle:
                    self._thread = None
                    return
            try:
                self._round()
            except Exception as error:
                log.exception("the service failed outside any single request: all its requests end")
                self._fail_all(error)
            self._wake()

    def _round(self) -> None:
        """Read a piece of prompts and take one step of all running requests, in one forward if possible."""
        self._drop_ended()
        with self.engine.turn():
            self._pages_short = self._pages_short and bool(self.running or self.reading)
            while self._has_room and self._start_reading():
                pass
            if self._step_and_read():
                return
            if self.reading:
                self._read()
            if self.running and not self._fill_batch_first():
                self._step()

    def _fill_batch_first(self) -> bool:
        """Whether to read more prompts before the next step, so that its batch is larger. Only if all running requests
        are offline, where the time of a single answer does not matter."""
        more = self.reading or (self._waiting and self._has_room)
        return bool(more) and all([job.offline for job in self.running])

    @property
    def _has_room(self) -> bool:
        """Whether another request may be read."""
        return len(self.running) + len(self.reading) < self.engine.max_batch and not self._pages_short

    @property
    def _sequences(self) -> list[Sequence]:
        return [job.sequence for job in self.running if job.sequence is not None]

    @property
    def _readings(self) -> list[Reading]:
        return [job.reading for job in self.reading if job.reading is not None]

    def _start_reading(self) -> bool:
        """Begin reading the next waiting request, if it can be read with the others. Returns whether one was taken."""
        with self._changed:
            if not self._waiting:
                return False
            job = self._waiting[0]
        readings = self._readings
        if not self.engine.has_rows_left(readings):  # asked in every round, and cheaper than looking for a prefix
            return False
        found, known = self._longest_prefix(job.request)
        if not self.engine.should_read_with(job.request, readings, known):
            return False
        if isinstance(found, Kept):
            self.kept.use(found)
        with self._changed:
            self._waiting.remove(job)
            heapq.heapify(self._waiting)
        try:
            job.reading = self._begin_reading(job, found, known)
        except Exception as error:
            self._drop(job, "failed", error)
            return True
        self.reading.append(job)
        job.found = job.reading.slot.length
        return True

    def _begin_reading(self, job: Job, found: Kept | Sequence | None, known: int) -> Reading:
        """found: the text that shares the longest prefix, `known` tokens."""
        if job.sequence is not None:  # it was preempted
            return self.engine.reread(job.sequence)
        if isinstance(found, Kept) and self._takes_over(found, known):
            try:
                return self.engine.read(job.request, kept=found, known=known)
            finally:
                if found.slot is None:  # it was taken over; else the request was refused before
                    self.kept.take(found)
        return self.engine.read(job.request, self._sequences, copy_from=found, known=known)

    def _takes_over(self, found: Kept, known: int) -> bool:
        """Whether a request that shares `known` tokens with a kept text takes its slot. Without pages a copy is as
        large as what it is a copy of, so whoever goes on with the whole text takes it. Where a text can't be copied,
        whoever shares a part of it takes it too, if it can be cut."""
        target = self.engine.target
        if target.paged or found.slot is None:
            return False
        return known == found.slot.length or (not self._copies and target.cuts(found.slot, known))

    def _step_and_read(self) -> bool:
        """Take a step and read prompts in one forward. Returns whether that was done. If it fails, both are done one
        after the other, which shows which request the error belongs to."""
        sequences, readings = self._sequences, self._readings
        if not (sequences and readings and self.engine.reads_along(sequences, readings)):
            return False
        left = sum(reading.left for reading in readings)
        try:
            self.engine.step(sequences, readings)
        except Exception as error:
            if not isinstance(error, CacheFullError):
                log.warning("a step that reads prompts failed; both are done apart: %s", error, exc_info=error)
            self._begin_answers()
            return False
        self._report_progress(list(self.running))
        if sum(reading.left for reading in readings) == left:  # drafts took all rows
            self._read()
        else:
            self._begin_answers()
        return True

    def _read(self) -> None:
        try:
            self.engine.with_room(partial(self.engine.read_on, self._readings))
        except CacheFullError as error:
            self._read_fewer(error)
        except Exception as error:
            self._read_one_by_one(error)
        self._begin_answers()

    def _begin_answers(self) -> None:
        """Requests whose text has been read start running; those that failed end."""
        begun = []
        for job in list(self.reading):
            reading = job.reading
            assert reading is not None
            if reading.error is not None:
                self._stop_reading(job)
                self._drop(job, "failed", reading.error)
            elif not reading.left:
                self.reading.remove(job)
                job.reading = None
                if job.sequence is None:
                    self.counts.first_token.see(monotonic() - job.arrived)
                    self.counts.found_tokens += job.found
                    self._begun.append(job)
                job.sequence = reading.sequence
                self.running.append(job)
                begun.append(job)
        self._report_progress(begun)
        if any([job.streams for job in begun]):
            sleep(MOMENT)

    def _read_fewer(self, error: CacheFullError) -> None:
        """There are too few pages, and no text is kept any more: stop reading the youngest request. It waits again, or
        fails if nothing else holds pages."""
        job = max(self.reading, key=lambda job: job.number)
        self._stop_reading(job)
        if self.running or self.reading:
            self._requeue(job)
        else:
            self._drop(job, "failed", error)

    def _read_one_by_one(self, error: Exception) -> None:
        """One of the texts can't be read: read each alone to find which."""
        for job in self.reading:
            assert job.reading is not None
            try:
                if len(self.reading) == 1:
                    raise error
                self.engine.read_on([job.reading])
            except CacheFullError:
                pass  # the next round preempts
            except Exception as own:
                job.reading.error = own

    def _drop(self, job: Job, finish: str, error: Exception | None = None) -> None:
        """End a request that is waiting or being read."""
        try:
            if job.sequence is not None:  # it was preempted while it ran
                job.sequence.finish = finish
                self._count(job, job.sequence)
                with self.engine.turn():
                    self.engine.retire([job.sequence])
        finally:
            self._end(job, finish, error)

    def _count(self, job: Job, sequence: Sequence) -> None:
        """Its answer is over: count it once and for all."""
        with self._counting:
            self._begun.remove(job)
            self.counts.add(sequence.stats)

    def _requeue(self, job: Job) -> None:
        """Preempted: wait again, before all requests of its priority that arrived later."""
        self._pages_short = True
        self.counts.put_back += 1
        with self._changed:
            heapq.heappush(self._waiting, job)

    def _make_room(self) -> bool:
        """Free pages for a step, where no text is kept any more: preempt the youngest request that is being read, else
        the youngest running one, unless it is the only one. Returns whether anything was freed."""
        if self.reading:
            job = max(self.reading, key=lambda job: job.number)
            self._stop_reading(job)
            self._requeue(job)
            return True
        unfinished = [job for job in self.running if job.sequence is not None and job.sequence.finish is None]
        if len(unfinished) < 2:
            return False
        youngest = max(unfinished, key=lambda job: job.number)
        assert youngest.sequence is not None
        self.engine.put_back(youngest.sequence)
        self.running.remove(youngest)
        self._requeue(youngest)
        return True

    def _evict(self) -> bool:
        """Free the least recently used kept text. Returns whether there was one."""
        if not len(self.kept):
            return False
        self.kept.shrink(len(self.kept) - 1)
        return True

    def _step(self) -> None:
        while True:
            sequences = self._sequences
            try:
                self.engine.with_room(partial(self.engine.step, sequences))
            except CacheFullError as error:
                if self._make_room():
                    continue
                sequences[0].error, sequences[0].finish = error, "failed"
            except Exception as error:
                if len(sequences) == 1:
                    sequences[0].error, sequences[0].finish = error, "failed"
                else:
                    self._step_one_by_one(sequences)
            break
        self._report_progress(list(self.running))

    def _step_one_by_one(self, sequences: list[Sequence]) -> None:
        """A step of the whole batch failed: take each sequence's step alone to find which one fails."""
        stuck: tuple[Sequence, CacheFullError] | None = None
        for sequence in sequences:
            if sequence.finish is None:
                try:
                    self.engine.with_room(partial(self.engine.step, [sequence]))
                except CacheFullError as error:
                    stuck = sequence, error
                except Exception as error:
                    sequence.error, sequence.finish = error, "failed"
        if stuck is not None and not self._make_room():
            sequence, sequence.error = stuck
            sequence.finish = "failed"

    def _report_progress(self, jobs: list[Job]) -> None:
        """After a step: deliver new tokens (`PACE`), beginnings and ends at once, and retire requests that ended."""
        now = monotonic() // PACE
        for job in jobs:
            sequence = job.sequence
            assert sequence is not None
            if sequence.finish is not None:
                self.running.remove(job)
                self._count(job, sequence)
                try:
                    self._retire(job, sequence)
                finally:
                    reason = sequence.finish
                    if reason == "cancelled" and job.late(monotonic()):
                        reason = "timeout"
                    self._end(job, reason, sequence.error)
            elif job.streams and now > job.delivered_in:
                job.delivered_in = now
                self._deliver(job, job.new())
        self._wake()

    def _retire(self, job: Job, sequence: Sequence) -> None:
        kept = None
        self._pages_short = False
        if sequence.finish not in ("cancelled", "failed") and self._keeps and not job.offline:
            kept = Kept()
        self.engine.retire([sequence], kept)
        if kept is not None:
            self.kept.keep(job.request.collection, kept)
            self.kept.shrink(MAX_KEPT_PAGED if self.engine.target.paged else MAX_KEPT)
        if sequence.stats.new_tokens > 1:
            later = sequence.stats.seconds - sequence.stats.first_token_seconds
            self.counts.per_token.see(later / (sequence.stats.new_tokens - 1), sequence.stats.new_tokens - 1)

    def _end(self, job: Job, finish: str, error: Exception | None = None) -> None:
        job.over = True
        with self._counting:
            self.counts.ended[finish] = self.counts.ended.get(finish, 0) + 1
        self._deliver(job, job.new(finish, error))

    def _deliver(self, job: Job, update: Update) -> None:
        if not (update.text or update.tokens or update.finish):
            return
        try:
            job.deliver(update)
        except Exception:  # the caller is gone
            job.request.cancel()
        if job.mailbox is not None:
            self._to_wake.add(job.mailbox)

    def _wake(self) -> None:
        written, self._to_wake = self._to_wake, set()
        for mailbox in written:
            try:
                mailbox.wake()
            except RuntimeError:  # the event loop is gone, and its callers with it
                for job in [*self.running, *self.reading, *self._waiting]:
                    if job.mailbox is mailbox:
                        job.request.cancel()

    # ---- requests that end early

    def _drop_ended(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = monotonic()
        with self._changed:
            waiting = list(self._waiting)
        for job in [*waiting, *self.running, *self.reading]:
            if job.late(now) or (self._closing is not None and now > self._closing):
                job.request.cancel()
        if self._closing is not None:
            for job in waiting:
                if job.sequence is None:  # else it was preempted
                    job.request.cancel()
        with self._changed:
            gone = [job for job in self._waiting if job.request.cancelled]
            if gone:
                self._waiting = [job for job in self._waiting if not job.request.cancelled]
                heapq.heapify(self._waiting)
        for job in [job for job in self.reading if job.request.cancelled]:
            gone.append(job)
            self._stop_reading(job)
        for job in gone:
            self._drop(job, "timeout" if job.late(now) else "cancelled")

    def _stop_reading(self, job: Job) -> None:
        assert job.reading is not None
        reading, job.reading = job.reading, None
        self.reading.remove(job)
        with self.engine.turn():
            self.engine.abandon(reading)

    def _fail_all(self, error: Exception) -> None:
        jobs = [*self.reading, *self.running]
        for job in list(self.reading):
            with suppress(Exception):
                self._stop_reading(job)
        self.reading, self.running = [], []
        for job in jobs:
            if not job.over:
                with suppress(Exception):
                    self._drop(job, "failed", error)

    # ---- prefixes

    @property
    def _keeps(self) -> bool:
        """Whether a text may begin with another's keys. Without pages, in lower precision, bits depend on the pieces in
        which a prompt was read."""
        return self.engine.target.paged or self.engine.target.dtype == torch.float32

    @property
    def _copies(self) -> bool:
        """Whether it may begin with a copy of them. States that can't branch can't be cut to the prefix."""
        return self._keeps and self.engine.target.trees

    def _longest_prefix(self, request: Request) -> tuple[Kept | Sequence | None, int]:
        """The text of this collection that shares the longest prefix with a request, and the prefix's length."""
        best: Kept | Sequence | None
        best, most = self.kept.find(request)
        if self._copies:
            for job in self.running:
                if job.sequence is not None and job.request.collection == request.collection:
                    known = job.sequence.slot.shared(request.tokens[:-1])
                    if known >= max(MIN_SHARED, most + 1):
                        best, most = job.sequence, known
        return best, most
