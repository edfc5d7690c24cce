"""train: train a head, or distil a draft model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, counting_bars, ensure_embedded, err, out
from slipstream.errors import OptionError
from slipstream.user_files import check_folder

if TYPE_CHECKING:
    from slipstream.training.distill import Distilled
    from slipstream.training.loop import Watch
    from slipstream.training.processes import Processes
    from slipstream.training.train import Trained


# Options that only heads have, and options that only draft models have.
HEAD_OPTIONS = (
    *("heads", "inner_dim", "draft_vocab", "tied", "start", "no_rnn", "hass", "labels", "depths", "decay"),
    *("block", "bias", "confidence", "window", "sinks", "feedback", "activations", "pruned"),
)
DRAFT_MODEL_OPTIONS = ("draft", "cut", "divergence", "beta", "on_policy", "force")
PANEL = "Only for `train model`"


def train(
    ctx: typer.Context,
    head: Annotated[
        str,
        typer.Argument(
            metavar="HEAD",
            help="medusa, redrafter, mlp, eagle, eagle3, falcon, dflash or spire; or model, to distil a draft model.",
        ),
    ],
    data: Annotated[list[Path], typer.Option("--data", help="A file that `slipstream collect` wrote. Repeatable.")],
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the new head.")],
    model: o.Model = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision of the target. Default: float32 on a CPU, else bfloat16.")
    ] = None,
    device: o.Device = None,
    minutes: Annotated[float | None, typer.Option(help="Train for this many minutes. Default: 10.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Train for this many passes over the data.")] = None,
    heads: Annotated[int | None, typer.Option(help="medusa, mlp: how many tokens to guess.")] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="medusa, redrafter: residual blocks. dflash, spire, or a draft model that is cut: layers."),
    ] = None,
    inner_dim: Annotated[int | None, typer.Option(help="The inner width of a head; not for medusa.")] = None,
    block: o.Block = None,
    bias: o.Bias = None,
    confidence: o.Confidence = None,
    window: o.Window = None,
    sinks: o.Sinks = None,
    feedback: o.Feedback = None,
    activations: o.Activations = None,
    pruned: o.Pruned = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Size of the draft vocabulary: eagle3 and dflash (8192), spire (all), redrafter if it does not sample "
            "(12288)."
        ),
    ] = None,
    tied: Annotated[
        bool | None,
        typer.Option(
            "--tied/--untied",
            help="Share output matrices: medusa, eagle3, dflash, spire with the target; mlp one for all.",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="Start from this head, a folder or a hub id. redrafter: may add --layers or change --draft-vocab."
        ),
    ] = None,
    no_rnn: Annotated[bool, typer.Option("--no-rnn", help="redrafter: leave out the recurrence.")] = False,
    hass: Annotated[bool, typer.Option("--hass", help="eagle: train on its own features, as in HASS.")] = False,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Loss. distill: the target's distribution; hard: the data's tokens; tv: acceptance of sampled drafts; "
            "overlap: half distill, half tv. Default: distill; spire: overlap."
        ),
    ] = None,
    depths: Annotated[
        int | None, typer.Option(help="How many tokens ahead to train on. Default: depends on the head.")
    ] = None,
    decay: Annotated[float, typer.Option(help="The weight of each depth relative to the one before.")] = 0.8,
    count_all: Annotated[bool, typer.Option("--count-all", help="Train on prompts too, not only on answers.")] = False,
    any_author: Annotated[bool, typer.Option("--any-author", help="Accept answers that another model wrote.")] = False,
    length: Annotated[int, typer.Option(help="Most tokens per text; the rest is cut off.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per batch, padding included.")] = 16384,
    accumulate: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    rate: Annotated[float | None, typer.Option(help="The peak learning rate. Default: depends on the head.")] = None,
    warmup: Annotated[int, typer.Option(help="Steps until the peak learning rate.")] = 50,
    clip: Annotated[float, typer.Option(help="Clip the gradient to this norm.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the order of texts.")] = 0,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.")] = 20,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 500,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 1000,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's last checkpoint.")] = False,
    share: Annotated[
        float, typer.Option(help="Work for at most this share of the time, and pause for the rest.")
    ] = 1.0,
    draft: Annotated[
        str | None, typer.Option(help="The draft model: a folder or a hub id.", rich_help_panel=PANEL)
    ] = None,
    cut: Annotated[
        str | None,
        typer.Option(
            help="Instead of --draft, cut out --layers of the target: first, last or even.", rich_help_panel=PANEL
        ),
    ] = None,
    divergence: Annotated[
        str,
        typer.Option(
            help="The divergence of target and draft to minimise: fkl, rkl, jsd or tvd.", rich_help_panel=PANEL
        ),
    ] = "fkl",
    beta: Annotated[
        float | None,
        typer.Option(help="jsd: near 0 like fkl, near 1 like rkl. Default: 0.5.", rich_help_panel=PANEL),
    ] = None,
    on_policy: Annotated[
        float, typer.Option(help="The share of texts that the draft writes itself.", rich_help_panel=PANEL)
    ] = 0.0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Train even if the draft model can't speed up the target.", rich_help_panel=PANEL),
    ] = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Train a head for a model, or distil a draft model.

    If interrupted, run the same command with --resume to go on.

    On several GPUs: accelerate launch -m slipstream train …
    """
    refuse_foreign_options(ctx, head)
    if minutes is None and steps is None and epochs is None:
        minutes = 10
    from slipstream.training.loop import TrainingPlan

    plan = partial(
        TrainingPlan,
        steps=steps,
        epochs=epochs,
        minutes=minutes,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        warmup=warmup,
        clip=clip,
        seed=seed,
        share=share,
        log_every=log_every,
        eval_every=eval_every,
        save_every=save_every,
    )
    if head == "model":
        from slipstream.training.distill import RATE, Distillation, DraftSource, distill

        source = DraftSource(draft, cut, layers)
        texts = Distillation(divergence, beta, on_policy, length, count_all, any_author)
        own_plan = plan(rate=rate or RATE)
        with training_run(out_folder, model, dtype, device, trust_remote_code) as run:
            made = distill(
                run.target,
                run.tokenizer,
                data,
                out_folder,
                source,
                texts,
                own_plan,
                resume=resume,
                force=force,
                processes=run.processes,
                tell=lambda text: err.print(text, markup=False),
                watch=run.watch,
            )
        if run.processes.rank == 0:
            print_draft_result(made, out_folder)
        return
    from slipstream.training.recipes import find, name_sizes
    from slipstream.training.train import Lesson
    from slipstream.training.train import train as learn

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
        "window": window,
        "sinks": sinks,
        "feedback": feedback,
        "activations": activations,
        "pruned": pruned,
    }
    sizes = name_sizes(head, {name: value for name, value in given.items() if value is not None})
    lesson = Lesson(head, hass, labels, depths, decay, length, count_all, any_author)
    own_plan = plan(rate=rate or recipe.rate)
    with training_run(out_folder, model, dtype, device, trust_remote_code) as run:
        done = learn(
            run.target,
            data,
            out_folder,
            lesson,
            own_plan,
            sizes,
            start=start,
            resume=resume,
            processes=run.processes,
            watch=run.watch,
        )
    if run.processes.rank == 0:
        print_head_result(done, head, out_folder)


