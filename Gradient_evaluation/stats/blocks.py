"""Which second moments of a gradient estimator does one block of continuations give, without bias?

A block is B independent continuations of one prompt: ``gram`` (..., B, B) with Q_ij = <g_i, g_j> (scores
g = grad log pi, in squared gradient units) and ``rewards`` (..., B). Every function takes leading batch
dimensions, computes in float64 and returns U-statistics: their expectation over blocks is exact at any B
that is large enough, so blocks, and then prompts, are simply averaged. Formulas: shared METHOD, section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MIN_BLOCK = 4  # ||theta||^2 needs two disjoint pairs


def off_diagonal(gram: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Mean over i != j of left_i right_j Q_ij: unbiased for <E[left g], E[right g]>.

    Args: gram (..., B, B), left and right (..., B). Returns (...,).
    """
    size = gram.shape[-1]
    everything = np.einsum("...i,...ij,...j->...", left, gram, right)
    diagonal = np.einsum("...i,...ii,...i->...", left, gram, right)
    return (everything - diagonal) / (size * (size - 1))


def prompt_only_coefficients(gram: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The trace of Var[g (Z - b)] as a quadratic in b: returns (..., 3), the A, N, D of A - 2 b N + b^2 D.

    For a b fixed independently of the block, each coefficient is unbiased (b = 0 vanilla, b = V oracle):
    A = E[Z^2 ||g||^2] - ||E[Z g]||^2, N = E[Z ||g||^2] - <E[Z g], E[g]>, D = E||g||^2 - ||E[g]||^2.
    A b computed from the same block would make the result too low.
    """
    square = np.einsum("...ii->...i", gram)
    one = np.ones_like(rewards)
    return np.stack(
        [
            (left * right * square).mean(-1) - off_diagonal(gram, left, right)
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
    disjoint: np.ndarray  # E<h_12, h_34> = ||E h||^2; ||theta||^2 where E[g] = 0


def pair_coefficients(rewards: np.ndarray) -> np.ndarray:
    """C (..., B, B) with sum_j h_ij = sum_k C_ik g_k; rewards (..., B), best centred (only differences count)."""
    size = rewards.shape[-1]
    row, column = rewards[..., :, None], rewards[..., None, :]
    own = size * row - rewards.sum(-1)[..., None, None]
    return (np.eye(size) * own - row + column) / 2


def pair_moments(gram: np.ndarray, rewards: np.ndarray) -> PairMoments:
    """The three unbiased moments that fix GRPO's covariance at every K, in O(B^3) (B >= 4).

    Sums over all ordered index tuples are matrix products; the sums over coinciding indices are taken off:
    S2 = sum_ij ||h_ij||^2, S1 = sum over j != k of <h_ij, h_ik>, S4 = sum over four distinct indices.
    """
    size = gram.shape[-1]
    if size < MIN_BLOCK:
        raise ValueError(f"a block needs at least {MIN_BLOCK} continuations, got {size}")
    rewards = rewards - rewards.mean(-1, keepdims=True)  # h sees differences only; this keeps them exact
    square = np.einsum("...ii->...i", gram)
    difference = rewards[..., :, None] - rewards[..., None, :]
    distance = square[..., :, None] + square[..., None, :] - 2 * gram
    pairs = (difference**2 * distance).sum((-2, -1)) / 4
    coefficients = pair_coefficients(rewards)
    chains = ((coefficients @ gram) * coefficients).sum((-2, -1)) - pairs
    total = coefficients.sum(-2)
    everything = np.einsum("...i,...ij,...j->...", total, gram, total)
    disjoint = everything - 4 * chains - 2 * pairs
    ordered = size * (size - 1)
    return PairMoments(pairs / ordered, chains / (ordered * (size - 2)), disjoint / (ordered * (size - 2) * (size - 3)))


def group_trace(moments: PairMoments, group_size: int | np.ndarray) -> np.ndarray:
    """tr Cov of GRPO with leave-one-out baseline at group size K >= 2, exact also for K > B.

    4 zeta1 / K + (2 zeta2 - 4 zeta1) / (K (K - 1)), zeta1 = E<h_12, h_13> - T, zeta2 = E||h_12||^2 - T, with
    T = E<h_12, h_34>: Hoeffding's variance of a U-statistic of order 2 (paper, section 4.2).
    """
    zeta1 = moments.shared_member - moments.disjoint
    zeta2 = moments.same_pair - moments.disjoint
    return 4 * zeta1 / group_size + (2 * zeta2 - 4 * zeta1) / (group_size * (group_size - 1))


def mixture_coefficients(gram: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Covariance of GRPO with the prompt-only estimator at baseline mu, linear in mu: (..., 2), the u, v below.

    Over a group of K: E<GRPO - E, prompt_only - E> = (2/K) (u - mu v), where u and v are
    E<h_12, X_1> - E<h_12, X_3> for X = g Z and X = g. Taking the second term from disjoint members instead of
    ||theta||^2 keeps it exact for scores whose mean is not 0.
    """
    size = gram.shape[-1]
    coefficients = pair_coefficients(rewards - rewards.mean(-1, keepdims=True))
    own = np.einsum("...ij,...ji->...i", coefficients, gram)
    total = np.einsum("...ki,...ij->...j", coefficients, gram)
    result = []
    for factor in (rewards, np.ones_like(rewards)):
        shared = (factor * own).sum(-1)
        disjoint = (factor * total).sum(-1) - 2 * shared
        result.append((shared - disjoint / (size - 2)) / (size * (size - 1)))
    return np.stack(result, axis=-1)
