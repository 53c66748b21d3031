"""Which group size should I train with? The minibatch MSE of the GRPO gradient at a fixed number of continuations.

    result = group_size_law(prompts, sketches, bootstrap)   # JSON-ready
    print(group_size_report(result, budget=1024))

B prompts have groups of G, so N = B G continuations. The total variance of the leave-one-out estimator, averaged over the
B groups, and Hoeffding's variance of a U-statistic give, exactly for every G >= 2 (the paper's Theorem 7 has an upper
bound; the finite-G form is derived in docs/method.md, section 5):

    MSE = c1/B + c2/(B G) + c3/(B G (G-1)),    N MSE = c1 G + c2 + c3/(G-1)
    c1 = tr Var_x theta(x) = mean ||theta(x)||^2 - ||mean theta(x)||^2
    c2 = mean 4 zeta1(x),    c3 = mean (2 zeta2(x) - 4 zeta1(x))

So G* = 1 + sqrt(c3/c1). All constants are in squared gradient units, at the parameters of the measured gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from Gradient_evaluation.stats.bootstrap import ONE_PROMPT, Averages, PromptBootstrap, not_above_zero
from Gradient_evaluation.stats.group_size.best_size import (
    BEST,
    C1,
    C2,
    C3,
    POWERS,
    Constants,
    almost_best,
    best_size,
    forecast,
    mse_rows,
    relative_mse,
)
from Gradient_evaluation.stats.group_size.sketch_pairs import (
    FEW_PROMPTS,
    MIN_PROMPTS,
    Sketches,
    pair_averages,
    pair_mean,
    pair_products,
    sketch_covariance,
    squared_norm_draws,
)
from Gradient_evaluation.stats.missing import Missing, with_reasons
from Gradient_evaluation.stats.prompts import PromptMoments
from Gradient_evaluation.stats.silent_groups import RewardCounts

GROUP_SIZES = np.arange(2, 513)
PREDICTION = (
    "This is a prediction for the parameters at which the gradients were measured; as training moves them, the "
    "constants move too."
)
NO_SKETCHES = "no gradient sketches were stored"
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


@dataclass(frozen=True)
class Measured:
    """What the prompts and their sketches say: the averages that all constants are sums of."""

    theta_sq: np.ndarray  # (n,)
    averages: Averages  # the four that ``COLUMNS`` name; without pairs of prompts the last is 0 and nothing reads it
    products: np.ndarray | None  # (n, n) of the sketches
    sketch_error: float | None  # standard error of ||mean theta||^2, and of c1, that comes from the sketch
    no_pairs: str | None  # why nothing is said about pairs of prompts
    silence: str | None  # that no reward ever differed
    bootstrap: PromptBootstrap


def group_size_law(prompts: PromptMoments, sketches: Sketches | Missing | None, bootstrap: PromptBootstrap) -> dict:
    """The group-size law of n prompts, JSON-ready: floats, lists, None, never NaN; ``reasons`` says why of each None.

    prompts: of it ``pairs``, ``outcomes`` and ``theta_sq_noise``. sketches: None where none were stored, or Missing with
    another reason.

    Returns, all intervals 95% bootstrap-t over prompts (the same resamples) with the sketch's error in them:
        c1, c2, c3 (and _ci95); mean_theta_sq: mean ||theta(x)||^2; mean_theta_norm_sq: ||mean theta(x)||^2 (both
        with _ci95); sketch_standard_error: of mean_theta_norm_sq and c1 alike;
        G_star, G_star_ci95 (an end is None where it is not bounded, and where G_star may be larger);
        G_star_paper_bound: sqrt(c3/c1);
        G_star_at_least: one-sided 95% lower bound, also where c1 is not distinguished from 0; G_star_may_be_larger:
        whether c1 is less than 3 standard errors (most such answers come from a c1 that is too large by chance);
        best_integer; within_10_percent [lowest, highest], _ci95 [[low, high] of each]; powers_of_two: in that range;
        relative_mse {G: powers of two, reference: the one of least MSE, value: MSE over that, ci95 (an upper
        end is None where it is not bounded)};
        almost_best [lowest, highest] power of two whose relative MSE is at most 1.1, also without a G_star;
        curve {G: 2..512, mse_times_N, ci95, terms {c1, c2, c3: their parts of mse_times_N}};
        gradient_noise_scale (and _ci95): prompts, (c1 + c2/G + c3/(G (G-1))) / mean_theta_norm_sq, at
        gradient_noise_scale_G, the best integer; silent_share: see ``_silent_share``;
        more_prompts, times_continuations, continuations_share: see ``best_size.Forecast``;
        n_prompts, sketch_dim, reasons.
    """
    none = None if isinstance(sketches, Sketches) else sketches or Missing(NO_SKETCHES)
    measured = _measured(prompts, sketches, bootstrap)
    found: dict = {
        "n_prompts": bootstrap.n_prompts,
        "sketch_dim": none or sketches.dim or Missing("the rows are whole gradients"),
        "sketch_standard_error": none or measured.sketch_error,
    }
    for name, row in COLUMNS.items():
        found |= _constant(name, row, measured)
    unknown = measured.silence or measured.no_pairs
    found["curve"] = _curve(found, measured)
    found |= _recommended(found, measured, prompts.theta_sq_noise, unknown)
    # A c3 at or below 0 is noise, and with it G = 2 would come out as best: no ratio of MSEs then, for G_star's reason.
    noise = found["G_star"].reason if found["c3"] <= 0 else None
    table, no_table = _relative_mse(measured, unknown or noise)
    found |= {"relative_mse": table, "almost_best": Missing(no_table) if no_table else almost_best(table)}
    found |= _noise_scale(found, measured)
    found["silent_share"] = _silent_share(prompts.outcomes, bootstrap)
    result = with_reasons(found)
    # A table without any number has one reason, under its own name.
    if no_table:
        result["reasons"]["relative_mse"] = no_table
    if isinstance(found["c1"], Missing):
        result["reasons"]["curve"] = measured.no_pairs
    return result


def _measured(prompts: PromptMoments, sketches: Sketches | Missing | None, bootstrap: PromptBootstrap) -> Measured:
    pairs, n, has_sketches = prompts.pairs, bootstrap.n_prompts, isinstance(sketches, Sketches)
    columns = [pairs.theta_sq, 4 * pairs.zeta1, 2 * pairs.zeta2]
    for values, what in ((columns, "the moments"), (sketches.rows if has_sketches else [], "the sketches")):
        if not np.isfinite(values).all():
            raise ValueError(f"{what} of the prompts have a value that is not finite")
    silence = None if np.any(columns[2] / 2 + columns[0]) else NO_REWARD_DIFFERED  # E||h||^2 of every prompt is 0
    if not has_sketches:
        no_pairs = sketches.reason if sketches else f"{NO_SKETCHES}; measure again with --sketch_dim above 0"
        averages = bootstrap.averages([*columns, np.zeros(n)])
        return Measured(columns[0], averages, None, None, no_pairs, silence, bootstrap)
    products = pair_products(sketches.rows)
    variance = sketch_covariance([(sketches.rows, sketches.rows)], sketches.layout, sketches.dim)[0, 0]
    error = float(np.sqrt(max(0.0, variance)))
    if n < MIN_PROMPTS:
        averages = bootstrap.averages([*columns, np.zeros(n)])
        return Measured(columns[0], averages, products, error, NO_PAIRS if n == 1 else FEW_PROMPTS, silence, bootstrap)
    errors = squared_norm_draws(pair_mean(products), error, bootstrap.n_bootstrap, bootstrap.seed)
    averages = pair_averages(columns, [products], bootstrap, errors[:, None])
    return Measured(columns[0], averages, products, error, None, silence, bootstrap)


def _constant(name: str, row: np.ndarray, measured: Measured) -> dict:
    """{name, name_ci95}: a sum of the averages with coefficients ``row``."""
    if row[-1] and measured.no_pairs:
        common = np.nan if measured.products is None else pair_mean(measured.products)
        value, why = float(row[0] * measured.averages.means[0] + row[-1] * common), Missing(measured.no_pairs)
        return {name: value if np.isfinite(value) else why, f"{name}_ci95": why}
    (value,), draws = measured.averages.linear(row[None])
    if measured.silence:  # an interval [0, 0] would be a certainty that nobody has
        return {name: float(value), f"{name}_ci95": Missing(measured.silence)}
    interval = measured.bootstrap.interval(draws[:, 0], value)
    return {name: float(value), f"{name}_ci95": Missing(ONE_PROMPT) if interval is None else interval}


def _curve(found: dict, measured: Measured) -> dict:
    """N MSE at every G; all None without c1."""
    curve: dict = {"G": GROUP_SIZES.tolist(), "mse_times_N": None, "ci95": None, "terms": None}
    if isinstance(found["c1"], Missing):
        return curve
    parts = found["c1"] * GROUP_SIZES, np.full(len(GROUP_SIZES), found["c2"]), found["c3"] / (GROUP_SIZES - 1)
    curve["mse_times_N"] = sum(parts).tolist()
    curve["terms"] = {name: part.tolist() for name, part in zip(("c1", "c2", "c3"), parts)}
    if measured.no_pairs:
        return {**curve, "ci95": Missing(measured.no_pairs)}
    values, draws = measured.averages.linear(mse_rows(GROUP_SIZES))
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    ends = zip(np.minimum(low, values).tolist(), np.maximum(high, values).tolist())
    return {**curve, "ci95": [list(pair) for pair in ends]}


def _relative_mse(measured: Measured, unknown: str | None) -> tuple[dict, str | None]:
    """``best_size.relative_mse``, or nothing and the reason."""
    if unknown:
        return {"G": None, "reference": None, "value": None, "ci95": None}, unknown
    return relative_mse(measured.averages, POWERS[POWERS <= GROUP_SIZES[-1]], measured.bootstrap)


def _recommended(found: dict, measured: Measured, noise: np.ndarray, unknown: str | None) -> dict:
    """The best group size, and what would distinguish c1 from 0 where it is not."""
    needed = ("more_prompts", "times_continuations", "continuations_share")
    if unknown:
        return dict.fromkeys((*BEST, "G_star_at_least", *needed), Missing(unknown))
    values, intervals = ([found[f"{name}{end}"] for name in ("c1", "c2", "c3")] for end in ("", "_ci95"))
    constants = Constants(measured.averages, tuple(values), tuple(intervals), measured.sketch_error, found["n_prompts"])
    if found["c1_ci95"][0] > 0:
        why = Missing("c1 is above 0: nothing more is needed for it")
        return {**best_size(constants, None), **dict.fromkeys(needed, why)}
    outlook = forecast(measured.theta_sq, measured.products, found["c1_ci95"], measured.sketch_error, noise)
    more = {key: Missing(outlook.text) if value is None else value for key, value in zip(needed, outlook)}
    return {**best_size(constants, outlook.text), **more}


def _noise_scale(found: dict, measured: Measured) -> dict:
    size, interval = found["best_integer"], found["mean_theta_norm_sq_ci95"]
    keys = ("gradient_noise_scale", "gradient_noise_scale_ci95")
    missing = next((each for each in (interval, size) if isinstance(each, Missing)), None)
    if missing is not None:
        return {**dict.fromkeys(keys, missing), "gradient_noise_scale_G": missing if isinstance(size, Missing) else size}
    why = not_above_zero(interval, "squared norm of the gradient's mean over prompts, ||mean theta||^2,")
    if why:
        return {**dict.fromkeys(keys, Missing(why)), "gradient_noise_scale_G": size}
    (value,), draws = measured.averages.linear_ratio(mse_rows(np.array([size])) / size, COLUMNS["mean_theta_norm_sq"])
    estimate = measured.bootstrap.estimate(float(value), draws[:, 0])
    number = estimate.value_or_missing(), estimate.interval_or_missing()
    return {**dict(zip(keys, number)), "gradient_noise_scale_G": size}


def _silent_share(outcomes: Sequence[RewardCounts], bootstrap: PromptBootstrap) -> dict:
    """{G: powers of two, share, ci95, continuations: the fewest of a prompt}: how many groups have equal rewards only.

    Without bias from the run's own continuations (silent_groups); None for a G above their number.
    """
    sizes = POWERS[POWERS <= GROUP_SIZES[-1]]
    fewest = min(each.total for each in outcomes)
    shares = np.array([[each.silent_share(int(size)) for size in sizes if size <= fewest] for each in outcomes])
    too_large = Missing(f"a group larger than the {fewest} continuations of a prompt has no share without bias")
    beyond = [too_large for size in sizes if size > fewest]
    draws = bootstrap.draws(shares).clip(0.0, 1.0)
    intervals = [bootstrap.interval(*column) for column in zip(draws.T, shares.mean(0))] + beyond
    if bootstrap.n_prompts == 1:
        intervals = [Missing(ONE_PROMPT) for _ in sizes]
    return {"G": sizes.tolist(), "share": shares.mean(0).tolist() + beyond, "ci95": intervals, "continuations": fewest}
