"""What commands show while they work: the two consoles, progress, streamed text, the status line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.options import parse_options
from slipstream.notices import show_with

if TYPE_CHECKING:
    from rich.progress import Progress

    from slipstream.llm import LLM
    from slipstream.stats import Stats

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
) -> LLM:
    """The model and drafter that the options name; a misspelt one is refused before anything is loaded."""
    from slipstream import drafters as registry

    options = parse_options(registry.find(drafter).Options, option or [])
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        from slipstream.llm import load

        llm = load(
            model, drafter=drafter, dtype=dtype, device=device, trust_remote_code=trust, compile=compile, **options
        )
    show_with(busy)
    return llm


def ensure_embedded() -> None:
    """Fetch and convert the embedded model with a progress bar, if it isn't there yet."""
    from slipstream import embedded

    if embedded.is_ready():
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as bars:
        tasks: dict[str, Any] = {}
        labels = {
            "fetch": "fetching the embedded model (98 MB)",
            "convert": "converting it once (about 30 s)",
        }

        def progress(stage: str, share: float) -> None:
            if stage not in tasks:
                # Conversion tells no share of its own: its bar pulses until it is done.
                tasks[stage] = bars.add_task(labels[stage], total=1.0 if stage == "fetch" else None)
            bars.update(tasks[stage], completed=share, total=1.0 if stage == "fetch" or share == 1 else None)

        embedded.ensure(progress)


def say(stream: Any) -> None:
    """Print pieces as they come. Ctrl-C ends the generation after the step under way, a second one at once; what was
    said stays."""
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


def status(stats: Stats, accept: str) -> str:
    from slipstream.accept import RULES

    exact = "exact" if stats.exact else "same rule, rounding may differ"
    if not RULES[accept].lossless:
        exact = f"LOSSY ({accept})"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s · {stats.tokens_per_second:.1f} tokens/s · "
        f"{stats.tokens_per_step:.2f} tokens/step · {stats.drafter} · {exact}"
    )


def counting_bars(shown: bool = True, **options: Any) -> Progress:
    """Bars with counts, time taken and time left."""
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
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, disable=not (shown and err.is_terminal), **options)


@contextmanager
def progress_bars() -> Iterator[Any]:
    with counting_bars() as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=of)

        yield progress


@contextmanager
def busy(what: str) -> Iterator[None]:
    if err.is_terminal:
        with err.status(what + " …"):
            yield
    else:
        yield
