"""What are the moments of an estimator whose weights depend on its whole group? Many groups inside one block.

When continuation i's weight depends on the other members' rewards or lengths in a way that is not a plain
difference (a division by the group's std), no closed form at every K is at hand. But any
K members of a block are a group of K, and disjoint groups are independent: random partitions of the block
into groups give E||ghat||^2 from each group, ||E ghat||^2 from pairs of groups of one partition, and
<E ghat, theta> from a group and the rest of the block. All are unbiased for every partition, so the same
fixed partitions serve every block, prompt and estimator. Derived in shared METHOD, section 4.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.advantages import group_advantages

GROUPS_PER_BLOCK = 256  # more would only lessen the noise of the choice of groups, small beside that of the block


class GroupMoments(NamedTuple):
    """Moments of a group's ghat = (1/K) sum_i A_i g_i; each (...,) float64, or NaN where B is too small.

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
    gram: np.ndarray, rewards: np.ndarray, lengths: np.ndarray, kind: str, group_size: int, n_groups: int = GROUPS_PER_BLOCK
) -> GroupMoments:
    """Unbiased moments of one kind of advantage (``group_advantages``) at one K from a block.

    gram (..., B, B), rewards and lengths (..., B).
    """
    size, lead = gram.shape[-1], rewards.shape[:-1]
    nothing = np.full(lead, np.nan)
    if group_size > size:
        return GroupMoments(nothing, nothing, nothing)
    members = partitions(size, group_size, n_groups)
    n_partitions, per_partition, _ = members.shape
    weights = np.zeros((*lead, n_partitions, per_partition, size))
    values = group_advantages(rewards[..., members], kind, lengths[..., members]) / group_size
    np.put_along_axis(weights, np.broadcast_to(members, values.shape), values, axis=-1)

    flat = weights.reshape(*lead, -1, size)
    images = flat @ gram
    squares = (images * flat).sum(-1).reshape(weights.shape[:-1])
    disjoint = inner = nothing
    if per_partition >= 2:
        together = weights.sum(-2)
        whole = ((together @ gram) * together).sum(-1)
        pairs = (whole - squares.sum(-1)) / (per_partition * (per_partition - 1))
        disjoint = pairs.mean(-1)
    if group_size + 2 <= size:
        inner = (images * _rest_estimates(members, rewards)).sum(-1).mean(-1)
    return GroupMoments(squares.mean((-2, -1)), disjoint, inner)


def _rest_estimates(members: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """For each group the weights (..., n_groups, B) of the leave-one-out estimate of theta from all non-members."""
    size = rewards.shape[-1]
    flat = members.reshape(-1, members.shape[-1])
    rest = np.ones((len(flat), size))
    np.put_along_axis(rest, flat, 0.0, axis=-1)
    n_rest = size - members.shape[-1]
    mean = (rewards @ rest.T) / n_rest
    return rest * (rewards[..., None, :] - mean[..., None]) / (n_rest - 1)
