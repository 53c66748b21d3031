"""How good is each gradient estimator at each group size? From Gram records to the results dictionary.

    prompts = reduce_prompts(records, K_list, ["dr_grpo"])             # one pass; no Gram stays in memory
    bootstrap = PromptBootstrap(len(prompts), seed=0)                  # one object for all intervals of a run
    results = summarise(prompts, K_list, bootstrap, ["dr_grpo"])       # JSON-ready, see its docstring
    traces = prompt_trace_covs(prompts, group_size=4)                  # per prompt, for the detailed files

The published three and the floor are always in the results. They are (1/K) sum_i g_i (Z_i - C_i), with g the score and
Z the reward of K continuations of one prompt: ``naive`` C = 0, ``grpo`` C_i = mean of the other K - 1 rewards,
``oracleV`` C = V(x), and ``best_baseline``, which no baseline that depends on the prompt only can beat. ``estimators.py``
has more. The code assumes no order among them: it depends on the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from Gradient_evaluation.stats.bootstrap import Estimate, PromptBootstrap
from Gradient_evaluation.stats.estimators import DEFAULT, ESTIMATORS, label_of, moments_of, resolve
from Gradient_evaluation.stats.missing import Missing, with_reasons
from Gradient_evaluation.stats.moments import Moments
from Gradient_evaluation.stats.prompts import CLASSES, PromptMoments, reduce_prompts

__all__ = ["effective_group_size", "prompt_trace_covs", "reduce_prompts", "summarise"]

PUBLISHED = ("naive", "grpo", "oracleV")
FLOOR = "best_baseline"
LABELS = {"all": "there", "right": "right", "wrong": "wrong", "above": "above V(x)", "not_above": "not above V(x)"}
SPLITS = {True: "right: reward 1; wrong: reward 0", False: "right: reward above V(x); wrong: reward not above V(x)"}
SPLIT_WITHOUT_V = (
    "right: reward above the mean reward of its prompt (above V(x), where that is known); wrong: reward not above it"
)


def prompt_trace_covs(
    prompts: PromptMoments, group_size: int, names: Sequence[str] = ()
) -> dict[str, list[float | None] | None]:
    """tr Cov of each prompt at one K: {name: (n_prompts,) list or None} for the default four and ``names``.

    Single prompts are noisy and an estimate may be below 0. None: see ``summarise``'s ``reasons``. Inside a list it is a
    prompt of which no group is kept.
    """
    _check_group_sizes([group_size])
    result: dict = {}
    for name in resolve(names):
        found = moments_of(prompts, name, group_size)
        trace = None if isinstance(found.trace, Missing) else found.trace.tolist()
        if trace is not None and found.weight is not None:
            trace = [value if weight > 0 else None for value, weight in zip(trace, found.weight)]
        result[name] = trace
    return result


def _check_group_sizes(group_sizes: Sequence[int]) -> None:
    if not len(group_sizes) or min(group_sizes) < 2:
        raise ValueError(f"group sizes must be at least 2, got {list(group_sizes)}")


def summarise(prompts: PromptMoments, K_list: Sequence[int], bootstrap: PromptBootstrap, names: Sequence[str] = ()) -> dict:
    """The results of a run, JSON-ready: floats, lists and None, never NaN.

    Lists are aligned with ``K_list``. Intervals are 95% bootstrap-t over prompts, [low, high]. A baseline taken from
    other prompts is fixed in the resamples. A value or interval that could not be computed is None, and ``reasons``
    has a text under its dotted path (``"signal_to_noise.grpo"``).

    K_list, n_prompts, n_blocks, n_continuations;
    V_source: "table", or "cross-fitted" where V(x) comes from the other blocks of the prompt;
    conditional_on_x {naive, grpo, oracleV: list}: mean over prompts of trace(Cov | x), the published keys;
    conditional_on_x_ci95; best_baseline: list, the floor; best_baseline_ci95;
    theta_norm_sq, theta_norm_sq_ci95: mean over prompts of ||theta(x)||^2;
    signal_to_noise {naive, grpo, oracleV, best_baseline: list}, signal_to_noise_ci95: mean ||theta||^2 over mean
      trace(Cov), None where the interval of the latter is not above 0;
    estimators {name: see ``_compare``}: the default four and ``names``, in full;
    on_policy_check: see ``_on_policy_check``; score_norm_sq: see ``_score_norms``;
    bootstrap {n_bootstrap, seed}; reasons.
    """
    _check_group_sizes(K_list)
    table = {name: _compare(prompts, name, K_list, bootstrap) for name in resolve(names)}
    theta = bootstrap.mean(prompts.pairs.theta_sq)
    return with_reasons(
        {
            "K_list": [int(size) for size in K_list],
            "n_prompts": len(prompts),
            "n_blocks": int(prompts.n_blocks.sum()),
            "n_continuations": int(prompts.n_outcomes[:, 0].sum()),
            "V_source": prompts.V_source,
            **_published(table),
            "theta_norm_sq": theta.value_or_missing(),
            "theta_norm_sq_ci95": theta.interval_or_missing(),
            "estimators": table,
            "on_policy_check": _on_policy_check(prompts),
            "score_norm_sq": _score_norms(prompts, bootstrap),
            "bootstrap": {"n_bootstrap": int(bootstrap.n_bootstrap), "seed": int(bootstrap.seed)},
        }
    )


def _published(table: dict) -> dict:
    """The published keys, and the floor beside them, from the full table."""
    result: dict = {}
    for end in ("", "_ci95"):
        result[f"conditional_on_x{end}"] = {name: table[name][f"trace_cov{end}"] for name in PUBLISHED}
        result[f"{FLOOR}{end}"] = table[FLOOR][f"trace_cov{end}"]
        result[f"signal_to_noise{end}"] = {name: table[name][f"signal_to_noise{end}"] for name in DEFAULT}
    return result


def _compare(prompts: PromptMoments, name: str, K_list: Sequence[int], bootstrap: PromptBootstrap) -> dict:
    """One estimator in full: {title, label, target, then lists aligned with K_list, each with a ``_ci95`` beside it}.

    trace_cov; squared_bias and mse (where the target is theta); signal_to_noise ||E ghat||^2 / trace(Cov);
    effective_group_size: the K >= 2 at which plain GRPO has that signal-to-noise ratio; continuations_per_group: K, or
    K / P(keep) where groups are dropped; signal_to_noise_per_continuation: the ratio of the two;
    prompts_never_kept (a count, without interval), and notes (for example a fitted weight).
    """
    entry = ESTIMATORS[name]
    moments = [moments_of(prompts, name, size) for size in K_list]
    variant = f", {moments[0].variant}" if moments[0].variant else ""
    result: dict = {"title": entry.title + variant, "label": label_of(name) + variant, "target": entry.other_target or "theta"}
    for quantity, measure in QUANTITIES.items():
        estimates = [measure(prompts, each, size, bootstrap) for each, size in zip(moments, K_list)]
        result[quantity] = [estimate.value_or_missing() for estimate in estimates]
        result[f"{quantity}_ci95"] = [estimate.interval_or_missing() for estimate in estimates]
    result["prompts_never_kept"] = [0 if m.weight is None else int((m.weight == 0).sum()) for m in moments]
    result["notes"] = [dict(each.notes) for each in moments]
    return result


def _average(part: str):
    """The measure of one field of Moments: its mean over prompts, weighted by P(keep) where groups are dropped."""

    def measure(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
        values = getattr(moments, part)
        if isinstance(values, Missing):
            return Estimate(None, None, values.reason)
        if moments.weight is None:
            return bootstrap.mean(values)
        return bootstrap.share_ratio(moments.weight * values, moments.weight, f"share of groups kept at K={group_size}")

    return measure


def _weighted(moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Columns whose means have the ratio of the averages of trace and signal; the weights' mean cancels."""
    weight = 1.0 if moments.weight is None else moments.weight
    return weight * moments.trace, weight * moments.signal


