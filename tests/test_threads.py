"""One LLM, many threads: every answer is what it would have been alone, and nothing is left behind."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from families import graphs
from patience import PATIENCE
from slipstream import LLM, Proposal, TokenTree
from slipstream.drafters._joint import JointDrafter
from slipstream.drafters.base import Drafter, DraftSession
from slipstream.engine import Engine
from slipstream.errors import OptionError
from slipstream.heads import HEADS
from slipstream.sequence import Kept
from slipstream.service import Service
from slipstream.turns import Turns

THREADS, EACH = 8, 6  # `bench/fuzz.py --threads` asks thousands


class LoneModel:
    """Somebody to take turns at."""


def some_request(rng):
    """A way to ask, a prompt or several, and options."""
    prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 30))]
    prompt += prompt[: rng.randrange(8)]  # something to find again
    options = {"max_new_tokens": rng.randrange(1, 12), "ignore_eos": True, "seed": rng.randrange(1000)}
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.5, 1.0]), "top_k": rng.choice([0, 5]), "repetition_penalty": 1.2}
    way = rng.choice(["generate", "stream", "abandon", "batch", "several"])
    if way == "batch":
        prompt = [prompt, prompt[::-1], prompt[:2]]
    return way, prompt, options


def answer(llm, way, prompt, options):
    if way == "generate":
        return llm.generate(prompt, **options).tokens
    if way == "batch":
        return [result.tokens for result in llm.generate(prompt, **options)]
    if way == "several":
        return [result.tokens for result in llm.generate(prompt, n=2, **options)]
    tokens, steps = [], llm.engine.run([llm.request(prompt, **options)])
    for sequence in steps:
        tokens = list(sequence.tokens)
        if way == "abandon" and len(tokens) >= 4:
            break
    steps.close()
    return tokens[:4] if way == "abandon" else tokens


def made(drafter, fixed, tiny):
    model = tiny("llama")
    options = {"drafter_path": HEADS["eagle3"].fresh(model)} if drafter == "eagle3" else {}
    llm = LLM(model, drafter=drafter, **options)
    if fixed:  # steps as on a GPU
        from slipstream import drafters

        llm.target = graphs(model)
        llm.engine = Engine(llm.target, drafters.make(drafter, llm.target, **options), drafter)
    return llm


@pytest.fixture(scope="module")
def asked():
    return [some_request(random.Random(seed)) for seed in range(THREADS * EACH)]


@pytest.fixture(scope="module")
def alone(asked, tiny):
    """What each gets from plain decoding, one after the other: it depends on no drafter."""
    llm = made("none", False, tiny)
    return [answer(llm, *given) for given in asked]


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["ordinary", "fixed"])
@pytest.mark.parametrize("drafter", ["none", "suffix", "eagle3", "auto"])
def test_threads_get_the_answers_that_one_after_the_other_gets(drafter, fixed, tiny, asked, alone):
    llm = made(drafter, fixed, tiny)
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(lambda given: answer(llm, *given), asked))
    assert together == alone
    assert [answer(llm, *given) for given in asked[:EACH]] == alone[:EACH]  # nothing is left that disturbs
    assert llm.engine._open == []
    llm.service.close()  # which keeps texts read
    rows = llm.target.arena._rows if fixed else llm.target._slots
    assert all(slot is None for slot in rows)


@pytest.mark.slow
def test_threads_that_ask_at_the_same_time_are_answered_in_one_batch(tiny):
    llm, batches = LLM(tiny("llama"), drafter="none", max_batch=8), []
    step = llm.engine.step
    llm.engine.step = lambda running: batches.append(len(running)) or step(running)
    prompts = [[5 + i, 6, 7] for i in range(12)]
    alone = [llm.generate(p, max_new_tokens=60, ignore_eos=True).tokens for p in prompts]
    assert max(batches) == 1
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda p: llm.generate(p, max_new_tokens=60, ignore_eos=True).tokens, prompts))
    assert together == alone
    assert max(batches) > 2


def test_a_function_that_asks_within_a_step_gets_its_answer(tiny):
    """Though others are being answered by then, for whom that step would have to end first."""
    llm, asked = LLM(tiny("llama"), drafter="none"), []

    def ask(_, scores):
        if not asked:
            asked.append(None)
            asked[0] = llm.generate([9, 10, 11], max_new_tokens=4).tokens
        return scores

    expected = llm.generate([9, 10, 11], max_new_tokens=4).tokens
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(llm.generate, [5 + i, 6], max_new_tokens=40, ignore_eos=True) for i in range(2)]
        mine = pool.submit(llm.generate, [5, 6, 7], max_new_tokens=6, processors=[ask])
        assert mine.result(PATIENCE).tokens
        assert all(other.result(PATIENCE).tokens for other in others)
    assert asked == [expected]


@pytest.mark.slow
def test_streams_of_one_thread_interleave(tiny):
    llm = made("eagle3", True, tiny)
    asked = [some_request(random.Random(seed)) for seed in range(6)]
    runs = [llm.engine.run([llm.request(p, **o)]) for way, p, o in asked if way != "batch"]
    told = [[] for _ in runs]
    for i in [*range(len(runs))] * 30:
        for sequence in runs[i]:
            told[i] = list(sequence.tokens)
            break
    expected = [answer(llm, "generate", p, o) for way, p, o in asked if way != "batch"]
    assert told == expected


def test_a_stream_dropped_within_another_streams_step_is_retired_after_it(tiny):
    """As Python's collector may do it: the turn is taken, and nobody may wait for it."""
    llm = LLM(tiny("llama"), drafter="pld")
    other = llm.engine.run([llm.request([5, 6, 7], max_new_tokens=9)])
    next(other)
    open_then = []

    def drop(_, scores):
        other.close()
        open_then.append(len(llm.engine._open))
        return scores

    alone = llm.generate([5, 6, 7, 5, 6], max_new_tokens=6).tokens
    assert llm.generate([5, 6, 7, 5, 6], max_new_tokens=6, processors=[drop]).tokens == alone
    assert open_then[0] == 1  # only in its own turn could it have been retired
    assert llm.engine._open == []
    assert all(slot is None for slot in llm.target._slots)


