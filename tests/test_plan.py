"""The theory against simulation and enumeration, the roofline by hand, survival from traces, and the plan's words."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.budget.chains import expected_tokens
from slipstream.budget.costs import TRIAL, TypicalTime
from slipstream.errors import OptionError
from slipstream.plan import advice, theory
from slipstream.plan.forecast import forecast, outcome, why
from slipstream.plan.roofline import CHIPS, LAUNCH, REACHED, Shape, chip, drafting_on_part, shape_of, step_cost
from slipstream.plan.survival import (
    Survival,
    Tally,
    after_forward,
    counted,
    fade,
    from_traces,
    guessed,
    parse_alpha,
    together,
)
from slipstream.plan.theory import Interval
from slipstream.plan.words import advice as words
from slipstream.plan.words import bar, table

# ---- closed forms


@pytest.mark.parametrize(
    ("alpha", "gamma"),
    [(0.6, 5), *(pytest.param(*other, marks=pytest.mark.slow) for other in [(0.1, 3), (0.8, 8), (0.95, 16)])],
)
def test_expected_tokens_are_those_of_simulated_steps(alpha, gamma):
    rejected = np.random.default_rng(0).geometric(1 - alpha, 10_000_000)  # which drafted token is the first wrong one
    assert expected_tokens(alpha, gamma) == pytest.approx(np.minimum(rejected, gamma + 1).mean(), rel=1e-3)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 4), (0.3, 1), (0.6, 5), (0.95, 16), (1.0, 7)])
def test_the_closed_form_is_the_sum_over_every_outcome(alpha, gamma):
    by_length = [(alpha**k * (1 - alpha if k < gamma else 1), k + 1) for k in range(gamma + 1)]
    assert sum(chance for chance, _ in by_length) == pytest.approx(1)
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(p * n for p, n in by_length), abs=1e-12)
    assert theory.tokens_of(theory.survival(alpha, gamma)) == pytest.approx(expected_tokens(alpha, gamma))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.99])
def test_alpha_comes_back_from_its_tokens(alpha):
    assert theory.alpha_of(expected_tokens(alpha, 6), 6) == pytest.approx(alpha, abs=1e-9)


def test_drawn_tokens_are_accepted_as_often_as_the_formula_says():
    """Speculative sampling itself, to 1e-3: draw from q, accept with p / (l q)."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    draws, coins = rng.choice(6, 4_000_000, p=q), rng.random(4_000_000)
    for lenience in (1.0, 0.5, 0.1):
        accepted = float((coins < p[draws] / (lenience * q[draws])).mean())
        assert theory.acceptance(p, q, lenience) == pytest.approx(accepted, abs=1e-3)
    assert theory.acceptance(p, q) == pytest.approx(1 - theory.divergence(p, q))
    assert theory.divergence([1, 0], [0, 1]) == 1


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
def test_lenience_stays_within_its_bounds_for_any_p_and_q(lenience):
    rng = np.random.default_rng(2)
    for _ in range(200):
        p, q = rng.dirichlet(np.full(5, 0.3)), rng.dirichlet(np.full(5, 0.3))
        low, high = theory.lenient_range(theory.acceptance(p, q), lenience)
        assert low - 1e-12 <= theory.acceptance(p, q, lenience) <= high + 1e-12


def test_the_notes_table_of_lenience_is_within_the_bounds():
    for alpha, lenient in [(0.07, 0.10), (0.19, 0.23), (0.62, 0.71), (0.68, 0.80)]:
        low, high = theory.lenient_range(alpha, 0.5)
        assert low <= lenient <= high


# ---- trees


def test_a_trees_tokens_are_the_mean_over_all_its_outcomes():
    """Every way in which the children of every node can turn out: at most one child of a node is right."""
    parents, chances = [-1, 0, 0, 1, 1, 2, 3], [1.0, 0.5, 0.3, 0.6, 0.2, 0.7, 0.9]
    children = {n: [i for i, parent in enumerate(parents) if parent == n] for n in range(len(parents))}
    inner = [n for n in children if children[n]]
    total = mean = 0.0
    for right in itertools.product(*([*children[n], None] for n in inner)):
        chosen = dict(zip(inner, right, strict=True))
        chance = math.prod(
            chances[c] if c is not None else 1 - sum(chances[i] for i in children[n]) for n, c in chosen.items()
        )
        node, length = 0, 1
        while (node := chosen.get(node)) is not None:
            length += 1
        total, mean = total + chance, mean + chance * length
    assert total == pytest.approx(1)
    assert theory.tree_tokens(parents, chances) == pytest.approx(mean, abs=1e-12)


