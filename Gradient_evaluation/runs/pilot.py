"""How many continuations should each prompt get? The first prompts of a run decide, with what they cost on this machine.

    settings = with_choice(settings)        --per_prompt as an earlier call chose it; before that, the pilot's own
    settings = with_pilot(loop, settings)   measures the pilot's prompts, chooses, and stores the choice in run.json

A prompt costs c_p + n c_s seconds with n continuations. Prompts differ from each other, and n continuations of one know it
with an error that falls as 1/n. The n that gives the narrowest interval for the time does not depend on how much time there
is (stats/group_size/design.py). The pilot's prompts are used in the results: unequal numbers of continuations are unbiased.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from Gradient_evaluation.runs.inputs.dataset import finite_at
from Gradient_evaluation.runs.loop import Loop
from Gradient_evaluation.runs.machine.files import write_json
from Gradient_evaluation.runs.machine.resume import IDENTITY, PILOT, read_identity
from Gradient_evaluation.runs.plan import PILOT_CONTINUATIONS, PILOT_PROMPTS, Chosen, left
from Gradient_evaluation.runs.until import Until
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats.group_size.design import best_continuations
from Gradient_evaluation.stats.missing import Missing

FEWER = 4  # continuations of the second timing
PLAN_SECONDS, PLAN_PROMPTS = 120, 24  # of a pilot for --plan, which forecasts more than a number of continuations


class Pair(NamedTuple):
    """Seconds of one prompt, measured with PILOT_CONTINUATIONS, with FEWER, and of all that is done besides measuring it."""

    many: float
    few: float
    besides: float


@dataclass(frozen=True)
class Choice:
    """What the pilot found; as run.json has it."""

    continuations: int  # of each further prompt
    seconds_per_prompt: float
    seconds_per_continuation: float
    peak_memory: int  # bytes: of the GPU, else of this process
    reason: str | None  # why the continuations are not those that METHOD 8.6 gives

    def __str__(self) -> str:
        costs = costs_text(self.seconds_per_prompt, self.seconds_per_continuation)
        return f"{self.continuations} continuations of each prompt: on this machine {costs}; {self.reason}"


def costs_text(seconds_per_prompt: float, seconds_per_continuation: float) -> str:
    """The costs in words."""
    return f"a prompt costs {seconds_per_prompt:.2g} s and a continuation {seconds_per_continuation:.2g} s"


def stored_choice(grams: Path) -> Choice | None:
    """The choice that an earlier call has stored beside these Grams."""
    path = grams / IDENTITY
    found = read_identity(path).get(PILOT) if path.exists() else None
    return None if found is None else Choice(**found)


def with_choice(settings: TracecovSettings) -> TracecovSettings:
    """The settings with the --per_prompt that a pilot has chosen, or with the pilot's own before that."""
    if not settings.pilot:
        return settings
    choice = None if settings.overwrite else stored_choice(Path(settings.save_json) / "grams")
    return replace(settings, per_prompt=choice.continuations if choice else PILOT_CONTINUATIONS)


def costs(pairs: Sequence[Pair]) -> tuple[float, float]:
    """(seconds per prompt, seconds per continuation) from the prompts that were timed twice.

    The two timings are of one prompt, so its length is in both. A difference that is lost in the clock's noise (a GPU takes
    as long for 4 continuations as for 16) counts as a hundredth of the whole.
    """
    whole = statistics.median(pair.many for pair in pairs)
    difference = statistics.median(pair.many - pair.few for pair in pairs)
    each = max(difference, 0.01 * whole) / (PILOT_CONTINUATIONS - FEWER)
    return max(0.0, whole - PILOT_CONTINUATIONS * each) + statistics.median(pair.besides for pair in pairs), each


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: of the GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def with_pilot(loop: Loop, settings: TracecovSettings) -> TracecovSettings:
    """The settings with the --per_prompt that the first prompts of the run choose: now, or in an earlier call."""
    processes, plan, source = loop.processes, loop.plan, loop.measurement.source
    choice = processes.from_first(stored_choice, plan.grams)
    if settings.plan:
        loop.until.end_after(PLAN_SECONDS)
    if choice is None:
        items = processes.from_first(left, plan, PLAN_PROMPTS if settings.plan else PILOT_PROMPTS)
        pairs = [pair for each in processes.gather(timed(loop, items)) for pair in each]
        memory = max(processes.gather(peak_memory(processes.device)))
        choice = processes.from_first(choose, loop.until, pairs, memory)
    loop.until.choice = choice
    if choice is not None:
        settings = replace(settings, per_prompt=choice.continuations)
        source.settings = loop.until.settings = settings
        if processes.is_first and not settings.plan:
            print(choice, flush=True)
    return settings


def timed(loop: Loop, items: Sequence[Chosen]) -> list[Pair]:
    """Measure the pilot's prompts that this process takes. Returns the times of every second one of them.

    Where an earlier call has measured them all and chosen nothing, the first two are timed, and measured for nothing else.
    """
    pairs, rehearse = [], loop.measurement.rehearse

    def seconds(each: Chosen, count: int) -> float:
        begun = time.monotonic()
        finite_at(each.row, rehearse, each.row, each.prompt_ids, count)
        return time.monotonic() - begun

    def time_again(each: Chosen, measured: float, besides: float) -> None:
        if each.row.prompt_id in again:
            pairs.append(Pair(measured, seconds(each, FEWER), besides))

    again = {each.row.prompt_id for each in items[1::2]}
    loop.measure(items, PILOT, time_again)
    if not again and loop.processes.is_first:
        pairs += [Pair(seconds(each, PILOT_CONTINUATIONS), seconds(each, FEWER), 0.0) for each in loop.plan.chosen[:2]]
    return pairs


def choose(until: Until, pairs: Sequence[Pair], memory: int) -> Choice | None:
    """What the pilot's prompts say. It is stored in run.json once they are all measured.

    None where the time was over before, except for --plan, which says what there is to say.
    """
    until.advance()
    complete = until.n_ready >= min(PILOT_PROMPTS, len(until.plan.chosen))
    if not pairs or until.n_ready < 2 or not (complete or until.settings.plan):
        return None
    spent = costs(pairs)
    n, reason = continuations(until, *spent)
    choice = Choice(n, *spent, memory, reason)
    if complete:
        path = until.plan.grams / IDENTITY
        write_json(path, {**read_identity(path), PILOT: asdict(choice)})
    return choice


def continuations(until: Until, per_prompt: float, per_continuation: float) -> tuple[int, str]:
    """(how many continuations each further prompt gets, why), at these costs in seconds."""
    most, spread = until.plan.identity["largest_block"], until.spread()
    if isinstance(spread, Missing):
        return min(PILOT_CONTINUATIONS, most), f"as many as the first prompts had ({spread.reason})"
    n = best_continuations(spread, per_prompt, per_continuation)
    return min(n, most), "the narrowest interval for the time" if n <= most else f"more than a block of {most} would take"
