"""TokenTree by worked examples: every expected array is written out by hand."""

import numpy as np
import pytest
import torch

from slipstream.errors import DrafterError
from slipstream.tree import TokenTree, fuse


def test_a_chain():
    tree = TokenTree.chain(5, [6, 7], source="x", raw=[0.5, 0.25])
    assert tree.tokens.tolist() == [5, 6, 7]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [0, 1, 2]
    assert tree.value.tolist() == [1, 0.5, 0.125]
    assert tree.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_the_root_alone():
    tree = TokenTree.root(3)
    assert (len(tree), tree.depth, tree.child(0, 3)) == (1, 0, None)
    assert tree.mask.tolist() == [[True]]
    assert TokenTree.from_continuations(3, []).tokens.tolist() == [3]


def test_continuations_merge_their_prefixes_and_count():
    #      1 ─ 2 ─ 3
    #  0 ┤   └ 4
    #      5
    tree = TokenTree.from_continuations(0, [[1, 2, 3], [1, 2], [1, 4], [5]], source="x")
    assert tree.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 0]
    np.testing.assert_allclose(tree.score, [1, 3 / 4, 2 / 3, 1 / 2, 1 / 3, 1 / 4], rtol=1e-6)
    assert tree.mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    assert tree.children(1).tolist() == [2, 4]
    assert tree.child(1, 4) == 4
    assert tree.child(0, 4) is None
    assert TokenTree.build([0, 1, 1, 2], [-1, 0, 0, 1]).child(0, 1) == 1  # of equal siblings the first
    assert tree.path_to(3) == [0, 1, 2, 3]


def test_weights_shift_the_shares():
    tree = TokenTree.from_continuations(0, [[1], [2]], weights=[3, 1])
    np.testing.assert_allclose(tree.score, [1, 0.75, 0.25])


def test_top_k_keeps_the_best_paths_and_stays_connected():
    tree = TokenTree.from_continuations(0, [[1, 2, 3], [1, 2], [1, 4], [5]])
    # values: 1 -> .75, 2 -> .5, 3 -> .25, 4 -> .25, 5 -> .25
    assert tree.top_k(2).tokens.tolist() == [0, 1, 2]
    assert tree.top_k(3).tokens.tolist() == [0, 1, 2, 3]
    assert tree.top_k(0).tokens.tolist() == [0]
    assert tree.top_k(99) is tree


def test_nodes_can_be_taken_in_another_order():
    tree = TokenTree.build([7, 1, 2, 3], [-1, 0, 0, 2], source="a", raw=[np.nan, 0.5, 0.4, 0.3])
    some = tree.take(np.array([0, 2, 3, 1]), np.array([1.0, 0.1, 0.2, 0.3], np.float32))
    assert (some.tokens.tolist(), some.parents.tolist(), some.sources) == ([7, 2, 3, 1], [-1, 0, 1, 0], ("a",))
    assert some.raw[1:, 0].tolist() == pytest.approx([0.4, 0.3, 0.5])
    assert some.score.tolist() == pytest.approx([1.0, 0.2, 0.3, 0.1])
    assert len(tree.take(np.array([0]), tree.score)) == 1


def test_prune_takes_descendants_along():
    tree = TokenTree.from_continuations(0, [[1, 2, 3], [1, 4], [5]])
    pruned = tree.prune(tree.tokens != 2)
    assert pruned.tokens.tolist() == [0, 1, 4, 5]
    assert pruned.parents.tolist() == [-1, 0, 1, 0]


def test_cut_keeps_q_and_prune_drops_it():
    q = torch.full((2, 4), 0.25)
    tree = TokenTree.build([0, 1, 2], [-1, 0, 1], q=q, q_row=[0, 1, -1])
    assert tree.cut(1).q is q
    assert tree.cut(1).q_row.tolist() == [0, 1]
    assert tree.prune(np.ones(3, bool)).q is None
    for some in (tree.top_k(1), tree.top_k(2), tree.take(np.arange(2), tree.score)):
        assert some.q is None


