"""The commands as a user types them, in processes of their own: a few by `python -m`, most forked, which is quicker."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields

import pytest

import slipstream
from commands import command
from patience import PATIENCE
from slipstream import drafters
from slipstream.cli import listing, options
from slipstream.trace.page import read as read_trace
from test_chat import save_model

FRUIT = "Repeat this list twice: apples, oranges, bananas, pears, grapes, lemons, cherries, plums."


HEAVY = {"torch", "transformers", "numba"}


def loaded(*words, folder="."):
    """What a command printed, and which heavy packages it loaded on the way."""
    script = f"""
import atexit, sys
atexit.register(lambda: print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr))
sys.argv = ["slipstream", *{[str(word) for word in words]}]
from slipstream.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(ast.literal_eval(done.stderr.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--help"], "--install-completion"),
        (["--version"], f"slipstream {slipstream.__version__}"),
        (["generate", "--help"], "--repetition-penalty"),
        (["drafters"], "max_ngram=8"),
    ],
)
def test_commands_that_tell_what_there_is_load_nothing_heavy(words, says):
    shown, heavy = loaded(*words)
    assert says in " ".join(shown.split())
    assert not heavy


def test_a_store_is_searched_without_torch_as_with_it(forked, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("the rain in Spain stays mainly in the plain\n" * 3)
    assert forked.run("store", "build", tmp_path / "text", "--out", tmp_path / "store").returncode == 0
    shown, heavy = loaded("store", "search", tmp_path / "store", "stays mainly")
    assert "in" in shown
    assert heavy == {"numba"}
    monkeypatch.setattr(
        "slipstream.datastores.ingest.encoding.FileTokenizer.get_vocab", lambda _: {}
    )  # another fingerprint
    assert command("store", "search", tmp_path / "store", "stays mainly")[1] == shown


@pytest.mark.parametrize("name", drafters.names())
def test_a_drafters_source_is_read_as_it_runs(name):
    kind = drafters.find(name)
    sentence, options = listing.about(name)
    assert sentence == kind.__doc__.strip().splitlines()[0]
    assert [(o.name, o.default) for o in options] == [(f.name, str(f.default)) for f in fields(kind.Options)]
    assert all(option.comment for option in options)


def test_generate_prints_the_text_and_one_json_line_last(forked, small):
    done = forked.run("generate", FRUIT, "-n", "24", "-m", small, "--json")
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.strip().splitlines()
    said = json.loads(last)
    assert "\n".join(text) == said["text"]
    assert set(said["stats"]) >= {
        *("drafter", "new_tokens", "steps", "tokens_per_step", "seconds", "tokens_per_second", "accepted"),
        *("acceptance_rate", "node_yield", "nodes_verified", "draft_seconds", "verify_seconds", "exact", "by_source"),
    }
    assert said["stats"]["new_tokens"] == len(said["tokens"])
    assert said["stats"]["exact"] is True
    assert "tokens/step" in done.stderr


def test_the_second_start_finds_what_the_first_one_made(forked, tmp_path, small):
    """Nothing is measured again. How long a start takes depends on the machine: see docs/log/engine.md."""
    made = []
    for _ in range(2):
        done = forked.run("generate", "Hello!", "-n", "4", "-m", small, SLIPSTREAM_CACHE=tmp_path)
        assert done.returncode == 0, done.stderr
        made.append({file: file.stat().st_mtime_ns for file in (tmp_path / "costs").iterdir()})
    assert made[0] == made[1] != {}


def test_several_answers_are_those_of_the_library(small, capsys):
    words = ("-n", "8", "-t", "1", "--seed", "5", "-N", "2", "--frequency-penalty", "0.5", "--system", "Be brief.")
    code, _, said = command("generate", "Name a river.", *words, "-m", small, "-d", "none", "--logprobs", "2", "--json")
    assert code == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]
    options = {"max_new_tokens": 8, "temperature": 1, "seed": 5, "frequency_penalty": 0.5, "logprobs": 2}
    expected = slipstream.load(small, drafter="none").generate(messages, n=2, **options)
    assert [line["tokens"] for line in told] == [answer.tokens for answer in expected]
    assert [line["finish_reason"] for line in told] == re.findall(r"finish: (\w+)", said)
    assert [entry["token"] for entry in told[1]["logprobs"]] == told[1]["tokens"]
    assert all(len(entry["top"]) == 2 for entry in told[1]["logprobs"])


