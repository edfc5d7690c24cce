"""Commands in this process: the same code as in one of their own, without loading transformers each time."""

import io
import sys

import pytest

from slipstream.cli import main


def command(*words, folder="."):
    """The exit code of a command, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["slipstream", *map(str, words)])
        out, err = io.StringIO(), io.StringIO()
        # Not `file`, which names sys.stdout while nothing is set: putting that back would keep it for good.
        patch.setattr("slipstream.cli.terminal.out._file", out)
        patch.setattr("slipstream.cli.terminal.err._file", err)
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code or 0, out.getvalue(), err.getvalue()
