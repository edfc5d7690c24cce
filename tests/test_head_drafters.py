"""Drafting with medusa, redrafter and mlp heads: trees against plain loops, draws against q, batches against ones."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.special import chdtri

from families import tiny_model
from slipstream import LLM, drafters
from slipstream.accept import Rejection, make_rule, verify
from slipstream.budget import Budget
from slipstream.drafters import _head as drafting
from slipstream.drafters._beams import draw, overlay, prefix_match
from slipstream.drafters.base import Hidden, Proposal, Seen
from slipstream.errors import DrafterError, OptionError
from slipstream.heads import HEADS, registry, save_head
from slipstream.heads.packing import unpack
from slipstream.heads.ranks import assumed, check_tree, measure, save_tree, tune
from slipstream.request import Request
from slipstream.sampling import Sampler, Sampling, gumbel, noise_key
from slipstream.targets import open_target
from slipstream.targets.captured.function import Captured
from slipstream.tree import TokenTree

KINDS = ["medusa", "redrafter", "mlp"]
BIG = Budget(1000, 100)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama")


def random_head(kind, model, seed=0, **sizes):
    """Untrained heads begin near the target's own output: shake them, so that every depth says something else."""
    head = HEADS[kind].fresh(model, seed=seed, **sizes)
    noise = torch.Generator().manual_seed(seed + 1)
    for weight in head.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=noise)
    return head


def make(kind, model, sizes=None, **options):
    return drafters.make(kind, open_target(model), drafter_path=random_head(kind, model, **(sizes or {})), **options)


def session(drafter, state, read=3, **request):
    """A session that has seen `read` tokens, the last of them with this state."""
    begun = drafter.begin(Request([1] * read, 20, **request))
    rows = torch.stack([-state] * (read - 1) + [state])
    begun.observe(Seen([1] * read, 0, Hidden(dict.fromkeys(drafter.layers, rows))))
    return begun


def states(count, model, seed=0):
    return torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def said(head, state, root, path, temperature=1.0):
    """(V,) log-probabilities of what follows root and path, read off the whole text as in training."""
    text = torch.tensor([[0, root, *path]])
    *_, last = head.predict(state.expand(1, text.shape[1], -1), text, len(path) + 1)
    return (last.logits[0, 0].double() / temperature).log_softmax(-1)


def paths(tree):
    """{tokens of each path} -> its probability."""
    return {tuple(tree.tokens[tree.path_to(i)].tolist()): tree.value[i] for i in range(len(tree))}


# ---- beams


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("kind", ["redrafter", "mlp"])
def test_beams_are_those_of_a_plain_beam_search(kind, every, model):
    drafter = make(kind, model, beams=5, length=3, every=every)
    for root, state in enumerate(states(4, model)):
        beams, held = [((), 0.0)], []
        for _ in range(3):
            longer = []
            for path, value in beams:
                longer += [
                    ((*path, t), value + p) for t, p in enumerate(said(drafter.head, state, root, path).tolist())
                ]
            beams = sorted(longer, key=lambda b: -b[1])[:5]
            held += beams
        kept = held if every else beams
        expected = {(root, *path[:n]) for path, _ in kept for n in range(len(path) + 1)}
        (proposal,) = drafter.propose([session(drafter, state)], [root], [BIG])
        found = paths(proposal.tree)
        assert set(found) == expected
        assert len(proposal.tree) == len(expected)  # nothing twice
        for path, value in kept:
            assert math.isclose(found[root, *path], math.exp(value), rel_tol=1e-4)


@pytest.mark.parametrize("budget", [Budget(1, 9), Budget(2, 9), Budget(5, 2)], ids=str)
@pytest.mark.parametrize("kind", ["redrafter", "mlp"])
def test_few_beams_are_the_best_of_many_and_take_fewer_passes(kind, budget, model, monkeypatch):
    drafter = make(kind, model, beams=5, length=3)
    asked, few = [], drafter.few
    monkeypatch.setattr(drafter, "few", lambda carry, depth: asked.append(depth) or few(carry, depth))
    for root, state in enumerate(states(4, model)):
        (whole,) = drafter.propose([session(drafter, state)], [root], [BIG])
        asked.clear()
        (small,) = drafter.propose([session(drafter, state)], [root], [budget])
        assert paths(small.tree) == pytest.approx(paths(whole.tree.top_k(budget.nodes).cut(budget.depth)), rel=1e-5)
        assert asked == list(range(min(3, budget.nodes)))


