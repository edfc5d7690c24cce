"""train: the command that makes heads."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, counting_bars, ensure_embedded, err, out
from slipstream.user_files import check_folder


def train(
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="medusa, redrafter, mlp, eagle, eagle3, falcon or dflash.")
    ],
    data: Annotated[list[Path], typer.Option("--data", help="What `slipstream collect` wrote. Repeatable.")],
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the new head.")],
    model: o.Model = None,
    dtype: Annotated[str | None, typer.Option(help="Of the target. Default: float32 on a CPU, else bfloat16.")] = None,
    device: o.Device = None,
    minutes: Annotated[float | None, typer.Option(help="Train this long. Default: 10.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train this many steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Read the data this often.")] = None,
    heads: Annotated[int | None, typer.Option(help="Tokens that medusa or mlp guess.")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Residual blocks of medusa or redrafter, layers of dflash.")
    ] = None,
    inner_dim: Annotated[int | None, typer.Option(help="The width inside a head; not of medusa.")] = None,
    block: o.Block = None,
    bias: o.Bias = None,
    confidence: o.Confidence = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Tokens that eagle3 and dflash can guess (8192), and redrafter where it doesn't draw (12288)."
        ),
    ] = None,
    tied: Annotated[
        bool | None,
        typer.Option("--tied/--untied", help="Output matrices: medusa, eagle3, dflash the target's; mlp one."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="Begin with this head, a folder or a hub id. A redrafter may get more --layers, another --draft-vocab."
        ),
    ] = None,
    no_rnn: Annotated[bool, typer.Option("--no-rnn", help="redrafter without its recurrence.")] = False,
    hass: Annotated[bool, typer.Option("--hass", help="eagle, unrolled on its own features as HASS does.")] = False,
    labels: Annotated[
        str,
        typer.Option(
            help="distill: the target's distribution; hard: the data's tokens; tv: to be accepted when drawn."
        ),
    ] = "distill",
    depths: Annotated[int | None, typer.Option(help="Tokens ahead that count. Default: as usual for the head.")] = None,
    decay: Annotated[float, typer.Option(help="Each depth counts so much of the one before.")] = 0.8,
    count_all: Annotated[
        bool, typer.Option("--count-all", help="Learn the prompts too, not the answers alone.")
    ] = False,
    any_author: Annotated[bool, typer.Option("--any-author", help="Take texts that another model wrote.")] = False,
    length: Annotated[int, typer.Option(help="Tokens of a text at most: the rest is cut off.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch, padding included.")] = 16384,
    accumulate: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    rate: Annotated[float | None, typer.Option(help="The learning rate at its peak. Default: the head's.")] = None,
    warmup: Annotated[int, typer.Option(help="Steps until the peak.")] = 50,
    clip: Annotated[float, typer.Option(help="The longest gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the texts.")] = 0,
    log_every: Annotated[int, typer.Option(help="Steps.")] = 20,
    eval_every: Annotated[int, typer.Option(help="Steps.")] = 500,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 1000,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Train a head to draft for a model. Interrupted, the same command with --resume goes on.

    On several GPUs: accelerate launch -m slipstream train …
    """
    from slipstream.training.recipes import find, name_sizes

    recipe = find(head, hass)
    given = {
        "heads": heads,
        "layers": layers,
        "inner_dim": inner_dim,
        "draft_vocab": draft_vocab,
        "tied": tied,
        "rnn": False if no_rnn else None,
        "block": block,
        "bias": bias,
        "confidence": confidence,
    }
    sizes = name_sizes(head, {name: value for name, value in given.items() if value is not None})
    if minutes is None and steps is None and epochs is None:
        minutes = 10
    from slipstream.training import checkpoint
    from slipstream.training.loop import TrainingPlan
    from slipstream.training.processes import Processes
    from slipstream.training.train import Lesson
    from slipstream.training.train import train as run

    lesson = Lesson(head, hass, labels, depths, decay, length, count_all, any_author)
    plan = TrainingPlan(
        steps=steps,
        epochs=epochs,
        minutes=minutes,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        rate=rate or recipe.rate,
        warmup=warmup,
        clip=clip,
        seed=seed,
        log_every=log_every,
        eval_every=eval_every,
        save_every=save_every,
    )
    check_folder(out_folder)
    processes = Processes(device)
    if model is None and processes.rank == 0:
        ensure_embedded()
    processes.wait()
    with busy("loading the model"):
        from slipstream.targets import load_model

        kind = dtype or ("float32" if processes.device.type == "cpu" else "bfloat16")
        target, _ = load_model(model, dtype=kind, device=processes.device, trust_remote_code=trust_remote_code)
    with watching(processes) as watch:
        try:
            how = {"start": start, "resume": resume, "processes": processes, "watch": watch}
            done = run(target, data, out_folder, lesson, plan, sizes, **how)
        except KeyboardInterrupt:
            if (out_folder / checkpoint.NAME).exists():
                err.print(f"stopped: the same command with --resume goes on from {out_folder}", markup=False)
            raise
    if processes.rank == 0:
        out.print(f"{done.steps:,} steps in {done.seconds / 60:.1f} minutes, {done.parameters / 1e6:.1f}M parameters")
        out.print(
            f"right on held-out texts: {shares(done.accuracy)}; the head is in {out_folder}: "
            f"use it with --drafter {head} --drafter-path {out_folder}",
            markup=False,
        )


@contextmanager
def watching(processes: Any) -> Iterator[Any]:
    """A bar that tells loss, rate, accuracies and time left. Ctrl-C ends the training between two steps."""
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        if stopped:  # the second time it is meant at once
            raise KeyboardInterrupt
        stopped = True

    # Several processes can't agree on the step they stop after: there, Ctrl-C ends them as they are.
    before = signal.signal(signal.SIGINT, stop) if processes.count == 1 else None
    try:
        with counting_bars(processes.rank == 0) as bars:
            task = bars.add_task("training", total=None)
            told: dict[str, Any] = {}

            def watch(step: int, total: float, line: dict[str, Any]) -> None:
                if line:
                    told.update(line)
                    said = f"loss {told.get('loss', 0):.3f}, {told.get('tokens_per_second', 0):,.0f} tokens/s"
                    if "accuracy" in told:
                        said += f", {shares(told['accuracy'])}"
                    bars.update(task, description=said)
                bars.update(task, completed=step, total=total or None)
                if stopped:
                    raise KeyboardInterrupt

            yield watch
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def shares(accuracy: list[float]) -> str:
    return " ".join(f"t+{depth} {share:.1%}" for depth, share in enumerate(accuracy, 1))
