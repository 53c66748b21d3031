"""When a run stops by itself: --until, when the answer is precise enough, and --minutes, when the time is over.

    until = Until(settings, plan, started)
    until.may_begin(processes)        whether a process takes a further prompt
    until.advance(processes)          after a prompt: is the answer precise enough now?
    until.stopping()                  the entry ``stopping`` of the results

The answer is looked at after 20 prompts, and after every tenth more (stats/precision.looks). A look uses the first n prompts
in seeded order, never one that happens to be finished before an earlier one. So a run that is killed and continued, or
shared by several processes, stops at the same prompt with the same results. Prompts beyond it stay in the folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.machine.durations import time_text
from Gradient_evaluation.runs.machine.processes import Processes
from Gradient_evaluation.runs.machine.resume import IDENTITY, read_identity
from Gradient_evaluation.runs.plan import Plan, as_drawn
from Gradient_evaluation.runs.results.stopping import ALL_PROMPTS, PRECISION, answer_text
from Gradient_evaluation.runs.results.summaries import Notes, theta_of
from Gradient_evaluation.settings import TracecovSettings, continuations_of
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.design import Spread, spread_of
from Gradient_evaluation.stats.group_size.precision import (
    Quantity,
    estimate_of,
    forecast,
    half_width,
    is_enough,
    looks,
    may_stop,
)
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.prompts import PromptMoments, joined, reduce_prompts

SPREAD_OF = 50  # prompts
ENOUGH = "enough"  # what the first process tells the others


class Look(NamedTuple):
    """The answer of the first n prompts; ``reason``: why there is no value or no interval."""

    n_prompts: int
    value: float | None
    interval: list[float] | None
    reason: str | None


class Until:
    """When a run stops, and its answer as the prompts come in.

    settings: of the run; the loop replaces them when the pilot has chosen --per_prompt. plan: of the run. started: when this
    call began, on ``clock`` (seconds).
    """

    def __init__(self, settings: TracecovSettings, plan: Plan, started: float, clock: Callable[[], float] = time.monotonic):
        self.settings, self.plan, self.clock = settings, plan, clock
        self.deadline = None if settings.minutes is None else started + 60 * settings.minutes
        self.quantity = Quantity.parse(settings.until_quantity or "G_star")
        most = len(plan.chosen)
        self.schedule = {*looks(most), most}
        self.looks: list[Look] = []
        self.enough = False
        self.choice = None  # of the pilot (runs/pilot.py)
        self.begun = clock(), 0
        self.notes, self.moments = Notes(), []

    @property
    def n_ready(self) -> int:
        """How many prompts ``advance`` has read: those that are measured, in seeded order without a gap."""
        return len(self.moments)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to measure: the answer is precise enough, or every prompt is measured."""
        self.advance()
        return self.enough or self.n_ready == len(self.plan.chosen)

    def end_after(self, seconds: float) -> None:
        """Begin no prompt after so many seconds from now."""
        self.deadline = min(self.deadline or math.inf, self.clock() + seconds)

    def may_begin(self, processes: Processes) -> bool:
        """Whether a further prompt is begun."""
        return not processes.is_told(ENOUGH) and (self.deadline is None or self.clock() < self.deadline)

    def advance(self, processes: Processes | None = None) -> None:
        """Read the Grams of the prompts that are next in order, and look at the answer where it is time to.

        No Gram is read after an answer that is precise enough. The first process tells the others.
        """
        while not self.enough and self._read_next():
            if self.n_ready in self.schedule:
                self.looks.append(self.look())
                self.enough = may_stop([*map(self._is_enough, self.looks)], self.n_ready == len(self.plan.chosen))
        if self.enough and processes is not None:
            processes.tell(ENOUGH)

    def _is_enough(self, look: Look) -> bool:
        return self.settings.until is not None and is_enough(look.value, *(look.interval or [None, None]), self.settings.until)

    def look(self) -> Look:
        """The answer of all prompts that ``advance`` has read."""
        bootstrap = PromptBootstrap(self.n_ready, seed=self.settings.seed)
        value, low, high, reason = estimate_of(self.quantity, self.prompts(), self.theta(), bootstrap)
        return Look(self.n_ready, value, None if low is None else [low, high], reason)

    def _read_next(self) -> bool:
        """Read the next prompt in order; False where it is not there, or has fewer continuations than it is to have."""
        order = self.n_ready
        if order == len(self.plan.chosen):
            return False
        path = gram_store.path_of(self.plan.grams, self.plan.chosen[order].row.prompt_id)
        if not path.exists():
            return False
        record = as_drawn(gram_store.load(path), self.plan, order)
        if not (self.settings.pilot or self.settings.rollouts) and record.n_drawn < continuations_of(self.settings):
            return False
        self.moments.append(
            reduce_prompts(self.notes.passing([record]), [self.quantity.K] if self.quantity.K else [], self.quantity.names)
        )
        return True

    def prompts(self) -> PromptMoments:
        """The moments of all prompts that ``advance`` has read, in the order of their source as the results have them."""
        return joined([self.moments[order] for order in self._by_row()])

    def theta(self):
        """The sketches of their mean gradients."""
        return theta_of(self.notes.sketched.select(self._by_row()), read_identity(self.plan.grams / IDENTITY))

    def spread(self) -> Spread | Missing:
        """How much the prompts differ, and how much the continuations of one add to that; from the first ``SPREAD_OF``."""
        first = self.plan.chosen[: min(self.n_ready, SPREAD_OF)]
        paths = [gram_store.path_of(self.plan.grams, each.row.prompt_id) for each in first]
        theta = theta_of(self.notes.sketched.select(range(len(first))), read_identity(self.plan.grams / IDENTITY))
        return spread_of(self.quantity, [gram_store.load(path) for path in paths], theta)

    def _by_row(self) -> list[int]:
        return sorted(range(self.n_ready), key=lambda order: self.plan.chosen[order].index)

    def so_far(self) -> str:
        """The answer at the last look, in one line, and how much is missing; "" before the first look."""
        if not self.looks:
            return ""
        more = self._more_prompts(self.looks[-1])
        seconds = self._seconds(more)
        missing = "" if seconds is None else f", about {time_text(seconds)} to +-{self.settings.until:.0%}"
        return f"{answer_text(str(self.quantity), *self.looks[-1][1:3])} after {self.looks[-1].n_prompts} prompts{missing}"

    def stopping(self) -> dict:
        """The entry ``stopping`` of the results: why the run ends here, and what is missing.

        Raises UserError where the time was over before a prompt was measured.
        """
        self.advance()
        minutes, n = self.settings.minutes, self.n_ready
        if n == 0:
            raise UserError(f"--minutes {minutes:g}: over before a prompt was measured; raise it")
        last = self.looks[-1] if self.looks and self.looks[-1].n_prompts == n else self.look()
        is_last, more = n == len(self.plan.chosen), None if self.enough else self._more_prompts(last)
        rest = [gram_store.path_of(self.plan.grams, each.row.prompt_id) for each in self.plan.chosen[n:]]
        return {
            "until": self.settings.until,
            "quantity": str(self.quantity),
            "reached": self.enough,
            "stopped_by": PRECISION if self.enough else ALL_PROMPTS if is_last else f"{minutes:g} minutes",
            **last._asdict(),
            "half_width": half_width(last.value, *last.interval) if last.interval else None,
            "more_prompts": more,
            "more_seconds": None if is_last else self._seconds(more),
            "n_unused": sum(path.exists() for path in rest),
            "looks": [look._asdict() for look in self.looks],
        }

    def _more_prompts(self, look: Look) -> int | None:
        """About how many more prompts than now the answer needs; None where that is not known."""
        if self.settings.until is None or look.interval is None:
            return None
        needed = forecast(look.value, *look.interval, look.n_prompts, self.settings.until)
        return None if needed is None else max(1, needed - self.n_ready)

    def restart_clock(self) -> None:
        """What a prompt takes is measured from here on."""
        self.begun = self.clock(), self.n_ready

    def _seconds(self, prompts: int | None) -> float | None:
        """What so many prompts take, as those since ``restart_clock``; None where there were none."""
        begun, before = self.begun
        if prompts is None or self.n_ready == before:
            return None
        return prompts * (self.clock() - begun) / (self.n_ready - before)
