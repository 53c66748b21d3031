"""How many continuations should each prompt get? The first prompts of a run decide, with what they cost on this machine.

    settings = with_choice(settings)      --per_prompt as an earlier call chose it; before that, the pilot's own
    pairs = timed(...)                    measures the pilot's prompts
    choose(...)                           stores the choice in run.json, where the same command finds it again

A prompt costs c_p + n c_s seconds with n continuations. The prompts differ from each other, and n continuations of one know
it with an error that falls as 1/n. METHOD: the n that gives the narrowest interval for the time does not depend on how much
time there is (stats/design.py). The pilot's prompts are used in the results: unequal numbers of continuations are unbiased.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from Gradient_evaluation.runs.files import write_json
from Gradient_evaluation.runs.plan import Chosen
from Gradient_evaluation.runs.resume import IDENTITY, PILOT, read_identity
from Gradient_evaluation.settings import TracecovSettings

PROMPTS, CONTINUATIONS = 8, 16  # of the pilot
FEWER = 4  # continuations of the second timing
TIMED = 2  # every second prompt is timed with FEWER continuations too


class Pair(NamedTuple):
    """Seconds of one prompt, measured with CONTINUATIONS, with FEWER, and of all that is done besides measuring it."""

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
        costs = f"a prompt costs {self.seconds_per_prompt:.2g} s and a continuation {self.seconds_per_continuation:.2g} s"
        return f"{self.continuations} continuations of each prompt: on this machine {costs}; {self.reason}"


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
    return replace(settings, per_prompt=choice.continuations if choice else CONTINUATIONS)


def costs(pairs: Sequence[Pair]) -> tuple[float, float]:
    """(seconds per prompt, seconds per continuation) from the prompts that were timed twice.

    The two timings are of one prompt, so its length is in both. A difference that is lost in the clock's noise (a GPU takes
    as long for 4 continuations as for 16) counts as a hundredth of the whole.
    """
    whole = statistics.median(pair.many for pair in pairs)
    difference = statistics.median(pair.many - pair.few for pair in pairs)
    each = max(difference, 0.01 * whole) / (CONTINUATIONS - FEWER)
    return max(0.0, whole - CONTINUATIONS * each) + statistics.median(pair.besides for pair in pairs), each


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: of the GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
