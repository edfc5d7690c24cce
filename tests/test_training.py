"""Training: gradients are those of the definition, heads learn, and a run that was stopped ends where it would have."""

import copy
import importlib.util
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file
from torch.nn import functional
from typer.testing import CliRunner

from families import VOCABULARY, tiny_model
from slipstream import LLM, OptionError
from slipstream.cli.train import train as command
from slipstream.heads import HEADS, load_head
from slipstream.heads.blocks import Blocks
from slipstream.training import checkpoint, glancing, losses, recipes
from slipstream.training.data import Order, Texts, read_texts
from slipstream.training.log import read as read_log
from slipstream.training.loop import Loop, TrainingPlan
from slipstream.training.losses import Weights
from slipstream.training.teacher import Teacher
from slipstream.training.train import Lesson, train

AUTHOR = "LlamaForCausalLM"
QUICK = TrainingPlan(steps=60, batch_tokens=1024, rate=2e-2, warmup=5, log_every=10, eval_every=1000)


def follow(token):
    """A walk through the tokens from 3 on that comes back after 60 steps."""
    return (5 * token + 3) % 61 + 3


def walk(token, length):
    text = [token]
    while len(text) < length:
        text.append(follow(text[-1]))
    return text


def write_data(path, texts, answers=((3, None),), model=AUTHOR):
    with path.open("w") as file:
        for i, tokens in enumerate(texts):
            spans = [[a, len(tokens) if b is None else b] for a, b in answers]
            file.write(json.dumps({"id": f"t{i}", "tokens": tokens, "answers": spans, "model": model}) + "\n")
    return path


@pytest.fixture(scope="module")
def walker():
    """A model that was taught the walk."""
    model = tiny_model("llama")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = torch.tensor([walk(first, 24) for first in range(3, 64, 2)])
    for _ in range(40):
        loss = model(input_ids=texts, labels=texts).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert loss.item() < 0.5
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    random = np.random.default_rng(0)
    texts = [walk(int(random.integers(3, 64)), int(random.integers(8, 24))) for _ in range(200)]
    return write_data(tmp_path_factory.mktemp("data") / "walks.jsonl", texts)


