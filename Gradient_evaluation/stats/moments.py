"""The moments of one estimator at one K, from the moments of the prompts: closed forms, and what an update batch adds.

``stats/estimators.py`` has the table that names these functions. K is the number of continuations of a group; theta(x) =
E[g Z] is the prompt's true gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from Gradient_evaluation.stats.advantages import TRL_EPSILON
from Gradient_evaluation.stats.blocks import group_trace, prompt_only_trace
from Gradient_evaluation.stats.missing import Missing

if TYPE_CHECKING:
    from Gradient_evaluation.stats.prompts import PromptMoments

NO_TARGET = Missing("its target is not theta")
NO_WEIGHTED_GROUPS = Missing(
    "the continuations have importance weights, and a resampled group would need the product of all its weights; sample "
    "from the model itself"
)
CROSS_FITTED = "cross-fitted"  # V(x) from the other blocks of the prompt, not from an oracle table


class Moments(NamedTuple):
    """One estimator at one K; the first four are (n_prompts,) float64 or Missing."""

    trace: np.ndarray | Missing  # tr Cov[ghat | x]
    signal: np.ndarray | Missing  # ||E[ghat | x]||^2
    squared_bias: np.ndarray | Missing = NO_TARGET  # ||E[ghat | x] - theta(x)||^2
    mse: np.ndarray | Missing = NO_TARGET  # E||ghat - theta(x)||^2
    scale: float | None = None  # where E[ghat | x] = scale * theta(x) exactly
    weight: np.ndarray | None = None  # how much each prompt counts: P(keep) where groups are dropped
    notes: Mapping[str, float] = {}  # further numbers for the results, such as a fitted weight
    variant: str | None = None  # what title and label add, where what was computed is not plainly the entry


def unbiased(prompts: PromptMoments, trace: np.ndarray | Missing, **more) -> Moments:
    """The moments of an estimator with E[ghat] = theta: the MSE is the trace."""
    return Moments(trace, prompts.pairs.theta_sq, np.zeros(len(prompts)), trace, scale=1.0, **more)


def prompt_only(prompts: PromptMoments, group_size: int, baseline: np.ndarray | float | Missing) -> Moments:
    """The estimator (1/K) sum_i g_i (Z_i - b(x)) with b fixed before the group is drawn."""
    if isinstance(baseline, Missing):
        return unbiased(prompts, baseline)
    return unbiased(prompts, prompt_only_trace(prompts.coefficients, baseline - prompts.centre) / group_size)


def oracle(prompts: PromptMoments, group_size: int) -> Moments:
    """b = V(x): of the oracle table, or where there is none of the prompt's other blocks (``prompts.cross_fitted_oracle``)."""
    if not isinstance(prompts.oracle_value, Missing):
        return prompt_only(prompts, group_size, prompts.oracle_value)
    trace = prompts.cross_fitted_trace
    if isinstance(trace, Missing):
        return unbiased(prompts, trace)
    return unbiased(prompts, trace / group_size, variant=CROSS_FITTED)


def best_baseline(prompts: PromptMoments, group_size: int) -> Moments:
    """b* = E[Z ||g||^2] / E||g||^2, cross-fitted over blocks (Greensmith et al. 2004): the floor of ``prompt_only``."""
    trace = prompts.best_trace
    return unbiased(prompts, trace if isinstance(trace, Missing) else trace / group_size)


def mean_of_others(prompts: PromptMoments) -> np.ndarray | Missing:
    """(n,): for each prompt the mean over the other prompts of their mean rewards."""
    n = len(prompts)
    if n < 2:
        return Missing("the mean reward of the other prompts needs at least two prompts")
    return (prompts.mean_reward.sum() - prompts.mean_reward) / (n - 1)


def leave_one_out(prompts: PromptMoments, group_size: int) -> Moments:
    """GRPO as in the paper: C_i the mean of the other K - 1 rewards; a U-statistic of order 2."""
    return unbiased(prompts, group_trace(prompts.pairs, group_size))


def group_mean(prompts: PromptMoments, group_size: int) -> Moments:
    """Dr. GRPO: C the mean of all K rewards, which is (K-1)/K times leave-one-out, bias -theta/K."""
    scale = (group_size - 1) / group_size
    theta_sq = prompts.pairs.theta_sq
    trace, bias = scale**2 * group_trace(prompts.pairs, group_size), theta_sq / group_size**2
    return Moments(trace, scale**2 * theta_sq, bias, trace + bias, scale=scale)


