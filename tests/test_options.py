"""What `load` and `generate` take: wrong values are refused in one line before the model runs, wrong names by mypy."""

import inspect
import json
import math
import os
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch

import slipstream
from slipstream import LLM, OptionError, PromptError, Sampling
from slipstream.options import Options

PROMPT = [5, 6, 7]


@pytest.fixture
def llm(tiny):
    """A model that must not run."""
    llm = LLM(tiny("llama"), drafter="pld")
    ran = []
    watch = llm.model.register_forward_hook(lambda *_: ran.append(1))
    yield llm
    watch.remove()
    assert not ran


@pytest.mark.parametrize(
    "prompt", [None, 42, 1.5, b"hi", bytearray(b"hi"), [b"hi", b"ho"], [None], [5, "a"], torch.tensor(5)]
)
def test_what_is_no_prompt_is_refused(llm, prompt):
    for answer in (llm.generate, llm.stream):
        with pytest.raises(
            PromptError, match=r"^a prompt is a string, token ids or chat messages[^\n]*; found [^\n]*$"
        ):
            answer(prompt)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("n", [0, 1.5, "2", None]),
        ("sample", [-1, 0.5]),
        ("seed", [1.5, "3", b"3", [1.5]]),
        ("max_new_tokens", [0, -3, 2.5, "8", None]),
        ("max_draft", [-1, 2.5, "8"]),
        ("logprobs", [-1, 1.5, "2"]),
        ("temperature", [-1, math.nan, math.inf, "0.5", None]),
        ("top_k", [-1, 2.5, "3"]),
        ("top_p", [0, 1.1, math.nan, "1"]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, math.nan, math.inf, "1"]),
        ("presence_penalty", [math.nan, math.inf, "1"]),
        ("frequency_penalty", [math.nan, -math.inf, None]),
        ("logit_bias", [{5: math.nan}, {5: math.inf}, {"a": 1.0}, {64: 1.0}, [5], {5: "1"}]),
        ("bad_words", ["word", 5, [5], [[-1]], [[1.5]], [b"a"]]),
        ("stop", [5, [5], b"a"]),
        ("stop_tokens", [5, [1.5], [64], "a"]),
        ("processors", [5, "a"]),
        ("temprature", [0.5]),
        ("prediction", [5, b"ab", [1.5]]),
    ],
)
def test_a_wrong_value_is_refused_by_name(llm, name, bad):
    for value in bad:
        with pytest.raises((OptionError, PromptError), match=rf"^[^\n]*{name}[^\n]*$"):
            llm.generate(PROMPT, **{name: value})


def test_numbers_of_other_libraries_are_numbers(tiny):
    llm = LLM(tiny("llama"), drafter="pld")
    options = {"max_new_tokens": 6, "temperature": 0.9, "top_k": 20, "seed": 3}
    others = {
        "max_new_tokens": np.int32(6),
        "temperature": torch.tensor(0.9, dtype=torch.float64),
        "top_k": np.uint8(20),
        "seed": np.int64(3),
    }
    first = llm.generate(PROMPT, **options)
    second = llm.generate(PROMPT, **others)
    assert (second.tokens, second.seed) == (first.tokens, 3)
    json.dumps(second.as_dict())
    two = llm.generate([PROMPT, PROMPT], **{**options, "seed": np.array([3, 4])})
    assert [r.seed for r in two] == [3, 4]
    assert two[0].tokens == first.tokens


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)


@pytest.mark.slow
def test_a_pydantic_model_is_a_schema(smol):
    prompt = 'Give me a person as JSON, like {"name": "Bob", "age": 7}.'
    answer = smol.generate(prompt, json_schema=Person, max_new_tokens=60)
    assert 0 <= Person.model_validate_json(answer.text).age <= 99
    assert answer.tokens == smol.generate(prompt, json_schema=Person.model_json_schema(), max_new_tokens=60).tokens


@pytest.mark.parametrize(
    "grammar", [{"json_schema": Options}, {"json_schema": 42}, {"json_schema": {"a": {1}}}, {"regex": 5}]
)
def test_what_is_no_grammar_is_refused(smol, grammar):
    (name,) = grammar
    with pytest.raises(OptionError, match=rf"^{name}[^\n]*$"):
        smol.generate("Hi", **grammar)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("dtype", torch.float32),
        ("device", "cpu"),
        ("device_map", "auto"),
        ("trust_remote_code", True),
        ("model_options", {"revision": "main"}),
    ],
)
def test_what_is_for_loading_is_refused_with_a_model_in_memory(tiny, name, value):
    with pytest.raises(OptionError, match=rf"^{name}: [^\n]*in memory"):
        slipstream.load(tiny("llama"), **{name: value})


def test_a_wrong_max_batch_costs_no_loading_time():
    with pytest.raises(OptionError, match="max_batch=0"):
        slipstream.load("/no/such/model", max_batch=0)


def test_the_typed_options_are_those_that_are_read():
    known = set(inspect.signature(LLM.request).parameters) | {f.name for f in fields(Sampling)}
    known |= {"json_schema", "regex"}  # become processors
    assert set(typing.get_type_hints(Options)) == known - {"self", "prompt", "shared", "sampling"}


def test_help_names_every_option():
    text = inspect.getdoc(LLM.generate)
    for name in Options.__annotations__:
        assert name in text, name
    assert "slipstream.load" in inspect.getdoc(LLM)


GOOD = """
import slipstream

llm = slipstream.load(drafter="suffix", longest=8)
reveal_type(llm.generate("a", temperature=0.5, stop=["b"], seed=[1]))
reveal_type(llm.generate("a", n=3))
reveal_type(llm.generate(["a", "b"], max_new_tokens=4))
reveal_type(llm.generate([[1, 2], [3]], n=3))
reveal_type(llm.generate([{"role": "user", "content": "a"}]))
reveal_type(llm.generate([1, 2, 3]))
reveal_type(llm.chat().send("a", top_p=0.9))
reveal_type(llm.stream("a", logprobs=2).result)
"""
TYPES = ["Result", "list[Result]", "list[Result]", "list[list[Result]]", "Result", "Result", "Result", "Result"]
BAD = """
llm.generate("a", temprature=0.5)
llm.generate(["a"], n=2, stop_token=[1])
llm.stream("a", temperature="hot")
llm.chat().send("a", max_tokens=3)
llm.chat().stream("a", seed=1.5)
llm.generate(42)
"""


@pytest.mark.slow
def test_mypy_knows_options_and_results(tmp_path):
    """Only what says the types is read, for time: what libraries and the engine below have does not matter here."""
    read = "slipstream,slipstream.llm,slipstream.answers,slipstream.options,slipstream.text"
    left = "slipstream.*,torch.*,transformers.*,numpy.*"
    config = (
        f"[mypy]\nfollow_imports = silent\n[mypy-{read}]\nfollow_imports = silent\n"
        f"[mypy-{left}]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    (tmp_path / "mypy.ini").write_text(config)
    (tmp_path / "snippet.py").write_text(GOOD + BAD)
    where = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *where, "--no-error-summary", "--hide-error-context", tmp_path / "snippet.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(Path(slipstream.__file__).parents[1])},
    )
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1].replace("builtins.", "") for line in lines if "Revealed type" in line]
    assert [r.replace("slipstream.llm.", "").replace("slipstream.answers.", "") for r in revealed] == TYPES, (
        done.stdout + done.stderr
    )
    wrong = {int(line.split(":")[1]) for line in lines if ": error:" in line}
    first = GOOD.count("\n") + 2
    assert wrong == set(range(first, first + BAD.count("\n") - 1)), done.stdout
