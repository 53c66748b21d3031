"""Which group size? The predicted MSE of a minibatch gradient against G, its three terms, and the best G.

    figure, ax = plot_group_size(results["group_size_law"], budget=1024)      one results file

The band is the 95% interval (bootstrap-t) over prompts. Without a budget the axis is MSE times the number N of
continuations per step, for which N need not be known. Dotted, c1 G + c2 + c3/G: the form whose minimum is the paper's
sqrt(c3/c1).
"""

from __future__ import annotations

import math

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import check_group_size_law, counted
from plots.style import Curve, finish, group_size_axis, new_ax, short_lines

MSE = Curve("predicted MSE", "#0072B2", "", "-")
HEIGHT = 5.0  # inches: the legend stands below the curves
PAPER = Curve("bound form c1 G + c2 + c3/G", "#000000", "", ":")
TERMS = {
    "c1": Curve("between prompts: c1 G", "#D55E00", "", "--"),
    "c2": Curve("per continuation: c2", "#999999", "", (0, (6, 2, 1, 2, 1, 2))),
    "c3": Curve("small groups: c3/(G-1)", "#009E73", "", "-."),
}


def plot_group_size(group_size_law: dict, ax=None, label: str | None = None, budget: int | None = None):
    """Draw one ``group_size_law`` and return (figure, ax); ``ax`` is made without pyplot if it is None.

    G on x in log2, MSE times N (with ``budget`` N: the MSE itself) on a logarithmic y axis; parts not above 0 are
    left out. The shade marks the G within 10% of the least. Raises UserError like ``check_group_size_law``.
    """
    check_group_size_law(group_size_law, label or "group_size_law")
    ax = new_ax(ax, height=HEIGHT)
    curve, divisor = group_size_law["curve"], budget or 1
    count = sum(size <= (budget or math.inf) for size in curve["G"])  # a group cannot be larger than the budget
    sizes, values = curve["G"][:count], [value / divisor for value in curve["mse_times_N"][:count]]
    if not max(values, default=0) > 0:
        raise UserError(f"{label or 'group_size_law'}: no predicted MSE at G up to {budget} is above 0; raise --budget")
    parts = {name: [value / divisor for value in curve["terms"][name][:count]] for name in TERMS}
    _draw_range(ax, group_size_law, sizes[-1])
    if curve.get("ci95") is not None:
        low, high = ([end / divisor for end in ends] for ends in zip(*curve["ci95"][:count]))
        ax.fill_between(sizes, low, high, color=MSE.colour, alpha=0.2, linewidth=0)
    for name, look in TERMS.items():
        _line(ax, sizes, parts[name], look, width=1.1)
    if group_size_law.get("G_star_paper_bound") is not None:
        bound = [a + b + c * (size - 1) / size for size, a, b, c in zip(sizes, *parts.values())]
        _line(ax, sizes, bound, PAPER, width=1.3)
        best = group_size_law["G_star_paper_bound"]
        _mark(ax, sizes, bound, best, Curve(f"paper's bound form: G = {best:.3g}", PAPER.colour, "s", ""))
    _line(ax, sizes, values, MSE, width=2.2)
    _mark_best(ax, group_size_law, sizes, values)
    _finish(ax, group_size_law, values, label, budget)
    return ax.get_figure(), ax


def _line(ax, sizes: list, values: list, look: Curve, width: float) -> None:
    shown = [value if value > 0 else math.nan for value in values]
    none = " (not above 0)" if all(math.isnan(value) for value in shown) else ""
    ax.plot(sizes, shown, linewidth=width, **look._replace(label=look.label + none).look)


def _draw_range(ax, group_size_law: dict, largest: int) -> None:
    if group_size_law.get("within_10_percent") is not None:
        low, high = group_size_law["within_10_percent"]
        text = f"within 10% of the least: {low} to {high}"
        ax.axvspan(min(low, largest), min(high, largest), color="#E69F00", alpha=0.15, linewidth=0, label=text)


def _mark(ax, sizes: list, values: list, size: float, look: Curve) -> None:
    """A point on a curve, at the height of its nearest known size; a size outside the curve is in the legend only."""
    inside = sizes[0] <= size <= sizes[-1]
    nearest = min(range(len(sizes)), key=lambda i: abs(sizes[i] - size))
    x, y = ([size], [values[nearest]]) if inside else ([], [])
    ax.plot(x, y, markersize=8, markerfacecolor=look.colour if look.marker == "o" else "none", zorder=5, **look.look)


def _mark_best(ax, group_size_law: dict, sizes: list, values: list) -> None:
    best = group_size_law.get("G_star")
    if best is None:
        least = group_size_law.get("G_star_at_least")
        text = "G* not computed" + (f", at least {least:.3g}" if least else "")
        ax.plot(
            [], [], linestyle="", label=short_lines(f"{text}: {group_size_law['reasons'].get('G_star', 'no reason is given')}")
        )
        return
    ends = group_size_law.get("G_star_ci95") or [None, None]
    interval = "" if ends == [None, None] else " [{}, {}]".format(*("-" if e is None else f"{e:.3g}" for e in ends))
    more = ", may well be larger" if group_size_law.get("G_star_may_be_larger") else ""
    _mark(ax, sizes, values, best, Curve(f"G* = {best:.3g}{interval}{more}", MSE.colour, "o", ""))


def _finish(ax, group_size_law: dict, values: list, label: str | None, budget: int | None) -> None:
    group_size_axis(ax, [2**power for power in range(1, 10)][::2])
    ax.set_yscale("log", nonpositive="clip")
    positive = [value for value in values if value > 0]
    if positive:  # the terms may vanish far below; the curve decides what is seen
        ax.set_ylim(min(positive) / 30, max(positive) * 1.6)
    prompts = f"\n(n = {counted(group_size_law['n_prompts'], 'prompt')})" if group_size_law.get("n_prompts") else ""
    ax.set_xlabel(f"group size G{prompts}")
    ax.set_ylabel("MSE x N (squared gradient units)" if budget is None else f"MSE at N = {budget:,}\n(squared gradient units)")
    finish(ax, label, loc="upper center", bbox_to_anchor=(0.5, -0.25))