def mixture_trace(prompts: PromptMoments, group_size: int, weight, baseline) -> np.ndarray:
    """tr Cov of weight * leave-one-out + (1 - weight) * prompt-only(baseline): exact, derived in docs/method.md 4."""
    group, constant, covariance = _mixture_parts(prompts, group_size, baseline)
    return weight**2 * group + (1 - weight) ** 2 * constant + 2 * weight * (1 - weight) * covariance


def _mixture_parts(prompts: PromptMoments, group_size: int, baseline: np.ndarray):
    """tr Cov of leave-one-out and of prompt-only at baseline (..., n), and their covariance; broadcast to (..., n)."""
    group, baseline = group_trace(prompts.pairs, group_size), baseline - prompts.centre
    constant = prompt_only_trace(prompts.coefficients, baseline) / group_size
    covariance = 2 / group_size * (prompts.mixture[:, 0] - baseline * prompts.mixture[:, 1])
    return np.broadcast_to(group, constant.shape), constant, covariance


def shrinkage_weights(prompts: PromptMoments, group_size: int) -> np.ndarray:
    """(n,) weights in [0, 1] of the leave-one-out mean that minimise the average trace of the OTHER prompts.

    One weight for all prompts, cross-fitted: that of prompt x comes from the other prompts alone, and so does the mean
    toward which these are shrunk. So the noise of a prompt never reaches its own weight. Needs 3 prompts.
    """
    n, mean = len(prompts), prompts.mean_reward
    baseline = (mean.sum() - mean[:, None] - mean[None, :]) / (n - 2)  # of prompt y when x is left out: [x, y]
    others = 1.0 - np.eye(n)
    group, constant, covariance = ((part * others).sum(-1) for part in _mixture_parts(prompts, group_size, baseline))
    curvature = group + constant - 2 * covariance
    best = np.divide(constant - covariance, curvature, out=(group <= constant) * 1.0, where=curvature > 0)
    return np.clip(best, 0.0, 1.0)


def shrinkage(prompts: PromptMoments, group_size: int) -> Moments:
    """Leave-one-out mean pulled toward the mean over the other prompts (arXiv 2511.03710), weight cross-fitted."""
    if len(prompts) < 3:
        return unbiased(prompts, Missing("the cross-fitted shrinkage weight needs at least three prompts"))
    weights = shrinkage_weights(prompts, group_size)
    trace = mixture_trace(prompts, group_size, weights, mean_of_others(prompts))
    return unbiased(prompts, trace, notes={"leave_one_out_weight": float(weights.mean())})


def length_normalised(prompts: PromptMoments, group_size: int) -> Moments:
    """Leave-one-out with the score g / length: the same formulas with Q_ij / (l_i l_j)."""
    pairs = prompts.pairs_by_length
    return Moments(group_trace(pairs, group_size), pairs.theta_sq)


def sequence_mean(prompts: PromptMoments, group_size: int) -> Moments:
    """The mean of the whole group as baseline, with the score g / length: (K-1)/K times ``length_normalised``."""
    return scaled(length_normalised(prompts, group_size), (group_size - 1) / group_size)


def resampled(prompts: PromptMoments, kind: str, group_size: int) -> Moments:
    """(1/K) sum_i A_i g_i for a kind of advantages, from the moments of resampled groups."""
    if prompts.weighted:
        return Moments(*[NO_WEIGHTED_GROUPS] * 4)
    found, theta_sq = prompts.groups[kind, group_size], prompts.pairs.theta_sq
    signal = trace = bias = _too_small(group_size, 2 * group_size)
    mse: np.ndarray | Missing = _too_small(group_size, group_size + 2)
    if _complete(found.inner):
        mse = found.square - 2 * found.inner + theta_sq
    if _complete(found.disjoint):
        signal, trace = found.disjoint, found.square - found.disjoint
        bias = mse if isinstance(mse, Missing) else mse - trace
    return Moments(trace, signal, bias, mse)


