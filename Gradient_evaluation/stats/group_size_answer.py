"""What do the constants of the group-size law support? G* with its interval, what a wrong size costs, what more would do.

Used by ``group_size_law``, which has the formulas. Everything here is a statement about c1, c2, c3 as estimated from
prompts: ``constants`` are Averages whose rows C1, C2, C3 of coefficients give them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.bootstrap import Averages, PromptBootstrap, not_above_zero
from Gradient_evaluation.stats.sketch_pairs import pair_variances

# The averages are those of theta_sq, 4 zeta1, 2 zeta2 and the product of two prompts' gradients.
C1, C2, C3 = np.array([1.0, 0, 0, -1]), np.array([0, 1.0, 0, 0]), np.array([0, -1.0, 1, 0])
SURE_C1 = 3.0  # standard errors of c1; answers with less of them are mostly those where c1 came out too large by chance
ALMOST = 1.1  # an MSE of at most so many times the least counts as the best
CHANCE = 0.8416  # standard errors of a normal distribution, for a chance of 80%
QUANTILE = 1.96  # the least number of standard errors that the interval of c1 reaches down
LARGEST = 1e6
BOUNDLESS = 1e6  # a ratio of which this is not excluded has no bound


def law_rows(group_size) -> np.ndarray:
    """Coefficients (..., 4) of N MSE at ``group_size``: c1 G + c2 + c3/(G-1)."""
    size = np.asarray(group_size, dtype=np.float64)[..., None]
    return C1 * size + C2 + C3 / (size - 1)


def best_size_bound(constants: Averages, percent: float) -> float | None:
    """The G at which ``percent`` of the draws of c3 - (G-1)^2 c1 lie below 0; at least 2, None where there is none.

    G* is below G exactly where c3 < (G-1)^2 c1. So no division by a c1 that may be 0 is needed (Fieller), and the bound
    holds where c1 is not told from 0 too.
    """

    def share_below(distance: float) -> bool:
        draws = constants.linear((C3 - distance**2 * C1)[None])[1]
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


def relative_mse(constants: Averages, sizes: np.ndarray, bootstrap: PromptBootstrap) -> tuple[dict, str | None]:
    """MSE at each of ``sizes`` over the least of them, with intervals: {G, reference, value, ci95}; and why not."""
    table: dict = {"G": [int(size) for size in sizes], "reference": None, "value": None, "ci95": None}
    values, draws = constants.linear(law_rows(sizes))
    least = int(np.argmin(values))
    reason = not_above_zero(bootstrap.interval(draws[:, least]), f"MSE at G = {sizes[least]}")
    if reason:
        return table, reason

    ratios = (values / values[least]).tolist()
    low, high = (_ratio_end(constants, law_rows(sizes), law_rows(sizes[least]), percent) for percent in (2.5, 97.5))
    low = np.where(low * BOUNDLESS < 1.01, 0.0, low)  # the search went to its end; an MSE is never below 0
    ends = [[min(one, ratio), None if two > BOUNDLESS else max(two, ratio)] for one, two, ratio in zip(low, high, ratios)]
    ends[least] = [1.0, 1.0]
    return {"G": table["G"], "reference": int(sizes[least]), "value": ratios, "ci95": ends}, None


def _ratio_end(constants: Averages, rows: np.ndarray, base: np.ndarray, percent: float) -> np.ndarray:
    """(m,): the r at which ``percent`` of the draws of a row's sum less r times the base's sum lie below 0.

    A ratio of sums without a division (Fieller), as in ``best_size_bound``; the base's sum must be above 0.
    """
    low, high = np.full(len(rows), -np.log(BOUNDLESS)), np.full(len(rows), 1.1 * np.log(BOUNDLESS))
    for _ in range(30):
        middle = (low + high) / 2
        draws = constants.linear(rows - np.exp(middle)[:, None] * base)[1]
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
    """What would bring the lower end of c1's interval above 0 in four cases of five; None where nothing found would."""

    more_prompts: int | None
    times_continuations: float | None  # as many continuations per prompt, at the same prompts
    continuations_share: float | None  # how much of the variance of c1 comes from sampling continuations
    text: str


def forecast(
    theta_sq: np.ndarray, products: np.ndarray, interval: list[float], sketch_error: float, noise: np.ndarray | None
) -> Forecast:
    """What would tell c1 from 0? From its variance over prompts, which n prompts make 4 s^2/n + 2 e^2/(n (n-1)).

    theta_sq (n,), products (n, n) as in prompt_pairs, interval of c1, ``sketch_error`` (it stays), ``noise`` (n,): the
    variance of each theta_sq for the continuations of its prompt, None where it is not known. The interval's lower end
    lies at c1 minus q standard errors; c1 itself is as uncertain as that, so with 0.84 more of them the lower end comes
    out above 0 with a chance of 80%.
    """
    scale = max(np.abs(theta_sq).max(), np.abs(products).max()) or 1.0  # the answer has no unit, and no square overflows
    theta_sq, products, interval, sketch_error = (
        theta_sq / scale,
        products / scale,
        np.divide(interval, scale),
        sketch_error / scale,
    )
    noise = None if noise is None else noise / scale / scale
    n, table = len(theta_sq), (theta_sq[:, None] + theta_sq) / 2 - products
    np.fill_diagonal(table, 0.0)
    spread, rest = (float(part[0, 0]) for part in pair_variances([table]))
    c1, now = float(table.sum() / (n * (n - 1))), 4 * spread / n + 2 * rest / (n * (n - 1))
    half = np.sqrt(now + sketch_error**2)
    quantile = max(QUANTILE, min(3.0, (c1 - interval[0]) / half)) if half > 0 else QUANTILE
    # c1 is a variance: taken is its mean over what is plausible and above 0, for a normal error
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
    if noise is None or not np.isfinite(noise).all() or not now > 0:
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