def every_tree(nodes, width):
    """Parents and ranks of all trees of so many drafted nodes, children in the order of their ranks."""
    if nodes == 0:
        yield [-1], [None]
        return
    seen = set()
    for parents, which in every_tree(nodes - 1, width):
        for parent in range(len(parents)):
            rank = parents.count(parent)
            if rank < width:
                shape = canonical([*parents, parent], [*which, rank])
                if shape not in seen:
                    seen.add(shape)
                    yield [*parents, parent], [*which, rank]


def canonical(parents, which):
    paths = [()]
    for parent, rank in zip(parents[1:], which[1:], strict=True):
        paths.append((*paths[parent], rank))
    return tuple(sorted(paths))


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("nodes", [1, 3, 5, 6])
def test_no_tree_of_as_many_nodes_gives_more_than_the_best_one(alpha, nodes):
    children = theory.ranks(alpha, 3, 0.5)
    best = max(
        theory.tree_tokens(parents, [1.0, *(children[rank] for rank in which[1:])])
        for parents, which in every_tree(nodes, 3)
    )
    parents, chances = theory.best_tree(children, nodes)
    assert len(parents) == nodes + 1
    assert theory.tree_tokens(parents, chances) == pytest.approx(best, abs=1e-12)


def test_a_tree_of_one_child_each_is_a_chain():
    parents, chances = theory.best_tree([0.6], 5)
    assert parents == [-1, 0, 1, 2, 3, 4]
    assert theory.tree_tokens(parents, chances) == pytest.approx(expected_tokens(0.6, 5))
    assert theory.depth_of(theory.best_tree([0.6, 0.2], 9, depth=2)[0]) == 2


def test_chances_of_children_add_up_to_no_more_than_certainty():
    assert theory.ranks(0.6, 2, 0.5) == pytest.approx([0.6, 0.4 * 0.3])
    assert sum(theory.ranks(0.9, 50, 1.0)) <= 1 + 1e-12


# ---- time


def test_the_walltime_is_that_of_simulated_clocks():
    alpha, gamma, c = 0.7, 4, 0.1
    rng = np.random.default_rng(3)
    kept = np.cumprod(rng.random((1_000_000, gamma)) < alpha, axis=1, dtype=np.int8).sum(axis=1, dtype=np.int64)
    simulated = (1 + kept).sum() / (len(kept) * (gamma * c + 1))
    assert theory.walltime(alpha, gamma, c) == pytest.approx(simulated, rel=3e-3)


@pytest.mark.parametrize("c", [0.05, 0.3, 0.6])
def test_something_pays_exactly_where_alpha_is_above_c(c):
    assert not theory.pays(c, c)
    assert not theory.pays(c - 0.01, c)
    assert theory.pays(c + 0.01, c)
    assert theory.best_gamma(c + 0.1, c)[1] >= (1 + c + 0.1) / (1 + c) - 1e-12  # Corollary 3.9
    assert theory.best_gamma(c - 0.01, c) == (0, 1.0)


def test_rows_that_take_time_make_drafts_shorter():
    free, _ = theory.best_gamma(0.8, 0.02)
    dear, rate = theory.best_gamma(0.8, 0.02, lambda rows: 1 + 0.1 * (rows - 1))
    assert 0 < dear < free
    assert rate == max(theory.walltime(0.8, g, 0.02, lambda rows: 1 + 0.1 * (rows - 1)) for g in range(1, 30))


def test_the_best_tree_by_time_is_the_best_of_all_sizes_and_depths():
    children, drafting, step = theory.ranks(0.6, 4, 0.5), lambda d: 0.04 * d, lambda rows: 1 + 0.03 * (rows - 1)
    parents, rate = theory.best_nodes(children, drafting, step, most=20)
    tried = []
    for depth, nodes in itertools.product(range(1, 21), range(1, 21)):
        shape, chances = theory.best_tree(children, nodes, depth)
        tried.append(theory.tree_tokens(shape, chances) / (drafting(theory.depth_of(shape)) + step(len(shape))))
    assert rate == pytest.approx(max(tried))
    assert theory.best_nodes(children, lambda d: 5.0 * d, step) == ([-1], 1.0)  # nothing pays
    assert len(parents) > 2


