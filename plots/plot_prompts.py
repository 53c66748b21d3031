"""Where does the variance come from: easy, hard or middle prompts? Traces of single prompts against V(x).

Functions for plots/results.ipynb; each takes a ``Measurement`` with Grams (else it raises UserError) and an ``ax``,
and returns (figure, ax). MSE is trace(Cov | x) in squared gradient units; V(x) the expected reward, for rewards of 0
and 1 the probability of a right answer. Without an oracle table the mean reward of the prompt's own continuations stands
on its axis.
"""

from __future__ import annotations

import numpy as np

from Gradient_evaluation.stats.estimators import moments_of
from Gradient_evaluation.stats.missing import Missing
from plots.measurement import Measurement
from plots.style import finish, new_ax, note
from plots.tracecov import look_in, why_missing

SHOWN = ("naive", "grpo", "oracleV")
DIFFICULTIES = ("hard", "middle", "easy")
HATCHES = {"naive": "////", "grpo": "", "oracleV": "...."}


def _traces(measured: Measurement, group_size: int) -> tuple[dict[str, np.ndarray], str]:
    """{name: (n,) traces} of the estimators in SHOWN that have them, and a line for each that has none."""
    found = {name: moments_of(measured.moments, name, group_size).trace for name in SHOWN}
    absent = [why_missing(name, trace.reason) for name, trace in found.items() if isinstance(trace, Missing)]
    return {name: trace for name, trace in found.items() if not isinstance(trace, Missing)}, "\n".join(absent)


def plot_prompt_traces(measured: Measurement, group_size: int, ax=None):
    """MSE of each prompt against V(x) at K = ``group_size``, logarithmic; estimates not above 0 are counted, not drawn."""
    ax, values = new_ax(ax, height=3.4), measured.values
    traces, absent = _traces(measured, group_size)
    for name, trace in traces.items():
        look = look_in(measured.compared, name)
        left_out = int((trace <= 0).sum())
        count = f" ({left_out} at 0 or below)" if left_out else ""
        ax.plot(
            values[trace > 0],
            trace[trace > 0],
            linestyle="",
            marker=look.marker,
            color=look.colour,
            alpha=0.8,
            markersize=4.5,
            markerfacecolor=look.colour if name == "grpo" else "none",
            label=look.label + count,
        )
    ax.set_yscale("log")
    if measured.moments.zero_one:
        ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel(f"{measured.value_label}\n({measured.n})")
    ax.set_ylabel(f"MSE of one prompt at K = {group_size}")
    note(ax, absent)
    finish(ax, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax.get_figure(), ax


def difficulty(values: np.ndarray, zero_one: bool = True) -> tuple[np.ndarray, float, float]:
    """Which of DIFFICULTIES each V (n,) belongs to: (n,) 0, 1, 2; hard is below ``low``, easy above ``high``.

    (low, high) is (0.25, 0.75) for rewards of 0 and 1, else the quartiles of V over the prompts.
    """
    low, high = (0.25, 0.75) if zero_one else np.quantile(values, [0.25, 0.75])
    return np.where(values < low, 0, np.where(values <= high, 1, 2)), low, high


def plot_variance_shares(measured: Measurement, group_size: int, ax=None):
    """What hard, middle and easy prompts contribute to the mean MSE at K = ``group_size``; bars add up to the mean."""
    ax, bootstrap = new_ax(ax, height=3.4), measured.bootstrap
    kinds, low, high = difficulty(measured.values, measured.moments.zero_one)
    traces, absent = _traces(measured, group_size)
    for position, (name, trace) in enumerate(traces.items()):
        look = look_in(measured.compared, name)
        parts = [bootstrap.mean(trace * (kinds == kind)) for kind in range(len(DIFFICULTIES))]
        heights = np.array([part.value for part in parts])
        ends = np.array([part.interval or (part.value, part.value) for part in parts])
        bars = np.maximum(0.0, [heights - ends[:, 0], ends[:, 1] - heights])
        ax.bar(
            np.arange(3) + 0.27 * (position - 1),
            heights,
            width=0.25,
            yerr=bars,
            capsize=2,
            color=look.colour,
            hatch=HATCHES[name],
            edgecolor="white",
            linewidth=0,
            error_kw={"elinewidth": 1},
            label=look.label,
        )
    counts = np.bincount(kinds, minlength=3)
    ranges = (f"V < {low:.3g}", f"{low:.3g} to {high:.3g}", f"V > {high:.3g}")
    names = [f"{name}\n{values}\nn = {count:,}" for name, values, count in zip(DIFFICULTIES, ranges, counts)]
    ax.set_xticks(range(3), names)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_ylabel(f"part of the mean MSE at K = {group_size}")
    note(ax, absent)
    finish(ax, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1)
    return ax.get_figure(), ax
