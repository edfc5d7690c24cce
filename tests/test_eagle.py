"""EAGLE's, Falcon's and DFlash's drafters: what they keep of the text, and the trees they grow, are what the head says
of the whole text.

The trees are grown a second time here, node by node, from `head.predict` on everything that leads to a node.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from families import VOCABULARY, tiny_model
from slipstream import LLM, drafters
from slipstream.accept import make_rule
from slipstream.budget import Budget
from slipstream.drafters import _eagle as features
from slipstream.drafters.base import Hidden, Seen
from slipstream.errors import DrafterError, OptionError
from slipstream.heads import HEADS, keys, save_head
from slipstream.heads.growth import Growth
from slipstream.heads.packing import unpack
from slipstream.heads.ranks import assumed, save_tree, tune
from slipstream.kernels.ops import gathered_attention
from slipstream.request import Request
from slipstream.sampling import Sampling, gumbel, noise_key
from trees import dynamic_tree, spelled

LAYERS = 6
ALL = Budget(1000, 1000)
EAGLES = ("eagle", "eagle3")
KINDS = (*EAGLES, "falcon", "dflash", "dspark", "spire")
NAMES = {"dspark": "dflash"}
FEW = {"draft_ids": range(1, VOCABULARY, 3)}
SIZES = {
    "eagle": {},
    "eagle3": FEW,
    "falcon": {"block": 2},
    "dflash": {"block": 7},
    "spire": {"layers": 2, "window": 3, "sinks": 2},
    "dspark": {"block": 6, "bias": 5, "markov_type": "rnn", **FEW},
}


@cache
def model():
    return tiny_model("llama", seed=3, dtype=torch.float64, num_hidden_layers=LAYERS)


@cache
def head_of(kind):
    """A head whose every part matters; eagle3 and dspark can say one token in three."""
    head = HEADS[NAMES.get(kind, kind)].fresh(model(), dtype=torch.float64, **SIZES[kind])
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=random) * (0.15 if kind == "eagle" else 0.3))
    return head


def make(kind, head=None, **options):
    return drafters.make(
        NAMES.get(kind, kind), SimpleNamespace(model=model()), drafter_path=head or head_of(kind), **options
    )


@cache
def text(seed, length=60):
    """Tokens, and the hidden states that read them."""
    tokens = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        hidden = model()(tokens, output_hidden_states=True).hidden_states
    return tokens[0].tolist(), {layer: h[0] for layer, h in enumerate(hidden)}


def show(session, seed, start, end):
    """The session sees a piece of a text."""
    tokens, hidden = text(seed)
    states = {layer: hidden[layer][start:end] for layer in session.drafter.layers}
    session.observe(Seen(tokens[start:end], start, Hidden(states)))


def begin(drafter, which=None, end=0, **request):
    """A session that has seen the beginning of a text."""
    session = drafter.begin(Request([1], 10, **request))
    if end:
        show(session, which, 0, end)
    return session


@cache
def says(head, seed, end, path, start=0):
    """(V,) what the head makes of text[start:end], the root after it and a drafted path: probabilities."""
    tokens, hidden = text(seed)
    states = head.join({layer: hidden[layer][start:end] for layer in head.layers(LAYERS)})
    states = torch.nn.functional.pad(states, (0, 0, 0, 1 + len(path)))  # what follows has no states
    whole = torch.tensor([[*tokens[start : end + 1], *path]])
    with torch.no_grad():
        *_, last = head.predict(states[None], whole, 1 + len(path))
    p = last.logits[0, end - start - 1].softmax(-1)
    if head.draft_ids is None:
        return p.numpy()
    return torch.zeros(VOCABULARY, dtype=p.dtype).index_copy(0, head.draft_ids, p).numpy()


def eagle2(head, seed, end, *shape):
    """{path: probability given its parent} of the tree that EAGLE-2 keeps."""
    return dynamic_tree(lambda path: says(head, seed, end, path), *shape)


def same(tree, expected):
    found = spelled(tree)
    assert set(found) == set(expected)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


def propose(session, seed, end, budget=ALL):
    return session.propose(text(seed)[0][end], budget).tree


class Watched:
    """A Captured and what is asked of it."""

    def __init__(self, captured):
        self.captured, self.shapes, self.cleared = captured, set(), 0

    def __call__(self, *inputs):
        self.shapes.add(tuple(x.shape[:2] for x in inputs))
        return self.captured(*inputs)

    def fetch(self, *inputs):
        self.shapes.add(tuple(x.shape[:2] for x in inputs))
        return self.captured.fetch(*inputs)

    def clear(self):
        self.cleared += 1
        self.captured.clear()


# ---- what the head is asked


def step(session, seed, start, path, nodes=20):
    """The session sees a path through a step, whose states lie where those of the next one will."""
    tokens, hidden = text(seed)
    rows = {layer: torch.randn(nodes, h.shape[1], dtype=h.dtype) for layer, h in hidden.items()}
    for layer, states in rows.items():
        states[path] = hidden[layer][start : start + len(path)]
    states = {layer: rows[layer] for layer in session.drafter.layers}
    session.observe(Seen(tokens[start : start + len(path)], start, Hidden(states, path, lasting=True)))
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_states_may_be_read_where_they_lie(kind):
    drafter = make(kind, depth=3, width=2, nodes=6)
    drafter.fixed = True
    session = begin(drafter, 0, 9)
    propose(session, 0, 9)
    for start, path in ((9, [0, 7, 3]), (12, [0]), (13, [0, 1, 2, 19])):
        step(session, 0, start, path)
        end = start + len(path)
        root = text(0)[0][end]
        assert session.length == start  # the key of the root before is there, and read no more
        table = drafter.make_table([session], [root], 1, True)
        nodes = drafter.captured.fetch(table, still=session.step_states())
        same(unpack(root, nodes[0].numpy(), kind), eagle2(head_of(kind), 0, end, 2, 3, 6))
        session.drafted(root)


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_that_is_not_shown_is_as_if_it_had_not_been_said(kind):
    drafter, head = make(kind, depth=1, width=VOCABULARY, nodes=VOCABULARY), head_of(kind)
    session = begin(drafter, 0, 9)
    tokens, hidden = text(0)
    session.observe(Seen(tokens[9:12], 9))
    assert len(propose(session, 0, 12)) == 1
    show(session, 0, 12, 14)
    kept = [*range(8), 12, 13]
    states = head.join({layer: hidden[layer][kept] for layer in head.layers(LAYERS)})
    whole = torch.tensor([[0, *tokens[1:9], *tokens[13:15]]])
    with torch.no_grad():
        (last,) = head.predict(torch.nn.functional.pad(states, (0, 0, 0, 1))[None], whole, 1)
    p = last.logits[0, 9].softmax(-1)
    tree = propose(session, 0, 14)
    ids = tree.tokens[1:] if head.draft_ids is None else [head.draft_ids.tolist().index(t) for t in tree.tokens[1:]]
    assert p[ids].numpy() == pytest.approx(tree.raw[1:, 0], rel=1e-4)
    assert len(tree) == 1 + len(p)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_waits_for_the_first_draft(kind):
    drafter = make(kind, depth=1, width=VOCABULARY, nodes=VOCABULARY)
    late, early = begin(drafter, 0, 9), begin(drafter, 0, 9)
    late.skip()
    for start, end in ((9, 10), (10, 12)):
        show(late, 0, start, end)
        late.skip()
    early.observe(Seen(text(0)[0][9:12], 9))
    for session in (late, early):
        show(session, 0, 12, 14)
    one, other = (propose(session, 0, 14) for session in (late, early))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.raw[1:] == pytest.approx(other.raw[1:])
    assert late.length == early.length == 9  # eight pairs of the prompt, and one of the last piece


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_draft_read_outlasts_the_next_forward(kind):
    drafter = make(kind, depth=3, width=2, nodes=6)
    session = begin(drafter, 0, 9)
    for start, path in ((9, [0, 4]), (11, [0, 2, 1])):
        states = step(session, 0, start, path)
        session.keep()
        for rows in states.values():
            rows.normal_()
    step(session, 0, 14, [0, 1])
    same(propose(session, 0, 16), eagle2(head_of(kind), 0, 16, 2, 3, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_depth_is_what_the_head_says_of_the_whole_text(kind):
    drafter = make(kind, depth=1, width=VOCABULARY, nodes=VOCABULARY)
    session, end = begin(drafter), 0
    for step in (9, 1, 4, 1, 2, 12, 3):  # a prompt, then accepted paths, one longer than any draft
        show(session, 0, end, end + step)
        end += step
        tree = propose(session, 0, end)
        p = says(head_of(kind), 0, end, ())
        assert tree.depth == 1
        assert len(tree) == 1 + (p > 0).sum()
        assert p[tree.tokens[1:]] == pytest.approx(tree.raw[1:, 0], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_the_best_token_again_and_again(kind):
    drafter = make(kind, depth=6, width=1)
    session = begin(drafter, 0, 17)
    path = ()
    for _ in range(6):
        path = (*path, int(says(head_of(kind), 0, 17, path).argmax()))
    assert list(spelled(propose(session, 0, 17))) == [path[: i + 1] for i in range(6)]


@pytest.mark.parametrize("kind", EAGLES)
@pytest.mark.parametrize("budget", [Budget(1, 9), Budget(2, 9), Budget(3, 2), Budget(7, 9)], ids=str)
def test_a_small_draft_is_the_best_of_a_whole_one_and_reads_no_more_than_it_needs(kind, budget, monkeypatch):
    drafter = make(kind, depth=5, width=4, nodes=40)
    session = begin(drafter, 0, 17)
    whole = propose(session, 0, 17)
    read, draft = [], drafter.head.draft
    monkeypatch.setattr(
        drafter.head, "draft", lambda tokens, *given: read.append(tokens.shape[1]) or draft(tokens, *given)
    )
    small = propose(session, 0, 17, budget)
    same(small, spelled(whole.top_k(budget.nodes).cut(budget.depth)))
    assert len(read) == min(5, budget.nodes)
    assert max(read) <= min(4, budget.nodes)
    assert len(propose(session, 0, 17)) == len(whole) == 41


@pytest.mark.parametrize("kind", ["falcon", "dflash", "dspark"])
@pytest.mark.parametrize("budget", [Budget(1, 9), Budget(2, 9), Budget(3, 2), Budget(7, 9)], ids=str)
def test_a_small_draft_of_blocks_is_the_best_of_a_whole_one(kind, budget):
    drafter = make(kind, depth=5, width=4, nodes=40)
    session = begin(drafter, 0, 17)
    whole = propose(session, 0, 17)
    same(propose(session, 0, 17, budget), spelled(whole.top_k(budget.nodes).cut(budget.depth)))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_tree_of_fixed_ranks_is_cut_to_a_small_budget(depth):
    session = begin(make("eagle", depth=depth, width=4, nodes=9, dynamic=False), 0, 17)
    whole = propose(session, 0, 17)
    assert (len(whole), whole.depth) == (1 + (4 if depth == 1 else 9), depth)
    same(propose(session, 0, 17, Budget(2, 9)), spelled(whole.top_k(2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_in_a_batch_come_and_go_and_each_gets_its_own_tree(kind):
    """Texts of different lengths that grow unevenly, in rows that are used again."""
    drafter, options = make(kind, depth=3, width=3, nodes=9), (3, 3, 9)
    ends = {1: 11, 2: 2, 3: 20}
    sessions = {seed: begin(drafter, seed, end) for seed, end in ends.items()}
    for grow, leaves, comes in (
        ({}, None, None),
        ({1: 2, 3: 1}, 2, 4),
        ({1: 1, 3: 4, 4: 3}, 1, 5),
        ({5: 2}, None, None),
    ):
        for seed, more in grow.items():
            show(sessions[seed], seed, ends[seed], ends[seed] + more)
            ends[seed] += more
        members = list(sessions)
        roots = [text(seed)[0][ends[seed]] for seed in members]
        found = drafter.propose([sessions[seed] for seed in members], roots, [ALL] * len(members))
        for seed, root, proposal in zip(members, roots, found, strict=True):
            assert proposal.tree.tokens[0] == root
            same(proposal.tree, eagle2(head_of(kind), seed, ends[seed], *options))
        if leaves:
            sessions.pop(leaves).close()
            ends[comes] = 7
            sessions[comes] = begin(drafter, comes, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_members_one_by_one(kind):
    drafter = make(kind)
    budgets = [Budget(16, 16), Budget(5, 2), Budget(0, 0), Budget(64, 3), Budget(1, 1)]
    together = [begin(drafter, seed, 5 + 6 * seed) for seed in range(5)]
    roots = [text(seed)[0][5 + 6 * seed] for seed in range(5)]
    batch = drafter.propose(together, roots, budgets)
    for seed, (proposal, budget) in enumerate(zip(batch, budgets, strict=True)):
        alone = propose(begin(drafter, seed, 5 + 6 * seed), seed, 5 + 6 * seed, budget)
        same(proposal.tree, spelled(alone))
        assert len(alone) - 1 <= budget.nodes
        assert alone.depth <= budget.depth


def test_drafting_again_gives_the_same_and_another_root_another_tree():
    drafter = make("eagle", depth=3, width=2)
    session = begin(drafter, 0, 12)
    first = spelled(propose(session, 0, 12))
    other = session.propose(0, ALL).tree
    assert text(0)[0][12] != 0
    assert set(first) != set(spelled(other))
    assert spelled(propose(session, 0, 12)) == first
    show(session, 0, 12, 14)
    same(propose(session, 0, 14), eagle2(head_of("eagle"), 0, 14, 2, 3, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_with_another_root_is_read_again(kind):
    drafter = make(kind, depth=3, width=2, nodes=6)
    session = begin(drafter, 0, 12)
    propose(session, 0, 12)
    session.propose((text(0)[0][12] + 1) % VOCABULARY, ALL)
    show(session, 0, 12, 14)
    same(propose(session, 0, 14), eagle2(head_of(kind), 0, 14, 2, 3, 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(45,), (16, 16, 13), (1, 1, 40, 3), tuple([1] * 45)])
def test_a_prompt_may_come_in_pieces(kind, pieces, monkeypatch):
    monkeypatch.setattr(features, "AT_ONCE", 20)
    drafter = make(kind, depth=2, width=3, nodes=8)
    session, end = begin(drafter), 0
    for count in pieces:
        show(session, 0, end, end + count)
        end += count
    assert len(session.following) < 20  # what was seen does not pile up
    same(propose(session, 0, 45), eagle2(head_of(kind), 0, 45, 3, 2, 8))


def test_a_text_read_before_the_session_is_left_out():
    drafter = make("eagle", depth=1, width=5)
    session = drafter.begin(Request([1], 10))
    session.observe(Seen(text(0)[0][:20], 0))
    show(session, 0, 20, 31)
    tree = propose(session, 0, 31)
    p = says(head_of("eagle"), 0, 31, (), start=20)
    assert tree.tokens[1:].tolist() == np.argsort(-p)[:5].tolist()
    assert tree.raw[1:, 0] == pytest.approx(np.sort(p)[:-6:-1], rel=1e-4)


def test_the_cache_grows_and_keeps_what_it_has(monkeypatch):
    monkeypatch.setattr(keys, "FIRST_CAPACITY", 8)
    drafter = make("eagle", depth=3, width=2, nodes=6)
    sessions = [begin(drafter, seed, 3) for seed in range(3)]  # more rows than it began with
    assert len({0, *(s.row for s in sessions)}) == 4  # row 0 is nobody's
    assert drafter.cache.capacity == 8
    drafter.captured = Watched(drafter.captured)
    for seed, session in enumerate(sessions):
        for end in (6, 7, 21, 40):
            show(session, seed, session.read, end)
            same(propose(session, seed, end), eagle2(head_of("eagle"), seed, end, 2, 3, 6))
    assert drafter.cache.capacity == 64
    # What was captured before the cache moved would write to where it was: at 6, 21 and 40 tokens it had moved.
    assert drafter.captured.cleared == 3
    rows = {session.row for session in sessions}
    for session in sessions * 2:  # closing twice gives a row back once
        session.close()
    again = [begin(drafter, 0, 30) for _ in range(3)]
    assert {s.row for s in again} == rows
    same(propose(again[0], 0, 30), eagle2(head_of("eagle"), 0, 30, 2, 3, 6))
    assert drafter.captured.cleared == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_padded_for_a_capture_changes_nothing(kind):
    drafter = make(kind, depth=3, width=2, nodes=6)
    drafter.fixed, drafter.captured = True, Watched(drafter.captured)
    written, through = [], drafter.cache.through
    drafter.cache.through = lambda rows, columns, *look: written.append(columns) or through(rows, columns, *look)
    sessions, end = [begin(drafter) for _ in range(3)], 0
    for step in (2, 1, 4, 3, 12):
        for i, session in enumerate(sessions):
            show(session, i, end, end + step)
        end += step
        found = drafter.propose(sessions, [text(i)[0][end] for i in range(3)], [ALL] * 3)
        for i, proposal in enumerate(found):
            same(proposal.tree, eagle2(head_of(kind), i, end, 2, 3, 6))
    assert drafter.captured.shapes == {((4, 3 + 2 * 5), (4, 5))}
    if kind not in EAGLES:  # others write the keys of their blocks at once
        return
    for row in torch.cat([columns for columns in written if columns.shape[1] == 5]).tolist():
        text_columns = [column for column in row if column <= row[-1]]
        assert text_columns == list(range(row[-1] + 1 - len(text_columns), row[-1] + 1))  # padding writes elsewhere


@pytest.mark.parametrize("kind", KINDS)
def test_attention_by_path_sees_the_same(kind, monkeypatch):
    """What a GPU's kernel is told, carried out by its reference."""
    plain = [propose(begin(make(kind, depth=4, width=3), seed, 9), seed, 9) for seed in (1, 2)]
    calls = []

    def by_path(query, stored, values, rows, lengths, paths, window):
        calls.append(paths.shape)
        depths = torch.full(paths.shape[:2], paths.shape[2] - 1)
        scale = query.shape[-1] ** -0.5
        return gathered_attention(query, stored, values, rows, lengths, depths, paths, scale=scale, window=window)

    monkeypatch.setattr(keys, "masked_attention", by_path)
    drafter = make(kind, depth=4, width=3)
    both = drafter.propose([begin(drafter, 1, 9), begin(drafter, 2, 9)], [text(1)[0][9], text(2)[0][9]], [ALL, ALL])
    for tree, proposal in zip(plain, both, strict=True):
        same(proposal.tree, spelled(tree))
    assert calls == {
        "falcon": [(2, 2, 1), (2, 6, 2)],  # of two tokens a pass; three chains go on
        "dflash": [(2, 7, 7)] * 2,  # places that see each other, in two layers
        "dspark": [(2, 6, 6)] * 2,
        "spire": [(2, 1, 1)] * 2 + [(2, 3, 2)] * 2 + [(2, 3, 3)] * 2 + [(2, 3, 4)] * 2,  # the root is on the path
    }.get(kind, [(2, 1, 1), (2, 3, 1), (2, 3, 2), (2, 3, 3)])


