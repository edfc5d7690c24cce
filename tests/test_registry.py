"""Heads that belong to a model: found again by its weights, and asked by auto without being named."""

import copy

import pytest
import torch

from families import tiny_model
from slipstream import LLM, DrafterError
from slipstream.cli import main
from slipstream.heads import HEADS, registry, save_head

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A head for the tiny llama, and an empty cache."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    save_head(HEADS["eagle3"].fresh(tiny("llama")), tmp_path / "mine")
    return tmp_path / "mine"


def test_a_model_is_known_by_its_weights_and_not_by_its_name(tiny):
    model = tiny("llama")
    same = copy.deepcopy(model).to(torch.bfloat16)
    same.config._name_or_path = "somewhere/else"
    assert registry.fingerprint(same) == registry.fingerprint(model)
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    assert registry.fingerprint(other) != registry.fingerprint(model)
    assert registry.fingerprint(tiny_model("llama", intermediate_size=64)) != registry.fingerprint(model)


@pytest.mark.slow
def test_a_registered_head_is_asked_unnamed_until_it_is_removed(folder, tiny):
    model = tiny("llama")
    assert list(LLM(model).engine.drafter.parts) == ["suffix", "lookahead", "prediction"]
    entry = registry.add(folder, model)
    assert entry.kind == "eagle3"
    assert registry.entries() == [entry]
    llm = LLM(model)
    assert list(llm.engine.drafter.parts) == ["suffix", "lookahead", "eagle3", "prediction"]
    assert LLM(model, drafter="eagle3").engine.drafter.folder == folder
    assert list(LLM(tiny("qwen2")).engine.drafter.parts) == ["suffix", "lookahead", "prediction"]
    plain = LLM(model, drafter="none").generate(PROMPT, max_new_tokens=24, ignore_eos=True).tokens
    assert llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True).tokens == plain
    registry.remove(folder)
    assert list(LLM(model).engine.drafter.parts) == ["suffix", "lookahead", "prediction"]
    with pytest.raises(DrafterError, match="is not registered"):
        registry.remove(folder)


@pytest.mark.slow
def test_auto_takes_several_heads_of_a_kind_and_a_draft_model(folder, tiny):
    model = tiny("llama")
    heads = [folder, HEADS["eagle3"].fresh(model, seed=3), HEADS["medusa"].fresh(model)]
    llm = LLM(model, heads=heads, draft_model=tiny_model("llama", seed=1))
    assert list(llm.engine.drafter.parts) == [
        "suffix",
        "lookahead",
        "eagle3",
        "eagle3-2",
        "medusa",
        "model",
        "prediction",
    ]
    plain = LLM(model, drafter="none").generate(PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    for names in (None, "eagle3-2", "model", "eagle3,medusa"):
        result = llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True, drafters=names)
        assert result.tokens == plain
        assert set(result.stats.by_source) <= set(names.split(",") if names else llm.engine.drafter.parts)


def test_a_head_that_does_not_fit_is_refused_where_it_is_named(folder):
    with pytest.raises(DrafterError, match="hidden size"):
        LLM(tiny_model("llama", hidden_size=64), heads=[folder])
    with pytest.raises(DrafterError, match="hidden size"):
        registry.add(folder, tiny_model("llama", hidden_size=64))
    assert registry.entries() == []


def test_a_registry_that_cannot_be_read_is_told(folder, tiny):
    registry.add(folder, tiny("llama"))
    registry._file().write_text("{")
    with pytest.raises(DrafterError, match="Delete it and add your heads again"):
        registry.entries()


def test_the_command_line_adds_lists_and_removes(folder, tiny, tmp_path, capsys, monkeypatch):
    tiny("llama").save_pretrained(tmp_path / "model")
    for words, told in (
        (["add", str(folder), "-m", str(tmp_path / "model")], f"eagle3 for {tmp_path / 'model'}: {folder}"),
        (["list"], f"eagle3 for {tmp_path / 'model'}: {folder}"),
        (["remove", str(folder)], "no longer registered"),
        (["list"], ""),
    ):
        monkeypatch.setattr("sys.argv", ["slipstream", "heads", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        assert told in capsys.readouterr().out
