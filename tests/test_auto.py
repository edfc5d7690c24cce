"""auto: its texts are plain decoding's (the laws see to that); here, that it asks, learns and refrains."""

import itertools
import json
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from behind import compare_drafts
from families import graphs
from slipstream import LLM, Store, kept
from slipstream.budget import Budget
from slipstream.budget.costs import TRIAL, Costs
from slipstream.budget.pilot import Pilot, Text
from slipstream.drafters import _capabilities, make
from slipstream.drafters._head import HeadDrafter
from slipstream.drafters.base import Hidden, Proposal, Seen
from slipstream.drafters.none import NoSession
from slipstream.engine import Engine
from slipstream.errors import DrafterError, OptionError
from slipstream.heads import HEADS
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.stopwatch import preparing
from slipstream.targets import open_target
from slipstream.targets.timing import ROWS, costs_of, measure
from slipstream.trace.explain import explain
from slipstream.tree import TokenTree

FREE = {1: 0.010, 64: 0.0101}
DEAR = {1: 0.010, 2: 0.050, 64: 1.0}
REPEATING = [5, 6, 7, 8] * 10


@pytest.fixture
def steps(monkeypatch):
    """steps(curve): from now on a step is taken to cost that much, whatever it takes."""

    def curve(seconds):
        monkeypatch.setattr("slipstream.drafters.auto.costs_of", lambda _: Costs(seconds))
        monkeypatch.setattr("slipstream.budget.costs.Costs.observe", lambda *_: None)
        for place in ("drafters._piloted", "drafters._rehearsal", "engine"):
            monkeypatch.setattr(f"slipstream.{place}.Stopwatch", lambda: SimpleNamespace(seconds=lambda: 0.0))

    return curve


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of its own, in which `auto` keeps what it learns, as it does for users."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr("slipstream.drafters.auto.recall", kept.recall)
    monkeypatch.setattr("slipstream.drafters.auto.remember", kept.remember)
    return tmp_path


def answer(model, **options):
    llm = LLM(model, drafter="auto", drafters="pld,suffix", **options)
    return llm, llm.generate(REPEATING, max_new_tokens=120)


@pytest.mark.slow
def test_rows_that_cost_nothing_are_used(steps, tiny):
    steps(FREE)
    llm, result = answer(tiny("llama"))
    assert result.stats.nodes_verified > 100
    assert set(result.stats.by_source) == {"pld", "suffix"}
    pilot = llm.engine.drafter.pilot
    said = Pilot(Costs(FREE), pilot.drafters).calibration.bins != pilot.calibration.bins
    assert said[:2].any(axis=(1, 2, 3)).all()  # what both said was labelled
    assert pilot.last.rate >= pilot.last.plain


@pytest.mark.slow
def test_rows_that_cost_too_much_are_not(steps, tiny):
    steps(DEAR)
    _, result = answer(tiny("llama"))
    assert result.stats.nodes_verified == 0
    assert result.stats.steps == len(result.tokens)


def test_hidden_states_reach_whoever_wants_them(steps, tiny):
    from slipstream.heads import HEADS

    steps(FREE)
    model = tiny("llama")
    llm = LLM(model, drafter="auto", drafters="suffix")
    part = LLM(model, drafter="medusa", drafter_path=HEADS["medusa"].fresh(model)).engine.drafter
    llm.engine.drafter.parts["medusa"], llm.engine.drafter.layers = part, part.layers
    llm.engine.drafter.pilot = Pilot(Costs(FREE), ["suffix", "medusa"])
    plain = LLM(model, drafter="none").generate(REPEATING, max_new_tokens=60)
    result = llm.generate([REPEATING, [40], REPEATING[:7]], max_new_tokens=60)
    assert result[0].tokens == plain.tokens
    assert result[0].stats.by_source["medusa"]["proposed"] > 0


