"""tune: the command that makes a model's own drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, check_place, ensure_embedded, err, out
from slipstream.cli.train import shares, watching
from slipstream.user_files import check_folder


def tune(
    model: Annotated[
        str | None, typer.Argument(help="A hub id, a folder or a .gguf file. Default: the embedded model.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="All of it should take about so long.")] = 20.0,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompts", "-p", help="A file, folder or glob. Default: the model writes its own. Repeatable."),
    ] = None,
    head: Annotated[str, typer.Option(help="Which kind of head: eagle3, eagle, redrafter, medusa or mlp.")] = "eagle3",
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Everything goes here. Default: a folder for the model in the cache.")
    ] = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="The longest answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Of prompts, first weights and the order of texts.")] = 0,
    trust_remote_code: o.Trust = False,
) -> None:
    """Make a drafter for a model: it writes prompts and answers them, a head learns from that, and `auto` uses it from
    then on if it pays. Interrupted, the same command goes on where it stopped."""
    with busy("loading the model"):
        check_place(dtype, device)
        from slipstream.training.prompts import read_questions
        from slipstream.training.tune import tune as run
        from slipstream.training.tuned import TuneSettings

        settings = TuneSettings(minutes, head, max_new_tokens, seed)
    if out_folder is not None:
        check_folder(out_folder)
    given = read_questions(prompts) if prompts else []
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        from slipstream.heads.registry import fingerprint
        from slipstream.kept import cache_folder
        from slipstream.targets import load_model
        from slipstream.training.processes import Processes
        from slipstream.training.tune_page import PAGE

        target, tokenizer = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    folder = out_folder or cache_folder() / "tuned" / f"{fingerprint(target)[:16]}-{head}"
    err.print(f"about {minutes:g} minutes on {target.device}; everything is kept in {folder}", markup=False)
    try:
        with watching(Processes(str(target.device))) as watch:
            found = run(target, tokenizer, folder, settings, given, lambda said: err.print(said, markup=False), watch)
    except KeyboardInterrupt:
        err.print(f"stopped: the same command goes on from here; so far: {folder / PAGE}", markup=False)
        raise
    taken = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in found.spent.items())
    out.print(f"{found.prompts:,} prompts; minutes: {taken}; right on held-out texts: {shares(found.accuracy)}")
    gained = f"{found.gain('without'):.2f} × auto without it (at least {found.at_least('without'):.2f})"
    said = f"auto with the head: {found.gain('plain'):.2f} × plain decoding, {gained}"
    out.print(f"{said}, on {len(found.trials)} prompts that it had not seen")
    if found.registered:
        out.print("It is registered: auto asks it for this model from now on.")
    else:
        out.print(f"That it pays is not shown, so it is not registered; it is in {folder / 'head'}.", markup=False)
    out.print(f"charts and all numbers: {folder / PAGE}", markup=False)
