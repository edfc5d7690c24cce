"""`slipstream chat`: on a terminal as a user types, and from a pipe."""

import io
import json
import os
import re
import signal
import sys

import pytest
import torch
from transformers import AutoTokenizer

import slipstream
from commands import command
from families import tiny_model
from slipstream.cli.conversation import COMMANDS
from slipstream.loading import embedded
from terminal import Terminal

WORD = " apples"


def save_model(folder, endless=False):
    """A tiny model with the embedded one's tokenizer. An endless one says the same word over and over."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.ensure())
    context = 1 << 20 if endless else 256
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=context)
    if endless:
        (word,) = tokenizer(WORD)["input_ids"]
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(1)
            for layer in model.model.layers:  # they add nothing to the embedding
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.lm_head.weight.zero_()
            model.lm_head.weight[word] = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def piped(monkeypatch, capsys, tmp_path):
    """The exit code, the answers and what else was told, of a chat whose standard input is a pipe with these lines."""

    def chat(lines, *words):
        said = b"".join(line.encode(errors="surrogateescape") + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
        code, _, told = command("chat", "-d", "none", *words, folder=tmp_path)
        return code, capsys.readouterr().out, told

    return chat


def test_a_pasted_text_is_one_message_and_the_keys_do_what_they_should(tmp_path, forked):
    model, saved, cache = save_model(tmp_path / "model", endless=True), tmp_path / "saved.json", tmp_path / "cache"
    long = "x" * 5000 + "\n" + "y" * 5000
    words = ("chat", "-m", str(model), "-d", "none", "-n", "1000000")
    with Terminal(*words, forked=forked, SLIPSTREAM_CACHE=str(cache)) as screen:
        screen.see(">")
        screen.type("/help\r")
        screen.see("write the conversation to a file")
        screen.see(">")
        screen.type("\r \r")  # empty lines
        screen.type("this goes away\x03")
        screen.paste("first\n\nls third")
        screen.type("\x1b\rfourth\r")
        screen.see(WORD + WORD)
        screen.type("\x03")
        screen.see("(stopped)")
        screen.see("tokens/s")
        screen.see(">")
        screen.paste(long)
        screen.type("\r")
        screen.see(WORD + WORD)
        screen.paste("pasted\n\nmeanwhile")  # waits for the next prompt
        os.kill(screen.pid, signal.SIGINT)  # from the keyboard it would drop what waits
        screen.see("meanwhile")
        screen.type("\r")
        screen.see(WORD + WORD)
        screen.type("\x03")
        screen.see("(stopped)")
        screen.see(">")
        screen.type("/nonsense\r")
        screen.see("/nonsense is no command")
        screen.see(">")
        screen.type(f"/save {saved}\r")
        screen.see("wrote ")
        screen.see(">")
        screen.type("\x04")
        assert screen.ended() == 0
    messages = json.loads(saved.read_text())
    assert [m["content"] for m in messages[::2]] == ["first\n\nls third\nfourth", long, "pasted\n\nmeanwhile"]
    assert all(m["content"].startswith(WORD + WORD) for m in messages[1::2])
    history = (cache / "chat-history").read_text()
    assert "+first\n+\n+ls third\n+fourth\n" in history
    assert "goes away" not in history
    assert (cache / "chat-history").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_the_prompt_comes_before_heavy_imports_and_ends_when_loading_fails(tmp_path):
    """With a torch that waits until it is told to fail."""
    go = tmp_path / "go"
    os.mkfifo(go)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(go)!r}).read()\nraise OSError('no\\ntorch')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = ("chat", "-m", "anything")
    (tmp_path / "chat-history").write_text("\n# then\n+said\n+before\n")
    with Terminal(*words, SLIPSTREAM_CACHE=str(tmp_path), PYTHONPATH=path) as screen:
        screen.see("loading the model")
        screen.type("/stats\r")
        screen.see("there is no answer yet")
        screen.see(">")
        screen.type("\x1b[A\x1b[A")  # up, past /stats
        screen.see("before")
        go.write_text("")
        screen.see("error: the model can't be loaded: OSError: no torch\n")
        assert screen.ended() == 1
    with Terminal(*words, SLIPSTREAM_CACHE=str(tmp_path), PYTHONPATH=path) as screen:
        screen.see("loading the model")
        screen.type("a question\r")
        screen.see("⠋")  # it waits for the model
        screen.type("\x03")
        screen.see("(stopped)")
        screen.type("/quit\r")
        assert screen.ended() == 0  # though the import still waits


def test_a_pipe_is_read_line_by_line(model, piped, tmp_path):
    lines = ["/help", "One.", "", "  ", "Two.", "/nope", " /usr", "/save saved"]
    code, answers, told = piped(lines, "-m", model, "-n", "4")
    assert code == 0
    messages = json.loads((tmp_path / "saved").read_text())
    assert [m["content"] for m in messages[::2]] == ["One.", "Two.", "/usr"]
    assert answers == "".join(m["content"] + "\n" for m in messages[1::2])
    assert told.count("tokens/s ") == 3
    assert all(usage in told for usage in COMMANDS)
    assert "/nope is no command" in told


@pytest.mark.slow
def test_retry_answers_again_with_another_seed(model, piped, tmp_path):
    lines = ["One.", "/save a", "/retry", "/save b", "/retry", "/save c", "/stats"]
    _, _, told = piped(lines, "-m", model, "-n", "6", "-t", "1", "--seed", "5")
    llm = slipstream.load(str(model), drafter="none")
    for name, seed in {"a": 5, "b": 6, "c": 7}.items():
        with llm.chat() as chat:
            chat.send("One.", max_new_tokens=6, temperature=1.0, seed=seed)
            assert json.loads((tmp_path / name).read_text()) == chat.messages
    assert re.search(r"last answer +all 3\ntokens +6 +18\n", told)


def test_what_cannot_be_answered_leaves_the_conversation_as_it_was(model, piped, tmp_path):
    lines = ["One.", "/save a", "x" * 4000, "/retry", "/save b"]
    code, _, told = piped(lines, "-m", model, "-n", "4")
    assert code == 0
    assert told.count("shorten the prompt") == 2
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


def test_system_and_clear_begin_anew(model, piped, tmp_path):
    lines = ["One.", "/system Be brief.", "Two.", "/save a", "/clear", "/save b", "/quit", "Three."]
    _, _, told = piped(lines, "-m", model, "-n", "4")
    a, b = (json.loads((tmp_path / name).read_text()) for name in "ab")
    assert [m["content"] for m in a[:2]] == ["Be brief.", "Two."]
    assert b == a[:1]
    assert told.count("begins anew\n") == 2
    assert told.count("tokens/s ") == 2


def test_a_command_that_fails_says_why_and_the_chat_goes_on(model, piped, tmp_path):
    (tmp_path / "folder").mkdir()
    fails = {
        "/retry": "there is no question yet",
        "/stats": "there is no answer yet",
        "/clear all": "/clear takes nothing else",
        "/save": "say /save FILE",
        "/save .": "/save .: nothing was written",
        "/save folder": "/save folder: nothing was written",
        "/save no/file": "/save no/file: nothing was written",
    }
    code, _, told = piped(fails, "-m", model)
    assert code == 0
    assert len(told.splitlines()) == len(fails)
    for line, why in zip(told.splitlines(), fails.values(), strict=True):
        assert why in line
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_model_that_is_not_there_is_one_line_and_exit_1(piped, tmp_path):
    code, _, told = piped(["One."], "-m", tmp_path)
    assert (code, told.count("\n")) == (1, 1)
    assert "holds no config.json" in told


def test_a_pipe_that_is_not_text_is_one_line_and_exit_2(model, piped):
    code, _, told = piped(["caf\udce9"], "-m", model)
    assert (code, told.count("\n")) == (2, 1)
    assert "standard input must be UTF-8 text" in told
