"""Which group size should I train with? The minibatch MSE of the GRPO gradient at a fixed number of continuations.

    law = group_size_law(theta_sq, zeta1, zeta2, sketches, oracle_values)   # JSON-ready
    print(group_size_report.report(law, budget=1024))

B prompts with groups of G, N = B G continuations. For the leave-one-out estimator averaged over the B groups, the
law of total variance and Hoeffding's variance of a U-statistic give, exactly for every G >= 2 (the paper's Theorem
7 has an upper bound; the finite-G form is derived in the project's method notes, section 5):

    MSE = c1/B + c2/(B G) + c3/(B G (G-1)),    N MSE = c1 G + c2 + c3/(G-1)
    c1 = tr Var_x theta(x) = mean ||theta(x)||^2 - ||mean theta(x)||^2
    c2 = mean 4 zeta1(x),    c3 = mean (2 zeta2(x) - 4 zeta1(x))

so that G* = 1 + sqrt(c3/c1). All in squared gradient units, at the parameters the gradients were measured at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from Gradient_evaluation.prompt_bootstrap import ONE_PROMPT, PromptBootstrap
from Gradient_evaluation.prompt_pairs import (
    FEW_PROMPTS,
    MIN_PROMPTS,
    SketchPart,
    pair_mean,
    pair_products,
    resampled_pair_means,
    sketch_covariance,
    squared_norm_draws,
)
from Gradient_evaluation.silent_groups import RewardCounts

GROUP_SIZES = np.arange(2, 513)
POWERS = 2 ** np.arange(1, 31)
PREDICTION = (
    "This is a prediction for the parameters at which the gradients were measured; as training moves them, the "
    "constants move too."
)


def mse_times_budget(c1, c2, c3, group_size):
    """N MSE = c1 G + c2 + c3/(G-1): the MSE of a minibatch gradient times its number of continuations N = B G."""
    return c1 * group_size + c2 + c3 / (group_size - 1)


def best_group_size(c1, c3):
    """G* >= 2 of least ``mse_times_budget``: 1 + sqrt(c3/c1), 2 where that is less or c3 <= 0, else inf for c1 <= 0."""
    c1, c3 = np.asarray(c1, dtype=np.float64), np.asarray(c3, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.maximum(2.0, 1 + np.sqrt(np.maximum(c3, 0.0) / c1))
    return np.where(c3 <= 0, 2.0, np.where(c1 <= 0, np.inf, inner)) + 0 * (c1 + c3)  # NaN stays NaN


def best_integer(c1, c2, c3):
    """The integer G >= 2 of least MSE: one of the two beside G*."""
    low = np.floor(best_group_size(c1, c3))
    with np.errstate(invalid="ignore"):
        higher = mse_times_budget(c1, c2, c3, low + 1) < mse_times_budget(c1, c2, c3, low)
    return np.where(higher, low + 1, low)


def near_best(c1, c2, c3, tolerance: float = 0.1):
    """(lowest, highest) integer G whose MSE is within ``tolerance`` of the least: the roots of a quadratic in G - 1.

    (inf, inf) for c1 <= 0 with c3 > 0: the MSE then falls with G for ever. NaN where the least MSE is not above 0.
    """
    c1, c2, c3 = (np.asarray(c, dtype=np.float64) for c in (c1, c2, c3))
    best = best_integer(c1, c2, c3)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = mse_times_budget(c1, c2, c3, best)
        level = (1 + tolerance) * least
        half = (level - c1 - c2) / (2 * c1)
        root = np.sqrt(half**2 - c3 / c1)
        low, high = np.maximum(2.0, np.ceil(1 + half - root - 1e-9)), np.floor(1 + half + root + 1e-9)
    endless, meaningless = np.isinf(best) | (c1 <= 0), ~(least > 0)
    low, high = (np.where(endless, np.inf, np.where(meaningless, np.nan, end)) for end in (low, high))
    return low, high


def group_size_law(
    theta_sq: np.ndarray,
    zeta1: np.ndarray,
    zeta2: np.ndarray,
    sketches: np.ndarray | None,
    outcomes: Sequence[RewardCounts] | None = None,
    *,
    sketch_dim: int | None = None,
    sketch_layout: Sequence[SketchPart] | None = None,
    group_size: int | None = None,
    n_bootstrap: int = 2000,
    seed: int = 0,
) -> dict:
    """The group-size law of n prompts, JSON-ready: floats, lists, None, never NaN; ``reasons`` says why of each None.

    Args:
        theta_sq, zeta1, zeta2: (n,) unbiased per-prompt moments (block_statistics.pair_moments).
        sketches: (n, S) sketch of each prompt's GRPO gradient estimate, or None where none was made.
        outcomes: (n,) the rewards of each prompt's continuations, counted, for the share of silent groups; any rewards.
        sketch_dim, sketch_layout: see prompt_pairs.sketch_covariance; neither: the rows are whole gradients.
        group_size: where the gradient noise scale is stated; default the best integer.

    Returns, all intervals 95% percentile bootstrap over prompts (the same resamples) with the sketch's error in it:
        c1, c2, c3 (and _ci95); mean_theta_sq: mean ||theta(x)||^2; mean_theta_norm_sq: ||mean theta(x)||^2 (both
        with _ci95); sketch_standard_error: of mean_theta_norm_sq and c1 alike;
        G_star, G_star_ci95 (an end is None where it is not bounded); G_star_paper_bound: sqrt(c3/c1);
        best_integer; within_10_percent [lowest, highest], _ci95 [[low, high] of each]; powers_of_two: in that range;
        curve {G: 2..512, mse_times_N, ci95, terms {c1, c2, c3: their parts of mse_times_N}};
        gradient_noise_scale (and _ci95): prompts, (c1 + c2/G + c3/(G (G-1))) / mean_theta_norm_sq, at
        gradient_noise_scale_G; silent_share {G: powers of two, share, ci95, continuations: the fewest of a prompt}: the
        share of groups whose rewards are all equal, without bias from the run's own continuations (silent_groups), None
        for a G above their number;
        more_prompts: how many more would tell c1 from 0; n_prompts, sketch_dim, reasons.
    """
    columns = [np.asarray(c, dtype=np.float64) for c in (theta_sq, 4 * np.asarray(zeta1), 2 * np.asarray(zeta2))]
    n = _checked(columns, sketches)
    bootstrap, reasons = PromptBootstrap(n, n_bootstrap, seed), {}
    law: dict = {"n_prompts": n, "sketch_dim": sketch_dim}
    values, resampled = _constants(columns, sketches, sketch_layout, sketch_dim, bootstrap, seed, law)
    missing = _why_no_pairs(n, sketches)
    for name, column in resampled.items():
        law[name] = values[name] if np.isfinite(values[name]) else None
        law[f"{name}_ci95"] = bootstrap.interval(column)
        pairs = name in ("c1", "mean_theta_norm_sq")
        reasons |= {key: (missing if pairs and missing else ONE_PROMPT)
                    for key in (name, f"{name}_ci95") if law[key] is None}  # fmt: skip
    c, draws = [values[name] for name in ("c1", "c2", "c3")], [resampled[name] for name in ("c1", "c2", "c3")]
    law |= _curve(c, draws, bootstrap, missing, reasons)
    law |= _optimum(law, c, draws, missing, reasons)
    law |= _noise_scale(law, c, draws, values, resampled, group_size, bootstrap, reasons)
    law |= _silent(outcomes, bootstrap, reasons)
    return {**law, "reasons": reasons}


def _checked(columns, sketches) -> int:
    n = len(columns[0])
    for part, name in ((columns, "theta_sq, zeta1, zeta2"), ([sketches], "sketches")):
        for array in part:
            if array is not None and len(array) != n:
                raise ValueError(f"{name}: {len(array)} prompts, not {n}")
            if array is not None and not np.isfinite(array).all():
                raise ValueError(f"{name}: a value is not finite")
    return n


def _why_no_pairs(n: int, sketches) -> str | None:
    if sketches is None:
        return "no gradient sketches were stored; measure again with --sketch_dim above 0"
    return ONE_PROMPT if n == 1 else FEW_PROMPTS if n < MIN_PROMPTS else None


def _constants(columns, sketches, layout, sketch_dim, bootstrap, seed, law) -> tuple[dict, dict]:
    """Values and (n_bootstrap,) resamples of the constants; c1 and ||mean theta||^2 with the sketch's error."""
    names = ("mean_theta_sq", "c2", "2zeta2")
    value = {name: float(column.mean()) for name, column in zip(names, columns)}
    again = {name: bootstrap.resampled_means(column) for name, column in zip(names, columns)}
    for table in (value, again):
        table["c3"] = table.pop("2zeta2") - table["c2"]
    common, repeated = np.nan, np.full_like(again["c2"], np.nan)
    law["sketch_standard_error"] = None
    if sketches is not None:
        products = pair_products(sketches)
        covariance = sketch_covariance([(sketches, sketches)], layout, sketch_dim)
        law["sketch_standard_error"] = float(np.sqrt(max(0.0, covariance[0, 0])))
        common = pair_mean(products)
        errors = squared_norm_draws(common, law["sketch_standard_error"], len(repeated), seed)
        repeated = resampled_pair_means(products, bootstrap) + errors
    for table, pairs in ((value, common), (again, repeated)):
        table["mean_theta_norm_sq"] = pairs
        table["c1"] = table["mean_theta_sq"] - pairs
    order = ("c1", "c2", "c3", "mean_theta_sq", "mean_theta_norm_sq")
    return {name: value[name] for name in order}, {name: again[name] for name in order}


