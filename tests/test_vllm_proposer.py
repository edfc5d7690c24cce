"""The proposer for vLLM, driven as vLLM drives it, with arrays and no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.budget.costs import Costs
from slipstream.datastores.durable.store import Store
from slipstream.errors import OptionError, StoreError
from slipstream.vllm import Proposer, ProposerOptions, proposer
from slipstream.vllm.options import read_options
from slipstream.vllm.steps import EXTRA, StepCosts
from slipstream.vllm.texts import AWAY, KnownText, KnownTexts

VOCABULARY, CONTEXT, LONGEST = 500, 256, 6
FREE, DEAR = {1: 1.0, 64: 1.001}, {1: 1.0, 64: 640.0}


def config(**options):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST),
        model_config=SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: VOCABULARY),
        additional_config={"slipstream": options},
    )


@pytest.fixture
def make(monkeypatch):
    """make(curve): a proposer that takes steps to cost that much, and drafts to cost nothing."""
    monkeypatch.setattr(proposer, "REHEARSED", 1)
    for place in ("vllm.proposer", "drafters._piloted"):
        monkeypatch.setattr(f"slipstream.{place}.Stopwatch", lambda: SimpleNamespace(seconds=lambda: 0.0))
    monkeypatch.setattr("slipstream.budget.costs.Costs.observe", lambda *_: None)

    def made(curve, **options):
        found = Proposer(config(**options))
        found.steps.done, found.drafter.pilot.costs = True, Costs(curve, flat=True)
        return found

    return made


class Serving:
    """vLLM, as far as a proposer sees it: texts that go on as they were always going to."""

    def __init__(self, proposer, texts, read):
        self.proposer, self.texts = proposer, [np.array(text, np.int32) for text in texts]
        self.lengths = list(read)
        self.drafts = [[] for _ in texts]

    def step(self, rows=None):
        """The given texts, in this order, take a step, and are drafted for. Returns how many tokens each got."""
        rows = list(range(len(self.texts))) if rows is None else rows
        table, sampled = np.zeros((len(rows), CONTEXT), np.int32), []
        for row, i in enumerate(rows):
            text, begin, draft = self.texts[i], self.lengths[i], self.drafts[i]
            right = 0
            while right < len(draft) and draft[right] == text[begin + right]:
                right += 1
            self.lengths[i] = begin + right + 1
            sampled.append(text[begin : self.lengths[i]].tolist())
            table[row, : self.lengths[i]] = text[: self.lengths[i]]
        lengths = np.array([self.lengths[i] for i in rows], np.int32)
        for i, draft in zip(rows, self.proposer.propose(sampled, lengths, table, slot_mappings=None), strict=True):
            self.drafts[i] = draft
        return [len(each) for each in sampled]


def repeating(seed, length=CONTEXT):
    return np.tile(np.random.default_rng(seed).integers(0, VOCABULARY, 20), CONTEXT // 20 + 1)[:length]


def test_a_text_that_repeats_is_drafted_as_it_goes_on(make):
    serving = Serving(make(FREE), [repeating(1)], [60])
    got = [serving.step()[0] for _ in range(12)]
    assert got[0] == 1
    assert max(got) == LONGEST + 1
    assert sum(got) > 3 * len(got)


def test_nothing_is_drafted_where_rows_are_dear(make):
    serving = Serving(make(DEAR), [repeating(1), repeating(2)], [60, 60])
    for _ in range(30):
        assert serving.step() == [1, 1]
        assert serving.drafts == [[], []]


def test_rows_may_move_and_texts_come_and_go(make):
    """A text's drafts do not depend on the row that it is in, nor on who is beside it."""
    alone = [Serving(make(FREE), [repeating(seed)], [60]) for seed in (1, 2, 3)]
    for each in alone:
        for _ in range(10):
            each.step()
    together = Serving(make(FREE), [repeating(seed) for seed in (1, 2, 3)], [60] * 3)
    for rows in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2], [2, 1, 0], [1, 0], [0, 1, 2], [1], [2, 1, 0], [0, 2, 1]):
        together.step(rows)
    assert len(together.proposer.texts) == 3
    assert [i > 60 + 20 for i in together.lengths] == [i.lengths[0] > 60 + 20 for i in alone] == [True] * 3


def test_rows_whose_prompt_is_being_read_get_nothing(make):
    """They arrive with no sampled token, beside others that are drafted for."""
    made, text = make(FREE), repeating(1)
    table, lengths = np.stack([text, repeating(2)]).astype(np.int32), np.array([80, 80], np.int32)
    for n in range(3):
        found = made.propose([[int(text[79 + n])], []], lengths + np.array([n, 0]), table)
        assert found[1] == []
    assert found[0] == text[82 : 82 + LONGEST].tolist()
    assert made.propose([[], []], lengths, table) == [[], []]
    assert made.propose([], lengths[:0], table[:0]) == []


def test_two_texts_of_the_same_tokens_are_two(make):
    serving = Serving(make(FREE), [repeating(1), repeating(1)], [60, 60])
    for _ in range(4):
        serving.step()
    assert len(serving.proposer.texts) == 2
    assert serving.lengths[0] == serving.lengths[1]


def test_texts_are_known_by_all_their_tokens():
    """Those that end alike may begin differently."""
    texts, rows = KnownTexts(), np.zeros((2, 64), np.int32)
    rows[1, 0] = 1
    for row in rows:
        texts.put(KnownText(row.copy(), 40, 0, None))
    assert texts.take(rows[1], 40).tokens[0] == 1
    assert texts.take(rows[1], 40) is None
    assert texts.take(rows[0], 39) is None
    assert texts.take(rows[0], 40).tokens[0] == 0


