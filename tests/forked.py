"""Programs in processes of their own that need not load torch and transformers first.

One process loads them and then becomes each program by forking, which takes milliseconds instead of eight seconds. It
runs nothing itself: threads would not be copied.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import sleep

from patience import PATIENCE


class Forker:
    def __init__(self):
        self._socket, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        self._replies, self._running = self._socket.makefile("rb"), None

    def start(self, *words, code=None, stdin="", folder=".", terminal=None, **environment):
        """`slipstream WORDS`, or Python code with these arguments. terminal: the program's end of a pseudo-terminal,
        in place of pipes."""
        given = {
            "words": ["slipstream", *map(str, words)],
            "code": code,
            "terminal": terminal is not None,
            "folder": str(Path(folder).absolute()),
            "environment": {**os.environ, **{name: str(value) for name, value in environment.items()}},
        }
        if self._running and self._running.returncode is None:  # left by a test that failed
            os.kill(self._running.pid, signal.SIGKILL)
            self._running.wait()
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by whoever waits)
        reading, writing = os.pipe()
        with tempfile.TemporaryFile("w+") as into:
            into.write(stdin)
            into.seek(0)
            request = json.dumps(given).encode() + b"\n"
            files = [into.fileno(), writing, errors.fileno()] if terminal is None else [terminal] * 3
            socket.send_fds(self._socket, [request[:1]], files)
            self._socket.sendall(request[1:])
            pid = int(self._replies.readline())
        os.close(writing)
        self._running = Started(pid, os.fdopen(reading), errors, self._replies)
        return self._running

    def run(self, *words, **how):
        return self.start(*words, **how).wait()

    def close(self):
        self._replies.close()
        self._socket.close()
        self._process.wait(PATIENCE)


class Started:
    """A program that runs. One at a time: wait for it before you start the next."""

    def __init__(self, pid, stdout, stderr, replies):
        self.pid, self._out, self._err, self._replies = pid, stdout, stderr, replies
        self.stdout, self.stderr, self.returncode = "", "", None

    def read(self, count):
        """The next letters that it prints."""
        self.stdout += (read := self._out.read(count))
        return read

    def first_complaint(self):
        """The first line that it writes to its standard error, once it is there."""
        while b"\n" not in (said := os.pread(self._err.fileno(), 1 << 16, 0)):  # the program's own place stays
            os.kill(self.pid, 0)
            sleep(0.01)
        return said.decode().partition("\n")[0]

    def wait(self):
        if self.returncode is not None:
            return self
        with self._out, self._err:
            self.stdout += self._out.read()
            self.returncode = int(self._replies.readline())
            self._err.seek(0)
            self.stderr = self._err.read()
        return self


def serve(connection):
    """Returns in the forked process, with what it shall become."""
    while True:
        first, files, *_ = socket.recv_fds(connection, 1, 3)
        if not first:
            sys.exit()
        with connection.makefile("rb", buffering=0) as rest:
            given = json.loads(first + rest.readline())
        child = os.fork()
        if child == 0:
            connection.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return given
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become(given):
    if given["terminal"]:
        os.login_tty(os.dup(0))  # Ctrl-C and hanging up reach this process
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    signal.alarm(PATIENCE)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in whose background tests run has it ignored
    sys.path[0] = ""  # not this folder: the tests' modules are nobody else's business
    if given["code"] is None:
        sys.argv = given["words"]
        runpy.run_module("slipstream", run_name="__main__")
    else:
        sys.argv = ["-c", *given["words"][1:]]
        exec(compile(given["code"], "<code>", "exec"), {"__name__": "__main__"})


def load():
    """All that commands import, also late."""
    import importlib
    import pkgutil

    import pydantic.main  # noqa: F401
    import rich._emoji_codes  # noqa: F401
    import typer.main
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    import slipstream
    from slipstream.tree import TokenTree

    for module in pkgutil.walk_packages(slipstream.__path__, "slipstream."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # kernels need triton
                importlib.import_module(module.name)
    from slipstream.cli import app

    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(app)  # made once for all
    assert TokenTree.chain(1, [2]).depth == 1  # numba makes itself ready at the first call
    with suppress(ImportError):  # a thousand patterns, which transformers compiles before its first model
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


if __name__ == "__main__":
    gc.disable()  # it would go through what stays, again and again
    load()
    gc.collect()
    gc.freeze()  # or each program's collector goes through all of it, and copies the pages
    gc.enable()
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
