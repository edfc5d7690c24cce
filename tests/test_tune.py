"""tune: one command from a model to its drafter; every phase goes on where it stopped."""

import json
import signal
from types import SimpleNamespace

import pytest

from families import tiny_model
from slipstream import LLM, OptionError
from slipstream.cli.train import training_bar
from slipstream.heads import HEADS, load_head, registry, save_head
from slipstream.stopwatch import preparing
from slipstream.training import own_prompts
from slipstream.training import tune as module
from slipstream.training.estimate import Costs
from slipstream.training.own_prompts import append, is_new, read_prompts, split, user_opening, write_prompts
from slipstream.training.prompts import Question
from slipstream.training.tune import tune
from slipstream.training.tuned import Trial, Tuned, TuneSettings
from slipstream.user_files import held
from test_collect import letters

QUICK = TuneSettings(minutes=0.02, head="redrafter", max_new_tokens=12)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    for name in ("measure_answers", "measure_steps"):
        monkeypatch.setattr(module, name, lambda *_: Costs(1e-6, 1e-6, 1e-6, 1e-6))  # any time will do


@pytest.fixture(scope="module")
def target():
    """Its tokenizer knows letters alone, so what it says is a word: any length will do here."""
    return tiny_model("llama"), letters()


@pytest.fixture
def short(monkeypatch):
    """Prompts of one word pass, and little is asked at a time."""
    monkeypatch.setattr(module, "builtin", lambda: [])
    monkeypatch.setattr(module, "write_prompts", lambda *_: (Question((word,)) for word in words()))


def words():
    for i in range(10_000):
        yield "".join(chr(97 + (i // 7**k) % 7) for k in range(5))


def test_near_duplicates_are_not_new():
    seen = set()
    assert is_new("Write a poem about the sea in winter", seen)
    assert not is_new("write a poem about the sea in winter", seen)
    assert not is_new("Write a poem about the sea in spring", seen)
    assert is_new("Explain how a heat pump works to a child", seen)
    assert is_new("Why?", seen)
    assert not is_new("why?", seen)


def test_every_tenth_prompt_is_for_the_trial():
    asked = [Question((str(i),)) for i in range(25)]
    learnt, held = split(asked)
    assert [q.turns[0] for q in held] == ["9", "19"]
    assert len(learnt) == 23
    assert split(asked[:15])[1] == held[:1]  # whatever comes later


def test_prompts_are_written_where_the_user_speaks(target):
    llm = LLM(*target, drafter="none")
    shown = llm.tokenizer.decode(user_opening(llm))
    whole = llm.tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False)
    assert whole.startswith(shown)
    assert whole[len(shown) :].startswith("abc")
    plain = letters()
    plain.chat_template = None
    assert user_opening(LLM(target[0], plain, drafter="none")) == [plain.eos_token_id]


def test_a_model_that_writes_none_says_so(target, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "builtin", lambda: [])
    monkeypatch.setattr(module, "write_prompts", lambda *_: iter(()))
    with pytest.raises(OptionError, match="--prompts"):
        tune(*target, tmp_path / "t", QUICK)


@pytest.mark.slow
def test_written_prompts_are_real_ones(target, monkeypatch):
    monkeypatch.setattr(own_prompts, "DRAWN", 8)
    llm = LLM(*target, drafter="none")
    some = [q for q, _ in zip(write_prompts(llm, [], 0), range(3), strict=False)]
    assert all(len(q.turns[0].split()) >= 3 for q in some)  # this one writes words without spaces: none


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_from_a_model_to_a_registered_head(target, tmp_path, monkeypatch):
    """Whether it pays is decided by the clock: here, by a trial that says so."""
    said = []
    for way in ("gain", "at_least"):
        monkeypatch.setattr(Tuned, way, lambda *_: 1.5)
    done = tune(*target, tmp_path / "t", QUICK, tell=said.append)
    assert done.registered
    assert done.accuracy
    assert all(trial.same for trial in done.trials)
    assert {trial.kind for trial in done.trials} <= {"own", "builtin"}
    assert [kind for kind, _ in registry.heads_for(target[0])] == ["redrafter"]
    assert "redrafter" in LLM(*target).engine.drafter.parts  # unnamed
    assert said[1].startswith("in 0.02 minutes: about ")
    assert said[2].startswith("answering: ")
    assert "The head is registered" in (tmp_path / "t" / "tune.html").read_text()
    # Run again, nothing is done anew.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "t").rglob("*") if p.suffix not in (".json", ".html")}
    again = tune(*target, tmp_path / "t", QUICK)
    assert again.registered
    assert {p: p.stat().st_mtime_ns for p in before} == before


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("kind", "sizes"), [("dflash", {"block": 4, "bias": 4, "confidence": True}), ("falcon", {}), ("spire", {})]
)
def test_heads_that_guess_in_blocks(kind, sizes, target, tmp_path):
    done = tune(*target, tmp_path / "t", TuneSettings(minutes=0.02, head=kind, max_new_tokens=12, sizes=sizes))
    assert done.accuracy
    assert done.registered is not None
    assert all(trial.same for trial in done.trials)
    assert Tuned.open(tmp_path / "t", done.settings, done.model).settings == done.settings
    head = load_head(tmp_path / "t" / "head", target[0])
    assert head.kind == kind
    if sizes:
        assert (head.config.block_size, head.config.markov_rank, head.config.confidence) == (4, 4, True)
    with pytest.raises(OptionError, match="has no --heads: its sizes are --"):
        TuneSettings(head=kind, sizes={"heads": 3})


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("phase", ["collect", "train", "run_trial"])
def test_an_interrupted_run_goes_on(phase, target, tmp_path, monkeypatch):
    monkeypatch.setattr(Tuned, "at_least", lambda *_: 0.5)
    whole = getattr(module, phase)

    def broken(*given, **options):
        if phase == "collect" and not given[1]:  # nothing is asked yet
            return whole(*given, **options)
        if phase == "train":  # before the first checkpoint
            (tmp_path / "t" / "head").mkdir()
            (tmp_path / "t" / "head" / "log.jsonl").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, phase, broken)
    with pytest.raises(KeyboardInterrupt):
        tune(*target, tmp_path / "t", QUICK)
    kept = read_prompts(tmp_path / "t" / "prompts.jsonl")
    assert kept
    assert "Incomplete" in (tmp_path / "t" / "tune.html").read_text()
    monkeypatch.setattr(module, phase, whole)
    done = tune(*target, tmp_path / "t", QUICK)
    assert done.registered is False
    assert registry.heads_for(target[0]) == []
    assert read_prompts(tmp_path / "t" / "prompts.jsonl")[: len(kept)] == kept
    asked = [json.loads(line)["id"] for line in (tmp_path / "t" / "answers.jsonl").open()]
    assert len(set(asked)) == len(asked)


