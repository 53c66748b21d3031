"""Which group size should I train with? The minibatch MSE of the GRPO gradient at a fixed number of continuations.

    law = group_size_law(theta_sq, zeta1, zeta2, sketches, oracle_values)   # JSON-ready
    print(group_size_report(law, budget=1024))

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

from Gradient_evaluation.stats.bootstrap import ONE_PROMPT, Averages, PromptBootstrap, not_above_zero
from Gradient_evaluation.stats.group_size_answer import (
    C1,
    C2,
    C3,
    SURE_C1,
    almost_best,
    best_size_bound,
    forecast,
    law_rows,
    relative_mse,
)
from Gradient_evaluation.stats.silent_groups import RewardCounts
from Gradient_evaluation.stats.sketch_pairs import (
    FEW_PROMPTS,
    MIN_PROMPTS,
    SketchPart,
    pair_averages,
    pair_mean,
    pair_products,
    sketch_covariance,
    squared_norm_draws,
)

GROUP_SIZES = np.arange(2, 513)
POWERS = 2 ** np.arange(1, 31)
PREDICTION = (
    "This is a prediction for the parameters at which the gradients were measured; as training moves them, the "
    "constants move too."
)
NO_PAIRS = "one prompt: what prompts have in common needs at least two"
NO_REWARD_DIFFERED = (
    "no reward ever differed: all continuations of a prompt have the same reward, so every group's gradient is 0 and no "
    "group size is better than another"
)
COLUMNS = {
    "c1": C1,
    "c2": C2,
    "c3": C3,
    "mean_theta_sq": np.array([1.0, 0, 0, 0]),
    "mean_theta_norm_sq": np.array([0, 0, 0, 1.0]),
}


def mse_times_budget(c1, c2, c3, group_size):
    """N MSE = c1 G + c2 + c3/(G-1): the MSE of a minibatch gradient times its number of continuations N = B G."""
    return c1 * group_size + c2 + c3 / (group_size - 1)


def best_group_size(c1, c3):
    """G* >= 2 of least ``mse_times_budget``: 1 + sqrt(c3/c1), 2 where that is less.

    c3 >= 0 holds for every policy (Hoeffding: zeta2 >= 2 zeta1), so of c3 <= 0 there is no G*: NaN. For c1 <= 0 the MSE
    falls with G for ever: inf.
    """
    c1, c3 = np.asarray(c1, dtype=np.float64), np.asarray(c3, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.maximum(2.0, 1 + np.sqrt(np.maximum(c3, 0.0) / c1))
    return np.where(c3 <= 0, np.nan, np.where(c1 <= 0, np.inf, inner)) + 0 * (c1 + c3)  # NaN stays NaN


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
    theta_sq_noise: np.ndarray | None = None,
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
        theta_sq_noise: (n,) variance of each theta_sq for its continuations, where blocks tell it; for the forecast.
        sketch_dim, sketch_layout: see prompt_pairs.sketch_covariance; neither: the rows are whole gradients.
        group_size: where the gradient noise scale is stated; default the best integer.

    Returns, all intervals 95% bootstrap-t over prompts (the same resamples) with the sketch's error in it:
        c1, c2, c3 (and _ci95); mean_theta_sq: mean ||theta(x)||^2; mean_theta_norm_sq: ||mean theta(x)||^2 (both
        with _ci95); sketch_standard_error: of mean_theta_norm_sq and c1 alike;
        G_star, G_star_ci95 (an end is None where it is not bounded, and where G_star may be larger);
        G_star_paper_bound: sqrt(c3/c1);
        G_star_at_least: one-sided 95% lower bound, also where c1 is not told from 0; G_star_may_be_larger: whether c1
        is less than 3 standard errors; such answers are mostly those where c1 came out too large by chance;
        best_integer; within_10_percent [lowest, highest], _ci95 [[low, high] of each]; powers_of_two: in that range;
        relative_mse {G: powers of two, reference: the one of least MSE, value: MSE over that, ci95 (an upper
        end is None where it is not bounded)};
        almost_best [lowest, highest] power of two whose relative MSE is at most 1.1, also without a G_star;
        curve {G: 2..512, mse_times_N, ci95, terms {c1, c2, c3: their parts of mse_times_N}};
        gradient_noise_scale (and _ci95): prompts, (c1 + c2/G + c3/(G (G-1))) / mean_theta_norm_sq, at
        gradient_noise_scale_G; silent_share {G: powers of two, share, ci95, continuations: the fewest of a prompt}: the
        share of groups whose rewards are all equal, without bias from the run's own continuations (silent_groups), None
        for a G above their number;
        more_prompts: how many more would tell c1 from 0 in four cases of five; times_continuations: how many times as
        many continuations per prompt would do instead; continuations_share: of the variance of c1;
        n_prompts, sketch_dim, reasons.
    """
    columns = [np.asarray(c, dtype=np.float64) for c in (theta_sq, 4 * np.asarray(zeta1), 2 * np.asarray(zeta2))]
    n = _checked(columns, sketches)
    bootstrap, reasons = PromptBootstrap(n, n_bootstrap, seed), {}
    law: dict = {"n_prompts": n, "sketch_dim": sketch_dim}
    if sketch_dim is None:
        reasons["sketch_dim"] = "no gradient sketches were stored" if sketches is None else "the rows are whole gradients"
    missing = _why_no_pairs(n, sketches)
    products = None if sketches is None else pair_products(sketches)
    error = _sketch_error(sketches, sketch_layout, sketch_dim)
    law["sketch_standard_error"] = error
    if error is None:
        reasons["sketch_standard_error"] = "no gradient sketches were stored"
    averages = _averages(columns, products, error, bootstrap, seed, missing)
    for name, row in COLUMNS.items():
        law |= _constant(name, row, averages, products, bootstrap, missing, reasons)
    silence = NO_REWARD_DIFFERED if not np.any(columns[2] / 2 + columns[0]) else None  # E||h||^2 of every prompt is 0
    if silence:  # an interval [0, 0] would be a certainty that nobody has
        without = dict.fromkeys([f"{name}_ci95" for name in COLUMNS])
        law |= without
        reasons |= dict.fromkeys(without, silence)
    law |= _curve(law, averages, bootstrap, missing, reasons)
    law |= _optimum(law, averages, bootstrap, silence or missing, reasons)
    law |= _prospect(law, columns[0], products, theta_sq_noise, silence or missing, reasons)
    law |= _noise_scale(law, averages, group_size, bootstrap, reasons)
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
    return NO_PAIRS if n == 1 else FEW_PROMPTS if n < MIN_PROMPTS else None


