"""The estimate: what fits into the minutes is known before they are spent, from costs, without a clock."""

import pytest
import torch

from families import tiny_model
from slipstream import LLM, OptionError
from slipstream.training import loop
from slipstream.training import tune as module
from slipstream.training.estimate import (
    LENGTHS,
    ON_GPU,
    Costs,
    Estimate,
    Given,
    check,
    ending,
    estimate,
    expected_length,
    measure_answers,
    measure_steps,
)
from slipstream.training.log import read
from slipstream.training.prompts import Question
from slipstream.training.tune import tune
from slipstream.training.tuned import Tuned, TuneSettings
from test_collect import letters
from test_tune import words

SLOW = Costs(answering=0.05, alone=0.1, step=0.5, learning=0.004)  # a model of 135M parameters on two cores, about


class Clock:
    """Time passes only as the costs say."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Answers are real, what they and steps take is not; nothing is learnt, which takes long, and there is no trial."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    passes, costs = Clock(), SLOW
    for place in (module, loop):
        monkeypatch.setattr(place, "perf_counter", passes)
    collect, train_step = module.collect, loop.Loop.train_step

    def collected(*given):
        found = collect(*given)
        passes.now += costs.answering * found.tokens
        return found

    def stepped(self):
        texts = self.order[self.step]
        passes.now += costs.step + costs.learning * int(self.texts.lengths[texts].sum())
        train_step(self)

    monkeypatch.setattr(module, "collect", collected)
    monkeypatch.setattr(loop.Loop, "train_step", stepped)
    monkeypatch.setattr(loop.Loop, "learn", lambda *_: torch.zeros(()))
    monkeypatch.setattr(module, "run_trial", lambda *_: None)
    return passes


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [10.0, 16.0])
def test_what_is_foretold_is_what_comes_within_a_half(minutes, clock, tmp_path):
    said = []
    target = tiny_model("llama"), letters()
    given = [Question((word,)) for word, _ in zip(words(), range(2000), strict=False)]
    settings = TuneSettings(minutes, "redrafter")
    done = tune(*target, tmp_path / "t", settings, given, said.append, costs=SLOW)
    answers = len((tmp_path / "t" / "answers.jsonl").read_text().splitlines())
    steps = read(tmp_path / "t" / "head" / "log.jsonl")[-1]["step"]
    assert 1 / 1.5 < done.plan.answers / answers < 1.5
    assert 1 / 1.5 < done.plan.steps / steps < 1.5
    assert clock.now < 60 * minutes  # the trial's share is left
    assert said[1] == done.plan.in_words(minutes)
    assert Tuned.open(tmp_path / "t", settings, done.model).plan == done.plan  # gone on with the same sizes


def test_too_few_minutes_are_refused_before_any_is_spent(tmp_path):
    target = tiny_model("llama"), letters()
    with pytest.raises(OptionError, match=r"0\.5 minutes are too few .* on cpu: .* Give --minutes (\d)") as refused:
        tune(*target, tmp_path / "t", TuneSettings(0.5, "redrafter"), costs=SLOW)
    assert not any((tmp_path / "t").iterdir())
    enough = float(str(refused.value).rpartition("--minutes ")[2].split()[0])
    found = estimate(SLOW, enough, Given(), None, small=True)
    check(found, enough, "cpu")  # what it asks for is enough
    assert found.answers >= 16
    assert found.steps >= 50
    assert found.trials >= 4
    with pytest.raises(OptionError):
        check(found, enough - 0.2, "cpu")


def test_the_share_of_memory_reaches_the_target(tmp_path):
    with pytest.raises(OptionError, match=r"memory=2\.0: a share of what is free"):
        tune(tiny_model("llama"), letters(), tmp_path / "t", TuneSettings(1, "redrafter"), memory=2)


def test_a_worked_example():
    """20 minutes: 480 s for answers, 540 s for training, 180 s for the trial."""
    costs = Costs(answering=0.01, alone=0.05, step=0.5, learning=0.001)
    # An answer of 256 takes 2.56 s: 24 built-in prompts 61.44 s, then 0.96 s more for each prompt.
    found = estimate(costs, 20, Given(ending=0.0), None, small=True)
    assert found.max_new_tokens == 256
    assert found.answers == 24 + int(418.56 / 3.52)
    # 540 s hold 200 steps of 2.7 s: 0.5 + 2.048.
    assert found.batch_tokens == 2048
    assert found.steps == int(540 / 2.548)
    assert found.trials == int(180 / 9.6)
    assert estimate(costs, 20, Given(prompts=30), None, small=True).answers == 30
    # On a GPU nothing shrinks, and what was asked for stays.
    assert estimate(costs, 20, Given(), None, small=False).batch_tokens == ON_GPU
    assert estimate(costs, 1, Given(), None, small=False).max_new_tokens == LENGTHS[0]
    assert estimate(costs, 1, Given(), 200, small=True).max_new_tokens == 200


@pytest.mark.slow
def test_answers_may_end_early():
    assert expected_length(256, 0.0) == 256
    assert expected_length(256, 1.0) == 1
    assert expected_length(2, 0.5) == 1.5
    model = tiny_model("llama")
    with LLM(model, letters(), "none", max_batch=4) as llm:
        asked = [Question((word, "more")) for word, _ in zip(words(), range(8), strict=False)]
        written = [len(llm.generate(q.turns[0], max_new_tokens=32).tokens) for q in asked]
        assert ending(llm, asked) == pytest.approx((sum(n < 32 for n in written) + 0.5) / (sum(written) + 200))
        assert ending(llm, []) == 0.0025
        assert ending(llm, [Question(("a" * 300,))]) == 0.0025  # longer than this model reads


def test_a_slower_machine_gets_shorter_answers_and_smaller_batches():
    sizes = []
    for times in (0.01, 0.1, 1.0, 10.0):
        costs = Costs(*(times * cost for cost in (0.05, 0.1, 0.5, 0.004)))
        found = estimate(costs, 20, Given(), None, small=True)
        sizes.append((found.max_new_tokens, found.batch_tokens))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == (256, 16384)
    assert sizes[-1] == (64, 512)


def test_answers_that_are_there_leave_their_time_to_training():
    stored = Given(texts=500, tokens=50_000)
    found = estimate(SLOW, 20, stored, None, small=True)
    assert found.answers == 500
    assert found.steps > estimate(SLOW, 20, Given(), None, small=True).steps * found.batch_tokens / 16384
    few = estimate(SLOW, 20, Given(texts=10, tokens=100), None, small=True)
    assert few.steps == int(1200 * 0.85 / (0.5 + 0.4))  # a batch holds no more than there is
    assert few.batch_tokens == 16384
    # Reading prompts takes its time too.
    reads = Costs(SLOW.answering, SLOW.alone, SLOW.step, SLOW.learning, reading=0.02)
    assert estimate(reads, 20, Given(), 96, small=True).answers < estimate(SLOW, 20, Given(), 96, small=True).answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redrafter", "eagle3"])
def test_costs_are_measured(kind):
    model = tiny_model("llama")
    with LLM(model, letters(), "none", max_batch=4) as llm:
        answers = measure_answers(llm, 4)
    costs = measure_steps(answers, model, kind, None)
    assert costs.answering > 0
    assert costs.alone > 0
    assert costs.learning > 0
    assert costs.step >= 0
    assert isinstance(estimate(costs, 20, Given(), None, small=True), Estimate)
