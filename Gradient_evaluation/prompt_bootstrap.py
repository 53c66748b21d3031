"""How sure is an average over prompts? Percentile bootstrap intervals, the same resamples for every quantity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

ONE_PROMPT = "one prompt: there is no interval over prompts"


class Estimate(NamedTuple):
    """A number with its 95% interval. What could not be computed is None, and ``reason`` says why."""

    value: float | None
    interval: list[float] | None = None
    reason: str | None = None


class PromptBootstrap:
    """``n_bootstrap`` resamples of ``n_prompts`` prompts, drawn once from ``seed``.

    Percentile intervals of few prompts (fewer than about 20) are too narrow; the number of prompts stands
    beside every result for that reason.
    """

    def __init__(self, n_prompts: int, n_bootstrap: int = 2000, seed: int = 0):
        if n_prompts < 1:
            raise ValueError("there are no prompts to average over")
        if n_bootstrap < 1:
            raise ValueError(f"n_bootstrap must be at least 1, got {n_bootstrap}")
        self.n_prompts = n_prompts
        counts = np.random.default_rng(seed).multinomial(n_prompts, [1 / n_prompts] * n_prompts, size=n_bootstrap)
        self._weights = counts / n_prompts

    def resampled_means(self, values: np.ndarray) -> np.ndarray:
        """values (n_prompts, ...) → the mean of each resample, (n_bootstrap, ...)."""
        return np.tensordot(self._weights, values, axes=1)

    def interval(self, resampled: np.ndarray) -> list[float] | None:
        """The 95% percentile interval of (n_bootstrap,) resampled values; None with one prompt.

        None too where so many resamples have no finite value that they would decide the interval's ends.
        """
        finite = resampled[np.isfinite(resampled)]
        if self.n_prompts < 2 or len(finite) < 0.975 * len(resampled):
            return None
        low, high = np.percentile(finite, [2.5, 97.5])
        return [float(low), float(high)]

    def of_means(self, columns: Sequence[np.ndarray], function: Callable[..., np.ndarray]) -> Estimate:
        """``function`` of the means of several (n_prompts,) columns, with its interval.

        ``function`` takes one array per column, all scalars or all (n_bootstrap,). A value that is not finite is None.
        """
        table = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(function(*table.mean(0)))
            interval = self.interval(function(*self.resampled_means(table).T))
        if not np.isfinite(value):
            return Estimate(None, None, "undefined for these averages")
        if interval is None:
            reason = ONE_PROMPT if self.n_prompts < 2 else "undefined in more than 2.5% of the resamples"
            return Estimate(value, None, reason)
        return Estimate(value, interval)

    def mean(self, values: np.ndarray) -> Estimate:
        """The mean of (n_prompts,) values with its interval."""
        return self.of_means([values], lambda mean: mean)

    def zero_reason(self, values: np.ndarray, name: str) -> str | None:
        """Why the mean of (n_prompts,) values must not be divided by: its interval includes 0. None if it may.

        With one prompt there is no interval; then the mean itself must be above 0.
        """
        estimate = self.mean(values)
        if estimate.interval is None:
            return None if estimate.value > 0 else f"the {name} is not above 0 ({estimate.value:.4g})"
        low, high = estimate.interval
        return f"the interval of the {name} includes 0 ([{low:.4g}, {high:.4g}])" if low <= 0 <= high else None

    def ratio(self, numerator: np.ndarray, denominator: np.ndarray, name: str = "denominator") -> Estimate:
        """The ratio of the two means, never the mean of per-prompt ratios; both (n_prompts,). See ``zero_reason``."""
        reason = self.zero_reason(denominator, name)
        return Estimate(None, None, reason) if reason else self.of_means([numerator, denominator], np.divide)
