"""How sure is an average over prompts? Percentile bootstrap intervals, the same resamples for every quantity."""

from __future__ import annotations

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
        """The 95% percentile interval of (n_bootstrap,) resampled values; None with one prompt."""
        resampled = resampled[np.isfinite(resampled)]
        if self.n_prompts < 2 or not len(resampled):
            return None
        low, high = np.percentile(resampled, [2.5, 97.5])
        return [float(low), float(high)]

    def mean(self, values: np.ndarray) -> Estimate:
        """The mean of (n_prompts,) values with its interval."""
        values = np.asarray(values, dtype=np.float64)
        interval = self.interval(self.resampled_means(values))
        return Estimate(float(values.mean()), interval, None if interval else ONE_PROMPT)

    def ratio(self, numerator: np.ndarray, denominator: np.ndarray, name: str = "denominator") -> Estimate:
        """The ratio of the two means, never the mean of per-prompt ratios; both (n_prompts,).

        None where the interval of the denominator includes 0 (or, with one prompt, where it is not above 0).
        """
        numerator = np.asarray(numerator, dtype=np.float64)
        denominator = np.asarray(denominator, dtype=np.float64)
        below = self.mean(denominator)
        if below.interval is None:
            if below.value <= 0:
                return Estimate(None, None, f"the {name} is not above 0 ({below.value:.4g})")
            return Estimate(float(numerator.mean()) / below.value, None, ONE_PROMPT)
        low, high = below.interval
        if low <= 0 <= high:
            return Estimate(None, None, f"the interval of the {name} includes 0 ([{low:.4g}, {high:.4g}])")
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = self.resampled_means(numerator) / self.resampled_means(denominator)
        return Estimate(float(numerator.mean()) / below.value, self.interval(resampled))
