"""A conversation: one stream at a time, the answers of a fresh start, and nothing read twice."""

import pytest

import slipstream
from slipstream import LLM, PromptError
from slipstream.heads import HEADS

ASK = "Say hello to Ada."


def told(llm, messages, **options):
    """What the model says to a conversation that it reads from the beginning."""
    return llm.generate(messages, **options).text


def test_two_streams_made_before_either_is_read(shallow):
    chat = shallow.chat()
    one, two = chat.stream("Name a colour.", max_new_tokens=12), chat.stream("Why?", max_new_tokens=6)
    first, second = "".join(one), "".join(two)
    assert [m["content"] for m in chat.messages] == ["Name a colour.", first, "Why?", second]
    assert first == told(shallow, chat.messages[:1], max_new_tokens=12)
    assert second == told(shallow, chat.messages[:3], max_new_tokens=6)
    chat.close()


def test_a_second_stream_is_refused_while_one_is_read(shallow):
    chat = shallow.chat()
    reading = chat.stream("Tell me a story about a fox.", max_new_tokens=10)
    pieces = iter(reading)
    said = next(pieces)
    for refused in (lambda: chat.send("And then?"), lambda: list(chat.stream("x")), chat.close):
        with pytest.raises(PromptError, match="still being read"):
            refused()
    said += "".join(pieces)
    assert said == told(shallow, chat.messages[:1], max_new_tokens=10)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    chat.send("And then?", max_new_tokens=2)
    chat.close()


def test_a_stream_that_is_left_or_closed_makes_room_for_the_next(shallow):
    chat = shallow.chat()
    for _ in chat.stream("Count to a hundred.", max_new_tokens=10):
        break
    closed = chat.stream("Count on.", max_new_tokens=10)
    pieces = iter(closed)
    next(pieces)
    closed.close()
    assert list(pieces) == []
    never = chat.stream("Never read.")
    never.close()
    assert list(never) == []
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    shorter = chat.send("Hi", max_new_tokens=8)
    assert shorter.text == told(shallow, chat.messages[:5], max_new_tokens=8)
    chat.close()


def test_messages_may_be_edited_between_answers(shallow):
    chat = shallow.chat("You are brief.")
    chat.send("Name three rivers in Europe.", max_new_tokens=16)
    del chat.messages[1:]
    again = chat.send(ASK, max_new_tokens=8)
    assert again.text == told(shallow, chat.messages[:2], max_new_tokens=8)
    chat.messages[1]["content"] = "Say goodbye."
    assert chat.send("x", max_new_tokens=8).text == told(shallow, chat.messages[:-1], max_new_tokens=8)
    chat.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "redrafter", "auto", "medusa", "eagle", "model", "rasd"])
def test_with_any_drafter_each_turn_reads_only_what_is_new(drafter, request, monkeypatch):
    """As heads need hidden states of the text, they keep what they made of it. The drafts stay as good."""
    shipped = drafter in ("eagle3", "redrafter", "auto", "rasd")  # with a head of the whole model
    given = request.getfixturevalue("smol" if shipped else "shallow")
    options = {}
    if drafter == "medusa":  # each of its heads asks for all of the vocabulary, and so does each level of eagle
        options["drafter_path"] = HEADS[drafter].fresh(given.model, heads=2, tied=True)
    if drafter == "eagle":
        options |= {"drafter_path": HEADS[drafter].fresh(given.model), "depth": 2, "width": 2}
    if drafter == "model":
        options["draft_model"] = given.model
    llm = LLM(given.model, given.tokenizer, drafter, **options)
    read = []
    prefill = llm.target.prefill
    monkeypatch.setattr(
        llm.target, "prefill", lambda slot, tokens, want: read.append(len(tokens)) or prefill(slot, tokens, want)
    )
    chat = llm.chat("You are a helpful assistant who explains things at length. " * 4)
    chat.send("Name three rivers in Europe, and say where they flow.", max_new_tokens=10)
    second = chat.send("Now say it again.", max_new_tokens=10)
    assert read[1] < 24 < read[0]
    fresh = llm.generate(chat.messages[:-1], max_new_tokens=10)
    assert second.tokens == fresh.tokens
    if drafter != "auto":  # whose choices depend on time
        assert second.stats.steps <= fresh.stats.steps + 1
    chat.close()
    assert all(slot is None for slot in llm.target._slots)


def test_a_turn_that_fails_midway_costs_nothing_but_reading_again(shallow):
    chat = shallow.chat()
    chat.send(ASK, max_new_tokens=8)
    calls = []

    def broken(_, scores):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        chat.send("Tell me a story.", max_new_tokens=12, processors=[broken])
    after = chat.send("Go on.", max_new_tokens=8)
    assert after.text == told(shallow, chat.messages[:-1], max_new_tokens=8)
    chat.close()


def test_a_chat_with_a_failing_drafter_option_leaves_no_trace(shallow):
    chat = shallow.chat()
    with pytest.raises(slipstream.OptionError):
        chat.send("hi", temprature=1)
    assert chat.messages == []
    assert chat.send("hi", max_new_tokens=2).text
    chat.close()