def test_operations_are_those_of_the_theorem():
    assert theory.operations(0.0, 4, 0.1) == pytest.approx(5.4)  # all is thrown away
    assert theory.operations(1.0, 4, 0.0) == pytest.approx(1.0)
    assert theory.operations(0.6, 5, 0.1) == pytest.approx((1 - 0.6) * (0.5 + 6) / (1 - 0.6**6))


# ---- intervals


@pytest.mark.parametrize("grouped", [False, True])
def test_95_of_100_unseen_means_lie_within_the_interval(grouped):
    rng, held, tried = np.random.default_rng(4), 0, 600
    for _ in range(tried):
        means = np.where(np.arange(24) % 2, 1.5, 3.0 if grouped else 1.5)
        over = means * rng.gamma(20, 1 / 20, 24)
        known, unseen = over[:12], over[12:]
        groups = [str(i % 2) for i in range(12)]
        held += theory.mean_ratio(known, np.ones(12), groups, 12).holds(unseen.mean())
    assert 0.92 <= held / tried <= 0.98


def test_one_text_says_nothing_about_others():
    assert theory.mean_ratio([3.0], [2.0], [""], 5) == (1.5, 0.0, math.inf)


def test_students_quantiles():
    known = {4: 2.776, 6: 2.447, 10: 2.228, 30: 2.042}
    for free, quantile in known.items():
        assert theory.student(free) == pytest.approx(quantile, rel=0.02)


# ---- the roofline


SEVEN = Shape(32, 4096, 32, 32, 128, 32_000, 6_607_077_376, windows=(None,) * 32)
GROUPED = Shape(32, 4096, 32, 8, 128, 128_256, 7_504_924_672, windows=(None,) * 32)  # as Llama 3.1 with 8B parameters


def test_a_step_by_hand():
    cost = step_cost(SEVEN, CHIPS["H200"], rows=1, batch=1, context=1024)
    assert cost.weights == pytest.approx(2 * 6_607_077_376 / (REACHED * 4.8e12))
    assert cost.keys == pytest.approx(2 * 32 * 2 * 32 * 128 * 1024 / (REACHED * 4.8e12))
    assert cost.launches == 32 * LAUNCH
    assert cost.bound == "weights"
    assert cost.seconds == pytest.approx(cost.weights + cost.keys + cost.launches)


def test_what_was_measured_on_an_h200_is_what_the_roofline_says():
    assert 1e3 * step_cost(SEVEN, CHIPS["H200"]).seconds == pytest.approx(4.05, rel=0.05)
    small = Shape(30, 576, 9, 3, 64, 49_152, 134_515_008, windows=(None,) * 30)
    assert 1e3 * step_cost(small, CHIPS["H200"]).seconds == pytest.approx(0.80, rel=0.05)


def test_fewer_keys_pay_only_where_keys_are_most_of_a_step():
    def gain(batch, context):
        return drafting_on_part(GROUPED, CHIPS["H200"], batch, context, keys=512, depth=4, tokens=4.0)

    assert gain(1, 512) == pytest.approx(4 / 5, abs=1e-3)  # five equal steps for four tokens
    assert gain(1, 512) < 1 < gain(1, 131_072)
    assert gain(2, 8192) < gain(8, 8192) < gain(32, 8192) < 4


def test_a_plan_for_magicdec_says_what_the_roofline_says_of_part_of_the_keys():
    def deepest(batch, context):
        at = advice.on_chip("H200", CHIPS["H200"], GROUPED, batch, context, "bfloat16")
        return advice.consider(guessed("magicdec", Interval(0.8, 0.7, 0.9), 4), at)["by_depth"][-1]["speedup"]["value"]

    for batch, context in ((1, 512), (8, 32_768)):
        tokens = expected_tokens(0.8, 4)
        by_hand = drafting_on_part(GROUPED, CHIPS["H200"], batch, context, advice.PART, 4, tokens)
        assert deepest(batch, context) == pytest.approx(by_hand)
    assert deepest(1, 512) < 1 < deepest(8, 32_768)


