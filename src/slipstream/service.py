"""Service: many callers, one engine. A thread of its own drives it; answers come to their callers as they grow.

Requests wait in the order of their priority, then of their arrival. In each round one forward reads a piece of the next
prompt, or of several where the target takes them together, and all running answers go a step further, in the same
forward where the target can: nobody who is answered waits for more than a piece of others' prompts. Only a list that is
answered as a whole first fills the batch. Whatever fails, fails for its own request alone.

Texts stay read for a while after their answers: a request that begins like one of them, or like one that is being
answered, reads what is new. Nothing passes from one collection to another, not even by how long it takes. Where texts
lie in pages they share those that they have in common. When pages run out, texts that nobody needs go first, the oldest
before the others; then the youngest answer is put back, and read again later.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import weakref
from contextlib import nullcontext, suppress
from copy import deepcopy
from time import monotonic
from typing import cast

import torch

from slipstream.counts import Counts
from slipstream.engine import WORTH, Engine
from slipstream.errors import BusyError, CacheFullError, ModelError
from slipstream.jobs import Job, Mailbox, Update, Wakes
from slipstream.request import Request
from slipstream.sequence import Kept, Reading, Sequence, check_drafting, check_prompt

log = logging.getLogger("slipstream")

# Running answers are told of in the first step of each so many seconds. No reader notices; but a small model on a GPU
# writes a token of each answer every millisecond or two, and telling of each by itself takes as long as writing it.
PACE = 0.02
LINGER = 5.0  # seconds without work after which its thread ends; the next request starts another
KEPT = 4  # texts that stay read at most: each holds memory for its whole length,
KEPT_IN_PAGES = 8  # or, in pages, for what no other has; few, since a head keeps room of its own for each


class Service:
    def __init__(self, engine: Engine, max_waiting: int | None = None) -> None:
        """max_waiting: requests that may wait; more are refused with BusyError. None: any number."""
        self.engine, self.max_waiting = engine, max_waiting
        self.counts = Counts()
        self.running: list[Job] = []
        self.reading: list[Job] = []
        self._waiting: list[tuple[int, int, Job]] = []  # a heap: priority, number, request
        self._numbers = itertools.count()
        self._kept: list[tuple[str, Kept]] = []  # by collection, the latest used last
        self._mailboxes = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]()
        self._written: set[Wakes] = set()  # those with something new
        self._scarce = False  # somebody was put back: nobody begins before somebody ended
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing: float | None = None  # when running answers are cancelled
        engine.spare = self._spare

    # ---- for callers, from any thread

    def submit(self, job: Job) -> Job:
        """Refuses at once what can't be answered."""
        check_prompt(job.request, self.engine.target)
        check_drafting(job.request, self.engine.drafter)
        with self._changed:
            if self._closing is not None:
                raise ModelError("this service is closing: it takes no more requests")
            if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
                self.counts.refused += 1
                raise BusyError(f"{len(self._waiting)} requests wait already, which is as many as may: try again later")
            self.counts.requests += 1
            job.number = next(self._numbers)
            heapq.heappush(self._waiting, (job.priority, job.number, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="slipstream", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """It ends before its next step."""
        job.request.cancel()
        with self._changed:
            self._changed.notify_all()

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """Of all that listen in this event loop, which is the caller's."""
        with self._changed:
            return self._mailboxes.setdefault(loop, Mailbox(loop))

    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether anything is being answered, or waits for it."""
        return bool(self._waiting or self.running or self.reading)

    def so_far(self) -> Counts:
        """What has ended, and what runs: nothing twice, and nothing left out."""
        with self._counting:
            counts, running = deepcopy(self.counts), list(self.running)
            for job in running:
                if job.sequence is not None:
                    counts.add(job.sequence.stats)
        return counts

    def close(self, within: float = 0.0) -> None:
        """No more requests; those that run may end within so many seconds, those that wait are cancelled."""
        with self._changed:
            self._closing = monotonic() + within
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._forget(0)

    # ---- the thread

    def _work(self) -> None:
        device = self.engine.target.device  # a thread begins with the first GPU, whatever the model is on
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._rounds()

    def _rounds(self) -> None:
        while True:
            with self._changed:
                idle = not self.busy
                if idle and self._closing is None:
                    self._changed.wait(LINGER)
                    idle = not self._waiting
                if idle:
                    self._thread = None
                    return
            try:
                self._round()
            except Exception as error:
                log.exception("the service failed at something that is nobody's: all its requests end")
                self._fail_all(error)
            self._wake()

    def _round(self) -> None:
        """One forward that reads prompts, and one step of everybody; or both in one."""
        self._drop_ended()
        with self.engine.turn():
            self._scarce = self._scarce and bool(self.running or self.reading)
            while len(self.running) + len(self.reading) < self.engine.max_batch and not self._scarce:
                if not self._begin():
                    break
            if self._step_and_read():
                return
            if self.reading:
                self._read()
            if self.running and not self._fills():
                self._step()

    def _fills(self) -> bool:
        """Whether more prompts are read before the next step, so that it is of more sequences: nobody minds."""
        room = len(self.running) + len(self.reading) < self.engine.max_batch and not self._scarce
        return bool(self.reading or (self._waiting and room)) and all([job.offline for job in self.running])

    def _begin(self) -> bool:
        """Whether somebody's text is read from now on: the next one's, if it can be read along with the others."""
        with self._changed:
            if not self._waiting:
                return False
            *_, job = self._waiting[0]
        readings = [other.reading for other in self.reading if other.reading]
        if not self.engine.takes_more(readings):  # asked in every round; looking for known texts takes longer
            return False
        found, known = self._known(job.request)
        if not self.engine.may_join(job.request, readings, known):
            return False
        self._kept.sort(key=lambda each: each[1] is found)  # if it is kept, it is the latest used
        with self._changed:
            self._waiting.remove((job.priority, job.number, job))
            heapq.heapify(self._waiting)
        try:
            job.reading = self._reading(job, found)
        except Exception as error:
            self._drop(job, "failed", error)
            return True
        self.reading.append(job)
        self.counts.found_tokens += job.reading.slot.length
        return True

    def _reading(self, job: Job, found: Kept | Sequence | None) -> Reading:
        if job.sequence is not None:
            return self.engine.reread(job.sequence)
        if self.engine.target.paged:
            return self.engine.read(job.request, like=found)
        self._kept = [each for each in self._kept if each[1] is not found]  # it is taken over
        running = [other.sequence for other in self.running if other.sequence is not None]
        return self.engine.read(job.request, running, cast(Kept | None, found))

    def _step_and_read(self) -> bool:
        """Whether one forward did both. What fails then is done again, one after the other, and shows whose it is."""
        sequences = [job.sequence for job in self.running if job.sequence is not None]
        readings = [job.reading for job in self.reading if job.reading]
        if not (sequences and readings and self.engine.reads_along(sequences, readings)):
            return False
        failed = None
        try:
            self.engine.step(sequences, readings)
        except Exception as error:
            failed = error
            if not isinstance(error, CacheFullError):
                log.warning("a step that reads prompts failed; both are done apart: %s", error, exc_info=error)
        else:
            self._tell(list(self.running))
        self._begin_answers()
        return failed is None

    def _read(self) -> None:
        try:
            self.engine.read_on([job.reading for job in self.reading if job.reading])
        except CacheFullError as error:
            self._read_fewer(error)
        except Exception as error:
            self._read_one_by_one(error)
        self._begin_answers()

    def _begin_answers(self) -> None:
        """Whose text is read, runs."""
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
                job.sequence = reading.sequence
                self.running.append(job)
                begun.append(job)
        self._tell(begun)

    def _read_fewer(self, error: CacheFullError) -> None:
        """There are too few pages: the youngest begins again later, if that helps."""
        job = max(self.reading, key=lambda job: job.number)
        self._stop_reading(job)
        if self._spare() or self.running or self.reading:
            self._wait_again(job)
        else:
            self._drop(job, "failed", error)

    def _read_one_by_one(self, error: Exception) -> None:
        """Somebody's text can't be read: whose, shows when everybody's is read alone."""
        for job in self.reading:
            assert job.reading is not None
            try:
                if len(self.reading) == 1:
                    raise error
                self.engine.read_on([job.reading])
            except CacheFullError:
                pass  # the next round sees to it
            except Exception as own:
                job.reading.error = own

    def _drop(self, job: Job, finish: str, error: Exception | None = None) -> None:
        """It ends while it waits, or is read."""
        if job.sequence is not None:  # it was put back
            job.sequence.finish = finish
            with self.engine.turn():
                self.engine.retire([job.sequence])
            with self._counting:
                self.counts.add(job.sequence.stats)
        self._end(job, finish, error)

    def _wait_again(self, job: Job) -> None:
        """It goes on in its turn, before all that came after it."""
        self._scarce = True
        self.counts.put_back += 1
        with self._changed:
            heapq.heappush(self._waiting, (job.priority, job.number, job))

    def _make_room(self) -> bool:
        """For a step: nobody who is answered needs the first things to go; then the youngest is put back, if there is
        more than one."""
        if self._spare():
            return True
        if self.reading:
            job = max(self.reading, key=lambda job: job.number)
            self._stop_reading(job)
            self._wait_again(job)
            return True
        if len(self.running) < 2:
            return False
        youngest = max(self.running, key=lambda job: job.number)
        assert youngest.sequence is not None
        self.engine.put_back(youngest.sequence)
        with self._counting:
            self.running.remove(youngest)
        self._wait_again(youngest)
        return True

    def _spare(self) -> bool:
        """Give back the memory of the text that nobody used for the longest time, if there is one."""
        if self._kept:
            self._forget(len(self._kept) - 1)
            return True
        return False

    def _step(self) -> None:
        sequences = [job.sequence for job in self.running if job.sequence is not None]
        try:
            self.engine.step(sequences)
        except CacheFullError as error:
            if self._make_room():
                self._step()
                return
            sequences[0].error, sequences[0].finish = error, "failed"
        except Exception as error:
            if len(sequences) == 1:
                sequences[0].error, sequences[0].finish = error, "failed"
            else:
                self._step_one_by_one(sequences)
        self._tell(list(self.running))

    def _step_one_by_one(self, sequences: list[Sequence]) -> None:
        """Somebody's draft failed: who, shows when everybody goes alone."""
        for sequence in sequences:
            if sequence.finish is None:
                try:
                    self.engine.step([sequence])
                except Exception as error:
                    sequence.error, sequence.finish = error, "failed"

    def _tell(self, jobs: list[Job]) -> None:
        """Those that took a step: callers hear of it, of beginnings and ends at once, and those that ended leave."""
        now = monotonic() // PACE
        for job in jobs:
            sequence = job.sequence
            assert sequence is not None
            if sequence.finish is not None:
                with self._counting:
                    self.running.remove(job)
                    self.counts.add(sequence.stats)
                self._retire(job, sequence)
            elif job.streams and now > job.told:
                job.told = now
                self._deliver(job, job.new())
        self._wake()

    def _retire(self, job: Job, sequence: Sequence) -> None:
        kept = None
        self._scarce = False
        target = self.engine.target
        paged = target.paged
        # Without pages, in lower precision, bits depend on where the reading of a long prompt began.
        exact = paged or target.dtype == torch.float32
        if sequence.finish not in ("cancelled", "failed") and exact and not job.offline:
            kept = Kept()
        self.engine.retire([sequence], kept)
        if kept is not None:
            self._kept.append((job.request.collection, kept))
            self._forget(KEPT_IN_PAGES if paged else KEPT)
        if sequence.stats.new_tokens > 1:
            later = sequence.stats.seconds - sequence.stats.first_token_seconds
            self.counts.per_token.see(later / (sequence.stats.new_tokens - 1), sequence.stats.new_tokens - 1)
        reason = sequence.finish or "stop"
        late = reason == "cancelled" and job.deadline is not None and monotonic() > job.deadline
        self._end(job, "timeout" if late else reason, sequence.error)

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
        except Exception:  # nobody listens any more
            job.request.cancel()
        if job.mailbox is not None:
            self._written.add(job.mailbox)

    def _wake(self) -> None:
        written, self._written = self._written, set()
        for mailbox in written:
            try:
                mailbox.wake()
            except RuntimeError:  # nobody listens any more
                for job in [*self.running, *self.reading, *(job for *_, job in self._waiting)]:
                    if job.mailbox is mailbox:
                        job.request.cancel()

    # ---- what nobody needs any more

    def _drop_ended(self) -> None:
        """Requests that were cancelled, or whose time is over."""
        now = monotonic()
        if self._closing is not None:
            with self._changed:
                waiting, self._waiting = self._waiting, []
            for *_, job in waiting:
                self._drop(job, "cancelled")
        with self._changed:
            there = [job for *_, job in self._waiting] + self.running + self.reading
        for job in there:
            late = job.deadline is not None and now > job.deadline
            if late or (self._closing is not None and now > self._closing):
                job.request.cancel()
        with self._changed:
            gone = [job for *_, job in self._waiting if job.request.cancelled]
            if gone:
                self._waiting = [each for each in self._waiting if not each[-1].request.cancelled]
                heapq.heapify(self._waiting)
        for job in [job for job in self.reading if job.request.cancelled]:
            gone.append(job)
            self._stop_reading(job)
        for job in gone:
            late = job.deadline is not None and now > job.deadline
            self._drop(job, "timeout" if late else "cancelled")

    def _stop_reading(self, job: Job) -> None:
        assert job.reading is not None
        reading, job.reading = job.reading, None
        self.reading.remove(job)
        with self.engine.turn():
            self.engine.abandon(reading)

    def _fail_all(self, error: Exception) -> None:
        for job in list(self.reading):
            with suppress(Exception):
                self._stop_reading(job)
            self._end(job, "failed", error)
        for job in list(self.running):
            self.running.remove(job)
            if job.sequence is not None and not job.over:
                job.sequence.finish = job.sequence.finish or "failed"
                with suppress(Exception), self.engine.turn():
                    self.engine.retire([job.sequence])
            if not job.over:
                self._end(job, "failed", error)

    # ---- texts that stay read

    def _known(self, request: Request) -> tuple[Kept | Sequence | None, int]:
        """The text of this collection that a request shares most with, and how much that is. With pages texts that are
        being answered count too."""
        best: Kept | Sequence | None = None
        most, paged = WORTH - 1, self.engine.target.paged
        texts = list[tuple[str, Kept | Sequence]](self._kept)
        if paged:
            texts += [(job.request.collection, job.sequence) for job in self.running if job.sequence is not None]
        for collection, text in texts:
            if collection == request.collection and text.slot is not None:
                shared = text.slot.shared(request.tokens[:-1])
                if shared > most:
                    best, most = text, shared
        return best, most if best is not None else 0

    def _forget(self, at_most: int) -> None:
        with self.engine.turn():  # two may close it
            while len(self._kept) > at_most:
                _, kept = self._kept.pop(0)
                self.engine.forget(kept)