def test_an_answer_says_why_it_ended_and_how_sure_it_was(small):
    assert "finish: length" in command("generate", "Count to a hundred.", "-n", "3", "-m", small, "-d", "none")[2]
    code, _, said = command("generate", "x", "--regex", "yes", "-n", "9", "-m", small, "-d", "none", "--logprobs", "1")
    assert code == 0
    assert "finish: stop" in said
    assert re.search(r"^'yes' +-[\d.]+   likeliest: '", said, re.MULTILINE)


def test_each_step_is_explained(forked, tmp_path):
    (tmp_path / "expected").write_text("apples, oranges, bananas, pears, grapes, lemons, cherries, plums.")
    done = forked.run("generate", FRUIT, "-n", "24", "--explain", "--prediction", tmp_path / "expected")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert said[0] == "step 0: the prompt; came 1"
    assert any(re.search(r"asked .*\bsuffix\b.*; verified ", line) for line in said)
    assert any(re.search(r"asked .*\bprediction\b.*; verified ", line) for line in said)


def test_lossy_rules_say_so(forked, small):
    words = ("-n", "4", "-m", small, "-d", "none", "--accept", "typical", "-t", "1", "--json")
    done = forked.run("generate", "Hello!", *words)
    assert "LOSSY (typical)" in done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["stats"]["exact"] is False


def test_a_prompt_from_standard_input(forked, small):
    assert forked.run("generate", "-", "-n", "2", "-m", small, "-d", "none", stdin="Say hello.").returncode == 0


def test_ctrl_c_ends_cleanly_and_keeps_what_was_said(forked, tmp_path):
    model = save_model(tmp_path / "model", endless=True)
    program = forked.start("generate", "Count to a thousand.", "-n", "1000000", "-m", model, "-d", "pld", "--json")
    begun = program.read(5)
    os.kill(program.pid, signal.SIGINT)
    done = program.wait()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["finish_reason"] == "cancelled"
    assert said["text"].startswith(begun)


def test_chat_reads_lines_until_they_end(forked, small):
    done = forked.run("chat", "-n", "12", "-m", small, "-d", "pld", stdin="My name is Ada.\n\nWhat is my name?\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s ") == 2


def test_drafters_are_listed_with_their_options(forked):
    shown = forked.run("drafters").stdout
    assert all(name in shown for name in ("none", "pld", "model", "max_ngram=8", "draft_model=None"))
    assert "longest run of last tokens" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "x", "--drafter", "nope"], "drafter 'nope' is unknown"),
        (["generate", "x", "-o", "speed=3"], "this drafter's options are drafters"),
        (["generate", "x", "-d", "pld", "-o", "length=long"], "length must be a int"),
        (["generate", "x", "--prediction", "/no/file"], "--prediction '/no/file' can't be read"),
        (["generate", "x", "--drafters", "nobody"], "drafters names nobody"),
        (["generate", "x", "--model", "no/such"], "no folder or file 'no/such'"),
        (["generate", "x", "-o", "[/x]=1"], "[/x]=1"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "-t", "-1"], "temperature=-1.0"),
        (["generate", "x", "--json-schema", "/no/file"], "neither JSON nor a readable file"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words, says):
    code, _, said = command(*words)
    assert code == 2
    assert says in " ".join(said.split())
    assert "Traceback" not in said


