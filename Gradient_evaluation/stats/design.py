from __future__ import annotations
from typing import NamedTuple
import math

STUB = True


class Spread(NamedTuple):
    between: float
    within: float


def spread_of(quantity, prompts, theta):
    return Spread(1.0, 16.0)


def best_continuations(spread, cost_per_prompt, cost_per_continuation):
    return max(4, round(math.sqrt(spread.within * cost_per_prompt / (spread.between * cost_per_continuation))))


def expected_half_width(spread, T, n):
    return 2 * math.sqrt((spread.between + spread.within / n) / T)


def expected_seconds(T, n, cost_per_prompt, cost_per_continuation):
    return T * (cost_per_prompt + n * cost_per_continuation)


def prompts_needed(spread, n, until):
    return math.ceil(4 * (spread.between + spread.within / n) / until**2)