def _curve(c, draws, bootstrap, missing, reasons) -> dict:
    curve: dict = {"G": GROUP_SIZES.tolist(), "mse_times_N": None, "ci95": None, "terms": None}
    if not np.isfinite(c[0]):
        reasons["curve"] = missing
        return {"curve": curve}
    parts = c[0] * GROUP_SIZES, np.full(len(GROUP_SIZES), c[1]), c[2] / (GROUP_SIZES - 1)
    curve["mse_times_N"] = sum(parts).tolist()
    curve["terms"] = {name: part.tolist() for name, part in zip(("c1", "c2", "c3"), parts)}
    if bootstrap.interval(draws[0]) is None:
        reasons["curve.ci95"] = missing or ONE_PROMPT
        return {"curve": curve}
    kept = np.isfinite(draws[0])
    again = mse_times_budget(*(draw[kept, None] for draw in draws), GROUP_SIZES)
    low, high = np.percentile(again, [2.5, 97.5], axis=0)
    curve["ci95"] = [list(pair) for pair in zip(low.tolist(), high.tolist())]
    return {"curve": curve}


def _optimum(law, c, draws, missing, reasons) -> dict:
    """G* and what depends on it, or None with the reason and the number of prompts that would do."""
    keys = ("G_star", "G_star_ci95", "G_star_paper_bound", "best_integer", "within_10_percent",
            "within_10_percent_ci95", "powers_of_two", "more_prompts")  # fmt: skip
    result: dict = dict.fromkeys(keys)
    # c1 is a variance: with c3 below 0 the MSE rises with G whatever c1 is.
    falls = law["c3_ci95"] is not None and law["c3_ci95"][1] <= 0
    unknown = missing
    if unknown is None and not falls and law["c1_ci95"][0] <= 0:
        result["more_prompts"], unknown = _more_prompts(law)
    if unknown is not None:
        return _without(result, reasons, unknown)
    reasons["more_prompts"] = "c1 is above 0, or c3 below: no more prompts are needed for G*"
    c1 = c[0] if not falls else max(c[0], 0.0)
    result["G_star"] = float(best_group_size(c1, c[2]))
    result["G_star_ci95"] = _ends(best_group_size(draws[0], draws[2]))
    result["best_integer"] = int(best_integer(c1, c[1], c[2]))
    if c[2] > 0:
        result["G_star_paper_bound"] = float(np.sqrt(c[2] / c1))
    else:
        reasons["G_star_paper_bound"] = "c3 is not above 0: the MSE rises with G from G = 2 on"
    low, high = near_best(c1, c[1], c[2])
    if not (np.isfinite(low) and np.isfinite(high)):
        text = "the least predicted MSE is not above 0" if np.isnan(low) else "c1 is not above 0"
        reasons |= dict.fromkeys(("within_10_percent", "within_10_percent_ci95", "powers_of_two"), text)
        return result
    result["within_10_percent"] = [int(low), int(high)]
    result["within_10_percent_ci95"] = [_ends(end) for end in near_best(*draws)]
    result["powers_of_two"] = [int(power) for power in POWERS if low <= power <= high]
    return result