@pytest.mark.parametrize("reads", [False, True])
def test_a_source_is_shown_what_it_missed_when_it_is_asked(reads, steps, tiny, monkeypatch):
    """All tokens in their order; states of the last step alone, the others' are gone by then."""
    steps(FREE)
    model = tiny("llama")
    llm = LLM(model, drafter="auto", drafters="pld,suffix")
    drafter, shown, turn = llm.engine.drafter, [], iter(range(1000))
    part = drafter.parts["pld"]
    part.layers = drafter.layers = (1,) if reads else ()
    begin = part.begin

    def watched(request):
        session = begin(request)
        observe = session.observe
        monkeypatch.setattr(session, "observe", lambda seen: shown.append(seen) or observe(seen))
        return session

    monkeypatch.setattr(part, "begin", watched)
    pld, suffix = (drafter.pilot.sources()[name] for name in ("pld", "suffix"))
    monkeypatch.setattr(drafter.pilot, "asks", lambda *_: [pld] if next(turn) % 3 == 2 else [suffix])
    result = llm.generate(REPEATING, max_new_tokens=60, ignore_eos=True, max_draft=2)
    text = [*REPEATING, *result.tokens]
    position = 0
    for seen in shown:
        assert seen.position == position
        assert seen.tokens == text[position : position + len(seen.tokens)]
        position += len(seen.tokens)
    assert position > len(text) - 12
    assert len(shown) < result.stats.steps  # not at every step
    states = [bool(seen.hidden) for seen in shown[1:]]
    assert states == ([False, True] * len(states))[: len(states)] if reads else not any(states)
    assert all(len(seen.hidden[1]) == len(seen.tokens) for seen in shown if seen.hidden)