def mixed(count=5, seed=0):
    """Texts without sense, of different lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(3, 64, int(random.integers(4, 20))).tolist() for _ in range(count)]


def as_texts(texts, counted=None):
    flat = np.concatenate([np.array(t, np.int32) for t in texts])
    starts = np.cumsum([0, *map(len, texts)])
    return Texts(flat, np.ones(len(flat), bool) if counted is None else counted, starts)


# ---- data


def test_held_out_texts_are_two_percent_and_never_trained_on(tmp_path):
    path = write_data(tmp_path / "d.jsonl", [[3 + i % 60, 4 + i // 60 % 60, 5, 6] for i in range(2000)])
    seen, held = read_texts([path], VOCABULARY)
    assert len(seen) + len(held) == 2000
    assert 20 <= len(held) <= 60
    # The same ids stay out when there is less data.
    short = tmp_path / "short.jsonl"
    short.write_text("".join(path.read_text().splitlines(keepends=True)[:1000]))
    _, fewer = read_texts([short], VOCABULARY)
    rows = {tuple(row) for row in held.tokens.reshape(-1, 4)}
    assert {tuple(row) for row in fewer.tokens.reshape(-1, 4)} <= rows
    tiny = write_data(tmp_path / "tiny.jsonl", mixed(2))
    assert [len(side) for side in read_texts([tiny], VOCABULARY)] == [1, 1]


def test_answers_count_and_what_lies_beyond_the_length_is_cut(tmp_path):
    path = write_data(tmp_path / "d.jsonl", [list(range(3, 13))] * 2, answers=[(0, 4), (6, 8)])
    texts, _ = read_texts([path], VOCABULARY)
    assert texts.counted.nonzero()[0].tolist() == [2, 3, 6, 7]  # nothing can guess the first two tokens
    texts, _ = read_texts([path], VOCABULARY, length=7)
    assert texts.tokens.tolist() == list(range(3, 10))
    assert texts.counted.nonzero()[0].tolist() == [2, 3, 6]
    texts, _ = read_texts([path], VOCABULARY, count_all=True)
    assert texts.counted.sum() == 8


def test_a_line_that_is_being_written_is_left_out(walks, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(walks.read_text()[:-10])
    with pytest.warns(UserWarning, match="line 200 is cut off"):
        seen, held = read_texts([path], VOCABULARY)
    assert len(seen) + len(held) == 199


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": [3, 4, 5, 64]}, "line 3 holds the id 64, but the model has ids from 0 to 63"),
        ({"tokens": [3, 4, -1]}, "another tokenizer"),
        ({"tokens": "text"}, "needed are id, tokens, answers and model"),
        ({"model": "other"}, "line 3 was written by other, but the head is for LlamaForCausalLM"),
        ({"answers": [[2, 99]]}, "an answer from 2 to 99"),
        ({"tokens": [3, 4, 5, 2**40]}, "needed are id, tokens"),
    ],
)
def test_wrong_data_is_refused(tmp_path, change, says):
    lines = [{"id": str(i), "tokens": [3, 4, 5, 6], "answers": [[2, 3]], "model": AUTHOR} for i in range(4)]
    lines[2] |= change
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(OptionError, match=says):
        read_texts([path], VOCABULARY, AUTHOR)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "0 texts with answers"), ('{"prompt": "a"}\n', "found prompt"), ("a,b\n", "line 1: not JSON")],
)
def test_files_of_another_kind_are_refused(tmp_path, text, says):
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match=says):
        read_texts([path], VOCABULARY)
    with pytest.raises(OptionError, match="can't be read"):
        read_texts([tmp_path / "none.jsonl"], VOCABULARY)


def test_an_epoch_has_every_text_once_and_batches_keep_their_size():
    texts = as_texts(mixed(300))
    order = Order(texts, 256, seed=1)
    for epoch in (0, 1):
        batches = order.epoch(epoch)
        assert sorted(np.concatenate(batches)) == list(range(300))
        assert all(len(b) == 1 or texts.batch(b).tokens.numel() <= 256 for b in batches)
    assert len(batches) < 45  # 300 rows of 32
    both = [order[place].tolist() for place in range(order.until(2))]
    assert both == [b.tolist() for e in (0, 1) for b in Order(texts, 256, seed=1).epoch(e)]
    assert order[0].tolist() == both[0]  # also going back
    assert Order(texts, 256, seed=2)[0].tolist() != both[0]


def test_where_a_guess_is_made():
    counted = np.array([0, 0, 0, 1, 1, 0, 0, 1], bool)
    batch = as_texts([[3, 4, 5, 6, 7], [8, 9, 10]], counted).batch([0, 1])
    assert batch.tokens.shape == (2, 32)
    assert batch.places.tolist() == [3, 4, 34]
    rows, reaches = batch.aims(0)  # tokens 3 and 4 from places 1 and 2; token 2 of the second row from its place 0
    assert rows.tolist() == [1, 2, 32]
    assert reaches.all()
    rows, reaches = batch.aims(2)
    assert rows.tolist() == [0, 0, 0]
    assert reaches.tolist() == [False, True, False]


def test_the_draft_vocabulary_is_the_most_frequent_counted_tokens():
    texts = as_texts([[9, 9, 9, 5, 5, 7, 8]], np.array([0, 0, 0, 1, 1, 1, 0], bool))
    assert texts.frequent(2, VOCABULARY).tolist() == [5, 7]
    assert len(texts.frequent(64, VOCABULARY)) == 64


# ---- the target as a teacher


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere", "phi", "gpt2"])
def test_the_distribution_is_what_the_model_says(tiny, family):
    model = tiny(family)
    teacher = Teacher(model, HEADS["medusa"].fresh(model, tied=True))
    ids = torch.arange(3, 13)[None]
    expected = model(input_ids=ids).logits.softmax(-1)
    torch.testing.assert_close(teacher.distribution(teacher.read(ids)[1]), expected)


def test_where_a_head_knows_few_tokens_more_positions_fit_in_a_piece(tiny, monkeypatch):
    model, batch = tiny("llama"), as_texts(mixed(4)).batch(range(4))
    monkeypatch.setattr(losses, "_LOGITS", 3 * VOCABULARY)
    for ids, most in ((None, 3), (range(16), 3 * VOCABULARY // 16)):
        teacher = Teacher(model, HEADS["eagle3"].fresh(model, draft_ids=ids))
        sizes = [len(piece.places) for piece in losses.pieces(batch, teacher)]
        assert max(sizes) == most
        assert sum(sizes) == len(batch.places)


# ---- gradients


def defined_loss(head, model, texts, weights, depths, first, stride):
    """The loss as it is defined, text by text and guess by guess, through the head's own `predict`."""
    recipe, total, count = weights.recipe, 0.0, 0
    ids = torch.arange(VOCABULARY) if head.draft_ids is None else head.draft_ids
    columns = {token: column for column, token in enumerate(ids.tolist())}
    for text, counted in texts:
        tokens = torch.tensor([text])
        with torch.no_grad():
            out = model(input_ids=tokens, output_hidden_states=True)
        hidden = out.hidden_states
        states = head.join({layer: hidden[layer] for layer in head.layers(len(hidden) - 1)})
        count += sum(counted[2:])
        said = out.logits[0][:, ids].softmax(-1)
        for k, prediction in enumerate(head.predict(states, tokens, depths)):
            for i in range(len(text) - 2 - k):
                at = i + 2 + k
                if not counted[at] or i < first or (i - first) % stride:
                    continue
                loss = 0.0
                if text[at] in columns:
                    log_q, p = prediction.logits[0, i].log_softmax(-1), said[at - 1]
                    label = torch.zeros(len(ids))
                    label[columns[text[at]]] = 1
                    labels = weights.labels
                    loss = -labels.entropy * ((p if labels.soft else label) * log_q).sum()
                    loss = recipe.tokens * (loss + labels.distance * (log_q.exp() - p).abs().sum())
                    if recipe.top:
                        best = p.argsort(descending=True)[: recipe.top]
                        loss = loss - (p[best] * log_q[best]).sum()
                if recipe.features:
                    near = functional.smooth_l1_loss(prediction.features[0, i], hidden[-1][0, at - 1])
                    loss = loss + recipe.features * near
                total = total + weights.decay**k * loss
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "labels", "hass", "sizes"),
    [
        ("medusa", "distill", False, {"heads": 3}),
        ("medusa", "hard", False, {"heads": 2, "tied": True}),
        ("redrafter", "distill", False, {}),
        ("redrafter", "hard", False, {"rnn": False, "exit_dim": 48}),
        ("mlp", "distill", False, {"inner_dim": 16}),
        ("eagle", "distill", False, {}),
        ("eagle", "hard", False, {}),
        ("eagle", "distill", True, {}),
        ("eagle3", "distill", False, {"draft_ids": range(3, 50)}),
        ("eagle3", "hard", False, {"draft_ids": range(3, 50), "tied": False}),
        ("falcon", "distill", False, {"block": 3}),
        ("dflash", "distill", False, {"draft_ids": range(3, 50), "block": 4}),
        ("dflash", "hard", False, {"block": 6, "bias": 3, "markov_type": "gated"}),
        ("spire", "overlap", False, {"layers": 1, "window": 3}),
        ("spire", "tv", False, {"pruned": False, "window": 0, "feedback": False, "activations": False}),
    ],
)
def test_gradients_in_pieces_are_those_of_the_defined_loss(tiny, monkeypatch, kind, labels, hass, sizes):
    model = tiny("llama")
    head = HEADS[kind].fresh(model, **sizes).double()
    model = model.double()
    try:
        with torch.no_grad():  # away from where a fresh head starts: there some gradients vanish
            for parameter in head.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        head.bind(model)
        texts = mixed(4)
        flat = np.random.default_rng(3).random(sum(map(len, texts))) < 0.7
        made = as_texts(texts, flat)
        for text in range(4):
            made.counted[made.starts[text] :][:2] = False
        own = [(t, made.counted[a:b].tolist()) for t, a, b in zip(texts, made.starts, made.starts[1:], strict=False)]
        recipe = recipes.find(kind, hass)
        depths = recipe.depths_for(head)
        weights = Weights(recipe, 0.7, losses.LABELS[labels])

        # Blocks: behind which positions there are some, the first and how many lie between two.
        where = {"falcon": (2, 3), "dflash": (0, min(4, depths)), "spire": (0, 4)}.get(kind, (0, 1))
        expected = defined_loss(head, model, own, weights, depths, *where)
        expected.backward()
        wanted = {name: p.grad for name, p in head.named_parameters()}
        head.zero_grad()

        monkeypatch.setattr(losses, "_LOGITS", 3 * VOCABULARY)  # three positions at a time
        teacher = Teacher(model, head)
        loss = torch.zeros((), dtype=torch.double)
        for some in ([0, 3], [1, 2]):  # two batches make one step
            batch = made.batch(some)
            states, last = teacher.read(batch.tokens)
            unrolled = recipe.unroll(head, states, batch.tokens, depths, None)
            loss += losses.backward(unrolled, batch, last, teacher, weights, int(made.counted.sum()))
    finally:
        model.float()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for name, parameter in head.named_parameters():
        if wanted[name] is None:
            assert parameter.grad is None, name
        else:
            assert (parameter.grad - wanted[name]).norm() < 1e-5 * wanted[name].norm(), name
    assert all(p.grad is None for p in model.parameters())


