"""The command line: parse, call the library, print. Heavy imports are inside the commands, so that --help is fast."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.cli.answer import generate, trace
from slipstream.cli.bench import bench
from slipstream.cli.chat import chat
from slipstream.cli.collect import collect
from slipstream.cli.embed import embed
from slipstream.cli.export import export
from slipstream.cli.heads import app as heads
from slipstream.cli.inform import demo, drafters, models, prepare
from slipstream.cli.plan import plan
from slipstream.cli.serve import serve
from slipstream.cli.store import app as store
from slipstream.cli.terminal import err, out
from slipstream.cli.train import train
from slipstream.cli.tune import tune
from slipstream.errors import SlipstreamError
from slipstream.version import __version__

app = typer.Typer(
    epilog="`slipstream --install-completion` sets up your shell to complete commands and options.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
store.command()(embed)
app.add_typer(store, name="store")
app.add_typer(heads, name="heads")
COMMANDS = (generate, chat, serve, trace, bench, plan, collect, train, tune, export, drafters, models, prepare, demo)
for command in COMMANDS:
    app.command()(command)


def show_version(asked: bool) -> None:
    if asked:
        out.print(f"slipstream {__version__}", markup=False)
        raise typer.Exit()


@app.callback()
def slipstream(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate with language models faster: lossless speculative decoding."""


def main() -> None:
    try:
        app()
    except SlipstreamError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
    except OSError as error:  # a file or folder that no command checked beforehand
        named = f"{error.filename}: " if error.filename else ""
        err.print(f"[red]error:[/red] {escape(f'{named}{error.strerror or error}')}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
