"""Which gradient estimators are compared? One table; adding one is one entry.

An entry declares all that an estimator needs; nothing asks for an estimator by its name elsewhere. Its moments come from

* ``moments``, a closed form in the prompts' moments, or
* ``group``, a kind of advantages A_i: ghat = (1/K) sum_i A_i g_i, its moments from resampled groups (``blocks``).

K is the number of continuations of a group; theta(x) = E[g Z] is the prompt's true gradient. All formulas that name
theta take E[g] = 0. Scores of the law that was sampled have this mean, and the on-policy check of every run shows it.

Three flags of an entry say what happens to the groups of an update batch beyond their prompt:
* ``drop_silent``: groups of equal rewards are dropped; see ``given_kept``.
* ``per_token``: token-mean aggregation divides by the tokens of the whole batch; see ``over_mean_length``.
* ``batch_std``: advantages are over the std of the whole batch; see ``over_batch_std``.

``ESTIMATORS`` also has the losses of TRL and VERL by their names there (``trl_grpo``, ``verl_seq_mean_token_mean``, ...). A
loss that divides by a constant (``trl_dr_grpo`` by max_completion_length) is given without it. ``update_weights`` says
what an entry makes of one update batch. The tests compare it with the trainers' own code.

Gradients are sketched for the cosine of an estimator's mean to theta. The sketch of sum_i w_i g_i is unbiased for the
sketch of an estimator's mean where w_i are its weights. For an entry with a ``group`` these are averaged over the groups
of the block; ``direction`` says them for another one. An entry with neither points where GRPO points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from Gradient_evaluation.stats.advantages import TRL_EPSILON, group_advantages
from Gradient_evaluation.stats.blocks import mean_group_weights
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.moments import (
    NO_WEIGHTED_GROUPS,
    Moments,
    batch_std,
    best_baseline,
    given_kept,
    group_mean,
    leave_one_out,
    length_normalised,
    mean_of_others,
    oracle,
    over_batch_std,
    over_mean_length,
    prompt_only,
    resampled,
    sequence_mean,
    shrinkage,
)

if TYPE_CHECKING:
    from Gradient_evaluation.stats.prompts import PromptMoments


class Estimator(NamedTuple):
    """An entry of the table: what an estimator is called, and all that it needs."""

    title: str
    moments: Callable[[PromptMoments, int], Moments] | None = None  # of the prompts at one K
    group: str | None = None  # instead of ``moments``: a kind of advantages.group_advantages
    advantages: str | None = None  # the kind of advantages of which ``moments`` is the closed form, where there is one
    extra_rollout: str | None = None  # a continuation that is sampled beside the groups: "greedy"
    direction: Callable[..., np.ndarray] | None = None  # rewards, lengths, importance weights if any (B,) -> weights (B,)
    other_target: str | None = None  # what it estimates, if that is not theta
    drop_silent: bool = False
    per_token: bool = False
    batch_std: bool = False
    trainer: str | None = None  # TRL or VERL: a loss by its name there, which ``ALL`` leaves out
    label: str | None = None  # see ``label_of``


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
        "GRPO as in the paper: leave-one-out mean (RLOO)",
        leave_one_out,
        advantages="leave_one_out",
        direction=leave_one_out_weights,
        label="GRPO",
    ),
    "oracleV": Estimator("oracle baseline V(x)", oracle, label="oracle V(x)"),
    "best_baseline": Estimator("floor: best prompt-only baseline", best_baseline, label="floor b*(x)"),
    "mean_reward": Estimator("mean reward of the other prompts", lambda p, k: prompt_only(p, k, mean_of_others(p))),
    "greedy": Estimator(
        "reward of a greedy continuation (ReMax)", lambda p, k: prompt_only(p, k, p.greedy_reward), extra_rollout="greedy"
    ),
    "dr_grpo": Estimator("Dr. GRPO: mean of the whole group", group_mean, advantages="mean_only"),
    "shrinkage": Estimator("leave-one-out mean shrunk to the mean over prompts", shrinkage),
    "length_normalised": Estimator(
        "leave-one-out, score / length",
        length_normalised,
        advantages="leave_one_out/length",
        direction=weights_by_length,
        other_target=BY_LENGTH,
    ),
    "std_verl": Estimator("advantage over std, as VERL", group="std_verl", other_target=BY_STD),
    "std_paper": Estimator(
        "leave-one-out over std, as the paper's appendix", group="leave_one_out_over_std", other_target=BY_STD
    ),
    "opo": Estimator("OPO: length-weighted mean of the group", group="length_weighted"),
    "token_mean": Estimator(
        "leave-one-out, over the tokens of the update batch (token-mean)",
        leave_one_out,
        advantages="leave_one_out",
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
        advantages="leave_one_out",
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
BY_BATCH_STD = "over the standard deviation of the batch's rewards"


def _trl(loss: str, scale_rewards: str, target: str, moments=None, **more) -> Estimator:
    """An entry for one of TRL's losses."""
    batch = scale_rewards == "batch"
    more["other_target"] = f"{target}, {BY_BATCH_STD}" if batch else target
    title = f"TRL's loss_type={loss}, scale_rewards={scale_rewards}"
    return Estimator(title, moments, batch_std=batch, trainer="TRL", **more)


