"""Input of a chat: a line editor on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import termios
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import PromptError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings


class PlainLines:
    """Standard input that is no terminal: each line is a message or a command."""

    def __iter__(self) -> Iterator[str]:
        try:
            for line in sys.stdin:
                yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input must be UTF-8 text: {error}") from error

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield


class TypedLines:
    """A prompt with editing, history, messages of several lines, and completion of commands.

    The prompt is drawn first. Then `start` is called, which begins to load the model and returns the same Future each
    time. If loading fails, the prompt raises its error.
    """

    def __init__(self, commands: dict[str, str], history: Path, start: Callable[[], Future[Any]]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output
        from prompt_toolkit.patch_stdout import StdoutProxy

        self._start, self._ready = start, False
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            rprompt=self._loading_note,
            completer=WordCompleter(list(commands), meta_dict=commands, sentence=True),
            history=_history(history),
            key_bindings=_keys(),
            enable_suspend=True,
            output=create_output(always_prefer_tty=True),
        )
        self._stderr_proxy = StdoutProxy(raw=True)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                with redirect_stderr(self._stderr_proxy):  # warnings while the model loads are printed above the prompt
                    line = self._session.prompt(pre_run=self._start_loading)
            except EOFError:
                return
            yield line

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While an answer is generated, keep what is typed or pasted for the next prompt: unechoed, whole and with its
        newlines. Ctrl-C still interrupts."""
        keyboard, screen = sys.stdin.fileno(), self._session.output
        before = termios.tcgetattr(keyboard)
        tty.setcbreak(keyboard)
        screen.enable_bracketed_paste()
        screen.flush()
        try:
            yield
        finally:
            screen.disable_bracketed_paste()
            screen.flush()
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)

    def _loading_note(self) -> str:
        return "" if self._ready or self._session.app.is_done else "loading the model …"

    def _start_loading(self) -> None:
        if not self._ready:
            self._session.app.create_background_task(self._load())

    async def _load(self) -> None:
        """Load the model in a background task of the prompt, which starts once the prompt is drawn."""
        import asyncio

        app = self._session.app
        try:
            await asyncio.wrap_future(self._start())
        except Exception as error:
            if not app.is_done:
                app.exit(exception=error)
        else:
            self._ready = True
            app.invalidate()


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: Any) -> None:
        if event.current_buffer.text.strip():  # an empty line does nothing
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")  # terminals send Alt+Enter as these two keys
    def add_line(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear(event: Any) -> None:
        event.current_buffer.reset()

    return keys


def _history(file: Path) -> History:
    from prompt_toolkit.history import FileHistory

    class KeptHistory(FileHistory):
        """History in a file that only its owner can read. If it can't be written, the chat works without history."""

        def load_history_strings(self) -> Any:
            with suppress(OSError):
                return super().load_history_strings()
            return []

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                super().store_string(string)

    return KeptHistory(file)