def _sketch_error(sketches, layout, sketch_dim) -> float | None:
    """Standard error of ||mean theta||^2, and of c1, for the sketch's random matrices."""
    if sketches is None:
        return None
    return float(np.sqrt(max(0.0, sketch_covariance([(sketches, sketches)], layout, sketch_dim)[0, 0])))


def _averages(columns, products, sketch_error, bootstrap, seed, missing) -> Averages:
    """The four averages of ``COLUMNS``; without pairs of prompts the last is left 0, and nothing that needs it is read."""
    if missing:
        return bootstrap.averages([*columns, np.zeros(bootstrap.n_prompts)])
    errors = squared_norm_draws(pair_mean(products), sketch_error, bootstrap.n_bootstrap, seed)
    return pair_averages(columns, [products], bootstrap, errors[:, None])


def _constant(name, row, averages, products, bootstrap, missing, reasons) -> dict:
    (value,), draws = averages.linear(row[None])
    found = {name: float(value), f"{name}_ci95": bootstrap.interval(draws[:, 0], value)}
    if row[-1] and missing:
        common = np.nan if products is None else pair_mean(products)
        value = float(row[0] * averages.means[0] + row[-1] * common)
        found = {name: value if np.isfinite(value) else None, f"{name}_ci95": None}
    why = missing if row[-1] and missing else ONE_PROMPT
    reasons |= {key: why for key, each in found.items() if each is None}
    return found


def _curve(law, averages, bootstrap, missing, reasons) -> dict:
    curve: dict = {"G": GROUP_SIZES.tolist(), "mse_times_N": None, "ci95": None, "terms": None}
    if law["c1"] is None:
        reasons["curve"] = missing
        return {"curve": curve}
    parts = law["c1"] * GROUP_SIZES, np.full(len(GROUP_SIZES), law["c2"]), law["c3"] / (GROUP_SIZES - 1)
    curve["mse_times_N"] = sum(parts).tolist()
    curve["terms"] = {name: part.tolist() for name, part in zip(("c1", "c2", "c3"), parts)}
    if missing:
        reasons["curve.ci95"] = missing
        return {"curve": curve}
    values, draws = averages.linear(law_rows(GROUP_SIZES))
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    curve["ci95"] = [list(pair) for pair in zip(np.minimum(low, values).tolist(), np.maximum(high, values).tolist())]
    return {"curve": curve}