# ---- the tree


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "depth", "nodes"),
    [
        (1, 1, 1),
        (4, 1, 2),
        (8, 3, 5),
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in [(2, 5, 64), (4, 4, 12), (30, 3, 500)]),
    ],
)
def test_the_dynamic_tree_is_eagle_2s(kind, width, depth, nodes):
    drafter = make(kind, width=width, depth=depth, nodes=nodes)
    for end in (2, 30):
        tree = propose(begin(drafter, 6, end), 6, end)
        same(tree, eagle2(head_of(kind), 6, end, width, depth, nodes))


def test_no_more_nodes_are_read_than_there_are_or_can_be_kept():
    few = Growth.dynamic(width=8, depth=5, nodes=64, guessable=2)
    assert (few.branch, few.widths, few.found) == (2, (2, 4, 8, 8), 2 * (1 + 2 + 4 + 8 + 8))
    small = Growth.dynamic(width=8, depth=4, nodes=5, guessable=VOCABULARY)
    assert (small.branch, small.widths, small.found) == (5, (5, 5, 5), 5 * 16)
    flat = Growth.dynamic(width=8, depth=1, nodes=64, guessable=VOCABULARY)
    assert (flat.branch, flat.widths, flat.found) == (8, (), 8)
    cut = small.within(2)
    assert (cut.depth, cut.branch, cut.widths, cut.found, cut.nodes) == (2, 2, (2,), 2 * 3, 2)
    assert small.within(5) is small


