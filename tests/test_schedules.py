"""The service's own laws, over thousands of random schedules: an engine of no model, and a clock of our own."""

import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from slipstream.engine import Engine
from slipstream.errors import CacheFullError
from slipstream.jobs import Job
from slipstream.request import Request
from slipstream.sequence import Reading
from slipstream.service import MAX_KEPT, MAX_KEPT_PAGED, Service
from slipstream.stats import Stats


class Slot:
    def __init__(self, tokens):
        self.tokens = list(tokens)

    @property
    def length(self):
        return len(self.tokens)

    def shared(self, tokens):
        same = 0
        while same < min(len(tokens), len(self.tokens)) and tokens[same] == self.tokens[same]:
            same += 1
        return same


class FakeEngine:
    """Reads ten tokens at a time, writes one a step. Some requests fail where their plan says so. room: tokens that
    fit into its cache, if texts lie in pages; then several texts are read together. mixes: also along with a step."""

    has_rows_left, should_read_with, with_room = Engine.has_rows_left, Engine.should_read_with, Engine.with_room

    def __init__(self, log, max_batch, room=None, mixes=False):
        self.log, self.max_batch, self.room = log, max_batch, room
        paged = room is not None
        self.target = SimpleNamespace(
            dtype=torch.float32,
            context=10_000,
            vocabulary=100,
            paged=paged,
            flat=paged,
            mixes=mixes,
            chunk=10,
            trees=True,
        )
        self.drafter = SimpleNamespace(takes=())
        self.evict = lambda: False
        self.open = set()  # slots

    def turn(self):
        return nullcontext()

    def check_room(self, more):
        if self.room is not None and sum(len(slot.tokens) for slot in self.open) + more > self.room:
            raise CacheFullError("no room")

    def put_back(self, sequence):
        assert not self.kept  # what nobody waits for goes first
        self.open.remove(sequence.slot)

    def reread(self, sequence):
        slot = Slot([])
        self.open.add(slot)
        return Reading(sequence, slot, [*sequence.request.tokens, *sequence.tokens[:-1]], again=True)

    def read(self, request, running=(), kept=None, copy_from=None, known=0):  # noqa: ARG002
        self.log.append(("begin", request.seed))
        assert copy_from is None or copy_from.slot in self.open
        slot = Slot([])
        if kept is not None and kept.slot is not None:
            self.open.discard(kept.slot)
            kept.slot = None
        self.open.add(slot)
        rest = {"stats": Stats("fake", True), "tokens": [], "logprobs": [], "finish": None, "error": None}
        return Reading(SimpleNamespace(request=request, slot=slot, session=None, **rest), slot, request.tokens)

    def reads_along(self, running, readings):
        assert running
        assert readings
        return self.target.mixes

    def read_on(self, readings):
        assert len(readings) == 1 or self.target.flat
        room = 10
        self.check_room(room)
        if any(reading.sequence.request.plan == "breaks a reading" for reading in readings):
            raise RuntimeError("somebody's text")
        self.log.append(("piece", [reading.sequence.request.seed for reading in readings]))
        for reading in readings:
            sequence = reading.sequence
            piece = reading.text[reading.slot.length : reading.slot.length + room]
            reading.slot.tokens += piece
            room -= len(piece)
            if reading.left:
                continue
            if reading.again:
                sequence.slot = reading.slot
            elif sequence.request.plan == "fails to read":
                reading.error = ValueError(sequence.request.seed)
            else:
                sequence.tokens.append(0)
                sequence.finish = "length" if sequence.request.max_new_tokens == 1 else None

    def abandon(self, reading):
        self.open.discard(reading.slot)

    def step(self, sequences, readings=()):
        self.check_room(len(sequences) + 10 * bool(readings))
        together = len(sequences) > 1 or readings
        if together and any(s.request.plan == "breaks a step" and len(s.tokens) == 3 for s in sequences):
            raise RuntimeError("somebody's draft")
        if readings:
            self.read_on(readings)
        for sequence in sequences:
            request = sequence.request
            if request.plan == "breaks a step" and len(sequence.tokens) == 3:
                raise RuntimeError("somebody's draft")
            self.log.append(("step", request.seed))
            sequence.tokens.append(1 + len(sequence.tokens) % 7)
            sequence.slot.tokens.append(sequence.tokens[-1])
            sequence.stats.new_tokens = len(sequence.tokens)
            if request.plan == "fails to write" and len(sequence.tokens) == 2:
                sequence.error, sequence.finish = ValueError(request.seed), "failed"
            elif len(sequence.tokens) >= request.max_new_tokens:
                sequence.finish = "length"
            elif request.cancelled:
                sequence.finish = "cancelled"

    def retire(self, sequences, kept=None):
        for sequence in sequences:
            if kept is None:
                self.open.discard(sequence.slot)
            else:
                kept.slot = sequence.slot

    def forget(self, kept):
        if kept.slot is not None:
            self.open.discard(kept.slot)
            kept.slot = None


