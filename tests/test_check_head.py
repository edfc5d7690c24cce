"""slipstream heads check: what a folder holds, whether it fits, and what is odd, from files alone."""

import json
from importlib.resources import files

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import command
from families import tiny_model
from published import BEFORE, LAYERS, H, V, eagle, eagle3, llama_config, medusa, mlp, plain, speculators, target
from slipstream.errors import DrafterError
from slipstream.heads import HEADS, load_head, save_head
from slipstream.heads.check import check_head, short
from slipstream.loading import embedded
from slipstream.loading.models import blank_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a target: its config alone."""
    path = tmp_path_factory.mktemp("target")
    target().config.save_pretrained(path)
    return path


def lines(out):
    return [tuple(line.split(maxsplit=1)) for line in out.splitlines()]


def test_it_tells_what_a_head_is_and_that_it_fits(folder, tmp_path):
    layer = {"sliding_window": 2048, "layer_types": ["sliding_attention"]}
    config = speculators(layer, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 4, LAYERS])
    eagle3(tmp_path, config, (2, 4, BEFORE), "layers.0.")
    own = sum(t.numel() for n, t in load_file(tmp_path / "model.safetensors").items() if n not in ("d2t", "t2d"))
    code, out, err = command("heads", "check", tmp_path, "--model", folder)
    assert (code, err) == (0, "")
    assert lines(out) == [
        ("kind", "eagle3"),
        ("layout", "EAGLE-3 (speculators 0.7.0)"),
        ("target", "x"),
        (
            "reads",
            f"hidden states 2, 4, {LAYERS} (before the final norm), through 1 layer that sees the last 2,048 positions",
        ),
        ("guesses", "any number of tokens ahead, among 24 of 64"),
        ("parameters", f"{short(own)}, float32, {short(4 * own)}B"),
        ("borrows", "embed_tokens.weight"),
        ("odd", f"its files name x as its target, not {folder}"),
        ("fits", f"{folder}: --drafter eagle3 --drafter-path {tmp_path}"),
    ]


def test_without_a_model_nothing_is_said_about_fitting(tmp_path):
    eagle3(tmp_path, plain())
    code, out, _ = command("heads", "check", tmp_path)
    assert code == 0
    told = dict(lines(out))
    assert told["target"] == "its files name none"
    assert told["reads"] == "hidden states 2, L/2 and L - 3 of a target with L layers, through 1 layer"
    assert "fits" not in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 48}, "a hidden size of 32, but .* has 48"),
        ({"vocab_size": 65}, "a vocabulary of 64, but .* has 65"),
        ({"num_hidden_layers": 4}, r"reads hidden states \(1, 2, 5\), but .* has 4 layers"),
    ],
)
def test_it_tells_why_a_head_does_not_fit(change, told, tmp_path):
    eagle3(tmp_path / "head", plain(eagle_aux_hidden_state_layer_ids=[1, 2, 5]))
    tiny_model("llama", **change).config.save_pretrained(tmp_path / "target")
    code, out, err = command("heads", "check", tmp_path / "head", "--model", tmp_path / "target")
    assert code == 2
    assert dict(lines(out))["kind"] == "eagle3"
    assert "fits" not in dict(lines(out))
    with pytest.raises(DrafterError, match=told):
        raise DrafterError(err)


MAKERS = {
    "eagle": lambda folder: eagle(folder, llama_config()),
    "eagle3": lambda folder: eagle3(folder, plain()),
    "two layers": lambda folder: eagle3(folder, plain(num_hidden_layers=2), layers=2),
    "without output": lambda folder: eagle3(folder, plain(), head=False),
    "medusa": medusa,
    "medusa without output": lambda folder: medusa(folder, outputs=0),
    "mlp": mlp,
}


@pytest.mark.parametrize("name", MAKERS)
def test_it_agrees_with_loading(name, folder, tmp_path):
    """With a target of which there is no weight at all, it counts what loading the head finds."""
    MAKERS[name](tmp_path)
    with torch.device("meta"):
        model = type(target())(target().config)
    report, head = check_head(tmp_path, model), load_head(tmp_path, target())
    assert report.misfit is None
    assert report.kind == head.kind
    own = sum(p.numel() for p in head.parameters())
    if "embed_tokens.weight" not in report.borrows and head.embedding is target().get_input_embeddings():
        own += V * H  # the same numbers as the target's: loading drops them
    assert report.parameters == own
    code, out, _ = command("heads", "check", tmp_path, "--model", folder)
    assert code == 0
    assert dict(lines(out))["kind"] == head.kind


def test_it_tells_what_is_odd(tmp_path):
    medusa(tmp_path / "medusa")
    assert "config.json says 2 heads, the file holds 3: these count" in check_head(tmp_path / "medusa").odd
    medusa(tmp_path / "map", vllm=True, ids=torch.tensor([1, 2]), whole=True)
    assert any(line.startswith("token_map is in the file and not read") for line in check_head(tmp_path / "map").odd)
    eagle(tmp_path / "eagle", llama_config(), extra={"lm_head.weight": torch.randn(V, H)})
    told = "lm_head.weight is in the file and not read: EAGLE-1 guesses through its target's"
    assert told in check_head(tmp_path / "eagle").odd
    eagle3(tmp_path / "eagle3", plain())
    tensors = load_file(tmp_path / "eagle3" / "model.safetensors")
    tensors |= {"fc.weight": tensors["fc.weight"] * 0, "norm.weight": tensors["norm.weight"].half()}
    save_file(tensors, tmp_path / "eagle3" / "model.safetensors")
    assert check_head(tmp_path / "eagle3").odd == (
        "all numbers of fc.weight are 0: is it untrained?",
        "its tensors have several precisions: it runs in its target's",
    )


def test_blocks_that_differ_and_biases_that_vllm_drops_are_odd(tmp_path):
    medusa(tmp_path / "biases", vllm=True)
    tensors = load_file(tmp_path / "biases" / "model.safetensors")
    tensors |= {f"blocks.{h}.layers.0.bias": torch.ones(H) for h in range(3)}
    save_file(tensors, tmp_path / "biases" / "model.safetensors")
    assert check_head(tmp_path / "biases").odd == (
        "the blocks have biases, and config.json says no medusa_fc_bias: vLLM would leave them out",
    )
    medusa(tmp_path / "blocks")
    tensors = torch.load(tmp_path / "blocks" / "medusa_lm_head.pt")
    for h in range(3):
        tensors[f"{h}.2.weight"] = tensors.pop(f"{h}.1.weight")
        tensors |= {f"{h}.1.linear.{what}": tensors[f"{h}.0.linear.{what}"].clone() for what in ("weight", "bias")}
    torch.save(tensors, tmp_path / "blocks" / "medusa_lm_head.pt")
    (tmp_path / "blocks" / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    assert check_head(tmp_path / "blocks").odd == ()
    tensors["1.1.linear.bias"] += 1
    torch.save(tensors, tmp_path / "blocks" / "medusa_lm_head.pt")
    (line,) = check_head(tmp_path / "blocks").odd
    assert "FasterDecoding repeats a single one" in line


def test_our_own_files_need_no_target_to_be_looked_at(tmp_path):
    save_head(HEADS["eagle3"].fresh(target(), draft_ids=range(9)), tmp_path)
    report = check_head(tmp_path)
    assert (report.layout, report.borrows) == ("slipstream's own", ("embed_tokens.weight", "lm_head.weight"))
    assert report.reads == "hidden states 2, 3, 4, through 1 layer"


def test_what_cannot_be_loaded_is_an_error_as_in_loading(tmp_path):
    eagle3(tmp_path, plain(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]))
    code, out, err = command("heads", "check", tmp_path)
    assert (code, out) == (2, "")
    assert "whole numbers from 0 on, not -1" in err
    code, _, err = command("heads", "check", tmp_path, "--model", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err


@pytest.mark.slow
def test_the_embedded_model_is_known_by_its_name_without_the_hub():
    """As the page on heads has it."""
    shipped = files("slipstream.heads") / "shipped" / "eagle3"
    code, out, err = command("heads", "check", shipped, "--model", embedded.NAME)
    assert code == 0, err
    assert f"{embedded.NAME}: --drafter eagle3" in out


def test_what_fits_a_model_fits_an_adapter_of_it(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    assert blank_model(tmp_path).config.hidden_size == blank_model(folder).config.hidden_size