def test_whoever_comes_next_retires_a_chat_that_was_left_while_others_answered(tiny):
    """Its text is kept by then, so that closing the chat frees it."""
    llm, kept, holding, go = LLM(tiny("llama"), drafter="pld"), Kept(), threading.Event(), threading.Event()
    run = llm.engine.run([llm.request([5, 6, 7] * 8, max_new_tokens=30, ignore_eos=True)], kept)
    next(run)

    def hold():
        with llm.engine.turn():
            holding.set()
            assert go.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(PATIENCE)
    run.close()
    closing = threading.Thread(target=llm.engine.forget, args=(kept,))
    closing.start()
    while not llm.engine._turns._waiting:
        time.sleep(0.001)
    go.set()
    holder.join(PATIENCE)
    closing.join(PATIENCE)
    assert llm.engine._open == []
    assert all(slot is None for slot in llm.target._slots)


def test_services_of_one_engine_make_room_for_each_other(tiny):
    """As a server's own, and that of the LLM it serves."""
    with LLM(tiny("llama"), drafter="none") as llm:
        one = Service(llm.engine)
        two = llm.service
        freed = []
        one._evict = lambda: freed.append("one") or True
        two._evict = lambda: freed.append("two") or False
        assert llm.engine.evict()
        assert freed == ["two", "one"]


def test_threads_that_ask_at_once_make_one_service(tiny, monkeypatch):
    class Slow(Service):
        def __init__(self, *given):
            time.sleep(0.05)
            super().__init__(*given)

    monkeypatch.setattr("slipstream.llm.Service", Slow)
    with LLM(tiny("llama"), drafter="none") as llm, ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: llm.service, range(4)))) == 1


def test_turns_come_in_the_order_of_asking():
    turns, order = Turns(), []

    def take(name):
        with turns:
            order.append(name)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(5)]
    with turns:
        for i, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= i:
                time.sleep(0.001)
        with turns:  # whoever has it may enter again
            assert not turns.attempt()
    with turns:
        order.append("last")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "last"]
    assert turns.attempt()


def test_whoever_uses_one_model_takes_turns_with_the_others(tiny):
    model = tiny("llama")
    assert LLM(model, drafter="none").engine._turns is LLM(model, drafter="pld").engine._turns
    assert Turns.of(LoneModel) is not Turns.of(model)