@pytest.mark.slow
def test_what_is_prepared_once_is_nobodys_fault(tiny, monkeypatch):
    """As on a GPU, where the first step and the first draft of a shape are captured."""
    monkeypatch.setattr("slipstream.drafters.auto.costs_of", lambda _: Costs(FREE))
    llm = LLM(tiny("llama"), drafter="auto", drafters="suffix")
    drafter, target = llm.engine.drafter, llm.target
    told, score, part = [], target.score, drafter.parts["suffix"]
    propose, measured = part.propose, drafter.measured

    def prepared(work):
        def first(*given):
            with preparing, preparing:
                sleep(0.1)
            return work(*given)

        return first

    monkeypatch.setattr(target, "score", prepared(score))
    monkeypatch.setattr(part, "propose", prepared(propose))
    monkeypatch.setattr(drafter, "measured", lambda *what: told.append(what[1]) or measured(*what))
    llm.generate(REPEATING, max_new_tokens=20)
    source = drafter.pilot.sources()["suffix"]
    assert source.drafting.times + source.starting.times > TRIAL  # it was asked after the rehearsal
    assert max(source.drafting.seconds, source.starting.seconds) < 0.1
    assert sorted(told)[len(told) // 2] < 0.1  # the machine may be busy now and then


def test_whoever_was_asked_drafts_ahead(steps, tiny, monkeypatch):
    """And nobody else does."""
    steps(FREE)
    model = tiny("llama")
    llm = LLM(model, drafter="auto", drafters="suffix")
    drafter, called = llm.engine.drafter, []
    names = {part: name for name, part in drafter.parts.items()}
    monkeypatch.setattr(_capabilities, "draft_ahead", lambda part, *given: called.append((names[part], *given)))
    sessions = [drafter.begin(Request(tokens=[1, 2, 3], max_new_tokens=5)) for _ in range(3)]
    for asked in ([0, 1, 2], [0, 2], [1], []):
        called.clear()
        for number in asked:
            sessions[number].show("suffix")
        for session in sessions:
            session.keep()
        drafter.draft_ahead(dict(enumerate(sessions)), "the step")
        parts = {number: sessions[number].parts["suffix"] for number in asked}
        assert called == ([("suffix", parts, "the step")] if asked else [])


@pytest.mark.slow
@pytest.mark.parametrize(("accept", "expected"), [("match", True), ("rejection", False)])
def test_a_draft_is_late_only_if_it_could_have_been_started(accept, expected, tiny, monkeypatch):
    """A rule that decides on the host leaves nothing to start."""
    model = tiny("llama")
    llm = LLM(model, drafter="auto", drafters="pld,suffix")
    llm.engine.target = llm.engine.drafter.target = graphs(model)
    seen, pilot = [], llm.engine.drafter.pilot
    asks = pilot.asks
    monkeypatch.setattr(pilot, "asks", lambda *given: (given[0] and seen.append(set(given[-1]))) or asks(*given))
    monkeypatch.setattr("slipstream.drafters.base.DraftSession.unstarted", True, raising=False)
    llm.generate(REPEATING, max_new_tokens=12, accept=accept, temperature=0.8)
    assert not seen[0]  # the prompt's last step started nothing
    assert all(bool(late) == expected for late in seen[1:])


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_drafts_are_judged_by_what_followed_their_roots(captured, steps, tiny, monkeypatch):
    """Before the next draft, or while a target that runs ahead works on the step."""
    steps(FREE)
    model = tiny("llama")
    llm = LLM(model, drafter="auto", drafters="pld,suffix")
    if captured:
        llm.engine.target = llm.engine.drafter.target = graphs(model)
    pilot, told, observed = llm.engine.drafter.pilot, [], []
    learn = pilot.calibration.learn
    monkeypatch.setattr(pilot.calibration, "learn", lambda *what: told.append(what) or learn(*what))
    monkeypatch.setattr(pilot.costs, "observe", lambda *what: observed.append(what))
    result = llm.generate(REPEATING, max_new_tokens=120)
    text = [*REPEATING, *result.tokens]
    runs = {
        tuple(text[i:j]) for i in range(len(REPEATING), len(text)) for j in range(i + 1, min(i + 60, len(text)) + 1)
    }
    assert len(told) > 10
    assert all((int(tree.tokens[0]), *followed) in runs for tree, followed, *_ in told)
    assert len(observed) >= result.stats.steps - 3
    assert {batch for _, batch, _ in observed} == {1}


def test_every_text_is_known_for_itself(steps, tiny, monkeypatch):
    """What a step's tree promised beyond one token, and what came."""
    steps(FREE)
    seen = []
    see = Text.see
    monkeypatch.setattr(Text, "see", lambda text, came: seen.append((text, text.promise, came)) or see(text, came))
    llm, first = answer(tiny("llama"))
    known = len(seen)
    assert sum(came for _, _, came in seen) == first.stats.accepted
    assert any(promised > 1 for _, promised, _ in seen)
    assert all(promised > 0 for _, promised, came in seen if came)
    llm.generate([REPEATING, REPEATING[::-1]], max_new_tokens=40)
    assert len({id(text) for text, *_ in seen[:known]}) == 1
    assert len({id(text) for text, *_ in seen[known:]}) == 2
    assert all(promised > 0 for _, promised, came in seen if came)


def test_a_draft_and_what_is_done_with_it_are_timed_for_all_sequences(steps, tiny, monkeypatch):
    steps(FREE)
    times = itertools.cycle([1.0, 7.0])  # the draft alone, then all of it
    monkeypatch.setattr("slipstream.drafters._piloted.Stopwatch", lambda: SimpleNamespace(seconds=lambda: next(times)))
    llm = LLM(tiny("llama"), drafter="auto", drafters="suffix")
    llm.generate([REPEATING, [9, *REPEATING], [*REPEATING, 9]], max_new_tokens=5)
    pilot = llm.engine.drafter.pilot
    assert pilot.sources(3)["suffix"].drafting.seconds == 1.0
    assert pilot.handling[4].seconds == pytest.approx(6.0, abs=0.5)  # and what the host does behind the step


def test_costs_are_measured_once(tiny, cache, monkeypatch):
    target = open_target(tiny("llama"))
    first = costs_of(target)
    (file,) = (cache / "costs").iterdir()
    assert first.seconds(1) == json.loads(file.read_text())["known"]["1"] > 0
    with monkeypatch.context() as once:
        once.setattr("slipstream.targets.timing.measure", lambda *_, **__: pytest.fail("measured again"))
        assert costs_of(target).seconds(8) == first.seconds(8)
    file.write_text("{")  # a damaged file costs a measurement
    assert costs_of(target).seconds(1) > 0
    assert json.loads(file.read_text())["known"]["1"] > 0


def test_the_next_process_begins_with_what_was_learnt(steps, tiny, cache):
    steps(FREE)
    first, _ = answer(tiny("llama"))
    learnt = first.engine.drafter.pilot
    (file,) = (cache / "auto").iterdir()
    told = json.loads(file.read_text())["known"]
    fresh = Pilot(Costs(FREE), learnt.drafters)
    second = LLM(tiny("llama"), drafter="auto", drafters="pld,suffix").engine.drafter.pilot
    assert second.calibration.bins == pytest.approx(np.array([told["calibration"][name] for name in second.drafters]))
    assert not np.allclose(second.calibration.bins, fresh.calibration.bins)
    assert second.sources()["suffix"].gains == learnt.sources()["suffix"].gains != fresh.sources()["suffix"].gains
    others = LLM(tiny("llama"), drafter="auto", drafters="suffix").engine.drafter.pilot  # it knows other drafters
    assert np.array_equal(others.calibration.bins, Pilot(Costs(FREE), others.drafters).calibration.bins)


def test_what_was_learnt_is_kept_more_rarely_the_more_it_is(steps, tiny, monkeypatch):
    steps(FREE)
    llm, told, times = LLM(tiny("llama"), drafter="auto", drafters="pld"), [], []
    monkeypatch.setattr("slipstream.drafters.auto.remember", lambda *what: told.append(what))
    for _ in range(9):
        llm.generate(REPEATING, max_new_tokens=2)
        times.append(len(told))
    assert times == [1, 2, 2, 3, 3, 3, 3, 4, 4]  # after the first answer, the second, the fourth, the eighth


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["{", "", "{}", "[]", "null", "7", '{"key": "another", "known": 1}'])
def test_a_damaged_cache_is_harmless(harm, steps, tiny, cache):
    steps(FREE)
    _, before = answer(tiny("llama"))
    (file,) = (cache / "auto").iterdir()
    file.write_text(harm)
    _, after = answer(tiny("llama"))
    assert after.tokens == before.tokens
    assert json.loads(file.read_text())["known"]["calibration"]  # it is kept anew


