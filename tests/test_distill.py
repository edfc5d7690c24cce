"""DistillSpec: divergences are those of the definition, a cut draft is its target's layers, and distilling one pays."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from families import tiny_model
from slipstream import LLM, DrafterError, ModelError, OptionError
from slipstream.budget.costs import Costs
from slipstream.cli.train import train as command
from slipstream.loading.models import load_model
from slipstream.training import checkpoint, divergences
from slipstream.training.cutting import cut_out, kept_layers
from slipstream.training.data import put_together
from slipstream.training.distill import Distillation, DraftSource, distill
from slipstream.training.distill_loop import DistillLoop, OwnTexts
from slipstream.training.log import read as read_log
from slipstream.training.loop import TrainingPlan
from slipstream.training.payoff import Pair, measure_pair
from slipstream.training.processes import Processes
from slipstream.training.teacher import Speaker
from test_collect import letters
from test_training import AUTHOR, walk, write_data

CHEAP = Pair(Costs({1: 1.0, 8: 1.1}), Costs({1: 0.4}))
PLAN = TrainingPlan(steps=30, batch_tokens=1024, rate=1e-2, warmup=2, log_every=5, eval_every=1000)


@pytest.fixture(scope="module")
def target():
    """It was taught the walk, by its layers together: cut, they have forgotten."""
    model = tiny_model("llama", num_hidden_layers=4)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = torch.tensor([walk(first, 24) for first in range(3, 64, 2)])
    for _ in range(40):
        model(input_ids=texts, labels=texts).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    random = np.random.default_rng(0)
    texts = [walk(int(random.integers(3, 64)), int(random.integers(8, 24))) for _ in range(100)]
    return write_data(tmp_path_factory.mktemp("data") / "walks.jsonl", texts)


@pytest.fixture(autouse=True)
def one_prompt(monkeypatch):
    monkeypatch.setattr("slipstream.training.distill.TRIALS", 1)


@pytest.fixture
def untried(monkeypatch):
    """For what does not ask how the draft does: then it is not tried beside plain decoding."""
    monkeypatch.setattr("slipstream.training.distill.attempt", lambda *_: [])


def half(**changes):
    return {"source": DraftSource(cut="even", layers=2), "lesson": Distillation(**changes), "pair": CHEAP}


def two(size=7, seed=0):
    """Rows of log-probabilities of two distributions."""
    torch.manual_seed(seed)
    return [torch.randn(5, size, dtype=torch.float64).log_softmax(-1) for _ in range(2)]


# ---- divergences


def test_a_worked_example():
    """p = (1/2, 1/2, 0+), q = (1/4, 1/4, 1/2)."""
    tiny = 1e-12
    p = torch.tensor([[0.5, 0.5, tiny]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    assert divergences.forward_kl(p, q).item() == pytest.approx(math.log(2))
    assert divergences.total_variation(p, q).item() == pytest.approx(0.5)
    assert divergences.reverse_kl(q, p).item() == pytest.approx(math.log(2))
    # m = (3/8, 3/8, 1/4): half of log(4/3), and half of (1/2 log(2/3) + 1/2 log 2).
    expected = 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert divergences.jensen_shannon(p, q).item() == pytest.approx(expected)


def test_against_the_definitions_in_numpy():
    p, q = (each.exp().numpy() for each in two())

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    lp, lq = two()
    assert divergences.find("fkl")(lp, lq).numpy() == pytest.approx(kl(p, q))
    assert divergences.find("rkl")(lp, lq).numpy() == pytest.approx(kl(q, p))
    assert divergences.find("tvd")(lp, lq).numpy() == pytest.approx(1 - np.minimum(p, q).sum(-1))
    for beta in (0.1, 0.5, 0.8):
        m = beta * p + (1 - beta) * q
        expected = beta * kl(p, m) + (1 - beta) * kl(q, m)
        assert divergences.find("jsd", beta)(lp, lq).numpy() == pytest.approx(expected)


def test_jensen_shannon_lies_between_both_kls():
    p, q = two()
    small = 1e-6
    near_0, near_1 = (divergences.jensen_shannon(p, q, beta) / small for beta in (small, 1 - small))
    assert near_0.tolist() == pytest.approx(divergences.forward_kl(p, q).tolist(), rel=1e-4)
    assert near_1.tolist() == pytest.approx(divergences.reverse_kl(p, q).tolist(), rel=1e-4)
    assert torch.allclose(divergences.jensen_shannon(p, q, 0.3), divergences.jensen_shannon(q, p, 0.7))


@pytest.mark.parametrize("name", divergences.NAMES)
def test_nothing_parts_a_distribution_from_itself(name):
    p, q = two()
    assert torch.allclose(divergences.find(name)(p, p), torch.zeros(5, dtype=torch.float64), atol=1e-12)
    assert (divergences.find(name)(p, q) > 0).all()


# ---- the cut


@pytest.mark.parametrize(
    ("cut", "layers", "kept"),
    [("first", 2, [0, 1]), ("last", 2, [4, 5]), ("even", 3, [0, 2, 5]), ("even", 1, [0]), ("even", 5, [0, 1, 2, 4, 5])],
)
def test_which_layers_are_kept(cut, layers, kept):
    assert kept_layers(cut, layers, 6) == kept


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma3_text", "smollm3", "gpt2", "opt", "gpt_neox"])
def test_the_first_layers_of_a_cut_say_what_the_target_s_say(tiny, family):
    """Windows, kinds of layers and positions are those of the layers that were kept."""
    model, ids = tiny(family), torch.arange(3, 15)[None]
    draft = cut_out(model, "first", 2)
    with torch.no_grad():
        whole, part = (m(input_ids=ids, output_hidden_states=True).hidden_states for m in (model, draft))
    assert torch.allclose(whole[1], part[1], atol=1e-5)


def test_the_weights_of_a_cut_are_the_target_s_layers(target):
    draft = cut_out(target, "even", 2)
    for mine, its in ((0, 0), (1, 3)):
        for name, value in draft.model.layers[mine].state_dict().items():
            assert torch.equal(value, target.model.layers[its].state_dict()[name])
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)
    with torch.no_grad():  # and not the same memory
        draft.lm_head.weight.zero_()
    assert target.lm_head.weight.any()


def test_what_can_t_be_cut_is_refused(target):
    for cut, layers, said in (("middle", 2, "no cut 'middle'"), ("first", 4, "1 to 3"), ("last", 0, "layers=0")):
        with pytest.raises(OptionError, match=said):
            cut_out(target, cut, layers)
    with pytest.raises(ModelError, match="--draft"):
        cut_out(tiny_model("qwen2_moe", mlp_only_layers=[0]), "last", 1)


# ---- learning


def loop_of(target, draft, name="fkl", share=0.0):
    texts = put_together([(np.array(walk(first, 12), np.int32), np.arange(12) >= 4) for first in range(3, 13)])
    own = OwnTexts(draft, None, share, 0)
    return DistillLoop(
        Speaker(draft), Speaker(target), divergences.find(name), own, texts, texts, PLAN, Processes("cpu")
    )


@pytest.mark.parametrize("name", divergences.NAMES)
def test_gradients_are_those_of_the_whole_and_reach_the_draft_alone(target, name, monkeypatch):
    """In pieces of a few positions: the same as of one sum over all logits."""
    model = copy.deepcopy(target).requires_grad_(True)
    draft = cut_out(model, "first", 1)
    loop = loop_of(model, draft, name)
    monkeypatch.setattr("slipstream.training.losses._LOGITS", 64 * 7)
    loss = loop.learn(np.arange(10), 80)
    found = {name: p.grad.clone() for name, p in draft.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    draft.zero_grad()
    batch = loop.texts.batch(range(10))
    said = [m(input_ids=batch.tokens).logits.log_softmax(-1) for m in (model, draft)]
    rows = [x.flatten(0, 1)[batch.places - 1] for x in said]
    whole = divergences.find(name)(rows[0].detach(), rows[1]).sum() / 80
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-4)
    for name, p in draft.named_parameters():
        assert torch.allclose(p.grad, found[name], atol=1e-5), name


def test_on_policy_texts_are_the_draft_s_own(target):
    """What plain sampling of the draft gives, whatever else is in the batch, as the draft is at that moment."""
    draft = cut_out(target, "first", 1)
    loop = loop_of(target, draft, share=1.0)
    mixed = loop.own.instead(loop.texts, np.arange(4), 3)
    with LLM(copy.deepcopy(draft), drafter="none") as alone:
        for i in range(4):
            tokens, counted = mixed.text(i)
            assert tokens[:4].tolist() == walk(3 + i, 4)
            assert not counted[:4].any()
            assert counted[4:].all()
            random = np.random.default_rng((0, 3, i))
            random.random()
            how = {"temperature": 1.0, "seed": int(random.integers(1 << 32)), "max_new_tokens": 8}
            assert tokens[4:].tolist() == alone.generate(tokens[:4].tolist(), **how).tokens
    again = loop.own.instead(loop.texts, np.array([2, 0]), 3)
    assert again.text(0)[0].tolist() == mixed.text(2)[0].tolist()
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    assert loop.own.instead(loop.texts, np.arange(4), 3).tokens.tolist() != mixed.tokens.tolist()


def test_a_mixture_has_texts_of_both(target):
    draft = cut_out(target, "first", 1)
    loop = loop_of(target, draft, share=0.5)
    mixed = [loop.own.instead(loop.texts, np.arange(10), step) for step in range(4)]
    same = [each.text(i)[0].tolist() == walk(3 + i, 12) for each in mixed for i in range(10)]
    assert 8 <= sum(same) <= 32
    assert loop_of(target, draft).own.instead(loop.texts, np.arange(10), 0).fingerprint() == loop.texts.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), [("fkl", 0.0), ("rkl", 0.0), ("jsd", 0.5), ("tvd", 0.0)])
def test_a_distilled_draft_is_accepted_more_often(target, data, tmp_path, name, own):
    plan = TrainingPlan(steps=12 if own else 30, batch_tokens=1024, rate=1e-2, warmup=2)
    done = distill(target, None, [data], tmp_path / "d", plan=plan, **half(divergence=name, on_policy=own))
    for what in ("accuracy", "overlap"):
        assert done.after[what] > done.before[what] + 0.1
    assert done.tokens_per_step("after") > done.tokens_per_step("before")
    assert all(trial.same for trial in done.trials)
    kept = json.loads((tmp_path / "d" / "distilled.json").read_text())
    assert kept["after"] == done.after
    assert kept["divergence"] == name


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_the_folder_is_an_ordinary_model_that_drafts(target, data, tmp_path):
    half_target = copy.deepcopy(target).to(torch.bfloat16)
    distill(half_target, letters(), [data], tmp_path / "d", plan=replace(PLAN, steps=8), **half())
    model, tokenizer = load_model(tmp_path / "d", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert len(model.model.layers) == 2
    assert tokenizer.get_vocab() == letters().get_vocab()
    assert not (tmp_path / "d" / checkpoint.NAME).exists()
    with LLM(target, letters(), "model", draft_model=tmp_path / "d") as llm, LLM(target, letters(), "none") as plain:
        told = llm.generate(walk(7, 5), max_new_tokens=20, ignore_eos=True)
        assert told.tokens == plain.generate(walk(7, 5), max_new_tokens=20, ignore_eos=True).tokens
        assert told.stats.accepted


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_a_run_that_was_stopped_ends_where_it_would_have(target, data, tmp_path):
    how, plan = half(on_policy=0.3), TrainingPlan(steps=6, batch_tokens=512, rate=1e-2, log_every=1, warmup=2)
    whole = distill(target, None, [data], tmp_path / "whole", plan=plan, **how)

    def stop(step, *_):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(target, None, [data], tmp_path / "cut", plan=plan, watch=stop, **how)
    with pytest.raises(OptionError, match="--resume"):
        distill(target, None, [data], tmp_path / "cut", plan=plan, **how)
    other = {**how, "lesson": Distillation("rkl", on_policy=0.3)}
    with pytest.raises(OptionError, match="divergence was fkl, now rkl"):
        distill(target, None, [data], tmp_path / "cut", plan=plan, resume=True, **other)
    again = distill(target, None, [data], tmp_path / "cut", plan=plan, resume=True, **how)
    assert again.after == whole.after
    assert again.before == whole.before
    logs = [[x["loss"] for x in read_log(tmp_path / f / "log.jsonl") if "loss" in x] for f in ("whole", "cut")]
    assert logs[0] == pytest.approx(logs[1])


# ---- what can't pay, and what can't be


def test_the_gain_of_a_pair_is_the_formula():
    flat = Pair(Costs({1: 2.0, 16: 2.0}), Costs({1: 0.5}))
    for a, d in ((0.5, 1), (0.8, 4), (0.9, 7)):
        assert flat.gain(a, d) == pytest.approx((1 - a ** (d + 1)) / ((1 - a) * (d * 0.25 + 1)))
    assert flat.gain(1.0, 3) == pytest.approx(4 / 1.75)
    assert flat.best_depth(0.1) == 1
    assert flat.best_depth(0.9) == max(range(1, 17), key=lambda d: flat.gain(0.9, d))
    # Rows that cost make long drafts dear.
    assert Pair(Costs({1: 2.0, 16: 20.0}), Costs({1: 0.5})).best_depth(0.9) < flat.best_depth(0.9)


def test_a_pair_that_can_t_pay_is_refused_with_the_reason(target, data, tmp_path):
    dear = Pair(Costs({1: 0.010, 16: 0.010}), Costs({1: 0.0095}))
    with pytest.raises(OptionError, match=r"9\.50 ms, 0\.95 of the target's.*0\.97 × plain.*--force"):
        distill(target, None, [data], tmp_path / "d", plan=PLAN, **{**half(), "pair": dear})
    assert not (tmp_path / "d").exists()
    Pair(Costs({1: 0.010, 16: 0.010}), Costs({1: 0.0089})).check()  # (1 + 0.9) / (1 + 0.89) is more than 1


def test_a_pair_is_measured_now_whatever_is_remembered(tiny, monkeypatch):
    """What was remembered on a busy machine refused pairs that pay."""
    monkeypatch.setattr("slipstream.targets.timing.recall", lambda *_: {"1": 60.0})
    pair = measure_pair(tiny("llama"), tiny("llama"))
    assert pair.target.seconds(1) < 60
    assert pair.draft.seconds(1) < 60


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DraftSource(), "neither was given"),
        (lambda: DraftSource("d", "first", 2), "both were given"),
        (lambda: DraftSource(cut="first"), "--cut and --layers go together"),
        (lambda: DraftSource(draft="d", layers=2), "--cut and --layers go together"),
        (lambda: Distillation("kl"), "no divergence 'kl': there are fkl, rkl, jsd, tvd"),
        (lambda: Distillation("fkl", beta=0.5), "--beta belongs to jsd"),
        (lambda: Distillation("jsd", beta=1.0), "beta=1.0 is out of range"),
        (lambda: Distillation(on_policy=1.5), "on_policy=1.5 is out of range"),
        (lambda: Distillation(on_policy=0.5, count_all=True), "--count-all and --on-policy"),
        (lambda: TrainingPlan(steps=1, share=0.0), "share=0.0 is out of range"),
    ],
)
def test_bad_options_are_refused_by_name(make, said):
    with pytest.raises(OptionError, match=said.replace("(", r"\(")):
        make()


def test_a_draft_of_another_vocabulary_is_refused(target, data, tmp_path):
    tiny_model("llama", vocab_size=32).save_pretrained(tmp_path / "other")
    how = {**half(), "source": DraftSource(str(tmp_path / "other"))}
    with pytest.raises(DrafterError, match="32 token ids, the target 64"):
        distill(target, None, [data], tmp_path / "d", plan=PLAN, **how)


@pytest.mark.slow
def test_the_command(target, data, tmp_path):
    app = typer.Typer()
    app.command()(command)
    runner = CliRunner()
    target.save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    base = ["--data", str(data), "--out", str(tmp_path / "d"), "--model", str(tmp_path / "target"), "--any-author"]
    wrong = runner.invoke(app, ["model", *base, "--hass", "--decay", "0.5"])
    assert "model has no --hass, --decay" in str(wrong.exception)
    wrong = runner.invoke(app, ["eagle3", *base, "--cut", "first"])
    assert "eagle3 has no --cut" in str(wrong.exception)
    how = ["--cut", "even", "--layers", "2", "--steps", "3", "--divergence", "jsd", "--beta", "0.3", "--force"]
    done = runner.invoke(app, ["model", *base, *how])
    assert done.exit_code == 0, done.exception
    assert "accepted of a token, greedily" in done.output
    assert AUTHOR in (tmp_path / "d" / "config.json").read_text()
