"""drafters, models, prepare, demo: commands that list what is there, compile, and demonstrate."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, ensure_embedded, open_llm, out
from slipstream.errors import OptionError

LARGE_VOCABULARY = 1 << 17  # tokens of four bytes; the embedded model's have two


def drafters() -> None:
    """List the drafters and their options."""
    from slipstream import drafters as registry
    from slipstream.cli.listing import about

    for name in registry.names():
        sentence, options = about(name)
        out.print(f"[bold]{name}[/bold]  {escape(sentence)}")
        for option in options:
            out.print(f"    {option.name}={escape(option.default)}  [dim]{escape(option.comment)}[/dim]")


def models(
    names: Annotated[list[str] | None, typer.Argument(help="Names of models. Default: all.")] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete these models. They are converted again when needed.")
    ] = False,
) -> None:
    """List the converted models (the embedded one and GGUF files), their sizes and folders, or remove them.

    The embedded model is fetched first if it is not there.
    """
    from slipstream.loading import converted

    if not names and not remove:
        ensure_embedded()
    folders = {name_of(folder): folder for folder in converted.listed()}
    if unknown := set(names or []) - folders.keys():
        has = ", ".join(folders) or "none"
        raise OptionError(f"no converted model is called {', '.join(sorted(unknown))}: there is {has}")
    for name in names or folders:
        size = converted.size_of(folders[name])
        if remove:
            shutil.rmtree(folders[name])
        out.print(f"{'removed ' if remove else ''}{name}  {size / 1e6:.0f} MB  {folders[name]}")


def prepare() -> None:
    """Compile the search and draft code, with the embedded model: run it once after an install."""
    from slipstream.datastores.durable.store import Store
    from slipstream.llm import LLM

    llm = open_llm(None, "auto", None, None, None, False)
    with busy("compiling the search and draft code"), TemporaryDirectory() as folder:
        tokens = llm.generate("Count to ten in words.", max_new_tokens=16).tokens
        with Store.create(f"{folder}/store", vocabulary=llm.target.vocabulary) as store:
            store.append(tokens * 4)
            store.flush()
            store.append(tokens)
        other = LLM(llm.model, llm.tokenizer, "rest", store=f"{folder}/store")
        other.generate(tokens, max_new_tokens=4, temperature=1.0, seed=0)
        search_as_with(LARGE_VOCABULARY, tokens)
    out.print("ready: the search and draft code is compiled")


def search_as_with(vocabulary: int, tokens: list[int]) -> None:
    """Draft as for a model with so large a vocabulary: the width of its tokens decides which code is compiled."""
    from slipstream import drafters as registry
    from slipstream.budget import Budget
    from slipstream.drafters.base import Seen
    from slipstream.request import Request

    drafter = registry.make("suffix", SimpleNamespace(vocabulary=vocabulary), None)
    session = drafter.begin(Request(tokens, max_new_tokens=len(tokens)))
    session.observe(Seen(tokens * 2, 0))
    session.propose(tokens[0], Budget(8, 8))
    session.close()


def name_of(folder: Path) -> str:
    from slipstream.loading import embedded

    return embedded.NAME if folder == embedded.folder() else folder.name


def demo(
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 160,
) -> None:
    """Answer a prompt with and without speculation, side by side, and compare the times."""
    from slipstream.demo import PROMPT, race

    o.at_least(1, max_new_tokens=max_new_tokens)
    llm = open_llm(model, drafter, option, dtype, device, False)
    race(llm, PROMPT, drafter, max_new_tokens, out)