def test_a_text_that_is_gone_becomes_an_earlier_answer(make):
    """And drafts for others then. A text that is away for a few steps is not gone."""
    made = make(FREE)
    serving = Serving(made, [np.arange(100), np.concatenate([[7], np.arange(30, 100)]), repeating(1)], [40, 1, 40])
    for _ in range(4):
        serving.step([0, 2])
    assert not made.answers.runs("default").runs
    serving.step([2])
    serving.step([0, 2])
    for _ in range(AWAY + 1):
        made.propose([[1]], np.array([1]), np.array([[1]]))
    assert made.answers.runs("default").runs
    assert serving.lengths[0] < 60
    serving.lengths[1] = serving.lengths[0] - 30 - 2
    serving.step([1])
    assert serving.drafts[1][:1] == [serving.texts[1][serving.lengths[1]]]


def test_earlier_answers_can_be_left_out(make):
    made = make(FREE, shared=0)
    Serving(made, [np.arange(100)], [40]).step()
    for _ in range(AWAY + 1):
        made.propose([[1]], np.array([1]), np.array([[1]]))
    assert {text.length for text in made.texts} == {1}
    assert not made.answers.runs("default").runs


def test_stores_are_drafted_from(make, tmp_path):
    for name, begin in (("a", 100), ("b", 200)):
        with Store.create(tmp_path / name, VOCABULARY) as store:
            store.append(np.arange(begin, begin + 80), name)
    made = make(FREE, stores=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert list(made.drafter.parts) == ["suffix", "rest", "rest-2"]
    serving = Serving(made, [np.arange(100, 180), np.arange(200, 280)], [20, 20])
    for _ in range(8):
        serving.step()
    assert min(serving.lengths) > 20 + 2 * 8


def test_a_store_of_another_vocabulary_is_refused(tmp_path):
    Store.create(tmp_path / "a", 2 * VOCABULARY).close()
    with pytest.raises(StoreError, match="another tokenizer"):
        Proposer(config(stores=str(tmp_path / "a")))


def test_no_draft_goes_beyond_the_context(make):
    made, text = make(FREE), repeating(1)
    for length in range(CONTEXT - 2 * LONGEST, CONTEXT + 1):
        (draft,) = made.propose([[int(text[length - 1])]], np.array([length], np.int32), text[None])
        assert len(draft) <= max(0, CONTEXT - length - 1)


# ---- what steps take


def test_first_steps_measure_what_rows_cost():
    for batch, wide in ((1, 4), (4, 16)):
        steps, asked = StepCosts(LONGEST), []
        for _ in range(200):
            if steps.done:
                break
            asked.append(sum(trial := steps.trial(batch)))
            steps.see([1 + n for n in trial], 1.0 + 0.01 * asked[-1])
            assert max(trial) - min(trial) <= 1
        assert steps.done
        assert [n for n in EXTRA if n in asked][-1] == wide
        costs = steps.costs()
        assert costs.seconds(1 + wide, batch) == pytest.approx(1 + 0.01 * wide)
        assert costs.seconds(1, batch) == pytest.approx(1.0)


def test_dear_rows_are_not_tried_to_the_end():
    steps, asked = StepCosts(32), []
    while not steps.done:
        asked.append(sum(trial := steps.trial(8)))
        steps.see([1 + n for n in trial], 1.0 + 0.5 * asked[-1])
    assert max(asked) == 4
    assert steps.costs().seconds(1 + 16, 8) == pytest.approx(9.0)


def test_texts_that_come_and_go_do_not_make_it_begin_anew():
    steps, wasted = StepCosts(32), 0
    for number in range(200):
        if steps.done:
            break
        wasted += sum(trial := steps.trial(7 + (number % 3 == 0)))
        steps.see([1 + n for n in trial], 1.0 + 0.01 * sum(trial))
    assert steps.done
    assert number <= 4 * len(EXTRA) * 2
    assert wasted <= 4 * sum(EXTRA) * 2


def test_a_proposer_measures_before_it_drafts(monkeypatch):
    monkeypatch.setattr(proposer, "REHEARSED", 1)
    made = Proposer(config())
    serving = Serving(made, [repeating(1)], [60])
    costs = made.drafter.pilot.costs
    for _ in range(40):
        serving.step()
        if made.steps.done:
            break
    assert made.steps.done
    assert made.drafter.pilot.costs is not costs


# ---- options


def test_options_from_the_environment_or_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_VLLM", raising=False)
    assert read_options() == ProposerOptions()
    (tmp_path / "options.json").write_text(json.dumps({"stores": "s", "shared": 5}))
    found = ProposerOptions("s", 5)
    assert read_options({"slipstream": str(tmp_path / "options.json")}) == found
    assert read_options({"slipstream": {"stores": "s", "shared": 5}}) == found
    for given in (str(tmp_path / "options.json"), '{"stores": "s", "shared": 5}'):
        monkeypatch.setenv("SLIPSTREAM_VLLM", given)
        assert read_options({}) == found
    assert found.folders == ["s"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"store": "s"}', "unknown options store: there are stores"),
        ("{", "holds no JSON"),
        ("/no/such/file", "/no/such/file, which can't be read"),
        ('{"shared": -1}', "shared"),
        ('{"nodes": 0}', "nodes"),
    ],
)
def test_wrong_options_are_refused(given, said, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_VLLM", given)
    with pytest.raises(OptionError, match=said):
        read_options()


@pytest.mark.slow
def test_importing_it_loads_no_torch():
    code = "import sys, slipstream.vllm; assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
