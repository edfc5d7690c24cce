"""Commands in this process: the same code as in one of their own, without loading transformers each time."""

import io
import sys
from functools import cache

import pytest
from typer.main import get_command

from slipstream.cli import main

built = cache(get_command)  # typer makes all commands anew for each: that took most of the time of many


def command(*words, folder="."):
    """The exit code of a command, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("typer.main.get_command", built)
        patch.setattr(sys, "argv", ["slipstream", *map(str, words)])
        out, err = io.StringIO(), io.StringIO()
        # Not `file`, which names sys.stdout while nothing is set: putting that back would keep it for good.
        patch.setattr("slipstream.cli.terminal.out._file", out)
        patch.setattr("slipstream.cli.terminal.err._file", err)
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code or 0, out.getvalue(), err.getvalue()
