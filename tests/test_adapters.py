"""Adapter folders by path: what peft says with them, and which are refused."""

import json
import sys

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import slipstream
from families import VOCABULARY, tiny_model
from slipstream.loading.models import load_model, load_tokenizer

PROMPT = [5, 6, 7, 8, 5, 6, 7]


@pytest.fixture
def base(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    words("base").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    """Beside its base model, which it names by an absolute path."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def words(unknown):
    """A tokenizer that is told from others by its unknown token."""
    tokenizer = Tokenizer(WordLevel({unknown: 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}, unk_token=unknown))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)


def settings(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def greedy(model):
    ids = torch.tensor([PROMPT])
    return model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=-1)[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_an_adapter_folder_says_what_peft_says(adapter, base, drafter):
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    without = greedy(plain)
    expected = greedy(PeftModel.from_pretrained(plain, adapter))
    assert expected != without
    llm = slipstream.load(adapter, drafter=drafter, device="cpu")
    assert llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True).tokens == expected


def test_the_tokenizer_is_the_adapters_or_else_the_bases(adapter):
    assert load_model(adapter, device="cpu")[1].unk_token == "base"
    assert load_tokenizer(adapter)[0].unk_token == "base"
    words("own").save_pretrained(adapter)
    assert load_model(adapter, device="cpu")[1].unk_token == "own"
    assert load_tokenizer(adapter)[0].unk_token == "own"


def test_a_relative_base_is_found_from_here_or_beside_the_adapter(adapter, tmp_path, monkeypatch):
    (tmp_path / "some" / "where").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "some" / "where")  # with no "../base"
    for name in ("../base", "base"):  # as seen from the adapter's folder; from the one above, as if both had moved
        settings(adapter, base_model_name_or_path=name)
        load_model(adapter, device="cpu")
    (tmp_path / "models").mkdir()
    (tmp_path / "base").rename(tmp_path / "models" / "base")
    settings(adapter, base_model_name_or_path="models/base")
    monkeypatch.chdir(tmp_path)
    load_model("adapter", device="cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "/no/such/base"}, "the model in /no/such/base, which is not there"),
        ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING adapter, which puts virtual tokens"),
        ({"alora_invocation_tokens": [3, 4]}, "activated LoRA"),
        ({"task_type": "SEQ_CLS"}, "adapter for SEQ_CLS"),
        ({"target_modules": ["no_such_layer"]}, "does not fit LlamaForCausalLM"),
    ],
)
def test_an_adapter_that_can_not_work_is_refused_by_name(adapter, changes, says):
    settings(adapter, **changes)
    with pytest.raises(slipstream.ModelError, match=says) as refused:
        slipstream.load(adapter, device="cpu")
    assert "\n" not in str(refused.value)


def test_without_peft_the_extra_is_named(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(slipstream.ModelError, match=r"needs peft: .*slipstream-llm\[lora\]"):
        slipstream.load(adapter, device="cpu")
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(slipstream.ModelError, match="no adapter's settings"):
        slipstream.load(adapter, device="cpu")