def test_a_token_that_the_head_does_not_have_is_never_a_hit(tiny):
    model = tiny("llama")
    teacher = Teacher(model, HEADS["eagle3"].fresh(model, draft_ids=[5, 9]))
    batch = as_texts([[3, 4, 5, 7, 9, 5]], np.array([0, 0, 1, 1, 1, 1], bool)).batch([0])

    def first(rows):
        return torch.tensor([1.0, 0.0]).expand(len(rows), 2)  # always token 5

    unrolled = [recipes.Guess((torch.zeros(1, 32, 1),), first)] * 3
    assert losses.hits(unrolled, batch, teacher, 3).tolist() == [[2, 4], [1, 3], [1, 2]]


@pytest.mark.parametrize("k", [2, 3])
def test_glancing_shows_answers_at_the_beginnings_of_blocks(tiny, monkeypatch, k):
    """As many as a share of the mistakes, which falls; what is read there is what is asked for."""
    head = HEADS["falcon"].fresh(tiny("llama"), block=k)
    tokens = torch.randint(0, VOCABULARY, (3, 32), generator=torch.Generator().manual_seed(0))
    states = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1))
    blocks, following = Blocks(32, k, k, k - 1), tokens.roll(-1, 1)
    monkeypatch.setattr(glancing, "NOISE", 0.0)

    def shown(wrong, done):
        monkeypatch.setattr(glancing, "mistakes", lambda *_: torch.tensor([wrong] * 3))
        practice = glancing.Practice(torch.ones(3, 32, dtype=torch.bool), 5, done)
        read, after = glancing.glance(head, states, tokens, blocks, practice)
        there = (read != states).any(-1)
        assert torch.equal(after[~there], following[~there])
        assert torch.equal(read[there], states.roll(-k, 1)[there])
        assert torch.equal(after[there], tokens.roll(-1 - k, 1)[there])
        for row, column in there.nonzero().tolist():  # in a block, those before it are shown too
            assert there[row, column - column % k : column].all()
            assert column % k < k - 1
        return int(there.sum())

    assert shown(0, 0.0) == 0
    many, few = shown(20, 0.0), shown(20, 1.0)
    assert 0 < few < many
    assert abs(many / 3 - 0.45 * 20) <= 3
    assert abs(few / 3 - 0.1 * 20) <= 2


