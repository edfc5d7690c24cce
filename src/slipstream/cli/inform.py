"""drafters, models, demo: the commands that show what there is."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.cli import options as o
from slipstream.cli.terminal import ensure_embedded, open_llm, out


def drafters() -> None:
    """What can draft, and its options."""
    from slipstream import drafters as registry

    for name in registry.names():
        kind = registry.find(name)
        out.print(f"[bold]{name}[/bold]  {(kind.__doc__ or '').strip().splitlines()[0]}")
        comments = comments_of(kind.Options)
        for field in fields(kind.Options):
            out.print(f"    {field.name}={field.default}  [dim]{escape(comments.get(field.name, ''))}[/dim]")


def models(
    remove: Annotated[bool, typer.Option("--remove", help="Delete the converted embedded model.")] = False,
) -> None:
    """Fetch and convert the embedded model, and say where it lies."""
    from slipstream import embedded

    if remove:
        embedded.remove()
        out.print(f"removed {embedded.folder()}")
        return
    ensure_embedded()
    size = sum(f.stat().st_size for f in embedded.folder().iterdir())
    out.print(f"{embedded.NAME}  {size / 1e6:.0f} MB  {embedded.folder()}")


def demo(
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 160,
) -> None:
    """A race: the same prompt with and without speculation, side by side."""
    from slipstream.demo import PROMPT, race

    llm = open_llm(model, drafter, option, dtype, device, False)
    race(llm, PROMPT, drafter, max_new_tokens, out)


def comments_of(kind: type) -> dict[str, str]:
    """The comment beside each field: the one place where an option is explained."""

    lines = inspect.getsource(kind).splitlines()
    found = (re.match(r"\s+(\w+): .*?#\s*(.+)$", line) for line in lines)
    return {m[1]: m[2] for m in found if m}