def test_batches_and_contexts_change_what_binds():
    assert step_cost(SEVEN, CHIPS["H200"], batch=64, context=32_768).bound == "keys"
    assert step_cost(SEVEN, CHIPS["H200"], rows=8, batch=128, context=64).bound == "arithmetic"
    assert step_cost(SEVEN, CHIPS["H200"], rows=16).seconds == pytest.approx(step_cost(SEVEN, CHIPS["H200"]).seconds)


def test_experts_are_read_as_far_as_rows_go_to_them():
    few = Shape(1, 8, 1, 1, 8, 10, dense=0, experts=1_000_000, chosen=0.25, windows=(0,))
    one, many = (step_cost(few, CHIPS["A100"], rows).weights for rows in (1, 200))
    assert one == pytest.approx(0.25 * many, rel=1e-6)


def test_a_window_ends_what_keys_cost(tiny):
    windowed = Shape(2, 8, 1, 1, 8, 10, dense=100, windows=(None, 16))
    assert windowed.looked_at(1000) == 1016
    model = tiny("llama")
    shape = shape_of(model.config, {name: p.numel() for name, p in model.named_parameters()})
    assert shape.looked_at(100) == 100 * model.config.num_hidden_layers
    embedding = model.get_input_embeddings().weight.numel()
    total = sum(p.numel() for p in model.parameters())
    assert shape.dense == total - (0 if model.config.tie_word_embeddings else embedding)


def test_an_unknown_chip_is_refused_by_name():
    assert chip("h200") is CHIPS["H200"]
    with pytest.raises(OptionError, match=r"H201.*H200.*here"):
        chip("H201")


# ---- survival


def steps_of(alpha, gamma, answers, seed=0, seconds=(0.0, 1.0, 0.0)):
    rng, found = np.random.default_rng(seed), []
    for _ in range(answers):
        tally = Tally()
        for _ in range(200):
            kept = int(np.cumprod(rng.random(gamma) < alpha).sum())
            tally.count([i - 1 for i in range(gamma + 1)], list(range(kept + 1)))
            tally.drafting += seconds[0]
            tally.verifying += seconds[1]
            tally.host += seconds[2]
        found.append(tally)
    return found


def test_survival_is_counted_as_it_was_drawn():
    found = counted("eagle3", steps_of(0.6, 4, 40), "steps")
    assert found.reached[0] == pytest.approx(theory.survival(0.6, 4), abs=0.02)
    assert found.widths == (1.0, 1.0, 1.0, 1.0)
    assert found.alpha.holds(0.6)
    assert found.alpha.high - found.alpha.low < 0.05
    assert found.tokens().holds(expected_tokens(0.6, 4))
    assert found.rows(2) == 3
    assert found.tokens(2).value == pytest.approx(expected_tokens(0.6, 2), abs=0.03)


def test_children_are_counted_by_rank():
    tally = Tally()
    for _ in range(60):
        tally.count([-1, 0, 0, 1], [0, 1, 3])
    for _ in range(40):
        tally.count([-1, 0, 0, 1], [0, 2])
    assert tally.tokens == 100 + 60 * 2 + 40
    assert tally.nodes[:3] == [200, 100, 0]
    assert (tally.ranks, tally.offered) == ([120, 40], [160, 40])
    assert fade([tally]) == pytest.approx((40 / 40) / (120 / 160))
    assert fade([Tally()]) is None


def test_traces_are_counted_by_drafter(tmp_path):
    header = {"format": "slipstream-trace", "version": 1, "model": "m", "drafter": "pld", "accept": "match"}
    header |= {"exact": True, "prompt": "", "prompt_tokens": 1}
    node = {"token": 1, "text": "a", "parent": -1, "score": None, "sources": {}}
    child = node | {"parent": 0, "score": 0.5, "sources": {"pld": 0.5}}
    own = {"token": 2, "text": "b", "source": None}
    times = {"draft_ms": 1.0, "verify_ms": 10.0, "host_ms": 0.5}
    first = {"step": 0, "first": 0, "nodes": [node], "path": [0], "emitted": [own]} | times
    second = {"step": 1, "first": 1, "nodes": [node, child], "path": [0, 1], "emitted": [own, own]} | times
    third = {"step": 2, "first": 3, "nodes": [node, child], "path": [0], "emitted": [own]} | times
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, first, second, third)))
    (found,) = from_traces([path, path])
    assert (found.drafter, found.source) == ("pld", "2 traces")
    assert found.reached[0] == (0.5,)
    assert found.tokens().value == 1.5
    assert found.answers[0].drafting == pytest.approx(0.002)
    both = together([found, from_traces([path])[0]])  # several recordings count as one
    assert (len(both.answers), both.source) == (3, "2 traces, 1 traces")
    assert both.tokens().value == 1.5
    assert together([found]) is found


