"""Which group size do the constants of the group-size law recommend? G*, its interval, and what a wrong size costs.

``group_size.py`` has the group-size law and its constants c1, c2, c3. Everything here is a statement about these
constants as they are estimated from prompts; where they say too little, ``forecast`` says what more is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.bootstrap import Averages, PromptBootstrap, not_above_zero
from Gradient_evaluation.stats.group_size.sketch_pairs import pair_variances
from Gradient_evaluation.stats.missing import Missing

# Coefficients of the averages of theta_sq, 4 zeta1, 2 zeta2 and the product of two prompts' gradients
C1, C2, C3 = np.array([1.0, 0, 0, -1]), np.array([0, 1.0, 0, 0]), np.array([0, -1.0, 1, 0])
POWERS = 2 ** np.arange(1, 31)
SURE_C1 = 3.0  # standard errors of c1; with less, most answers come from a c1 that is too large by chance
ALMOST = 1.1  # an MSE of at most this many times the least counts as the best
CHANCE = 0.8416  # standard errors of a normal distribution, for a chance of 80%
QUANTILE = 1.96  # the interval of c1 reaches at least this many standard errors down
LARGEST = 1e6
BOUNDLESS = 1e6  # a ratio that may be above this has no bound
BEST = (
    "G_star",
    "G_star_ci95",
    "G_star_paper_bound",
    "best_integer",
    "within_10_percent",
    "within_10_percent_ci95",
    "powers_of_two",
    "G_star_may_be_larger",
)


@dataclass(frozen=True)
class Constants:
    """c1, c2, c3 as estimated from prompts."""

    averages: Averages  # of theta_sq, 4 zeta1, 2 zeta2 and the product of two prompts' gradients
    values: tuple[float, float, float]  # c1, c2, c3
    intervals: tuple[list[float], list[float], list[float]]  # 95%, of each
    sketch_error: float  # standard error of c1 that comes from the sketch
    n_prompts: int

    def stated(self, index: int) -> str:
        """One constant in words, with its interval."""
        low, high = self.intervals[index]
        return f"c{index + 1} = {self.values[index]:.3g} (interval [{low:.3g}, {high:.3g}])"


def mse_times_budget(c1, c2, c3, group_size):
    """N MSE = c1 G + c2 + c3/(G-1): the MSE of a minibatch gradient times its number of continuations N = B G."""
    return c1 * group_size + c2 + c3 / (group_size - 1)


def best_group_size(c1, c3):
    """G* >= 2 of least ``mse_times_budget``: 1 + sqrt(c3/c1), 2 where that is less.

    c3 >= 0 holds for every policy (Hoeffding: zeta2 >= 2 zeta1), so for c3 <= 0 there is no G*: NaN. For c1 <= 0 the MSE
    falls with G without end: inf.

    >>> best_group_size([1.0, 1.0, 0.0, 1.0], [9.0, 0.25, 9.0, -1.0]).tolist()
    [4.0, 2.0, inf, nan]
    """
    c1, c3 = np.asarray(c1, dtype=np.float64), np.asarray(c3, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.maximum(2.0, 1 + np.sqrt(np.maximum(c3, 0.0) / c1))
    return np.where(c3 <= 0, np.nan, np.where(c1 <= 0, np.inf, inner)) + 0 * (c1 + c3)  # NaN stays NaN


def best_integer(c1, c2, c3):
    """The integer G >= 2 of least MSE: one of the two beside G*."""
    low = np.floor(best_group_size(c1, c3))
    with np.errstate(invalid="ignore"):
        higher = mse_times_budget(c1, c2, c3, low + 1) < mse_times_budget(c1, c2, c3, low)
    return np.where(higher, low + 1, low)


def near_best(c1, c2, c3, tolerance: float = 0.1):
    """(lowest, highest) integer G whose MSE is within ``tolerance`` of the least: the roots of a quadratic in G - 1.

    (inf, inf) for c1 <= 0 with c3 > 0: the MSE then falls with G without end. NaN where the least MSE is not above 0.
    """
    c1, c2, c3 = (np.asarray(c, dtype=np.float64) for c in (c1, c2, c3))
    best = best_integer(c1, c2, c3)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = mse_times_budget(c1, c2, c3, best)
        level = (1 + tolerance) * least
        half = (level - c1 - c2) / (2 * c1)
        root = np.sqrt(half**2 - c3 / c1)
        low, high = np.maximum(2.0, np.ceil(1 + half - root - 1e-9)), np.floor(1 + half + root + 1e-9)
    endless, meaningless = np.isinf(best) | (c1 <= 0), ~(least > 0)
    low, high = (np.where(endless, np.inf, np.where(meaningless, np.nan, end)) for end in (low, high))
    return low, high


def mse_rows(group_size) -> np.ndarray:
    """Coefficients (..., 4) of N MSE at ``group_size``: c1 G + c2 + c3/(G-1)."""
    size = np.asarray(group_size, dtype=np.float64)[..., None]
    return C1 * size + C2 + C3 / (size - 1)


def best_size(constants: Constants, outlook: str | None) -> dict:
    """``BEST`` and G_star_at_least, each a value or Missing. outlook: what would help where c1 is not distinguished from 0."""
    (c1, _, c3), (low_c1, _) = constants.values, constants.intervals[0]
    if c3 <= 0:
        why = Missing(
            f"{constants.stated(2)} is not above 0; c3 cannot be below 0, so this is noise: "
            "more prompts or more continuations are needed"
        )
        return dict.fromkeys((*BEST, "G_star_at_least"), why)
    if low_c1 <= 0:
        said = "is not above 0" if c1 <= 0 else f"cannot be told from 0 with these {constants.n_prompts} prompts"
        answer = dict.fromkeys(BEST, Missing(f"{constants.stated(0)} {said}; {outlook}"))
    else:
        answer = {**_optimum(constants), **_near(constants)}
    return {**answer, "G_star_at_least": _at_least(constants)}


def _at_least(constants: Constants) -> float | Missing:
    """One-sided 95% lower bound of G*."""
    bound = best_size_bound(constants.averages, 5.0)
    if bound is None:
        return Missing("c1 lies below 0")
    return bound if bound > 2 else Missing("the data support no lower bound above G = 2")


def _optimum(constants: Constants) -> dict:
    """G* with its interval, for a c1 that is distinguished from 0."""
    c1, c2, c3 = constants.values
    star = float(best_group_size(c1, c3))
    low, high = (best_size_bound(constants.averages, percent) for percent in (2.5, 97.5))
    low, high = min(low or np.inf, star), max(high or np.inf, star)
    error = np.sqrt(constants.averages.variance(C1) + constants.sketch_error**2)
    larger = bool(c1 < SURE_C1 * error)
    return {
        "G_star": star,
        "G_star_ci95": [low, high if np.isfinite(high) and not larger else None],
        "G_star_paper_bound": float(np.sqrt(c3 / c1)),
        "best_integer": int(best_integer(c1, c2, c3)),
        "G_star_may_be_larger": larger,
    }


def _near(constants: Constants) -> dict:
    """The sizes within 10% of the least MSE."""
    low, high = near_best(*constants.values)
    if not (np.isfinite(low) and np.isfinite(high)):
        why = Missing("the least predicted MSE is not above 0")
        return dict.fromkeys(("within_10_percent", "within_10_percent_ci95", "powers_of_two"), why)
    draws = constants.averages.linear(np.stack([C1, C2, C3]))[1].T
    return {
        "within_10_percent": [int(low), int(high)],
        "within_10_percent_ci95": [_ends(end, value) for end, value in zip(near_best(*draws), (low, high))],
        "powers_of_two": [int(power) for power in POWERS if low <= power <= high],
    }


def _ends(draws: np.ndarray, value: float) -> list[float | None]:
    """95% interval of draws that may be infinite, widened to contain ``value``; an infinite end is None."""
    low, high = np.percentile(draws[~np.isnan(draws)], [2.5, 97.5], method="lower")
    return [float(end) if np.isfinite(end) else None for end in (min(low, value), max(high, value))]


def best_size_bound(averages: Averages, percent: float) -> float | None:
    """The G at which ``percent`` of the draws of c3 - (G-1)^2 c1 lie below 0; at least 2, None where there is none.

    G* is below G exactly where c3 < (G-1)^2 c1. So nothing is divided by a c1 that may be 0 (Fieller), and the bound is
    also right where c1 is not distinguished from 0.
    """

    def share_below(distance: float) -> bool:
        draws = averages.linear((C3 - distance**2 * C1)[None])[1]
        return np.percentile(draws, percent) <= 0

    if share_below(1.0):
        return 2.0
    if not share_below(LARGEST):
        return None
    low, high = 0.0, np.log(LARGEST)
    for _ in range(26):
        middle = (low + high) / 2
        low, high = (low, middle) if share_below(np.exp(middle)) else (middle, high)
    return float(1 + np.exp(high))


def relative_mse(averages: Averages, sizes: np.ndarray, bootstrap: PromptBootstrap) -> tuple[dict, str | None]:
    """MSE at each of ``sizes`` over the least of them, with intervals: {G, reference, value, ci95}, and why there is none."""
    table: dict = {"G": [int(size) for size in sizes], "reference": None, "value": None, "ci95": None}
    values, draws = averages.linear(mse_rows(sizes))
    least = int(np.argmin(values))
    reason = not_above_zero(bootstrap.interval(draws[:, least]), f"MSE at G = {sizes[least]}")
    if reason:
        return table, reason

    ratios = (values / values[least]).tolist()
    low, high = (_ratio_end(averages, mse_rows(sizes), mse_rows(sizes[least]), percent) for percent in (2.5, 97.5))
    low = np.where(low * BOUNDLESS < 1.01, 0.0, low)  # the search found no end; an MSE is never below 0
    ends = [[min(one, ratio), None if two > BOUNDLESS else max(two, ratio)] for one, two, ratio in zip(low, high, ratios)]
    ends[least] = [1.0, 1.0]
    return {"G": table["G"], "reference": int(sizes[least]), "value": ratios, "ci95": ends}, None


def _ratio_end(averages: Averages, rows: np.ndarray, base: np.ndarray, percent: float) -> np.ndarray:
    """(m,): the r at which ``percent`` of the draws of a row's sum less r times the base's sum lie below 0.

    Nothing is divided (Fieller), as in ``best_size_bound``; the base's sum must be above 0.
    """
    low, high = np.full(len(rows), -np.log(BOUNDLESS)), np.full(len(rows), 1.1 * np.log(BOUNDLESS))
    for _ in range(30):
        middle = (low + high) / 2
        draws = averages.linear(rows - np.exp(middle)[:, None] * base)[1]
        above = np.percentile(draws, percent, axis=0) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.exp((low + high) / 2)


def almost_best(table: dict) -> list[int] | None:
    """[lowest, highest] size of ``relative_mse`` whose MSE is within 10% of the least."""
    if table["value"] is None:
        return None
    sizes = [size for size, value in zip(table["G"], table["value"]) if value is not None and value <= ALMOST]
    return [min(sizes), max(sizes)]


def _density(score: float) -> float:
    return math.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)


def _below(score: float) -> float:
    return math.erfc(-score / math.sqrt(2)) / 2


class Forecast(NamedTuple):
    """What would bring the lower end of c1's interval above 0 in four cases of five; None where nothing would."""

    more_prompts: int | None
    times_continuations: float | None  # as many continuations per prompt, at the same prompts
    continuations_share: float | None  # how much of the variance of c1 comes from sampling continuations
    text: str