def refuse_foreign_options(ctx: typer.Context, kind: str) -> None:
    """Refuse options that do not apply to this kind."""
    others = HEAD_OPTIONS if kind == "model" else DRAFT_MODEL_OPTIONS
    given = o.given_flags(ctx)
    if wrong := ["--" + name.replace("_", "-") for name in others if name in given]:
        whose = "trained heads" if kind == "model" else "`train model`"
        raise OptionError(f"{kind} has no {', '.join(wrong)}: that belongs to {whose}")


class Run(NamedTuple):
    """What training needs besides its options."""

    target: Any
    tokenizer: Any
    processes: Processes
    watch: Watch


@contextmanager
def training_run(folder: Path, model: str | None, dtype: str | None, device: str | None, trust: bool) -> Iterator[Run]:
    """Load the target and show a progress bar. If the run is interrupted, print how to go on."""
    from slipstream.training import checkpoint
    from slipstream.training.processes import Processes

    processes = Processes(device)
    if processes.rank == 0:  # the check makes and removes folders: others would take them for the user's
        check_folder(folder)
    if model is None and processes.rank == 0:
        ensure_embedded()
    processes.wait()
    with busy("loading the model"):
        from slipstream.targets import load_model

        kind = dtype or ("float32" if processes.device.type == "cpu" else "bfloat16")
        target, tokenizer = load_model(model, dtype=kind, device=processes.device, trust_remote_code=trust)
    with training_bar(processes) as watch:
        try:
            yield Run(target, tokenizer, processes, watch)
        except KeyboardInterrupt:
            if (folder / checkpoint.NAME).exists():
                err.print(f"stopped: the same command with --resume goes on from {folder}", markup=False)
            raise
    processes.close()  # not after an error: the others may wait for this one


