"""Output of the commands: the two consoles, progress bars, streamed text, the status line. Loads the model too."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.options import parse_options
from slipstream.kept import cache_folder
from slipstream.notices import show_with

if TYPE_CHECKING:
    from rich.progress import Progress

    from slipstream.answers import Result
    from slipstream.llm import LLM
    from slipstream.stats import Stats

PREPARED = "prepared"  # a file in the cache folder: the drafting code has been compiled

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def open_llm(
    model: str | None,
    drafter: str,
    option: list[str] | None,
    dtype: str | None,
    device: str | None,
    trust: bool,
    compile: bool = False,
    shown: bool = True,
    max_batch: int = 16,
    memory: float = 0.9,
) -> LLM:
    """Load the model and drafter that the options name. Misspelt names are refused first. shown: whether the screen is
    free for a progress message."""
    from slipstream import drafters as registry

    with busy("loading the model"):
        options = parse_options(registry.find(drafter).Options, option or [])
        check_place(dtype, device)
    if model is None:
        ensure_embedded()
    with busy(loading_message()) if shown else nullcontext():
        from slipstream.llm import load

        llm = load(
            model,
            drafter=drafter,
            dtype=dtype,
            device=device,
            trust_remote_code=trust,
            compile=compile,
            max_batch=max_batch,
            memory=memory,
            **options,
        )
    with suppress(OSError):
        (cache_folder() / PREPARED).touch()
    show_with(busy)
    return llm


def loading_message() -> str:
    """The progress message while a model loads."""
    if (cache_folder() / PREPARED).exists():
        return "loading the model"
    return "loading the model and compiling the draft code, which takes up to a minute the first time"


def check_place(dtype: str | None, device: str | None) -> None:
    """Refuse an unknown precision or a missing device, before a model is fetched and read."""
    from slipstream.loading.models import to_device, to_dtype

    to_device(device)
    to_dtype(dtype or "auto")


def ensure_embedded() -> None:
    """Fetch and convert the embedded model, with a progress bar, if that has not been done."""
    from slipstream.loading import embedded

    if embedded.is_ready():
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as bars:
        tasks: dict[str, Any] = {}
        labels = {
            "fetch": "fetching the embedded model (98 MB)",
            "convert": "converting it once (about 10 s)",
        }

        def progress(stage: str, share: float) -> None:
            if stage not in tasks:
                # Conversion reports no progress: its bar pulses until it is done.
                tasks[stage] = bars.add_task(labels[stage], total=1.0 if stage == "fetch" else None)
            bars.update(tasks[stage], completed=share, total=1.0 if stage == "fetch" or share == 1 else None)

        embedded.ensure(progress)


def printable(text: str) -> str:
    """The text with escapes for the bytes of file names that are not UTF-8, which are valid in JSON too."""
    return text.encode(errors="backslashreplace").decode()


def print_stream(stream: Any) -> None:
    """Print pieces of text as they are generated. Ctrl-C stops the generation after the current step, a second Ctrl-C
    at once. What was printed stays."""
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    if stopped:
        err.print(" [yellow](stopped)[/yellow]", end="")
    print(flush=True)


def status(stats: Stats, accept: str, finish: str | None = None) -> str:
    """The status line: tokens, speed, drafter, exactness, and why the answer ended (stop, length, cancelled)."""
    from slipstream.accept import RULES

    exact = "exact" if stats.exact else "same rule, rounding may differ"
    if not RULES[accept].lossless:
        exact = f"LOSSY ({accept})"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s · {stats.tokens_per_second:.1f} tokens/s · "
        f"{stats.tokens_per_step:.2f} tokens/step · {stats.drafter} · {exact}" + f" · finish: {finish}" * bool(finish)
    )


def print_status(result: Result, accept: str) -> None:
    err.print(f"[dim]{status(result.stats, accept, result.finish_reason)}[/dim]")


def counting_bars(shown: bool = True, counts: bool = True, **options: Any) -> Progress:
    """Bars with counts, time taken and time left. Without a terminal: a line for every tenth."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *([MofNCompleteColumn()] if counts else []),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    if not shown or err.is_terminal:
        return Progress(*columns, console=err, disable=not shown, **options)

    class Lines(Progress):
        def update(self, task_id: Any, **changes: Any) -> None:
            task = self.tasks[task_id]
            before = tenths(task.completed, task.total)
            super().update(task_id, **changes)
            if (now := tenths(task.completed, task.total)) > before:
                count = f"{task.completed:,.0f} of {task.total:,.0f}"
                err.print(f"{task.description}: {now}0% ({count})", markup=False)

    return Lines(*columns, console=err, disable=True, **options)


def tenths(done: float, of: float | None) -> int:
    return int(10 * done / of) if of else 0


def per_second(bars: Progress, task: Any, count: float) -> float:
    """The average rate since the task's bar began."""
    return count / max(bars.tasks[task].elapsed or 0, 1e-9)


@contextmanager
def progress_bars() -> Iterator[Any]:
    """A progress function of (stage, done, total): each stage gets a bar."""
    with counting_bars() as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=of)

        yield progress


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on a terminal what the command is doing."""
    if err.is_terminal:
        with err.status(what + " …"):
            yield
    else:
        yield