def test_a_cache_that_cannot_be_written_to_is_harmless(steps, tiny, cache, monkeypatch):
    steps(FREE)
    (cache / "file").write_text("not a folder")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache / "file"))
    _, result = answer(tiny("llama"))
    assert result.stats.nodes_verified > 100
    assert costs_of(open_target(tiny("llama"))).seconds(1) > 0


@pytest.mark.slow
def test_an_investor_is_asked_where_rows_cost_little_and_nowhere_else(steps, tiny):
    """lookahead finds nothing before its window is full; what that takes is its to earn."""
    plain = LLM(tiny("llama"), drafter="none").generate(REPEATING, max_new_tokens=120, ignore_eos=True)
    for curve, pays in ((FREE, True), (DEAR, False)):
        steps(curve)
        llm = LLM(tiny("llama"), drafter="auto", drafters="lookahead")
        for _ in range(3):
            result = llm.generate(REPEATING, max_new_tokens=120, ignore_eos=True, max_draft=55)
            assert result.tokens == plain.tokens
        source = llm.engine.drafter.pilot.sources()["lookahead"]
        assert source.gain() > 0 if pays else source.gain() == 0
        assert source.drafting.times > 100 if pays else source.drafting.times == TRIAL  # in rehearsal
        assert bool(result.stats.by_source.get("lookahead", {}).get("accepted")) == pays


def test_it_does_not_ask_itself(tiny):
    with pytest.raises(OptionError, match="auto asks others"):
        LLM(tiny("llama"), drafter="auto", drafters="pld, auto")


def test_a_request_chooses_among_the_drafters(steps, tiny):
    steps(FREE)
    llm = LLM(tiny("llama"), drafter="auto", drafters="pld,suffix")
    plain = llm.generate(REPEATING, max_new_tokens=60)
    for given in ("pld", ["pld"]):
        result = llm.generate(REPEATING, max_new_tokens=60, drafters=given)
        assert set(result.stats.by_source) == {"pld"}
        assert result.tokens == plain.tokens
    assert llm.generate(REPEATING, max_new_tokens=20, drafters=[]).stats.nodes_verified == 0
    with pytest.raises(
        OptionError, match=r"drafters names nobody, none: this model's auto asks pld, suffix, prediction"
    ):
        llm.generate(REPEATING, drafters="none, nobody")


