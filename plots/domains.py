"""Kinds of prompts beside each other: GRPO's MSE and the best group size for each value of a column (--by).

    figure, axes = plot_with_groups(results, label="base")      the paper's figure, and both panels beside it
    figure, ax = plot_group_curves(results)                     GRPO's MSE against K, a curve for each value
    figure, ax = plot_group_sizes(results)                      G*, its interval and the range within 10%, a row for each value

Each needs results of run_tracecov.py with --by (else it raises UserError). Bars are 95% intervals over the prompts of a value.
"""

from __future__ import annotations

import math

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import counted, curve_of, label_in
from plots.style import bars_of, finish, group_size_axis, new_ax, new_figure, note, numbered
from plots.tracecov import plot_tracecov

ROW = 0.28  # inches
LARGEST = 2.0**20  # an interval without an upper end reaches the edge


def groups_of(results: dict) -> tuple[str, dict]:
    """(column, {value: its results}). Raises UserError without them."""
    found = results.get("by_group")
    if not isinstance(found, dict):
        raise UserError("the results hold no kinds of prompts; compute them with --by COLUMN (with --from_grams: no model)")
    return found["column"], found["values"]


def plot_group_curves(results: dict, ax=None):
    """GRPO's MSE against the group size, a curve for each value of the column; logarithmic, values not above 0 left out."""
    column, groups = groups_of(results)
    ax, sizes = new_ax(ax, height=3.1 + 0.1 * len(groups)), results["K_list"]
    for number, (value, each) in enumerate(groups.items()):
        look = numbered(number, f"{value} ({counted(each['n_prompts'], 'prompt')})")
        means, intervals = curve_of(each, "grpo")
        shown = [mean if mean is not None and mean > 0 else math.nan for mean in means]
        # a small shift keeps the error bars of the curves apart
        x = [size * 2 ** (0.06 * (number / max(1, len(groups) - 1) - 0.5)) for size in sizes]
        thin = {"capsize": 2, "markersize": 4, "linewidth": 1.2, "elinewidth": 0.8}
        ax.errorbar(x, shown, bars_of(shown, intervals), **thin, **look.look)
    group_size_axis(ax, sizes)
    ax.set_yscale("log", nonpositive="clip")
    ax.set_xlabel("group size K")
    ax.set_ylabel(f"MSE of {label_in(results.get('estimators'), 'grpo')}\n(squared gradient units)")
    finish(ax, f"by {column}", loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return ax.get_figure(), ax


def plot_group_sizes(results: dict, ax=None):
    """The best group size for each value: G* with its interval (line), and the sizes within 10% of the least MSE (shade).

    Where there is no G*, an arrow begins at the least size that the data support. A value without either is an empty row.
    """
    column, groups = groups_of(results)
    ax = new_ax(ax, height=1.6 + ROW * len(groups))
    top, absent = 8.0, []
    for row, (value, each) in enumerate(groups.items()):
        group_size_law, colour = each["group_size_law"], numbered(row).colour
        best, least = group_size_law["G_star"], group_size_law["G_star_at_least"]
        if group_size_law["within_10_percent"]:
            low, high = group_size_law["within_10_percent"]
            ax.plot([low, high], [row, row], color=colour, alpha=0.25, linewidth=9, solid_capstyle="butt")
            top = max(top, high)
        if best is not None:
            low, high = group_size_law["G_star_ci95"]
            ax.plot([low, LARGEST if high is None else high], [row, row], color=colour, linewidth=1.2)
            ax.plot([best], [row], color=colour, marker=numbered(row).marker, linestyle="")
            top = max(top, high or 4 * best)
        elif least is not None:
            ax.plot([least], [row], color=colour, marker=">", linestyle="")
            ax.plot([least, LARGEST], [row, row], color=colour, linewidth=1.2, linestyle=":")
            top = max(top, 4 * least)
        if best is None:
            absent.append(value)
    ax.set_yticks(range(len(groups)), [f"{value} (n = {each['n_prompts']:,})" for value, each in groups.items()])
    ax.set_ylim(len(groups) - 0.5, -0.5)
    group_size_axis(ax, [2**power for power in range(1, 21) if 2**power <= 2 * top])
    ax.set_xlim(1.8, 1.5 * top)
    ax.set_xlabel(f"best group size G*, by {column}")
    note(ax, f"no G* for {', '.join(absent)} (an arrow: at least)" if absent else "")
    finish(ax)
    return ax.get_figure(), ax


def plot_with_groups(results: dict, label: str | None = None):
    """The paper's figure with GRPO's curves and the best group sizes by value beside it: (figure, (3,) array of axes)."""
    figure, axes = new_figure(3, height=3.1 + 0.1 * len(groups_of(results)[1]))
    plot_tracecov(results, ax=axes[0], label=label)
    plot_group_curves(results, ax=axes[1])
    plot_group_sizes(results, ax=axes[2])
    return figure, axes