MEAN, BY_SEQUENCE = {"advantages": "mean_only"}, {"advantages": "mean_only/length", "direction": weights_by_length}
BY_GROUP_TOKENS = "theta over the tokens of the group"
THETA = "theta times (K-1)/K"
ESTIMATORS |= {
    "trl_grpo": _trl("grpo", "group", f"{BY_STD} and by lengths", group="std_trl/length"),
    "trl_grpo_batch": _trl("grpo", "batch", BY_LENGTH, sequence_mean, **BY_SEQUENCE),
    "trl_grpo_none": _trl("grpo", "none", BY_LENGTH, sequence_mean, **BY_SEQUENCE),
    "trl_bnpo": _trl("bnpo", "group", f"{BY_STD} and its tokens", group="std_trl/group_tokens"),
    "trl_bnpo_batch": _trl("bnpo", "batch", BY_GROUP_TOKENS, group="mean_only/group_tokens"),
    "trl_bnpo_none": _trl("bnpo", "none", BY_GROUP_TOKENS, group="mean_only/group_tokens"),
    "trl_dapo": _trl("dapo", "group", f"{BY_STD}, {BY_MEAN_LENGTH}", group="std_trl", per_token=True),
    "trl_dapo_batch": _trl("dapo", "batch", f"{THETA}, {BY_MEAN_LENGTH}", group_mean, per_token=True, **MEAN),
    "trl_dapo_none": _trl("dapo", "none", f"{THETA}, {BY_MEAN_LENGTH}", group_mean, per_token=True, **MEAN),
    "trl_dr_grpo": _trl("dr_grpo", "group", BY_STD, group="std_trl"),
    "trl_dr_grpo_batch": _trl("dr_grpo", "batch", THETA, group_mean, **MEAN),
    "verl_seq_mean_token_mean": Estimator(
        "VERL's loss_agg_mode=seq-mean-token-mean: advantage over std, score / length",
        group="std_verl/length",
        other_target=f"{BY_STD} and by lengths",
        trainer="VERL",
    ),
}
ALIASES = {"rloo": "grpo", "vanilla": "naive", "oracle": "oracleV", "floor": "best_baseline", "remax": "greedy"}
# Losses of the trainers that are entries above; _none of VERL's: norm_adv_by_std_in_grpo=False
ALIASES |= {
    "trl_dr_grpo_none": "dr_grpo",
    "verl_token_mean": "verl_default",
    "verl_seq_mean_token_sum": "std_verl",
    "verl_seq_mean_token_sum_norm": "std_verl",
    "verl_token_sum": "std_verl",
    "verl_token_mean_none": "trl_dapo_none",
    "verl_seq_mean_token_mean_none": "trl_grpo_none",
    "verl_seq_mean_token_sum_none": "dr_grpo",
    "verl_seq_mean_token_sum_norm_none": "dr_grpo",
    "verl_token_sum_none": "dr_grpo",
}
ALL = [name for name, entry in ESTIMATORS.items() if not entry.trainer]  # what "all" stands for
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


def sketched_names(names: Sequence[str], weighted: bool = False) -> list[str]:
    """``REFERENCE``, and those of ``names`` (and aliases) whose mean has another direction, in a fixed order.

    weighted: only those that importance weights can correct, which are those without resampled groups.
    """
    entries = {name: ESTIMATORS[name] for name in resolve(names) if name != REFERENCE}
    return [REFERENCE, *sorted(name for name, entry in entries.items() if entry.direction or (entry.group and not weighted))]


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


def update_weights(name: str, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(n, K): the weights w of the scores in the gradient sum w g / (n K) of one update batch of n groups of K.

    rewards, lengths: (n, K). Here the batch's own mean length, standard deviation and kept groups are taken, to which the
    constants of ``moments_of`` tend. Raises ValueError for a name whose baseline does not come from the group.
    """
    entry = ESTIMATORS[ALIASES.get(name, name)]
    kind = entry.group or entry.advantages
    if kind is None:
        raise ValueError(f"{name}: its baseline does not come from the rewards of the group")
    weights, kept = group_advantages(rewards, kind, lengths), np.ones(len(rewards), dtype=bool)
    if entry.drop_silent:
        kept = (rewards != rewards[:, :1]).any(-1)
        weights = weights / max(kept.mean(), np.finfo(float).tiny)
    if entry.batch_std:
        weights = weights / (rewards.std(ddof=1) + TRL_EPSILON)
    return weights / lengths[kept].mean() if entry.per_token and kept.any() else weights


def batch_factor(prompts: PromptMoments, name: str) -> float:
    """What an entry without dropped groups multiplies every group's (1/K) sum_i A_i g_i by: the constants of its batch."""
    entry = ESTIMATORS[name]
    return (1 / prompts.mean_length if entry.per_token else 1.0) / (batch_std(prompts) if entry.batch_std else 1.0)


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
    if entry.batch_std:
        found = over_batch_std(prompts, found)
    if isinstance(found.trace, Missing) and not entry.group:
        found = found._replace(signal=found.trace, squared_bias=found.trace, mse=found.trace)
    if entry.other_target:
        why = Missing(f"its target is not theta but {entry.other_target}")
        found = found._replace(squared_bias=why, mse=why)
    return found
