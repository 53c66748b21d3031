"""Is an answer precise enough? A quantity of a run, its interval after n prompts, and when it is looked at.

    quantity = Quantity.parse("G_star")                          or trace:grpo:8, snr:grpo:8, difference:grpo:naive:8
    value, low, high, reason = estimate_of(quantity, prompts, theta, bootstrap)
    is_enough(value, low, high, 0.2)                             the interval is within +-20% of the value
    may_stop([False, True, True])                                whether that was so at each look; two in a row end a run

A run that stops at the first narrow interval stops at intervals that are narrow by chance, most of all where a few prompts
that are rare and large are not yet among the first. So ``looks`` begins at 20 prompts and each has a tenth more than the last,
and ``may_stop`` asks for two narrow ones in a row. tests/stats/test_stopping.py simulates the coverage where a run stops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from Gradient_evaluation.stats.bootstrap import Estimate, PromptBootstrap
from Gradient_evaluation.stats.estimators import ALIASES, ESTIMATORS, moments_of
from Gradient_evaluation.stats.group_size.law import best_size_alone
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.prompts import PromptMoments

G_STAR = "G_star"
KINDS = {"trace": 1, "snr": 1, "difference": 2}  # how many estimators each kind names
FORMS = "give G_star, trace:NAME:K, snr:NAME:K or difference:A:B:K"
FIRST_LOOK = 20
IN_A_ROW = 2  # looks that are precise enough before a run stops


@dataclass(frozen=True)
class Quantity:
    """What a run is to know. kind: G_STAR or one of KINDS; names: of estimators; K: the group size, None for G_STAR."""

    kind: str
    names: tuple[str, ...] = ()
    K: int | None = None

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """The quantity that ``text`` names; ValueError where it names none.

        >>> Quantity.parse("difference:grpo:naive:8")
        Quantity(kind='difference', names=('grpo', 'naive'), K=8)
        """
        kind, *rest = text.split(":")
        if kind == G_STAR and not rest:
            return cls(G_STAR)
        if kind not in KINDS or len(rest) != KINDS[kind] + 1 or not rest[-1].isdigit() or int(rest[-1]) < 2:
            raise ValueError(f"no quantity; {FORMS}, with K of at least 2")
        if unknown := [name for name in rest[:-1] if name not in ESTIMATORS and name not in ALIASES]:
            raise ValueError(f"unknown estimator {unknown[0]!r}; {FORMS}")
        return cls(kind, tuple(ALIASES.get(name, name) for name in rest[:-1]), int(rest[-1]))

    def __str__(self) -> str:
        if self.kind == G_STAR:
            return "G*"
        what = {"trace": "trace of {}", "snr": "signal-to-noise ratio of {}", "difference": "trace of {} less that of {}"}
        return f"{what[self.kind].format(*self.names)} at K = {self.K}"


def estimate_of(
    quantity: Quantity, prompts: PromptMoments, theta: Sketches | Missing | None, bootstrap: PromptBootstrap
) -> tuple[float | None, float | None, float | None, str | None]:
    """(value, low, high, reason) of n prompts, as ``summarise`` and ``group_size_law`` have them. 95%, bootstrap-t.

    None stands for what cannot be said; ``reason`` says why. theta: the sketches of the n gradients, for G*.
    """
    if quantity.kind == G_STAR:
        found = best_size_alone(prompts, theta, bootstrap)
        if isinstance(found["G_star"], Missing):
            return None, None, None, found["G_star"].reason
        low, high = found["G_star_ci95"]
        return float(found["G_star"]), low, high, None
    estimate = _of_columns(quantity, prompts, bootstrap)
    return estimate.value, *(estimate.interval or (None, None)), estimate.reason


def _of_columns(quantity: Quantity, prompts: PromptMoments, bootstrap: PromptBootstrap) -> Estimate:
    moments = [moments_of(prompts, name, quantity.K) for name in quantity.names]
    if missing := [each.trace for each in moments if isinstance(each.trace, Missing)]:
        return Estimate(None, None, missing[0].reason)
    weights = [np.ones(len(prompts)) if each.weight is None else each.weight for each in moments]
    columns = [column for each, weight in zip(moments, weights) for column in (weight * each.trace, weight)]
    if quantity.kind == "snr":
        return bootstrap.ratio(weights[0] * moments[0].signal, columns[0], f"trace(Cov) at K={quantity.K}")
    if quantity.kind == "trace":
        return bootstrap.of_means(columns, np.divide)
    return bootstrap.of_means(columns, lambda a, of_a, b, of_b: a / of_a - b / of_b)


def half_width(value: float, low: float | None, high: float | None) -> float | None:
    """The larger distance of an end of the interval from the value, over the value; None without both ends or for 0."""
    if low is None or high is None or value == 0:
        return None
    return max(high - value, value - low) / abs(value)


def is_enough(value: float | None, low: float | None, high: float | None, until: float) -> bool:
    """Whether both ends are within ``until`` times the value of it."""
    width = None if value is None else half_width(value, low, high)
    return width is not None and width <= until


def may_stop(enough: Sequence[bool], is_last: bool = False) -> bool:
    """Whether a run may stop, from ``is_enough`` at each look so far: the last two are.

    is_last: every prompt is measured. Chance then did not choose their number, and the last look alone counts.

    >>> may_stop([False, True]), may_stop([False, True, True]), may_stop([True, False, True])
    (False, True, False)
    """
    last = enough[-1 if is_last else -IN_A_ROW :]
    return all(last) and len(last) == (1 if is_last else IN_A_ROW)


def looks(most: int) -> list[int]:
    """The numbers of prompts after which the answer is looked at: 20, then each a tenth more, up to ``most``; and ``most``.

    >>> looks(31)
    [20, 22, 25, 28, 31]
    """
    found, n = [], FIRST_LOOK
    while n < most:
        found.append(n)
        n += math.ceil(n / 10)
    return [*found, most]


def forecast(value: float, low: float | None, high: float | None, n_prompts: int, until: float) -> int | None:
    """About how many prompts +-``until`` takes, from the interval after ``n_prompts``: its width falls as 1/sqrt(n)."""
    width = half_width(value, low, high)
    return None if width is None else math.ceil(n_prompts * (width / until) ** 2)
