"""Math-Verify with a time limit that works in every thread: it runs in a helper process, which is asked over a pipe.

The library limits its time by signal.alarm, which works in a main thread only. VERL calls rewards from other threads.
Without a limit, an answer such as 9^{9^{9}} would stop the training forever. So the library runs in the main thread of
a helper process (this file, run as a script). A crash or a memory error of the library ends only the helper. Question
and answer are one line each. The helper ends when its input is closed.
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
ANSWER_LIMIT = 60.0  # seconds for an answer, longer than the library's own limits; then the helper is killed
MEMORY_LIMIT = 4 << 30  # bytes of address space for the helper


class MathWorker:
    """The helper process. It starts at the first question, and again after it has died. Threads and forks may use it."""

    def __init__(self):
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.close)

    def _reset(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, text: str | None, gold: str) -> bool:
        """Whether ``text`` contains an answer equal to ``gold``; with text None, whether ``gold`` can be parsed.

        False if the library fails or takes too long. Raises UserError if the library cannot be imported.
        """
        question = (json.dumps([text, gold]) + "\n").encode()
        with self._lock:
            for _ in range(2):  # if the helper has died while idle, a new one is asked
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
        """The helper's next line; None if it ended or wrote nothing for ``limit`` seconds."""
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

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the helper ends with its input
    sys.path.pop(0)  # this file's folder: its modules must not hide modules of libraries
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints goes to stderr, not among the answers
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
        except (Exception, TimeoutException):  # TimeoutException is no Exception, and the library may not catch it
            correct = False
        answers.write(b"1\n" if correct else b"0\n")


if __name__ == "__main__":
    _serve()
