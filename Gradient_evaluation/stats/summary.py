"""How good is each gradient estimator at each group size? From Gram records to the results dictionary.

    prompts = reduce_prompts(records, K_list, ["dr_grpo"])     # one pass, the Grams can be let go
    results = summarise(prompts, K_list, names=["dr_grpo"])    # JSON-ready, see its docstring
    traces = prompt_trace_covs(prompts, group_size=4)          # per prompt, for the detailed files

The published three and the floor are always there: (1/K) sum_i g_i (Z_i - C_i), with g the score and Z the
reward of K continuations of one prompt, ``naive`` C = 0, ``grpo`` C_i = mean of the other K - 1 rewards,
``oracleV`` C = V(x), and ``best_baseline``, which no baseline that depends on the prompt only can beat. More by
name: ``estimator_table``. No order among them is assumed: it depends on the policy. NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.stats.blocks import PairMoments
from Gradient_evaluation.stats.bootstrap import Estimate, PromptBootstrap
from Gradient_evaluation.stats.estimators import DEFAULT, ESTIMATORS, Moments, group_rules, moments_of, resolve
from Gradient_evaluation.stats.prompts import CLASSES, PromptMoments, reduce_records

__all__ = [
    "PromptMoments",
    "effective_group_size",
    "group_advantages",
    "group_rules",
    "prompt_trace_covs",
    "reduce_prompts",
    "resolve",
    "summarise",
]

PUBLISHED = ("naive", "grpo", "oracleV")
FLOOR = "best_baseline"
LABELS = {"all": "there", "right": "right", "wrong": "wrong", "above": "above V(x)", "not_above": "not above V(x)"}
SPLITS = {True: "right: reward 1; wrong: reward 0", False: "right: reward above V(x); wrong: reward not above V(x)"}


def reduce_prompts(records: Iterable, K_list: Sequence[int] = (), names: Sequence[str] = ()) -> PromptMoments:
    """One pass over Gram records (any iterable; nothing of a record is kept).

    A record offers ``oracle_value`` (float V(x), or None) and ``blocks``, a list of (gram (B, B), rewards (B,),
    lengths (B,)) with B >= 4, where B may differ; optionally ``greedy_reward`` (float). Blocks of a prompt weigh
    the same, whatever their size. ``K_list`` matters only where ``names`` holds estimators that need resampled
    groups: their moments are found here.

    Raises ValueError naming the prompt (its position, and ``record.prompt_id`` where there is one) and the block
    for a value that is not finite, a wrong shape, a length below 1, or a block of fewer than 4; and for an
    unknown name.
    """
    return reduce_records(records, group_rules(names).values(), K_list)


def prompt_trace_covs(
    records: Iterable | PromptMoments, group_size: int, names: Sequence[str] = ()
) -> dict[str, list[float | None] | None]:
    """tr Cov of each prompt at one K: {name: (n_prompts,) list or None} for the default four and ``names``.

    Single prompts are noisy and an estimate may be below 0. None: see ``summarise``'s ``reasons``; inside a list,
    a prompt of which no group is kept.
    """
    _check_group_sizes([group_size])
    prompts = records if isinstance(records, PromptMoments) else reduce_prompts(records, [group_size], names)
    result: dict = {}
    for name in resolve(names):
        found = _moments(prompts, name, group_size)
        trace = None if isinstance(found.trace, str) else found.trace.tolist()
        if trace is not None and found.weight is not None:
            trace = [value if weight > 0 else None for value, weight in zip(trace, found.weight)]
        result[name] = trace
    return result


def _moments(prompts: PromptMoments, name: str, group_size: int) -> Moments:
    try:
        return moments_of(prompts, name, group_size)
    except KeyError:
        raise ValueError(f"{name} at K={group_size}: call reduce_prompts with this estimator and K_list") from None


def _check_group_sizes(group_sizes: Sequence[int]) -> None:
    if not len(group_sizes) or min(group_sizes) < 2:
        raise ValueError(f"group sizes must be at least 2, got {list(group_sizes)}")


def summarise(
    records: Iterable | PromptMoments, K_list: Sequence[int], n_bootstrap: int = 2000, seed: int = 0, names: Sequence[str] = ()
) -> dict:
    """The results of a run, JSON-ready: floats, lists and None, never NaN.

    Lists are aligned with ``K_list``; intervals are 95% bootstrap-t over prompts (the same resamples for
    all), [low, high]. A baseline taken from other prompts is held fixed in the resamples. A value or
    interval that could not be computed is None, and ``reasons`` holds a text under its dotted path
    (``"signal_to_noise.grpo"``).

    K_list, n_prompts, n_blocks, n_continuations;
    conditional_on_x {naive, grpo, oracleV: list}: mean over prompts of trace(Cov | x), the published keys;
    conditional_on_x_ci95; best_baseline: list, the floor; best_baseline_ci95;
    theta_norm_sq, theta_norm_sq_ci95: mean over prompts of ||theta(x)||^2;
    signal_to_noise {naive, grpo, oracleV, best_baseline: list}, signal_to_noise_ci95: mean ||theta||^2 over mean
      trace(Cov), None where the interval of the latter is not above 0;
    estimators {name: see ``_compare``}: the default four and ``names``, in full;
    on_policy_check {score_mean_sq, score_norm_sq, ratio, standard_error, z, self_normalised, warning}: unbiased mean
      ||E g||^2 over mean E||g||^2 with its standard error over prompts: 0 within about two of them if the scores are
      those of the sampling law. self_normalised: sum over blocks of the estimates of ||E g||^2 over the root of the sum
      of their squares. warning: a text where that says they are not, else None (``_on_policy_warning``);
    score_norm_sq {all, right, wrong: {mean, ci95, n_continuations}, split}: mean ||g||^2 of continuations. split says
      in words which ones right and wrong are: rewards 1 and 0; for other rewards, above V(x) and not above;
    bootstrap {n_bootstrap, seed}; reasons.
    """
    _check_group_sizes(K_list)
    prompts = records if isinstance(records, PromptMoments) else reduce_prompts(records, K_list, names)
    bootstrap = PromptBootstrap(len(prompts), n_bootstrap, seed)
    reasons: dict[str, str] = {}
    table = {name: _compare(prompts, name, K_list, bootstrap, reasons) for name in resolve(names)}
    theta = bootstrap.mean(prompts.pairs.disjoint)
    if theta.interval is None:
        reasons["theta_norm_sq_ci95"] = theta.reason
    return {
        "K_list": [int(size) for size in K_list],
        "n_prompts": len(prompts),
        "n_blocks": int(prompts.n_blocks.sum()),
        "n_continuations": int(prompts.n_outcomes[:, 0].sum()),
        **_published(table, reasons),
        "theta_norm_sq": theta.value,
        "theta_norm_sq_ci95": theta.interval,
        "estimators": table,
        "on_policy_check": _on_policy_check(prompts, reasons),
        "score_norm_sq": _score_norms(prompts, bootstrap, reasons),
        "bootstrap": {"n_bootstrap": int(n_bootstrap), "seed": int(seed)},
        "reasons": reasons,
    }


def _published(table: dict, reasons: dict) -> dict:
    """The published keys (and the floor beside them) from the full table, their reasons included."""
    result: dict = {}
    for end in ("", "_ci95"):
        result[f"conditional_on_x{end}"] = {name: table[name][f"trace_cov{end}"] for name in PUBLISHED}
        result[f"{FLOOR}{end}"] = table[FLOOR][f"trace_cov{end}"]
        result[f"signal_to_noise{end}"] = {name: table[name][f"signal_to_noise{end}"] for name in DEFAULT}
        for name in DEFAULT:
            trace = f"{FLOOR}{end}" if name == FLOOR else f"conditional_on_x{end}.{name}"
            for path, key in ((trace, "trace_cov"), (f"signal_to_noise{end}.{name}", "signal_to_noise")):
                if f"estimators.{name}.{key}{end}" in reasons:
                    reasons[path] = reasons[f"estimators.{name}.{key}{end}"]
    return result


def _compare(prompts: PromptMoments, name: str, K_list: Sequence[int], bootstrap: PromptBootstrap, reasons: dict) -> dict:
    """One estimator in full: {title, target, then lists aligned with K_list, each with a ``_ci95`` beside it}.

    trace_cov; squared_bias and mse (where the target is theta); signal_to_noise ||E ghat||^2 / trace(Cov);
    effective_group_size: the K >= 2 at which plain GRPO has that signal-to-noise ratio; continuations_per_group: K, or
    K / P(keep) where groups are dropped; signal_to_noise_per_continuation: the ratio of the two;
    prompts_never_kept (a count, without interval), and notes (e.g. a fitted weight), each aligned with K_list.
    """
    entry = ESTIMATORS[name]
    moments = [_moments(prompts, name, size) for size in K_list]
    result: dict = {"title": entry.title, "target": entry.other_target or "theta"}
    for quantity, measure in QUANTITIES.items():
        estimates = [measure(prompts, each, size, bootstrap) for each, size in zip(moments, K_list)]
        result[quantity] = [estimate.value for estimate in estimates]
        result[f"{quantity}_ci95"] = [estimate.interval for estimate in estimates]
        for key, missing in (
            (quantity, [each.reason for each in estimates if each.value is None]),
            (f"{quantity}_ci95", [each.reason for each in estimates if each.interval is None]),
        ):
            if missing:
                reasons[f"estimators.{name}.{key}"] = "; ".join(dict.fromkeys(missing))
    result["prompts_never_kept"] = [0 if m.weight is None else int((m.weight == 0).sum()) for m in moments]
    result["notes"] = [dict(each.notes) for each in moments]
    return result


def _average(part: str):
    """The measure of one field of Moments: its mean over prompts, weighted by P(keep) where groups are dropped."""

    def measure(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
        values = getattr(moments, part)
        if isinstance(values, str):
            return Estimate(None, None, values)
        if moments.weight is None:
            return bootstrap.mean(values)
        return bootstrap.share_ratio(moments.weight * values, moments.weight, f"share of groups kept at K={group_size}")

    return measure


def _weighted(moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Columns whose means have the ratio of the averages of trace and signal; the weights' mean cancels."""
    weight = 1.0 if moments.weight is None else moments.weight
    return weight * moments.trace, weight * moments.signal


