"""Weights that are packed for a CPU: steps of a few rows say what they say without, and the model stays as it was."""

import gc
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.targets import Want, open_target, packed
from slipstream.targets.packed import MOST, Packed, PackedLayers
from slipstream.tree import TokenTree


@pytest.fixture(autouse=True)
def nothing_kept():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "recall", lambda *_: None)
        patch.setattr(packed, "remember", lambda *_: None)
        yield


@pytest.fixture
def model(monkeypatch):
    """Packed whatever that gains."""
    monkeypatch.setattr(packed, "SMALL", 0)
    monkeypatch.setattr(packed, "LESS", float("inf"))
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    return LlamaForCausalLM(config).eval()


def logits(target, count):
    slot = target.open()
    for _ in target.prefill(slot, [5, 6, 7, 8, 9], Want()):
        pass
    (scores,) = target.score([slot], [TokenTree.chain(3, list(range(4, 3 + count)))], Want())
    found = scores.every().clone()
    target.close(slot)
    return found


@pytest.mark.parametrize("fewest", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, MOST, MOST + 1])
def test_a_step_says_what_the_model_says(count, fewest, model, monkeypatch):
    def seconds(layers, x):  # in the trial
        return 1.0 if isinstance(layers[0], Packed) == (len(x) >= fewest) else 2.0

    monkeypatch.setattr(packed, "LESS", 0.85)
    monkeypatch.setattr(packed, "seconds", seconds)
    target, rows, product = open_target(model), [], torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, *y: rows.append(x.shape[1]) or product(x, *y))
    found = logits(target, count)
    assert (count in rows) == (fewest <= count <= MOST)
    torch.testing.assert_close(found, expected(model, count), rtol=0, atol=1e-5)


@torch.inference_mode()
def expected(model, count):
    return model(torch.tensor([[5, 6, 7, 8, 9, *range(3, 3 + count)]])).logits[0, 5:]


def test_the_model_is_the_users_outside_of_forwards(model):
    layers = dict(model.named_modules())
    target = open_target(model)
    logits(target, 8)
    assert dict(model.named_modules()) == layers
    with target._packed.in_place():
        assert any(isinstance(each, Packed) for each in model.modules())
    assert dict(model.named_modules()) == layers


@pytest.mark.parametrize("change", ["training", "merging", "replacing"])
def test_weights_that_were_changed_are_packed_again(change, model):
    target = open_target(model)
    before, layer = logits(target, 8), model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        if change == "training":
            layer.weight.mul_(2)
        elif change == "merging":
            layer.weight.data += 0.5
        else:
            layer.weight = torch.nn.Parameter(layer.weight * 3)
    after = logits(target, 8)
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, expected(model, 8), rtol=0, atol=1e-5)


def test_targets_of_a_model_share_them_and_the_last_gives_them_back(model):
    one, other = open_target(model), open_target(model)
    assert one._packed is other._packed
    assert one._packed._places
    gone = weakref.ref(one._packed)
    del one, other
    gc.collect()
    assert gone() is None


def test_what_would_not_gain_is_left_alone(model, monkeypatch):
    def places(of):
        return PackedLayers.of(of)._places

    assert places(model)
    monkeypatch.setattr(packed, "free_memory", lambda: 1000)
    assert not places(model)
    monkeypatch.undo()
    assert not places(model)  # small as it is
    monkeypatch.setattr(packed, "SMALL", 0)
    monkeypatch.setattr(packed, "seconds", lambda layers, _: 1.0 if isinstance(layers[0], Packed) else 1.1)
    assert not places(model)
    monkeypatch.setattr(packed, "seconds", lambda layers, _: 1.0 if isinstance(layers[0], Packed) else 1.3)
    assert places(model)
    wide = {64, 96}  # those that have so many outputs: the vocabulary's, and the wide ones of the feed-forward part

    def seconds(layers, _):
        return 1.0 if isinstance(layers[0], Packed) or layers[0].out_features not in wide else 2.0

    monkeypatch.setattr(packed, "seconds", seconds)
    assert {layer.out_features for *_, layer, _ in places(model)} == wide  # shape by shape
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not places(model)
    monkeypatch.undo()
    monkeypatch.setattr(packed, "SMALL", 0)
    assert not places(model.to(torch.bfloat16))


def test_a_shape_is_tried_once_on_a_machine(model, monkeypatch):
    kept, tried, pays = {}, [], packed.pays
    monkeypatch.setattr(packed, "recall", lambda *about: kept.get(about))
    monkeypatch.setattr(packed, "remember", lambda kind, key, known: kept.update({(kind, key): known}))
    monkeypatch.setattr(packed, "pays", lambda layers: tried.append(layers[0].weight.shape) or pays(layers))
    first = packed.worth_packing(model)
    assert len(tried) == len(set(tried)) > 2
    assert {layer.weight.shape for *_, layer, _ in first} == set(tried)
    tried.clear()
    assert packed.worth_packing(model) == first
    assert not tried
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)  # another machine, as it were
    assert packed.worth_packing(model) == first
    assert tried
    kept.update(dict.fromkeys(kept, 0))
    assert not packed.worth_packing(model)
    kept.update(dict.fromkeys(kept, True))
    assert packed.worth_packing(model) == first