def test_a_folder_of_another_run_is_refused(target, tmp_path):
    Tuned(QUICK, "another").save(tmp_path)
    with pytest.raises(OptionError, match="holds a run for another"):
        tune(*target, tmp_path, QUICK)
    (tmp_path / "tuned.json").write_text("{")
    with pytest.raises(OptionError, match="can't be read"):
        tune(*target, tmp_path, QUICK)


def test_a_line_that_was_cut_off_is_no_prompt(tmp_path):
    file = tmp_path / "prompts.jsonl"
    append(file, [Question(("a", "b"), "s"), Question(("c",))])
    with file.open("a") as out:
        out.write('{"turns": ["d')
    assert read_prompts(file) == [Question(("a", "b"), "s"), Question(("c",))]
    append(file, [Question(("e",))])  # and nothing of it is left
    with file.open("ab") as out:
        out.write('{"turns": ["ü'.encode()[:-1])
    assert read_prompts(file) == [Question(("a", "b"), "s"), Question(("c",)), Question(("e",))]


@pytest.mark.parametrize("wrong", [{"minutes": 0}, {"max_new_tokens": 0}, {"head": "tail"}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(OptionError):
        TuneSettings(**wrong)


def test_an_answer_during_which_something_was_captured_is_given_again(monkeypatch):
    monkeypatch.setattr(preparing, "seconds", 0.0)
    taken = iter((0.7, 0.2, 0.0, 0.0))
    given = []

    def answer():
        preparing.seconds += next(taken)
        given.append(len(given))
        return given[-1]

    assert module.settled(answer) == 2
    taken = iter([1.0] * 99)
    assert module.settled(answer) == 2 + module.AGAIN  # it ends all the same


@pytest.mark.parametrize("own", [0, 1, 4, 60])
def test_a_trial_has_at_least_as_many_prompts_as_there_are_built_in_ones(own, tmp_path):
    append(tmp_path / "prompts.jsonl", [Question((f"{n}",)) for n in range(10 * own)])
    asked = module.trial_prompts(tmp_path, Tuned(QUICK, "m"), template=False)
    kinds = [kind == "own" for kind, _ in asked]
    built_in = len(module.builtin()[1::2])
    assert len(asked) == max(built_in, 2 * min(own, built_in))
    assert sum(kinds) == min(own, built_in)
    assert all(kinds[: 2 * min(own, built_in) : 2])  # they alternate, as long as there are both


def test_two_runs_do_not_work_in_one_folder(target, tmp_path):
    (tmp_path / "t").mkdir()
    with held(tmp_path / "t"), pytest.raises(OptionError, match="another process works in"):
        tune(*target, tmp_path / "t", QUICK)
    assert not list((tmp_path / "t").iterdir())


def test_a_registered_head_that_is_damaged_is_left_out_of_the_trial(target, tmp_path):
    folder = tmp_path / "head"
    save_head(HEADS["redrafter"].fresh(target[0]), folder)
    registry.add(folder, target[0])
    (folder / "config.json").write_text("{")
    told = []
    work = module.Work(*target, tmp_path, Tuned(QUICK, "m"), [], told.append, 0.9)
    assert module.contestants(work)["without"]["heads"] == []
    assert str(folder) in told[0]


def test_an_interrupt_waits_for_the_end_of_a_step_of_training_alone():
    with training_bar(SimpleNamespace(count=1, rank=1)) as watch:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        watch(0, 2, {})
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            watch(1, 2, {})
    with training_bar(SimpleNamespace(count=1, rank=1)) as watch:
        for line in ({}, {"accuracy": [0.5]}):
            watch(2, 2, line)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_gains_are_over_all_prompts():
    trials = [Trial("own", {"plain": 2.0, "without": 1.0, "with": 0.5}, True)] * 2
    run = Tuned(QUICK, "m", trials=[*trials, Trial("builtin", {"plain": 1.0, "without": 1.0, "with": 2.0}, True)])
    assert run.gain("plain") == pytest.approx((4 * 4 * 0.5) ** (1 / 3))
    assert run.gain("without") == pytest.approx((2 * 2 * 0.5) ** (1 / 3))
    assert run.at_least("without") < 1 < run.gain("without")  # one prompt of three says otherwise
    assert Tuned(QUICK, "m", trials=trials).at_least("without") == pytest.approx(2.0)
    assert Tuned(QUICK, "m").at_least("without") == Tuned(QUICK, "m").gain("without") == 0
