"""A race on the terminal: plain decoding against speculation, side by side, each with a clock of its own."""

from __future__ import annotations

from time import perf_counter

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from slipstream.answers import Stream
from slipstream.llm import LLM

PROMPT = """Copy this text and correct the spelling.

The old lighthouse stood on a rocky cliff above the sea. Every evening the keeper climed the two hundred steps to \
light the lamp. One stormy night a small fishing boat lost its way. The keeper saw its faint light and rang the \
great bell until morning. When the sun rose, the boat was safe in the harbor, and the fisherman came to thank him."""


GAINED = 1.1  # × as fast; if less was gained, the demo says why


class Runner:
    """One of the two contestants, with the time that it has used itself."""

    def __init__(self, title: str, stream: Stream) -> None:
        self.title, self.stream, self._pieces = title, stream, iter(stream)
        self.text, self.seconds, self.done = "", 0.0, False

    def advance(self) -> None:
        start = perf_counter()
        piece = next(self._pieces, None)
        self.seconds += perf_counter() - start
        self.done = piece is None
        self.text += piece or ""

    @property
    def rate(self) -> float:
        stats = self.stream.stats
        return stats.new_tokens / self.seconds if stats and self.seconds else 0.0

    def panel(self, width: int, height: int) -> Panel:
        tail = "\n".join(self.text.splitlines()[-height:])
        foot = f"{self.rate:.1f} tokens/s" + ("  ✓ done" if self.done else "")
        return Panel(Text(tail), title=self.title, subtitle=foot, width=width, height=height + 2)


def race(llm: LLM, prompt: str, drafter: str, max_new_tokens: int, console: Console) -> None:
    runners = [
        Runner("plain", llm.stream(prompt, max_new_tokens=max_new_tokens, max_draft=0)),
        Runner(f"slipstream ({drafter})", llm.stream(prompt, max_new_tokens=max_new_tokens)),
    ]
    console.print(Panel(Text(prompt), title="prompt"), soft_wrap=False)
    if console.is_terminal:
        width, height = console.width // 2 - 1, min(18, max(8, console.height - 6))
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            while not all(r.done for r in runners):
                # The one that has used less time goes next, so that both clocks advance together on the screen.
                min((r for r in runners if not r.done), key=lambda r: r.seconds).advance()
                live.update(Columns([r.panel(width, height) for r in runners]))
    while not all(r.done for r in runners):
        min((r for r in runners if not r.done), key=lambda r: r.seconds).advance()
    plain, fast = runners
    console.print(Panel(Text(fast.text), title=fast.title), soft_wrap=False)
    same = plain.stream.result.tokens == fast.stream.result.tokens
    for r in runners:
        stats = r.stream.result.stats
        console.print(
            f"{r.title:24} {stats.new_tokens} tokens in {r.seconds:.2f} s: {r.rate:.1f} tokens/s, "
            f"{stats.tokens_per_step:.2f} tokens per step"
        )
    verdict, gained = "the texts are identical" if same else "THE TEXTS DIFFER", plain.seconds / fast.seconds
    console.print(f"[bold]{gained:.2f} × as fast; {verdict}.[/bold]")
    if gained < GAINED:
        console.print(why_not(plain, fast))


def why_not(plain: Runner, fast: Runner) -> str:
    """Why speculation gained little."""
    slow, quick = plain.stream.result.stats, fast.stream.result.stats
    longer = (fast.seconds / quick.steps) / (plain.seconds / slow.steps)
    if quick.tokens_per_step < GAINED:
        return (
            "Little was gained: hardly a draft was right. A head that is trained for the model helps most where texts "
            "don't repeat themselves; `slipstream drafters` lists what can draft."
        )
    return (
        f"Little was gained: a step gave {quick.tokens_per_step:.1f} tokens and took {longer:.1f} × as long as a plain "
        "one. On this device a step's time grows with the tokens that it verifies."
    )