def test_mistakes_are_counted_where_tokens_count(tiny):
    head = HEADS["falcon"].fresh(tiny("llama"), block=2)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    states = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    counted = torch.rand(2, 12, generator=torch.Generator().manual_seed(2)) < 0.6
    found = glancing.mistakes(
        head, states[:, :10], tokens[:, :10].roll(-1, 1), tokens[:, :10], Blocks(10, 2, 2, 1), counted[:, :10]
    )
    wrong = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        for k, prediction in enumerate(head.predict(states[:, :10], tokens[:, :10], 2)):
            for end in range(1, 10, 2):
                at = (end + 2 + k) % 10
                wrong += (prediction.logits[:, end].argmax(-1) != tokens[:, at]) & counted[:, at]
    assert found.tolist() == wrong.tolist()


# ---- learning

# The positions behind which blocks of five guesses are measured: the first, and how many lie between two.
MEASURED = {"falcon": (1, 6), "dflash": (0, 4), "spire": (0, 5)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lesson", "steps", "sizes"),
    [
        (Lesson("medusa"), 40, {}),
        (Lesson("redrafter"), 40, {}),
        (Lesson("redrafter", labels="hard"), 40, {"rnn": False}),
        (Lesson("mlp"), 40, {}),
        (Lesson("eagle"), 40, {}),
        (Lesson("eagle", hass=True), 30, {}),
        (Lesson("eagle3", depths=3), 40, {"draft_vocab": 60}),
        (Lesson("falcon"), 60, {"block": 2}),
        (Lesson("dflash"), 50, {"draft_vocab": 60}),
        (Lesson("dflash", labels="tv"), 60, {"bias": 8, "confidence": True}),
        (Lesson("spire"), 40, {"layers": 2, "window": 8}),
    ],
    ids=lambda value: value.head if isinstance(value, Lesson) else "",
)
def test_heads_learn_and_what_is_saved_is_what_was_measured(walker, walks, tmp_path, lesson, steps, sizes):
    done = train(walker, [walks], tmp_path / "head", lesson, replace(QUICK, steps=steps), sizes)
    assert done.accuracy[0] > 0.75  # chance: 0.016
    assert len(done.accuracy) == (3 if lesson.head == "mlp" else 5)
    log = read_log(tmp_path / "head" / "log.jsonl")
    curve = [line["loss"] for line in log if "loss" in line]
    assert len(curve) == steps // 10
    assert curve[-1] < curve[0] / (2 if lesson.labels is None else 1.5)
    assert log[-1]["accuracy"] == done.accuracy

    head = load_head(tmp_path / "head", walker)
    assert head.kind == lesson.head
    _, held = read_texts([walks], VOCABULARY)
    right, made = np.zeros(5), np.zeros(5)
    first, stride = MEASURED.get(lesson.head, (0, 1))
    ids = torch.arange(VOCABULARY) if head.draft_ids is None else head.draft_ids
    for a, b in zip(held.starts, held.starts[1:], strict=False):
        tokens = torch.tensor(held.tokens[None, a:b]).long()
        with torch.no_grad():
            hidden = walker(input_ids=tokens, output_hidden_states=True).hidden_states
            states = head.join({layer: hidden[layer] for layer in head.layers(3)})
            for k, prediction in enumerate(head.predict(states, tokens, len(done.accuracy))):
                for i in range(int(b - a) - 2 - k):
                    if held.counted[a + i + 2 + k] and i >= first and (i - first) % stride == 0:
                        made[k] += 1
                        right[k] += int(ids[prediction.logits[0, i].argmax()]) == tokens[0, i + 2 + k]
    assert done.accuracy == pytest.approx((right / np.maximum(made, 1))[: len(done.accuracy)].tolist())
    if lesson.head in MEASURED:
        fresh = HEADS[lesson.head].fresh(walker)
        steps = [
            LLM(walker, drafter=lesson.head, drafter_path=h).generate(walk(9, 6), max_new_tokens=24)
            for h in (fresh, head)
        ]
        assert steps[0].tokens == steps[1].tokens
        assert steps[1].stats.tokens_per_step > 1.3 * steps[0].stats.tokens_per_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_half_precision_learns_the_same(walker, walks, tmp_path, monkeypatch, kind):
    """What runs on a GPU: a target in bfloat16, the head's products too, its weights in float32."""
    plan, lesson = replace(QUICK, steps=4, log_every=4, batch_tokens=256), Lesson(kind, depths=2)
    train(walker, [walks], tmp_path / "full", lesson, plan)
    monkeypatch.setattr(Loop, "precision", lambda _: torch.autocast("cpu", torch.bfloat16))
    half = copy.deepcopy(walker).to(torch.bfloat16)
    train(half, [walks], tmp_path / "half", lesson, plan)
    full, less = (read_log(tmp_path / name / "log.jsonl")[0]["loss"] for name in ("full", "half"))
    assert less == pytest.approx(full, rel=0.05)
    assert less != full
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.bfloat16}, "as its target"


