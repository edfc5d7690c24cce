"""Heads as we write them for others: complete, in their own precision, and computing there what they compute here."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from published import LAYERS, H, mlp, target, text
from slipstream.cli import app
from slipstream.heads import HEADS, export_head, load_head, save_head

DEPTHS = 6


def stirred(head):
    random = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return head


@torch.no_grad()
def logits(head):
    tokens, hidden = text()
    known = {n: torch.from_numpy(h) for n, h in hidden.items() if isinstance(n, int)}
    known[LAYERS + 1] = torch.from_numpy(hidden["before the final norm"])
    states = head.join({n: known[n] for n in head.layers(LAYERS)})[None]
    depths = min(DEPTHS, head.reach or DEPTHS)
    return torch.stack([p.logits for p in head.predict(states, tokens[None], depths)])


EVERYTHING = {
    "norm_output": True,
    "fc_norm": True,
    "qk_norm": True,
    "o_bias": True,
    "qkv_bias": True,
    "num_hidden_layers": 2,
    "windows": (5, None),
    "aux_layers": (1, 4, 5, LAYERS),
}


@pytest.mark.parametrize("sizes", [EVERYTHING, {"norm_before_fc": True, "norm_before_residual": True}])
def test_what_published_heads_have_survives_being_written(sizes, tmp_path):
    head = stirred(HEADS["eagle3"].fresh(target(), draft_ids=range(9, 40), dtype=torch.float64, **sizes))
    before = logits(head)
    save_head(head, tmp_path / "ours")
    export_head(head, tmp_path / "published")
    export_head(head, tmp_path / "speculators", layout="speculators")
    for form in ("ours", "published", "speculators"):
        back = load_head(tmp_path / form, target())
        assert torch.equal(logits(back), before), form
        assert {name: getattr(back.config, name) for name in sizes} == sizes


def test_exported_configs_say_what_others_ask_for(tmp_path):
    head = HEADS["eagle3"].fresh(target(), **EVERYTHING)
    export_head(head, tmp_path / "eagle3", layout="speculators")
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert (config["norm_output"], config["fc_norm"]) == (True, True)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 5, LAYERS]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["num_aux_hidden_states"]) == ("qwen3", 2, 4)
    assert (layer["sliding_window"], layer["layer_types"]) == (5, ["sliding_attention", "full_attention"])
    export_head(HEADS["medusa"].fresh(target(), heads=2), tmp_path / "medusa")
    assert json.loads((tmp_path / "medusa" / "config.json").read_text())["medusa_fc_bias"] is True


@pytest.mark.parametrize("layout", [None, "speculators"])
@pytest.mark.parametrize("layers", [1, 2])
def test_attention_bias_stands_for_all_four_projections(layout, layers, tmp_path):
    sizes = {"qkv_bias": True, "num_hidden_layers": layers}
    head = stirred(HEADS["eagle3"].fresh(target(), dtype=torch.float64, **sizes))
    export_head(head, tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("transformer_layer_config", config)["attention_bias"] is True
    biases = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if n.endswith("o_proj.bias")}
    assert len(biases) == layers
    assert all(bias.shape == (H,) and not bias.any() for bias in biases.values())
    assert torch.equal(logits(load_head(tmp_path, target())), logits(head))


def test_tied_output_matrices_are_written_for_every_depth(tmp_path):
    """vLLM ties everything else."""
    mlp(tmp_path / "in", tied=True)
    head = load_head(tmp_path / "in", target())
    export_head(head, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for k in range(3):
        assert torch.equal(tensors[f"speculator.head.{k}.weight"], tensors["speculator.head.0.weight"])
    assert torch.equal(logits(load_head(tmp_path / "out", target())), logits(head))


def test_several_blocks_of_medusa_are_told_about(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        export_head(HEADS["medusa"].fresh(target(), heads=2), tmp_path / "one")
        assert not caplog.records
        export_head(HEADS["medusa"].fresh(target(), heads=2, blocks=2), tmp_path / "two")
    assert "FasterDecoding's own code repeats a single one" in caplog.text


@pytest.mark.parametrize(("wanted", "written"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_a_head_keeps_its_precision_unless_told(wanted, written, tmp_path):
    target().float().save_pretrained(tmp_path / "target")
    target().double()
    head = HEADS["eagle3"].fresh(target(), dtype=torch.bfloat16)
    save_head(head, tmp_path / "head")
    words = ["export", str(tmp_path / "head"), "--out", str(tmp_path / "out"), "--model", str(tmp_path / "target")]
    done = CliRunner().invoke(app, words + ([] if wanted is None else ["--dtype", wanted]))
    assert done.exit_code == 0, done.output
    floats = {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values() if t.is_floating_point()}
    assert floats == {written}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == str(written).removeprefix("torch.")
