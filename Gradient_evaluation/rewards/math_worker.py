"""Math-Verify with a time limit that works in every thread: it runs in a helper process, which is asked over a pipe.

The library limits its time by signal.alarm, which works in a main thread only. VERL calls rewards from other threads.
Without a limit, an answer such as 9^{9^{9}} would stop the training forever. So the library runs in the main thread of
a helper process (this file, run as a script). A crash or a memory error of the library ends only the helper.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
from Gradient_evaluation.rewards.helper_process import HelperProcess, NoAnswer

START_LIMIT = 120.0  # seconds for the helper to import Math-Verify, on a busy machine
ANSWER_LIMIT = 60.0  # seconds for an answer, longer than the library's own limits; then the helper is killed
MEMORY_LIMIT = 4 << 30  # bytes of address space for the helper


class MathWorker:
    """The helper process, which is asked whether answers are equal. Threads and forks may use it."""

    def __init__(self):
        self._helper = HelperProcess([sys.executable, os.path.abspath(__file__)], stderr=subprocess.DEVNULL)

    @property
    def _process(self) -> subprocess.Popen | None:
        return self._helper.process

    def ask(self, text: str | None, gold: str) -> bool:
        """Whether ``text`` contains an answer equal to ``gold``; with text None, whether ``gold`` can be parsed.

        False if the library fails or takes too long. Raises UserError if the library cannot be imported.
        """
        question = (json.dumps([text, gold]) + "\n").encode()
        with self._helper.asking():
            for _ in range(2):  # if the helper has died while idle, a new one is asked
                if self._helper.process is None:
                    self._start()
                if self._helper.write(question):
                    return self._line(ANSWER_LIMIT) == b"1"
        return False

    def close(self) -> None:
        """End the helper process."""
        with self._helper.asking():
            self._helper.stop()

    def _start(self) -> None:
        from Gradient_evaluation.errors import UserError

        self._helper.start()
        if self._line(START_LIMIT) != b"ready":
            raise UserError("--reward math needs the package math-verify: pip install 'math-verify[antlr4_13_2]'")

    def _line(self, limit: float) -> bytes | None:
        try:
            return self._helper.line(limit)
        except NoAnswer:
            return None


MATH_WORKER = MathWorker()


def _serve():
    """The helper: answer each line [text or null, gold] with 1 or 0."""
    import contextlib
    import logging
    import signal
    from functools import lru_cache

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the helper ends with its input
    sys.path.pop(0)  # the repository: its folders must not hide modules of libraries
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
