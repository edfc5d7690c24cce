"""tune's page: everything that was measured, whenever it stopped, and nothing that a name could break."""

import json
import re
from html.parser import HTMLParser

import pytest

from families import tiny_model
from slipstream.training.tune_page import page, write_page
from slipstream.training.tuned import Trial, Tuned, TuneSettings

LINES = [
    *({"step": i, "loss": 9 / (1 + i / 20), "seconds": 3.0 * i} for i in range(1, 61)),
    *({"step": i, "accuracy": [i / 100 / d for d in range(1, 6)], "seconds": 3.0 * i} for i in (20, 40, 60)),
]
ABOUT = {"model": "a model", "device": "cpu"}


def tried(kind, plain=2.0, without=1.5, new=1.0, same=True):
    return Trial(
        kind,
        {"plain": plain, "without": without, "with": new},
        same,
        {"plain": 64, "without": 64, "with": 64},
        {"plain": 64, "without": 40, "with": 32},
    )


def whole(**changes):
    trials = [tried("own"), tried("code-writing", new=0.8), tried("own", new=1.1), tried("agent", same=False)]
    made = {
        "spent": {"answering": 480.0, "training": 540.0, "trying": 180.0},
        "prompts": 320,
        "accuracy": [0.6, 0.3, 0.2, 0.15, 0.12],
        "trials": trials,
        "registered": True,
    }
    return Tuned(TuneSettings(), "a model", **{**made, **changes})


class Well(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.asked = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.asked += [value for name, value in attrs if name in ("src", "href", "onload", "onclick")]
        if tag not in ("meta", "path", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, _):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(html):
    found = Well()
    found.feed(html)
    assert not found.open
    assert not found.asked
    assert "script" not in found.seen
    return found


def test_the_page_has_every_chart_and_what_was_gained():
    html = page(whole(), ABOUT, LINES)
    parsed(html)
    assert re.findall(r'<figure id="(\w+)"', html) == ["loss", "right", "ends", "speedups", "yield", "phases"]
    run = whole()
    low, high = run.interval("without")
    assert f"{run.gain('without'):.2f}×" in html
    assert f"{low:.2f}–{high:.2f}" in html
    assert "The head is registered" in html
    assert "1 of 4 texts differ" in html
    for said in ("8.0 min", "9.0 min", "own prompts", "code-writing", "minutes: 20", "head: eagle3"):
        assert said in html


@pytest.mark.parametrize(
    ("left", "lines", "said", "charts"),
    [
        ({"trials": [], "accuracy": [], "spent": {}}, [], "answers are still being collected", []),
        (
            {"trials": [], "accuracy": [], "spent": {"answering": 9.0, "training": 5.0}},
            LINES[:3],
            "not trained to the end",
            ["loss", "phases"],
        ),
        (
            {"trials": [], "spent": {"answering": 9.0, "training": 5.0}},
            LINES,
            "not tried to the end",
            ["loss", "right", "ends", "phases"],
        ),
    ],
)
def test_an_interrupted_run_shows_how_far_it_came(left, lines, said, charts):
    html = page(whole(**left, registered=None), ABOUT, lines)
    parsed(html)
    assert said in html
    assert re.findall(r'<figure id="(\w+)"', html) == charts


def test_names_are_text_and_never_markup():
    evil = '"><script>alert(1)</script><img src=x onload="y">'
    run = whole(trials=[tried(evil), tried("own")])
    html = page(run, {"model": evil, evil: evil}, LINES)
    parsed(html)
    assert "<script" not in html
    assert "<img" not in html


def test_numbers_of_trials_that_an_older_run_left_are_shown_without_steps():
    html = page(whole(trials=[Trial("own", {"plain": 2.0, "without": 1.5, "with": 1.0}, True)]), ABOUT, [])
    parsed(html)
    assert 'id="yield"' not in html
    assert "2.00×" in html


def test_the_log_of_the_training_is_what_the_curves_are_from(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step"')
    write_page(whole(), tiny_model("llama"), tmp_path)
    html = (tmp_path / "tune.html").read_text()
    parsed(html)
    assert 'id="loss"' in html
    assert "transformers" in html
