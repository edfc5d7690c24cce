"""Number L + 1 of a target's hidden states is what its final norm reads, however the target computes."""

import pytest
import torch

from families import FAMILIES, STATEFUL, graphs
from slipstream.heads import HEADS
from slipstream.targets import Want, open_target
from slipstream.targets.states import final_norm
from slipstream.training.teacher import Teacher
from slipstream.tree import TokenTree

TEXT = [1, 2, 3, 4, 5, 9, 8, 7]


def states(target, layers):
    (scores,) = target.prefill(target.open(), TEXT, Want(layers=layers))
    return {layer: h[: len(TEXT)] for layer, h in scores.hidden.items()}


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL])
def test_the_final_norm_of_number_l_plus_one_is_number_l(family, tiny):
    model = tiny(family)
    last = int(model.config.get_text_config().num_hidden_layers)
    seen = states(open_target(model), (last, last + 1))
    assert not torch.allclose(seen[last], seen[last + 1])
    torch.testing.assert_close(final_norm(model)(seen[last + 1]), seen[last])
    assert not final_norm(model)._forward_pre_hooks


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3"])
def test_fixed_steps_give_it_too(family, tiny):
    model = tiny(family)
    last = model.config.num_hidden_layers
    layers = (1, last, last + 1)
    one, other = open_target(model), graphs(model)
    tree = TokenTree.build([4, 5, 6], [-1, 0, 0])
    expected, found = (target.score([read(target)], [tree], Want(layers=layers, rows=4)) for target in (one, other))
    for layer in layers:
        torch.testing.assert_close(found[0].hidden[layer][:3], expected[0].hidden[layer], rtol=0, atol=1e-4)


def read(target):
    slot = target.open()
    for _ in target.prefill(slot, TEXT, Want()):
        pass
    return slot


@torch.no_grad()
def test_training_reads_what_drafting_reads(tiny):
    model = tiny("llama")
    head = HEADS["eagle3"].fresh(model, aux_layers=(1, 2, 3))
    assert head.layers(3) == (1, 2, 4)
    read, chose = Teacher(model, head).read(torch.tensor([TEXT]))
    seen = states(open_target(model), (1, 2, 3, 4))
    torch.testing.assert_close(read[0], torch.cat([seen[1], seen[2], seen[4]], dim=-1))
    torch.testing.assert_close(chose[0], seen[3])
