"""tune: train a head for a model from nothing but the model, and register it if it pays."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, check_place, ensure_embedded, err, out
from slipstream.cli.train import percentages, training_bar
from slipstream.errors import OptionError
from slipstream.kept import cache_folder
from slipstream.user_files import check_folder

if TYPE_CHECKING:
    from slipstream.training.tuned import Tuned, TuneSettings


def tune(
    model: Annotated[
        str | None, typer.Argument(help="The model: a hub id, a folder or a .gguf file. Default: the embedded one.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Minutes that the whole run should take, about.")] = 20.0,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts", "-p", help="A file, folder or glob of prompts. Default: the model writes them. Repeatable."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="The kind of head: eagle3, dflash, spire, falcon, eagle, redrafter, medusa or mlp. "
            "Default: --start's, or eagle3."
        ),
    ] = None,
    block: o.Block = None,
    bias: o.Bias = None,
    confidence: o.Confidence = None,
    store: Annotated[
        Path | None,
        typer.Option("--from", help="Train on answers that --learn appended to this datastore, instead of new ones."),
    ] = None,
    collection: Annotated[str, typer.Option(help="The collection of the datastore.")] = "default",
    start: Annotated[
        str | None,
        typer.Option(help="Start from this head, a folder or a hub id. It is kept if the new one is not better."),
    ] = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="The folder for all results. Default: one for the model in the cache folder."),
    ] = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", help="The most tokens of an answer. Default: 256, fewer on a slow CPU."),
    ] = None,
    memory: o.Memory = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of prompts, initial weights and the order of texts.")] = 0,
    share: Annotated[
        float, typer.Option(help="Work for at most this share of the time and pause for the rest, as beside a server.")
    ] = 1.0,
    trust_remote_code: o.Trust = False,
) -> None:
    """Train a head for a model from nothing but the model, and let `auto` use it if it is faster.

    The model writes prompts and answers them, a head is trained on the answers, and if it is measured to be faster,
    it is registered. If interrupted, run the same command again to go on.

    With --from STORE --start HEAD an existing head is trained further, on answers that were appended to a store.
    """
    if prompts and store is not None:
        raise OptionError("--prompts and --from were given: answers are either written anew or taken from a datastore")
    with busy("loading the model"):
        check_place(dtype, device)
        from slipstream.heads.check import check_head
        from slipstream.training.prompts import read_questions
        from slipstream.training.tune import tune as run
        from slipstream.training.tuned import TuneSettings

        where = None if store is None else str(store.resolve())
        start_head = start and absolute_path(start)
        kind = head or (check_head(start_head).kind if start_head else "eagle3")
        given_sizes = {"block": block, "bias": bias, "confidence": confidence}
        sizes = {name: size for name, size in given_sizes.items() if size is not None}
        settings = TuneSettings(minutes, kind, max_new_tokens, seed, where, collection, start_head, share, sizes)
    if out_folder is not None:
        check_folder(out_folder)
    given = read_questions(prompts) if prompts else []
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        from slipstream.heads.registry import fingerprint
        from slipstream.targets import load_model
        from slipstream.training.processes import Processes
        from slipstream.training.tune_page import PAGE

        target, tokenizer = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    folder = out_folder or default_folder(fingerprint(target), settings)
    err.print(f"about {minutes:g} minutes on {target.device}; everything is kept in {folder}", markup=False)
    try:
        with training_bar(Processes(str(target.device))) as watch:
            tell = partial(err.print, markup=False)
            found = run(target, tokenizer, folder, settings, given, tell, watch, memory=memory)
    except KeyboardInterrupt:
        err.print(f"stopped: the same command goes on from here; so far: {folder / PAGE}", markup=False)
        raise
    print_outcome(found, folder)
    out.print(f"charts and all numbers: {folder / PAGE}", markup=False)


def print_outcome(found: Tuned, folder: Path) -> None:
    store, start_head = found.settings.store, found.settings.start
    spent = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in found.spent.items())
    texts = "prompts" if store is None else f"answers from {store}"
    out.print(f"{found.prompts:,} {texts}; minutes: {spent}; right on held-out texts: {percentages(found.accuracy)}")
    before = "auto without it" if start_head is None else "auto with the old head"
    gained = f"{found.gain('without'):.2f} × {before} (at least {found.at_least('without'):.2f})"
    text = f"auto with the head: {found.gain('plain'):.2f} × plain decoding, {gained}"
    out.print(f"{text}, on {len(found.trials)} prompts that it had not seen")
    if found.registered:
        out.print("The head is registered: auto uses it for this model from now on.")
    elif start_head is not None:
        out.print(
            f"It is not shown to be better, so {start_head} is kept; the new head is in {folder / 'head'}.",
            markup=False,
        )
    else:
        out.print(f"It is not shown to pay, so it is not registered; the head is in {folder / 'head'}.", markup=False)


def absolute_path(start: str) -> str:
    """A folder's absolute path, so that the run does not depend on the working directory; a hub id as it is."""
    return str(Path(start).resolve()) if Path(start).is_dir() else start


def default_folder(model: str, settings: TuneSettings) -> Path:
    """The default folder, in the cache. A run that starts from a head or a store gets a new folder each time, as the
    head and the store change between runs; an interrupted run keeps its folder."""
    tuned = cache_folder() / "tuned"
    name = "-".join((model[:16], settings.head, *(f"{size}{value}" for size, value in settings.sizes.items())))
    if settings.store is None and settings.start is None:
        return tuned / name
    return next(place for n in count(2) if not finished(place := tuned / f"{name}-{n}"))


def finished(folder: Path) -> bool:
    try:
        return json.loads((folder / "tuned.json").read_text(encoding="utf-8"))["registered"] is not None
    except (OSError, ValueError, KeyError):
        return False