# ---- runs


def curve_of(folder):
    timing = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timing} for line in read_log(folder / "log.jsonl")]


def same_weights(one, other, model):
    mine, its = (load_head(folder, model).state_dict() for folder in (one, other))
    return all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_where_it_would_have(walker, walks, tmp_path):
    lesson, plan = Lesson("redrafter"), replace(QUICK, steps=25, log_every=4, eval_every=6, save_every=9)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(walker, [walks], whole, lesson, plan)

    def killed(step, total, line):  # noqa: ARG001
        if step == 14:
            raise RuntimeError("killed")

    def interrupted(step, total, line):  # noqa: ARG001
        if step == 21:
            raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="killed"):
        train(walker, [walks], parts, lesson, plan, watch=killed)
    assert torch.load(parts / checkpoint.NAME, weights_only=True)["step"] == 9
    load_head(parts, walker)  # of the checkpoint: it can be tried meanwhile
    with pytest.raises(KeyboardInterrupt):
        train(walker, [walks], parts, lesson, plan, watch=interrupted, resume=True)
    assert torch.load(parts / checkpoint.NAME, weights_only=True)["step"] == 21
    with pytest.raises(OptionError, match=r"decay was 0.8, now 0.5"):
        train(walker, [walks], parts, replace(lesson, decay=0.5), plan, resume=True)
    train(walker, [walks], parts, lesson, plan, resume=True)
    assert curve_of(parts) == curve_of(whole)
    assert [line["step"] for line in curve_of(whole)] == [4, 6, 8, 12, 12, 16, 18, 20, 24, 24, 25]
    assert same_weights(parts, whole, walker)
    with pytest.raises(OptionError, match="holds no checkpoint"):
        train(walker, [walks], parts, lesson, plan, resume=True)
    with pytest.raises(OptionError, match="is there already"):
        train(walker, [walks], parts, lesson, plan)


