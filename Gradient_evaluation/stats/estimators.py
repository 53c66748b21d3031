"""Which gradient estimators are compared? One table; adding one is one entry.

An entry declares all that an estimator needs; nothing asks for an estimator by its name elsewhere. Its moments come from

* ``moments``, a closed form in the prompts' moments, or
* ``group``, a kind of advantages A_i: ghat = (1/K) sum_i A_i g_i, its moments from resampled groups (``blocks``).

K is the number of continuations of a group; theta(x) = E[g Z] is the prompt's true gradient. All formulas that name
theta take E[g] = 0. Scores of the law that was sampled have this mean, and the on-policy check of every run shows it.

Two flags of an entry say what happens to the groups of an update batch beyond their prompt:
* ``drop_silent``: groups of equal rewards are dropped; see ``given_kept``.
* ``per_token``: token-mean aggregation divides by the tokens of the whole batch; see ``over_mean_length``.

Gradients are sketched for the cosine of an estimator's mean to theta. The sketch of sum_i w_i g_i is unbiased for the
sketch of an estimator's mean where w_i are its weights. For an entry with a ``group`` these are averaged over the groups
of the block; ``direction`` says them for another one. An entry with neither points where GRPO points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.stats.blocks import group_trace, mean_group_weights, prompt_only_trace
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


class Estimator(NamedTuple):
    """An entry of the table: what an estimator is called, and all that it needs."""

    title: str
    moments: Callable[[PromptMoments, int], Moments] | None = None  # of the prompts at one K
    group: str | None = None  # instead of ``moments``: a kind of advantages.group_advantages
    extra_rollout: str | None = None  # a continuation that is sampled beside the groups: "greedy"
    direction: Callable[..., np.ndarray] | None = None  # rewards, lengths, importance weights if any (B,) -> weights (B,)
    other_target: str | None = None  # what it estimates, if that is not theta
    drop_silent: bool = False
    per_token: bool = False
    label: str | None = None  # see ``label_of``


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
    if isinstance(found.trace, Missing):
        return found._replace(notes=notes)
    scale = None if found.scale is None else found.scale / length
    return found._replace(trace=found.trace / length**2, signal=found.signal / length**2, scale=scale, notes=notes)


def _complete(values: np.ndarray) -> bool:
    return not np.isnan(values).any()


def _too_small(group_size: int, needed: int) -> Missing:
    return Missing(f"K={group_size} needs a block of at least {needed} continuations of every prompt")


def leave_one_out_weights(rewards: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """(B,): the weights of GRPO's scores in a block of rewards (B,), which may have importance weights (B,).

    With weights w it is the mean of w_i w_j h_ij over i != j over that of w_i w_j:
    w_k (W Z_k - S) / (W^2 - sum w^2), W = sum w, S = sum w Z.
    """
    if weights is None:
        return group_advantages(rewards, "leave_one_out") / len(rewards)
    whole, centred = weights.sum(), rewards - rewards.mean()
    return weights * (whole * centred - weights @ centred) / (whole**2 - weights @ weights)


def weights_by_length(rewards: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """(B,): the same for scores g / length."""
    return leave_one_out_weights(rewards, lengths, weights) / np.maximum(lengths, 1)


BY_STD = "theta scaled by the group's standard deviation"
BY_LENGTH = "theta scaled by lengths"
BY_MEAN_LENGTH = "over the mean number of tokens of a continuation"

ESTIMATORS: dict[str, Estimator] = {
    "naive": Estimator("vanilla: no baseline", lambda p, k: prompt_only(p, k, 0.0), label="vanilla"),
    "grpo": Estimator(
        "GRPO as in the paper: leave-one-out mean (RLOO)", leave_one_out, direction=leave_one_out_weights, label="GRPO"
    ),
    "oracleV": Estimator("oracle baseline V(x)", oracle, label="oracle V(x)"),
    "best_baseline": Estimator("floor: best prompt-only baseline", best_baseline, label="floor b*(x)"),
    "mean_reward": Estimator("mean reward of the other prompts", lambda p, k: prompt_only(p, k, mean_of_others(p))),
    "greedy": Estimator(
        "reward of a greedy continuation (ReMax)", lambda p, k: prompt_only(p, k, p.greedy_reward), extra_rollout="greedy"
    ),
    "dr_grpo": Estimator("Dr. GRPO: mean of the whole group", group_mean),
    "shrinkage": Estimator("leave-one-out mean shrunk to the mean over prompts", shrinkage),
    "length_normalised": Estimator(
        "leave-one-out, score / length", length_normalised, direction=weights_by_length, other_target=BY_LENGTH
    ),
    "std_verl": Estimator("advantage over std, as VERL", group="std_verl", other_target=BY_STD),
    "std_paper": Estimator(
        "leave-one-out over std, as the paper's appendix", group="leave_one_out_over_std", other_target=BY_STD
    ),
    "opo": Estimator("OPO: length-weighted mean of the group", group="length_weighted"),
    "token_mean": Estimator(
        "leave-one-out, over the tokens of the update batch (token-mean)",
        leave_one_out,
        other_target=f"theta {BY_MEAN_LENGTH}",
        per_token=True,
    ),
    "verl_default": Estimator(
        "VERL's default: advantage over std, over the tokens of the update batch (token-mean)",
        group="std_verl",
        other_target=f"{BY_STD}, {BY_MEAN_LENGTH}",
        per_token=True,
    ),
    "dynamic_sampling": Estimator(
        "leave-one-out, groups of equal rewards dropped",
        leave_one_out,
        other_target="theta over P(keep), given that the group is kept",
        drop_silent=True,
    ),
    "dapo": Estimator(
        "DAPO: over std, groups of equal rewards dropped, over the tokens of the update batch (token-mean)",
        group="std_verl",
        other_target=f"{BY_STD}, {BY_MEAN_LENGTH}, given that the group is kept",
        drop_silent=True,
        per_token=True,
    ),
}
ALIASES = {"rloo": "grpo", "vanilla": "naive", "oracle": "oracleV", "floor": "best_baseline", "remax": "greedy"}
DEFAULT = ("naive", "grpo", "oracleV", "best_baseline")
REFERENCE = "grpo"  # unbiased: the direction of its mean is that of theta


def label_of(name: str) -> str:
    """What every picture and list calls an estimator: its label, else its name on the command line."""
    return ESTIMATORS[name].label or name if name in ESTIMATORS else name


def resolve(names: Sequence[str]) -> list[str]:
    """The default four and then ``names``, each once, without aliases. Raises ValueError for an unknown name."""
    unknown = [name for name in names if name not in ESTIMATORS and name not in ALIASES]
    if unknown:
        raise ValueError(f"unknown estimator {unknown[0]!r}: one of {', '.join([*ESTIMATORS, *ALIASES])}")
    return list(dict.fromkeys([*DEFAULT, *(ALIASES.get(name, name) for name in names)]))


def group_rules(names: Sequence[str]) -> dict[str, str]:
    """{name: kind of advantages} of those among ``names`` (and aliases) that need resampled groups.

    They need blocks of 2 * max(K_list).
    """
    return {name: ESTIMATORS[name].group for name in resolve(names) if ESTIMATORS[name].group is not None}


def extra_rollouts(names: Sequence[str]) -> set[str]:
    """The continuations that must be sampled beside the groups for ``names`` (and aliases)."""
    return {ESTIMATORS[name].extra_rollout for name in resolve(names)} - {None}


def sketched_names(names: Sequence[str]) -> list[str]:
    """``REFERENCE``, and those of ``names`` (and aliases) whose mean has another direction, in a fixed order."""
    entries = {name: ESTIMATORS[name] for name in resolve(names) if name != REFERENCE}
    return [REFERENCE, *sorted(name for name, entry in entries.items() if entry.group or entry.direction)]


def sketch_weights(
    names: Sequence[str], rewards: np.ndarray, lengths: np.ndarray, group_size: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """Weights (len(names), B) of the scores of one block; ``names`` as of ``sketched_names``, the others (B,).

    weights: importance weights; ValueError for a name with resampled groups, which have none. Silent groups count as 0, so
    the sum over blocks weighs each block by its P(keep). The division by the mean length of the batch is left out: only
    directions are compared.
    """
    entries = [ESTIMATORS[name] for name in names]
    if weights is not None and any(entry.group for entry in entries):
        raise ValueError(NO_WEIGHTED_GROUPS.reason)
    importance = () if weights is None else (weights,)
    return np.stack(
        [
            entry.direction(rewards, lengths, *importance)
            if entry.direction
            else mean_group_weights(entry.group, rewards, lengths, group_size)
            for entry in entries
        ]
    )


def moments_of(prompts: PromptMoments, name: str, group_size: int) -> Moments:
    """One estimator at one K. Raises ValueError where the prompts were reduced without its groups of this K."""
    entry = ESTIMATORS[name]
    if entry.group and (entry.group, group_size) not in prompts.groups:
        raise ValueError(f"{name} at K={group_size}: call reduce_prompts with this estimator and K_list")
    found = resampled(prompts, entry.group, group_size) if entry.group else entry.moments(prompts, group_size)
    if entry.drop_silent:
        found = given_kept(prompts, found, group_size)
    if entry.per_token:
        found = over_mean_length(prompts, found, group_size, entry.drop_silent)
    if isinstance(found.trace, Missing) and not entry.group:
        found = found._replace(signal=found.trace, squared_bias=found.trace, mse=found.trace)
    if entry.other_target:
        why = Missing(f"its target is not theta but {entry.other_target}")
        found = found._replace(squared_bias=why, mse=why)
    return found