def test_nodes_stand_in_order_of_their_paths_probability():
    tree = propose(begin(make("eagle", nodes=40), 0, 25), 0, 25)
    assert len(tree) == 41
    assert tree.sources == ("eagle",)
    assert all(0 <= parent < i for i, parent in enumerate(tree.parents) if i)
    assert (np.diff(tree.value) <= 1e-6).all()
    for i in range(1, len(tree)):
        assert tree.value[i] == pytest.approx(np.prod([tree.raw[n, 0] for n in tree.path_to(i)[1:]]))
    smaller = propose(begin(make("eagle", nodes=40), 0, 25), 0, 25, Budget(10, 100))
    assert set(spelled(smaller)) == set(list(spelled(tree))[:10])


def test_a_head_that_is_certain_keeps_parents_before_children(monkeypatch):
    """Paths of probability exactly 1 and 0, where order by probability alone says nothing."""
    drafter = make("eagle", depth=4, width=3, nodes=100)
    exact = drafter.head.logits
    monkeypatch.setattr(drafter.head, "logits", lambda features: exact(features) * 1e6)
    tree = propose(begin(drafter, 0, 8), 0, 8)
    tree.check(VOCABULARY, text(0)[0][8])
    assert tree.depth == 4
    assert sorted(set(tree.raw[1:, 0].tolist())) == [0.0, 1.0]