@pytest.mark.parametrize("beams", [4, 9])
def test_a_redrafter_grows_beams_of_its_likely_tokens(beams, model):
    """Their probabilities are those among each other: what can't be said is not waited for."""
    head, likely = random_head("redrafter", model), [2, 7, 11, 19, 23, 40, 63]
    head.guess_only(likely)
    drafter = drafters.make("redrafter", open_target(model), drafter_path=head, beams=beams, length=3)
    assert drafter.names.tolist() == likely
    assert drafter.width == min(beams, 7)
    for root, state in enumerate(states(3, model)):
        kept, held = [((), 0.0)], {}
        for _ in range(3):
            longer = []
            for path, value in kept:
                among = said(head, state, root, path)[likely].log_softmax(-1).tolist()
                longer += [((*path, t), value + p) for t, p in zip(likely, among, strict=True)]
            kept = sorted(longer, key=lambda b: -b[1])[: drafter.width]
            held |= dict(kept)
        (proposal,) = drafter.propose([session(drafter, state)], [root], [BIG])
        found = paths(proposal.tree)
        assert set(found) == {(root,), *((root, *path) for path in held)}
        for path, value in held.items():
            assert math.isclose(found[root, *path], math.exp(value), rel_tol=1e-4)


def test_a_redrafter_draws_from_all_tokens_whichever_are_likely(model):
    whole, few = (random_head("redrafter", model) for _ in range(2))
    few.guess_only([2, 7, 11, 19])
    trees = []
    for head in (whole, few):
        options = {"drafter_path": head, "mode": "sample", "beams": 3, "length": 3}
        drafter = drafters.make("redrafter", open_target(model), **options)
        begun = session(drafter, states(1, model)[0], sampling=Sampling(temperature=1.0), seed=5)
        trees.append(drafter.propose([begun], [4], [BIG])[0].tree)
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert len(trees[0]) == 10


def test_an_mlp_head_is_not_asked_beyond_its_reach(model):
    drafter = make("mlp", model, length=9)
    (proposal,) = drafter.propose([session(drafter, states(1, model)[0])], [4], [BIG])
    assert proposal.tree.depth == drafter.head.reach == 3


def test_prefix_match_of_the_papers_example():
    beams = torch.tensor([[[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]])
    assert prefix_match(beams).tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]]
    nodes = overlay(beams, torch.ones(beams.shape))
    tree = unpack(90, nodes[0].numpy(), "")
    assert tree.tokens.tolist() == [90, 91, 92, 93, 94, 95, 96, 97]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2, 3, 4, 3]


def test_overlay_is_the_tree_that_the_host_makes():
    random = torch.Generator().manual_seed(0)
    beams = torch.randint(0, 3, (40, 6, 4), generator=random)
    p = torch.rand(beams.shape, generator=random)
    for i, nodes in enumerate(overlay(beams, p).numpy()):
        number, tokens, parents, score = {(): 0}, [9], [-1], [1.0]
        for depth in range(beams.shape[2]):  # the first beam that spells a prefix makes its node
            for beam, odds in zip(beams[i].tolist(), p[i], strict=True):
                prefix = tuple(beam[: depth + 1])
                if prefix not in number:
                    number[prefix] = len(tokens)
                    tokens.append(prefix[-1])
                    parents.append(number[prefix[:-1]])
                    score.append(float(odds[depth]))
        tree = unpack(9, nodes, "x")
        assert (tree.tokens.tolist(), tree.parents.tolist(), tree.score.tolist()) == (tokens, parents, score)


def test_without_compression_there_are_more_nodes_and_no_other_paths(model):
    whole, small = (make("redrafter", model, beams=6, length=4, every=False, compress=c) for c in (False, True))
    for root, state in enumerate(states(5, model)):
        big, little = (d.propose([session(d, state)], [root], [BIG])[0].tree for d in (whole, small))
        big.check(64, root)
        assert len(big) == 1 + 6 * 4 > len(little)
        assert paths(big) == paths(little)
        # Walking down reaches every path, though equal siblings stand there: the first has all the children.
        for path in paths(little):
            node = 0
            for token in path[1:]:
                node = big.child(node, token)
            assert tuple(big.tokens[big.path_to(node)].tolist()) == path


# ---- medusa


