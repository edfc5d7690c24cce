"""export: write a head in a published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, ensure_embedded, out


def export(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The folder of a head, or a hub id.")],
    out_folder: Annotated[Path, typer.Option("--out", help="The new folder to write.")],
    layout: Annotated[
        str | None,
        typer.Option(
            help="speculators: EAGLE-3 or DFlash as vLLM loads it. Default: the layout that the head was published in."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision to write: float32, bfloat16 or float16. Default: that of the head.")
    ] = None,
    model: o.Model = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Write a head in its published layout, complete with the weights that it shares with its target."""
    from slipstream.errors import OptionError

    if out_folder.exists() and (not out_folder.is_dir() or any(out_folder.iterdir())):
        raise OptionError(f"{out_folder} is there already: name a new folder")
    from slipstream.loading.models import to_dtype

    precision = to_dtype(dtype or "auto")
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        from slipstream.heads import export_head, load_head
        from slipstream.targets import load_model

        target, _ = load_model(model, device="cpu", trust_remote_code=trust_remote_code)
        loaded = load_head(head, target, precision)
    export_head(loaded, out_folder, layout)
    out.print(f"wrote {loaded.kind} for {loaded.config.target or 'its target'} to {out_folder}", markup=False)