def forecast(
    theta_sq: np.ndarray, products: np.ndarray, interval: list[float], sketch_error: float, noise: np.ndarray
) -> Forecast:
    """What would distinguish c1 from 0? From its variance over n prompts: 4 s^2/n + 2 e^2/(n (n-1)).

    theta_sq (n,), products (n, n) of sketch_pairs.pair_products, interval of c1, ``sketch_error`` (more prompts do not
    change it), ``noise`` (n,): the variance of each theta_sq over the continuations of its prompt, NaN where it is not
    known. The interval's lower end is c1 minus q standard errors. c1 itself has this standard error, so with 0.84 more of
    them the lower end is above 0 with a chance of 80%.
    """
    scale = max(np.abs(theta_sq).max(), np.abs(products).max()) or 1.0  # the answer has no unit, and no square overflows
    theta_sq, products, noise = theta_sq / scale, products / scale, noise / scale / scale
    interval, sketch_error = np.divide(interval, scale), sketch_error / scale
    n, table = len(theta_sq), (theta_sq[:, None] + theta_sq) / 2 - products
    np.fill_diagonal(table, 0.0)
    spread, rest = (float(part[0, 0]) for part in pair_variances([table]))
    c1, now = float(table.sum() / (n * (n - 1))), 4 * spread / n + 2 * rest / (n * (n - 1))
    half = np.sqrt(now + sketch_error**2)
    quantile = max(QUANTILE, min(3.0, (c1 - interval[0]) / half)) if half > 0 else QUANTILE
    # c1 is a variance, so above 0: its mean under a normal error that is cut off at 0
    score = c1 / half if half > 0 else 0.0
    taken = c1 + half * _density(score) / max(_below(score), 1e-12)
    least = "about" if c1 > half else "at least"
    allowed = (taken / (quantile + CHANCE)) ** 2 - sketch_error**2
    if allowed <= 0:
        return Forecast(None, None, None, "the sketch's own error is as large: a larger --sketch_dim is needed")
    # the positive root of allowed n (n-1) = 4 spread (n-1) + 2 rest
    linear, constant = allowed + 4 * spread, 4 * spread - 2 * rest
    needed = int(np.ceil((linear + np.sqrt(max(0.0, linear**2 - 4 * allowed * constant))) / (2 * allowed)))
    more = max(1, needed - n)
    text = f"{least} {more} more prompt{'s' if more > 1 else ''} would do, in four cases of five"
    if not np.isfinite(noise).all() or not now > 0:
        return Forecast(more, None, None, text)
    share = float(min(1.0, noise.mean() / n / now))
    left = allowed / now - (1 - share)
    times = float(max(1.0, share / left)) if left > 0 else None
    text += f"; {share:.0%} of the variance of c1 comes from sampling continuations, so "
    if times is None:
        text += "more continuations per prompt alone would not do"
    else:
        text += f"about {times:.2g} times as many continuations per prompt (a larger M) would do as well"
    return Forecast(more, times, share, text)
