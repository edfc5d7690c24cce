"""The proposer inside vLLM itself: make test-vllm. A tiny model of random weights, on a CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

vllm = pytest.importorskip("vllm")  # `make test` leaves this folder out

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from slipstream.datastores.durable.store import Store  # noqa: E402

VOCABULARY, TOKENS = 64, 40
OURS = {"method": "custom_class", "model": "slipstream.vllm.Proposer", "num_speculative_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, few tokens: greedy texts run into circles, which is what retrieval lives on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def ask(model, monkeypatch):
    """ask(prompts, speculation): the tokens of greedy answers, and vLLM's counters."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def asked(prompts, speculation=None, **options):
        llm = vllm.LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=64,  # prompts are read in pieces, beside others that are answered
            enforce_eager=True,
            speculative_config=speculation,
            disable_log_stats=False,
            **options,
        )
        sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [list(each.outputs[0].token_ids) for each in llm.generate(given, sampling, use_tqdm=False)]
        counters = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in llm.get_metrics()}
        accepted = counters["accepted_tokens"].value if speculation else 0
        return found, accepted

    return asked


def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in (3, 100, 20, 150, 50, 80)]


def test_texts_are_those_of_vllm_alone(ask, tmp_path):
    """More requests than rows, and prompts in pieces. A store of the answers has more accepted."""
    plain, _ = ask(prompts())
    texts, accepted = ask(prompts(), OURS)
    assert texts == plain
    assert accepted > 0
    with Store.create(tmp_path / "store", VOCABULARY) as store:
        for prompt, answer in zip(prompts(), plain, strict=True):
            store.append(np.array([*prompt, *answer]), "answer")
    (tmp_path / "options.json").write_text(json.dumps({"stores": [str(tmp_path / "store")], "shared": 0}))
    texts, more = ask(prompts(), OURS, additional_config={"slipstream": str(tmp_path / "options.json")})
    assert texts == plain
    assert more > 0


def test_a_mistake_in_the_options_ends_the_start(ask, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_VLLM", '{"store": "typo"}')
    with pytest.raises(Exception, match="unknown options store"):
        ask(prompts(), OURS)
