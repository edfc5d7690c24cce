"""The embedded model, for real: text in, text out."""

import json
import re
import threading
import weakref

import pytest
import torch

import slipstream
from slipstream import LLM, OptionError, PromptError
from slipstream.errors import ModelError
from slipstream.heads import HEADS
from slipstream.targets.trees import TreeTarget
from slipstream.text import Detokenizer

FRUIT = "Repeat this list twice: apples, oranges, bananas, pears, grapes, lemons, cherries, plums."
STORY = "Write one sentence about the sea."


@pytest.fixture(scope="module")
def first_layers(smol):
    """A draft model: those of the embedded one."""
    import copy

    model = copy.deepcopy(smol.model, {id(weight): weight for weight in smol.model.parameters()})  # weights are shared
    model.model.layers = model.model.layers[:6]
    model.config.num_hidden_layers = 6
    return model


def drafted_by(model, llm):
    return LLM(llm.model, llm.tokenizer, "model", draft_model=model, draft_tokenizer=llm.tokenizer, mode="beam")


@pytest.mark.parametrize("prompt", [FRUIT, STORY])
def test_the_embedded_model_says_what_transformers_says(smol, first_layers, prompt):
    ids = torch.tensor([smol.request(prompt).tokens])
    out = smol.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    expected = out[0, ids.shape[1] :].tolist()
    for llm, count in ((drafted_by(first_layers, smol), 8), (smol, 24)):
        result = llm.generate(prompt, max_new_tokens=count)
        assert result.tokens == expected[:count]
        assert result.text == smol.tokenizer.decode(expected[:count], skip_special_tokens=True)
        assert result.stats.exact
    if prompt == FRUIT:
        assert result.stats.tokens_per_step > 1.2


def test_a_batch_gives_each_prompt_its_own_text(shallow):
    alone = [shallow.generate(p, max_new_tokens=12).text for p in (FRUIT, STORY)]
    assert [r.text for r in shallow.generate([FRUIT, STORY], max_new_tokens=12)] == alone


def test_messages_strings_and_tokens_are_prompts(shallow):
    text = shallow.generate(STORY, max_new_tokens=8).text
    assert shallow.generate([{"role": "user", "content": STORY}], max_new_tokens=8).text == text
    tokens = shallow.request(STORY).tokens
    assert shallow.generate(tokens, max_new_tokens=8).text == text
    assert shallow.generate(torch.tensor([tokens]), max_new_tokens=8)[0].text == text
    assert shallow.generate(STORY, max_new_tokens=8, template=False).text != text


def test_a_stream_is_the_text_in_pieces(shallow):
    stream = shallow.stream(FRUIT, max_new_tokens=32)
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(pieces) == stream.result.text == shallow.generate(FRUIT, max_new_tokens=32).text


def test_looking_at_the_result_does_not_disturb_a_stream(smol):
    prompt = "Say: 日本語 🏳️‍🌈 naïve"
    expected = smol.generate(prompt, max_new_tokens=24).text
    stream = smol.stream(prompt, max_new_tokens=24)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        assert expected.startswith(stream.result.text.rstrip("\ufffd"))
    assert "".join(pieces) == expected


def test_stop_strings_cut_where_plain_decoding_would(shallow):
    """Within drafts too: the whole text is foretold."""
    whole = shallow.generate(FRUIT, max_new_tokens=24)
    foretold = LLM(shallow.model, shallow.tokenizer, "prediction")
    for stop in (whole.text[10:18], whole.text[9:11], whole.text[17:31], "z" * 9):
        plain = shallow.generate(FRUIT, max_new_tokens=24, stop=stop, max_draft=0)
        fast = foretold.stream(FRUIT, max_new_tokens=24, stop=stop, prediction=whole.tokens)
        text = "".join(fast)
        assert text == fast.result.text == plain.text == whole.text.partition(stop)[0]
        assert fast.result.tokens == plain.tokens
        assert fast.result.stats.accepted
        assert (plain.finish_reason == "stop") == (stop in whole.text)