def test_requests_of_a_batch_choose_each_for_itself(steps, tiny):
    """Also where drafts of the first could have been started behind its last step, which the others missed."""
    steps(FREE)
    drafter = LLM(tiny("llama"), drafter="auto", drafters="pld,suffix").engine.drafter
    sessions = [drafter.begin(Request(REPEATING, 20, drafters=(name,))) for name in ("pld", "suffix")]
    for session in sessions:
        session.observe(Seen(REPEATING, 0))
    drafter._ahead = {sessions[0]}
    found = drafter.propose(sessions, [5, 5], [Budget(8, 8)] * 2)
    assert [proposal.tree.sources for proposal in found] == [("pld",), ("suffix",)]


@pytest.mark.slow
def test_a_store_with_vectors_is_searched_by_them_too(tiny):
    from trials import embedded_answers, store_of_answers

    model = tiny("llama")
    parts = {
        name: list(LLM(model, drafter="auto", store=store).engine.drafter.parts)
        for name, store in {"none": "", "text": store_of_answers(model), "vectors": embedded_answers(model)}.items()
    }
    assert parts["none"] == ["suffix", "lookahead", "prediction"]
    assert parts["text"] == ["suffix", "lookahead", "rest", "prediction"]
    assert parts["vectors"] == ["suffix", "lookahead", "rest", "dresd", "prediction"]
    # Nobody asked for another model's vectors by name, so they are left out; by name they are refused.
    other = tiny("qwen2")
    assert "dresd" not in LLM(other, drafter="auto", store=embedded_answers(model)).engine.drafter.parts
    with pytest.raises(DrafterError):
        LLM(other, drafter="auto", drafters="dresd", store=embedded_answers(model))


def test_a_store_is_searched_beside_the_text_and_learns_once(steps, tiny, tmp_path):
    """So that a large store, which takes its time, does not keep anybody from looking into the text."""
    steps(FREE)
    model = tiny("llama")
    for given, searching in ({}, "rest"), ({"drafters": "suffix, rest"}, "rest"), ({"drafters": "suffix"}, "suffix"):
        folder = str(tmp_path / f"{searching}{len(given)}")
        llm = LLM(model, drafter="auto", store=folder, learn=True, **given)
        parts = llm.engine.drafter.parts
        assert [name for name in ("suffix", "rest") if name in parts and parts[name].store is not None] == [searching]
        first = llm.generate([40, 41], max_new_tokens=24)
        with Store.open(folder) as store:
            assert [document.tolist() for document in store.documents()] == [first.tokens]
        again = llm.generate([40, 41], max_new_tokens=24)
        assert again.tokens == first.tokens
        assert again.stats.by_source[searching]["accepted"] > 0


def test_what_was_decided_is_told(steps, tiny):
    steps(FREE)
    llm = LLM(tiny("llama"), drafter="auto", drafters="pld")
    result = llm.generate(REPEATING, max_new_tokens=40, trace=True, ignore_eos=True)
    first, *others = [line for line in result.trace if "step" in line]
    assert first["choice"] is None  # the prompt's own
    asked = [line for line in others if line["choice"]["asked"]]
    assert len(asked) > 4
    for line in asked:
        choice = line["choice"]
        assert choice["asked"] == ["pld"]
        assert choice["nodes"] == len(line["nodes"]) - 1
        assert choice["tokens"] >= 1
        assert choice["plain"] == pytest.approx(1 / FREE[1])
    told = list(explain(result.trace))
    assert told[0] == "step 0: the prompt; came 1"
    assert all("asked pld; verified" in told[line["step"]] for line in asked)
    assert told[-1].endswith("asked nobody: no draft is due; came 1")  # the last token needs none
    kept = next(line for line in asked if len(line["path"]) > 2)
    assert told[kept["step"]].endswith(f"came {len(kept['path'])} ({len(kept['path']) - 1} by pld)")