def test_a_head_that_overflows_drafts_nothing(monkeypatch):
    drafter = make("eagle")
    exact = drafter.head.logits
    monkeypatch.setattr(drafter.head, "logits", lambda features: exact(features) * torch.nan)
    assert len(propose(begin(drafter, 0, 8), 0, 8)) == 1


def ranked(head, seed, end, tree):
    """{path of ranks} of a tree."""
    names = {(): ()}
    for path in spelled(tree):
        order = np.argsort(-says(head, seed, end, path[:-1]))
        names[path] = (*names[path[:-1]], order.tolist().index(path[-1]))
    return set(names.values()) - {()}


def test_a_static_tree_has_its_ranks(tmp_path):
    ranks = [(0,), (1,), (0, 0), (3,), (1, 2), (0, 0, 1), (1, 2, 0), (0, 1)]
    save_head(head_of("eagle"), tmp_path)
    save_tree(ranks, tmp_path)
    for options, expected in (
        ({}, set(ranks)),
        ({"depth": 2}, {path for path in ranks if len(path) < 3}),
        ({"nodes": 5}, set(ranks[:5])),
    ):
        drafter = make("eagle", tmp_path, dynamic=False, **options)
        for end in (4, 21):
            tree = propose(begin(drafter, 0, end), 0, end)
            assert ranked(head_of("eagle"), 0, end, tree) == expected
            for path, p in spelled(tree).items():
                assert says(head_of("eagle"), 0, end, path[:-1])[path[-1]] == pytest.approx(p, rel=1e-4)
    both = drafter.propose([begin(drafter, 1, 9), begin(drafter, 2, 30)], [text(1)[0][9], text(2)[0][30]], [ALL, ALL])
    assert [ranked(head_of("eagle"), s, e, p.tree) for s, e, p in ((1, 9, both[0]), (2, 30, both[1]))] == [expected] * 2