def _without(result: dict, reasons: dict, why: str) -> dict:
    reasons |= {key: why for key, value in result.items() if value is None}
    return result


def _ends(resampled: np.ndarray) -> list[float | None]:
    """95% percentile interval of values that may be infinite; an infinite end is None."""
    ends = np.percentile(resampled[~np.isnan(resampled)], [2.5, 97.5], method="lower")
    return [float(end) if np.isfinite(end) else None for end in ends]


def _more_prompts(law: dict) -> tuple[int | None, str]:
    """How many more prompts would bring c1's interval above 0, as its width shrinks with 1/sqrt(n); and the reason.

    Only what prompts contribute shrinks; the sketch's error stays. A c1 not above 0 is taken at its upper end.
    """
    c1, (low, high), n = law["c1"], law["c1_ci95"], law["n_prompts"]
    text = f"c1 = {c1:.3g} cannot be told from 0 with these {n} prompts (its interval is [{low:.3g}, {high:.3g}])"
    if high <= 0:
        return None, f"{text}; no number of prompts like these would do"
    taken, half = (c1, c1 - low) if c1 > 0 else (high, (high - low) / 2)
    fixed = 1.96 * law["sketch_standard_error"]
    if taken <= fixed:
        return None, f"{text}; the sketch's own error is as large: a larger --sketch_dim is needed"
    needed = n * max(half**2 - fixed**2, 0.0) / (taken**2 - fixed**2)
    more = max(1, int(np.ceil(needed)) - n)
    least = "about" if c1 > 0 else "at least"
    return more, f"{text}; {least} {more} more prompt{'s' if more > 1 else ''} would do"