def test_why_nothing_was_verified_is_told(steps, tiny, monkeypatch):
    steps(FREE)
    llm = LLM(tiny("llama"), drafter="auto", drafters="pld")
    with monkeypatch.context() as unlucky:
        unlucky.setattr(Text, "share", 1e-6)  # nothing came of what was promised
        result = llm.generate(REPEATING, max_new_tokens=4, trace=True, ignore_eos=True)
    assert list(explain(result.trace))[1] == (
        "step 1: asked pld; verified nothing: too little came of what this text's drafts promised; came 1"
    )
    monkeypatch.setattr("slipstream.budget.pilot.Source.gain", lambda _: -0.1)
    pilot = llm.engine.drafter.pilot
    for source in pilot.sources().values():
        source.due = [pilot.steps + 2] * len(source.due)
    result = llm.generate(REPEATING, max_new_tokens=4, trace=True, ignore_eos=True)
    assert "asked nobody: no draft is due; came 1" in list(explain(result.trace))[1]
    plain = LLM(tiny("llama"), drafter="pld").generate(REPEATING, max_new_tokens=4, trace=True, ignore_eos=True)
    assert "choice" in plain.trace[2]
    assert plain.trace[2]["choice"] is None
    assert "drafted; came" in list(explain(plain.trace))[1]


@pytest.mark.slow
def test_chains_are_chosen_where_trees_cannot_be_verified(steps, tiny):
    steps(FREE)
    model = tiny("mamba")
    plain = LLM(model, drafter="none").generate(REPEATING, max_new_tokens=60, ignore_eos=True)
    llm = LLM(model, drafter="auto", drafters="pld,suffix")
    assert not llm.engine.drafter.pilot.trees
    result = llm.generate(REPEATING, max_new_tokens=60, ignore_eos=True, trace=True)
    assert result.tokens == plain.tokens
    for line in result.trace[2:-1]:  # what was planned is what was verified
        assert line["choice"]["nodes"] == len(line["nodes"]) - 1


@pytest.mark.slow
def test_a_prediction_is_believed_from_the_start(steps, tiny):
    steps({1: 1.0, 16: 1.1, 64: 1.5})
    options = {"max_new_tokens": 80, "ignore_eos": True}
    plain = LLM(tiny("llama"), drafter="none").generate(REPEATING, **options)
    llm = LLM(tiny("llama"), drafter="auto", drafters="pld")
    for _ in range(2):  # and again, whatever the last one was worth
        result = llm.generate(REPEATING, prediction=plain.tokens, trace=True, **options)
        assert result.trace[2]["choice"]["nodes"] > 20
        assert result.stats.steps <= 6
        llm.generate(REPEATING, prediction=plain.tokens[::-1], **options)


