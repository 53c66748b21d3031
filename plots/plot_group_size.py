"""Which group size? The predicted MSE of a minibatch gradient against G, its three terms, and the best G.

    python plots/plot_group_size.py outputs/demo/tracecov_tiny_model.json --out group_size.pdf
    python plots/plot_group_size.py base.json instruct.json --label base Instruct --budget 1024 --out group_size.png

Each results file (written by Gradient_evaluation/run_tracecov.py) is one panel. The band is the 95% interval (bootstrap-t)
over prompts. Without --budget the axis is MSE times the number N of continuations per step, for which N need not be
known. Dotted, c1 G + c2 + c3/G: the form whose minimum is the paper's sqrt(c3/c1). Runs in seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import one_line_while_importing  # noqa: E402

if __name__ == "__main__":
    one_line_while_importing()

from Gradient_evaluation.cli import Parser, integer, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402
from plots.plot_tracecov import load_results  # noqa: E402
from plots.style import Curve, finish, group_size_axis, new_ax, new_figure, save_figure  # noqa: E402

MSE = Curve("predicted MSE", "#0072B2", "", "-")
HEIGHT = 5.0  # inches: the legend stands below the curves
PAPER = Curve("bound form c1 G + c2 + c3/G", "#000000", "", ":")
TERMS = {
    "c1": Curve("between prompts: c1 G", "#D55E00", "", "--"),
    "c2": Curve("per continuation: c2", "#999999", "", (0, (6, 2, 1, 2, 1, 2))),
    "c3": Curve("small groups: c3/(G-1)", "#009E73", "", "-."),
}


def load_law(path: str | Path) -> dict:
    """The entry ``group_size_law`` of a results JSON. Raises UserError where there is none that can be drawn."""
    law = load_results(path).get("group_size_law")
    check_law(law, str(path))
    return law


def check_law(law: dict | None, name: str) -> None:
    """Raise UserError, beginning with ``name``, unless ``law`` has a curve that can be drawn."""
    if not isinstance(law, dict) or not isinstance(law.get("curve"), dict):
        raise UserError(f"{name}: holds no group_size_law; write the results again with run_tracecov.py")
    curve = law["curve"]
    if curve.get("mse_times_N") is None:
        reason = (law.get("reasons") or {}).get("curve", "measure again with --sketch_dim above 0")
        raise UserError(f"{name}: its group_size_law has no curve: {reason}")
    terms = curve.get("terms") if isinstance(curve.get("terms"), dict) else {}
    lists = [curve.get("G"), curve["mse_times_N"], *(terms.get(term) for term in TERMS)]
    if not all(isinstance(values, list) and all(map(_is_number, values)) for values in lists):
        raise UserError(f"{name}: the curve of its group_size_law holds something that is not a list of numbers")
    if len({len(values) for values in lists}) != 1 or min(curve["G"], default=0) < 2:
        raise UserError(f"{name}: the lists of its group_size_law's curve do not belong together")
    if not max(curve["mse_times_N"]) > 0:  # with few prompts the noise of c1 and c2 may outweigh all
        raise UserError(
            f"{name}: no predicted MSE of its group_size_law is above 0, so there is nothing to draw; measure more "
            "prompts (--T)"
        )
    band = curve.get("ci95")
    if band is not None and not (isinstance(band, list) and len(band) == len(curve["G"]) and all(map(_is_pair, band))):
        raise UserError(f"{name}: the ci95 of its group_size_law's curve does not hold an interval for each G")
    for key, fits in (("G_star", _is_number), ("G_star_paper_bound", _is_number), ("within_10_percent", _is_pair)):
        if law.get(key) is not None and not fits(law[key]):
            raise UserError(f"{name}: {key} of its group_size_law is {law[key]!r}, not a number or a pair of them")


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_pair(value) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def plot_group_size(law: dict, ax=None, label: str | None = None, budget: int | None = None):
    """Draw one ``group_size_law`` and return (figure, ax); ``ax`` is made without pyplot if it is None.

    G on x in log2, MSE times N (with ``budget`` N: the MSE itself) on a logarithmic y axis; parts not above 0 are
    left out. The shade marks the G within 10% of the least. Raises UserError like ``load_law``.
    """
    check_law(law, label or "group_size_law")
    ax = new_ax(ax, height=HEIGHT)
    curve, divisor = law["curve"], budget or 1
    count = sum(size <= (budget or math.inf) for size in curve["G"])  # a group cannot be larger than the budget
    sizes, values = curve["G"][:count], [value / divisor for value in curve["mse_times_N"][:count]]
    if not max(values, default=0) > 0:
        raise UserError(f"{label or 'group_size_law'}: no predicted MSE at G up to {budget} is above 0; raise --budget")
    parts = {name: [value / divisor for value in curve["terms"][name][:count]] for name in TERMS}
    _draw_range(ax, law, sizes[-1])
    if curve.get("ci95") is not None:
        low, high = ([end / divisor for end in ends] for ends in zip(*curve["ci95"][:count]))
        ax.fill_between(sizes, low, high, color=MSE.colour, alpha=0.2, linewidth=0)
    for name, look in TERMS.items():
        _line(ax, sizes, parts[name], look, width=1.1)
    if law.get("G_star_paper_bound") is not None:
        bound = [a + b + c * (size - 1) / size for size, a, b, c in zip(sizes, *parts.values())]
        _line(ax, sizes, bound, PAPER, width=1.3)
        _mark(ax, sizes, bound, law["G_star_paper_bound"], "s", PAPER.colour, "paper's bound form: G = {:.3g}")
    _line(ax, sizes, values, MSE, width=2.2)
    _mark_best(ax, law, sizes, values)
    _finish(ax, law, values, label, budget)
    return ax.get_figure(), ax


def _line(ax, sizes: list, values: list, look: Curve, width: float) -> None:
    shown = [value if value > 0 else math.nan for value in values]
    none = " (not above 0)" if all(math.isnan(value) for value in shown) else ""
    ax.plot(sizes, shown, color=look.colour, linestyle=look.line, linewidth=width, label=look.label + none)


def _draw_range(ax, law: dict, largest: int) -> None:
    if law.get("within_10_percent") is not None:
        low, high = law["within_10_percent"]
        ax.axvspan(
            min(low, largest),
            min(high, largest),
            color="#E69F00",
            alpha=0.15,
            linewidth=0,
            label=f"within 10% of the least: {low} to {high}",
        )


def _mark(ax, sizes: list, values: list, place: float, marker: str, colour: str, label: str) -> None:
    """A point on a curve, at the height of its nearest known size; places outside the curve go to the legend only."""
    inside = sizes[0] <= place <= sizes[-1]
    nearest = min(range(len(sizes)), key=lambda i: abs(sizes[i] - place))
    filling = colour if marker == "o" else "none"
    ax.plot(
        [place] if inside else [],
        [values[nearest]] if inside else [],
        color=colour,
        marker=marker,
        linestyle="",
        markersize=8,
        markerfacecolor=filling,
        zorder=5,
        label=label.format(place),
    )


def _mark_best(ax, law: dict, sizes: list, values: list) -> None:
    if law.get("G_star") is None:
        least = law.get("G_star_at_least")
        ax.plot([], [], linestyle="", label="G*: not computed (see reasons)" + (f", at least {least:.3g}" if least else ""))
        return
    ends = law.get("G_star_ci95") or [None, None]
    interval = "" if ends == [None, None] else " [{}, {}]".format(*("-" if e is None else f"{e:.3g}" for e in ends))
    more = ", may well be larger" if law.get("G_star_may_be_larger") else ""
    _mark(ax, sizes, values, law["G_star"], "o", MSE.colour, "G* = {:.3g}" + interval + more)


def _finish(ax, law: dict, values: list, label: str | None, budget: int | None) -> None:
    group_size_axis(ax, [2**power for power in range(1, 10)][::2])
    ax.set_yscale("log", nonpositive="clip")
    positive = [value for value in values if value > 0]
    if positive:  # the terms may vanish far below; the curve decides what is seen
        ax.set_ylim(min(positive) / 30, max(positive) * 1.6)
    prompts = f"\n(n = {law['n_prompts']:,} prompts)" if law.get("n_prompts") else ""
    ax.set_xlabel(f"group size G{prompts}")
    ax.set_ylabel("MSE x N (squared gradient units)" if budget is None else f"MSE at N = {budget:,}\n(squared gradient units)")
    finish(ax, label, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def plot_side_by_side(laws: Sequence[dict], labels: Sequence[str], budget: int | None = None):
    """One panel for each law, each with its own y axis; returns (figure, (n,) array of axes)."""
    if len(laws) != len(labels) or not laws:
        raise UserError(f"--label: give one label for each results file ({len(laws)} files, {len(labels)} labels)")
    figure, axes = new_figure(len(laws), height=HEIGHT)
    for ax, law, label in zip(axes, laws, labels):
        plot_group_size(law, ax=ax, label=label, budget=budget)
    return figure, axes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_group_size.py", description="Predicted MSE of a minibatch gradient against G.")
    parser.add_argument("results", nargs="+", metavar="RESULTS.json", help="results of run_tracecov.py, one panel each")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--label", nargs="+", help="one title for each results file (default: its file name)")
    parser.add_argument("--budget", type=integer(2), help="continuations per step, for the MSE itself")
    flags = parser.parse_args(arguments)
    labels = flags.label or [Path(path).stem.removeprefix("tracecov_") for path in flags.results]
    figure, _ = plot_side_by_side([load_law(path) for path in flags.results], labels, flags.budget)
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