def test_streams_never_show_what_a_stop_string_takes_back(smol):
    shown = ""
    for piece in smol.stream(FRUIT, max_new_tokens=40, stop=", pears"):
        shown += piece
        assert ", pears".startswith(shown[-1:]) is False or not shown.endswith(",")
    assert not shown.endswith(",")


def test_cancel_from_another_thread_keeps_what_was_said(shallow):
    stream = shallow.stream(STORY, max_new_tokens=400, ignore_eos=True)
    text = ""
    for i, piece in enumerate(stream):
        text += piece
        if i == 2:
            threading.Thread(target=stream.cancel).start()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text.startswith(text)
    assert len(stream.result.tokens) < 100


def test_the_same_seed_gives_the_same_text_with_any_drafter(shallow, first_layers):
    options = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    plain = shallow.generate(STORY, max_draft=0, **options)
    assert shallow.generate(STORY, **options).tokens == plain.tokens
    assert drafted_by(first_layers, shallow).generate(STORY, **options).tokens == plain.tokens
    assert shallow.generate(STORY, **{**options, "seed": 12}).tokens != plain.tokens


def test_a_seed_not_given_is_told(shallow):
    one = shallow.generate(STORY, max_new_tokens=12, temperature=1.0)
    assert shallow.generate(STORY, max_new_tokens=12, temperature=1.0, seed=one.seed).tokens == one.tokens


def test_a_chat_reads_only_what_is_new(smol):
    chat = smol.chat("You are brief.")
    first = chat.send("My name is Ada. Say hello.", max_new_tokens=24)
    read = []
    forward = smol.target._forward

    def counting(slots, trees, *args, **kwargs):
        read.extend(len(t) for t in trees)
        return forward(slots, trees, *args, **kwargs)

    smol.target._forward = counting
    try:
        second = chat.send("What is my name?", max_new_tokens=1)
    finally:
        del smol.target._forward
    assert sum(read) < 30  # the second question alone, not the conversation
    history = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "My name is Ada. Say hello."},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "What is my name?"},
    ]
    assert second.tokens == smol.generate(history, max_new_tokens=1).tokens
    assert chat.messages == [*history, {"role": "assistant", "content": second.text}]
    with pytest.raises(slipstream.ContextError):
        chat.send("word " * 9000)
    assert chat.messages[-1]["role"] == "assistant"  # a turn that can't be answered leaves no trace
    chat.close()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_schema_holds_with_and_without_drafts(smol):
    prompt = 'Give me a person as JSON, like {"name": "Bob", "age": 7}.'
    plain = smol.generate(prompt, json_schema=SCHEMA, max_new_tokens=60, max_draft=0)
    fast = smol.generate(prompt, json_schema=SCHEMA, max_new_tokens=60)
    assert fast.tokens == plain.tokens
    person = json.loads(fast.text)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_regex_holds_for_every_answer(shallow):
    dates = shallow.generate(
        "When?", regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}", n=3, temperature=1.0, seed=1, max_new_tokens=20
    )
    assert all(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", d.text) for d in dates)
    with pytest.raises(OptionError, match="not understood"):
        shallow.generate("When?", regex="(")
    with pytest.raises(OptionError, match="not both"):
        shallow.generate("When?", regex="a", json_schema={})


def test_bad_prompts_are_refused(smol):
    with pytest.raises(PromptError, match="empty"):
        smol.generate("")
    with pytest.raises(PromptError, match="chat template"):
        smol.generate([{"content": "no role"}])
    with pytest.raises(PromptError, match="one prompt, found 2"):
        smol.stream(["a", "b"])


def test_bad_words_are_not_said(smol):
    assert "oranges" in smol.generate(FRUIT, max_new_tokens=16).text
    assert "oranges" not in smol.generate(FRUIT, max_new_tokens=16, bad_words=[" oranges"]).text


def test_another_vocabulary_is_noticed_token_by_token(smol):
    import copy

    other = copy.deepcopy(smol.tokenizer)
    vocabulary = dict(smol.tokenizer.get_vocab())
    one, two = " the", " of"
    a, b = (smol.tokenizer.convert_ids_to_tokens(smol.tokenizer(t)["input_ids"][0]) for t in (one, two))
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    other.get_vocab = lambda: vocabulary
    with pytest.raises(slipstream.DrafterError, match="2 of 49152 token ids differ"):
        LLM(smol.model, smol.tokenizer, "model", draft_model=smol.model, draft_tokenizer=other)


def test_the_embedded_models_hub_id_works_without_a_hub(smol):
    llm = slipstream.load("HuggingFaceTB/SmolLM2-135M-Instruct", drafter="none")
    assert llm.generate(STORY, max_new_tokens=8).tokens == smol.generate(STORY, max_new_tokens=8).tokens


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nobody/no-such-model", "no folder or file 'nobody/no-such-model'"),
        ("/no/such.gguf", "no file /no/such.gguf"),
    ],
)
def test_an_unknown_model_is_refused(model, says):
    with pytest.raises(slipstream.ModelError, match=says):
        slipstream.load(model)