def print_head_result(done: Trained, kind: str, folder: Path) -> None:
    print_size(done)
    out.print(
        f"right on held-out texts: {percentages(done.accuracy)}; the head is in {folder}: "
        f"use it with --drafter {kind} --drafter-path {folder}",
        markup=False,
    )


def print_draft_result(done: Distilled, folder: Path) -> None:
    print_size(done)
    for name, text in (("accuracy", "greedily"), ("overlap", "sampled")):
        out.print(f"accepted of a token, {text}: {done.before[name]:.1%} before, {done.after[name]:.1%} now")
    if done.trials:
        (times, low, high), per_step = done.gain("plain"), done.tokens_per_step
        out.print(
            f"on {len(done.trials)} held-out prompts: {per_step('before'):.2f} tokens per step before, "
            f"{per_step('after'):.2f} now; {times:.2f} × plain decoding ({low:.2f} to {high:.2f}), "
            f"{done.gain('before')[0]:.2f} × the draft before"
        )
    out.print(
        f"the draft is in {folder}: use it with --drafter model -o draft_model={folder} -o depth={done.depth}",
        markup=False,
    )


def print_size(done: Trained | Distilled) -> None:
    out.print(f"{done.steps:,} steps in {done.seconds / 60:.1f} minutes, {done.parameters / 1e6:.1f}M parameters")


@contextmanager
def training_bar(processes: Any) -> Iterator[Any]:
    """A bar with loss, rate, accuracies and time left. Ctrl-C ends the training between two steps, before and after it
    at once."""
    training = stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        if stopped or not training:  # a second Ctrl-C: stop at once
            raise KeyboardInterrupt
        stopped = True

    # Several processes could not agree on the step to stop after: there, Ctrl-C stops them at once.
    before = signal.signal(signal.SIGINT, stop) if processes.count == 1 else None
    try:
        with counting_bars(processes.rank == 0) as bars:
            task = bars.add_task("training", total=None)
            latest: dict[str, Any] = {}

            def watch(step: int, total: float, line: dict[str, Any]) -> None:
                nonlocal training
                training = not (0 < total <= step and "accuracy" in line)  # else this was the last call
                if line:
                    latest.update(line)
                    text = f"loss {latest.get('loss', 0):.3f}, {latest.get('tokens_per_second', 0):,.0f} tokens/s"
                    if "accuracy" in latest:
                        text += f", {percentages(latest['accuracy'])}"
                    bars.update(task, description=text)
                bars.update(task, completed=step, total=total or None)
                if stopped:
                    raise KeyboardInterrupt

            yield watch
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def percentages(accuracy: list[float]) -> str:
    return " ".join(f"t+{depth} {share:.1%}" for depth, share in enumerate(accuracy, 1))
