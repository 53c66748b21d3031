"""Estimators beside each other: GRPO over the oracle by K, the MSE at any K, and all of them at one K.

Functions for plots/results.ipynb; each takes a ``Measurement`` and an ``ax`` and returns (figure, ax). UserError where
the Grams that are needed are missing. MSE in squared gradient units; bars and bands are 95% intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.stats.estimators import label_of
from plots.measurement import Measurement
from plots.plot_tracecov import FLOOR, PUBLISHED, curve_of, sample_sizes, why_missing
from plots.style import COLOURS, CURVES, finish, group_size_axis, new_ax, note

FAIR = "signal_to_noise_per_continuation"  # groups that an estimator throws away are paid for
QUANTITIES = {
    FAIR: "signal-to-noise ratio per continuation sampled",
    "effective_group_size": "effective group size: the K at which\nplain GRPO has this signal-to-noise ratio",
    "mse": "MSE (squared gradient units)",
    "signal_to_noise": "signal-to-noise ratio",
}


def fit_ratio_law(sizes: Sequence[int], ratios: Sequence[float]) -> float:
    """The c of least squares in ratio = 1 + c/(K - 1), the law of GRPO over the oracle.

    Exact with c = (2 zeta2 - 4 zeta1) / (4 zeta1), for tr Var of GRPO is 4 zeta1/K + (2 zeta2 - 4 zeta1)/(K (K-1)) and
    that of the oracle 4 zeta1/K.

    >>> round(fit_ratio_law([2, 5], [3.0, 1.5]), 12)
    2.0
    """
    x, excess = 1 / (np.asarray(sizes, dtype=float) - 1), np.asarray(ratios, dtype=float) - 1
    return float((x * excess).sum() / (x * x).sum())


def ratios_by_size(measured: Measurement) -> tuple[list[int], list[float], list]:
    """K, mean GRPO trace over mean oracle trace, and its interval (None without Grams), where there is a ratio."""
    sizes, results = measured.results["K_list"], measured.results
    found = []
    for place, size in enumerate(sizes):
        if isinstance(measured.grams, str):
            grpo, oracle = (results["conditional_on_x"][name][place] for name in ("grpo", "oracleV"))
            ends = ((results.get("conditional_on_x_ci95") or {}).get("oracleV") or [None] * len(sizes))[place]
            if grpo is not None and oracle is not None and (oracle if ends is None else ends[0]) > 0:
                found.append((size, grpo / oracle, None))
            continue
        traces = [measured.at(name, size).trace for name in ("grpo", "oracleV")]
        estimate = measured.bootstrap.ratio(*traces, f"oracle trace at K={size}")
        if estimate.value is not None:
            found.append((size, *estimate[:2]))
    if not found:
        raise UserError("there is no ratio of GRPO to the oracle: the oracle's trace is missing or not surely above 0")
    return tuple(map(list, zip(*found)))


def plot_ratio(measured: Measurement, ax=None):
    """MSE of GRPO over that of the oracle against K, measured, and 1 + c/(K-1) fitted to it."""
    ax = new_ax(ax)
    sizes, ratios, intervals = ratios_by_size(measured)
    bars = [
        [0.0 if i is None else max(0.0, sign * (i[end] - r)) for r, i in zip(ratios, intervals)]
        for end, sign in ((0, -1), (1, 1))
    ]
    ax.errorbar(sizes, ratios, yerr=bars, capsize=3, linestyle="", marker="o", color=COLOURS[0], label="measured")
    c, smooth = fit_ratio_law(sizes, ratios), np.geomspace(min(sizes), max(sizes), 200)
    ax.plot(smooth, 1 + c / (smooth - 1), color=COLOURS[1], linestyle="--", label=f"fitted: 1 + {c:.3g}/(K-1)")
    ax.axhline(1, color="black", linewidth=0.8)
    group_size_axis(ax, measured.results["K_list"])
    ax.set_xlabel("group size K" + sample_sizes(measured.results))
    ax.set_ylabel(f"MSE of {label_of('grpo')} / MSE of {label_of('oracleV')}")
    finish(ax)
    return ax.get_figure(), ax


def plot_any_group_size(measured: Measurement, ax=None, sizes: Sequence[int] | None = None):
    """The MSE at every K (2 to four times the largest measured), from the saved Grams; both axes logarithmic.

    Markers: the group sizes of the results. GRPO's curve is exact at every K from one block of continuations. A curve
    that cannot be computed is named below the axis.
    """
    ax, measured_at = new_ax(ax, height=3.1), measured.results["K_list"]
    if sizes is None:
        sizes = np.unique(np.geomspace(2, 4 * max(measured_at), 60).round().astype(int)).tolist()
    bootstrap, reasons = measured.bootstrap, []
    for name in (*PUBLISHED, FLOOR):
        look = CURVES[name]
        try:
            estimates = [bootstrap.mean(measured.at(name, size).trace) for size in sizes]
        except UserError as error:
            reasons.append(why_missing(name, str(error).removeprefix(f"{name}: ")))
            continue
        values = np.array([each.value for each in estimates])
        ax.plot(sizes, np.where(values > 0, values, np.nan), color=look.colour, linestyle=look.line, label=look.label)
        if all(each.interval for each in estimates):
            low, high = np.array([each.interval for each in estimates]).T
            ax.fill_between(sizes, low, high, color=look.colour, alpha=0.12, linewidth=0)
        points = [np.nan if value is None or value <= 0 else value for value in curve_of(measured.results, name)[0]]
        ax.plot(measured_at, points, color=look.colour, linestyle="", marker=look.marker, markersize=5)
    if len(reasons) == 4:
        raise UserError(reasons[0])
    ax.set_yscale("log")
    group_size_axis(ax, [2**power for power in range(1, 31) if min(sizes) <= 2**power <= max(sizes)])
    ax.set_xlabel(f"group size K\n(n = {len(measured.moments):,} prompts)")
    ax.set_ylabel("MSE (squared gradient units)")
    note(ax, "\n".join(reasons))
    finish(ax, loc="lower left")
    return ax.get_figure(), ax


def missing(measured: Measurement, quantity: str = FAIR) -> list[str]:
    """One line for each reason why estimators lack this quantity: ``"opo, dapo: K=4 needs a block of ..."``."""
    by_reason: dict[str, list[str]] = {}
    for name, found in measured.compared.items():
        if found[quantity][0] is None:
            reason = measured.reasons.get(f"estimators.{name}.{quantity}", "no reason is given")
            by_reason.setdefault(reason.removeprefix("not computed: "), []).append(label_of(name))
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def plot_estimators(measured: Measurement, ax=None, quantity: str = FAIR):
    """Every estimator at one K, best first; a line at plain GRPO; those that could not be computed are left out.

    quantity: a key of QUANTITIES. Filled: the estimator's target is the true gradient; open: another one, a rescaled
    gradient say. UserError where no estimator has the quantity, or it is relative to GRPO's and GRPO has none.
    """
    known = {name: found for name, found in measured.compared.items() if found[quantity][0] is not None}
    if not known:
        raise UserError(f"no estimator has this quantity ({quantity}); see the reasons in the results file")
    if quantity == FAIR and "grpo" not in known:
        raise UserError("GRPO itself has no signal-to-noise ratio to compare with; see the reasons in the results file")
    # nothing is divided by a ratio that may be 0: the values themselves are drawn then
    own = known["grpo"] if quantity == FAIR else None
    relative = own is not None and ((own[f"{quantity}_ci95"][0] or own[quantity])[0] > 0)
    unit = own[quantity][0] if relative else 1.0
    names = sorted(known, key=lambda name: known[name][quantity][0], reverse=quantity == "mse")  # the best on top
    ax = new_ax(ax, height=1.2 + 0.2 * len(names))
    for place, name in enumerate(names):
        value, interval = known[name][quantity][0] / unit, np.array(known[name][f"{quantity}_ci95"][0] or [np.nan] * 2) / unit
        colour = CURVES[name].colour if name in CURVES else "black"
        bars = np.maximum(0.0, np.array([[value - interval[0]], [interval[1] - value]]))
        ax.errorbar(
            [value],
            [place],
            xerr=np.nan_to_num(bars),
            capsize=2,
            elinewidth=1,
            color=colour,
            marker="o",
            markersize=5,
            markerfacecolor=colour if known[name]["target"] == "theta" else "white",
        )
    if "grpo" in known:
        ax.axvline(known["grpo"][quantity][0] / unit, color=CURVES["grpo"].colour, linestyle="--", linewidth=1)
    for text, filling in (("estimates the gradient", "black"), ("a rescaled gradient", "white")):
        ax.plot([], [], linestyle="", marker="o", color="black", markerfacecolor=filling, label=text)
    ax.set_yticks(range(len(names)), map(label_of, names))
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")
    over = ",\nover that of plain GRPO" if relative else ""
    ax.set_xlabel(f"{QUANTITIES[quantity]}{over}\n(at K = {measured.compared_sizes[0]}{_prompts(measured)})")
    finish(ax, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
    return ax.get_figure(), ax


def _prompts(measured: Measurement) -> str:
    return f", n = {measured.results['n_prompts']:,} prompts" if measured.results.get("n_prompts") else ""