def test_an_interruption_of_the_last_evaluation_loses_nothing(walker, walks, tmp_path):
    lesson, plan = Lesson("redrafter"), replace(QUICK, steps=5)

    def interrupted(step, total, line):  # noqa: ARG001
        if step == 5 and "accuracy" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(walker, [walks], tmp_path / "head", lesson, plan, watch=interrupted)
    found = train(walker, [walks], tmp_path / "head", lesson, plan, resume=True)
    assert found.steps == 5
    train(walker, [walks], tmp_path / "whole", lesson, plan)
    assert same_weights(tmp_path / "head", tmp_path / "whole", walker)


def test_a_run_goes_on_only_with_all_of_its_options(tmp_path):
    """One that was not named at first counts as much as one that is missing now."""
    checkpoint.save(tmp_path, {"setup": {"seed": 1, "rate": None}})
    assert checkpoint.load(tmp_path, {"seed": 1})["setup"]["seed"] == 1
    for setup, named in (({"seed": 2}, "seed was 1, now 2"), ({"seed": 1, "window": 128}, "window was None, now 128")):
        with pytest.raises(OptionError, match=named):
            checkpoint.load(tmp_path, setup)


def test_the_steps_of_an_epoch_read_every_text_once(walker, walks, tmp_path, monkeypatch):
    texts, _ = read_texts([walks], VOCABULARY)
    read, batch = [], Texts.batch
    monkeypatch.setattr(Texts, "batch", lambda self, some: read.append((len(self), list(some))) or batch(self, some))
    steps = Order(texts, 1024, QUICK.seed).until(1) // 2
    train(walker, [walks], tmp_path / "head", Lesson("medusa"), replace(QUICK, steps=steps, accumulate=2))
    seen = [text for size, some in read if size == len(texts) for text in some]
    assert len(set(seen)) == len(seen)
    assert len(seen) > 0.7 * len(texts)