def _signal_to_noise(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    if isinstance(moments.trace, str):
        return Estimate(None, None, moments.trace)
    trace, signal = _weighted(moments)
    return bootstrap.ratio(signal, trace, f"trace(Cov) at K={group_size}")


def _continuations(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    if moments.weight is None and isinstance(moments.trace, str):
        return Estimate(None, None, moments.trace)
    kept = np.ones(len(prompts)) if moments.weight is None else moments.weight
    return bootstrap.share_ratio(np.full(len(prompts), group_size), kept, f"share of groups kept at K={group_size}")


def _signal_per_continuation(prompts: PromptMoments, moments: Moments, group_size: int, bootstrap: PromptBootstrap) -> Estimate:
    if isinstance(moments.trace, str):
        return Estimate(None, None, moments.trace)
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
    """From averages: the trace, brought to the scale of theta, put into ``effective_group_size``."""
    if isinstance(moments.trace, str):
        return Estimate(None, None, moments.trace)
    pairs: PairMoments = prompts.pairs
    trace, signal = _weighted(moments)
    theta_sq = pairs.disjoint
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

    zeta1 = pairs.shared_member - theta_sq
    pair_excess = 2 * (pairs.same_pair - theta_sq) - 4 * zeta1
    estimate = bootstrap.of_means([trace, signal, theta_sq, zeta1, pair_excess], size)
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


def _on_policy_check(prompts: PromptMoments, reasons: dict) -> dict:
    mean, norm = prompts.score_mean_sq, prompts.score_norm_sq[:, 0]
    check = {"score_mean_sq": float(mean.mean()), "score_norm_sq": float(norm.mean())}
    ratio = float(mean.mean() / norm.mean()) if norm.mean() > 0 else None
    error = z = None
    if ratio is None:
        reasons["on_policy_check.ratio"] = "every score is 0"
    elif len(prompts) > 1:
        # delta method: the ratio's error is that of the mean residual over the mean denominator
        error = float((mean - ratio * norm).std(ddof=1) / np.sqrt(len(prompts)) / norm.mean())
        z = ratio / error if error > 0 else None
    for name, value in (("standard_error", error), ("z", z)):
        if value is None:
            reasons[f"on_policy_check.{name}"] = "needs at least two prompts that differ, and scores that are not 0"
    total, square, n_blocks = prompts.score_evidence.sum(0)
    self_normalised = float(total / np.sqrt(square)) if square > 0 else None
    if self_normalised is None:
        reasons["on_policy_check.self_normalised"] = "the scores of no block differ"
    warning = _on_policy_warning(self_normalised, int(n_blocks))
    if warning is None:
        few = n_blocks <= SELF_NORMALISED_LIMIT**2
        reasons["on_policy_check.warning"] = (
            f"{n_blocks:.0f} blocks whose scores differ: too few to show that scores are wrong"
            if few
            else "nothing to warn of: correct scores give such values"
        )
    return {**check, "ratio": ratio, "standard_error": error, "z": z, "self_normalised": self_normalised, "warning": warning}


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


def _score_norms(prompts: PromptMoments, bootstrap: PromptBootstrap, reasons: dict) -> dict:
    result = {}
    columns = ("all", "right", "wrong") if prompts.zero_one else ("all", "above", "not_above")
    for name, kind in zip(("all", "right", "wrong"), columns):
        column = CLASSES.index(kind)
        count = int(prompts.n_outcomes[:, column].sum())
        estimate = Estimate(None, None, f"no continuation is {LABELS[kind]}")
        if count:
            share = prompts.outcome_share[:, column]
            estimate = bootstrap.share_ratio(prompts.score_norm_sq[:, column], share, f"share of {LABELS[kind]} continuations")
        result[name] = {"mean": estimate.value, "ci95": estimate.interval, "n_continuations": count}
        for part, value in (("mean", estimate.value), ("ci95", estimate.interval)):
            if value is None:
                reasons[f"score_norm_sq.{name}.{part}"] = estimate.reason
    return {**result, "split": SPLITS[prompts.zero_one]}