def _optimum(law, averages, bootstrap, unknown, reasons) -> dict:
    """G* and what depends on it, or None with the reason; what a wrong size costs, which needs a c3 above 0 but no G*."""
    keys = (
        "G_star",
        "G_star_ci95",
        "G_star_paper_bound",
        "best_integer",
        "within_10_percent",
        "within_10_percent_ci95",
        "powers_of_two",
        "G_star_may_be_larger",
    )
    result: dict = dict.fromkeys((*keys, "G_star_at_least", "almost_best"))
    result["relative_mse"] = {"G": None, "reference": None, "value": None, "ci95": None}
    if unknown is not None:
        reasons["relative_mse"] = unknown
        return _without(result, reasons, unknown)
    if law["c3"] <= 0:
        noise = "is not above 0; c3 cannot be below 0, so this is noise: more prompts or more continuations are needed"
        reasons["relative_mse"] = f"{_stated(law, 'c3')} {noise}"
        return _without(result, reasons, reasons["relative_mse"])
    result["relative_mse"], why = relative_mse(averages, POWERS[POWERS <= GROUP_SIZES[-1]], bootstrap)
    if why:
        reasons["relative_mse"] = why
        reasons["almost_best"] = why
    result["almost_best"] = almost_best(result["relative_mse"])
    bound = best_size_bound(averages, 5.0)
    result["G_star_at_least"] = bound if bound is None or bound > 2 else None
    if result["G_star_at_least"] is None:
        reasons["G_star_at_least"] = "c1 lies below 0" if bound is None else "the data support no lower bound above G = 2"
    if law["c1_ci95"][0] <= 0:
        return _without(
            result,
            reasons,
            _stated(law, "c1")
            + (" is not above 0" if law["c1"] <= 0 else f" cannot be told from 0 with these {law['n_prompts']} prompts"),
        )
    c = [law[name] for name in ("c1", "c2", "c3")]
    result["G_star"] = float(best_group_size(c[0], c[2]))
    ends = [best_size_bound(averages, percent) for percent in (2.5, 97.5)]
    low, high = min(ends[0] or np.inf, result["G_star"]), max(ends[1] or np.inf, result["G_star"])
    half = np.sqrt(averages.variance(C1) + law["sketch_standard_error"] ** 2)
    result["G_star_may_be_larger"] = bool(c[0] < SURE_C1 * half)
    bounded = np.isfinite(high) and not result["G_star_may_be_larger"]
    result["G_star_ci95"] = [low, high if bounded else None]
    result["best_integer"] = int(best_integer(*c))
    result["G_star_paper_bound"] = float(np.sqrt(c[2] / c[0]))
    low, high = near_best(*c)
    if not (np.isfinite(low) and np.isfinite(high)):
        return _without(result, reasons, "the least predicted MSE is not above 0")
    result["within_10_percent"] = [int(low), int(high)]
    draws = averages.linear(np.stack([C1, C2, C3]))[1].T
    result["within_10_percent_ci95"] = [_ends(end, value) for end, value in zip(near_best(*draws), (low, high))]
    result["powers_of_two"] = [int(power) for power in POWERS if low <= power <= high]
    return result


def _stated(law: dict, name: str) -> str:
    low, high = law[f"{name}_ci95"]
    return f"{name} = {law[name]:.3g} (interval [{low:.3g}, {high:.3g}])"


def _without(result: dict, reasons: dict, why: str) -> dict:
    reasons |= {key: why for key, value in result.items() if value is None and key not in reasons}
    return result


def _ends(draws: np.ndarray, value: float) -> list[float | None]:
    """95% interval that holds ``value``, of draws that may be infinite; an infinite end is None."""
    low, high = np.percentile(draws[~np.isnan(draws)], [2.5, 97.5], method="lower")
    return [float(end) if np.isfinite(end) else None for end in (min(low, value), max(high, value))]


def _prospect(law, theta_sq, products, noise, unknown, reasons) -> dict:
    """What more would tell c1 from 0, where it is not told from 0 yet."""
    keys = ("more_prompts", "times_continuations", "continuations_share")
    if unknown is not None:
        return _without(dict.fromkeys(keys), reasons, unknown)
    if law["c1_ci95"][0] > 0:
        return _without(dict.fromkeys(keys), reasons, "c1 is above 0: nothing more is needed for it")
    found = forecast(theta_sq, products, law["c1_ci95"], law["sketch_standard_error"], noise)
    if law["c3"] > 0:
        changed = {key: f"{text}; {found.text}" for key, text in reasons.items() if text == reasons["G_star"]}
        reasons |= changed
    return _without(dict(zip(keys, found)), reasons, found.text)


def _noise_scale(law, averages, group_size, bootstrap, reasons) -> dict:
    size = group_size or law["best_integer"]
    result = dict.fromkeys(("gradient_noise_scale", "gradient_noise_scale_ci95", "gradient_noise_scale_G"))
    result["gradient_noise_scale_G"] = size
    interval = law["mean_theta_norm_sq_ci95"]
    if size is None or interval is None:
        return _without(result, reasons, reasons["mean_theta_norm_sq_ci95" if interval is None else "best_integer"])
    why = not_above_zero(interval, "squared norm of the gradient's mean over prompts, ||mean theta||^2,")
    if why:
        return _without(result, reasons, why)
    (value,), draws = averages.linear_ratio(law_rows(np.array([size])) / size, COLUMNS["mean_theta_norm_sq"])
    estimate = bootstrap.estimate(float(value), draws[:, 0])
    result |= {"gradient_noise_scale": estimate.value, "gradient_noise_scale_ci95": estimate.interval}
    return _without(result, reasons, estimate.reason) if estimate.reason else result


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
    draws = bootstrap.draws(shares).clip(0.0, 1.0)
    result["ci95"] = [bootstrap.interval(*column) for column in zip(draws.T, shares.mean(0))] + beyond
    if beyond:
        text = f"a group larger than the {fewest} continuations of a prompt has no share without bias"
        reasons |= dict.fromkeys(("silent_share.share", "silent_share.ci95"), text)
    if bootstrap.n_prompts == 1:
        reasons["silent_share.ci95"] = ONE_PROMPT
    return {"silent_share": result}