@pytest.mark.parametrize("given", ["0.6±0.1", "0.6+-0.1", " 0.6 +/- 0.1 "])
def test_a_guess_has_an_interval(given):
    assert parse_alpha(given) == pytest.approx((0.6, 0.5, 0.7))


@pytest.mark.parametrize("given", ["", "much", "1.2", "0.5±", "-0.1"])
def test_a_guess_that_is_no_chance_is_refused(given):
    with pytest.raises(OptionError, match=r"0\.6±0\.1"):
        parse_alpha(given)


# ---- forecasts


def test_a_forecast_holds_for_texts_like_the_known_ones():
    known, unseen = (steps_of(0.6, 4, 12, seed, (0.1, 1.2, 0.02)) for seed in (1, 2))
    plain = steps_of(0.0, 1, 12, 3, (0.0, 1.0, 0.0))
    expected, found = forecast(known, 1.0, 12), outcome(unseen, plain)
    assert expected.tokens.holds(found.tokens)
    assert expected.speedup.holds(found.speedup)
    assert why(expected, found) == []


def test_a_replayed_forecast_allows_for_another_moment_of_the_machine():
    known = steps_of(0.6, 4, 12, 1, (0.1, 1.2, 0.02))
    lived, replayed = forecast(known, 1.0, 12), forecast(known, 1.0, 12, replayed=True)
    assert replayed.tokens == lived.tokens
    assert replayed.speedup.low < lived.speedup.low < lived.speedup.high < replayed.speedup.high
    assert Interval(2.0, 2.0, 2.0).wider(0.05) == pytest.approx((2.0, 2 * math.exp(-0.05), 2 * math.exp(0.05)))


@pytest.mark.parametrize(
    ("seconds", "alpha", "said"),
    [
        ((0.1, 1.2, 0.9), 0.6, "the host took"),
        ((0.1, 2.4, 0.02), 0.6, "captured or compiled"),
        ((0.9, 1.2, 0.02), 0.6, "drafting took"),
        ((0.1, 1.2, 0.02), 0.2, "the texts gave"),
    ],
)
def test_a_forecast_that_was_far_off_says_why(seconds, alpha, said):
    expected = forecast(steps_of(0.6, 4, 12, 1, (0.1, 1.2, 0.02)), 1.0, 12)
    found = outcome(steps_of(alpha, 4, 12, 2, seconds), steps_of(0.0, 1, 12, 3))
    reasons = why(expected, found)
    assert len(reasons) == 1
    assert said in reasons[0]


