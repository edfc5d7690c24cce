"""The command line: parses, calls, prints. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import sys

import typer
from rich.markup import escape

from slipstream.cli.answer import chat, generate, trace
from slipstream.cli.bench import bench
from slipstream.cli.collect import collect
from slipstream.cli.embed import embed
from slipstream.cli.export import export
from slipstream.cli.inform import demo, drafters, models
from slipstream.cli.store import app as store
from slipstream.cli.terminal import err
from slipstream.cli.train import train
from slipstream.errors import SlipstreamError

app = typer.Typer(
    help="Lossless speculative decoding: the same answers, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
store.command()(embed)
app.add_typer(store, name="store")
for command in (generate, chat, trace, bench, collect, train, export, drafters, models, demo):
    app.command()(command)


def main() -> None:
    try:
        app()
    except SlipstreamError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