def test_the_rate_rises_then_falls_to_nothing():
    plan = TrainingPlan(steps=100, rate=2.0, warmup=4)
    assert [plan.rate_at(step, 100) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert plan.rate_at(52, 100) == pytest.approx(1.0)
    assert plan.rate_at(100, 100) == pytest.approx(0.0)
    assert plan.rate_at(2, 20) == 2.0  # a short run warms up for less
    assert plan.rate_at(1000, math.inf) == 2.0  # nobody knows yet how long it is


@pytest.mark.slow
def test_epochs_and_minutes_say_when_it_ends(walker, walks, tmp_path, monkeypatch):
    texts, _ = read_texts([walks], VOCABULARY)
    batches = Order(texts, 1024, QUICK.seed).until(2)
    lesson = Lesson("medusa")
    done = train(walker, [walks], tmp_path / "epochs", lesson, replace(QUICK, steps=None, epochs=2, accumulate=3))
    assert done.steps == -(-batches // 3)
    clock = itertools.count(0, 0.01)  # each look at it takes a hundredth of a second
    monkeypatch.setattr("slipstream.training.loop.perf_counter", lambda: next(clock))
    plan = replace(QUICK, steps=None, minutes=0.03, warmup=2, log_every=2)
    done = train(walker, [walks], tmp_path / "minutes", lesson, plan)
    assert 1.5 < next(clock) < 2.5  # of 1.8
    assert done.steps > 10
    rates = [line["rate"] for line in read_log(tmp_path / "minutes" / "log.jsonl") if "rate" in line]
    assert rates[-1] < 0.3 * max(rates)
    assert 0.2 * max(rates) < rates[len(rates) // 2] < 0.9 * max(rates)


def test_the_log_is_also_written_for_tensorboard_where_it_is_installed(walker, walks, tmp_path):
    train(walker, [walks], tmp_path / "head", Lesson("medusa"), replace(QUICK, steps=10))
    events = list((tmp_path / "head").glob("tensorboard/events*"))
    assert bool(events) == bool(importlib.util.find_spec("tensorboard"))


def test_a_loss_that_explodes_ends_the_run(walker, walks, tmp_path):
    with pytest.raises(OptionError, match="lower --rate than 1e\\+30"):
        train(walker, [walks], tmp_path / "head", Lesson("redrafter"), replace(QUICK, rate=1e30, warmup=0))


LAUNCH = """
import sys
from torch.distributed.run import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_two_launched_processes_do_what_one_does_with_twice_the_batches(walker, walks, tmp_path, forked):
    """By torch's launcher, which `accelerate launch` calls for several GPUs; for several CPUs it would want MPI."""
    walker.save_pretrained(tmp_path / "model")
    words = ("--standalone", "--nproc-per-node", 2, "-m", "slipstream", "train", "eagle", "--any-author")
    plan = ("--steps", 7, "--batch-tokens", 512, "--log-every", 2, "--save-every", 4, "--warmup", 2, "--rate", 1e-3)
    files = ("--model", tmp_path / "model", "--data", walks, "--out", tmp_path / "two", "--device", "cpu")
    done = forked.run(*words, *plan, *files, code=LAUNCH, OMP_NUM_THREADS=1, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("use it with --drafter eagle") == 1  # one process tells
    plan = TrainingPlan(steps=7, batch_tokens=512, accumulate=2, log_every=2, save_every=4, warmup=2, rate=1e-3)
    train(walker, [walks], tmp_path / "one", Lesson("eagle", any_author=True), plan)
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in two] == [2, 4, 6, 7]
    assert [line["loss"] for line in two[:3]] == pytest.approx([line["loss"] for line in one[:3]], rel=1e-4)
    assert two[-1]["accuracy"] == pytest.approx(one[-1]["accuracy"], abs=0.05)
    mine, its = (load_head(tmp_path / name, walker).state_dict() for name in ("one", "two"))
    for name in mine:
        torch.testing.assert_close(its[name], mine[name], rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_a_run_may_start_from_a_head(walker, walks, tmp_path):
    def first_loss(name, **how):
        train(walker, [walks], tmp_path / name, Lesson("eagle3", depths=2), replace(QUICK, steps=10), **how)
        return read_log(tmp_path / name / "log.jsonl")[0]["loss"]

    fresh = first_loss("fresh", sizes={"draft_vocab": 60})
    assert first_loss("later", start=tmp_path / "fresh") < 0.7 * fresh
    assert len(load_head(tmp_path / "later", walker).draft_ids) == 60
    with pytest.raises(OptionError, match="is of the kind eagle3: train eagle3, or start from a mlp"):
        train(walker, [walks], tmp_path / "new", Lesson("mlp"), QUICK, start=tmp_path / "fresh")
    with pytest.raises(OptionError, match="draft_vocab can't be chosen for a head that is there already"):
        first_loss("new", sizes={"draft_vocab": 70}, start=tmp_path / "fresh")


def test_a_redrafter_may_be_deepened(walker, walks, tmp_path):
    """The blocks that are new say nothing at first, and learn."""
    lesson, plan = Lesson("redrafter", depths=2), replace(QUICK, steps=10)
    train(walker, [walks], tmp_path / "two", lesson, plan)
    two, four = (load_head(tmp_path / "two", walker) for _ in range(2))
    four.deepen(4)
    states, tokens = torch.randn(1, 6, two.config.hidden_size), torch.arange(6)[None]
    for a, b in zip(two.predict(states, tokens, 2), four.predict(states, tokens, 2), strict=True):
        assert torch.equal(a.logits, b.logits)
    train(walker, [walks], tmp_path / "four", lesson, plan, sizes={"layers": 4}, start=tmp_path / "two")
    assert load_head(tmp_path / "four", walker).lm_head[3].linear.weight.abs().max() > 0
    with pytest.raises(OptionError, match="layers=1 is out of range: this head has 2 already"):
        train(walker, [walks], tmp_path / "one", lesson, plan, sizes={"layers": 1}, start=tmp_path / "two")


@pytest.mark.slow
def test_a_redrafter_looks_among_the_datas_most_frequent_tokens_once_it_is_trained(walker, walks, tmp_path):
    lesson, plan = Lesson("redrafter", depths=2), replace(QUICK, steps=10, save_every=4)
    texts, _ = read_texts([walks], VOCABULARY)

    def trained(name, **how):
        done = train(walker, [walks], tmp_path / name, lesson, plan, **how)
        return load_head(tmp_path / name, walker), done

    whole, done = trained("whole")
    assert whole.likely_ids is None  # the vocabulary is smaller than the default
    few, same = trained("few", sizes={"draft_vocab": 20})
    assert few.likely_ids.tolist() == texts.frequent(20, VOCABULARY).tolist()
    assert same.accuracy == done.accuracy  # it learns all tokens whatever it looks among
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, few.state_dict()[name])
    more, _ = trained("more", sizes={"draft_vocab": 30, "layers": 3}, start=tmp_path / "few")
    assert more.likely_ids.tolist() == texts.frequent(30, VOCABULARY).tolist()
    assert more.config.num_draft_layers == 3
    assert trained("all", start=tmp_path / "few")[0].likely_ids is None
    with pytest.raises(OptionError, match="draft_vocab=0 is out of range"):
        trained("none", sizes={"draft_vocab": 0}, start=tmp_path / "few")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_run_that_starts_from_likely_tokens_can_be_stopped(walker, walks, tmp_path):
    lesson, plan = Lesson("redrafter", depths=2), replace(QUICK, steps=10, save_every=4)
    train(walker, [walks], tmp_path / "first", lesson, plan, {"draft_vocab": 20})
    how = {"sizes": {"draft_vocab": 30}, "start": tmp_path / "first"}
    train(walker, [walks], tmp_path / "whole", lesson, plan, **how)

    def killed(step, total, line):  # noqa: ARG001
        if step == 6:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(walker, [walks], tmp_path / "parts", lesson, plan, watch=killed, **how)
    with pytest.raises(OptionError, match="draft_vocab was 30, now 31"):
        train(walker, [walks], tmp_path / "parts", lesson, plan, {"draft_vocab": 31}, start=how["start"], resume=True)
    train(walker, [walks], tmp_path / "parts", lesson, plan, resume=True, **how)
    assert same_weights(tmp_path / "parts", tmp_path / "whole", walker)
    assert len(load_head(tmp_path / "parts", walker).likely_ids) == 30


# ---- options


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Lesson("nope"), "no head 'nope' to train: there are medusa"),
        (lambda: Lesson("medusa", hass=True), "--hass is a way to train eagle"),
        (lambda: Lesson("eagle", labels="firm"), "labels='firm' is unknown"),
        (lambda: TrainingPlan(), "say one of steps, epochs and minutes"),
        (lambda: TrainingPlan(steps=3, minutes=1), "steps, minutes was given"),
        (lambda: TrainingPlan(steps=0), "steps=0 is out of range"),
        (lambda: recipes.name_sizes("medusa", {"inner_dim": 3}), "medusa has no --inner-dim: its sizes are --heads"),
    ],
)
def test_mistakes_are_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


def test_the_command(walker, walks, tmp_path):
    walker.save_pretrained(tmp_path / "model")
    app = typer.Typer()
    app.command()(command)

    def run(*words):
        given = ("--data", walks, "--model", tmp_path / "model", "--device", "cpu", "--batch-tokens", 1024, *words)
        return CliRunner().invoke(app, list(map(str, given)))

    done = run("mlp", "--out", tmp_path / "head", "--steps", 3, "--heads", 2, "--tied", "--any-author")
    assert done.exit_code == 0, done.exception
    said = " ".join(done.output.split())
    assert "right on held-out texts: t+1" in said
    assert said.endswith(f"use it with --drafter mlp --drafter-path {tmp_path / 'head'}")
    assert load_head(tmp_path / "head", walker).config.n_predict == 2
    refused = run("mlp", "--out", tmp_path / "new", "--steps", 3)
    assert isinstance(refused.exception, OptionError)
    assert "--any-author" in str(refused.exception)
    assert not Path(tmp_path / "new").exists()
    assert "has no --rnn" in str(run("eagle", "--out", tmp_path / "new", "--no-rnn").exception)