def _noise_scale(law, c, draws, values, resampled, group_size, bootstrap, reasons) -> dict:
    size = group_size or law["best_integer"]
    result = dict.fromkeys(("gradient_noise_scale", "gradient_noise_scale_ci95", "gradient_noise_scale_G"))
    result["gradient_noise_scale_G"] = size
    interval = law["mean_theta_norm_sq_ci95"]
    if size is None or interval is None:
        return _without(result, reasons, reasons["mean_theta_norm_sq_ci95" if interval is None else "best_integer"])
    if interval[0] <= 0:
        text = f"the interval of ||mean theta||^2 includes 0 ([{interval[0]:.4g}, {interval[1]:.4g}])"
        return _without(result, reasons, text)
    name = "mean_theta_norm_sq"
    result["gradient_noise_scale"] = mse_times_budget(*c, size) / size / values[name]
    result["gradient_noise_scale_ci95"] = bootstrap.interval(mse_times_budget(*draws, size) / size / resampled[name])
    return result


def _silent(outcomes: Sequence[RewardCounts] | None, bootstrap: PromptBootstrap, reasons: dict) -> dict:
    """The share of silent groups at each power of two, from the continuations of each prompt that have the Grams."""
    sizes = POWERS[POWERS <= GROUP_SIZES[-1]]
    result: dict = {"G": sizes.tolist(), "share": None, "ci95": None, "continuations": None}
    if outcomes is None:
        reasons["silent_share"] = "the rewards of the continuations are not given"
        return {"silent_share": result}
    if len(outcomes) != bootstrap.n_prompts:
        raise ValueError(f"outcomes: {len(outcomes)} prompts, not {bootstrap.n_prompts}")
    fewest = min(each.total for each in outcomes)
    shares = np.array([[each.silent_share(int(size)) for size in sizes if size <= fewest] for each in outcomes])
    beyond = [None] * (len(sizes) - shares.shape[1])
    result["continuations"] = fewest
    result["share"] = shares.mean(0).tolist() + beyond
    result["ci95"] = [bootstrap.interval(column) for column in bootstrap.resampled_means(shares).T] + beyond
    if beyond:
        text = f"a group larger than the {fewest} continuations of a prompt has no share without bias"
        reasons |= dict.fromkeys(("silent_share.share", "silent_share.ci95"), text)
    if bootstrap.n_prompts == 1:
        reasons["silent_share.ci95"] = ONE_PROMPT
    return {"silent_share": result}
