"""The README and the guides are run as they stand there."""

import importlib
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = "\n".join((ROOT / page).read_text() for page in ("README.md", "docs/guide.md"))  # what is run and checked


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("code", blocks(README, "python"), ids=["api", "hook"])
def test_the_readmes_python_runs(code, forked):
    done = forked.run(code=code)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the README's commands run one after the other: some need what others made."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def ran(folder, forked):
    """ran(line) -> a command's run, which is one for all who ask."""

    @cache
    def run(line):
        program, *words = shlex.split(line)
        assert program == "slipstream"
        return forked.run(*words, stdin="Hi!\n\n", folder=folder)

    return run


@pytest.mark.parametrize(
    "line", [w for b in blocks(README, "console") for w in re.findall(r"^\$ (.*)$", b, re.MULTILINE)]
)
def test_the_readmes_commands_run(line, ran):
    done = ran(line)
    assert done.returncode == 0, done.stderr


def test_the_readmes_schema_fits_its_limit(ran):
    (line,) = re.findall(r"^\$ (slipstream .*--json-schema.*)$", README, re.MULTILINE)
    done = ran(line)
    assert set(json.loads(done.stdout)) == {"name", "age"}
    assert "finish: stop" in done.stderr


def test_the_readme_names_every_drafter_and_rule():
    from slipstream import drafters
    from slipstream.accept import RULES

    for name in (*drafters.names(), *RULES):
        assert f"| `{name}`" in README


def test_every_make_target_in_the_docs_exists():
    makefile = (ROOT / "Makefile").read_text()
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"make ([a-z][a-z-]+)\b", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_guides_drafter_obeys_the_law(tiny, tmp_path, monkeypatch):
    """The example of docs/add-a-drafter.md, as it stands there."""
    from slipstream import LLM

    (code,) = blocks((ROOT / "docs" / "add-a-drafter.md").read_text(), "python")
    (tmp_path / "echo.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    echo = importlib.import_module("echo")
    llm = LLM(tiny("llama"), drafter="none")
    prompt = [5, 6, 7]
    plain = llm.generate(prompt, max_new_tokens=20)
    llm.engine.drafter = echo.Echo(llm.target, None, echo.EchoOptions())
    result = llm.generate(prompt, max_new_tokens=20)
    assert result.tokens == plain.tokens
    assert result.stats.by_source["echo"]["proposed"] > 0