def put_back(service):
    return [job.request.seed for job in service._waiting if job.sequence is not None]


PLANS = ["", "", "", "", "fails to read", "breaks a reading", "fails to write", "breaks a step", "cancelled", "late"]


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))])
def test_nobody_starves_nothing_leaks_and_what_fails_fails_alone(seed, monkeypatch):
    for schedule in range(50):
        one_schedule(random.Random(1000 * seed + schedule), monkeypatch)


def one_schedule(rng, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("slipstream.service.monotonic", lambda: clock[0])
    log = []
    room = rng.choice([None, 100, 200])
    engine = FakeEngine(log, rng.randint(1, 5), room, mixes=room is not None and rng.random() < 0.7)
    service = Service(engine)
    engine.kept = service.kept
    service._thread = threading.current_thread()  # rounds are ours to take
    jobs, heard, plans, lists = {}, {}, {}, rng.choice([0, 0.5, 1])

    def ask(number):
        plan = rng.choice(PLANS)
        request = Request([rng.randrange(3) for _ in range(rng.randint(1, 60))], rng.randint(1, 12), seed=number)
        request.plan = plans[number] = plan
        heard[number] = []
        deadline = clock[0] + rng.randint(1, 8) if plan == "late" else None
        priority = rng.choice([0, 0, 0, 1])
        streams = rng.random() < 0.5
        offline = not streams and rng.random() < lists
        jobs[number] = service.submit(Job(request, heard[number].append, priority, deadline, streams, offline))

    coming, number, rounds, written = rng.randint(1, 25), 0, 0, 0
    while number < coming or service.waiting() or service.running or service.reading:
        while number < coming and rng.random() < 0.6:
            ask(number)
            number += 1
        for job in jobs.values():
            if plans[job.request.seed] == "cancelled" and not job.over and rng.random() < 0.1:
                service.cancel(job)
        if rng.random() < 0.01:
            service.close(within=rng.choice([0, 3]))
            coming = number
        before, writing = len(log), [job.request.seed for job in service.running]
        service._round()
        took = log[before:]
        # A round is one forward that reads at most, and one step of everybody who was being answered; of lists alone,
        # nobody may take it before more texts are read.
        alone = any(plan == "breaks a reading" for plan in plans.values())  # then everybody's is read alone
        assert sum(what == "piece" for what, _ in took) <= (engine.max_batch if alone else 1)
        ended = {job.request.seed for job in jobs.values() if job.over}
        left = [each for each in writing if each not in ended and each not in put_back(service)]
        if any(what == "step" for what, _ in took) or not all(jobs[each].offline for each in left):
            assert all(("step", each) in took for each in left)
        assert len(service.running) <= engine.max_batch
        written, before = service.so_far().new_tokens, written
        assert written >= before  # a counter never falls, whoever is preempted
        clock[0] += 1.0
        rounds += 1
        assert rounds < 10_000, "it never ends"
    service.kept.shrink(0)
    assert not engine.open  # no slot is lost
    assert len(service.kept) <= (MAX_KEPT if engine.room is None else MAX_KEPT_PAGED)
    for number, updates in heard.items():
        ends = [update for update in updates if update.finish is not None]
        assert len(ends) == 1
        assert updates[-1] is ends[0]
        plan, tokens = plans[number], [token for update in updates for token in update.tokens]
        if ends[0].finish == "length":
            assert len(tokens) == jobs[number].request.max_new_tokens
        if ends[0].finish == "failed":
            assert plan in ("fails to read", "breaks a reading", "fails to write", "breaks a step")
        if plan == "":
            assert ends[0].finish == "length" or service._closing is not None
    begun = [number for what, number in log if what == "begin"]
    for priority in (0, 1):  # those of one priority begin in the order of their arrival
        mine = list(dict.fromkeys(number for number in begun if jobs[number].priority == priority))
        assert mine == sorted(mine)
    assert sum(service.counts.ended.values()) == len(jobs)


def test_who_waits_for_a_forward_does_not_look_for_known_texts_in_every_round():
    service = Service(engine := FakeEngine([], max_batch=3))
    service._thread = threading.current_thread()

    def ask(text):
        request = Request(text, 1)
        request.plan = ""
        return service.submit(Job(request, lambda _: None))

    for text in ([1] * 40, [2] * 40):
        ask(text)
        while service.busy:
            service._round()
    kept = [text.slot for text in service.kept]
    looked, search = [], service._longest_prefix
    service._longest_prefix = lambda request: looked.append(request) or search(request)
    ask([3] * 60)  # six forwards
    late = ask([1] * 50)
    for _ in range(5):
        service._round()
    assert len(looked) == 1
    service.cancel(late)
    service._round()
    assert [text.slot for text in service.kept][:2] == kept  # and what it would have used is as old as it was
    service.kept.shrink(0)
    assert not engine.open


class Rounds:
    """A service whose rounds are ours to take."""

    def __init__(self, **how):
        self.log = []
        self.engine = FakeEngine(self.log, **how)
        self.service = Service(self.engine)
        self.engine.kept, self.service._thread = self.service.kept, threading.current_thread()
        self.heard = {}

    def ask(self, number, prompt, tokens):
        request = Request([number] * prompt, tokens, seed=number)
        request.plan, self.heard[number] = "", []
        self.service.submit(Job(request, self.heard[number].append))

    def take(self, rounds=10_000):
        while self.service.busy and rounds:
            self.service._round()
            rounds -= 1

    def ends(self):
        return {number: updates[-1].finish for number, updates in self.heard.items() if updates}


def test_a_kept_text_goes_before_a_prompt_that_is_being_read():
    """Nothing that was read is read again."""
    rounds = Rounds(max_batch=3, room=110, mixes=True)
    rounds.ask(1, 40, 2)
    rounds.take()
    assert len(rounds.service.kept) == 1
    rounds.ask(2, 10, 30)
    rounds.take(2)
    rounds.ask(3, 60, 2)
    rounds.take()
    assert rounds.ends() == dict.fromkeys((1, 2, 3), "length")
    assert [number for what, number in rounds.log if what == "begin"] == [1, 2, 3]
    assert rounds.service.counts.put_back == 0


def test_a_preempted_answer_may_finish_when_the_service_closes(monkeypatch):
    monkeypatch.setattr("slipstream.service.monotonic", lambda: 0.0)
    rounds = Rounds(max_batch=2, room=60)
    for number in (1, 2):
        rounds.ask(number, 20, 20)
    while not put_back(rounds.service):
        rounds.take(1)
    rounds.ask(3, 20, 2)  # not begun
    rounds.service.close(within=100)
    rounds.take()
    assert rounds.ends() == {1: "length", 2: "length", 3: "cancelled"}


def test_prompts_are_read_though_drafts_take_all_rows():
    rounds = Rounds(max_batch=2, room=1000, mixes=True)
    rounds.ask(1, 5, 50)
    rounds.take(2)
    step = rounds.engine.step
    rounds.engine.step = lambda sequences, _readings=(): step(sequences)  # none are left for the prompt
    rounds.ask(2, 30, 2)
    rounds.take(8)
    assert rounds.ends()[2] == "length"
    assert rounds.ends()[1] is None


def test_when_the_service_fails_all_its_answers_end_and_nothing_stays():
    """One of them had been preempted and is being read again."""
    rounds = Rounds(max_batch=2, room=60)
    for number in (1, 2):
        rounds.ask(number, 20, 20)
    while not any(job.reading is not None and job.reading.again for job in rounds.service.reading):
        rounds.take(1)
        assert rounds.service.busy
    rounds.service._fail_all(ValueError("a failure"))
    assert set(rounds.ends().values()) <= {"failed", "length"}
    assert "failed" in rounds.ends().values()
    assert not rounds.service.busy
    assert not rounds.service._begun
    rounds.service.kept.shrink(0)
    assert not rounds.engine.open


def test_a_batch_that_fails_where_no_page_is_free_ends_all_the_same():
    """Each sequence alone finds no room then, so that one has to make some."""
    rounds = Rounds(max_batch=2, room=42)
    for number in (1, 2):
        rounds.ask(number, 20, 5)
    rounds.take(3)
    step = rounds.engine.step

    def failing(sequences, *readings):
        if len(sequences) > 1:
            raise RuntimeError("a draft for all of them")
        step(sequences, *readings)

    rounds.engine.step = failing
    rounds.take(500)
    assert set(rounds.ends()) == {1, 2}
    assert not rounds.service.busy