def test_medusa_fills_its_tree_by_rank(model):
    tree = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 1]]
    drafter = make("medusa", model, tree=tree)
    for root, state in enumerate(states(3, model)):
        ranked = [said(drafter.head, state, root, [0] * depth).sort(descending=True) for depth in range(3)]
        (proposal,) = drafter.propose([session(drafter, state)], [root], [BIG])
        found = proposal.tree
        assert found.parents.tolist() == [-1, 0, 0, 1, 1, 2, 4]
        for node, ranks in enumerate(tree, 1):
            token = [int(ranked[depth].indices[rank]) for depth, rank in enumerate(ranks)]
            assert found.tokens[found.path_to(node)][1:].tolist() == token
            assert math.isclose(found.score[node], ranked[len(ranks) - 1].values[ranks[-1]].exp(), rel_tol=1e-4)


def test_what_exceeds_the_budget_is_cut_by_value(model):
    drafter, state = make("medusa", model), states(1, model)[0]
    whole = drafter.propose([session(drafter, state)], [4], [BIG])[0].tree
    assert len(whole) == 1 + 64
    part = drafter.propose([session(drafter, state)], [4], [Budget(7, 2)])[0].tree
    assert (len(part), part.depth) == (8, 2)
    assert paths(part) == paths(whole.cut(2).top_k(7))
    assert len(drafter.propose([session(drafter, state)], [4], [Budget(0, 0)])[0].tree) == 1


