"""GGUF files: what they hold, read quickly, and kept as ordinary checkpoints."""

import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from transformers.integrations.ggml import _gguf_parse_value

import slipstream
from commands import command
from slipstream.loading import converted
from slipstream.loading.dequantize import KERNELS, dequantize, reference
from slipstream.loading.gguf import QuickReader
from slipstream.loading.models import load_model, load_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def path(tmp_path):
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def write_tiny_gguf(path, seed=0):
    """A Llama of one layer, with weights of several types."""
    hidden, inner, vocabulary = 32, 64, 300
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", *"0123456789", *(f"t{i}" for i in range(vocabulary - 11))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_scores([-0.5 * i for i in range(vocabulary)])
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(seed)
    weights = {
        "token_embd.weight": ((vocabulary, hidden), Type.Q8_0),
        "output_norm.weight": ((hidden,), Type.F32),
        "output.weight": ((vocabulary, hidden), Type.Q5_0),
        "blk.0.attn_norm.weight": ((hidden,), Type.F32),
        "blk.0.ffn_norm.weight": ((hidden,), Type.F32),
        "blk.0.attn_q.weight": ((hidden, hidden), Type.Q4_0),
        "blk.0.attn_k.weight": ((hidden // 2, hidden), Type.Q4_1),
        "blk.0.attn_v.weight": ((hidden // 2, hidden), Type.Q5_1),
        "blk.0.attn_output.weight": ((hidden, hidden), Type.F32),
        "blk.0.ffn_gate.weight": ((inner, hidden), Type.F16),
        "blk.0.ffn_up.weight": ((inner, hidden), Type.BF16),
        "blk.0.ffn_down.weight": ((hidden, inner), Type.Q8_0),
    }
    for name, (shape, kind) in weights.items():
        values = gguf.quantize(rng.normal(0, 0.2, shape).astype(np.float32), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_transformers_reads(path, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


def same_bits(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype
        assert torch.equal(ours[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KERNELS, Type.BF16, Type.IQ4_NL])
def test_blocks_have_the_bits_of_the_reference(kind):
    """Any bytes are a block, but for scales that are no numbers."""
    rng = np.random.default_rng(7)
    _, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (6, 400 * width), dtype=np.uint8)
    for at in KERNELS.get(kind, (None, 0))[1:]:
        scales = rng.normal(0, 0.1, (6, 400)).astype(np.float16)
        blocks.reshape(6, 400, width)[..., at : at + 2] = scales[..., None].view(np.uint8)
    ours, theirs = dequantize(blocks, kind), reference(blocks, kind)
    assert ours.shape == theirs.shape
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_quick_reading_gives_what_the_package_gives(path):
    quick, slow = QuickReader(path), gguf.GGUFReader(path)
    assert list(quick.fields) == list(slow.fields)
    for name, field in slow.fields.items():
        ours = quick.fields[name]
        assert ours.types == field.types
        assert [_gguf_parse_value(ours.parts[i], ours.types) for i in ours.data] == [
            _gguf_parse_value(field.parts[i], field.types) for i in field.data
        ]
    for ours, theirs in zip(quick.tensors, slow.tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        assert np.array_equal(ours.data, theirs.data)
    before = gguf.GGUFReader, gguf.dequantize
    load_tokenizer(path)
    assert (gguf.GGUFReader, gguf.dequantize) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_converted_file_has_the_bits_that_transformers_reads(path, dtype):
    theirs = as_transformers_reads(path, dtype)
    for _ in range(2):  # the first converts
        model, tokenizer = load_model(path, dtype=dtype, device="cpu")
        same_bits(model, theirs)
        assert tokenizer("t12t1")["input_ids"] == load_tokenizer(path)[0]("t12t1")["input_ids"]
        assert tokenizer.get_vocab() == load_tokenizer(path)[0].get_vocab()
        assert model.config._name_or_path == str(path)
        assert model.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    assert load_model(path, dtype="auto", device="cpu")[0].dtype == torch.float32


def test_a_gguf_file_speaks(path):
    llm = slipstream.load(str(path), drafter="pld")
    prompt = [5, 6, 7, 5, 6]
    whole = as_transformers_reads(path, torch.float32).generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1
    )
    assert llm.generate(prompt, max_new_tokens=6, ignore_eos=True).tokens == whole[0, 5:].tolist()
    assert llm.target.exact


def test_a_file_is_converted_once_and_another_in_its_place_anew(path, tmp_path, cache, monkeypatch, capsys):
    model, _ = load_model(path, device="cpu")
    assert "converting tiny.gguf once" in capsys.readouterr().err
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    assert other.stat().st_size == path.stat().st_size
    convert = converted.convert
    monkeypatch.setattr(converted, "convert", None)
    again, _ = load_model(path, device="cpu")
    same_bits(again, model)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert converted.folder_of(Path(shutil.copy(path, moved))) == converted.folder_of(path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(converted, "convert", convert)

    times = path.stat()
    other.replace(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    new, _ = load_model(path, device="cpu")
    same_bits(new, as_transformers_reads(path, torch.float32))
    assert len(list(cache.iterdir())) == 2


def test_a_fingerprint_sees_the_middle_and_the_end_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "HEAD", 1000)
    monkeypatch.setattr(converted, "SLICE", 100)
    monkeypatch.setattr(converted, "SLICES", 5)
    file = tmp_path / "large.gguf"
    seen = set()
    for place in (None, 10, 999, 1050, 2990, 4999):
        content = bytearray(5000)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        seen.add(converted.fingerprint(file))
    assert len(seen) == 6
    file.write_bytes(bytes(5001))
    assert converted.fingerprint(file) not in seen


def test_weights_that_half_precision_holds_are_stored_in_it(path):
    with safe_open(converted.ensure(path) / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    layer = "model.layers.0."
    assert stored[layer + "mlp.gate_proj.weight"] == torch.float16
    assert stored[layer + "mlp.up_proj.weight"] == torch.bfloat16
    assert stored[layer + "mlp.down_proj.weight"] == stored["model.norm.weight"] == torch.float32


def test_half_a_conversion_is_none(path, cache, monkeypatch):
    def stopped(_gguf, to, _name):
        to.mkdir()
        (to / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converted, "convert", stopped)
        with pytest.raises(KeyboardInterrupt):
            load_model(path)
    assert list(cache.iterdir()) == []

    def killed(name, age):  # leaves its folder behind
        (cache / name / "model").mkdir(parents=True)
        (cache / name / "model" / "config.json").write_text("{}")
        now = cache.stat().st_mtime
        os.utime(cache / name, (now - age, now - age))

    killed(".making-old", age=2 * converted.LEFT_BEHIND)
    killed(".making-now", age=0)
    assert converted.listed() == []
    folder = converted.ensure(path)
    assert converted.listed() == [folder]
    assert {f.name for f in cache.iterdir()} == {folder.name, ".making-now"}  # that one may still be at work


def test_two_may_convert_the_same_file(path):
    to = converted.folder_of(path)
    with converted.making(to) as mine:
        converted.convert(path, mine, "mine")
        first = converted.ensure(path)
    assert first == to
    same_bits(load_model(path, device="cpu")[0], as_transformers_reads(path, torch.float32))


def test_a_folder_and_the_name_of_a_file_in_it(path):
    model, tokenizer = load_model(path.parent, gguf_file=path.name, device="cpu")
    same_bits(model, as_transformers_reads(path, torch.float32))
    below, _ = load_model(path.parent.parent, gguf_file=path.name, subfolder=path.parent.name, device="cpu")
    same_bits(below, model)
    assert tokenizer.convert_ids_to_tokens(tokenizer("t1")["input_ids"]) == ["t", "1"]


def test_what_can_not_be_converted_or_kept_is_told(path, tmp_path, monkeypatch):
    (tmp_path / "broken.gguf").write_bytes(path.read_bytes()[:3000])
    with pytest.raises(slipstream.ModelError, match=r"broken\.gguf can't be loaded"):
        load_model(tmp_path / "broken.gguf")
    with pytest.raises(slipstream.ModelError, match=r"none\.gguf"):
        load_model(tmp_path, gguf_file="none.gguf", local_files_only=True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(slipstream.ModelError, match="SLIPSTREAM_CACHE"):
        load_model(path)


def test_converted_models_are_listed_and_removed(path):
    folder = converted.ensure(path)
    assert command("models", folder.name) == (0, f"{folder.name}  0 MB  {folder}\n", "")
    code, _, said = command("models", "--remove", "other")
    assert code == 2
    assert f"no converted model is called other: there is {folder.name}" in said
    assert folder.exists()
    assert command("models", "--remove")[1].startswith(f"removed {folder.name}")
    assert converted.listed() == []
