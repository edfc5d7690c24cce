"""The proposer inside vLLM itself: make test-vllm. A tiny model of random weights, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.datastores.durable.store import Store

VOCABULARY, TOKENS = 64, 60
OURS = {"method": "custom_class", "model": "slipstream.vllm.Proposer", "num_speculative_tokens": 12}
ENVIRONMENT = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


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
def ask(model, tmp_path):
    """ask(speculation): the tokens of greedy answers, how many were accepted, and what vLLM said."""
    job, answers = tmp_path / "job.json", tmp_path / "answers.json"

    def asked(speculation=None, additional=None, **environment):
        given = {"speculation": speculation, "additional": additional or {}, "tokens": TOKENS}
        job.write_text(json.dumps({"model": str(model), "prompts": PROMPTS, **given}))
        answers.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("ask.py")), str(job), str(answers)]
        ran = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False)
        said = ran.stdout + ran.stderr
        found = json.loads(answers.read_text()) if answers.exists() else {"texts": None, "accepted": 0}
        return found["texts"], found["accepted"], said

    return asked


# More than rows, and longer than what is read at a time.
PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in (3, 100, 20, 150, 50, 80)]


def test_texts_are_those_of_vllm_alone(ask, tmp_path):
    plain, _, said = ask()
    assert plain is not None, said[-3000:]
    texts, accepted, said = ask(OURS)
    assert texts == plain, said[-3000:]
    assert accepted > 0
    with Store.create(tmp_path / "store", VOCABULARY) as store:
        for prompt, answer in zip(PROMPTS, plain, strict=True):
            store.append(np.array([*prompt, *answer]), "answer")
    (tmp_path / "options.json").write_text(json.dumps({"stores": [str(tmp_path / "store")], "shared": 0}))
    texts, accepted, said = ask(OURS, {"slipstream": str(tmp_path / "options.json")})
    assert texts == plain, said[-3000:]
    assert accepted > 0


def test_a_mistake_in_the_options_ends_the_start(ask):
    texts, _, said = ask(OURS, SLIPSTREAM_VLLM='{"store": "typo"}')
    assert texts is None
    assert "unknown options store" in said
