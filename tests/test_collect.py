"""collect: every question is answered once, whatever happens in between, and what is kept is what the target wrote."""

import json

import pytest
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from families import tiny_model
from slipstream import LLM, OptionError, PromptError, StoreError
from slipstream.cli.collect import collect as command
from slipstream.datastores.ingest.records import read_documents
from slipstream.datastores.ingest.sources import find_sources
from slipstream.training.collect import CollectSettings, begin, collect
from slipstream.training.prompts import Question, read_questions
from slipstream.user_files import held

SHORT = CollectSettings(max_new_tokens=12)
QUESTIONS = [Question((text,)) for text in ("red", "green and blue", "the sea", "a house", "why", "ten small boats")]
TALK = Question(("tell me", "and then", "more of it"), "be kind")


def letters(template=True):
    """One token per character, and a template that marks who speaks: U and A."""
    known = ["<0>", "<1>", "<2>", *"UAS abcdefghijklmnopqrstuvwxyz.,?!0123456789BCDEFGHIJKLMNOPQR"]
    vocabulary = {word: i for i, word in enumerate(known)}
    assert len(vocabulary) == 64
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d>|."), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<2>")
    if template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'system': 'S'}[m.role] }}{{ m.content }}<2>"
            "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
        )
    return tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, letters(), "none", max_batch=3)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path):
    found = lines(path)
    assert len({line["id"] for line in found}) == len(found), "a question was answered twice"
    return {line["id"]: line for line in found}


# ---- prompts


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a"}, Question(("a",))),
        ({"question": "a", "answer": "#### 3"}, Question(("a",))),
        ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, Question(("a", "b"))),
        ({"instruction": "sum", "input": "1 2", "output": "3"}, Question(("sum\n\n1 2",))),
        ({"instruction": "sum", "input": ""}, Question(("sum",))),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            Question(("a",), "s"),
        ),
        (
            {
                "conversations": [
                    {"from": "gpt", "value": "earlier"},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "x"},
                    {"from": "human", "value": " "},
                    {"from": "human", "value": "b"},
                ]
            },
            Question(("a", "b")),
        ),
        ("a", Question(("a",))),
        ({"prompt": "half \ud83d a character"}, Question(("half \ufffd a character",))),
    ],
)
def test_what_a_record_asks(tmp_path, record, expected):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert read_questions([path]) == [expected]


def test_a_list_that_is_cut_off_is_read_up_to_there(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [{"conversations": [{"from": "human", "value": f"question {i}"}]} for i in range(5)]
    path.write_text(json.dumps(turns)[:-30])
    with pytest.warns(UserWarning, match="cut off"):
        found = read_questions([path])
    assert [q.turns for q in found] == [(f"question {i}",) for i in range(4)]


def test_questions_come_once_and_as_many_as_asked(tmp_path):
    path, other = tmp_path / "q.jsonl", tmp_path / "r.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a"}\n{"prompt": ""}\n')
    other.write_text('{"turns": ["b"]}\n{"turns": ["c", "d", "e"]}\n')
    assert [q.turns for q in read_questions([path, other], rounds=2)] == [("a",), ("b",), ("c", "d")]
    assert [q.turns for q in read_questions([path, other], limit=2)] == [("a",), ("b",)]
    told = read_questions([path], system="be kind")
    assert {q.system for q in told} == {"be kind"}
    assert not {q.id for q in told} & {q.id for q in read_questions([path])}  # another question, so another id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"text": "no question"}\n', "found the fields text; known layouts"),
        ('{"prompt": "a"}\n{"prompt": \n', "q.jsonl:2: not JSON"),
        ("just text\n", "is no JSON"),
        ('{"prompt": " "}\n', "no questions were found"),
    ],
)
def test_files_without_questions_are_refused(tmp_path, text, says):
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises((OptionError, StoreError), match=says):
        read_questions([path])


# ---- answers