def test_without_a_measured_one_the_static_tree_is_the_best_for_assumed_accuracies():
    tree = propose(begin(make("eagle", dynamic=False, nodes=20, depth=4, width=6), 0, 10), 0, 10)
    assert ranked(head_of("eagle"), 0, 10, tree) == set(tune(assumed(4, 6), 20))


def test_trees_of_ranks_that_are_none_are_refused():
    for paths, says_so in (([], "no rank paths"), ([(0, 1)], "must follow"), ([(7,)], "below 5")):
        with pytest.raises((OptionError, DrafterError), match=says_so):
            Growth.static(paths, 5, torch.device("cpu"))
    with pytest.raises(OptionError, match="at least 1"):
        make("eagle", width=0)


# ---- draws


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_draws_are_the_heads_with_the_noise_of_their_positions(kind, rule):
    drafter = make(kind, mode="sample", depth=3, width=4)
    request = {"sampling": Sampling(temperature=0.7), "accept": make_rule(rule), "seed": 5}
    sessions = [begin(drafter, seed, 8 + seed, **request) for seed in (1, 2, 3)]
    found = drafter.propose(sessions, [text(seed)[0][8 + seed] for seed in (1, 2, 3)], [Budget(12, 9)] * 3)
    for seed, proposal in zip((1, 2, 3), found, strict=True):
        tree, end = proposal.tree, 8 + seed
        assert len(tree) == 13
        for node in range(13):
            children = tree.children(node)
            path = tuple(tree.tokens[tree.path_to(node)][1:].tolist())
            if not len(children):
                assert len(path) == 3
                continue
            p = says(head_of(kind), seed, end, path) ** (1 / 0.7)
            p /= p.sum()
            assert tree.raw[children, 0] == pytest.approx(p[tree.tokens[children]], rel=1e-4)
            key = noise_key(5, 0, end + 1 + len(path), "" if rule == "match" else "draft")
            with np.errstate(divide="ignore"):
                noisy = np.log(p) + gumbel(key, torch.arange(VOCABULARY)).numpy()
            assert tree.tokens[children].tolist() == np.argsort(-noisy)[: len(children)].tolist()
            if rule == "rejection":
                assert tree.q[int(tree.q_row[node])].numpy() == pytest.approx(p, abs=1e-9)
        assert (tree.q is None) == (rule == "match")


