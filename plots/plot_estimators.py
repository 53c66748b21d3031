"""Estimators beside each other: GRPO over the oracle by K, the MSE at any K, and all of them at one K.

Functions for plots/results.ipynb; each takes a ``Measurement`` and an ``ax`` and returns (figure, ax). UserError where
the Grams that are needed are missing. MSE in squared gradient units; bars and bands are 95% intervals over prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import DRAWN, counted, curve_of, label_in
from plots.measurement import Measurement
from plots.style import COLOURS, CURVES, bars_of, finish, group_size_axis, new_ax, note
from plots.tracecov import look_in, sample_sizes, why_missing

TICK_LETTERS = 24  # on the x axis of plot_estimators, beside the long names of the estimators
RATIO = "signal_to_noise_per_continuation"  # groups that an estimator throws away are paid for
WORDS = "signal-to-noise ratio per continuation sampled"


def fit_ratio_law(sizes: Sequence[int], ratios: Sequence[float]) -> float:
    """The c of least squares in ratio = 1 + c/(K - 1), the trace of GRPO over that of the oracle.

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
    for i, size in enumerate(sizes):
        if isinstance(measured.grams, str):
            grpo, oracle = (results["conditional_on_x"][name][i] for name in ("grpo", "oracleV"))
            ends = curve_of(results, "oracleV")[1][i]
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
    bars = bars_of(ratios, intervals)
    ax.errorbar(sizes, ratios, yerr=bars, capsize=3, linestyle="", marker="o", color=COLOURS[0], label="measured")
    c, smooth = fit_ratio_law(sizes, ratios), np.geomspace(min(sizes), max(sizes), 200)
    ax.plot(smooth, 1 + c / (smooth - 1), color=COLOURS[1], linestyle="--", label=f"fitted: 1 + {c:.3g}/(K-1)")
    ax.axhline(1, color="black", linewidth=0.8)
    group_size_axis(ax, measured.results["K_list"])
    ax.set_xlabel("group size K" + sample_sizes(measured.results))
    ax.set_ylabel(" / ".join(f"MSE of {label_in(measured.compared, name)}" for name in ("grpo", "oracleV")))
    finish(ax, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return ax.get_figure(), ax


def plot_any_group_size(measured: Measurement, ax=None):
    """The MSE at every K (2 to four times the largest measured), from the saved Grams; both axes logarithmic.

    Markers: the group sizes of the results. GRPO's curve is exact at every K from one block of continuations. A curve
    that cannot be computed is named below the axis.
    """
    ax, measured_at = new_ax(ax, height=3.1), measured.results["K_list"]
    sizes = np.unique(np.geomspace(2, 4 * max(measured_at), 60).round().astype(int)).tolist()
    bootstrap, reasons = measured.bootstrap, []
    for name in DRAWN:
        look = look_in(measured.compared, name)
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
    if len(reasons) == len(DRAWN):
        raise UserError(reasons[0])
    ax.set_yscale("log")
    group_size_axis(ax, [2**power for power in range(1, 31) if min(sizes) <= 2**power <= max(sizes)])
    ax.set_xlabel(f"group size K\n({measured.n})")
    ax.set_ylabel("MSE (squared gradient units)")
    note(ax, "\n".join(reasons))
    finish(ax, loc="lower left")
    return ax.get_figure(), ax


def missing(measured: Measurement) -> list[str]:
    """One line for each reason why estimators lack the ratio: ``"opo, dapo: K=4 needs a block of ..."``."""
    by_reason: dict[str, list[str]] = {}
    for name, found in measured.compared.items():
        if found[RATIO][0] is None:
            label = label_in(measured.compared, name)
            by_reason.setdefault(_reason(measured, name).removeprefix("not computed: "), []).append(label)
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _reason(measured: Measurement, name: str) -> str:
    return measured.reasons.get(f"estimators.{name}.{RATIO}", "no reason is given")


def plot_estimators(measured: Measurement, ax=None):
    """Signal-to-noise ratio per continuation of every estimator at one K, best first; those without one are left out.

    The ratio is over plain GRPO's (dashed line), or where GRPO's may be 0 the ratio itself. Filled: the estimator's target is
    the true gradient; open: another one, a rescaled gradient say. An arrow at the left edge: the interval reaches 0 or below,
    where a logarithmic axis ends. UserError where no estimator has a ratio, or GRPO has none.
    """
    known = {name: found for name, found in measured.compared.items() if found[RATIO][0] is not None}
    unit, relative = _unit(measured, known)
    names = sorted(known, key=lambda name: known[name][RATIO][0])  # the best on top
    ax = new_ax(ax, height=1.2 + 0.2 * len(names))
    values = [known[name][RATIO][0] / unit for name in names]
    ends = [known[name][f"{RATIO}_ci95"][0] for name in names]
    intervals = [None if each is None else [end / unit for end in each] for each in ends]
    ax.set_xscale("log")
    for row, (name, value, interval) in enumerate(zip(names, values, intervals)):
        colour = CURVES[name].colour if name in CURVES else "black"
        filling = colour if known[name]["target"] == "theta" else "white"
        bars = bars_of([value], [interval])
        look = {"color": colour, "marker": "o", "markersize": 5, "markerfacecolor": filling}
        ax.errorbar([value], [row], xerr=bars, capsize=2, elinewidth=1, **look)
    ax.axvline(known["grpo"][RATIO][0] / unit, color=CURVES["grpo"].colour, linestyle="--", linewidth=1)
    for text, filling in (("estimates the gradient", "black"), ("a rescaled gradient", "white")):
        ax.plot([], [], linestyle="", marker="o", color="black", markerfacecolor=filling, label=text)
    _positive_axis(ax, values, intervals)
    ax.set_yticks(range(len(names)), [label_in(known, name) for name in names])
    over = ",\nover that of plain GRPO" if relative else ""
    prompts = f", n = {counted(measured.results['n_prompts'], 'prompt')}" if measured.results.get("n_prompts") else ""
    ax.set_xlabel(f"{WORDS}{over}\n(at K = {measured.compared_at}{prompts})")
    finish(ax, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
    return ax.get_figure(), ax


def _unit(measured: Measurement, known: dict) -> tuple[float, bool]:
    """(what the ratios are divided by, whether that is plain GRPO's); 1 where GRPO's may be 0: the ratios themselves then.

    Raises UserError where there is nothing to draw.
    """
    if not known:
        most = Counter(_reason(measured, name) for name in measured.compared).most_common(1)
        raise UserError(f"no estimator has a value of this ({WORDS}): {most[0][0] if most else 'there are no estimators'}")
    if "grpo" not in known:
        why = _reason(measured, "grpo") if "grpo" in measured.compared else "it is not in the results"
        raise UserError(f"plain GRPO, to compare with, has no {WORDS}: {why}")
    own = known["grpo"]
    relative = (own[f"{RATIO}_ci95"][0] or own[RATIO])[0] > 0
    return (own[RATIO][0] if relative else 1.0), relative


def _positive_axis(ax, values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> None:
    """Limits of the logarithmic x axis, as many ticks as can be read, an arrow in each row that reaches 0 or below."""
    ends = [end for value, interval in zip(values, intervals) for end in (value, *(interval or ())) if end > 0]
    low, high = (min(ends) / 1.15, max(ends) * 1.15) if ends else (0.1, 1.0)
    ax.set_xlim(low, high)
    cut = [row for row, (value, interval) in enumerate(zip(values, intervals)) if min([value, *(interval or [])]) <= 0]
    look = {"linestyle": "", "marker": "<", "color": "black", "markersize": 5, "clip_on": False}
    if cut:
        ax.plot([low] * len(cut), cut, label="the interval reaches 0 or below", **look)
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    candidates = [[step * power for power in powers for step in steps] for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3))]
    candidates += [powers[::stride] for stride in range(1, len(powers) + 1)]
    fitting = [[tick for tick in ticks if low <= tick <= high] for ticks in candidates]
    ticks = next((ticks for ticks in fitting if sum(len(f"{tick:g}") + 2 for tick in ticks) <= TICK_LETTERS), fitting[-1])
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")
