"""heads: check trained heads, and register them for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, ensure_embedded, out

app = typer.Typer(help="Check trained heads, and register them for a model.", no_args_is_help=True)


@app.command()
def check(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The head: a folder or a hub id.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A target, a hub id or a folder: check that the head fits it.")
    ] = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Show what kind of head a folder holds, what it reads, and what is unusual about it.

    Nothing is run. Of the target only the config is read.
    """
    from slipstream.errors import DrafterError
    from slipstream.heads.check import check_head, short
    from slipstream.loading.models import blank_model

    with busy("reading the files"):
        target = None if model is None else blank_model(model, trust_remote_code)
        report = check_head(folder, target)
    rows = [
        ("kind", report.kind),
        ("layout", report.layout),
        ("target", report.target or "its files name none"),
        ("reads", report.reads),
        ("guesses", report.guesses),
        ("parameters", f"{short(report.parameters)}, {report.precision}, {short(report.size)}B"),
        ("borrows", ", ".join(report.borrows) or "nothing"),
        *(("odd", line) for line in report.odd),
    ]
    if model is not None and report.misfit is None:
        rows.append(("fits", f"{model}: --drafter {report.kind} --drafter-path {folder}"))
    for label, text in rows:
        out.print(f"{label:<12}{text}", markup=False)
    if report.misfit is not None:
        raise DrafterError(report.misfit)


@app.command()
def add(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The head's folder.")],
    model: o.Model = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Register a head for a model: from then on `auto` uses it for this model, which is recognised by its weights."""
    from slipstream.heads import registry
    from slipstream.loading.models import load_model

    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        target, _ = load_model(model, dtype="auto", device="cpu", trust_remote_code=trust_remote_code)
        entry = registry.add(folder, target)
    out.print(f"{entry.kind} for {entry.model}: {entry.folder}", markup=False)


@app.command("list")
def list_() -> None:
    """List the registered heads and their models."""
    from slipstream.heads import registry

    for entry in registry.entries():
        gone = "" if Path(entry.folder).is_dir() else "  (its folder is gone)"
        out.print(f"{entry.kind} for {entry.model}: {entry.folder}{gone}", markup=False)


@app.command()
def remove(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder, as `heads list` shows it.")],
) -> None:
    """Unregister a head. Its files stay."""
    from slipstream.heads import registry

    registry.remove(folder)
    out.print(f"{folder} is no longer registered", markup=False)
