"""How large is each estimator's covariance at each group size? From Gram records to the results dictionary.

    moments = reduce_prompts(records)                  # one pass, the Grams can be let go
    results = summarise(moments, K_list=[4, 8, 16])    # JSON-ready, see its docstring
    traces = prompt_trace_covs(moments, group_size=4)  # the same per prompt, for the detailed files

An estimator is (1/K) sum_i g_i (Z_i - C_i) with g the score and Z the reward of K continuations of one
prompt: ``naive`` C = 0, ``grpo`` C_i = mean of the other K - 1 rewards, ``oracleV`` C = V(x), and
``best_baseline`` C = b* = E[Z ||g||^2] / E||g||^2, the floor of all baselines that depend on the prompt only
(Greensmith et al. 2004, for scores of mean 0). No order among them is assumed: it depends on the policy.
NumPy only; formulas in ``block_statistics``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from Gradient_evaluation.advantages import group_advantages
from Gradient_evaluation.block_statistics import (
    MIN_BLOCK,
    PairMoments,
    group_trace,
    off_diagonal,
    pair_moments,
    prompt_only_coefficients,
    prompt_only_trace,
)
from Gradient_evaluation.prompt_bootstrap import Estimate, PromptBootstrap

__all__ = ["PromptMoments", "group_advantages", "prompt_trace_covs", "reduce_prompts", "summarise"]

PUBLISHED = ("naive", "grpo", "oracleV")
FLOOR = "best_baseline"
RIGHT = 0.5  # a reward above this counts as a right answer


@dataclass(frozen=True)
class PromptMoments:
    """What the closed forms need of each prompt, averaged over its blocks; arrays are (n_prompts, ...) float64."""

    oracle_value: np.ndarray | str  # (n,) V(x); a text says why it is missing
    coefficients: np.ndarray  # (n, 3) A, N, D of block_statistics.prompt_only_coefficients
    best_trace: np.ndarray | str  # (n,) per-continuation trace at the cross-fitted b*; a text says why not
    pairs: PairMoments  # three (n,)
    score_mean_sq: np.ndarray  # (n,) unbiased ||E g||^2
    score_norm_sq: np.ndarray  # (n, 3) mean of ||g||^2 over all, over right, over wrong: sums per continuation
    outcome_share: np.ndarray  # (n, 3) share of all (1), right, wrong continuations
    n_outcomes: np.ndarray  # (n, 3) number of all, right, wrong continuations
    n_blocks: np.ndarray  # (n,)


def reduce_prompts(records: Iterable) -> PromptMoments:
    """One pass over Gram records (an iterable; nothing of a record is kept).

    A record offers ``oracle_value`` (float V(x), or None) and ``blocks``, a list of (gram (B, B), rewards (B,),
    lengths (B,)) with B >= 4, where B may differ. Blocks of a prompt weigh the same, whatever their size.

    Raises ValueError naming the prompt (its position, and ``record.prompt_id`` where there is one) and the block
    for a value that is not finite, a wrong shape, a length below 1, or a block of fewer than 4.
    """
    prompts = [_reduce_prompt(record, index) for index, record in enumerate(records)]
    if not prompts:
        raise ValueError("there are no prompts to average over")
    columns = {name: [prompt[name] for prompt in prompts] for name in prompts[0]}
    pairs = PairMoments(*np.array(columns.pop("pairs"), dtype=np.float64).T)
    complete = {name: _column(columns.pop(name)) for name in ("oracle_value", "best_trace")}
    return PromptMoments(pairs=pairs, **complete, **{name: np.array(column) for name, column in columns.items()})


def _column(values: list) -> np.ndarray | str:
    """An array, or the first reason (with a count) where some prompt has none: no average over some prompts only."""
    reasons = [value for value in values if isinstance(value, str)]
    if reasons:
        return f"{reasons[0]} ({len(reasons)} of {len(values)} prompts)"
    return np.array(values, dtype=np.float64)


def _reduce_prompt(record, index: int) -> dict:
    name = f"prompt {index}"
    if getattr(record, "prompt_id", None) is not None:
        name += f" (id {record.prompt_id})"
    blocks = [_checked(block, f"{name}, block {number}") for number, block in enumerate(record.blocks)]
    if not blocks:
        raise ValueError(f"{name}: has no blocks")
    value = record.oracle_value
    if value is not None and not np.isfinite(value):
        raise ValueError(f"{name}: the oracle value is not finite ({value})")
    coefficients = np.array([prompt_only_coefficients(gram, rewards) for gram, rewards, _ in blocks])
    ones = [np.ones_like(rewards) for _, rewards, _ in blocks]
    outcomes = [_outcomes(rewards) for _, rewards, _ in blocks]
    return {
        "oracle_value": "no oracle value V(x)" if value is None else float(value),
        "coefficients": coefficients.mean(0),
        "best_trace": _best_trace(blocks, coefficients),
        "pairs": np.mean([pair_moments(gram, rewards) for gram, rewards, _ in blocks], axis=0),
        "score_mean_sq": np.mean([off_diagonal(block[0], one, one) for block, one in zip(blocks, ones)]),
        "score_norm_sq": np.mean(
            [(outcome * np.diag(block[0])).mean(-1) for block, outcome in zip(blocks, outcomes)], axis=0
        ),
        "outcome_share": np.mean([outcome.mean(-1) for outcome in outcomes], axis=0),
        "n_outcomes": np.sum([outcome.sum(-1) for outcome in outcomes], axis=0),
        "n_blocks": len(blocks),
    }


def _outcomes(rewards: np.ndarray) -> np.ndarray:
    """Indicators (3, B) of all, right and wrong continuations."""
    right = rewards > RIGHT
    return np.stack([np.ones_like(right), right, ~right]).astype(np.float64)


def _checked(block, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gram, rewards, lengths = (np.asarray(part, dtype=np.float64) for part in block)
    size = len(rewards) if rewards.ndim == 1 else -1
    if gram.shape != (size, size) or lengths.shape != (size,):
        raise ValueError(
            f"{name}: the shapes of gram {gram.shape}, rewards {rewards.shape}, lengths {lengths.shape} do not agree"
        )
    if size < MIN_BLOCK:
        raise ValueError(f"{name}: has {size} continuations, needs at least {MIN_BLOCK}")
    for part, what in ((gram, "the Gram"), (rewards, "the rewards")):
        if not np.isfinite(part).all():
            raise ValueError(f"{name}: {what} has a value that is not finite (NaN or infinity)")
    if not (lengths >= 1).all():
        raise ValueError(f"{name}: a continuation has a length below 1")
    return gram, rewards, lengths


def best_baselines(blocks: Sequence[tuple]) -> np.ndarray:
    """(n_blocks,): for each block b* = sum Z ||g||^2 / sum ||g||^2 over the OTHER blocks of the prompt.

    From the block itself it would be fitted to its own noise, and the trace biased low (0.89 of the truth at
    B = 16). Cross-fitted, the trace is that of a b* known only up to the other blocks' noise, so it errs upward:
    by 10 to 20% with two blocks of 16 (then the oracle may come out below it), by about 1% with sixteen.
    """
    weighted = np.array([(rewards * np.diag(gram)).sum() for gram, rewards, _ in blocks])
    square = np.array([np.trace(gram) for gram, _, _ in blocks])
    # Sums over the others, not total minus own: a block must not reach its own baseline even by rounding.
    others = 1.0 - np.eye(len(blocks))
    numerator, denominator = others @ weighted, others @ square
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _best_trace(blocks: Sequence[tuple], coefficients: np.ndarray) -> float | str:
    if len(blocks) < 2:
        return "the best prompt-only baseline of a block is fitted on the prompt's other blocks, and there is only one"
    return float(prompt_only_trace(coefficients, best_baselines(blocks)).mean())


def _traces(moments: PromptMoments, name: str, group_size: int) -> np.ndarray | str:
    """tr Cov per prompt (n_prompts,) of one estimator at one K, or the reason why there is none."""
    if name == "grpo":
        return group_trace(moments.pairs, group_size)
    if name == FLOOR:
        return moments.best_trace if isinstance(moments.best_trace, str) else moments.best_trace / group_size
    if name == "oracleV" and isinstance(moments.oracle_value, str):
        return moments.oracle_value
    baseline = moments.oracle_value if name == "oracleV" else 0.0
    return prompt_only_trace(moments.coefficients, baseline) / group_size


def prompt_trace_covs(records: Iterable | PromptMoments, group_size: int) -> dict[str, list[float] | None]:
    """tr Cov of each prompt at one K: {``naive``, ``grpo``, ``oracleV``, ``best_baseline``: (n_prompts,) list or None}.

    Single prompts are noisy and an estimate may be below 0. None: see ``summarise``'s ``reasons``.
    """
    moments = records if isinstance(records, PromptMoments) else reduce_prompts(records)
    _check_group_sizes([group_size])
    traces = {name: _traces(moments, name, group_size) for name in (*PUBLISHED, FLOOR)}
    return {name: None if isinstance(trace, str) else trace.tolist() for name, trace in traces.items()}


def _check_group_sizes(group_sizes: Sequence[int]) -> None:
    if not len(group_sizes) or min(group_sizes) < 2:
        raise ValueError(f"group sizes must be at least 2, got {list(group_sizes)}")


def summarise(
    records: Iterable | PromptMoments, K_list: Sequence[int], n_bootstrap: int = 2000, seed: int = 0
) -> dict:
    """The results of a run, JSON-ready: floats, lists and None, never NaN.

    Lists are aligned with ``K_list``; intervals are 95% percentile bootstrap over prompts (the same resamples
    for all), [low, high]. A value or interval that could not be computed is None, and ``reasons`` holds a
    text under its dotted path (``"signal_to_noise.grpo"``).

    K_list, n_prompts, n_blocks, n_continuations;
    conditional_on_x {naive, grpo, oracleV: list}: mean over prompts of trace(Cov | x), the published keys;
    conditional_on_x_ci95; best_baseline: list, the floor; best_baseline_ci95;
    theta_norm_sq, theta_norm_sq_ci95: mean over prompts of ||theta(x)||^2;
    signal_to_noise {naive, grpo, oracleV, best_baseline: list}, signal_to_noise_ci95: mean ||theta||^2 over mean
      trace(Cov), None where the interval of the latter includes 0;
    on_policy_check {score_mean_sq, score_norm_sq, ratio, standard_error, z}: unbiased mean ||E g||^2 over mean
      E||g||^2 with its standard error over prompts: 0 within it if the scores are those of the sampling law;
    score_norm_sq {all, right, wrong: {mean, ci95, n_continuations}}: mean ||g||^2 of continuations with a reward
      above 0.5 and not above;
    bootstrap {n_bootstrap, seed}; reasons.
    """
    moments = records if isinstance(records, PromptMoments) else reduce_prompts(records)
    _check_group_sizes(K_list)
    bootstrap = PromptBootstrap(len(moments.n_blocks), n_bootstrap, seed)
    reasons: dict[str, str] = {}
    theta = bootstrap.mean(moments.pairs.disjoint)
    results = {
        "K_list": [int(size) for size in K_list],
        "n_prompts": len(moments.n_blocks),
        "n_blocks": int(moments.n_blocks.sum()),
        "n_continuations": int(moments.n_outcomes[:, 0].sum()),
        **_curves(moments, K_list, bootstrap, reasons),
        "theta_norm_sq": theta.value,
        "theta_norm_sq_ci95": theta.interval,
        "on_policy_check": _on_policy_check(moments, reasons),
        "score_norm_sq": _score_norms(moments, bootstrap, reasons),
        "bootstrap": {"n_bootstrap": int(n_bootstrap), "seed": int(seed)},
        "reasons": reasons,
    }
    if theta.interval is None:
        reasons["theta_norm_sq_ci95"] = theta.reason
    return results


def _curves(moments: PromptMoments, K_list: Sequence[int], bootstrap: PromptBootstrap, reasons: dict) -> dict:
    names = (*PUBLISHED, FLOOR)
    trace, noise = {}, {}
    for name in names:
        per_size = [_traces(moments, name, size) for size in K_list]
        trace[name] = [Estimate(None, None, t) if isinstance(t, str) else bootstrap.mean(t) for t in per_size]
        noise[name] = [
            Estimate(None, None, t)
            if isinstance(t, str)
            else bootstrap.ratio(moments.pairs.disjoint, t, f"trace(Cov) at K={size}")
            for size, t in zip(K_list, per_size)
        ]
        path = FLOOR if name == FLOOR else f"conditional_on_x.{name}"
        _note(reasons, path, trace[name])
        _note(reasons, f"signal_to_noise.{name}", noise[name])
    return {
        "conditional_on_x": {name: _values(trace[name]) for name in PUBLISHED},
        "conditional_on_x_ci95": {name: _intervals(trace[name]) for name in PUBLISHED},
        FLOOR: _values(trace[FLOOR]),
        f"{FLOOR}_ci95": _intervals(trace[FLOOR]),
        "signal_to_noise": {name: _values(noise[name]) for name in names},
        "signal_to_noise_ci95": {name: _intervals(noise[name]) for name in names},
    }


def _values(estimates: Sequence[Estimate]) -> list[float | None]:
    return [estimate.value for estimate in estimates]


def _intervals(estimates: Sequence[Estimate]) -> list[list[float] | None]:
    return [estimate.interval for estimate in estimates]


def _note(reasons: dict, path: str, estimates: Sequence[Estimate]) -> None:
    """Enter the distinct reasons of one list of estimates under the paths of its values and of its intervals."""
    head, dot, tail = path.partition(".")
    for where, part in ((path, "value"), (f"{head}_ci95{dot}{tail}", "interval")):
        texts = dict.fromkeys(e.reason for e in estimates if getattr(e, part) is None)
        if texts:
            reasons[where] = "; ".join(texts)


def _on_policy_check(moments: PromptMoments, reasons: dict) -> dict:
    mean, norm = moments.score_mean_sq, moments.score_norm_sq[:, 0]
    check = {"score_mean_sq": float(mean.mean()), "score_norm_sq": float(norm.mean())}
    n_prompts = len(mean)
    ratio = float(mean.mean() / norm.mean()) if norm.mean() > 0 else None
    error = z = None
    if ratio is None:
        reasons["on_policy_check.ratio"] = "every score is 0"
    elif n_prompts > 1:
        # delta method: the ratio's error is that of the mean residual over the mean denominator
        error = float((mean - ratio * norm).std(ddof=1) / np.sqrt(n_prompts) / norm.mean())
        z = ratio / error if error > 0 else None
    for name, value in (("standard_error", error), ("z", z)):
        if value is None:
            reasons[f"on_policy_check.{name}"] = "needs at least two prompts that differ, and scores that are not 0"
    return {**check, "ratio": ratio, "standard_error": error, "z": z}


def _score_norms(moments: PromptMoments, bootstrap: PromptBootstrap, reasons: dict) -> dict:
    result = {}
    for column, name in enumerate(("all", "right", "wrong")):
        count = int(moments.n_outcomes[:, column].sum())
        estimate = Estimate(None, None, f"no continuation is {name}")
        if count:
            share = moments.outcome_share[:, column]
            estimate = bootstrap.ratio(moments.score_norm_sq[:, column], share, f"share of {name} continuations")
        result[name] = {"mean": estimate.value, "ci95": estimate.interval, "n_continuations": count}
        for part, value in (("mean", estimate.value), ("ci95", estimate.interval)):
            if value is None:
                reasons[f"score_norm_sq.{name}.{part}"] = estimate.reason
    return result
