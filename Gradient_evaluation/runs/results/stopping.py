"""Why a run has stopped, and what is missing, in words.

print(stopping_text(results["stopping"]))      the entry that runs/until.py makes
"stopped after 20 minutes with G* 5.8 [3.1, 12] from 34 prompts: about 40 more prompts (9 min) to +-20%; the same command
goes on"
"""

from __future__ import annotations

from collections.abc import Sequence

from Gradient_evaluation.runs.machine.durations import time_text
from Gradient_evaluation.runs.results.results_file import counted

PRECISION, ALL_PROMPTS = "precision", "all prompts"  # what a run is stopped by, beside its minutes


def answer_text(quantity: str, value: float | None, interval: Sequence[float | None] | None) -> str:
    """``"G* 5.8 [4.1, 9]"``."""
    if value is None:
        return f"no {quantity}"
    ends = "" if interval is None else " [{}, {}]".format(*("no bound" if end is None else f"{end:.3g}" for end in interval))
    return f"{quantity} {value:.3g}{ends}"


def stopping_text(found: dict) -> str:
    """Why a run has ended, and what is missing: the entry ``stopping`` of its results in words."""
    n, until = counted(found["n_prompts"], "prompt"), found["until"]
    answer = answer_text(found["quantity"], found["value"], found["interval"])
    if found["reached"]:
        text = f"stopped after {n}: {answer} is within +-{until:.0%}"
    elif found["stopped_by"] == ALL_PROMPTS:
        text = f"all {n} are measured, with {answer}"
    else:
        text = f"stopped after {found['stopped_by']} with {answer} from {n}"
    if found["value"] is None and found["reason"]:
        text += f" ({found['reason']})"
    if not found["reached"] and until is not None:
        text += f": {_missing(found)}"
    if found["n_unused"]:
        are = "is" if found["n_unused"] == 1 else "are"
        text += f"; {counted(found['n_unused'], 'more Gram')} in the folder {are} used when it goes on"
    return text


def _missing(found: dict) -> str:
    """How much is missing to --until, and how to go on."""
    more, seconds = found["more_prompts"], found["more_seconds"]
    missing = f"not within +-{found['until']:.0%}"
    if more is not None:
        took = "" if seconds is None else f" ({time_text(seconds)})"
        missing = f"about {counted(more, 'more prompt')}{took} to +-{found['until']:.0%}"
    if found["stopped_by"] == ALL_PROMPTS:
        return f"{missing}; raise --T, or give a larger table"
    return f"{missing}; the same command goes on"
