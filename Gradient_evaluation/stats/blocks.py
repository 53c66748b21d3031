"""Which second moments of a gradient estimator does one block of continuations give, without bias?

A block is B independent continuations of one prompt: ``gram`` (..., B, B) with Q_ij = <g_i, g_j> (scores
g = grad log pi, in squared gradient units) and ``rewards`` (..., B). Every function takes leading batch
dimensions, computes in float64 and returns U-statistics: their expectation over blocks is exact at any B
that is large enough. So blocks are averaged, and then prompts. Formulas: docs/method.md, section 4.

A block may come from another law than the policy's: ``weights`` (``weighted.Weights``), 1 by default. An average over distinct
members weighs each of them once. In a sum over all indices a member that stands twice has its weight twice, and this is
what is subtracted.

There are two kinds of moments:
* Moments of pairs. They give the trace of GRPO and of prompt-only baselines in closed form at every K.
* Moments of resampled groups, where a continuation's weight depends on its whole group in a way that is not a plain
  difference (a division by the group's std). No closed form at every K is known for these. But any K members of a
  block are a group of K, and disjoint groups are independent. Random partitions of the block into groups give
  E||ghat||^2 from each group, ||E ghat||^2 from pairs of groups of one partition, and <E ghat, theta> from a group and
  the rest of the block. All are unbiased for every partition, so the same fixed partitions serve every block, prompt
  and estimator.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.stats.weighted import Weights

MIN_BLOCK = 4  # ||theta||^2 needs two disjoint pairs
GROUPS_PER_BLOCK = 256  # more would only reduce the noise of the choice of groups, which is small beside the block's own


def off_diagonal(gram: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Mean over i != j of left_i right_j Q_ij: unbiased for <E[left g], E[right g]>.

    Args: gram (..., B, B), left and right (..., B). Returns (...,).
    """
    size = gram.shape[-1]
    everything = np.einsum("...i,...ij,...j->...", left, gram, right)
    diagonal = np.einsum("...i,...ii,...i->...", left, gram, right)
    return (everything - diagonal) / (size * (size - 1))


def pair_count(size: int) -> int:
    """B (B - 1): what a block counts in a mean over blocks of moments of pairs.

    Any weights that depend on sizes alone leave the mean unbiased. The variance of a mean over continuations falls as 1/B, and
    there a block counts by its size. That of an average over pairs, triples or quadruples falls faster: simulated (policies
    of 6 and of 60 outcomes) it is 18 to 32 times as large at B = 4 as at 16 for ||theta||^2 and 5 to 56 times for zeta1, and
    3.5 to 9.5 times at 16 as at 64. With B as the weight a block of 4 beside one of 16 would make both estimates worse.
    """
    return size * (size - 1)


def prompt_only_coefficients(gram: np.ndarray, rewards: np.ndarray, weights: Weights | None = None) -> np.ndarray:
    """The trace of Var[g (Z - b)] as a quadratic in b: returns (..., 3), the A, N, D of A - 2 b N + b^2 D.

    For a b fixed independently of the block, each coefficient is unbiased (b = 0 vanilla, b = V oracle):
    A = E[Z^2 ||g||^2] - ||E[Z g]||^2, N = E[Z ||g||^2] - <E[Z g], E[g]>, D = E||g||^2 - ||E[g]||^2.
    With a b computed from the same block the result is too low.
    """
    square = np.einsum("...ii->...i", gram)
    one = np.ones_like(rewards)
    w, shares = weights or Weights(one)
    return np.stack(
        [
            (w * left * right * square).mean(-1) / shares[0] - off_diagonal(gram, w * left, w * right) / shares[1]
            for left, right in ((rewards, rewards), (rewards, one), (one, one))
        ],
        axis=-1,
    )


def prompt_only_trace(coefficients: np.ndarray, baseline: np.ndarray | float) -> np.ndarray:
    """tr Var of one continuation's term g (Z - b), (...,); a group of K has 1/K of it."""
    constant, linear, quadratic = np.moveaxis(coefficients, -1, 0)
    return constant - 2 * baseline * linear + baseline**2 * quadratic


class PairMoments(NamedTuple):
    """Moments of GRPO's kernel h_ij = (g_i - g_j)(Z_i - Z_j)/2; each (...,) float64."""

    same_pair: np.ndarray  # E||h_12||^2
    shared_member: np.ndarray  # E<h_12, h_13>
    disjoint: np.ndarray  # E<h_12, h_34> = ||E h||^2

    @property
    def theta_sq(self) -> np.ndarray:
        """||E h||^2, which is ||theta||^2 where E[g] = 0."""
        return self.disjoint

    @property
    def zeta1(self) -> np.ndarray:
        """Covariance trace of two kernels with one common member: E<h_12, h_13> - ||E h||^2."""
        return self.shared_member - self.disjoint

    @property
    def zeta2(self) -> np.ndarray:
        """Variance trace of one kernel: E||h_12||^2 - ||E h||^2."""
        return self.same_pair - self.disjoint


