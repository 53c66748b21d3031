"""Which combinations of a block's scores are sketched? GRPO's, and one per estimator whose mean is not theta.

The sketch of sum_i w_i g_i is unbiased for the sketch of an estimator's mean when w_i are its weights, averaged over
the groups of the block where they depend on the group. Unbiased estimators, Dr. GRPO, token_mean and
dynamic_sampling point where GRPO points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.stats.estimators import group_rules
from Gradient_evaluation.stats.resampled_groups import partitions


def sketched_names(estimators: Sequence[str]) -> list[str]:
    """``grpo``, and those of the estimators whose mean has another direction, in a fixed order."""
    others = {name for name in group_rules(estimators)} | {name for name in estimators if name == "length_normalised"}
    return ["grpo", *sorted(others)]


def sketch_weights(names: Sequence[str], rewards: np.ndarray, lengths: np.ndarray, K: int) -> np.ndarray:
    """Weights (len(names), B) of one block: rewards and lengths (B,), groups of K where the weights depend on them.

    Where the block is smaller than K the groups are the whole block. Silent groups count as 0, so the sum over
    blocks weighs each by its chance to be kept. Division by the mean length of the batch is left out: the directions
    are compared.
    """
    size, kinds = len(rewards), group_rules([name for name in names if name != "grpo"])
    plain = group_advantages(rewards, "leave_one_out") / size
    ways = {"grpo": plain, "length_normalised": plain / np.maximum(lengths, 1)}
    return np.stack(
        [ways[name] if name in ways else _over_groups(kinds[name], rewards, lengths, min(K, size)) for name in names]
    )


def _over_groups(kind: str, rewards: np.ndarray, lengths: np.ndarray, K: int) -> np.ndarray:
    members = partitions(len(rewards), K)
    weights = group_advantages(rewards[members], kind, lengths[members]) / K
    total = np.zeros(len(rewards))
    np.add.at(total, members.ravel(), weights.ravel())
    return total / (members.shape[0] * members.shape[1])
