"""plan: forecast the speed-up of speculation for a model and a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.checks import separated
from slipstream.cli import options as o
from slipstream.cli.terminal import busy, ensure_embedded, err, out
from slipstream.errors import OptionError
from slipstream.user_files import check_writable


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A hub id, a folder or a config.json. Default: the embedded one.")
    ] = None,
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="The drafters to consider, separated by commas.")
    ] = "",
    batch: Annotated[int, typer.Option(help="How many answers are generated at a time.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Length of a text in tokens, on a chip. Default: 512.", show_default=False)
    ] = None,
    device: Annotated[
        str, typer.Option(help="A chip, such as H200, H100 or A100; or here, to measure this machine.")
    ] = "here",
    dtype: Annotated[
        str | None, typer.Option(help="Precision of weights and keys. Default: the chip's; here, as elsewhere.")
    ] = None,
    survival: Annotated[
        list[Path] | None,
        typer.Option(help="Count acceptance in a trace, or in a folder of `bench --record`. Repeatable."),
    ] = None,
    alpha: Annotated[
        str | None, typer.Option(metavar="0.6±0.1", help="Assume this chance that a drafted token is accepted.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="The draft model of the drafter model.")] = None,
    option: o.DrafterOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line last.")] = False,
    page: Annotated[Path | None, typer.Option(help="Where to write a page with charts.")] = None,
) -> None:
    """Forecast the speed-up of speculation for a model, on a named chip or this machine, before anything is trained."""
    from slipstream.plan.survival import parse_alpha

    o.at_least(1, batch=batch, context=context)
    check_writable(page)
    if survival and alpha is not None:
        raise OptionError("--alpha and --survival both say how much is accepted: give one of them")
    guessed = parse_alpha(alpha) if alpha is not None else None
    if model is None:
        ensure_embedded()
    with busy("planning"):
        from slipstream.drafters import find
        from slipstream.plan.make import Asked, make

        names = separated(drafter)
        options = o.parse_options(find(names[0]).Options, option) if option and names else {}
        request = Asked(model, names, batch, context, device, dtype, survival or [], guessed, draft_model, options)
        document = make(request)
    from slipstream.plan.words import advice, table

    wide = out if out.is_terminal else Console(width=140, highlight=False)
    wide.print(table(document))
    for sentence in advice(document):
        wide.print(sentence, markup=False, highlight=False)
    if page is not None:
        from slipstream.plan.page import write_page

        write_page(document, page)
        err.print(f"wrote {page}", markup=False)
    if as_json:
        print(json.dumps(document, ensure_ascii=False), flush=True)