def test_a_folder_without_a_model_and_remote_code_are_refused(tmp_path):
    with pytest.raises(slipstream.ModelError, match=r"holds no config\.json"):
        slipstream.load(str(tmp_path))
    code = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(slipstream.ModelError, match="trust_remote_code=True"):
        slipstream.load(str(tmp_path))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(slipstream.ModelError, match="dtype 'float33' is unknown"):
        slipstream.load(dtype="float33")


# ---- text, piece by piece


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_of_any_unicode_add_up(smol, size, by_token):
    """However many tokens are looked at together: nobody sees less than one after the other shows."""
    text = "naïve 日本語 🏳️‍🌈 עברית e\u0301 \ufffd end"
    tokens = smol.tokenizer(text, add_special_tokens=False)["input_ids"]
    one_by_one, pieces = Detokenizer(smol.tokenizer), Detokenizer(smol.tokenizer)
    pieces.by_token = by_token
    lengths = []
    for i, token in enumerate(tokens, 1):
        assert pieces(token) is one_by_one(token) is None
        lengths.append(len(one_by_one.visible()))
        if i % size == 0:
            assert pieces.visible() == one_by_one.visible()
            assert text.startswith(pieces.visible())
    if by_token:
        assert pieces.lengths == lengths
    assert pieces.finish() == one_by_one.finish() == text


def test_half_a_character_comes_out_at_the_end(smol):
    tokens = smol.tokenizer("🏳", add_special_tokens=False)["input_ids"]
    assert len(tokens) > 1
    pieces = Detokenizer(smol.tokenizer)
    pieces(tokens[0])
    assert pieces.visible() == ""
    assert pieces.finish() == "\ufffd"


def test_a_stop_string_is_seen_in_a_token_that_ends_with_half_a_character(smol):
    """The first letter of a token whose second one is cut off."""
    token = smol.tokenizer.convert_tokens_to_ids("Ð¾Ð")
    assert smol.tokenizer.decode([token]) == "о\ufffd"
    for more in ([], [*smol.eos][:1]):
        pieces = Detokenizer(smol.tokenizer, ["о"], smol.eos)
        assert [pieces(t) for t in (*smol.tokenizer("no ", add_special_tokens=False)["input_ids"], token)][-1] == "stop"
        for end in more:
            pieces(end)
        assert pieces.visible() == pieces.finish() == "no "
    forced = {"logit_bias": {token: 1e4}, "stop": "о"}
    answer = smol.generate(STORY, max_new_tokens=1, **forced)
    assert (answer.text, answer.finish_reason) == ("", "stop")
    stream = smol.stream(STORY, max_new_tokens=9, **forced)
    assert list(stream) == []
    assert stream.result.tokens == [token]


