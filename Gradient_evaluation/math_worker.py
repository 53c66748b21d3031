"""Math-Verify under a time limit that holds in every thread: one helper process, asked over a pipe.

The library limits its time by signal.alarm, which works in a main thread only, while VERL calls rewards
from worker threads: without the limit, an answer such as 9^{9^{9}} would hang training for good. So the
library runs in the main thread of a helper process (this file, as a script), which also keeps its memory
and any crash away from the run. One JSON line each way; the helper ends when its input does.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading

START_LIMIT = 120.0  # seconds for the helper to import Math-Verify, on a busy machine
ANSWER_LIMIT = 60.0  # seconds before a helper stuck beyond the library's own limits is ended
MEMORY_LIMIT = 4 << 30  # bytes of address space for the helper


class MathWorker:
    """The helper process, started at the first question and again after it died. Safe in threads and forks."""

    def __init__(self):
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.close)

    def _reset(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, text: str | None, gold: str) -> bool:
        """Does ``text`` hold an answer equal to ``gold``? Without a text: can ``gold`` be parsed?

        Failures and timeouts inside the library count as no. Raises UserError if it cannot be imported.
        """
        question = (json.dumps([text, gold]) + "\n").encode()
        with self._lock:
            for _ in range(2):  # a helper that had died while idle is replaced once
                if self._process is None:
                    self._start()
                try:
                    self._process.stdin.write(question)
                except OSError:
                    self._stop()
                    continue
                answer = self._read_line(ANSWER_LIMIT)
                if answer is None:
                    self._stop()
                return answer == b"1"
        return False

    def close(self):
        with self._lock:
            self._stop()

    def _start(self):
        from Gradient_evaluation.errors import UserError

        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        if self._read_line(START_LIMIT) != b"ready":
            self._stop()
            raise UserError("--reward math needs the package math-verify: pip install 'math-verify[antlr4_13_2]'")

    def _read_line(self, limit: float) -> bytes | None:
        """The helper's next line; None if it ended or said nothing for ``limit`` seconds."""
        pipe = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(limit):
                return None
        return pipe.readline().strip() or None

    def _stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


MATH_WORKER = MathWorker()


def _serve():
    """The helper: answer each line [text or null, gold] with 1 or 0."""
    import contextlib
    import logging
    import signal
    from functools import lru_cache

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; the helper ends with its input
    sys.path.pop(0)  # this file's folder: a module beside it must not stand in for a library's
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.disable(logging.CRITICAL)
    parse_gold = lru_cache(maxsize=1024)(parse)
    answers.write(b"ready\n")
    for line in sys.stdin.buffer:
        text, gold = (part and part.replace("\u2212", "-") for part in json.loads(line))
        try:
            parsed = parse_gold(gold)
            correct = bool(parsed) and (text is None or verify(parsed, parse(text)))
        except (Exception, TimeoutException):  # the latter is no Exception, and can escape as the alarm fires
            correct = False
        answers.write(b"1\n" if correct else b"0\n")


if __name__ == "__main__":
    _serve()
