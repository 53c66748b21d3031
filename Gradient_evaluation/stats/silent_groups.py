"""How often are all rewards of a group equal? Without bias, from the rewards of n continuations of one prompt.

Such a group is silent: its gradient is exactly 0 (TRL logs the share as frac_reward_zero_std). The n continuations form
C(n, G) groups. If c of them have one reward, C(c, G) of these groups have only this reward. So the share of silent
groups is the sum over rewards of C(c, G) / C(n, G). This is a U-statistic for any rewards: its mean is P(all G rewards
equal) for every n >= G. The plug-in of c/n into V^G + (1-V)^G is biased upward (0.293 for 0.142 at V = 0.03, n = G = 64).
Derived in docs/method.md, section 7.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RewardCounts(NamedTuple):
    """The distinct rewards of one prompt's n continuations; each (v,)."""

    values: np.ndarray
    counts: np.ndarray  # how many of the n have this reward
    lengths: np.ndarray  # mean number of tokens of those

    @property
    def total(self) -> int:
        """n"""
        return int(self.counts.sum())

    @property
    def zero_one(self) -> bool:
        """Whether every reward is 0 or 1."""
        return bool(np.isin(self.values, (0, 1)).all())

    @property
    def mean_length(self) -> float:
        """Mean number of tokens of the n continuations."""
        return float(self.counts @ self.lengths / self.total)

    @property
    def variance(self) -> float:
        """Mean square of the rewards' deviations from their mean."""
        return float(self.counts @ (self.values - self.counts @ self.values / self.total) ** 2 / self.total)

    def silent_share(self, group_size: int) -> float:
        """Unbiased P(all G rewards equal); NaN for G > n.

        >>> RewardCounts(np.array([0, 1]), np.array([1, 3]), np.ones(2)).silent_share(2)  # 3 of 6 pairs are equal
        0.5
        """
        if group_size > self.total:
            return np.nan
        return float(subset_share(self.counts, self.total, group_size).sum())

    def kept_tokens(self, group_size: int) -> float:
        """Unbiased E[length of a continuation, counted as 0 where its group of G is silent], in tokens; NaN for G > n.

        The group of a continuation is silent if its G - 1 other members, of the n - 1 that remain, have its reward.
        """
        if group_size > self.total:
            return np.nan
        silent = subset_share(self.counts - 1, self.total - 1, group_size - 1)
        return float(self.counts * self.lengths @ (1 - silent) / self.total)

    def kept_beside_a_pair(self, group_size: int) -> float:
        """P(keep) from the n - 2 continuations beside a pair of unlike rewards, averaged over all such pairs.

        It is for a quotient ||E ghat||^2 / P(keep). The unbiased estimate of the numerator is a sum over pairs of unlike
        rewards, so its error and that of P(keep) from the same continuations are correlated: with n = 16 and V = 0.1 the
        quotient was half its true value. With c rare rewards the numerator grows as c (c-1) and P(keep) beside a pair as
        G (c-1)/(n-2), so the quotient grows as c, whose mean is right. 0 where at most one continuation differs from the
        others; NaN for G > n - 2.
        """
        unlike = self.counts * (self.total - self.counts)
        if group_size > self.total - 2:
            return np.nan
        if self.counts.max() >= self.total - 1:
            return 0.0  # exactly: the numerator is 0 up to rounding
        rest = self.total - 2
        # C(c, G) - C(c-1, G-1) = C(c-1, G): what is left of a reward's groups when one continuation of it is taken out
        left = subset_share(self.counts, rest, group_size).sum() - 2 * (
            unlike @ subset_share(self.counts - 1, rest - 1, group_size - 1) * group_size / rest / unlike.sum()
        )
        return float(1 - left)


def reward_counts(rewards: np.ndarray, lengths: np.ndarray) -> RewardCounts:
    """Count the rewards (n,) of one prompt's continuations with their lengths (n,)."""
    values, index, counts = np.unique(rewards, return_inverse=True, return_counts=True)
    return RewardCounts(values, counts, np.bincount(index.ravel(), weights=lengths) / counts)


def subset_share(counts: np.ndarray, total: int, size: int) -> np.ndarray:
    """C(counts, size) / C(total, size) for counts (v,) <= total, size <= total, as a product that cannot overflow."""
    steps = np.arange(size)
    shares = np.zeros(len(counts))
    enough = counts >= size  # true of at most total / size rewards
    shares[enough] = ((counts[enough, None] - steps) / (total - steps)).prod(-1)
    return shares