def given_kept(prompts: PromptMoments, found: Moments, group_size: int) -> Moments:
    """Moments given that the group is not silent; ``found`` are those over all groups.

    P(keep) = 1 - P(all rewards equal), unbiased from all continuations of the prompt (``silent_groups``). A silent
    group has ghat = 0, so E[ghat 1_keep] = E[ghat] and E[||ghat||^2 1_keep] = E||ghat||^2, whose estimates are
    unbiased too. A prompt weighs by P(keep), its share of the groups in a batch, so only these products are averaged:
        P ||E[ghat | keep]||^2 = ||E ghat||^2 / P,    P tr Cov[ghat | keep] = E||ghat||^2 - ||E ghat||^2 / P.
    The quotient is not unbiased, but consistent as the number of continuations of the prompt grows. Its P is that of
    ``kept_beside_a_pair``, which removes most of the bias. A prompt whose rewards are all equal has P = 0 and weighs
    nothing.
    """
    if prompts.weighted:
        return Moments(*[NO_WEIGHTED_GROUPS] * 2)
    kept = np.array([1 - each.silent_share(group_size) for each in prompts.outcomes])
    if not _complete(kept):
        why = Missing(f"the share of silent groups at K={group_size} needs at least {group_size} continuations of every prompt")
        return Moments(why, why)
    if isinstance(found.trace, Missing):
        return found._replace(weight=kept, scale=None)
    beside = np.array([each.kept_beside_a_pair(group_size) for each in prompts.outcomes])
    if not _complete(beside):
        why = Missing(f"K={group_size} needs at least {group_size + 2} continuations of every prompt where groups are dropped")
        return Moments(why, why, weight=kept)
    signal = np.divide(found.signal, kept * beside, out=np.zeros_like(kept), where=beside > 0)
    trace = np.divide(found.trace + found.signal, kept, out=np.zeros_like(kept), where=kept > 0) - signal
    return Moments(trace, signal, weight=kept)


def over_mean_length(prompts: PromptMoments, found: Moments, group_size: int, drop_silent: bool) -> Moments:
    """ghat over L: sum_i A_i g_i / (K L), with L the mean number of tokens of a continuation in the update batch.

    VERL's token-mean and TRL's ``dapo`` divide sum_i A_i g_i over all groups of the update batch by the tokens of all
    groups. That is the mean over groups of sum_i A_i g_i / (K L) with L the batch's mean length. Here L is that of all
    continuations of all prompts (with ``drop_silent`` of the groups that are kept): a constant, to which the batch's
    own mean length tends as groups are added. It changes the scale and no direction, and it is fixed in the resamples.
    One effect is left out: L differs between batches. To first order a group then also adds
    -R (tokens of the group / (K L) - 1), where R = E[sum_i A_i g_i] / (K L) is the mean gradient over all prompts. This
    term couples prompts, so no moment of a single prompt contains it. Its size is the relative spread of a group's
    tokens times the norm of the MEAN gradient; compare it with sqrt(tr Cov).
    """
    length = prompts.mean_length
    if drop_silent and found.weight is not None and found.weight.sum() > 0:
        length = sum(each.kept_tokens(group_size) for each in prompts.outcomes) / found.weight.sum()
    notes = {**found.notes, "tokens_per_continuation": float(length)}
    return scaled(found, 1 / length)._replace(notes=notes)


def over_batch_std(prompts: PromptMoments, found: Moments) -> Moments:
    """ghat over s + 1e-4, with s the standard deviation of the rewards of all continuations of all prompts.

    TRL's scale_rewards="batch". As in ``over_mean_length`` this is a constant, to which the batch's own tends.
    """
    return scaled(found, 1 / batch_std(prompts))


def batch_std(prompts: PromptMoments) -> float:
    """Standard deviation of the rewards of all continuations, and TRL's 1e-4."""
    within = np.mean([each.variance for each in prompts.outcomes])
    return float(np.sqrt(within + prompts.mean_reward.var()) + TRL_EPSILON)


def scaled(found: Moments, factor: float) -> Moments:
    """The moments of ``factor`` times an estimator whose target is not theta."""
    if isinstance(found.trace, Missing):
        return found
    scale = None if found.scale is None else found.scale * factor
    return found._replace(trace=found.trace * factor**2, signal=found.signal * factor**2, scale=scale)


def _complete(values: np.ndarray) -> bool:
    return not np.isnan(values).any()


def _too_small(group_size: int, needed: int) -> Missing:
    return Missing(f"K={group_size} needs a block of at least {needed} continuations of every prompt")