def _signal_to_noise(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    if isinstance(moments.trace, Missing):
        return Estimate(None, None, moments.trace.reason)
    trace, signal = _weighted(moments)
    return bootstrap.ratio(signal, trace, f"trace(Cov) at K={group_size}")


def _continuations(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    if moments.weight is None and isinstance(moments.trace, Missing):
        return Estimate(None, None, moments.trace.reason)
    kept = np.ones(len(prompts)) if moments.weight is None else moments.weight
    return bootstrap.share_ratio(np.full(len(prompts), group_size), kept, f"share of groups kept at K={group_size}")


def _signal_per_continuation(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    if isinstance(moments.trace, Missing):
        return Estimate(None, None, moments.trace.reason)
    trace, signal = _weighted(moments)
    kept = np.ones(len(prompts)) if moments.weight is None else moments.weight
    reason = bootstrap.zero_reason(trace, f"trace(Cov) at K={group_size}")
    if reason:
        return Estimate(None, None, reason)
    return bootstrap.of_means([signal, trace, kept], lambda s, t, k: s / t * k / group_size)


def effective_group_size(trace, zeta1, pair_excess):
    """The K > 1 with 4 zeta1 / K + pair_excess / (K (K - 1)) = trace, where pair_excess = 2 zeta2 - 4 zeta1.

    The larger root of trace K^2 - (trace + 4 zeta1) K + 4 zeta1 - pair_excess = 0: plain GRPO's trace falls with K
    there. NaN where GRPO never has this trace. Scalars or arrays; all in squared gradient units.
    """
    single = 4 * zeta1
    with np.errstate(invalid="ignore"):
        return (trace + single + np.sqrt((trace - single) ** 2 + 4 * trace * pair_excess)) / (2 * trace)


def _effective_group_size(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    """``effective_group_size`` of averages: the trace is first scaled to that of an estimator of theta itself."""
    if isinstance(moments.trace, Missing):
        return Estimate(None, None, moments.trace.reason)
    trace, signal = _weighted(moments)
    theta_sq, zeta1, zeta2 = prompts.pairs.theta_sq, prompts.pairs.zeta1, prompts.pairs.zeta2
    divisors = {f"trace(Cov) at K={group_size}": trace}
    if moments.scale is None:
        divisors |= {f"||E ghat||^2 at K={group_size}": signal, "||theta||^2": theta_sq}
    for name, column in divisors.items():
        reason = bootstrap.zero_reason(column, name)
        if reason:
            return Estimate(None, None, reason)

    def size(trace, signal, theta_sq, zeta1, pair_excess):
        rescaled = trace / moments.scale**2 if moments.scale is not None else trace * theta_sq / signal
        return effective_group_size(rescaled, zeta1, pair_excess)

    estimate = bootstrap.of_means([trace, signal, theta_sq, zeta1, 2 * zeta2 - 4 * zeta1], size)
    if estimate.value is None:
        return estimate._replace(reason="plain GRPO has this signal-to-noise ratio at no group size")
    if estimate.value < 2 - 1e-9:
        return Estimate(
            None,
            None,
            f"plain GRPO at K = 2, the smallest group, has a higher signal-to-noise ratio "
            f"({estimate.value:.3g} continuations would do)",
        )
    return estimate


QUANTITIES = {
    "trace_cov": _average("trace"),
    "squared_bias": _average("squared_bias"),
    "mse": _average("mse"),
    "signal_to_noise": _signal_to_noise,
    "effective_group_size": _effective_group_size,
    "continuations_per_group": _continuations,
    "signal_to_noise_per_continuation": _signal_per_continuation,
}


def _on_policy_check(prompts: PromptMoments) -> dict:
    """{score_mean_sq, score_norm_sq, ratio, standard_error, z, self_normalised, warning}: is the mean of the scores 0?

    ratio: unbiased mean ||E g||^2 over mean E||g||^2, with its standard error over prompts. It is 0 within about two of
    them if the scores are those of the sampling law. self_normalised: sum over blocks of the estimates of ||E g||^2 over
    the root of the sum of their squares. warning: a text where that says they are not, else None (``_on_policy_warning``).
    """
    mean, norm = prompts.score_mean_sq, prompts.score_norm_sq[:, 0]
    error = z = None
    ratio = float(mean.mean() / norm.mean()) if norm.mean() > 0 else None
    if ratio is not None and len(prompts) > 1:
        # delta method: the ratio's error is that of the mean residual over the mean denominator
        error = float((mean - ratio * norm).std(ddof=1) / np.sqrt(len(prompts)) / norm.mean())
        z = ratio / error if error > 0 else None
    too_few = Missing("needs at least two prompts that differ, and scores that are not 0")
    total, square, n_blocks = prompts.score_evidence.sum(0)
    self_normalised = float(total / np.sqrt(square)) if square > 0 else None
    if n_blocks <= SELF_NORMALISED_LIMIT**2:
        silent = Missing(f"{n_blocks:.0f} blocks whose scores differ: too few to show that scores are wrong")
    else:
        silent = Missing("nothing to warn of: correct scores give such values")
    return {
        "score_mean_sq": float(mean.mean()),
        "score_norm_sq": float(norm.mean()),
        "ratio": Missing("every score is 0") if ratio is None else ratio,
        "standard_error": too_few if error is None else error,
        "z": too_few if z is None else z,
        "self_normalised": Missing("the scores of no block differ") if self_normalised is None else self_normalised,
        "warning": _on_policy_warning(self_normalised, int(n_blocks)) or silent,
    }


SELF_NORMALISED_LIMIT = float(np.sqrt(2 * np.log(1000)))  # 3.72


def _on_policy_warning(self_normalised: float | None, n_blocks: int) -> str | None:
    """What to tell people where correct scores would give the data in fewer than 1 of 1000 runs, else None.

    self_normalised: s = sum m / sqrt(sum m^2) over the n_blocks blocks, of any prompt, whose scores differ; m is the
    block's unbiased estimate of ||E g||^2. With correct scores the m are independent of mean 0. For symmetric m of any
    unlike scales P(s > t) <= exp(-t^2/2), at most 1/1000 at t = 3.72. The m are skewed to the right, which makes the
    upper tail lighter still: simulated, at most 1 in 10,000 (T = 5, 12, 40; 1, 4, 16 blocks; log-normal scales, gaussian
    scores of 1 to 50 dimensions, policies with rare outcomes). s is at most sqrt(n_blocks), so fewer than 14 blocks never warn.

    Not z: its error is that of the few prompts with the largest scores, and then it falls with the numerator. Simulated
    on 12 prompts, z was above 5.8 in up to 9% of runs with correct scores.

    The negative side does not warn. Whatever law the scores belong to, E m = ||E g||^2 >= 0 for independent draws, so
    wrong scores move s up only. Draws that repeat each other do so too. Only draws that avoid each other, or scores
    centred in their block, would move it down, and this cannot be told from rare outcomes: until they occur twice in one
    block, every m is a little below 0. With correct sampling s was below -3.72 in up to 11% of runs.
    """
    if self_normalised is None or self_normalised <= SELF_NORMALISED_LIMIT:
        return None
    return (
        f"the mean of the scores is not 0 (over {n_blocks} blocks, their estimates of ||E g||^2 sum to {self_normalised:.1f} "
        f"times the root of their squares' sum; correct scores stay below {SELF_NORMALISED_LIMIT:.1f} in 999 of 1000 runs): "
        "the scores are not those of the law that was sampled, or draws repeat each other, so no estimator here is the one "
        "of its name"
    )


def _score_norms(prompts: PromptMoments, bootstrap: PromptBootstrap) -> dict:
    """{all, right, wrong: {mean, ci95, n_continuations}, split}: mean ||g||^2 of continuations.

    split says in words which ones right and wrong are: rewards 1 and 0; for other rewards, above V(x) and not above, or
    without V(x) the prompt's mean reward.
    """
    labels, split = LABELS, SPLITS[prompts.zero_one]
    if not prompts.zero_one and isinstance(prompts.oracle_value, Missing):
        split = SPLIT_WITHOUT_V
        labels = {
            **LABELS,
            **{kind: LABELS[kind].replace("V(x)", "its prompt's mean reward") for kind in ("above", "not_above")},
        }
    result: dict = {}
    columns = ("all", "right", "wrong") if prompts.zero_one else ("all", "above", "not_above")
    for name, kind in zip(("all", "right", "wrong"), columns):
        column = CLASSES.index(kind)
        count = int(prompts.n_outcomes[:, column].sum())
        estimate = Estimate(None, None, f"no continuation is {labels[kind]}")
        if count:
            share = prompts.outcome_share[:, column]
            estimate = bootstrap.share_ratio(prompts.score_norm_sq[:, column], share, f"share of {labels[kind]} continuations")
        mean, interval = estimate.value_or_missing(), estimate.interval_or_missing()
        result[name] = {"mean": mean, "ci95": interval, "n_continuations": count}
    return {**result, "split": split}
