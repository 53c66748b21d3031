"""How often does the 95% interval hold the truth where a run stops by itself? Simulated with the looks and the rule of --until.

python tests/stats/test_stopping.py            prints the table of docs/precision.md, minutes
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from abstract_policy import heavy_tailed, prompts_with, two_levels

from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.precision import Quantity, estimate_of, is_enough, looks, may_stop
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches

DRAWS = 250


def trace_answers(kind: str, spread: float, most: int, repeats: int):
    """For each run a function n → (value, low, high) of the trace of its first n prompts, and the truth."""
    generator, bootstraps = np.random.default_rng([4, most]), {n: PromptBootstrap(n, DRAWS) for n in looks(most)}
    for _ in range(repeats):
        values = heavy_tailed(generator, kind, spread, most)

        def answer(n, values=values):
            found = bootstraps[n].of_means([values[:n], np.ones(n)], np.divide)
            return found.value, *found.interval

        yield answer, 1.0


def group_size_answers(most: int, repeats: int, **model):
    """The same of G*, in the model of two levels."""
    generator, bootstraps = np.random.default_rng([5, most]), {n: PromptBootstrap(n, DRAWS) for n in looks(most)}
    for _ in range(repeats):
        (*moments, gradients), truth = two_levels(generator, most, **model)

        def answer(n, moments=moments, gradients=gradients):
            prompts = prompts_with(*(each[:n] for each in moments))
            return estimate_of(Quantity.parse("G_star"), prompts, Sketches(gradients[:n]), bootstraps[n])[:3]

        yield answer, truth["G_star"]


def stopped(runs, most: int, until: float) -> dict[str, float]:
    """Where runs stop: coverage at the first narrow interval, and at the second in a row (the rule); median prompts, share."""
    once, ruled, prompts, count = [], [], [], 0
    for answer, truth in runs:
        count, enough, first = count + 1, [], None
        for n in looks(most):
            value, low, high = answer(n)
            enough.append(is_enough(value, low, high, until))
            if enough[-1] and first is None:
                first = low <= truth <= high
            if may_stop(enough):
                ruled.append(low <= truth <= high)
                prompts.append(n)
                break
        if first is not None:
            once.append(first)
    share = len(ruled) / count
    return {"once": np.mean(once), "rule": np.mean(ruled), "prompts": np.median(prompts), "stopped": share}


CASES = {  # most prompts, precision, answers; what the coverage is to be at least
    "trace, gamma, 1.12, +-40%": (200, 0.4, lambda repeats: trace_answers("gamma", 1.12, 200, repeats), 0.88),
    "trace, gamma, 1.12, +-25%": (350, 0.25, lambda repeats: trace_answers("gamma", 1.12, 350, repeats), 0.90),
    "trace, lognormal, 0.5, +-20%": (120, 0.2, lambda repeats: trace_answers("lognormal", 0.5, 120, repeats), 0.88),
    "trace, lognormal, 1.24, +-30%": (350, 0.3, lambda repeats: trace_answers("lognormal", 1.24, 350, repeats), 0.88),
    "G*, two levels, +-25%": (80, 0.25, lambda repeats: group_size_answers(80, repeats, noise=1.0), 0.83),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_interval_holds_the_truth_where_a_run_stops(name):
    most, until, answers, least = CASES[name]
    found = stopped(answers(500), most, until)
    assert found["rule"] >= least and found["stopped"] > 0.9, found


def test_two_narrow_intervals_in_a_row_hold_the_truth_more_often_than_the_first():
    """Of heavy tails: a run whose prompts lack the large ones has a narrow interval below the truth."""
    found = stopped(trace_answers("lognormal", 1.24, 350, 150), 350, 0.3)
    assert found["rule"] > found["once"] + 0.01 and found["stopped"] > 0.95, found


def test_one_narrow_interval_ends_no_run_unless_every_prompt_is_measured():
    assert not may_stop([True]) and not may_stop([True, False, True]) and not may_stop([])
    assert may_stop([False, True, True]) and may_stop([False, True], is_last=True)
    assert not may_stop([True, True, False]) and not may_stop([True, False], is_last=True)


if __name__ == "__main__":
    print("| simulated | first narrow interval | two in a row (the rule) | prompts in the median |\n|---|---|---|---|")
    for name, (most, until, answers, _) in CASES.items():
        found = stopped(answers(500), most, until)
        print(f"| {name} | {found['once']:.2f} | {found['rule']:.2f} | {found['prompts']:.0f} |", flush=True)
