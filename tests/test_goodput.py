"""The drafter of known quality of bench/goodput.py: what it is said to get right is right, and no text changes."""

import sys
from pathlib import Path

import pytest

from slipstream import drafters
from slipstream.engine import Engine
from slipstream.request import Request
from slipstream.targets import open_target

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import replayed
from goodput import answers

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3] * 6]
TOKENS = 41


@pytest.fixture
def known(tiny):
    """A target, and what it says to each prompt."""
    replayed.register()
    target = open_target(tiny("llama"))
    said, _ = answers(Engine(target, drafters.make("none", target)), PROMPTS, TOKENS, 0)
    yield target, said
    drafters.added.cache_clear()
    drafters.names.cache_clear()


def steps(engine, most):
    """How many a request took, in the mean."""
    requests = [Request(prompt, TOKENS, max_draft=most) for prompt in PROMPTS]
    ended = [sequence for sequence in engine.run(requests) if sequence.finish is not None]
    return sum(sequence.stats.steps for sequence in ended) / len(ended)


@pytest.mark.slow
def test_right_drafts_are_accepted_as_a_whole_and_wrong_ones_not_at_all(known):
    target, said = known
    engine = Engine(target, drafters.make(replayed.NAME, target))
    by_prompt = dict(zip(map(tuple, PROMPTS), said, strict=True))
    for right, expected in ((1.0, 1 + (TOKENS - 1) / 5), (0.0, TOKENS)):
        engine.drafter.know(by_prompt, right)
        assert answers(engine, PROMPTS, TOKENS, 4)[0] == said
        assert steps(engine, 4) == expected
    engine.drafter.know(by_prompt, 0.7)
    assert 1 + (TOKENS - 1) / 5 < steps(engine, 4) < TOKENS
    assert steps(engine, 4) == steps(engine, 4)  # the same places are wrong again


def test_auto_asks_it_by_its_name(known):
    target, said = known
    engine = Engine(target, drafters.make("auto", target, drafters=replayed.NAME))
    part = engine.drafter.parts[replayed.NAME]
    part.know(dict(zip(map(tuple, PROMPTS), said, strict=True)), 0.9)
    assert answers(engine, PROMPTS, TOKENS, 8)[0] == said
