"""`model.generate(custom_generate=slipstream.speculate(…))` against plain `model.generate`."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import slipstream
from families import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [40, 41, 40], [11, 12, 11, 12, 11, 13]]


def batch(prompts):
    """Left-padded, as transformers wants it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bloom", "mamba"])
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


@pytest.mark.slow
def test_sampled_answers_follow_manual_seed_and_the_distribution():
    size = {"vocab_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tiny_model("llama", **size, eos_token_id=None)
    prompt = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    options = {"max_new_tokens": 2, "do_sample": True, "temperature": 1.5, "top_k": 0}
    fast = slipstream.speculate("pld")

    def answers(count):
        torch.manual_seed(0)
        return model.generate(**prompt, **options, num_return_sequences=count, custom_generate=fast)

    assert torch.equal(answers(100), answers(100))
    out = answers(3000)
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


def test_what_cannot_be_served_is_refused_by_name_before_anything_runs(tiny):
    model, ids, ran = tiny("gpt2"), batch(PROMPTS)["input_ids"], []
    fast = slipstream.speculate("pld")
    watch = model.register_forward_hook(lambda *_: ran.append(1))
    try:
        for options, says in (
            ({"num_beams": 3}, "num_beams"),
            ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
            ({"assistant_model": tiny("gpt2")}, "assistant_model"),
            ({"synced_gpus": True}, "synced_gpus"),
            ({"token_type_ids": torch.ones_like(ids)}, "token_type_ids"),
            ({"past_key_values": DynamicCache()}, "past_key_values"),
            ({"position_ids": torch.arange(ids.shape[1])[None].expand_as(ids)}, "position_ids"),
            ({"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[3, 4]])}, "negative_prompt_ids"),
        ):
            with pytest.raises(slipstream.OptionError, match=says):
                model.generate(**batch(PROMPTS), max_new_tokens=4, custom_generate=fast, **options)
    finally:
        watch.remove()
    assert not ran


def test_a_dict_is_returned_where_one_is_asked_for(tiny):
    fast = slipstream.speculate("pld")
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


class Recorder(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "three"])
def test_a_streamer_hears_what_transformers_would_tell_it(tiny, prompts):
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": [2, 17, 30], "pad_token_id": 0}
    plain, fast = Recorder(), Recorder()
    tiny("llama").generate(**batch(prompts), **options, streamer=plain)
    tiny("llama").generate(**batch(prompts), **options, streamer=fast, custom_generate=slipstream.speculate("pld"))
    assert fast.heard == plain.heard
    assert len(fast.heard) > 4


def test_an_iterator_streamer_ends(shallow):
    prompt = shallow.tokenizer("One, two, three, one, two,", return_tensors="pt")
    streamer = TextIteratorStreamer(shallow.tokenizer, skip_prompt=True, timeout=1)
    fast = slipstream.speculate("pld")
    out = shallow.model.generate(**prompt, max_new_tokens=8, do_sample=False, streamer=streamer, custom_generate=fast)
    assert "".join(streamer) == shallow.tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 10:
            raise RuntimeError("on purpose")
        return scores


@pytest.mark.parametrize(
    "options", [{"logits_processor": [Failing()]}, {"output_scores": True}], ids=["late", "refused"]
)
def test_a_streamer_ends_when_an_error_is_raised(tiny, options):
    model, streamer = tiny("llama"), Recorder()
    with pytest.raises((RuntimeError, slipstream.OptionError), match=r"on purpose|output_scores"):
        model.generate(
            **batch(PROMPTS[:1]),
            max_new_tokens=8,
            streamer=streamer,
            custom_generate=slipstream.speculate("pld"),
            **options,
        )
    assert streamer.heard[0] == PROMPTS[:1]
    assert streamer.heard[-1] == "end"


@pytest.mark.parametrize("rows", [1, 2])
def test_stop_strings_end_answers_where_transformers_would(smol, rows):
    texts = ["Repeat: red, green, blue, red, green, blue, red,", "Count: 1, 2, 3, 4, 5,"][:rows]
    prompts = smol.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 16, "do_sample": False, "stop_strings": ["blue", " 9"], "tokenizer": smol.tokenizer}
    expected = smol.model.generate(**prompts, **options)
    out = smol.model.generate(**prompts, **options, custom_generate=slipstream.speculate("pld"))
    assert torch.equal(out, expected)
    assert out.shape[1] < prompts["input_ids"].shape[1] + 16


def test_positions_that_follow_from_the_padding_are_taken(tiny):
    inputs = batch(PROMPTS)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = tiny("llama").generate(**inputs, max_new_tokens=8, do_sample=False)
    out = tiny("llama").generate(**inputs, max_new_tokens=8, do_sample=False, custom_generate=slipstream.speculate())
    assert torch.equal(out, expected)
    inputs["position_ids"] += 3
    with pytest.raises(slipstream.OptionError, match="position_ids"):
        tiny("llama").generate(**inputs, max_new_tokens=8, custom_generate=slipstream.speculate("pld"))


class Counting(StoppingCriteria):
    """Ends rows by what it was asked so far: the first one after five calls, the others when all hold an odd token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **_):  # noqa: ARG002
        self.calls += 1
        done = (input_ids[:, -3:] % 2 == 1).any(1).all().repeat(len(input_ids)) & (self.calls > 9)
        done[0] |= self.calls >= 5
        return done


@pytest.mark.parametrize("ends", [None, [2, 17, 30]], ids=["no end token", "end tokens"])
def test_a_criterion_that_counts_and_looks_at_all_rows_is_asked_as_transformers_asks_it(ends):
    model = tiny_model("llama", eos_token_id=None)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    for prompts in (PROMPTS, PROMPTS * 6):  # more rows than usually run at a time
        plain, fast = Counting(), Counting()
        heard = Recorder(), Recorder()
        spec = slipstream.speculate("pld")
        expected = model.generate(**batch(prompts), **options, stopping_criteria=[plain], streamer=heard[0])
        out = model.generate(
            **batch(prompts), **options, stopping_criteria=[fast], streamer=heard[1], custom_generate=spec
        )
        assert torch.equal(out, expected)
        assert fast.calls == plain.calls
        assert heard[1].heard == heard[0].heard
        assert max(s.new_tokens for s in spec.stats) == out.shape[1] - 8


@pytest.mark.parametrize("negative", [None, [[0, 0, 3, 4, 5], [9, 8, 7, 9, 8]]], ids=["last token", "negative prompts"])
def test_guidance_of_two_rows_is_that_of_transformers(tiny, negative):
    options = {"max_new_tokens": 12, "do_sample": False, "guidance_scale": 1.8}
    if negative:
        options["negative_prompt_ids"] = torch.tensor(negative)
        options["negative_prompt_attention_mask"] = (options["negative_prompt_ids"] > 0).long()
    model, prompts = tiny("llama"), batch(PROMPTS[:2])
    expected = model.generate(**prompts, **options)
    assert torch.equal(model.generate(**prompts, **options, custom_generate=slipstream.speculate("pld")), expected)
    plain = model.generate(**prompts, max_new_tokens=12, do_sample=False)
    assert not torch.equal(plain, expected)


def test_the_last_calls_statistics_are_on_the_object(tiny):
    spec = slipstream.speculate("pld")
    assert spec.stats == []
    for prompts in (PROMPTS, PROMPTS[:1]):
        out = tiny("llama").generate(**batch(prompts), max_new_tokens=16, do_sample=False, custom_generate=spec)
        assert [s.prompt_tokens for s in spec.stats] == [len(p) for p in prompts]
        longest = out.shape[1] - batch(prompts)["input_ids"].shape[1]
        assert max(s.new_tokens for s in spec.stats) == longest
        assert all(s.steps <= s.new_tokens for s in spec.stats)


def test_other_callables_get_what_they_always_got(tiny):
    """transformers hands nothing but their own arguments to callables: that ours gets more must not change theirs."""
    given = {}

    def other(model, input_ids, logits_processor, stopping_criteria, generation_config, mine=None, **kwargs):  # noqa: ARG001
        given.update(kwargs, mine=mine)
        return input_ids

    slipstream.speculate()
    tiny("llama").generate(**batch(PROMPTS[:1]), max_new_tokens=4, custom_generate=other, mine=5, streamer=Recorder())
    assert given["mine"] == 5
    assert "streamer" not in given
