"""A helper process that answers lines with lines under a time limit. math_worker.py and own_reward.py ask one each.

It is started when it is asked, and again after it has died. A crash, an endless loop or a print of what runs in it ends or
harms the helper alone. It ends with its input, so it also ends with this process. The processes that it has started end with
it: they would keep this process's stderr open, and a pipe that reads it waiting.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class NoAnswer(Exception):
    """The helper said nothing in time (exit_code None), or it ended. It is stopped."""

    def __init__(self, exit_code: int | None = None):
        self.exit_code = exit_code


class HelperProcess:
    """command: of a process that reads a question from each line of its input. stderr: as subprocess.Popen takes it.

    Threads may share it, one ``asking`` at a time. After a fork the child starts a helper of its own.
    """

    def __init__(self, command: Sequence[str], stderr: int | None = None):
        self.command, self.stderr = list(command), stderr
        self._forget()

    def _forget(self) -> None:
        self._lock, self._owner, self._end = threading.Lock(), os.getpid(), None
        self.process: subprocess.Popen | None = None
        self._read = b""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """From a question to its last answer. An error in between stops the helper: what it still says answers nothing."""
        if self._owner != os.getpid():
            self._forget()  # the helper is that of the process this one was forked from
        with self._lock:
            try:
                yield
            except BaseException:  # also Ctrl-C
                self.stop()
                raise

    def start(self) -> None:
        """Start it. What it says first is read with ``line``."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            bufsize=0,
            start_new_session=True,  # a process group of its own
        )
        self._end = weakref.finalize(self, _end, self.process, os.getpid())

    def write(self, question: bytes) -> bool:
        """Give it a question, one line. False where it had ended; it is then stopped."""
        try:
            while question:
                question = question[self.process.stdin.write(question) :]
        except OSError:
            self.stop()
            return False
        return True

    def line(self, limit: float) -> bytes:
        """Its next line, without the line feed. Raises NoAnswer where it ends first, or says nothing for ``limit`` seconds."""
        deadline, pipe = time.monotonic() + limit, self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._read:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.stop()
                    raise NoAnswer
                part = os.read(pipe.fileno(), 1 << 16)
                if not part:
                    code = self.process.wait()
                    self.stop()
                    raise NoAnswer(code)
                self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def stop(self) -> None:
        """End it, where it runs."""
        if self._end is not None:
            self._end()
        self.process = self._end = None
        self._read = b""


def _end(process: subprocess.Popen, owner: int) -> None:
    """End a helper process and what it has started, unless it is that of the process which this one was forked from."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
