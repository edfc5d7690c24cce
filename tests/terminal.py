"""A program on a real pseudo-terminal: what a user sees, and what a user types."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from contextlib import suppress

from patience import PATIENCE

COLUMNS, ROWS = 100, 40
# What moves, colours and asks; a terminal shows none of it.
CONTROL = re.compile(r"\x1b\[[0-9;?>=]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """Starts `slipstream WORDS`, in a Python of its own or forked. `see` waits for a text that wasn't there before; one
    that never comes is a failure."""

    def __init__(self, *words, forked=None, **env):
        # It answers no questions about the cursor, so none should be asked.
        env = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
        if forked:
            self._master, theirs = pty.openpty()
            program = forked.start(*words, terminal=theirs, **env)
            os.close(theirs)
            self.pid, self._wait = program.pid, lambda: program.wait().returncode
        else:
            self.pid, self._master = pty.fork()
            self._wait = lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell in whose background tests run has it ignored
            os.execve(sys.executable, [sys.executable, "-m", "slipstream", *words], {**os.environ, **env})
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._raw, self._seen = "", 0
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end inside a letter

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._master)  # hangs up on a program that still runs
        with suppress(ChildProcessError):
            self._wait()

    @property
    def shown(self):
        return CONTROL.sub("", self._raw)

    def see(self, text):
        end = time.monotonic() + PATIENCE
        while (found := self.shown.find(text, self._seen)) < 0:
            if time.monotonic() > end or not self._read(PATIENCE):
                raise AssertionError(f"{text!r} never came; the screen has:\n{self.shown[self._seen :]}")
        self._seen = found + len(text)

    def type(self, keys):
        data = keys.encode()
        while data:  # a program that is busy writing reads nothing: look at it meanwhile
            while self._read(0):
                pass
            data = data[os.write(self._master, data[:1024]) :]

    def paste(self, text):
        """As terminals do it: between two marks, with carriage returns."""
        self.type("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def ended(self):
        """The exit code, once the program has ended."""
        while self._read(PATIENCE):
            pass
        return self._wait()

    def _read(self, patience):
        if not select.select([self._master], [], [], patience)[0]:
            return False
        try:
            self._raw += self._decode(os.read(self._master, 65536))
        except OSError:  # the program has ended
            return False
        return True
