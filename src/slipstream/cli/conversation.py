"""A chat on the command line: questions, and commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.prompt import PlainLines, TypedLines
from slipstream.cli.terminal import busy, err, print_status, print_stream
from slipstream.errors import OptionError
from slipstream.user_files import write_text

if TYPE_CHECKING:
    from slipstream.llm import LLM, Chat
    from slipstream.stats import Stats

COMMANDS = {
    "/help": "list the commands",
    "/clear": "start a new conversation; the system message stays",
    "/save FILE": "write the conversation to a file, as JSON messages",
    "/system TEXT": "set the system message and start a new conversation",
    "/retry": "answer the last question again, with another seed",
    "/stats": "show statistics of the last answer and of all answers",
    "/quit": "end the chat",
}
NAMES = {usage.split()[0]: usage for usage in COMMANDS}
KEYS = "Enter sends, Alt+Enter adds a line. Ctrl-C stops an answer or clears the line, Ctrl-D quits."


class Quit(Exception):
    """The user ends the chat."""


class Conversation:
    """`llm` returns the model when it is loaded; `options` go to every answer; `lines` reads what the user types."""

    def __init__(
        self, llm: Callable[[], LLM], system: str | None, options: dict[str, Any], lines: PlainLines | TypedLines
    ) -> None:
        self._llm, self._system, self._options, self._lines = llm, system, options, lines
        self._chat: Chat | None = None
        self._reset()

    def handle(self, line: str) -> None:
        """Answer a question or carry out a command. A leading space lets a question begin with a slash."""
        if line.startswith("/"):
            self._run_command(line)
        elif line.strip():
            self._retries = 0
            # A terminal may send bytes that are not text; a tokenizer would refuse them.
            self._answer(line.strip().encode(errors="replace").decode())

    def _reset(self) -> None:
        if self._chat is not None:
            self._chat.close()
            self._chat = None
        self._question: str | None = None
        self._answered = False  # whether the last two messages are that question and its answer
        self._retries = 0
        self._past_stats: list[Stats] = []

    @property
    def _messages(self) -> list[dict[str, str]]:
        if self._chat is not None:
            return self._chat.messages
        return [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, question: str) -> None:
        self._question, self._answered = question, False
        options = dict(self._options)
        if options["seed"] is not None:
            options["seed"] += self._retries
        with self._lines.answering():
            with busy("loading the model"):
                llm = self._llm()
            self._chat = self._chat or llm.chat(self._system)
            before = len(self._messages)
            try:
                stream = self._chat.stream(question, **options)
                print_stream(stream)
            finally:
                self._answered = len(self._messages) > before
        if stream.stats:
            self._past_stats.append(stream.stats)
            print_status(stream.result, options["accept"])

    def _run_command(self, line: str) -> None:
        name, *rest = line.split(maxsplit=1)
        if name not in NAMES:
            raise OptionError(f"{name} is no command: /help lists them. To send it to the model, put a space before it")
        usage, arguments = NAMES[name], [word.strip() for word in rest]
        if bool(arguments) != (" " in usage):
            raise OptionError(f"{name} takes nothing else" if arguments else f"say {usage}")
        commands: dict[str, Callable[..., None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/save": self._save,
            "/system": self._set_system,
            "/retry": self._retry,
            "/stats": self._show_stats,
            "/quit": self._quit,
        }
        commands[name](*arguments)

    def _help(self) -> None:
        for usage, description in COMMANDS.items():
            err.print(f"{usage:14}{description}", markup=False)
        err.print(KEYS)

    def _clear(self) -> None:
        self._reset()
        err.print("the conversation begins anew")

    def _set_system(self, text: str) -> None:
        self._system = text
        self._reset()
        err.print("the system message is set, and the conversation begins anew")

    def _save(self, name: str) -> None:
        text = json.dumps(self._messages, ensure_ascii=False, indent=1) + "\n"
        try:
            write_text(Path(name).expanduser(), text)
        except (
            OptionError,
            ValueError,
            RuntimeError,
        ) as error:  # not writable, a name with a zero byte, an unknown ~user
            raise OptionError(f"/save {name}: nothing was written: {error}") from error
        err.print(f"wrote {name}", markup=False)

    def _retry(self) -> None:
        if self._question is None:
            raise OptionError("/retry: there is no question yet")
        if not self._options["temperature"]:
            err.print("[dim]at temperature 0 every seed gives the same answer: start the chat with -t 0.8, say[/dim]")
        dropped = self._messages[-2:] if self._answered else []
        del self._messages[len(self._messages) - len(dropped) :]
        self._retries += 1
        try:
            self._answer(self._question)
        finally:
            if not self._answered and dropped:  # there is no new answer: restore the old one
                self._messages.extend(dropped)
                self._answered = True

    def _show_stats(self) -> None:
        if not self._past_stats:
            raise OptionError("/stats: there is no answer yet")
        err.print(f"{'':26}{'last answer':>12}{f'all {len(self._past_stats)}':>12}")
        for (what, last), total in zip(
            totals(self._past_stats[-1:]).items(), totals(self._past_stats).values(), strict=True
        ):
            err.print(f"{what:26}{last:>12}{total:>12}", markup=False)

    def _quit(self) -> None:
        raise Quit


def totals(answers: list[Stats]) -> dict[str, str]:
    """The totals of several answers, as printed by /stats."""
    tokens, steps = sum(s.new_tokens for s in answers), sum(s.steps for s in answers)
    seconds = sum(s.seconds for s in answers)
    return {
        "tokens": str(tokens),
        "seconds": f"{seconds:.2f}",
        "seconds to first token": f"{sum(s.first_token_seconds for s in answers):.2f}",
        "tokens/s": f"{tokens / seconds:.1f}" if seconds else "-",
        "forward passes": str(steps),
        "tokens/step": f"{tokens / steps:.2f}" if steps else "-",
        "accepted drafted tokens": str(sum(s.accepted for s in answers)),
    }
