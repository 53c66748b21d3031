"""When a run stops by itself: --until, when the answer is precise enough, and --minutes, when the time is over.

    watch = Watch(plan, settings, wanted)
    watch.advance()          reads what is measured by now; True when the answer is precise enough
    watch.stopping()         the entry ``stopping`` of the results
    stopping_report(entry)   in words

The answer is looked at after 20 prompts, and after every tenth more (stats/precision.looks). A look uses the first n prompts
in seeded order, never one that happens to be finished before an earlier one. So a run that is killed and continued, or
shared by several processes, stops at the same prompt with the same results. Prompts beyond it stay in the folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from Gradient_evaluation.runs import gram_store
from Gradient_evaluation.runs.plan import Plan, refreshed
from Gradient_evaluation.runs.progress import time_text
from Gradient_evaluation.runs.resume import IDENTITY, read_identity
from Gradient_evaluation.runs.results import counted
from Gradient_evaluation.runs.summaries import Notes, theta_of
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.precision import Quantity, estimate_of, forecast, half_width, is_enough, looks
from Gradient_evaluation.stats.prompts import PromptMoments, joined, reduce_prompts


class Look(NamedTuple):
    """The answer of the first n prompts; ``reason``: why there is no value or no interval."""

    n_prompts: int
    value: float | None
    interval: list[float] | None
    reason: str | None


class Watch:
    """The answer of a run, as its prompts come in.

    plan: of the run; wanted(position): how many continuations the prompt at a position of ``plan.chosen`` gets.
    """

    def __init__(self, plan: Plan, settings: TracecovSettings, wanted: Callable[[int], int]):
        self.plan, self.settings, self.wanted = plan, settings, wanted
        self.quantity = Quantity.parse(settings.until_quantity)
        most = len(plan.chosen)
        self.schedule = sorted({*looks(most), most})
        self.looks: list[Look] = []
        self.enough = False
        self.notes, self.moments = Notes(), []

    @property
    def n_ready(self) -> int:
        """How many prompts are measured, of those in seeded order without a gap, as far as ``advance`` has read them."""
        return len(self.moments)

    def advance(self) -> bool:
        """Read the Grams of the prompts that are next in order, and look at the answer where it is time to.

        Returns whether the answer is precise enough; no Gram is read after that.
        """
        while not self.enough and self._read_next():
            if self.n_ready in self.schedule:
                self.looks.append(self.look())
                self.enough = self.settings.until is not None and is_enough(*self.looks[-1][1:3], self.settings.until)
        return self.enough

    def look(self) -> Look:
        """The answer of all prompts that ``advance`` has read."""
        prompts: PromptMoments = joined(self.moments)
        theta = theta_of(self.notes.sketched, read_identity(self.plan.grams / IDENTITY))
        bootstrap = PromptBootstrap(len(prompts), seed=self.settings.seed)
        value, low, high, reason = estimate_of(self.quantity, prompts, theta, bootstrap)
        return Look(len(prompts), value, None if low is None else [low, high], reason)

    def _read_next(self) -> bool:
        """Read the next prompt in order; False where it is not there, or has fewer continuations than it will have."""
        position = self.n_ready
        if position == len(self.plan.chosen):
            return False
        path = gram_store.path_of(self.plan.grams, self.plan.chosen[position].row.prompt_id)
        if not path.exists():
            return False
        record = refreshed(gram_store.load(path), self.plan, position)
        if len(record.rewards) + (record.n_left_out or 0) < self.wanted(position):
            return False
        self.moments.append(reduce_prompts(self.notes.passing([record]), self.sizes, self.quantity.estimators))
        return True
