"""chat: chat with a model, which loads while the first message is typed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slipstream.cli import options as o
from slipstream.cli.conversation import COMMANDS, Conversation, Quit
from slipstream.cli.prompt import PlainLines, TypedLines
from slipstream.cli.terminal import ensure_embedded, err, open_llm
from slipstream.errors import ModelError, SlipstreamError
from slipstream.kept import cache_folder

if TYPE_CHECKING:
    from slipstream.llm import LLM


def chat(
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    head: o.Heads = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 1024,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    max_draft: o.MaxDraft = None,
    accept: o.Accept = "match",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    compile: o.Compile = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Chat with a model.

    Enter sends, Alt+Enter adds a line, /help lists commands, Ctrl-C stops an answer, Ctrl-D quits.
    """
    typed = sys.stdin.isatty()
    pairs = o.drafter_options(option, drafter_path, head)
    loading = Loading(
        lambda: open_llm(model, drafter, pairs, dtype, device, trust_remote_code, compile, shown=not typed)
    )
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "max_draft": max_draft,
        "accept": accept,
    }
    code = 0
    try:
        if model is None:
            ensure_embedded()  # before the prompt: its progress bar needs the screen
        lines = typed_lines(loading) if typed else plain_lines(loading)
        run_chat(Conversation(loading.result, system, options, lines), lines)
    except ModelError as error:
        err.print(f"[red]error:[/red] {escape(' '.join(str(error).split()))}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    loading.exit_if_loading(code)
    raise typer.Exit(code)


def typed_lines(loading: Loading) -> TypedLines:
    hints = {usage.split()[0]: description for usage, description in COMMANDS.items()}
    err.print("[dim]Enter sends, Alt+Enter adds a line, Ctrl-D quits, /help lists commands.[/dim]")
    return TypedLines(hints, cache_folder() / "chat-history", loading.start)


def plain_lines(loading: Loading) -> PlainLines:
    loading.result()  # standard input is no terminal: there is no prompt to show meanwhile
    return PlainLines()


def run_chat(conversation: Conversation, lines: PlainLines | TypedLines) -> None:
    for line in lines:
        try:
            conversation.handle(line)
        except Quit:
            return
        except LoadingError:
            raise
        except SlipstreamError as error:  # one turn failed; the chat goes on
            err.print(f"[red]{escape(str(error))}[/red]")
        except KeyboardInterrupt:  # while the model was loading
            err.print("[yellow](stopped)[/yellow]")


class LoadingError(ModelError):
    """The model of a chat could not be loaded."""


class Loading:
    """Loads a model in a thread of its own, which the first call of `start` or `result` begins."""

    def __init__(self, load: Callable[[], LLM]) -> None:
        self._load = load
        self._future: Future[LLM] | None = None

    def start(self) -> Future[LLM]:
        if self._future is None:
            self._future = Future()
            # A running future can't be cancelled: loading goes on when a prompt ends and stops waiting for it.
            self._future.set_running_or_notify_cancel()
            threading.Thread(target=self._run, args=(self._future,), daemon=True).start()
        return self._future

    def result(self) -> LLM:
        """Wait for the model, 0.2 s at a time: a Ctrl-C just before a wait is handled only after that wait."""
        future = self.start()
        while not wait([future], timeout=0.2).done:
            pass
        return future.result()

    def exit_if_loading(self, code: int) -> None:
        """End the process at once if the model is still loading. An ordinary exit would stop the thread inside
        libraries, which crash then."""
        if self._future is not None and not self._future.done():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run(self, future: Future[LLM]) -> None:
        try:
            future.set_result(self._load())
        except SlipstreamError as error:
            future.set_exception(LoadingError(str(error)))
        except BaseException as error:
            future.set_exception(LoadingError(f"the model can't be loaded: {type(error).__name__}: {error}"))