def test_fuse_merges_by_prefix_and_remembers_who_proposed():
    one = TokenTree.from_continuations(0, [[1, 2], [3]], source="one")
    other = TokenTree.chain(0, [1, 4], source="other", raw=[0.9, 0.1])
    tree = fuse([one, other])
    assert tree.tokens.tolist() == [0, 1, 2, 3, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 1]
    assert tree.sources == ("one", "other")
    proposed = tree.proposed_by()
    assert proposed["one"].tolist() == [False, True, True, True, False]
    assert proposed["other"].tolist() == [False, True, False, False, True]
    np.testing.assert_allclose(tree.score, [1, 0.9, 1, 0.5, 0.1], rtol=1e-6)
    assert fuse([one]) is one


def test_fuse_of_random_trees_is_the_union_of_their_paths():
    rng = np.random.default_rng(1)
    for _ in range(50):
        trees = [TokenTree.from_continuations(9, list(rng.integers(0, 3, (3, 4)))) for _ in range(3)]
        tree = fuse(trees)
        tree.check(10, 9)
        assert {tuple(tree.tokens[tree.path_to(i)]) for i in range(len(tree))} == {
            tuple(t.tokens[t.path_to(i)]) for t in trees for i in range(len(t))
        }


def test_fuse_keeps_the_best_that_was_said_of_each_path():
    rng = np.random.default_rng(2)
    for _ in range(50):
        trees = []
        for name in ("one", "other", "one", "third"):
            parents = [-1, *(int(rng.integers(0, i)) for i in range(1, 7))]
            tokens = [9, *rng.integers(0, 3, 6).tolist()]  # some siblings are equal
            trees.append(TokenTree.build(tokens, parents, source=name, raw=rng.random(7)))
        said: dict[tuple[int, ...], dict[str, float]] = {}
        for t in trees:
            for i in range(1, len(t)):
                best = said.setdefault(tuple(t.tokens[t.path_to(i)]), {})
                best[t.sources[0]] = max(best.get(t.sources[0], 0.0), float(t.raw[i, 0]))
        tree = fuse(trees)
        assert tree.sources == ("one", "other", "third")
        assert np.isnan(tree.raw[0]).all()
        assert tree.score[0] == 1
        found = {}
        for i in range(1, len(tree)):
            by = {s: float(r) for s, r in zip(tree.sources, tree.raw[i], strict=True) if not np.isnan(r)}
            assert tree.score[i] == max(by.values())
            found[tuple(tree.tokens[tree.path_to(i)])] = by
        assert found == said


def test_fuse_refuses_different_roots():
    with pytest.raises(DrafterError, match="same root"):
        fuse([TokenTree.root(1), TokenTree.root(2)])


def test_best_chain_follows_the_most_promising_branch():
    tree = TokenTree.from_continuations(0, [[1, 2, 3], [1, 2], [4]])
    assert tree.best_chain().tokens.tolist() == [0, 1, 2, 3]
    late = TokenTree.build([0, 1, 2, 3, 4, 5], [-1, 0, 0, 2, 2, 1], raw=[np.nan, 0.2, 0.8, 0.3, 0.7, 1.0])
    assert late.best_chain().tokens.tolist() == [0, 2, 4]
    chain = TokenTree.chain(0, [1, 2])
    assert chain.best_chain() is chain


@pytest.mark.parametrize(
    ("tokens", "parents", "says"),
    [
        ([0, 1], [0, 0], "root"),
        ([5, 1], [-1, 0], "asked about, 0"),
        ([0, 1, 2], [-1, 2, 0], "before their children"),
        ([0, 99], [-1, 0], "99"),
        ([0, -1], [-1, 0], "-1"),
    ],
)
def test_a_malformed_draft_is_refused(tokens, parents, says):
    with pytest.raises(DrafterError, match=says):
        TokenTree.build(tokens, parents).check(10, 0)
