"""If the race on the terminal gained nothing, it says why."""

from types import SimpleNamespace

import pytest

from slipstream.demo import why_not


def runner(seconds, steps, tokens):
    stats = SimpleNamespace(steps=steps, tokens_per_step=tokens / steps)
    return SimpleNamespace(seconds=seconds, stream=SimpleNamespace(result=SimpleNamespace(stats=stats)))


@pytest.mark.parametrize(
    ("fast", "says"),
    [
        (runner(1.0, 60, 64), "hardly a draft was right"),
        (runner(1.0, 16, 64), "a step gave 4.0 tokens and took 4.0 × as long as a plain one"),
    ],
)
def test_the_reason_is_what_the_steps_show(fast, says):
    assert says in why_not(runner(1.0, 64, 64), fast)
