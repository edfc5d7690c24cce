"""The accept rules on one node with known probabilities, and what they say of themselves."""

import numpy as np
import pytest
import torch

from slipstream.accept import RULES, Lenient, Match, Rejection, Typical, make_rule, residual, verify
from slipstream.errors import OptionError
from slipstream.sampling import Sampler, Sampling
from slipstream.targets import Scores
from slipstream.targets.captured.function import Captured
from slipstream.tree import TokenTree
from test_distribution import outcomes

P = np.array([0.5, 0.3, 0.15, 0.05])


def scores(tree, p=P):
    return Scores(torch.from_numpy(np.log(np.tile(p, (len(tree), 1)))).float(), {}, tree.depths)


def sampler(seed=0, temperature=1.0):
    return Sampler(Sampling(temperature=temperature), [0], seed)


def walk(rule, tree, seed=0, temperature=1.0, over=lambda _: False):
    return verify(rule, tree, scores(tree), sampler(seed, temperature), over)


def share(rule, tree):
    """How often the only child is accepted: over all that may be decided, by their probabilities."""
    return sum(weight for emitted, weight in outcomes(rule, tree, lambda _: P).items() if len(emitted) > 1)


def test_match_accepts_a_child_as_often_as_the_target_says_it():
    assert share(Match(), TokenTree.chain(0, [1])) == pytest.approx(0.3)


def test_a_certain_child_is_accepted_with_p():
    assert share(Rejection(), TokenTree.chain(0, [1])) == pytest.approx(0.3)


def test_a_drawn_child_is_accepted_with_p_over_q():
    q = torch.tensor([[0.1, 0.6, 0.2, 0.1]])
    tree = TokenTree.build([0, 1], [-1, 0], q=q, q_row=[0, -1])
    assert share(Rejection(), tree) == pytest.approx(0.5)
    assert share(Lenient(lenience=0.8), tree) == pytest.approx(0.3 / (0.8 * 0.6))


def test_what_is_left_once_a_child_was_rejected():
    (p, q), mass = residual(torch.tensor(np.array([P, [0.1, 0.6, 0.2, 0.1]])), 1)
    assert p.tolist() == pytest.approx([1, 0, 0, 0])
    assert q.tolist() == pytest.approx([0.25, 0, 0.5, 0.25])
    assert mass.tolist() == pytest.approx([0.4])
    (p,), mass = residual(torch.tensor(P)[None], 1)
    assert p.tolist() == pytest.approx([0.5 / 0.7, 0, 0.15 / 0.7, 0.05 / 0.7])
    assert residual(torch.tensor([[0.0, 1.0]]), 1)[1].tolist() == [0], "nothing is left"


@pytest.mark.parametrize("drawn", [pytest.param(False, marks=pytest.mark.slow), True], ids=["certain", "drawn"])
def test_rejection_decides_about_all_nodes_at_once_as_about_each(drawn):
    """Random trees with up to four children a node, whose p is nearly nothing here and there."""
    rng, vocabulary = np.random.default_rng(5), 11
    accepted = 0
    for seed in range(200):
        size = int(rng.integers(1, 12))
        parents = [-1, *(int(rng.integers(0, i)) for i in range(1, size))]
        tokens = np.zeros(size, np.int64)
        for parent in range(size):
            mine = [i for i in range(size) if parents[i] == parent]
            tokens[mine] = rng.choice(vocabulary, len(mine), replace=seed % 4 == 0)  # equal siblings too
        logits = torch.from_numpy(rng.normal(0, 4, (size + 2, vocabulary))).float()
        q = torch.softmax(torch.from_numpy(rng.normal(0, 2, (size, vocabulary))), -1) if drawn else None
        rows = [-1 if i % 3 == 2 else i for i in range(size)] if drawn else None
        tree = TokenTree.build(tokens, parents, q=q, q_row=rows)

        def said(together, tree=tree, logits=logits, seed=seed):
            found = Scores(logits, {}, tree.depths, begin=1)
            found.captured = (lambda function: Captured(function, torch.device("cpu"))) if together else None
            drawing = Sampler(Sampling(temperature=0.7), [0, 1], seed)
            verdict = verify(Rejection(), tree, found, drawing, lambda _: False)
            assert (found.decided is not None) == together
            return verdict

        assert said(together=True) == said(together=False)
        accepted += len(said(together=True).path) - 1
    assert accepted > 20


def test_typical_accepts_what_is_plausible_and_nothing_else():
    # entropy 1.14 nats: the threshold is min(0.09, 0.3 * 0.32) = 0.09
    for rule in (Typical(), Typical(epsilon=0.4), Typical(delta=1.0)):  # the lower of both limits
        assert share(rule, TokenTree.chain(0, [2])) == pytest.approx(1)
    assert share(Typical(), TokenTree.chain(0, [3])) == pytest.approx(0.05)


def test_typical_takes_the_likeliest_of_several_children():
    tree = TokenTree.from_continuations(0, [[2], [1]])
    assert walk(Typical(), tree).path == [0, tree.child(0, 1)]


def test_greedy_lenience_compares_with_the_best():
    half = TokenTree.chain(0, [1])  # p = 0.3, the best has 0.5
    assert walk(Lenient(lenience=0.59), half, temperature=0).path == [0, 1]
    assert walk(Lenient(lenience=0.61), half, temperature=0).path == [0]


def test_the_walk_ends_where_the_text_ends_even_inside_a_draft():
    tree = TokenTree.chain(0, [0, 0, 0, 0])  # token 0 is the greedy one all the way
    asked = []

    def over(token):
        asked.append(token)
        return len(asked) == 2

    verdict = walk(Match(), tree, temperature=0, over=over)
    assert (verdict.path, verdict.bonus, asked) == ([0, 1], 0, [0, 0])


def test_rules_know_whether_they_are_lossless():
    assert {name: rule.lossless for name, rule in RULES.items()} == {
        "match": True,
        "rejection": True,
        "typical": False,
        "lenient": False,
    }


def test_unknown_rules_and_options_are_refused():
    with pytest.raises(OptionError, match="'nope' is unknown: there are match"):
        make_rule("nope")
    with pytest.raises(OptionError, match="no option speed: its options are epsilon, delta"):
        make_rule("typical", speed=2)
    with pytest.raises(OptionError, match="lenience=0"):
        make_rule("lenient", lenience=0)
    with pytest.raises(OptionError, match="epsilon"):
        make_rule("typical", epsilon=0)
