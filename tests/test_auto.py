"""auto: its texts are plain decoding's (the laws see to that); here, that it asks, learns and refrains."""

import json

import pytest

from slipstream import LLM
from slipstream.budget.costs import Costs, costs_of
from slipstream.errors import OptionError
from slipstream.target import open_target

FREE = {1: 0.010, 64: 0.0101}
DEAR = {1: 0.010, 2: 0.050, 64: 1.0}
REPEATING = [5, 6, 7, 8] * 10


@pytest.fixture
def steps(monkeypatch):
    """steps(curve): from now on a step is taken to cost that much, whatever it takes."""

    def curve(seconds):
        monkeypatch.setattr("slipstream.drafters.auto.costs_of", lambda _: Costs(seconds))
        monkeypatch.setattr("slipstream.budget.costs.Costs.observe", lambda *_: None)
        monkeypatch.setattr("slipstream.drafters.auto.perf_counter", lambda: 0.0)

    return curve


def answer(model, **options):
    llm = LLM(model, drafter="auto", drafters="pld,suffix", **options)
    return llm, llm.generate(REPEATING, max_new_tokens=120)


def test_rows_that_cost_nothing_are_used(steps, tiny):
    steps(FREE)
    llm, result = answer(tiny("llama"))
    assert result.stats.nodes_verified > 100
    assert set(result.stats.by_source) == {"pld", "suffix"}
    pilot = llm.engine.drafter.pilot
    assert all(source.calibration.labelled > 0 for source in pilot.sources.values())
    assert pilot.last.rate >= pilot.last.plain


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
    llm.engine.drafter.pilot = type(llm.engine.drafter.pilot)(Costs(FREE), ["suffix", "medusa"])
    plain = LLM(model, drafter="none").generate(REPEATING, max_new_tokens=60)
    result = llm.generate([REPEATING, [40], REPEATING[:7]], max_new_tokens=60)
    assert result[0].tokens == plain.tokens
    assert result[0].stats.by_source["medusa"]["proposed"] > 0


def test_costs_are_measured_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    target = open_target(tiny("llama"))
    first = costs_of(target)
    (kept,) = json.loads((tmp_path / "costs.json").read_text()).values()
    assert first.seconds(1) == kept["1"] > 0
    monkeypatch.setattr("slipstream.budget.costs.measure", lambda *_, **__: pytest.fail("measured again"))
    assert costs_of(target).seconds(8) == first.seconds(8)
    (tmp_path / "costs.json").write_text("{")  # a damaged file costs a measurement
    monkeypatch.undo()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert costs_of(target).seconds(1) > 0


def test_it_does_not_ask_itself(tiny):
    with pytest.raises(OptionError, match="auto asks others"):
        LLM(tiny("llama"), drafter="auto", drafters="pld, auto")