def test_a_replay_reads_all_weights_after_a_step_as_decoding_does():
    layers, read = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4)), []
    layers.device = torch.device("cpu")
    weights = {each.data_ptr(): name for name, each in layers.named_parameters()}

    class Reading(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.sum.default:
                read.append(weights[args[0].data_ptr()])
            return function(*args, **(kwargs or {}))

    steps = []
    with Reading():
        after_forward(steps.append, layers)("a step")
    assert (steps, read) == (["a step"], list(weights.values()))
    assert after_forward(steps.append, None) == steps.append


# ---- the plan


def place(rows=0.0, draft=0.01):
    return advice.Place("a place", 1, 512, "float32", lambda r: 1 + rows * (r - 1), lambda _name, deep: draft * deep)


def test_a_drafter_is_considered_at_its_best_depth():
    row = advice.consider(guessed("eagle3", Interval(0.7, 0.6, 0.8), 8), place(rows=0.1))
    gamma, rate = theory.best_gamma(0.7, 0.01, lambda r: 1 + 0.1 * (r - 1), 8)
    assert (row["best"]["depth"], row["best"]["speedup"]["value"]) == (gamma, pytest.approx(rate))
    assert row["verdict"] == "pays"
    assert row["alpha"]["value"] == pytest.approx(0.7)
    assert row["c"] == pytest.approx(0.01)


def test_nothing_pays_below_c_and_the_words_say_so():
    row = advice.consider(guessed("model", Interval(0.2, 0.1, 0.3), 8), place(draft=0.5))
    assert row["verdict"] == "does not pay"
    document = {"drafters": [row], "plain": advice.plain_step(place(), None, None), "batches": []}
    said = "\n".join(words(document))
    assert "Nothing pays" in said
    assert "α = 0.20" in said
    assert table(document).row_count == 1


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ([1.5, 1.2, 1.1], ["eagle3 still pays with 4 sequences"]),
        ([1.5, 1.2, 0.9], ["From 4 sequences at a time on, eagle3 no longer pays"]),
        ([0.8, 1.2, 1.1], ["eagle3 pays from 2 sequences"]),
        ([0.8, 1.2, 0.9], ["eagle3 pays from 2 sequences", "From 4 sequences at a time on, eagle3 no longer pays"]),
        ([0.8, 0.9, 0.9], ["eagle3 pays with no number"]),
    ],
)
def test_a_plan_says_with_how_many_sequences_a_drafter_pays(speedups, said):
    row = advice.consider(guessed("eagle3", Interval(0.7, 0.6, 0.8), 8), place(rows=0.1))
    batches = [{"batch": n, "speedup": {"eagle3": each}} for n, each in zip((1, 2, 4), speedups, strict=True)]
    document = {"drafters": [row], "plain": advice.plain_step(place(), None, None), "batches": batches}
    found = [each for each in words(document) if "at a time" in each]
    assert [each.startswith(begins) for each, begins in zip(found, said, strict=True)] == [True] * len(said)


def test_what_was_never_drafted_does_not_pay():
    empty = Survival("pld", ((), (), ()), (), tuple(steps_of(0.5, 1, 1)), "steps")
    assert advice.consider(empty, place())["verdict"] == "does not pay"


def test_bars_show_plain_decoding_and_the_interval():
    drawn = bar(2.0, 1.5, 3.0, 4.0)
    assert drawn.index("|") == 8
    assert (drawn.index("▓"), drawn.rindex("─")) == (13, 24)


@pytest.mark.parametrize("name", list(advice.NEEDS))
def test_every_drafter_has_a_cost_on_every_chip(name):
    for device, each in CHIPS.items():
        at = advice.on_chip(device, each, SEVEN, 1, 512, each.dtype, draft=SEVEN)
        row = advice.consider(advice.guess(name, None), at)
        assert row["best"]["speedup"]["low"] <= row["best"]["speedup"]["value"] <= row["best"]["speedup"]["high"]
    assert at.draft("model", 2) == pytest.approx(2 * at.plain)


# ---- from a config to a document


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_config_is_all_that_a_plan_for_a_chip_needs(config, name):
    from slipstream.plan.make import Asked, make

    document = make(Asked(str(config / name), device="A100", batch=2, context=64))
    json.dumps(document, allow_nan=False)
    assert {row["drafter"] for row in document["drafters"]} == advice.NEEDS.keys() - {"model"}
    assert document["plain"]["bound"] == "launches"  # of so small a model
    assert [each["batch"] for each in document["batches"]] == list(advice.BATCHES)
    assert document["lenience"][0]["alpha"][0] == document["lenience"][0]["alpha"][1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device": "H201"}, "there are B200"),
        ({"device": "H200", "drafters": ["nobody"]}, "nobody.*can't be planned for"),
        ({"device": "H200", "drafters": ["model"]}, "--draft-model"),
        ({"device": "H200", "dtype": "float12"}, "float12.*bfloat16"),
        ({"context": 64}, "--context 64.*named --device"),
    ],
)
def test_what_can_not_be_planned_is_refused_with_what_can(config, asked, said):
    from slipstream.plan.make import Asked, make

    with pytest.raises(OptionError, match=said):
        make(Asked(str(config), **asked))


@pytest.mark.slow
def test_a_plan_for_this_machine_is_in_the_precision_and_with_the_draft_model_that_were_asked_for(small):
    from slipstream.plan.make import Asked, make

    document = make(Asked(str(small), ["suffix", "model"], dtype="bfloat16", draft_model=str(small)))
    assert (document["dtype"], document["context"]) == ("bfloat16", 64)
    assert [row["drafter"] for row in document["drafters"]] == ["suffix", "model"]
    assert document["drafters"][1]["c"] > document["drafters"][0]["c"]


