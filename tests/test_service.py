"""Many callers, one engine: an answer under any load is the answer alone."""

import asyncio
import gc
import itertools
import random
import threading
import weakref
from time import monotonic, sleep

import pytest
import torch

from families import graphs
from patience import PATIENCE
from slipstream import LLM, BusyError, ModelError, OptionError, PromptError
from slipstream.answers import Updates, together
from slipstream.counts import Counts
from slipstream.drafters import make
from slipstream.engine import Engine
from slipstream.errors import CacheFullError
from slipstream.heads import HEADS
from slipstream.jobs import Job, Mailbox
from slipstream.kernels.sizes import PAGE
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.service import Service
from slipstream.stats import Stats
from slipstream.targets import open_target

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], [3] * 17, [20, 21, 22, 20, 21, 22, 20, 21], list(range(1, 41))]
PUT, WAKE = Mailbox.put, Mailbox.wake
WAYS = [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "top_k": 20, "seed": 11}]


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny("llama"), drafter="suffix", max_batch=4) as found:
        yield found


def alone(llm, prompt, **options):
    return llm.generate(prompt, ignore_eos=True, **options).tokens


@pytest.fixture(scope="module")
def plainly(tiny):
    """plainly(requests) -> their texts without drafts, by ordinary forwards: those of any drafter, so made once."""
    target, known = open_target(tiny("llama")), {}
    engine = Engine(target, make("none", target), max_batch=16)

    def answers(requests):
        keys = [(tuple(r.tokens), r.max_new_tokens, repr(r.sampling), r.seed) for r in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in known}
        texts = {id(sequence.request): sequence.tokens for sequence in engine.run(new.values())}
        known.update((key, texts[id(request)]) for key, request in new.items())
        return [known[key] for key in keys]

    return answers


class Listener:
    """What came for one request."""

    def __init__(self, service, request, **how):
        self.updates, self.ended = [], threading.Event()
        self.job = service.submit(Job(request, self.hear, **how))

    def hear(self, update):
        self.updates.append(update)
        if update.finish is not None:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(PATIENCE), "no end"
        return self.updates[-1]

    @property
    def tokens(self):
        return [token for update in self.updates for token in update.tokens]


class Raises:
    """A processor that fails after some tokens."""

    def __init__(self, after=5):
        self.left = after

    def __call__(self, ids, scores):  # noqa: ARG002
        self.left -= 1
        if self.left < 0:
            raise ValueError("a processor that fails")
        return scores


