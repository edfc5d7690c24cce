"""The fuzz finds what is wrong: good cases pass, a mistake in the engine shows, and so does a slot left open."""

import sys
from pathlib import Path

import pytest

import slipstream.engine
from test_mutations import one_token_too_many

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from fuzz import tried
from fuzz_cases import CASES, THREADS, WAYS, draw
from fuzz_lab import Lab


@pytest.fixture(scope="module")
def lab():
    return Lab(1)


def cases(count, way=None, **wanted):
    """The first so many that are asked on a llama in this way, with these values."""
    found, seed = [], CASES
    while len(found) < count:
        case, seed = draw(seed, threads=False), seed + 1
        fits = (case.family, case.fixed) == ("llama", False) and way in (None, case.way)
        if fits and all(getattr(case, name) == value for name, value in wanted.items()):
            found.append(case)
    return found


def test_a_seed_is_a_case():
    assert draw(CASES + 3, False) == draw(CASES + 3, False) != draw(CASES + 4, False)
    drawn = [draw(CASES + i, threads) for i in range(200) for threads in (False, True)]
    assert {case.way for case in drawn} == {*WAYS, *THREADS}
    assert all(case.run == 1 for case in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_compared_and_agrees(way, lab):
    outcomes = [tried(lab, case) for case in cases(3, way)]
    assert [outcome.problems for outcome in outcomes] == [[], [], []]
    assert all(sum(outcome.compared.values()) for outcome in outcomes)


@pytest.mark.slow
def test_a_mistake_in_the_engine_shows(lab, monkeypatch):
    # A short answer may end before the mistake shows, and of a long one all drafts may be wrong.
    long = [c for c in cases(12, "batch", drafter="oracle") if c.asks[0].options["max_new_tokens"] >= 20][:4]
    assert not any(tried(lab, case).problems for case in long)
    monkeypatch.setattr(slipstream.engine, "verify", one_token_too_many)
    assert any("expected" in problem for case in long for problem in tried(lab, case).problems)


@pytest.mark.slow
def test_a_slot_that_stays_open_shows(monkeypatch):
    lab, (case,) = Lab(1), cases(1, "generate", drafter="pld")
    monkeypatch.setattr(lab.target("llama", False), "close", lambda _: None)
    assert any("slots of the target are open" in problem for problem in tried(lab, case).problems)