def test_a_plan_for_several_sequences_counts_the_drafts_of_all(tiny):
    """Counted times are of one sequence. What was measured with several at once is used as it is."""
    from slipstream import LLM
    from slipstream.plan.here import here

    llm = LLM(tiny("llama"), drafter="auto", drafters="pld")
    auto, known = llm.engine.drafter, {}
    for name in ("suffix", "eagle3"):
        known[name] = counted(name, steps_of(0.6, 4, 4, seconds=(0.002, 1.0, 0.0)), "steps")
    auto.pilot.sources(1)["pld"].drafting = TypicalTime(TRIAL, 0.001)
    one, four = here(llm, 1, known), here(llm, 4, known)
    for name, seconds in {"suffix": 0.002, "eagle3": 0.002, "pld": 0.001}.items():
        assert (one.draft(name, 4), four.draft(name, 4)) == pytest.approx((seconds, 4 * seconds))
    auto.pilot.sources(4)["pld"].drafting = TypicalTime(TRIAL, 0.003)
    auto.pilot.sources(4)["eagle3"], auto.parts["eagle3"] = auto.pilot.sources(4)["pld"], auto.parts["pld"]
    for name, seconds in {"suffix": 0.008, "eagle3": 0.003, "pld": 0.003}.items():
        assert four.draft(name, 4) == pytest.approx(seconds)


def test_the_page_shows_every_drafter_in_every_chart(config, tmp_path, browser):
    from slipstream.plan.make import Asked, make
    from slipstream.plan.page import write_page

    document, path = make(Asked(str(config), device="H200", alpha=Interval(0.6, 0.5, 0.7))), tmp_path / "plan.html"
    write_page(document, path)
    browser.open(path)
    drafters, depths = len(document["drafters"]), len(document["drafters"][0]["by_depth"])
    marks = "document.querySelectorAll('#{} .wide .mark').length"
    assert browser.run(marks.format("speedups")) == drafters
    assert browser.run(marks.format("depths")) == browser.run(marks.format("survival")) == drafters * depths
    assert browser.run(marks.format("batches")) == drafters * len(advice.BATCHES)
    assert browser.run("document.querySelectorAll('tr.row').length") == drafters
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    assert browser.run("document.querySelectorAll('.notes li').length") == len(words(document))


@pytest.mark.parametrize(("padded", "nodes", "most"), [(False, None, 16), (True, None, 31), (True, 3, 3)])
def test_a_replay_drafts_as_much_as_decoding_does_where_it_was_recorded(tiny, padded, nodes, most):
    from dataclasses import replace

    from slipstream import LLM
    from slipstream.evaluate.contestants import Decoding, Ours
    from slipstream.evaluate.measure import Item
    from slipstream.evaluate.replay import record
    from slipstream.plan.survival import replayed

    plain, decoding = Ours("none", LLM(tiny("llama"), drafter="none")), Decoding(60)
    prompt = list(range(3, 40)) * 3  # in which there is always much to copy
    items = [Item("a", "x", prompt, prompt[:60], 0.0)]
    recording = replace(record(plain.llm.target, "tiny", items, decoding), padded=padded)
    (tally,) = replayed(recording, "pld", {"length": 40}, None, None, nodes)
    assert max(k for k, n in enumerate(tally.nodes, 1) if n) == most


def test_recordings_are_replayed_with_any_drafter(tmp_path, tiny):
    from slipstream import LLM
    from slipstream.evaluate.contestants import Decoding, Ours
    from slipstream.evaluate.measure import Item
    from slipstream.evaluate.replay import record
    from slipstream.plan.survival import from_recording

    plain, decoding = Ours("none", LLM(tiny("llama"), drafter="none")), Decoding(20)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    items = [Item("a", "x", prompt, plain.answer(prompt, decoding).tokens, 0.0)]
    record(plain.llm.target, "tiny", items, decoding).save(tmp_path)
    found = from_recording(tmp_path, "suffix", {}, None, None)
    live = LLM(tiny("llama"), drafter="suffix").generate(prompt, max_new_tokens=20).stats
    (tally,) = found.answers
    assert (tally.steps, tally.tokens) == (live.steps - 1, live.new_tokens - 1)
    assert sum(tally.nodes) == live.nodes_verified