def test_a_late_answer_to_a_running_prompt_copies_a_cache_that_has_grown(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.targets.cache.FIRST_CAPACITY", 16)
    llm = LLM(tiny("llama"), drafter="none", max_batch=2)
    lengths = [40, 20, 8]  # the third starts when the second has ended, while the first goes on
    requests = [llm.request([5, 6, 7, 8], max_new_tokens=n, ignore_eos=True) for n in lengths]
    ended = {len(s.tokens): s.tokens for s in llm.engine.run(requests) if s.finish}
    assert [ended[n] for n in lengths] == [ended[40][:n] for n in lengths]


# ---- closing


@pytest.mark.parametrize("drafter", ["none", "eagle3", "auto"])
def test_what_is_closed_holds_nothing_but_the_model(drafter, tiny):
    model = tiny("llama")
    head = {"drafter_path": HEADS["eagle3"].fresh(model)} if drafter == "eagle3" else {}
    with LLM(model, drafter=drafter, **head) as llm:
        llm.generate([5, 6, 7], max_new_tokens=4)
        held = [weakref.ref(llm.target), weakref.ref(llm.engine.drafter)]
    assert [one() for one in held] == [None, None]
    llm.close()  # again, which does nothing
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ModelError, match="closed"):
            ask([5, 6, 7])
    assert LLM(model, drafter="none").generate([5, 6, 7], max_new_tokens=4).tokens


def test_it_is_not_closed_while_an_answer_is_written(tiny):
    llm = LLM(tiny("llama"), tokenizer=None, drafter="none")
    steps = llm.engine.run([llm.request([5, 6, 7], max_new_tokens=8)])
    next(steps)
    with pytest.raises(OptionError, match="1 answers are still being written"):
        llm.close()
    assert [len(s.tokens) for s in steps][-1] == 8  # nothing was lost
    chat = llm.chat()
    llm.close()
    chat.close()
    with pytest.raises(ModelError, match="closed"):
        next(llm.engine.run([]))


class Pieces:
    """Like a SentencePiece tokenizer: the space before a text's first word is dropped."""

    WORDS = ("▁The", "▁sea", "▁is", "▁blue", "s")

    def decode(self, tokens, **_):
        return "".join(self.WORDS[token] for token in tokens).replace("▁", " ").removeprefix(" ")


@pytest.mark.parametrize("stop", [(), ("green",)])
@pytest.mark.parametrize("read", [False, True])
def test_an_answer_that_continues_a_text_begins_with_its_space(stop, read):
    for prompt, answer, text in (([0, 1], [2, 3], " is blue"), ([0, 1], [4, 2], "s is"), ([], [2, 3], "is blue")):
        pieces = Detokenizer(Pieces(), stop, after=prompt)
        for token in answer:
            pieces(token)
            if read:
                pieces.visible()
        assert pieces.finish() == text


def test_a_text_is_continued_with_what_follows_it_to_the_letter(smol):
    text, most = "The sea is", {"max_new_tokens": 8, "template": False}
    said = smol.generate(text, **most)
    assert smol.tokenizer.decode([*smol.tokenizer(text)["input_ids"], *said.tokens]) == text + said.text
    assert "".join(smol.stream(text, **most)) == said.text


def test_a_drafter_that_can_not_be_made_holds_no_memory(smol, monkeypatch):
    """Whoever mistypes a name in a notebook keeps the error, and with it everything that it refers to."""
    freed = []
    monkeypatch.setattr(TreeTarget, "release", lambda self: freed.append(self))
    with pytest.raises(slipstream.SlipstreamError):
        slipstream.LLM(smol.model, smol.tokenizer, "eagle3", drafter_path="nowhere")
    assert len(freed) == 1