def test_who_draws_and_who_does_not_share_a_batch():
    drafter = make("eagle", mode="sample", depth=3, width=2, nodes=6)
    sessions = [begin(drafter, 1, 9), begin(drafter, 2, 5, sampling=Sampling(temperature=1.0)), begin(drafter, 3, 30)]
    found = drafter.propose(sessions, [text(s)[0][e] for s, e in ((1, 9), (2, 5), (3, 30))], [ALL] * 3)
    same(found[0].tree, eagle2(head_of("eagle"), 1, 9, 2, 3, 6))
    assert found[1].tree.parents.tolist() == [-1, 0, 1, 2, 0, 4, 5]
    same(found[2].tree, eagle2(head_of("eagle"), 3, 30, 2, 3, 6))


# ---- in the engine


@cache
def learned(kind):
    """A head that knows by heart what the model answers, and those answers."""
    target = tiny_model("llama", seed=3, num_hidden_layers=LAYERS)
    prompts = [[5, 6, 7, 8], [40, 2, 3], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
    plain = LLM(target, drafter="none").generate(prompts, max_new_tokens=30)
    head = HEADS[kind].fresh(target)
    texts = [torch.tensor([prompt + answer.tokens]) for prompt, answer in zip(prompts, plain, strict=True)]
    with torch.no_grad():
        hidden = [target(tokens, output_hidden_states=True).hidden_states for tokens in texts]
    states = [head.join({layer: h[layer] for layer in head.layers(LAYERS)}) for h in hidden]
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(60):
        loss = 0.0
        for tokens, read in zip(texts, states, strict=True):
            for k, guess in enumerate(head.predict(read, tokens, 2)):
                loss += torch.nn.functional.cross_entropy(guess.logits[0, : -2 - k], tokens[0, 2 + k :])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return target, head, prompts, [answer.tokens for answer in plain]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("eagle", {}), ("eagle", {"dynamic": False}), ("eagle3", {})])
