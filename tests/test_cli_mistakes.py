"""Mistakes on the command line: one line each, before any work is done, and nothing lost."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from commands import command
from slipstream.errors import ModelError, OptionError
from slipstream.user_files import check_folder, check_writable, write_text

NOWHERE = "/no/such/model"  # whoever complains about it has begun to load a model


@pytest.fixture
def folder(tmp_path):
    """With a file where folders are wanted, and some text."""
    (tmp_path / "afile").write_text("some text\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate x --device banana", "device 'banana' can't be used: use cpu"),
        ("generate x --device meta", "device 'meta' can't be used: use cpu"),
        ("generate x --device cuda:77", "device 'cuda:77' can't be used: use cpu"),
        ("generate x --dtype int8", "dtype 'int8' is unknown"),
        ("generate x -t -1", "temperature=-1.0 is out of range"),
        ("generate x --top-p 2", "top_p=2.0 is out of range"),
        ("generate x --min-p -1", "min_p=-1.0 is out of range"),
        ("generate x --top-k -1", "top_k=-1 is out of range"),
        ("generate x --repetition-penalty 0", "repetition_penalty=0.0 is out of range"),
        ("generate x -n 0", "--max-new-tokens 0 is out of range"),
        ("generate x -N 0", "--answers 0 is out of range"),
        ("generate x --logprobs -1", "--logprobs -1 is out of range"),
        ("generate x --max-draft -1", "--max-draft -1 is out of range"),
        ("generate x --accept nope", "accept rule 'nope' is unknown"),
        ("generate x --raw --system y", "leave one of them out"),
        ("generate x --json-schema no/file", "neither JSON nor a readable file"),
        ("trace x -t -1", "temperature=-1.0 is out of range"),
        ("trace x --html no/dir/page.html", "no/dir/page.html can't be written (No such file or directory)"),
        ("trace x --html afile/page.html", "afile/page.html can't be written (Not a directory)"),
        ("trace x --jsonl no/dir/lines", "no/dir/lines can't be written"),
        ("trace x --jsonl .", ". is a folder: name a file"),
        ("bench --html no/dir/page.html", "no/dir/page.html can't be written"),
        ("bench --json no/dir/all.json", "no/dir/all.json can't be written"),
        ("bench --record afile", "the folder afile can't be made"),
        ("bench --limit 0", "--limit 0 is out of range"),
        ("bench --repeats 0", "--repeats 0 is out of range"),
        ("bench -n 0", "--max-new-tokens 0 is out of range"),
        ("bench --device banana", "device 'banana' can't be used"),
        ("bench -c none,nope", "no contestant is called nope"),
        ("bench -c none,hf-pld --batch 2", "hf-pld answers one prompt at a time"),
        ("bench -c none,hf-assisted", "hf-assisted needs a draft model: name one with --draft-model"),
        ("bench --record new --repeats 2", "--repeats has no effect on a recording"),
        ("bench --replay afile", "--model has no effect on a recording that is there"),
        ("bench --compare afile afile", "--model has no effect on documents that are there"),
        ("trace --from afile", "--model has no effect on a trace that is there"),
        ("collect -p afile --out no/dir/lines", "no/dir/lines can't be written"),
        ("train medusa --data afile --out afile", "the folder afile can't be made"),
        ("export head --out afile", "afile is there already"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_looked_for(words, says, folder):
    code, _, said = command(*words.split(), "--model", NOWHERE, folder=folder)
    assert code == 2
    assert says in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["afile"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("store build afile --out afile", "afile can't be made (File exists)"),
        ("store build afile --out afile/store", "afile/store can't be made (Not a directory)"),
        ("store build afile --out /proc/no/store", "/proc/no/store can't be made"),
        ("store build afile --out new --segment-tokens -5", "segments of -5 tokens hold no text"),
        ("store build afile --out new --segment-tokens 1", "segments of 1 tokens hold no text"),
        ("generate x --model afile", "afile is a file, but no .gguf file"),
        ("generate x --model ./rel", "there is no folder or file './rel', and it can't be a name on the model hub"),
        ("store search new x --nodes 0", "new is no datastore"),
    ],
)
def test_other_mistakes_are_one_line_too(words, says, folder):
    code, _, said = command(*words.split(), folder=folder)
    assert code == 2
    assert says in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["afile"]


def test_dimensions_that_a_model_lacks_are_refused_and_others_are_kept(folder, tiny):
    from slipstream.datastores.dense.build import EmbedSettings, embed

    model = tiny("llama")
    hidden = model.config.hidden_size
    with slipstream.Store.create(folder / "store", model.config.vocab_size) as store:
        store.append(list(range(20)))
        with pytest.raises(OptionError, match=f"of {hidden + 1} numbers can't be made of states that have {hidden}"):
            embed(store, [lambda: model], EmbedSettings(dims=hidden + 1))
        assert embed(store, [lambda: model], EmbedSettings(dims=hidden - 1)).dims == hidden - 1
        assert embed(store, [lambda: model]).dims == hidden - 1


def test_a_device_that_is_not_there_is_refused_in_python_too():
    with pytest.raises(ModelError, match="device 'banana' can't be used"):
        slipstream.load(NOWHERE, device="banana")


@pytest.mark.slow
def test_a_prompt_that_is_not_utf8():
    for word, stdin in (("-", b"\xff\xfeh"), (b"\xff", b"")):
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", "generate", word, "-m", NOWHERE], input=stdin, capture_output=True
        )
        assert done.returncode == 2
        assert done.stderr.startswith(b"error: the prompt is not UTF-8 text")
        assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once():
    """Nobody listens at this address."""
    given = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "generate", "x", "-m", "no/such"],
        env=given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no folder or file 'no/such'")
    assert "Retrying" not in done.stderr
    assert "Traceback" not in done.stderr


# ---- files


def test_files_are_checked_without_a_trace(tmp_path):
    there = tmp_path / "there"
    there.write_text("before")
    check_writable(there, tmp_path / "new", None)
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "folder")
    with pytest.raises(OptionError, match="can't be made"):
        check_folder(there / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "before"


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    check_writable(Path("/dev/full"))
    with pytest.raises(OptionError, match="No space left on device"):
        write_text(Path("/dev/full"), "text")


@pytest.fixture
def full_disk():
    """No file may grow beyond 100 bytes: to a writer it looks like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_there(tmp_path, full_disk):  # noqa: ARG001
    page = tmp_path / "page"
    write_text(page, "before")
    with pytest.raises(OptionError, match=r"page can't be written \(File too large\)"):
        write_text(page, "x" * 101)
    assert page.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_trace_that_cannot_be_written_costs_neither_answer_nor_page(small, tmp_path, capsys):
    words = ("-n", "4", "-m", small, "-d", "pld", "--html", tmp_path / "page.html", "--jsonl", "/dev/full")
    code, _, said = command("trace", "Hello!", *words)
    assert code == 2
    assert said.splitlines()[-1].startswith("error: /dev/full can't be written (No space left on device)")
    assert len(capsys.readouterr().out) > 4
    assert "Hello!" in (tmp_path / "page.html").read_text()


def test_a_benchmark_that_cannot_be_written_is_printed(small, tmp_path, capsys):
    words = ("--categories", "translation", "--limit", "1", "-m", small, "-n", "4", "--repeats", "1", "-c", "none,pld")
    code, _, said = command("bench", *words, "--html", "/dev/full")
    assert code == 2
    assert "error: /dev/full can't be written (No space left on device)" in said
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["complete"]
    assert not list(tmp_path.iterdir())