@pytest.mark.slow
def test_every_answer_is_the_one_it_has_alone(llm):
    """Random arrivals, lengths, ways to draw and cancellations, from several threads."""
    rng, service = random.Random(0), Service(llm.engine)
    asked = [(rng.choice(PROMPTS), rng.choice(WAYS), rng.randint(1, 40)) for _ in range(60)]
    whole = {
        (i, j): alone(llm, p, max_new_tokens=40, **way) for i, p in enumerate(PROMPTS) for j, way in enumerate(WAYS)
    }
    expected = [whole[PROMPTS.index(p), WAYS.index(way)][:n] for p, way, n in asked]
    dropped, found = set(rng.sample(range(len(asked)), 12)), {}

    def some(which):
        for i in which:
            prompt, way, length = asked[i]
            request = llm.request(prompt, max_new_tokens=length, ignore_eos=True, **way)
            found[i] = Listener(service, request, priority=i % 3, streams=i % 2 == 0)
            sleep(0.002 * (i % 3))
            if i in dropped:
                service.cancel(found[i].job)

    threads = [threading.Thread(target=some, args=(range(start, len(asked), 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, listener in found.items():
        last = listener.wait()
        assert last.error is None
        if i in dropped and last.finish == "cancelled":
            assert listener.tokens == expected[i][: len(listener.tokens)]
        else:
            assert listener.tokens == expected[i], (asked[i], last)
    service.close()
    assert not llm.engine._open
    assert not service.running
    assert all(slot is None for slot in llm.target._slots)
    assert sum(service.counts.ended.values()) == service.counts.requests == len(asked)


def test_prompts_are_read_in_pieces_beside_answers(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.service.PACE", 1e-6)  # each step is told of
    with LLM(tiny("llama"), drafter="none", max_batch=4) as llm:
        llm.target.chunk = 8
        service, log = Service(llm.engine), []
        first = Listener(service, llm.request([1, 2, 3], max_new_tokens=400, ignore_eos=True))
        while not first.updates:
            sleep(0.001)
        first.hear, hear = lambda update: (log.append("first"), hear(update)), first.hear
        first.job.deliver = first.hear
        long = [1 + i % 60 for i in range(80)]
        second = Listener(service, llm.request(long, max_new_tokens=4, ignore_eos=True))
        prefill = llm.target.prefill

        def watched(slot, tokens, want):
            for score in prefill(slot, tokens, want):
                log.append("piece")
                yield score

        llm.target.prefill = watched
        second.wait()
        service.cancel(first.job)
        first.wait()
        pieces = [i for i, what in enumerate(log) if what == "piece"]
        assert second.tokens == alone(llm, long, max_new_tokens=4)
        for one, other in itertools.pairwise(pieces):
            assert "first" in log[one:other]  # nobody waits for more than a piece
        service.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "suffix", "eagle3"])
def test_prompts_are_read_in_the_forwards_of_answers_where_the_target_can(drafter, tiny, plainly, monkeypatch):
    """Nobody waits for others' prompts: once somebody runs, no forward is of prompts alone, unless drafts took all rows
    of the one before."""
    model, rng = tiny("llama"), random.Random(1)
    target = graphs(model)
    target.chunk = 24
    head = {"drafter_path": HEADS["eagle3"].fresh(model)} if drafter == "eagle3" else {}
    engine = Engine(target, make(drafter, target, None, **head), drafter, max_batch=8)
    asked = [([rng.randrange(1, 60) for _ in range(rng.choice([3, 40, 90]))], {"temperature": i % 2}) for i in range(9)]

    def request(i):
        tokens, way = asked[i]
        return Request(tokens, 24, Sampling(**way), seed=i, max_draft=3)

    expected = plainly([request(i) for i in range(len(asked))])
    assert [*engine.run([request(0)])][-1].tokens == expected[0]
    target.alike(32, text=True)  # as those of the answer alone: tried once, by forwards of its own
    forwards, real = [], target.score_and_read

    def watched(slots, trees, readers, pieces, want):
        forwards.append((len(trees), sum(map(len, trees)) + sum(map(len, pieces))))
        return real(slots, trees, readers, pieces, want)

    def scored(slots, trees, *more, real=target.score):
        alone.append((len(trees), sum(map(len, trees))))
        forwards.append(alone[-1])
        return real(slots, trees, *more)

    alone = []
    monkeypatch.setattr(target, "score_and_read", watched)
    monkeypatch.setattr(target, "score", scored)
    service = Service(engine)
    found = [Listener(service, request(i)) for i in range(len(asked))]
    assert [listener.wait().finish for listener in found] == ["length"] * len(asked)
    assert [listener.tokens for listener in found] == expected
    first = next(i for i, (trees, _) in enumerate(forwards) if trees)
    for (_, rows), (trees, _) in itertools.pairwise(forwards[first:]):
        assert trees or rows >= target.chunk
    mixed = [forward for forward in forwards if forward not in alone]
    assert max(trees for trees, _ in mixed) > 2
    assert max(rows for _, rows in mixed) <= target.chunk
    assert service.so_far().ended == {"length": len(asked)}
    service.close()
    assert target.arena.free == target.arena.pages - 1


@pytest.mark.slow
def test_a_forward_of_both_that_fails_is_done_again_apart(tiny, monkeypatch):
    target = graphs(tiny("llama"))
    engine = Engine(target, make("none", target), "none", max_batch=4)
    asked = [([5 + i, 6, 7], 12) for i in range(3)]
    expected = [[*engine.run([Request(*each)])][-1].tokens for each in asked]
    failed = []

    def fails(slots, *rest, real=target.score_and_read):
        if slots:
            failed.append(slots)
            raise RuntimeError("out of luck")
        return real(slots, *rest)

    monkeypatch.setattr(target, "score_and_read", fails)
    service = Service(engine)
    service._thread = threading.current_thread()  # rounds are ours to take
    found = [Listener(service, Request(*asked[0]))]
    while service.busy:
        service._round()
        if len(found) < len(asked):
            found.append(Listener(service, Request(*asked[len(found)])))
    assert [listener.wait().finish for listener in found] == ["length"] * 3
    assert [listener.tokens for listener in found] == expected
    assert failed


@pytest.mark.slow
def test_what_fails_fails_alone(llm, monkeypatch):
    service = Service(llm.engine)
    good = [Listener(service, llm.request(p, max_new_tokens=30, ignore_eos=True)) for p in PROMPTS[:3]]
    bad = Listener(service, llm.request(PROMPTS[3], max_new_tokens=30, ignore_eos=True, processors=[Raises()]))
    assert str(bad.wait().error) == "a processor that fails"
    assert bad.updates[-1].finish == "failed"
    for prompt, listener in zip(PROMPTS, good, strict=False):
        assert listener.wait().error is None
        assert listener.tokens == alone(llm, prompt, max_new_tokens=30)
    # A draft that fails for one sequence of a batch.
    propose = type(llm.engine.drafter).propose

    def picky(self, sessions, roots, budgets):
        if any(session is victim for session in sessions):
            raise RuntimeError("a drafter that fails")
        return propose(self, sessions, roots, budgets)

    victim = None
    monkeypatch.setattr(type(llm.engine.drafter), "propose", picky)
    good = [Listener(service, llm.request(p, max_new_tokens=60, ignore_eos=True)) for p in PROMPTS[:3]]
    while not good[1].job.sequence:
        sleep(0.001)
    victim = good[1].job.sequence.session
    assert str(good[1].wait().error) == "a drafter that fails"
    for i in (0, 2):
        assert good[i].wait().error is None
        assert good[i].tokens == alone(llm, PROMPTS[i], max_new_tokens=60)
    service.close()


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_watch_that_fails_ends_its_own_request_alone(drafter, tiny):
    """It is called after all texts of the step have grown."""

    steps = []

    def watch(step):
        steps.append(step)
        if len(steps) == 4:
            raise ValueError("a watch fails")

    with LLM(tiny("llama"), drafter=drafter) as llm:
        expected = [alone(llm, prompt, max_new_tokens=20) for prompt in PROMPTS]
        requests = [llm.request(prompt, max_new_tokens=20, ignore_eos=True) for prompt in PROMPTS]
        requests[1].watch = watch
        updates = {id(request): [] for request in requests}
        ended = threading.Semaphore(0)

        def hear(request):
            def took(update):
                updates[id(request)].append(update)
                if update.finish is not None:
                    ended.release()

            return took

        llm.service.submit_all([Job(request, hear(request)) for request in requests])
        for _ in requests:
            assert ended.acquire(timeout=PATIENCE)
        for request, text in zip(requests, expected, strict=True):
            last = updates[id(request)][-1]
            if request is requests[1]:
                assert "a watch fails" in str(last.error)
            else:
                assert last.error is None
                assert list(last.sequence.tokens) == text
        assert llm.engine._open == []


def test_a_text_stays_kept_if_whoever_would_take_it_over_is_refused(tiny):
    with LLM(tiny("llama"), drafter="auto") as llm:
        prompt, service = [5, 6, 7] * 20, llm.service
        text = [
            *prompt,
            *Listener(service, llm.request(prompt, max_new_tokens=9, ignore_eos=True)).wait().sequence.tokens,
        ]
        for drafters, finish in (("nobody", "failed"), (None, "length")):
            asked = llm.request(text, max_new_tokens=2, ignore_eos=True, drafters=drafters)
            assert Listener(service, asked).wait().finish == finish
        assert service.counts.found_tokens == len(text) - 1
        assert sum(slot is not None for slot in llm.target._slots) == len(service.kept) == 1


def test_a_smaller_priority_goes_first_and_too_many_are_refused(llm):
    service, order = Service(llm.engine, max_waiting=3), []
    with llm.engine.turn():  # nothing begins meanwhile
        busy = []
        for name, priority in (("late", 2), ("early", 0), ("middle", 1)):
            listener = Listener(service, llm.request([1, 2], max_new_tokens=1), priority=priority)
            listener.job.deliver = lambda update, name=name, it=listener: (order.append(name), it.hear(update))
            busy.append(listener)
        with pytest.raises(BusyError, match="3 requests wait already"):
            service.submit(Job(llm.request([1, 2], max_new_tokens=1), print))
    for listener in busy:
        listener.wait()
    assert order == ["early", "middle", "late"]
    assert service.counts.refused == 1
    service.close()
    with pytest.raises(ModelError, match="closing"):
        service.submit(Job(llm.request([1], max_new_tokens=1), print))


def test_a_list_that_is_queued_whole_is_finished_by_a_service_that_closes(llm, monkeypatch):
    """Ends of its answers ask for more of the list, where there is no more: that is no request."""
    service, step = Service(llm.engine), llm.engine.step

    def closing(running, *readings):
        if len(running) == 2:
            service._closing = monotonic() + 100
        step(running, *readings)

    monkeypatch.setattr(llm.engine, "step", closing)
    requests = llm.requests([[1, 2], [3, 4]], max_new_tokens=9, ignore_eos=True)
    assert [len(running.tokens) for running in together(service, requests)] == [9, 9]
    assert service._closing is not None
    service.close()


def test_requests_that_are_queued_together_are_refused_together(llm):
    service = Service(llm.engine, max_waiting=2)
    with pytest.raises(BusyError):
        service.submit_all([Job(llm.request([1, 2], max_new_tokens=1), print) for _ in range(3)])
    assert (service.waiting(), service.counts.refused, service.counts.requests) == (0, 3, 0)


def test_what_can_not_be_answered_is_refused_at_once(llm):
    service = Service(llm.engine)
    with pytest.raises(PromptError, match="empty"):
        service.submit(Job(llm.request([], max_new_tokens=1), print))
    with pytest.raises(OptionError, match="prediction"):
        service.submit(Job(llm.request([1], prediction=[2], max_new_tokens=1), print))


def test_an_answer_whose_time_is_over_ends(llm):
    service = Service(llm.engine)
    request = llm.request([1, 2, 3], max_new_tokens=100_000 // 50, ignore_eos=True)
    listener = Listener(service, request, deadline=monotonic() + 0.05)
    assert listener.wait().finish == "timeout"
    service.close()


def test_the_next_turn_of_a_chat_reads_what_is_new(llm):
    service = Service(llm.engine)
    prompt = [1 + i * i % 60 for i in range(60)]
    first = Listener(service, llm.request(prompt, max_new_tokens=20, ignore_eos=True))
    first.wait()
    longer = [*prompt, *first.tokens, 5, 6, 7]
    expected = alone(llm, longer, max_new_tokens=20)
    other = Listener(service, llm.request(longer, max_new_tokens=20, ignore_eos=True, collection="another"))
    other.wait()
    assert service.counts.found_tokens == 0  # nothing passes between collections, time included
    again = Listener(service, llm.request(longer, max_new_tokens=20, ignore_eos=True))
    again.wait()
    assert again.tokens == other.tokens == expected
    assert service.counts.found_tokens == len(longer) - 4
    service.close()
    assert all(slot is None for slot in llm.target._slots)


@pytest.mark.slow
def test_in_an_event_loop(llm):
    async def main():
        expected = [alone(llm, p, max_new_tokens=20) for p in PROMPTS]
        answers = await asyncio.gather(*(llm.agenerate(p, max_new_tokens=20, ignore_eos=True) for p in PROMPTS * 3))
        assert [a.tokens for a in answers] == expected * 3
        many = await llm.agenerate(PROMPTS[:2], n=2, max_new_tokens=8, ignore_eos=True)
        assert [[r.tokens for r in group] for group in many] == [[e[:8]] * 2 for e in expected[:2]]
        stream = llm.astream(PROMPTS[0], max_new_tokens=20, ignore_eos=True)
        async for _ in stream:
            pass
        assert stream.result.tokens == expected[0]
        with pytest.raises(ValueError, match="a processor that fails"):
            await llm.agenerate(PROMPTS[0], max_new_tokens=20, processors=[Raises()])
        task = asyncio.create_task(llm.agenerate(PROMPTS[0], max_new_tokens=1000, ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1000):
            if not llm.service.running:
                break
            await asyncio.sleep(0.01)
        assert not llm.service.running  # a cancelled task ends its answer

    asyncio.run(main())


def test_a_step_wakes_an_event_loop_once_for_all_who_listen_in_it(llm, monkeypatch):
    put, woken = [], []
    monkeypatch.setattr("slipstream.service.PACE", 1e-6)  # each step is told of
    monkeypatch.setattr(Mailbox, "put", lambda self, *letter: (put.append(self), PUT(self, *letter)))
    monkeypatch.setattr(Mailbox, "wake", lambda self: (woken.append(self), WAKE(self)))

    how = {"max_new_tokens": 20, "ignore_eos": True, "max_draft": 0}

    async def main():
        with llm.engine.turn():  # nobody begins before all are there
            answers = Updates(llm.service, *[llm.request([i] * 3, **how) for i in (5, 6, 7)])
        tokens = {0: [], 1: [], 2: []}
        async for number, update in answers:
            tokens[number] += update.tokens
        assert [tokens[i] for i in range(3)] == [llm.generate([i] * 3, **how).tokens for i in (5, 6, 7)]
        assert len(woken) < len(put) / 2  # after each step, and after the reading of each prompt

    asyncio.run(main())


def test_what_quick_steps_say_comes_together_and_an_end_at_once(llm, monkeypatch):
    """Four steps take as long as nobody need hear of a running answer."""
    now, step = [0.0], llm.engine.step
    monkeypatch.setattr("slipstream.service.PACE", 1.0)
    monkeypatch.setattr("slipstream.service.monotonic", lambda: now[0])

    def timed(*given):
        now[0] += 0.25
        return step(*given)

    monkeypatch.setattr(llm.engine, "step", timed)
    service, how = Service(llm.engine), {"max_new_tokens": 20, "ignore_eos": True, "max_draft": 0}
    with llm.engine.turn():  # nobody begins before both are there
        told, whole = (Listener(service, llm.request(PROMPTS[0], **how), streams=s) for s in (True, False))
    for listener in (told, whole):
        listener.wait()
    assert [len(update.tokens) for update in told.updates] == [1, 4, 4, 4, 4, 3]
    assert [len(update.tokens) for update in whole.updates] == [20]
    assert told.tokens == whole.tokens
    service.close()


def test_whoever_reads_a_first_token_need_not_wait_for_the_next_step(llm, monkeypatch):
    """The service's thread lets go of Python's lock in between, once, and not for answers that are told as a whole."""
    order, step = [], llm.engine.step
    monkeypatch.setattr("slipstream.service.sleep", lambda _: order.append("let go"))
    monkeypatch.setattr(llm.engine, "step", lambda *given: order.append("step") or step(*given))
    service = Service(llm.engine)
    for streams in (True, False):
        listener = Listener(service, llm.request(PROMPTS[0], max_new_tokens=4, ignore_eos=True), streams=streams)
        listener.wait()
        assert ("let go" in order) == streams
        assert not streams or order[0] == "let go"
        order.clear()
    service.close()


def test_what_came_while_nobody_asked_comes_as_one_update(llm):
    async def main():
        request = llm.request(PROMPTS[0], max_new_tokens=20, ignore_eos=True, max_draft=0, logprobs=0)
        answers = Updates(llm.service, request)
        while not answers.jobs[0].over:
            sleep(0.01)  # within the event loop, which hears of nothing meanwhile
        (only,) = [update async for _, update in answers]
        assert only.tokens == alone(llm, PROMPTS[0], max_new_tokens=20)
        assert (only.finish, [each.token for each in only.logprobs]) == ("length", only.tokens)

    asyncio.run(main())


def test_an_event_loop_that_is_closed_ends_its_answers(llm):
    async def begin():
        return Updates(llm.service, llm.request(PROMPTS[0], max_new_tokens=100_000, ignore_eos=True, max_draft=0))

    answers = asyncio.run(begin())
    end = monotonic() + PATIENCE
    while not answers.jobs[0].over:
        assert monotonic() < end, "an answer goes on that nobody hears"
        sleep(0.01)
    assert answers.jobs[0].request.cancelled


def test_it_is_given_back_with_its_llm(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.service.IDLE_SECONDS", 0.05)
    llm = LLM(tiny("llama"), drafter="none")
    assert asyncio.run(llm.agenerate([1, 2], max_new_tokens=3, ignore_eos=True)).tokens
    thread, gone = llm.service._thread, weakref.ref(llm.engine)
    if thread is not None:
        thread.join(PATIENCE)
        assert not thread.is_alive()  # it does not wait for ever
    del llm
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "suffix", "eagle3"])
def test_where_pages_are_scarce_texts_are_put_back_and_nothing_is_lost(drafter, tiny, plainly, monkeypatch):
    """Prompts of several pages that begin alike, more of them than the cache has room for: each answer is the one it
    has alone, pages are shared, and all of them are given back."""
    monkeypatch.setattr("slipstream.targets.captured.arena.ELSEWHERE", 0)
    model, rng = tiny("llama"), random.Random(1)
    target = graphs(model)
    head = {"drafter_path": HEADS["eagle3"].fresh(model)} if drafter == "eagle3" else {}
    engine = Engine(target, make(drafter, target, None, **head), drafter, max_batch=12)
    begin = [rng.randrange(1, 60) for _ in range(200)]
    asked = [
        (begin[: rng.choice([0, 130, 150])] + [rng.randrange(1, 60) for _ in range(rng.randint(10, 50))], way)
        for way in [{}, {"temperature": 0.9}] * 6
    ]

    def request(i):
        tokens, way = asked[i]
        return Request(tokens, 40, Sampling(**way), seed=i, max_draft=3)

    expected = plainly([request(i) for i in range(len(asked))])
    service = Service(engine)
    found = [Listener(service, request(i), priority=i % 2) for i in range(len(asked))]
    assert [listener.wait().finish for listener in found] == ["length"] * len(asked)
    assert [listener.tokens for listener in found] == expected
    counts = service.so_far()
    assert counts.put_back > 0
    assert 0 < target.filled <= 1
    assert counts.found_tokens > 200
    service.close()
    assert target.arena.free == target.arena.pages - 1
    assert engine._open == []


def test_texts_that_stayed_read_make_room_for_whoever_asks_the_engine_itself(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.targets.captured.arena.ELSEWHERE", 0)
    target = graphs(tiny("llama"))
    engine = Engine(target, make("none", target), "none", max_batch=8)
    service = Service(engine)
    for first in range(3):
        Listener(service, Request([first + 1] * (PAGE + 1), 2)).wait()
    long = [Request([first, 6, 7] * (target.context // 3 - 1), 3) for first in range(10, 14)]
    assert len(service.kept) == 3
    assert target.arena.free * PAGE < sum(len(request.tokens) for request in long)
    ended = [sequence for sequence in engine.run(long) if sequence.finish is not None]
    assert [len(sequence.tokens) for sequence in ended] == [3] * 4
    assert len(service.kept) < 3
    service.close()


@pytest.mark.slow
def test_a_list_that_does_not_fit_at_once_is_answered_in_turn(tiny, plainly, monkeypatch):
    monkeypatch.setattr("slipstream.targets.captured.arena.ELSEWHERE", 0)
    llm, rng = LLM(tiny("llama"), drafter="suffix", max_batch=8), random.Random(1)
    llm.target = graphs(llm.model)  # steps and pages as on a GPU
    llm.engine = Engine(llm.target, make("suffix", llm.target), "suffix", max_batch=8)
    prompts = [[rng.randrange(1, 60) for _ in range(rng.randint(100, 200))] for _ in range(6)]
    expected = plainly([Request(prompt, 24, Sampling(temperature=0.9), seed=3) for prompt in prompts])
    found = llm.generate(prompts, max_new_tokens=24, ignore_eos=True, temperature=0.9, seed=3)
    assert [result.tokens for result in found] == expected
    assert llm.service.counts.put_back > 0
    arena = llm.target.arena
    assert arena.free == arena.pages - 1  # nothing of a list stays
    # What can never fit is refused for itself, and nothing of its list is left.
    others = [llm.target.open(), llm.target.open()]
    for other in others:
        arena.reach(other, (arena.pages - 2) // 2 * PAGE)
    with pytest.raises(CacheFullError):
        llm.generate(prompts[:3], max_new_tokens=24, ignore_eos=True)
    for other in others:
        llm.target.close(other)
    assert arena.free == arena.pages - 1
    assert llm.engine._open == []


def test_a_list_is_read_before_its_steps(llm):
    """So that they are of as many sequences as may be, and a long list does not wait in the service."""
    batches, waiting, step, kept = [], [], llm.engine.step, len(llm.service.kept)

    def watched(running):
        batches.append(len(running))
        waiting.append(llm.service.waiting())
        step(running)

    llm.engine.step = watched
    try:
        found = llm.generate([[5, 6, i] for i in range(3, 43)], max_new_tokens=5, ignore_eos=True)
    finally:
        del llm.engine.step
    assert [result.tokens for result in found[:2]] == [alone(llm, [5, 6, i], max_new_tokens=5) for i in (3, 4)]
    assert batches[0] == llm.engine.max_batch
    assert max(waiting) <= 2 * llm.engine.max_batch
    assert len(llm.service.kept) == kept


# ---- what is kept, counted and copied


def test_a_state_that_can_not_be_cut_stays_for_whoever_goes_on_with_all_of_it(tiny):
    prompt = [1 + i * i % 60 for i in range(60)]
    with LLM(tiny("qwen3_next"), drafter="suffix") as llm:
        service = llm.service
        first = Listener(service, llm.request(prompt, max_new_tokens=9, ignore_eos=True))
        first.wait()
        text = [*prompt, *first.tokens]
        for other in ([*prompt[:50], 7, 8, 9], [*text, 5, 6, 7]):
            expected = alone(llm, other, max_new_tokens=9)
            listener = Listener(service, llm.request(other, max_new_tokens=9, ignore_eos=True))
            listener.wait()
            assert listener.tokens == expected
            assert len(service.kept) == 2
            assert service.counts.found_tokens == (0 if len(other) < len(text) else len(text) - 1)


def test_a_prefix_is_counted_once_though_its_request_is_put_back(tiny, monkeypatch):
    """And not at all if its request never began."""
    prompt, full = [1 + i * i % 60 for i in range(60)], [CacheFullError("no pages are left")]
    with LLM(tiny("llama"), drafter="none") as llm:
        long = llm.request(prompt, max_new_tokens=20, ignore_eos=True)
        short = llm.request([*prompt[:40], 7, 8], max_new_tokens=2, ignore_eos=True)
        left = llm.request([*prompt[:40], 9, 8], max_new_tokens=2, ignore_eos=True)
        read_on = llm.engine.read_on

        def failing(readings):
            asked = [reading.sequence.request for reading in readings]
            if left in asked:
                llm.service.cancel(listeners[2].job)
                return
            if short in asked and full:
                raise full.pop()
            read_on(readings)

        monkeypatch.setattr(llm.engine, "read_on", failing)
        with llm.engine.turn():  # nothing begins meanwhile
            listeners = [Listener(llm.service, request) for request in (long, short, left)]
        assert [listener.wait().finish for listener in listeners] == ["length", "length", "cancelled"]
        assert llm.service.counts.put_back == 1
        assert llm.service.counts.found_tokens == 40


def test_an_answer_that_grows_while_it_is_counted_is_counted_as_it_was():
    class Growing(dict):
        def __iter__(self):
            lengths = list(self.keys())
            self[max(lengths) + 1] = 1
            return iter(lengths)

    counts = Counts()
    counts.add(Stats("pld", True, accepted_lengths=Growing({0: 3, 2: 1})))
    assert counts.by_depth == [1, 1]


class Counting:
    """A stateful processor: its n-th call allows the token 10 + n alone."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):  # noqa: ARG002
        self.calls += 1
        scores[:] = -torch.inf
        scores[0, 10 + self.calls] = 0
        return scores


def test_answers_in_an_event_loop_have_processors_of_their_own(llm):
    async def main():
        options = {"max_new_tokens": 5, "ignore_eos": True, "processors": [Counting()]}
        streams = [llm.astream(prompt, **options) for prompt in PROMPTS[:2]]

        async def streamed(stream):
            async for _ in stream:
                pass
            return stream.result

        asked = [llm.agenerate(prompt, **options) for prompt in PROMPTS[:2]]
        return await asyncio.gather(*asked, *map(streamed, streams))

    assert [answer.tokens for answer in asyncio.run(main())] == [[11, 12, 13, 14, 15]] * 4


def test_a_stream_in_an_event_loop_is_answered_once(llm):
    async def main():
        stream, told = llm.astream(PROMPTS[0], max_new_tokens=5, ignore_eos=True), []
        for _ in range(2):
            async for _ in stream:
                pass
            told.append((stream.result.tokens, llm.service.counts.requests))
        assert told[0] == told[1]
        assert len(told[0][0]) == 5

    asyncio.run(main())


def test_whoever_leaves_a_stream_in_an_event_loop_ends_its_answer(babble):
    async def main():
        stream = babble.astream("Say hi.", max_new_tokens=2000, ignore_eos=True)
        async for _ in stream:
            break
        async for _ in stream:
            raise AssertionError("it goes on")
        end = monotonic() + PATIENCE
        while not babble.service.counts.ended:
            assert monotonic() < end, "an answer goes on that nobody hears"
            await asyncio.sleep(0.01)
        assert babble.service.counts.ended == {"cancelled": 1}

    babble.service.counts.ended.clear()
    asyncio.run(main())