def test_what_interrupts_a_measurement_is_not_what_a_step_costs(tiny, monkeypatch):
    """The first of each number of rows loads code; of the others the least counts."""
    calls = iter(range(1000))
    monkeypatch.setattr(
        "slipstream.targets.timing._seconds",
        lambda _, __, tree: len(tree) * (1 if next(calls) // len(ROWS) == 2 else 9),
    )
    assert measure(open_target(tiny("llama")), [1, 2, 3], at_most=60) == {n: n for n in ROWS}


def test_what_is_captured_or_compiled_is_not_what_a_step_costs(tiny, monkeypatch):
    """It may take all the time there is for measuring: steps are timed all the same."""
    target, clock = open_target(tiny("llama")), Clock()
    score, prepared = target.score, set()
    monkeypatch.setattr("slipstream.stopwatch.perf_counter", clock)

    def slow_at_first(slots, trees, want):
        if len(trees[0]) not in prepared:
            prepared.add(len(trees[0]))
            with preparing:
                clock.now += 100.0
        clock.now += len(trees[0]) / 1000
        return score(slots, trees, want)

    monkeypatch.setattr(target, "score", slow_at_first)
    assert measure(target, [1, 2, 3], at_most=60) == pytest.approx({n: n / 1000 for n in ROWS})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("family", ["llama", "gpt_neo"])
def test_costs_can_be_measured_of_any_target(family, tiny):
    """Behind the same text each time: a chain that is scored again and again would outgrow the context."""
    assert set(measure(open_target(tiny(family)), [1, 2, 3] * 20, at_most=60)) == set(ROWS)


def test_a_large_model_is_measured_for_few_numbers_of_rows(tiny):
    """As long as users will wait, and one row among them; what lies between follows from these."""
    assert set(measure(open_target(tiny("llama")), [1, 2, 3], at_most=0)) == {1, 16}


@pytest.mark.slow
def test_where_nobody_gains_steps_are_plain_and_nobody_reads_their_states(steps, tiny, monkeypatch):
    """After its trial a source waits: until it is due, `auto` does nothing, and wants no states but the last step's."""
    steps(DEAR)
    for place in ("drafters._piloted", "drafters._rehearsal"):  # a draft takes a tenth of a step
        monkeypatch.setattr(f"slipstream.{place}.Stopwatch", lambda: SimpleNamespace(seconds=lambda: 1e-3))
    llm = LLM(tiny("llama"), drafter="auto", drafters="suffix")
    drafter, wanted, asked = llm.engine.drafter, [], []
    drafter.layers = drafter.parts["suffix"].layers = (1,)
    score, asks = llm.target.score, drafter.pilot.asks

    def scored(slots, trees, want):
        wanted.append(want.layers)
        return score(slots, trees, want)

    def counted(*given):
        found = list(asks(*given))
        asked.append((len(wanted), len(found)))
        return found

    monkeypatch.setattr(llm.target, "score", scored)
    monkeypatch.setattr(drafter.pilot, "asks", counted)
    plain = LLM(tiny("llama"), drafter="none").generate(REPEATING, max_new_tokens=90, ignore_eos=True)
    assert llm.generate(REPEATING, max_new_tokens=90, ignore_eos=True).tokens == plain.tokens
    assert len(asked) < len(wanted) / 2  # most steps asked nothing at all
    assert () in wanted
    trials = [step for step, sources in asked[1:] if sources]
    assert trials
    assert all(wanted[step - 1] == (1,) for step in trials)  # there to be shown


@pytest.mark.slow
def test_a_rest_goes_on_as_texts_come_and_go(steps, tiny, monkeypatch):
    """Whether anybody is asked is decided for a batch, not for its texts. A prediction is asked at once."""
    steps(DEAR)
    for place in ("drafters._piloted", "drafters._rehearsal"):  # a draft takes about as long as a step of four texts
        monkeypatch.setattr(f"slipstream.{place}.Stopwatch", lambda: SimpleNamespace(seconds=lambda: 0.05))
    llm, asked = LLM(tiny("llama"), drafter="auto", drafters="suffix", max_batch=4), []
    drafter = llm.engine.drafter
    asks = drafter.pilot.asks

    def counted(names, *rest):
        asked.append(sorted(names))
        return asks(names, *rest)

    monkeypatch.setattr(drafter.pilot, "asks", counted)
    plain = LLM(tiny("llama"), drafter="none").generate(REPEATING, max_new_tokens=60, ignore_eos=True).tokens
    lengths = [10 + 2 * i for i in range(24)]

    def answered(**options):
        requests = [llm.request(REPEATING, max_new_tokens=n, ignore_eos=True, **options) for n in lengths]
        ended = [sequence for sequence in llm.engine.run(requests) if sequence.finish]
        assert sorted(sequence.tokens for sequence in ended) == [plain[:n] for n in lengths]

    answered()  # trials
    asked.clear()
    answered()
    assert len(asked) < len(lengths) / 2
    asked.clear()
    answered(prediction=plain)
    assert asked[0] == ["prediction", "suffix"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "redrafter", "medusa"])
def test_heads_that_draft_behind_steps_are_known_before_the_first_answer(kind, tiny, monkeypatch):
    """What a draft takes that was started behind its step is seen in the rehearsal, by drafts that were started so."""
    model = tiny("llama")
    target, head = graphs(model), HEADS[kind].fresh(model)
    make_head, began, started = HeadDrafter.__init__, HeadDrafter._started, []

    def fixed(self, *given):
        make_head(self, *given)
        self.fixed = True  # as on a GPU

    def watched(self, *given):
        nodes = began(self, *given)
        started.extend([nodes] if nodes is not None else [])
        return nodes

    monkeypatch.setattr(HeadDrafter, "__init__", fixed)
    monkeypatch.setattr(HeadDrafter, "_started", watched)
    drafter = make("auto", target, None, heads=[head])
    (source,) = [s for s in drafter.pilot.sources().values() if s.head]
    assert source.known
    assert len(started) >= TRIAL