# ---- drafters that fail


class FailsAtTheEnd(Drafter):
    def begin(self, request):  # noqa: ARG002
        return Silent()

    def ended(self, request, tokens):  # noqa: ARG002
        raise OSError(28, "No space left on device")


class Silent(DraftSession):
    def propose(self, root, budget):  # noqa: ARG002
        return Proposal(TokenTree.root(root))


def test_a_drafter_that_fails_after_the_answer_costs_nothing_but_a_warning(tiny, caplog):
    llm = LLM(tiny("llama"), drafter="none")
    plain = llm.generate([5, 6, 7], max_new_tokens=6).tokens
    llm.engine.drafter = FailsAtTheEnd(llm.target, None, None)
    results = llm.generate([[5, 6, 7], [5, 6]], max_new_tokens=6)
    assert results[0].tokens == plain
    assert "No space left" in results[1].stats.warnings[0]
    assert "No space left" in results[1].as_dict()["stats"]["warnings"][0]
    assert "the drafter failed after it" in caplog.text
    assert all(slot is None for slot in llm.target._slots)


def test_a_drafter_that_fails_when_a_kept_text_goes_costs_nothing_but_a_warning(tiny, caplog):
    llm, kept = LLM(tiny("llama"), drafter="none"), Kept()
    for _ in llm.engine.run([llm.request([5, 6, 7], max_new_tokens=3)], kept):
        pass
    kept.session.close = mock.Mock(side_effect=OSError("No space left"))
    llm.engine.forget(kept)
    assert "No space left" in caplog.text
    assert all(slot is None for slot in llm.target._slots)


def test_a_drafter_that_fails_at_the_beginning_leaves_nothing_behind(tiny):
    llm = LLM(tiny("llama"), drafter="auto")
    with pytest.raises(OptionError):
        llm.generate([5, 6, 7], drafters="nobody")
    assert llm.engine._open == []
    assert all(slot is None for slot in llm.target._slots)


class Given(FailsAtTheEnd):
    """Its sessions record how they were given back, some of them by failing."""

    def __init__(self, target, done, fails=()):
        super().__init__(target, None, None)
        self.done, self.fails = done, fails

    def begin(self, request):  # noqa: ARG002
        return GivenSession(self)

    def ended(self, request, tokens):
        self.done.append("ended")
        if "ended" in self.fails:
            super().ended(request, tokens)


class GivenSession(Silent):
    def __init__(self, drafter):
        self.drafter = drafter

    def close(self):
        self.drafter.done.append("closed")
        if "closed" in self.drafter.fails:
            raise OSError("not closed")

    def pause(self):
        self.drafter.done.append("paused")


@pytest.mark.parametrize("stays", [False, True])
def test_the_session_is_given_back_though_the_drafter_fails_after_the_answer(stays, tiny):
    llm, done = LLM(tiny("llama"), drafter="none"), []
    llm.engine.drafter = Given(llm.target, done, fails=["ended"])
    *_, last = llm.engine.run([llm.request([5, 6, 7], max_new_tokens=3)], Kept() if stays else None)
    assert done == ["ended", "paused" if stays else "closed"]
    assert "No space left" in last.stats.warnings[0]


def test_every_part_of_a_joint_drafter_has_its_turn_after_the_answer(tiny):
    """Whichever of them fails; and the first error is told."""
    llm, done = LLM(tiny("llama"), drafter="none"), {"first": [], "second": []}

    class Both(JointDrafter):
        def make_parts(self):
            return {name: Given(llm.target, what, ["ended", "closed"]) for name, what in done.items()}

        def learn(self, *_):
            return False

        def begin(self, request):
            session = super().begin(request)
            session.label = mock.Mock(side_effect=ValueError("not labelled"))
            return session

        def propose(self, sessions, roots, budgets):  # noqa: ARG002
            return [Proposal(TokenTree.root(root)) for root in roots]

    llm.engine.drafter = Both(llm.target, None, None)
    result = llm.generate([5, 6, 7], max_new_tokens=3)
    assert done == {"first": ["ended", "closed"], "second": ["ended", "closed"]}
    assert ["No space left" in result.stats.warnings[0], "not labelled" in result.stats.warnings[1]] == [True, True]
