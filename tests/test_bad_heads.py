"""Files of heads that are damaged or contradict themselves: each is refused with what was found in it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from published import (
    DRAFTS,
    LAYERS,
    H,
    V,
    dflash,
    eagle,
    eagle3,
    falcon,
    llama_config,
    medusa,
    mlp,
    plain,
    speculators,
    target,
    write,
    zlab,
)
from slipstream.errors import DrafterError
from slipstream.heads import load_head


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, told):
    for model in (None, target()):
        with pytest.raises(DrafterError, match=told):
            load_head(folder, model)


# ---- numbers


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["fc.weight", "midlayer.mlp.up_proj.weight", "norm.weight"])
def test_weights_that_are_infinite_or_no_numbers(name, value, tmp_path):
    eagle3(tmp_path, plain())
    spoil(tmp_path, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))
    refused(tmp_path, rf"holds values in {name} that are infinite or no numbers")


def test_weights_of_eight_bits_without_a_scale(tmp_path):
    mlp(tmp_path)
    spoil(
        tmp_path,
        lambda t: t.update({"speculator.proj.1.weight": t["speculator.proj.1.weight"].to(torch.float8_e4m3fn)}),
    )
    refused(tmp_path, r"speculator\.proj\.1\.weight holds torch\.float8_e4m3fn")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t["d2t"][:1].fill_(-1), "d2t reaches token id -1, but ids begin with 0"),
        (lambda t: t["d2t"][-1:].fill_(V), f"d2t reaches token id {V + DRAFTS - 1}, but the vocabulary has {V}"),
        (lambda t: t["d2t"][1:2].copy_(t["d2t"][:1] - 1), "d2t names token id [0-9]+ more than once"),
        (lambda t: t.update(d2t=t["d2t"] + 0.5), "d2t holds fractions"),
        (lambda t: t["t2d"].logical_not_(), f"t2d and d2t disagree about {V} tokens"),
        (lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d and d2t disagree"),
    ],
)
def test_draft_ids_that_lead_nowhere(change, told, tmp_path):
    eagle3(tmp_path, plain())
    spoil(tmp_path, change)
    refused(tmp_path, told)


def test_draft_ids_may_be_kept_as_floats_or_small_integers(tmp_path):
    eagle3(tmp_path, plain())
    ids = load_head(tmp_path).draft_ids
    for dtype in (torch.float32, torch.int32):
        spoil(tmp_path, lambda tensors, dtype=dtype: tensors.update(d2t=tensors["d2t"].to(dtype)))
        assert torch.equal(load_head(tmp_path).draft_ids, ids)


@pytest.mark.parametrize(("ids", "told"), [([3, 3, 5], "id 3 more than once"), ([3, 5, V], f"the vocabulary has {V}")])
def test_a_token_map_that_leads_nowhere(ids, told, tmp_path):
    config = {"vocab_size": V, "truncated_vocab_size": 3}
    medusa(tmp_path, vllm=True, ids=torch.tensor(ids), config=config)
    refused(tmp_path, f"token_map .*{told}")


# ---- config.json


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads of a head must be 1 or more, not 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads of a head must be a whole number, not '4'"),
        ({"intermediate_size": -1}, "intermediate_size of a head must be 1 or more, not -1"),
        ({"hidden_size": 32.5}, "hidden_size of a head must be a whole number, not 32.5"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' and does not say its low_freq_factor, high",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'linear' and does not say its factor"),
        ({"partial_rotary_factor": 0.5}, "rotates a share of 0.5"),
        ({"layer_types": ["sliding_attention"]}, "lacks 'sliding_window'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window of a head must be 1 or more"),
        ({"layer_types": ["chunked_attention"]}, "of the type 'chunked_attention': known are full_attention and"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "other": {"rope_theta": 6.0}}}
            | {"layer_types": ["sliding_attention"], "sliding_window": 4},
            "rope_parameters differ by layer type",
        ),
    ],
)
def test_a_layer_that_cannot_be(change, told, tmp_path):
    eagle(tmp_path / "eagle", llama_config(**change))
    eagle3(tmp_path / "eagle3", speculators(change), prefix="layers.0.")
    for folder in ("eagle", "eagle3"):
        refused(tmp_path / folder, told)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (plain(eagle_aux_hidden_state_layer_ids=[-1, 2, 4]), "must be whole numbers from 0 on, not -1"),
        (plain(eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 2, 4]}), "whole numbers from 0 on, not -1"),
        (plain(eagle_aux_hidden_state_layer_ids=[1, 2.5, 4]), "must be whole numbers from 0 on, not 2.5"),
        (plain(eagle_aux_hidden_state_layer_ids=[1, 2]), r"fc\.weight is \(32, 96\), not \(32, 64\)"),
        (plain(eagle_config={"use_aux_hidden_state": False}), "`use_aux_hidden_state: false`"),
        (plain(norm_before_fc=True), r"lacks input_norm\.weight"),
        (plain(fc_norm=True), r"lacks fc_norm\.0\.weight"),
    ],
)
def test_states_that_cannot_be_read(config, told, tmp_path):
    eagle3(tmp_path, config)
    refused(tmp_path, told)


def test_states_that_nobody_names(tmp_path):
    eagle3(tmp_path, plain(), aux=(1, 2, 3, 4))
    refused(tmp_path, r"fc\.weight reads 4 hidden states, and config\.json does not say which")


def test_a_state_that_the_target_does_not_have(tmp_path):
    eagle3(tmp_path, plain(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS]}))
    with pytest.raises(DrafterError, match=rf"reads hidden states \(2, 3, {LAYERS + 1}\), but .* has {LAYERS} layers"):
        load_head(tmp_path, target())


def test_a_norm_that_config_json_denies(tmp_path):
    eagle3(tmp_path, speculators(norm_before_fc=False), prefix="layers.0.", norm_before_fc=True)
    refused(tmp_path, r"says norm_before_fc: false, but the file has input_norm\.weight")


@pytest.mark.parametrize(
    ("config", "extra", "told"),
    [
        (plain(), {"mask_hidden": torch.zeros(1, 3 * H)}, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, {}, "a speculators peagle head, which slipstream does not run yet"),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            {},
            r"a DFlash or DSpark \(Gemma4DSparkModel\) head, which slipstream",
        ),
        (plain(), {"markov_w1.weight": torch.zeros(V, 4)}, "a DFlash or DSpark .* head, which slipstream does not run"),
        ({}, {"mtp.fc.weight": torch.zeros(H, 2 * H)}, r"prediction \(MTP\) head, which slipstream does not run yet"),
        ({}, {"model.layers.61.eh_proj.weight": torch.zeros(H, 2 * H)}, r"a multi-token prediction \(MTP\) head"),
        ({"speculators_model_type": "mtp"}, {}, "a speculators mtp head, which slipstream does not run yet"),
    ],
)
def test_heads_of_other_kinds_are_refused_by_name(config, extra, told, tmp_path):
    eagle3(tmp_path, plain())
    write(tmp_path, config, {**load_file(tmp_path / "model.safetensors"), **extra})
    refused(tmp_path, told)


def test_names_in_errors_are_those_of_the_file(tmp_path):
    mlp(tmp_path / "mlp", bare=True)
    spoil(tmp_path / "mlp", lambda tensors: tensors.pop("proj.1.weight"))
    refused(tmp_path / "mlp", r"lacks proj\.1\.weight$")
    medusa(tmp_path / "medusa", vllm=True, prefix="medusa_heads.")
    spoil(tmp_path / "medusa", lambda tensors: tensors.pop("medusa_heads.blocks.1.layers.0.weight"))
    refused(tmp_path / "medusa", r"lacks medusa_heads\.blocks\.1\.layers\.0\.weight$")
    eagle3(tmp_path / "eagle3", plain(), aux_norms=("aux_norm_low", "aux_norm_mid", "aux_norm_high"))
    spoil(tmp_path / "eagle3", lambda tensors: tensors.update({"aux_norm_mid.weight": torch.zeros(3)}))
    refused(tmp_path / "eagle3", r"aux_norm_mid\.weight is \(3,\), not \(32,\)")


@pytest.mark.parametrize("text", ["[]", '{"eagle_config": 3}', '{"architectures": 7}'])
def test_a_config_that_is_something_else(text, tmp_path):
    eagle3(tmp_path, plain())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(text if text == "[]" else json.dumps(config | json.loads(text)))
    refused(tmp_path, "can't be")


# ---- heads that guess in blocks


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dflash_config": {"mask_token_id": 9}, "num_target_layers": None}, "num_target_layers"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, "does not say which token a mask is"),
        ({"dflash_config": {"mask_token_id": V, "target_layer_ids": [1, 4]}}, f"mask_token_id {V} is no token"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, -1]}}, "whole numbers from 0 on, not -1"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1]}}, r"fc\.weight is \(32, 64\), not \(32, 32\)"),
        ({"block_size": 1}, "a block of 1 has no place to guess"),
        ({"block_size": None}, "block_size"),
        ({"num_hidden_layers": 3}, r"lacks layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 1}, r"has layers\.1\.input_layernorm\.weight"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "a sliding window, which we don't run"),
        ({"markov_rank": 4}, r"lacks markov_head\.markov_w1\.weight"),
        ({"markov_rank": 4, "markov_head_type": "cubic"}, "the bias 'cubic' is unknown: there are vanilla, gated, rnn"),
        ({"enable_confidence_head": True}, r"lacks confidence_head\.proj\.bias"),
        (
            {"enable_confidence_head": True, "confidence_head_with_markov": True},
            "reads the embedding of the token before, and there is no bias",
        ),
    ],
)
def test_a_dflash_head_that_contradicts_itself(change, told, tmp_path):
    dflash(tmp_path, zlab() | change, (2, 5), 7)
    refused(tmp_path, told)


def test_a_dflash_head_for_another_target(tmp_path):
    dflash(tmp_path, zlab() | {"num_target_layers": None}, (2, 5), 7)
    with pytest.raises(DrafterError, match=r"reads hidden states \(2, 5\), and .* has those from 0 to 3"):
        load_head(tmp_path, target(4))
    dflash(tmp_path / "named", zlab(), (2, 5), 7)
    with pytest.raises(DrafterError, match=f"made for a target with {LAYERS} layers, but .* has 9"):
        load_head(tmp_path / "named", target(9))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "hidden_norm.weight"])
def test_a_dflash_head_whose_weights_are_no_numbers(name, tmp_path):
    dflash(tmp_path, zlab(), (2, 5), 7)
    spoil(tmp_path, lambda tensors: tensors[name].view(-1)[3:4].fill_(torch.nan))
    refused(tmp_path, rf"holds values in {name} that are infinite or no numbers")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"k_mask": 0}, "k_mask of a head must be 1 or more, not 0|lacks 'k_mask'"),
        ({"k_mask": "2"}, "k_mask of a head must be a whole number, not '2'"),
        ({"num_hidden_layers": 2}, "a falcon head has one layer, not 2"),
        ({"bias": False}, r"has lstm\.bias_hh_l0"),
        ({"hidden_size": 16}, r"doesn't hold what its config\.json says"),
    ],
)
def test_a_falcon_head_that_contradicts_itself(change, told, tmp_path):
    falcon(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    refused(tmp_path, told)
