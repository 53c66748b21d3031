"""One line on stderr while prompts are measured: how many are done, how fast, how long still, and a running mean."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from Gradient_evaluation.runs.processes import Processes


class Progress:
    """``12/40 [00:31<01:12, 2.6s/prompt, 410 continuations/s, mean V 0.43]``, on a terminal, by the first process.

    total, before: prompts in all, and those already measured by an earlier run; name: of the running mean.
    """

    def __init__(self, total: int, before: int, name: str, quiet: bool, processes: Processes):
        self.processes, self.name = processes, name
        self.bar = tqdm(
            total=total,
            initial=before,
            unit="prompt",
            leave=False,
            mininterval=0,
            disable=quiet or not processes.is_first or not sys.stderr.isatty(),
        )
        self.started, self.before = time.monotonic(), before
        self.values: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def done(self, value: float, continuations: int) -> None:
        """One more prompt: its value for the running mean, and how many continuations each prompt takes."""
        self.values.append(value)
        count = self.processes.count()
        rate = count * continuations / (time.monotonic() - self.started)
        mean = sum(self.values) / len(self.values)
        self.bar.set_postfix_str(f"{rate:,.0f} continuations/s, mean {self.name} {mean:.3g}", refresh=False)
        self.bar.update(self.before + count - self.bar.n)