def test_tune_finds_the_best_tree_of_a_worked_table():
    # worth: 0 .6, 1 .3, 00 .3, 10 .15, 01 .12, 11 .06; of equals the shallower first
    table = [[0.6, 0.3], [0.5, 0.2]]
    assert tune(table, 4) == [(0,), (1,), (0, 0), (1, 0)]
    assert tune(table, 100) == [(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert tune([[0.5, 0.0], [0.0, 0.1]], 100) == [(0,), (0, 1)]  # what is never right is left out


def test_no_tree_is_worth_more_than_a_tuned_one():
    rng = np.random.default_rng(0)
    every = [p for n in (1, 2) for p in itertools.product(range(3), repeat=n)]
    for _ in range(5):
        table = rng.random((2, 3)).tolist()
        worth = {p: math.prod(table[k][r] for k, r in enumerate(p)) for p in every}
        for nodes in (1, 2, 4):
            best = max(
                sum(worth[p] for p in some)
                for some in itertools.combinations(every, nodes)
                if all(p[:-1] in some for p in some if len(p) > 1)
            )
            chosen = tune(table, nodes)
            check_tree(chosen, 2, 3)
            assert math.isclose(sum(worth[p] for p in chosen), best)


def test_assumed_accuracies_are_accuracies():
    table = np.array(assumed(6, 50))
    assert (table > 0).all()
    assert (table.sum(1) < 1).all()
    for axis in (0, 1):
        assert (np.diff(table, axis=axis) < 0).all()


def test_measure_counts_right_guesses_by_rank(model):
    head = random_head("medusa", model)
    text = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    hidden = states(120, model).view(3, 40, -1)
    table = measure(head, hidden, text, ranks=30)
    for depth in range(head.reach):
        right, asked = [0] * 30, 0
        for row, i in itertools.product(range(3), range(40 - 2 - depth)):
            asked += 1
            order = said(head, hidden[row, i], 0, [0] * depth).argsort(descending=True)[:30].tolist()
            if (token := int(text[row, i + 2 + depth])) in order:
                right[order.index(token)] += 1
        assert table[depth] == pytest.approx([n / asked for n in right])
    with pytest.raises(OptionError, match="too short"):
        measure(head, hidden[:, :4], text[:, :4])


def test_the_tree_beside_a_head_is_used(model, tmp_path):
    save_head(random_head("medusa", model), tmp_path)
    save_tree([(0,), (0, 0), (1,)], tmp_path)
    target = open_target(model)
    assert drafters.make("medusa", target, drafter_path=str(tmp_path)).paths == [(0,), (0, 0), (1,)]
    assert drafters.make("medusa", target, drafter_path=tmp_path, nodes=2).paths == [(0,), (0, 0)]
    given = tmp_path / "other.json"
    given.write_text(json.dumps([[1]]))
    assert drafters.make("medusa", target, drafter_path=tmp_path, tree=str(given)).paths == [(1,)]


# ---- sessions and batches


@pytest.mark.parametrize("mode", ["best", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_drafts_what_its_members_draft_alone(kind, mode, model):
    """Greedy and sampled requests mixed, budgets of all sizes, some of them empty."""
    drafter = make(kind, model, mode=mode)
    budgets = [BIG, Budget(4, 2), Budget(0, 0), BIG, Budget(3, 9)]
    requests = [
        {"sampling": Sampling(temperature=0.7 * (i % 2)), "seed": i, "accept": make_rule("rejection")} for i in range(5)
    ]
    sessions = [session(drafter, s, **r) for s, r in zip(states(5, model), requests, strict=True)]
    together = drafter.propose(sessions, list(range(5)), budgets)
    for i, (one, budget) in enumerate(zip(sessions, budgets, strict=True)):
        mine, alone = together[i].tree, one.propose(i, budget).tree
        assert mine.tokens.tolist() == alone.tokens.tolist()
        assert mine.parents.tolist() == alone.parents.tolist()
        assert mine.score == pytest.approx(alone.score, rel=1e-3)
        assert len(mine) - 1 <= budget.nodes
        assert mine.depth <= budget.depth
        assert (len(mine) == 1) == (i == 2)
        assert (mine.q is not None) == (mode == "sample" and i in (1, 3))
        if mine.q is not None:
            assert torch.allclose(mine.q, alone.q, rtol=1e-3)
            assert mine.q_row.tolist() == alone.q_row.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_starts_from_the_state_that_chose_its_root(kind, model):
    """In a real run with accepted drafts: the state is that of the last committed token, as transformers has it."""
    prompt = [5, 6, 7]
    plain = LLM(model, drafter="none").generate(prompt, max_new_tokens=20).tokens
    whole = [*prompt, *plain]
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([whole]), output_hidden_states=True).hidden_states[-1][0]
    llm = LLM(model, drafter=kind, drafter_path=random_head(kind, model))

    def propose(sessions, roots, budgets):  # noqa: ARG001
        (one,), (root,) = sessions, roots
        assert root == whole[one.read]
        assert torch.allclose(one.state, hidden[one.read - 1], atol=1e-4)
        return [Proposal(TokenTree.chain(root, whole[one.read + 1 :][:2]))]  # right, so that paths are accepted

    llm.engine.drafter.propose = propose
    result = llm.generate(prompt, max_new_tokens=18)
    assert result.tokens == plain[:18]
    assert result.stats.accepted > 8


# ---- draws


def drawn(drafter, state, root, budget=BIG, **request):
    request = {"sampling": Sampling(temperature=0.8), "accept": make_rule("rejection"), **request}
    return session(drafter, state, **request).propose(root, budget).tree


@pytest.mark.parametrize("budget", [BIG, Budget(7, 3), Budget(5, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_q_is_what_the_head_says_after_each_node(kind, budget, model):
    drafter = make(kind, model, mode="sample")
    tree = drawn(drafter, states(1, model)[0], 4, budget)
    length = min(drafter.length, budget.depth)
    width = min(drafter.width, budget.nodes // length)
    assert len(tree) == 1 + width * length
    for node in range(len(tree)):
        children = tree.children(node)
        if not len(children):
            assert tree.q_row[node] == -1
            continue
        assert len(children) == (width if node == 0 else 1)
        q = tree.q[tree.q_row[node]]
        path = tree.tokens[tree.path_to(node)][1:].tolist()
        assert torch.allclose(q.log(), said(drafter.head, states(1, model)[0], 4, path, 0.8), atol=1e-4)
        assert tree.score[children] == pytest.approx(q[tree.tokens[children].tolist()].numpy(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_q_outlasts_the_next_draft(kind, model, monkeypatch):
    """Which a capture writes into the same place."""
    drafter, (one, other) = make(kind, model, mode="sample"), states(2, model)
    draws, places = drafter.captured_draws, []

    def captured(*inputs):
        found = draws(*inputs)
        places.extend(found if not places else ())
        return [place.copy_(new) for place, new in zip(places, found, strict=True)]

    monkeypatch.setattr(drafter, "captured_draws", captured)
    tree = drawn(drafter, one, 4)
    before = tree.q.clone()
    assert not torch.equal(drawn(drafter, other, 5).q, before)
    assert torch.equal(tree.q, before)


@pytest.mark.parametrize("kind", KINDS)
def test_how_much_is_drawn_does_not_depend_on_what_is_drawn(kind, model):
    drafter, state = make(kind, model, mode="sample"), states(1, model)[0]
    for budget in (Budget(16, 16), Budget(7, 3), Budget(5, 1), Budget(2, 9)):
        trees = [drawn(drafter, state, 4, budget, seed=seed) for seed in range(3)]
        assert len({tuple(t.parents.tolist()) for t in trees}) == 1
        assert budget.nodes < 16 or len({tuple(t.tokens.tolist()) for t in trees}) == 3
        assert trees[0].q is not None
        assert budget.limit(trees[0]) is trees[0]


@pytest.mark.parametrize("kind", KINDS)
def test_under_match_the_draft_draws_with_the_targets_noise(kind, model):
    drafter, state = make(kind, model, mode="sample"), states(1, model)[0]
    tree = drawn(drafter, state, 4, seed=5, sample=2, accept=make_rule("match"))
    assert tree.q is None
    # Three tokens were read and the root is the fourth, at position 3: what follows it stands at 4, then 5.
    noise = [gumbel(noise_key(5, 2, position), torch.arange(64)) for position in (4, 5)]
    first = (said(drafter.head, state, 4, [], 0.8) + noise[0]).topk(drafter.width).indices.tolist()
    assert tree.tokens[tree.children(0)].tolist() == first
    for child in tree.children(0):
        second = (said(drafter.head, state, 4, [int(tree.tokens[child])], 0.8) + noise[1]).argmax()
        assert tree.tokens[tree.children(child)].tolist() == [second]


def test_draws_without_replacement_end_where_q_ends():
    logits = torch.tensor([[[0.0, 5000.0, 4999.5]]])
    tokens, p, q = draw(logits, torch.tensor([3]), torch.ones(1), 3)
    assert sorted(tokens[0, 0, :2].tolist()) == [1, 2]
    assert p[0, 0, :2].tolist() == [q[0, 0, t] for t in tokens[0, 0, :2]]
    assert p[0, 0, 2] == q[0, 0, 0] == 0
    steep = torch.tensor([[[0.0, 200.0]]])  # beyond float32, not beyond a draw
    _, p, _ = draw(steep, torch.tensor([3]), torch.ones(1), 2)
    assert (p.float() > 0).all()


def test_few_tokens_make_narrow_trees():
    model = tiny_model("llama", vocab_size=3, eos_token_id=None)
    for kind in KINDS:
        drafter = make(kind, model, mode="sample")
        assert len(drawn(drafter, states(1, model)[0], 1).children(0)) == 3
        session(drafter, states(1, model)[0]).propose(1, BIG).tree.check(3, 1)
    frozen = drawn(drafter, states(1, model)[0], 1, sampling=Sampling(temperature=1e-6))
    assert len(frozen.children(0)) == 1  # the others have no probability left


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["best", "sample"])
@pytest.mark.parametrize("kind", ["falcon", "dflash"])
def test_greedy_texts_of_blocks_are_the_targets_under_both_rules(kind, mode, model):
    prompts = [[5, 6, 7, 8], [40, 41], [1, 2, 3]]
    plain = [r.tokens for r in LLM(model, drafter="none").generate(prompts, max_new_tokens=8)]
    llm = LLM(model, drafter=kind, drafter_path=random_head(kind, model), mode=mode)
    for rule in ("match", "rejection"):
        assert llm.generate(prompts[0], max_new_tokens=8, accept=rule).tokens == plain[0]
        assert [r.tokens for r in llm.generate(prompts, max_new_tokens=8, accept=rule)] == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("redrafter", {"beams": 2, "length": 2}),
        ("falcon", {"width": 2, "depth": 2}),
        ("dflash", {"width": 2, "depth": 2, "sizes": {"bias": 2, "confidence": True}}),
    ],
    ids=["redrafter", "falcon", "dflash"],
)
def test_rejection_of_drawn_drafts_leaves_the_targets_distribution(kind, options):
    """Counted over three tokens, with a target that has nothing to do with the head."""
    model, count, root = tiny_model("llama", vocab_size=3, hidden_size=16, eos_token_id=None), 2048, 1
    drafter = make(kind, model, mode="sample", **options)
    law = {
        text: np.random.default_rng([1, *text]).dirichlet(np.ones(3))
        for n in range(3)
        for text in itertools.product(range(3), repeat=n)
    }
    state = 0.5 * states(1, model)[0]
    sampling, cells, accepted = Sampling(temperature=0.7), dict.fromkeys(itertools.product(range(3), repeat=3), 0), 0
    for start in range(0, count, 64):
        sessions = [
            session(drafter, state, seed=i, sampling=sampling, accept=Rejection()) for i in range(start, start + 64)
        ]
        for one, proposal in zip(sessions, drafter.propose(sessions, [root] * 64, [BIG] * 64), strict=True):
            tree = proposal.tree
            sampler = Sampler(sampling, [1, 1, 1, root], one.request.seed)
            verdict = verify(Rejection(), tree, Table(tree, law, 0.7), sampler, lambda _: False)
            text = (*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus)
            accepted += len(verdict.path) - 1
            while len(text) < 3:
                text = (*text, sampler.draw(torch.from_numpy(law[text])))
                sampler.push(text[-1])
            cells[text] += 1
            one.close()
    assert accepted > 0.3 * count  # the drafts were really used
    expected = np.array([law[()][a] * law[a,][b] * law[a, b][c] for a, b, c in cells]) * count
    distance = float(((np.array(list(cells.values())) - expected) ** 2 / expected).sum())
    assert distance < chdtri(len(cells) - 1, 0.01)


class Table:
    """Scores of a target that follows a law of the drafted path alone, at this temperature."""

    captured = decided = None

    def __init__(self, tree, law, temperature):
        self._tree, self._law, self._temperature = tree, law, temperature

    def logits(self, node):
        path = tuple(self._tree.tokens[self._tree.path_to(node)][1:].tolist())
        return torch.from_numpy(self._temperature * np.log(self._law[path]))


# ---- opening


def test_a_shipped_head_is_for_its_model_alone(model, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SHIPPED", tmp_path)
    target = open_target(model)
    with pytest.raises(
        DrafterError, match=r"needs a head for LlamaForCausalLM; none comes with .* drafter_path=.* train mlp"
    ):
        drafters.make("mlp", target)
    save_head(random_head("mlp", model), tmp_path / "mlp")
    assert drafters.make("mlp", target).folder == tmp_path / "mlp"
    with pytest.raises(DrafterError, match=r"needs a head for Qwen2ForCausalLM; .* is for LlamaForCausalLM"):
        drafters.make("mlp", open_target(tiny_model("qwen2")))


def test_a_head_must_fit(model, tmp_path):
    head = random_head("mlp", model)
    target = open_target(model)
    with pytest.raises(DrafterError, match="the given head is of the kind mlp: use it with drafter='mlp'"):
        drafters.make("redrafter", target, drafter_path=head)
    save_head(head, tmp_path)
    with pytest.raises(DrafterError, match=f"{tmp_path} is of the kind mlp"):
        drafters.make("medusa", target, drafter_path=str(tmp_path))
    wider = open_target(tiny_model("llama", hidden_size=64))
    for source in (head, tmp_path):
        with pytest.raises(DrafterError, match="a hidden size of 32, but LlamaForCausalLM has 64"):
            drafters.make("mlp", wider, drafter_path=source)
    with pytest.raises(DrafterError, match="on meta, its target on cpu: move it"):
        drafters.make("mlp", target, drafter_path=HEADS["mlp"].fresh(model).to("meta"))
    with pytest.raises(DrafterError, match="hidden states of a model, and a Replay has none"):
        drafters.make("mlp", type("Replay", (), {})(), drafter_path=head)


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("redrafter", {"beams": 0}, "beams and length must be at least 1, found 0 and 5"),
        ("mlp", {"mode": "beam"}, "mode='beam' is unknown: there are best, sample"),
        ("medusa", {"nodes": 0}, "nodes and width must be at least 1"),
        ("medusa", {"tree": []}, "no rank paths"),
        ("medusa", {"tree": [[0], [1, 0]]}, r"\[1, 0\] must follow the path that it continues"),
        ("medusa", {"tree": [[0], [0]]}, r"\[0\] stands there twice"),
        ("medusa", {"tree": [[64]]}, r"1 to 5 ranks below 64, found \[64\]"),
        ("medusa", {"tree": [[0], [0, 0], [0, 0, -1]]}, r"1 to 5 ranks below 64"),
        ("medusa", {"tree": "/nowhere/tree.json"}, "can't be read as a list of rank paths"),
    ],
)
def test_options_that_make_no_sense_are_refused(kind, options, error, model):
    with pytest.raises((OptionError, DrafterError), match=error):
        make(kind, model, **options)


def test_elsewhere_than_on_a_gpu_captured_calls_the_function():
    calls = []
    captured = Captured(lambda a, b: calls.append(1) or a + b, torch.device("cpu"))
    assert captured(torch.ones(2), torch.ones(2)).tolist() == [2, 2]
    assert captured(torch.ones(2), torch.zeros(2)).tolist() == [1, 1]
    captured.clear()
    assert len(calls) == 2


def test_buckets_hold_what_they_are_asked_for():
    assert [drafting.bucket(n, (1, 2, 4)) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 12]
