"""How far a run is: a line on the terminal, or in a log one line a minute.

12/40 [00:31<01:12, 2.6s/prompt, 410 continuations/s, mean V 0.43]      on a terminal
120/500 prompts, 31 min, about 1.6 h left, mean reward 0.43             in a log
G* 5.8 [4.1, 9.0] after 34 prompts, about 3 min to +-20%                where a run stops when the answer is precise enough
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from Gradient_evaluation.runs.machine.durations import time_text
from Gradient_evaluation.runs.machine.processes import Processes

EVERY = 60  # seconds between two lines of a log


class Progress:
    """The progress of the first process, on stderr; nothing under --quiet.

    total: number of prompts, None where the run stops by itself. before: how many of them an earlier run has measured.
    name: of the value whose mean is shown. clock: seconds.
    """

    def __init__(
        self,
        total: int | None,
        before: int,
        name: str,
        quiet: bool,
        processes: Processes,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.processes, self.name, self.clock, self.total, self.before = processes, name, clock, total, before
        self.answer = ""  # what the run knows of its answer so far
        shown, terminal = not quiet and processes.is_first, sys.stderr.isatty()
        self.in_log = shown and not terminal
        form = {} if total is not None else {"bar_format": "{desc}"}
        self.bar = tqdm(
            total=total, initial=before, unit="prompt", leave=False, mininterval=0, disable=not (shown and terminal), **form
        )
        self.started = self.said = clock()
        self.values: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def done(self, value: float, continuations: int) -> None:
        """Count one more prompt. value: for the running mean. continuations: how many this prompt took."""
        self.values.append(value)
        count, now = self.processes.count(), self.clock()
        passed = now - self.started
        mean = f"mean {self.name} {sum(self.values) / len(self.values):.3g}"
        if self.total is None:
            self.bar.set_description_str(self._open(count, mean), refresh=False)
        else:
            rate = count * continuations / max(passed, 1e-9)
            self.bar.set_postfix_str(f"{rate:,.0f} continuations/s, {mean}", refresh=False)
        self.bar.update(self.before + count - self.bar.n)
        if self.in_log and now - self.said >= EVERY:
            self.said = now
            print(self._line(count, passed, mean), file=sys.stderr, flush=True)

    def _line(self, count: int, passed: float, mean: str) -> str:
        if self.total is None:
            return f"{time_text(passed)}: {self._open(count, mean)}"
        left = (self.total - self.before - count) * passed / count
        return f"{self.before + count}/{self.total} prompts, {time_text(passed)}, about {time_text(left)} left, {mean}"

    def _open(self, count: int, mean: str) -> str:
        return self.answer or f"{self.before + count} prompts, {mean}"