def test_what_a_head_knows_by_heart_is_accepted(kind, options):
    target, head, prompts, answers = learned(kind)
    llm = LLM(target, drafter=kind, drafter_path=head, **options)
    found = llm.generate(prompts, max_new_tokens=30)
    assert [result.tokens for result in found] == answers
    for result in found:
        assert result.stats.tokens_per_step > 2.7  # it learned two depths: ten steps behind the first


@pytest.mark.slow
@pytest.mark.parametrize("kind", EAGLES)
def test_draws_change_no_text_and_pass_for_the_targets_own(kind):
    target, head, prompts, _ = learned(kind)
    sampled = {"max_new_tokens": 30, "temperature": 0.1, "seed": 1}
    llm = LLM(target, drafter=kind, drafter_path=head, mode="sample", width=3, depth=4)
    found = llm.generate(prompts, **sampled)
    plain = LLM(target, drafter="none").generate(prompts, **sampled)
    assert [result.tokens for result in found] == [result.tokens for result in plain]
    judged = llm.generate(prompts, accept="rejection", **sampled)
    for results in (found, judged):
        assert sum(result.stats.accepted for result in results) > 30


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "spire"])
def test_a_session_goes_on_from_anothers_keys_in_all_layers(kind):
    drafter = make(kind, depth=3, width=2, nodes=6)
    other = begin(drafter, 0, 14)
    propose(other, 0, 14)
    session = begin(drafter)
    session.resume(other, text(0)[0][:10])
    show(session, 0, 10, 13)
    same(propose(session, 0, 13), eagle2(head_of(kind), 0, 13, 2, 3, 6))


def test_where_falcon_goes_on_its_lstm_begins_anew():
    drafter = make("falcon", depth=2, width=2, nodes=6)
    other = begin(drafter, 0, 14)
    propose(other, 0, 14)
    session = begin(drafter)
    session.resume(other, text(0)[0][:10])
    show(session, 0, 10, 13)
    tree = propose(session, 0, 13)
    assert tree.depth == 2
    assert drafter.rereads == 2


def test_a_new_head_starts_from_the_targets_last_layer():
    target = tiny_model("llama", seed=3, num_hidden_layers=LAYERS)
    head, last = HEADS["eagle3"].fresh(target), target.model.layers[-1]
    size = target.config.hidden_size
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, size:], last.self_attn.q_proj.weight)
    assert torch.equal(head.midlayer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    states = torch.randn(1, 4, 3 * size)
    assert torch.equal(head.read(states), states[..., 2 * size :])
    other = HEADS["eagle3"].fresh(target, intermediate_size=2 * target.config.intermediate_size)  # another shape
    assert not torch.equal(other.read(states), states[..., 2 * size :])
