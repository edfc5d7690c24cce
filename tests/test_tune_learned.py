"""Learning on: what was answered while working trains the head that drafted it, and the better one stays."""

import json
from dataclasses import replace

import numpy as np
import pytest

from families import tiny_model
from slipstream import LLM, DrafterError, OptionError, StoreError
from slipstream.cli.tune import default_folder
from slipstream.datastores.durable.store import LEARNED, Store
from slipstream.datastores.ingest.encoding import tokenizer_fingerprint
from slipstream.heads import HEADS, registry, save_head
from slipstream.training import learned
from slipstream.training import tune as module
from slipstream.training.estimate import Costs
from slipstream.training.learned import openings, take_answers
from slipstream.training.tune import Work, contestants, tune
from slipstream.training.tuned import Tuned, TuneSettings
from test_collect import letters


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    for name in ("measure_answers", "measure_steps"):
        monkeypatch.setattr(module, name, lambda *_: Costs(1e-6, 1e-6, 1e-6, 1e-6))  # any time will do


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama"), letters()


def answers(count, length=40):
    random = np.random.default_rng(0)
    return [random.integers(3, 64, length).tolist() for _ in range(count)]


def fill(folder, texts, tokenizer, vocabulary=64, source=LEARNED, collection="default"):
    with Store.create(folder, vocabulary, tokenizer_fingerprint(tokenizer) if tokenizer else "") as store:
        for tokens in texts:
            store.append(tokens, source, collection)
    return folder


def quick(store, start=None, **more):
    return TuneSettings(0.02, "redrafter", 12, store=str(store), start=start and str(start), **more)


def old_head(model, folder, kind="redrafter"):
    folder.mkdir()
    save_head(HEADS[kind].fresh(model, seed=7), folder)
    return folder


@pytest.mark.slow
def test_what_learn_appends_is_what_is_learnt_from(target, tmp_path):
    llm = LLM(*target, drafter="suffix", store=str(tmp_path / "s"), learn=True)
    said = [
        llm.generate(text, max_new_tokens=24, seed=i, temperature=1.0, ignore_eos=True).tokens
        for i, text in enumerate("abcdefghijkl")
    ]
    llm.close()
    assert take_answers(tmp_path / "s", "default", *target, tmp_path) == 11  # one of twelve is held out
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").open()]
    assert [line["tokens"] for line in lines] == [*said[:9], *said[10:]]
    assert openings(tmp_path) == [said[9][:12]]


def test_only_answers_count_each_once_the_newest_first(target, tmp_path, monkeypatch):
    some = answers(12)
    fill(tmp_path / "s", [*some, some[0], [5] * 3], target[1])
    with Store.open(tmp_path / "s", write=True) as store:
        store.append(answers(13)[12], "a file")
        store.flush()
    take_answers(tmp_path / "s", "default", *target, tmp_path)
    found = [json.loads(line)["tokens"] for line in (tmp_path / "answers.jsonl").open()]
    assert found == [*some[1:10], some[11], some[0]]
    monkeypatch.setattr(learned, "MOST", 10)
    take_answers(tmp_path / "s", "default", *target, tmp_path)
    assert json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])["tokens"] == some[3]


@pytest.mark.parametrize(
    ("texts", "made", "wrong", "said"),
    [
        ([], {}, OptionError, "holds 0 different answers"),
        (answers(12), {"source": "a file"}, OptionError, "let `--learn` append"),
        (answers(12), {"collection": "mine"}, OptionError, "there are: mine"),
        (answers(12), {"vocabulary": 100, "tokenizer": None}, StoreError, "holds ids up to 99, the model knows 64"),
        (answers(12), {"tokenizer": "other"}, StoreError, "another tokenizer"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(texts, made, wrong, said, target, tmp_path):
    other = letters()
    other.add_tokens(["zz"])
    made = {"tokenizer": target[1], **made}
    if made["tokenizer"] == "other":
        made["tokenizer"] = other
    fill(tmp_path / "s", texts, **made)
    with pytest.raises(wrong, match=said):
        tune(*target, tmp_path / "t", quick(tmp_path / "s"))
    assert not any((tmp_path / "t").iterdir())


def test_a_head_of_another_kind_or_shape_is_refused_before_anything_is_done(target, tmp_path):
    fill(tmp_path / "s", answers(12), target[1])
    with pytest.raises(OptionError, match="of the kind medusa"):
        tune(*target, tmp_path / "t", quick(tmp_path / "s", old_head(target[0], tmp_path / "m", "medusa")))
    larger = tiny_model("llama", hidden_size=2 * target[0].config.hidden_size)
    with pytest.raises(DrafterError):
        tune(*target, tmp_path / "t", quick(tmp_path / "s", old_head(larger, tmp_path / "l")))
    assert not any((tmp_path / "t").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("better", [True, False])
def test_the_better_head_stays(better, target, tmp_path, monkeypatch):
    old = old_head(target[0], tmp_path / "old")
    registry.add(old, target[0])
    fill(tmp_path / "s", answers(24), target[1])
    for way in ("gain", "at_least"):
        monkeypatch.setattr(Tuned, way, lambda *_: 1.5 if better else 0.9)
    asked = []
    monkeypatch.setattr(module, "collect", lambda *_: asked.append(1))
    done = tune(*target, tmp_path / "t", quick(tmp_path / "s", old))
    assert done.registered is better
    assert done.prompts == 22
    assert not asked
    assert "own" in {trial.kind for trial in done.trials}
    assert all(trial.same for trial in done.trials)
    new = tmp_path / "t" / "head"
    assert [path for _, path in registry.heads_for(target[0])] == [new if better else old]
    said = "The head is registered" if better else "the old one stays"
    assert said in (tmp_path / "t" / "tune.html").read_text()


def test_the_new_head_stands_in_the_place_of_the_old(target, tmp_path):
    old, other = old_head(target[0], tmp_path / "old"), old_head(target[0], tmp_path / "other", "medusa")
    new = str(tmp_path / "t" / "head")
    work = Work(*target, tmp_path / "t", Tuned(quick("s", old), "m"), [], print, 0.9)
    assert contestants(work)["without"]["heads"] == [str(old)]  # though not registered
    registry.add(old, target[0])
    registry.add(other, target[0])
    made = contestants(work)
    assert made["without"]["heads"] == [str(other), str(old)]
    assert made["with"]["heads"] == [str(other), new]
    made = contestants(replace(work, run=Tuned(quick("s"), "m")))
    assert made["with"]["heads"] == [str(old), str(other), new]


def test_learning_on_has_a_new_folder_each_time_unless_it_was_interrupted():
    settings = quick("s", "old")
    first = default_folder("f" * 32, settings)
    assert first != default_folder("f" * 32, TuneSettings(head="redrafter"))
    first.mkdir(parents=True)
    Tuned(settings, "m").save(first)
    assert default_folder("f" * 32, settings) == first
    Tuned(settings, "m", registered=False).save(first)
    assert default_folder("f" * 32, settings) != first