def test_a_line_holds_what_the_target_wrote(llm, tmp_path):
    out = tmp_path / "d.jsonl"
    found = collect(llm, QUESTIONS, out, SHORT)
    assert (found.conversations, found.known, found.too_long) == (len(QUESTIONS), 0, 0)
    kept = by_id(out)
    for question in QUESTIONS:
        line, alone = kept[question.id], llm.generate(question.turns[0], max_new_tokens=12)
        ((begin, end),) = line["answers"]
        assert line["tokens"][begin:end] == alone.tokens
        assert line["tokens"][:begin] == llm.request(question.turns[0]).tokens
        assert (line["text"], line["model"]) == (alone.text, llm.name)
        assert line["sampling"] == {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    assert found.tokens == sum(b - a for line in kept.values() for a, b in line["answers"])
    assert list(read_documents(find_sources([out])[0])) == [line["text"] for line in lines(out) if line["text"]]


def test_answers_become_part_of_the_conversation(llm, tmp_path):
    out = tmp_path / "d.jsonl"
    collect(llm, [*QUESTIONS[:4], TALK], out, SHORT)
    line = by_id(out)[TALK.id]
    said = llm.tokenizer.decode(line["tokens"])
    assert said.startswith("Sbe kind<2>Utell me<2>A")
    answers = [line["tokens"][begin:end] for begin, end in line["answers"]]
    assert len(answers) == 3
    texts = [llm.tokenizer.decode(a, skip_special_tokens=True) for a in answers]
    assert "\n\n".join(texts) == line["text"]
    # The last answer is what the target says to all that stands before it.
    begin = line["answers"][-1][0]
    assert llm.generate(line["tokens"][:begin], max_new_tokens=12).tokens == answers[-1]
    with llm.chat("be kind") as chat:
        assert [chat.send(turn, max_new_tokens=12).text for turn in TALK.turns] == texts


def test_an_answer_that_the_template_writes_otherwise_counts_no_longer(model, tmp_path):
    tokenizer = letters()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}", "{{ m.content[:2] if m.role == 'assistant' else m.content }}"
    )
    llm = LLM(model, tokenizer, "none")
    collect(llm, [TALK], tmp_path / "d.jsonl", CollectSettings(max_new_tokens=6))
    (line,) = lines(tmp_path / "d.jsonl")
    ends = line["answers"]
    assert [end - begin for begin, end in ends[:-1]] == [2, 2]
    assert line["tokens"][ends[0][1]] == 2  # after two letters the template's end mark


def test_a_stopped_run_goes_on_without_loss_or_repetition(llm, tmp_path):
    settings = CollectSettings(max_new_tokens=10, temperature=1.0, top_p=0.9, seed=7)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "d.jsonl"
    questions = [*QUESTIONS, TALK]
    collect(llm, questions, whole, settings)

    def stop(done, of, tokens):  # noqa: ARG001
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(llm, questions, out, settings, stop)
    assert len(lines(out)) == 3
    with out.open("a") as file:
        file.write(lines(whole)[0]["id"] + '", "tokens": [1, 2')  # a killed run stops anywhere
    again = collect(llm, questions, out, settings)
    assert (again.conversations, again.known) == (4, 3)
    assert by_id(out) == by_id(whole)
    assert collect(llm, questions, out, settings).conversations == 0
    assert by_id(out) == by_id(whole)


def test_neither_the_batch_nor_the_order_changes_an_answer(model, tmp_path):
    settings = CollectSettings(max_new_tokens=10, temperature=1.0)
    for batch in (1, 4):
        llm = LLM(model, letters(), "none", max_batch=batch)
        collect(llm, QUESTIONS[:: 1 if batch == 1 else -1], tmp_path / f"{batch}.jsonl", settings)
    assert by_id(tmp_path / "1.jsonl") == by_id(tmp_path / "4.jsonl")


