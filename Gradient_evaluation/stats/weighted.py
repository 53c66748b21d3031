"""Continuations of another law: importance weights, and how averages over distinct members of a block take them.

A block drawn from q instead of the policy pi has w_i = pi(Y_i) / q(Y_i). For k distinct members

    E_q[w_1 ... w_k h(1, ..., k)] = E_pi[h(1, ..., k)],

so the mean of w_1 ... w_k h over distinct members is unbiased. Its noise is that of the product of k weights, most of which
is common to all h. So the results divide it by the mean of w_1 ... w_k itself (self-normalised), both over all blocks of the
prompt. Simulated with an effective sample size of 0.91 and of 0.4 (4 to 8 blocks of 16 and 64; 40 outcomes), the root mean
square error of zeta1 and of GRPO's trace was 3 to 15% and 37 to 47% below that of the unbiased form, and the bias stayed
below 1% and 3%. Dividing by powers of a block's mean weight instead left a bias of up to 22%.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Weights(NamedTuple):
    """The importance weights of a block, and what an average over k distinct members is divided by.

    With shares of 1 the averages are unbiased; with those of ``self_normalised`` they have less noise.
    """

    values: np.ndarray  # (..., B) pi / q, at least 0
    shares: Sequence[np.ndarray | float] = (1.0, 1.0, 1.0, 1.0)  # for k = 1, 2, 3, 4


def distinct_products(weights: np.ndarray) -> np.ndarray:
    """The mean of w_1 ... w_k over k distinct members, for k = 1, 2, 3, 4: weights (..., B), B >= 4 → (4, ...)."""
    size = weights.shape[-1]
    p1, p2, p3, p4 = ((weights**power).sum(-1) for power in (1, 2, 3, 4))
    sums = (p1, p1**2 - p2, p1**3 - 3 * p1 * p2 + 2 * p3, p1**4 - 6 * p1**2 * p2 + 3 * p2**2 + 8 * p1 * p3 - 6 * p4)
    return np.stack([each / np.prod(size - np.arange(k, dtype=float)) for k, each in enumerate(sums, 1)])


def self_normalised(blocks: Sequence[np.ndarray]) -> list[Weights]:
    """The weights (B,) of each block of one prompt, with the shares of all its blocks together, averaged by size."""
    mean = np.concatenate(list(blocks)).mean()
    scaled = [each / mean for each in blocks]
    shares = np.average([distinct_products(each) for each in scaled], axis=0, weights=[len(each) for each in scaled])
    return [Weights(each, shares) for each in scaled]


class WeightedCounts:
    """``silent_groups.RewardCounts`` of weighted continuations: shares of silent groups, self-normalised.

    Where groups are dropped, more than this is needed (``kept_tokens``, ``kept_beside_a_pair``), and it has no weighted form.
    """

    def __init__(self, rewards: np.ndarray, lengths: np.ndarray, weights: np.ndarray):
        """rewards, lengths, weights: (n,) of all continuations of one prompt."""
        self.values = np.unique(rewards)
        self.total = len(rewards)
        self.mean_length = float(weights @ lengths / weights.sum())
        self.variance = float(np.average((rewards - np.average(rewards, weights=weights)) ** 2, weights=weights))
        self._members = [weights[rewards == value] for value in self.values]

    @property
    def zero_one(self) -> bool:
        """Whether every reward is 0 or 1."""
        return bool(np.isin(self.values, (0, 1)).all())

    @cached_property
    def _log_shares(self) -> np.ndarray:
        """(n,): log of the share of silent groups of G = 1, ..., n."""
        every = log_symmetric(np.concatenate(self._members), self.total)
        return np.logaddexp.reduce([log_symmetric(each, self.total) for each in self._members]) - every

    def silent_share(self, group_size: int) -> float:
        """P(all G rewards equal) under pi: sum over rewards v of e_G(weights of v) over e_G(all weights); NaN for G > n.

        e_G is the sum over sets of G members of the product of their weights: each set is a group, and each member of it
        counts once.
        """
        if group_size > self.total:
            return np.nan
        return float(min(1.0, np.exp(self._log_shares[group_size - 1])))


def log_symmetric(weights: np.ndarray, largest: int) -> np.ndarray:
    """(largest,): log of the elementary symmetric polynomials e_1, ..., e_largest of weights (m,); -inf for more than m.

    In logarithms, since the products of hundreds of weights overflow.

    >>> np.exp(log_symmetric(np.array([1.0, 2.0, 3.0]), 4)).round(9).tolist()
    [6.0, 11.0, 6.0, 0.0]
    """
    found = np.full(largest + 1, -np.inf)
    found[0] = 0.0
    with np.errstate(divide="ignore"):
        logs = np.log(weights)
    for each in logs:
        found[1:] = np.logaddexp(found[1:], each + found[:-1])
    return found[1:]