def pair_coefficients(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """C (..., B, B) with sum_j w_j h_ij = sum_k C_ik g_k; both (..., B), rewards best centred (only differences matter)."""
    size = rewards.shape[-1]
    row, column, w = rewards[..., :, None], rewards[..., None, :], weights[..., None, :]
    own = weights.sum(-1)[..., None, None] * row - (weights * rewards).sum(-1)[..., None, None]
    return (np.eye(size) * own - w * row + w * column) / 2


def pair_moments(gram: np.ndarray, rewards: np.ndarray, weights: Weights | None = None) -> PairMoments:
    """The three unbiased moments that fix GRPO's covariance at every K, in O(B^3) (B >= 4).

    Sums over all ordered index tuples are matrix products, from which the sums over equal indices are subtracted:
    S2 = sum_ij ||h_ij||^2, S1 = sum over j != k of <h_ij, h_ik>, S4 = sum over four distinct indices.
    With weights the sum of S1 has a pair twice where w_i w_j^2 ||h_ij||^2 stands, and that of S4 has a chain
    w_i^2 w_j w_k <h_ij, h_ik> four times and a pair w_i^2 w_j^2 ||h_ij||^2 twice.
    """
    size = gram.shape[-1]
    if size < MIN_BLOCK:
        raise ValueError(f"a block needs at least {MIN_BLOCK} continuations, got {size}")
    rewards = rewards - rewards.mean(-1, keepdims=True)  # h sees differences only; this keeps them exact
    square = np.einsum("...ii->...i", gram)
    difference = rewards[..., :, None] - rewards[..., None, :]
    distance = square[..., :, None] + square[..., None, :] - 2 * gram
    values, shares = weights or Weights(np.ones_like(rewards))
    w, v = values[..., :, None], values[..., None, :]
    squares = difference**2 * distance
    coefficients = pair_coefficients(rewards, values)
    images = (coefficients @ gram) * coefficients

    def pairs_and_chains(left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over distinct members of left_i w_j^2 ||h_ij||^2, and of left_i w_j w_k <h_ij, h_ik>."""
        pairs = (left * v**2 * squares).sum((-2, -1)) / 4
        return pairs, (left * images).sum((-2, -1)) - pairs

    pairs = (w * v * squares).sum((-2, -1)) / 4
    chains = pairs_and_chains(w)[1]
    total = (w * coefficients).sum(-2)
    everything = np.einsum("...i,...ij,...j->...", total, gram, total)
    repeated_pairs, repeated_chains = pairs_and_chains(w**2)
    disjoint = everything - 4 * repeated_chains - 2 * repeated_pairs
    ordered = size * (size - 1)
    triples, quadruples = ordered * (size - 2), ordered * (size - 2) * (size - 3)
    return PairMoments(pairs / ordered / shares[1], chains / triples / shares[2], disjoint / quadruples / shares[3])


def group_trace(moments: PairMoments, group_size: int | np.ndarray) -> np.ndarray:
    """tr Cov of GRPO with leave-one-out baseline at group size K >= 2, exact also for K > B.

    4 zeta1 / K + (2 zeta2 - 4 zeta1) / (K (K - 1)): Hoeffding's variance of a U-statistic of order 2 (paper,
    section 4.2).

    >>> group_trace(PairMoments(same_pair=4.0, shared_member=2.0, disjoint=1.0), 4)  # zeta1 = 1, zeta2 = 3
    1.1666666666666667
    """
    zeta1, zeta2 = moments.zeta1, moments.zeta2
    return 4 * zeta1 / group_size + (2 * zeta2 - 4 * zeta1) / (group_size * (group_size - 1))


def mixture_coefficients(gram: np.ndarray, rewards: np.ndarray, weights: Weights | None = None) -> np.ndarray:
    """Covariance of GRPO with the prompt-only estimator at baseline mu, linear in mu: (..., 2), the u, v below.

    Over a group of K: E<GRPO - E, prompt_only - E> = (2/K) (u - mu v), where u and v are
    E<h_12, X_1> - E<h_12, X_3> for X = g Z and X = g. Taking the second term from disjoint members instead of
    ||theta||^2 keeps it exact for scores whose mean is not 0.
    """
    size = gram.shape[-1]
    w, shares = weights or Weights(np.ones_like(rewards))
    coefficients = pair_coefficients(rewards - rewards.mean(-1, keepdims=True), w)
    own = np.einsum("...ij,...ji->...i", coefficients, gram)
    total = np.einsum("...ki,...ij->...j", w[..., :, None] * coefficients, gram)
    result = []
    for factor in (rewards, np.ones_like(rewards)):
        shared = (w * factor * own).sum(-1)
        disjoint = (w * factor * total).sum(-1) - 2 * (w**2 * factor * own).sum(-1)
        result.append((shared / shares[1] - disjoint / (size - 2) / shares[2]) / (size * (size - 1)))
    return np.stack(result, axis=-1)


class GroupMoments(NamedTuple):
    """Moments of a group's ghat = (1/K) sum_i A_i g_i; each (...,) float64, NaN where B is too small.

    A silent group (all rewards equal) has ghat = 0 under every kind of advantage. So these are also the moments of
    ghat times the indicator of a group that is kept, where silent groups are dropped.
    """

    square: np.ndarray  # E||ghat||^2, needs K <= B
    disjoint: np.ndarray  # ||E ghat||^2, needs 2 K <= B
    inner: np.ndarray  # <E ghat, theta>, needs K + 2 <= B


@cache
def partitions(block_size: int, group_size: int, n_groups: int = GROUPS_PER_BLOCK) -> np.ndarray:
    """Random disjoint groups of members: (n_partitions, block_size // group_size, group_size), always the same."""
    per_partition = block_size // group_size
    n_partitions = -(-n_groups // per_partition)
    generator = np.random.default_rng([block_size, group_size])
    order = generator.permuted(np.tile(np.arange(block_size), (n_partitions, 1)), axis=1)
    return order[:, : per_partition * group_size].reshape(n_partitions, per_partition, group_size)


def group_moments(
    block: tuple[np.ndarray, np.ndarray, np.ndarray], kind: str, group_size: int, n_groups: int = GROUPS_PER_BLOCK
) -> GroupMoments:
    """Unbiased moments of one kind of advantage (``group_advantages``) at one K.

    block: gram (..., B, B), rewards and lengths (..., B).
    """
    gram, rewards, _ = block
    size = gram.shape[-1]
    nothing = np.full(rewards.shape[:-1], np.nan)
    if group_size > size:
        return GroupMoments(nothing, nothing, nothing)
    members, per_partition = partitions(size, group_size, n_groups), size // group_size
    weights, images, squares = groups_of(block, kind, group_size, n_groups)
    disjoint = inner = nothing
    if per_partition >= 2:
        together = weights.sum(-2)
        whole = ((together @ gram) * together).sum(-1)
        pairs = (whole - squares.sum(-1)) / (per_partition * (per_partition - 1))
        disjoint = pairs.mean(-1)
    if group_size + 2 <= size:
        inner = (images * _rest_estimates(members, rewards)).sum(-1).mean(-1)
    return GroupMoments(squares.mean((-2, -1)), disjoint, inner)


def groups_of(
    block: tuple[np.ndarray, np.ndarray, np.ndarray], kind: str, group_size: int, n_groups: int = GROUPS_PER_BLOCK
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The groups of ``partitions``: weights w (..., partitions, groups, B), w Q (..., all groups, B), and ||ghat||^2."""
    gram, rewards, lengths = block
    size, lead = gram.shape[-1], rewards.shape[:-1]
    members = partitions(size, group_size, n_groups)
    weights = np.zeros((*lead, *members.shape[:2], size))
    values = group_advantages(rewards[..., members], kind, lengths[..., members]) / group_size
    np.put_along_axis(weights, np.broadcast_to(members, values.shape), values, axis=-1)
    flat = weights.reshape(*lead, -1, size)
    images = flat @ gram
    return weights, images, (images * flat).sum(-1).reshape(weights.shape[:-1])


def _rest_estimates(members: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """For each group the weights (..., n_groups, B) of the leave-one-out estimate of theta from all non-members."""
    size = rewards.shape[-1]
    flat = members.reshape(-1, members.shape[-1])
    rest = np.ones((len(flat), size))
    np.put_along_axis(rest, flat, 0.0, axis=-1)
    n_rest = size - members.shape[-1]
    mean = (rewards @ rest.T) / n_rest
    return rest * (rewards[..., None, :] - mean[..., None]) / (n_rest - 1)


def mean_group_weights(kind: str, rewards: np.ndarray, lengths: np.ndarray, group_size: int) -> np.ndarray:
    """(B,): the weight of each score in the mean of ghat over the groups of a block; rewards and lengths (B,).

    Groups larger than the block are the whole block. Silent groups count as 0.
    """
    size = min(group_size, len(rewards))
    members = partitions(len(rewards), size)
    weights = group_advantages(rewards[members], kind, lengths[members]) / size
    total = np.zeros(len(rewards))
    np.add.at(total, members.ravel(), weights.ravel())
    return total / (members.shape[0] * members.shape[1])
