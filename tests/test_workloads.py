"""Workloads: the built-in prompts, files of each known layout, what is refused, and how a limit is spread."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from slipstream.errors import OptionError
from slipstream.evaluate.workloads import LAYOUTS, Prompt, builtin, read, select


def written(folder, *records, name="prompts.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def pool(**sizes):
    return [Prompt(f"{category}-{i}", category, ("?",)) for category, size in sizes.items() for i in range(size)]


def ids(prompts):
    return [p.id for p in prompts]


def test_the_built_in_set_has_six_prompts_in_each_of_eight_categories():
    prompts = builtin()
    assert len({p.id for p in prompts}) == len(prompts) == 48
    assert Counter(p.category for p in prompts) == dict.fromkeys(
        [
            *("code-writing", "code-editing", "explanation", "summarisation"),
            *("question-answering", "translation", "arithmetic", "agent"),
        ],
        6,
    )
    assert all(p.id.startswith(p.category) for p in prompts)


def test_built_in_agents_take_several_turns_and_edits_bring_their_file():
    for prompt in builtin():
        assert (len(prompt.turns) > 1) == (prompt.category == "agent"), prompt.id
        if prompt.category == "code-editing":
            before, file, after = prompt.turns[0].split("```")
            assert before.strip(), prompt.id
            assert not after, prompt.id
            assert 25 <= len(file.strip().splitlines()[1:]) <= 60, prompt.id  # without the fence's language


def test_our_own_layout_reads_back(tmp_path):
    record = {"id": "x-1", "category": "x", "turns": ["Say hello.", "Now in Welsh."]}
    assert read(written(tmp_path, record)) == [Prompt("x-1", "x", ("Say hello.", "Now in Welsh."))]


def test_spec_bench_and_mt_bench_bring_question_ids(tmp_path):
    record = {"question_id": 7, "category": "writing", "turns": ["Describe a lake.", "Shorter."], "reference": ["-"]}
    assert read(str(written(tmp_path, record))) == [Prompt("7", "writing", ("Describe a lake.", "Shorter."))]


def test_humaneval_becomes_an_instruction_that_holds_the_function(tmp_path):
    code = 'def double(x: int) -> int:\n    """Twice x."""\n'
    record = {"task_id": "HumanEval/9", "prompt": code, "entry_point": "double", "test": "assert double(2) == 4"}
    (prompt,) = read(written(tmp_path, record))
    assert (prompt.id, prompt.category) == ("HumanEval/9", "humaneval")
    (turn,) = prompt.turns
    assert turn.startswith("Complete this Python function.")
    assert turn.endswith(f"```python\n{code}```")
    assert "assert" not in turn


def test_gsm8k_asks_the_question_and_keeps_the_answer_to_itself(tmp_path):
    path = written(tmp_path, {"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"})
    assert read(path) == [Prompt("gsm8k-1", "gsm8k", ("1 + 1?",)), Prompt("gsm8k-2", "gsm8k", ("2 + 2?",))]


def test_alpaca_puts_the_input_below_the_instruction(tmp_path):
    records = [
        {"instruction": "Sort this.", "input": "b, a", "output": "a, b"},
        {"instruction": "Name a colour.", "input": "", "response": "red"},
        {"instruction": "Name a tree.", "output": "oak"},
    ]
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(records, indent=4))
    assert [p.turns for p in read(path)] == [("Sort this.\n\nb, a",), ("Name a colour.",), ("Name a tree.",)]
    assert ids(read(path)) == ["alpaca-1", "alpaca-2", "alpaca-3"]
    assert read(written(tmp_path, *records)) == read(path)


def test_blank_lines_byte_order_marks_windows_and_unicode_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"id": 1, "category": "x", "turns": ["one\u2028two"]}, ensure_ascii=False)
    path.write_bytes(f"\ufeff\r\n{line}\r\n\r\n".encode())
    assert read(path) == [Prompt("1", "x", ("one\u2028two",))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "hi", "n": 1}', ["line 1", "text (str), n (int)", "Rename", *LAYOUTS, *LAYOUTS.values()]),
        ('{"id": "a", "category": "x", "turns": "hi"}', ["line 1", "turns (str)", "id, category, turns"]),
        ('[{"question": "1 + 1?", "answer": "2"}, 5]', ["item 2", "found int instead of an object", "GSM8K"]),
        ("{}", ["line 1", "an empty object"]),
        ('{"question": "1 + 1?", "answer": "2"}\n\n{"question": ', ["line 3", "broken JSON", "repair"]),
        ('[\n{"question": "1 + 1?"\n', ["line 3", "broken JSON"]),
        ("", ["is empty", "at least one prompt", "HumanEval"]),
        ("\n \n", ["is empty"]),
        ("[]", ["is empty"]),
        ('{"id": "a", "category": "x", "turns": []}', ["line 1", "'a' needs turns of text"]),
        ('{"id": "a", "category": "x", "turns": ["hi", " "]}', ["line 1", "'a' needs turns of text"]),
        ('{"id": "a", "category": "x", "turns": ["hi", 3]}', ["line 1", "'a' needs turns of text"]),
        ('{"id": "a", "category": "x", "turns": ["hi"]}\n' * 2, ["line 2", "'a' was used before"]),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_why(tmp_path, text, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        read(path)
    for words in [str(path), *said]:
        assert words in str(caught.value)


def test_missing_files_folders_and_archives_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"nowhere\.jsonl can't be read \(No such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(OptionError, match="can't be read"):
        read(tmp_path)
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(OptionError, match="not UTF-8 text"):
        read(packed)


def test_select_keeps_the_categories_asked_for_in_the_files_order():
    prompts = pool(a=2, b=2, c=1)
    assert ids(select(prompts, ["c", "a"], None)) == ["a-0", "a-1", "c-0"]
    assert select(prompts, None, None) == select(prompts, [], None) == select(prompts, None, 99) == prompts
    with pytest.raises(OptionError, match=r"'d', 'e' is unknown: there are a, b, c"):
        select(prompts, ["a", "d", "e"], None)


def test_a_limit_is_spread_over_categories_and_over_each_categorys_prompts():
    prompts = pool(a=6, b=6)
    assert ids(select(prompts, None, 4)) == ["a-0", "a-3", "b-0", "b-3"]
    assert ids(select(prompts, None, 5)) == ["a-0", "a-2", "a-4", "b-0", "b-3"]
    assert ids(select(prompts, ["b"], 3)) == ["b-0", "b-2", "b-4"]
    mixed = [prompt for pair in zip(prompts[:6], prompts[6:], strict=True) for prompt in pair]
    assert ids(select(mixed, None, 4)) == ["a-0", "b-0", "a-3", "b-3"]


def test_a_small_category_leaves_its_share_to_the_others():
    counts = Counter(p.category for p in select(pool(a=10, b=1, c=10), None, 9))
    assert counts == {"a": 4, "b": 1, "c": 4}


@pytest.mark.parametrize("limit", range(1, 49))
def test_a_limit_gives_that_many_and_categories_differ_by_one_at_most(limit):
    chosen = select(builtin(), None, limit)
    assert len(set(chosen)) == sum(len(p.turns) for p in chosen) == limit  # questions, of which a prompt has several
    counts = Counter(p.category for p in chosen)
    assert max(counts.values()) - min(counts[p.category] for p in builtin()) <= 1


def test_a_limit_beyond_the_prompts_lets_conversations_go_on():
    talks = [Prompt("a", "talk", ("1", "2", "3")), Prompt("b", "talk", ("1",)), Prompt("c", "talk", ("1", "2"))]
    assert [p.turns for p in select(talks, None, 4)] == [("1", "2"), ("1",), ("1",)]
    assert select(talks, None, 6) == talks


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(OptionError, match=f"limit={limit} is out of range"):
        select(builtin(), None, limit)


def test_workloads_need_no_torch():
    script = (
        "import sys; from slipstream.evaluate import workloads; workloads.builtin();"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