def test_options_take_the_types_of_their_fields():
    from dataclasses import make_dataclass

    kind = make_dataclass("O", [("a", int, 1), ("b", float, 0.5), ("c", bool, False), ("d", str, "x")])
    assert options.parse_options(kind, ["a=3", "b=1", "c=true", "d=y"]) == {"a": 3, "b": 1.0, "c": True, "d": "y"}


def test_the_exported_names_are_what_was_meant():
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        slipstream.nope  # noqa: B018


def test_trace_writes_a_page_and_its_lines(forked, small, tmp_path):
    page, lines = tmp_path / "t.html", tmp_path / "t.jsonl"
    done = forked.run("trace", FRUIT, "-n", "16", "-m", small, "-d", "pld", "--html", page, "--jsonl", lines)
    assert done.returncode == 0, done.stderr
    assert "bananas" in page.read_text()
    again = tmp_path / "again.html"
    assert forked.run("trace", "--from", lines, "--html", again).returncode == 0
    assert again.read_text() == page.read_text()
    assert "one of them" in " ".join(forked.run("trace").stderr.split())


def test_trace_compares_two_drafters_and_two_files(small, tmp_path):
    code, said, _ = command(
        *("trace", FRUIT, "-n", "12", "-m", small, "-d", "pld", "--against", "none", "-t", "0.8"),
        *("--html", "t.html", "--jsonl", "t.jsonl"),
        folder=tmp_path,
    )
    assert code == 0, said
    first, second = (read_trace(tmp_path / name) for name in ("t.jsonl", "t.none.jsonl"))
    assert (first[0]["drafter"], second[0]["drafter"]) == ("pld", "none")
    assert first[-1]["text"] == second[-1]["text"]  # drawn with one seed
    assert command("trace", "--from", "t.jsonl", "--from", "t.none.jsonl", folder=tmp_path)[0] == 0
    assert (tmp_path / "trace.html").read_text() == (tmp_path / "t.html").read_text()
    three = command("trace", *(["--from", "t.jsonl"] * 3), folder=tmp_path)
    assert "one trace or two" in " ".join(three[2].split())
    unknown = command("trace", FRUIT, "--against", "nobody", folder=tmp_path)
    assert "'nobody' is unknown" in " ".join(unknown[2].split())


def test_bench_measures_records_and_replays(forked, small, tmp_path, monkeypatch, capsys):
    page, saved, kept = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "kept"
    few = ("--categories", "translation", "--limit", "1", "-n", "4", "-m", small)
    done = forked.run("bench", *few, "--repeats", "1", "-c", "none, pld, hf", "--html", page, "--json", saved)
    assert done.returncode == 0, done.stderr
    assert "unaccounted" in done.stdout
    document = json.loads(done.stdout.strip().splitlines()[-1])
    assert document == json.loads(saved.read_text())
    assert {r["contestant"] for r in document["rows"]} == {"none", "pld", "hf"}
    assert "measuring: 100% (3 of 3)" in done.stderr  # no terminal to draw a bar on
    assert "translation" in page.read_text()
    # Recording times forwards for half a minute: here it only says so.
    monkeypatch.setattr("slipstream.evaluate.replay.timed", lambda *_: {1: [0.01], 8: [0.02], 64: [0.04]})
    assert command("bench", *few, "--record", kept)[0] == 0
    monkeypatch.undo()
    capsys.readouterr()
    code, shown, _ = command("bench", "--replay", kept, "-c", "none", "--repeats", "1")
    assert code == 0
    assert "{" not in shown + capsys.readouterr().out
    swept = ("-c", "none,pld", "--sweep", "length=2,8", "--repeats", "1", "--json", "-")
    assert command("bench", "--replay", kept, *swept)[0] == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert [r["contestant"] for r in rows] == ["none", "pld length=2", "pld length=8"]
    assert "too little was measured to tell" in command("bench", "--compare", saved, saved)[1]
