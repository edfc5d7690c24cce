"""What the recorder writes down is what happened, whatever the text."""

import json

import pytest

from families import tiny_model
from oracle import Oracle
from slipstream import LLM
from slipstream.trace.page import read
from slipstream.trace.record import readable

FRUIT = "Repeat this list twice: apples, oranges, bananas, pears, grapes, lemons, cherries, plums."


def steps(lines):
    return [line for line in lines if "step" in line]


def check(lines, result, tmp_path):
    """The laws of a trace: it reads back, its pieces are the answer, and it adds up to the statistics."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read(path) == lines
    emitted = [e for s in steps(lines) for e in s["emitted"]]
    assert [e["token"] for e in emitted] == result.tokens
    assert "".join(e["text"] for e in emitted) == result.text == lines[-1]["text"]
    stats = result.stats
    assert len(steps(lines)) == stats.steps
    assert sum(len(s["path"]) - 1 for s in steps(lines)) == stats.accepted
    assert sum(len(s["nodes"]) - 1 for s in steps(lines)) == stats.nodes_verified
    assert sum(e["source"] is not None for e in emitted) == stats.accepted
    for name in ("draft", "verify", "host"):
        total = sum(s[f"{name}_ms"] for s in steps(lines))
        assert total == pytest.approx(1e3 * getattr(stats, f"{name}_seconds"), abs=0.01)
    for step in steps(lines)[1:]:
        before = steps(lines)[step["step"] - 1]
        assert step["nodes"][0]["token"] == before["emitted"][-1]["token"]


def test_a_trace_of_the_embedded_model(smol, tmp_path):
    result = smol.generate(FRUIT, max_new_tokens=24, trace=True)
    check(result.trace, result, tmp_path)
    header, end = result.trace[0], result.trace[-1]
    assert (header["drafter"], header["accept"], header["exact"], header["prompt"]) == ("pld", "match", True, FRUIT)
    assert end["finish"] == result.finish_reason
    assert any(e["source"] == "pld" for s in steps(result.trace) for e in s["emitted"])


def test_pieces_add_up_when_a_stop_string_takes_text_back(babble, tmp_path):
    whole = babble.generate(FRUIT, max_new_tokens=24).text
    for stop in (whole[10:18], whole[9:11], whole[17:31]):
        result = babble.generate(FRUIT, max_new_tokens=24, stop=stop, trace=True)
        assert result.finish_reason == "stop"
        check(result.trace, result, tmp_path)


def test_pieces_add_up_for_any_unicode(babble, tmp_path):
    """The model is made to say it, and is cut inside a character."""
    text = "日本語 🏳️‍🌈 naïve </script>"
    tokens = babble.tokenizer(text, add_special_tokens=False)["input_ids"]

    def say(input_ids, scores):
        place = input_ids.shape[1] - length
        scores[:] = -1e9
        scores[0, tokens[min(place, len(tokens) - 1)]] = 0
        return scores

    for count in (len(tokens), 1, 2, 5):
        length = len(babble.request("Say it.").tokens)
        result = babble.generate("Say it.", processors=[say], max_new_tokens=count, trace=True)
        check(result.trace, result, tmp_path)


def test_every_answer_of_a_batch_has_its_own_trace(babble, tmp_path):
    for result in babble.generate([FRUIT, "Hello!"], n=2, max_new_tokens=6, temperature=1.0, seed=1, trace=True)[0]:
        check(result.trace, result, tmp_path)


def test_lines_reach_the_sink_as_soon_as_they_are_final(babble):
    got = []
    stream = babble.stream("Count to ten.", max_new_tokens=12, trace=got.append)
    counts = [len(got) for _ in stream]
    assert counts == sorted(counts)
    assert counts[1] >= 1  # the header with the first step, steps one behind
    assert stream.result.trace == got
    assert got[-1]["end"] is True


def test_a_trace_has_one_header_though_its_conversation_went_on_before(babble):
    got = []
    with babble.chat() as chat:
        late = chat.stream("And then?", max_new_tokens=4, trace=got.append)
        chat.send("Hello!", max_new_tokens=4)
        list(late)
    assert [line for line in got if "format" in line] == got[:1]
    assert got == late.result.trace
    assert got[0]["prompt_tokens"] == late.result.stats.prompt_tokens


def test_a_trace_without_a_tokenizer_shows_ids(tmp_path):
    llm = LLM(tiny_model("llama"), drafter="none")
    prompt = [5, 6, 7]
    plain = llm.generate(prompt, max_new_tokens=12, ignore_eos=True)
    llm.engine.drafter = Oracle(llm.target, [prompt + plain.tokens + [1] * 9])
    result = llm.generate(prompt, max_new_tokens=12, ignore_eos=True, trace=True)
    check(result.trace, result, tmp_path)
    assert result.trace[1]["nodes"][0]["text"] == "⟨7⟩"
    assert any(len(s["nodes"]) > 3 for s in steps(result.trace))


def test_half_characters_are_shown_as_bytes(babble):
    shown = [readable(babble.tokenizer, t) for t in babble.tokenizer("🏳", add_special_tokens=False)["input_ids"]]
    assert len(shown) > 1
    assert "".join(shown).replace("⟨", "").replace("⟩", "") == "🏳".encode().hex().upper()
    assert readable(babble.tokenizer, babble.tokenizer(" the")["input_ids"][0]) == " the"


def test_no_trace_unless_asked(babble):
    assert babble.generate("Hello!", max_new_tokens=2).trace is None
