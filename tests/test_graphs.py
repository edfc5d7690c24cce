"""Steps of fixed shape, as they are captured on a GPU, run here without capture: they say what forwards say."""

import numpy as np
import pytest
import torch

from families import FAMILIES
from slipstream.target import Want
from slipstream.target.choose import _probe, open_target
from slipstream.target.graphs import GraphTarget, bucket
from slipstream.target.masks import mask_kinds
from slipstream.target.trees import TreeTarget
from slipstream.tree import TokenTree

# Attention with terms of its own (a bias by place, sinks): these keep their ordinary forwards.
OTHERS = {"bloom", "falcon", "gpt_oss"}


def graphs(model):
    vocabulary, shapes = _probe(model)
    return GraphTarget(model, shapes, mask_kinds(model.config.get_text_config()), vocabulary)


def read(target, texts):
    slots = [target.open() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        for _ in target.prefill(slot, text, Want()):
            pass
    return slots


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OTHERS])
def test_fixed_steps_say_what_ordinary_forwards_say(family, tiny):
    """Two sequences in a batch padded to two, trees padded to eight rows, scattered paths committed between steps."""
    model = tiny(family)
    plain = open_target(model)
    assert type(plain) is TreeTarget
    fixed = graphs(model)
    texts = [[1, 2, 3, 4, 5] * 6, [7, 8, 9]]
    one, other = read(plain, texts), read(fixed, texts)
    wide = TokenTree.build([4, 5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 4, 3])
    for trees, paths in [
        ([wide, TokenTree.build([3, 9], [-1, 0])], [[0, 2, 4, 5], [0]]),
        ([TokenTree.root(11), wide], [[0], [0, 1, 3]]),
        ([wide, wide], [[0, 1], [0, 2, 4]]),
    ]:
        expected = plain.score(one, trees, Want(argmax=True))
        found = fixed.score(other, trees, Want(rows=8, argmax=True))
        for a, b, tree in zip(expected, found, trees, strict=True):
            for node in range(len(tree)):
                torch.testing.assert_close(b.logits(node), a.logits(node), rtol=0, atol=1e-4 * float(a._logits.std()))
                assert b.argmax(node) == a.argmax(node)
        for slots, target in ((one, plain), (other, fixed)):
            for slot, path in zip(slots, paths, strict=True):
                target.commit(slot, path)
        assert [s.tokens for s in one] == [s.tokens for s in other]


def test_a_step_survives_the_cache_growing(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.target.graphs.FIRST_CAPACITY", 16)
    monkeypatch.setattr("slipstream.target.cache.FIRST_CAPACITY", 16)
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    tree = TokenTree.build([4, 5, 6, 7], [-1, 0, 0, 2])
    for _ in range(20):
        (a,), (b,) = plain.score([one], [tree], Want()), fixed.score([other], [tree], Want(rows=8))
        torch.testing.assert_close(b.logits(3), a.logits(3), rtol=0, atol=1e-4)
        plain.commit(one, [0, 2, 3])
        fixed.commit(other, [0, 2, 3])
    assert fixed.pool.capacity > 60


@pytest.mark.parametrize("count", [90, 140])
def test_a_path_may_be_as_long_as_the_step_has_rows(count, tiny):
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    tree = TokenTree.chain(4, [i % 50 for i in range(count - 1)])
    for _ in range(2 if count < 100 else 1):
        (a,), (b,) = plain.score([one], [tree], Want()), fixed.score([other], [tree], Want())
        torch.testing.assert_close(b.logits(count - 1), a.logits(count - 1), rtol=0, atol=1e-4)
        plain.commit(one, range(count))
        fixed.commit(other, range(count))


def test_hidden_states_come_along(tiny):
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    tree, want = TokenTree.build([4, 5, 6], [-1, 0, 0]), Want(layers=(0, 2))
    (a,), (b,) = plain.score([one], [tree], want), fixed.score([other], [tree], want)
    for layer in want.layers:
        torch.testing.assert_close(b.hidden[layer], a.hidden[layer], rtol=0, atol=1e-5)


def test_buckets():
    assert [bucket(n, (1, 8, 16)) for n in (1, 2, 8, 9, 16, 17, 33)] == [1, 8, 8, 16, 16, 32, 48]
    assert np.diff([bucket(n, (1, 8, 16)) for n in range(1, 60)]).min() >= 0
