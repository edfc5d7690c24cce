"""`model.generate(custom_generate=slipstream.speculate(…))` against plain `model.generate`."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import slipstream
from families import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [40, 41, 40], [11, 12, 11, 12, 11, 13]]


def batch(prompts):
    """Left-padded, as transformers wants it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bloom"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "three"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"eos_token_id": [2, 17, 30], "pad_token_id": 0},
        {"min_new_tokens": 12, "bad_words_ids": [[5], [6, 7]]},
    ],
    ids=["plain", "penalties", "eos", "minimum"],
)
def test_greedy_tokens_are_the_same(tiny, family, prompts, options):
    model = tiny(family)
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    expected = model.generate(**batch(prompts), **options)
    assert torch.equal(
        model.generate(**batch(prompts), **options, custom_generate=slipstream.speculate("pld")), expected
    )


def test_one_object_serves_many_calls_and_models(tiny):
    fast = slipstream.speculate("pld", max_ngram=4)
    for family in ("llama", "qwen2", "llama"):
        for prompts in (PROMPTS[:1], PROMPTS):
            expected = tiny(family).generate(**batch(prompts), max_new_tokens=8, do_sample=False)
            out = tiny(family).generate(**batch(prompts), max_new_tokens=8, do_sample=False, custom_generate=fast)
            assert torch.equal(out, expected)


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):  # noqa: ARG002
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Favour(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[torch.arange(len(scores)), (input_ids[:, -1] + 1) % scores.shape[1]] += 50.0  # in place, as many do
        return scores


def test_criteria_and_processors_are_honoured(tiny):
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "stopping_criteria": [StopAt(13)],
        "logits_processor": [Favour()],
    }
    expected = tiny("llama").generate(**batch(PROMPTS), **options)
    out = tiny("llama").generate(**batch(PROMPTS), **options, custom_generate=slipstream.speculate("pld"))
    assert torch.equal(out, expected)
    assert out.shape[1] == 13


def test_sampled_answers_follow_manual_seed_and_the_distribution():
    size = {"vocab_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tiny_model("llama", **size, eos_token_id=None)
    prompt = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    options = {"max_new_tokens": 2, "do_sample": True, "temperature": 1.5, "top_k": 0}
    fast = slipstream.speculate("pld")
    torch.manual_seed(0)
    out = model.generate(**prompt, **options, num_return_sequences=3000, custom_generate=fast)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**prompt, **options, num_return_sequences=3000, custom_generate=fast), out)
    with torch.no_grad():
        first = torch.softmax(model(prompt["input_ids"]).logits[0, -1] / 1.5, -1)
    law = {}
    for token in range(4):
        with torch.no_grad():
            after = torch.softmax(model(torch.tensor([[1, 2, 3, token]])).logits[0, -1] / 1.5, -1)
        law |= {(token, other): float(first[token] * after[other]) for other in range(4)}
    pairs, counts = np.unique(out[:, 3:].numpy(), axis=0, return_counts=True)
    seen = {tuple(p): c / 3000 for p, c in zip(pairs.tolist(), counts.tolist(), strict=True)}
    assert sum(abs(law[k] - seen.get(k, 0)) for k in law) / 2 < 0.03


def test_what_cannot_be_served_is_refused_by_name(tiny):
    fast = slipstream.speculate("pld")
    for options, says in (
        ({"num_beams": 3}, "num_beams"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ):
        with pytest.raises(slipstream.OptionError, match=says):
            tiny("llama").generate(**batch(PROMPTS), max_new_tokens=4, custom_generate=fast, **options)
    out = tiny("llama").generate(
        **batch(PROMPTS), max_new_tokens=4, do_sample=False, return_dict_in_generate=True, custom_generate=fast
    )
    assert out.sequences.shape == (3, 12)


def test_padding_must_be_on_the_left(tiny):
    ids, mask = torch.tensor([[1, 2, 3, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    with pytest.raises(slipstream.OptionError, match="pad prompts on the left"):
        tiny("llama").generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=4, custom_generate=slipstream.speculate("pld")
        )


def test_each_row_of_a_batch_has_its_own_constraint(tiny):
    def allowed(row, tokens):
        return [10 + row, 20 + (int(tokens[-1]) % 7), 30 + row]

    options = {"max_new_tokens": 10, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    expected = tiny("llama").generate(**batch(PROMPTS), **options)
    out = tiny("llama").generate(**batch(PROMPTS), **options, custom_generate=slipstream.speculate("pld"))
    assert torch.equal(out, expected)


def test_a_model_that_was_cast_gets_a_new_engine():
    model, fast = tiny_model("llama"), slipstream.speculate("pld")
    model.generate(**batch(PROMPTS), max_new_tokens=4, do_sample=False, custom_generate=fast)
    model.double()
    expected = model.generate(**batch(PROMPTS), max_new_tokens=8, do_sample=False)
    out = model.generate(**batch(PROMPTS), max_new_tokens=8, do_sample=False, custom_generate=fast)
    assert torch.equal(out, expected)


def test_the_model_is_left_as_it_was(tiny):
    model = tiny("llama")
    attention = model.config._attn_implementation
    model.generate(**batch(PROMPTS), max_new_tokens=4, do_sample=False, custom_generate=slipstream.speculate("pld"))
    assert model.config._attn_implementation == attention