def test_a_head_begins_when_there_are_states_or_when_it_is_asked(tiny):
    """In large batches prompts are read without states, and most texts never ask a head."""
    model = tiny("llama")
    drafter = make("auto", graphs(model), None, heads=[HEADS["redrafter"].fresh(model)])
    (head,), (layer,) = drafter.readers, drafter.parts["redrafter"].layers
    text = [5, 6, 7]
    with_states, without = (drafter.begin(Request(text, 8)) for _ in range(2))
    assert not with_states.parts
    with_states.observe(Seen(text, 0, Hidden({layer: torch.zeros(3, model.config.hidden_size)})))
    without.observe(Seen(text, 0))
    assert (set(with_states.parts), set(without.parts)) == ({head}, set())
    assert without.show(head)
    assert without.parts[head].read == len(text)


@pytest.mark.parametrize("kind", ["eagle3", "redrafter"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}], ids=["greedy", "drawn"])
def test_heads_draft_behind_steps_of_several_requests(kind, options, steps, tiny, monkeypatch):
    """For all that asked them, also when some have ended: what was started is what would be drafted afterwards."""
    steps(FREE)
    model = tiny("llama")
    target, head = graphs(model), HEADS[kind].fresh(model)
    make_head, sizes = HeadDrafter.__init__, compare_drafts(monkeypatch)

    def fixed(self, *given):
        make_head(self, *given)
        self.fixed = True  # as on a GPU

    monkeypatch.setattr(HeadDrafter, "__init__", fixed)

    def texts(drafter):
        requests = [
            Request(REPEATING[i:], length, Sampling(**options), seed=i, max_draft=7)
            for i, length in enumerate((40, 12, 25))
        ]
        ended = {id(s.request): s.tokens for s in Engine(target, drafter, max_batch=3).run(requests)}
        return [ended[id(request)] for request in requests]

    drafter = make("auto", target, None, heads=[head])
    rehearsed = len(sizes)
    assert texts(drafter) == texts(make("none", target, None))
    assert set(sizes[rehearsed:]) >= {2, 3}


class Late(NoSession):
    """Says nothing before a place, and from there on what follows."""

    def __init__(self, text, begins, made):
        self.text, self.begins, self.made, self.known = text, begins, made, 0

    def observe(self, seen):
        assert seen.position == self.known
        self.known += len(seen.tokens)

    def propose(self, root, budget):
        assert root == self.text[self.known]
        place = self.known + 1  # of the first token behind the root
        self.made.append(place)
        following = self.text[place : place + min(4, budget.nodes)] if place >= self.begins else []
        return Proposal(TokenTree.chain(root, following, source="suffix", raw=[0.9] * len(following)))


@pytest.mark.parametrize("ahead", [True, False])
def test_futile_drafts_are_made_beside_plain_steps_until_one_would_pay(ahead, tiny, monkeypatch):
    """Where plain steps are begun ahead. Elsewhere nothing is saved by that. A draft takes a third of a plain step, and
    what the host does with it another."""
    monkeypatch.setattr("slipstream.drafters.auto.costs_of", lambda _: Costs({1: 1.0, 64: 1.0}))
    monkeypatch.setattr("slipstream.budget.costs.Costs.observe", lambda *_: None)
    for place in ("drafters._piloted", "drafters._rehearsal"):
        monkeypatch.setattr(f"slipstream.{place}.Stopwatch", lambda: SimpleNamespace(seconds=lambda: 1 / 3))
    target, prompt, begins = graphs(tiny("llama")), [5, 9, 30, 2], 60
    *_, plain = Engine(target, make("none", target, None)).run([Request(prompt, 120)])
    drafter, made, waited = make("auto", target, None, drafters="suffix"), [], []
    text = prompt + plain.tokens
    monkeypatch.setattr(drafter.parts["suffix"], "begin", lambda _: Late(text, begins, made))
    if not ahead:
        monkeypatch.setattr(target, "chooses", lambda _: False)

    def watch(step):
        if step.choice is not None and step.choice.asked:
            waited.append(made[-1])

    *_, sequence = Engine(target, drafter).run([Request(prompt, 120, watch=watch)])
    assert sequence.tokens == plain.tokens
    if ahead:
        assert len([place for place in made if place < begins]) > begins - len(prompt) - 5  # at nearly every step
        assert len([place for place in waited if place < begins]) < 8  # but few waited for it
    right = [place for place in waited if place >= begins]
    assert len(right) > 5
    assert len(right) < (len(text) - begins) / 4  # of each come several tokens