def test_each_conversation_has_a_seed_of_its_own(llm):
    def seeds(settings):
        return [begin(llm, question).ask(llm, settings).seed for question in QUESTIONS]

    assert len(set(seeds(SHORT))) == len(QUESTIONS)
    assert seeds(SHORT) == seeds(SHORT)
    assert not set(seeds(SHORT)) & set(seeds(CollectSettings(seed=1)))


def test_a_conversation_goes_on_before_the_next_begins(model, tmp_path):
    out = tmp_path / "d.jsonl"
    collect(LLM(model, letters(), "none", max_batch=1), [TALK, QUESTIONS[0]], out, SHORT)
    assert [line["id"] for line in lines(out)] == [TALK.id, QUESTIONS[0].id]


def test_places_are_given_back(llm, tmp_path):
    collect(llm, QUESTIONS, tmp_path / "d.jsonl", SHORT)
    assert all(slot is None for slot in llm.target._slots)


def test_what_does_not_fit_the_context_is_counted(llm, tmp_path):
    long = Question(("a" * 300,))
    grows = Question(("b" * 200, "c" * 60))
    found = collect(llm, [long, grows, QUESTIONS[0]], tmp_path / "d.jsonl", SHORT)
    assert (found.conversations, found.too_long) == (2, 1)
    assert len(by_id(tmp_path / "d.jsonl")[grows.id]["answers"]) == 1


def test_a_model_without_a_template_continues_the_first_turn(model, tmp_path):
    llm = LLM(model, letters(template=False), "none")
    collect(llm, [Question(("abc", "def"))], tmp_path / "d.jsonl", SHORT)
    (line,) = lines(tmp_path / "d.jsonl")
    assert line["tokens"][:3] == llm.tokenizer("abc")["input_ids"]
    assert line["answers"] == [[3, len(line["tokens"])]]
    with pytest.raises(PromptError, match="no chat template"):
        collect(llm, [TALK], tmp_path / "e.jsonl", SHORT)


def test_a_file_with_other_answers_is_left_alone(llm, tmp_path):
    out = tmp_path / "d.jsonl"
    collect(llm, QUESTIONS[:1], out, SHORT)
    before = out.read_text()
    with pytest.raises(OptionError, match=r"line 1 was written by LlamaForCausalLM with .*'max_new_tokens': 12"):
        collect(llm, QUESTIONS, out, CollectSettings(max_new_tokens=13))
    out.write_text('{"prompt": "mine"}\n' + before)
    with pytest.raises(OptionError, match="line 1 was not written by"):
        collect(llm, QUESTIONS, out, SHORT)
    assert out.read_text() == '{"prompt": "mine"}\n' + before
    for mine in ('[{"prompt": "mine"}]', "a note", '{"id": "q", "turns": []}'):  # one line, which does not end
        out.write_text(mine)
        with pytest.raises(OptionError, match="line 1 was not written by"):
            collect(llm, QUESTIONS, out, SHORT)
        assert out.read_text() == mine


def test_two_at_a_time_do_not_write_to_one_file(llm, tmp_path):
    out = tmp_path / "d.jsonl"
    out.touch()
    with held(out), pytest.raises(OptionError, match="another process works in"):
        collect(llm, QUESTIONS[:1], out, SHORT)
    assert collect(llm, QUESTIONS[:1], out, SHORT).conversations == 1


def test_the_command(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    letters().save_pretrained(tmp_path / "model")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"turns": q.turns}) + "\n" for q in QUESTIONS))
    app = typer.Typer()
    app.command()(command)
    words = [*("--prompts", tmp_path / "q.jsonl", "--out", tmp_path / "d.jsonl", "--model", tmp_path / "model")]
    words += ["--device", "cpu", "-n", "6", "--batch", "2", "--limit", "4"]
    for said in ("4 conversations", "0 conversations, 0 tokens written; 4 were there already"):
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == 0, done.exception
        assert said in done.output
    assert set(by_id(tmp_path / "d.jsonl")) == {q.id for q in QUESTIONS[:4]}
