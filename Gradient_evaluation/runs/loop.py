"""The loop over prompts: each is measured, stored, counted, and where the run stops by itself the answer is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from Gradient_evaluation.runs.grow import whole_record
from Gradient_evaluation.runs.inputs.dataset import finite_at
from Gradient_evaluation.runs.machine.processes import Processes
from Gradient_evaluation.runs.machine.progress import Progress
from Gradient_evaluation.runs.measure import Measurement
from Gradient_evaluation.runs.plan import Chosen, Plan
from Gradient_evaluation.runs.until import Until


class Loop(NamedTuple):
    """One process's share of the prompts. until: None where every prompt is measured."""

    plan: Plan
    measurement: Measurement
    processes: Processes
    progress: Progress
    until: Until | None

    def measure(
        self, items: Sequence[Chosen], name: str = "prompts", timed: Callable[[Chosen, float, float], None] | None = None
    ):
        """Measure the ``items`` that this process takes. name: another one for every list of a run.

        timed: takes a prompt, the seconds of its measurement, and those of storing it and looking at the answer.
        """
        if self.until is not None and self.processes.is_first:
            self.until.advance(self.processes)
            self.until.restart_clock()
        order = {each.row.prompt_id: position for position, each in enumerate(self.plan.chosen)}
        for each in self.processes.share(items, name, self.may_begin):
            index, row, prompt_ids = each
            begun = time.monotonic()
            record = finite_at(row, whole_record, self.measurement, self.plan.grams, row, prompt_ids, index)
            measured = time.monotonic()
            replace(record, order=order[row.prompt_id]).save(self.plan.grams)
            if self.until is not None and self.processes.is_first:
                self.until.advance(self.processes)
                self.progress.answer = self.until.so_far()
            self.progress.done(float(record.rewards.mean()), len(record.rewards))
            if timed:
                timed(each, measured - begun, time.monotonic() - measured)

    def may_begin(self) -> bool:
        """Whether a further prompt is begun."""
        return self.until is None or self.until.may_begin(self.processes)
