"""The paper's figure: MSE of vanilla, GRPO and oracle gradients against the group size, and the floor.

    python plots/plot_tracecov.py outputs/tracecov_base.json --out figure.pdf
    python plots/plot_tracecov.py base.json instruct.json few_shot.json --label base Instruct few-shot --out figure.pdf

Each results file (written by Gradient_evaluation/run_tracecov.py) is one panel. Bars are 95% intervals over
prompts. For unbiased estimators the MSE is trace(Cov), in squared gradient units. Runs in seconds.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter  # noqa: E402

from Gradient_evaluation.cli import Parser, UserError, run  # noqa: E402
from plots.style import CURVES, new_figure, save_figure  # noqa: E402

PUBLISHED = ("naive", "grpo", "oracleV")
FLOOR = "best_baseline"


def load_results(path: str | Path) -> dict:
    """Read a results JSON. Raises UserError where it is missing, not JSON, or not a results file."""
    path = Path(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a tracecov_*.json written by run_tracecov.py") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); give a tracecov_*.json file") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); give a tracecov_*.json file") from None
    check_results(results, str(path))
    return results


def check_results(results: dict, name: str) -> None:
    """Raise UserError, beginning with ``name``, unless this is a results dictionary that can be plotted."""
    if not isinstance(results, dict):
        raise UserError(f"{name}: is not a results file; give a tracecov_*.json (not a detailed one)")
    for key, kind in (("K_list", list), ("conditional_on_x", dict)):
        if not isinstance(results.get(key), kind):
            raise UserError(f"{name}: is not a results file, {key} is missing; give a tracecov_*.json")
    sizes = results["K_list"]
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(f"{name}: K_list must hold group sizes, it is {sizes}")
    for curve in PUBLISHED:
        if curve not in results["conditional_on_x"]:
            raise UserError(f"{name}: conditional_on_x lacks {curve}; write the results again with run_tracecov.py")
    for curve in (*PUBLISHED, FLOOR):
        values, intervals = curve_of(results, curve)
        if not all(isinstance(part, list) and len(part) == len(sizes) for part in (values, intervals)):
            raise UserError(f"{name}: {curve} does not have one value and interval for each of K_list {sizes}")
        if not all(_is_number(v) for v in values) or not all(_is_interval(i) for i in intervals):
            raise UserError(f"{name}: {curve} holds something that is not a number or an interval [low, high]")


def _is_number(value) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))


def _is_interval(value) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(end is not None and _is_number(end) for end in value)
    )


def curve_of(results: dict, curve: str) -> tuple[list, list]:
    """One curve's values and intervals [low, high], lists aligned with K_list; None where there is none."""
    absent = [None] * len(results["K_list"])
    if curve in PUBLISHED:
        intervals = (results.get("conditional_on_x_ci95") or {}).get(curve)
        return results["conditional_on_x"][curve], intervals or absent
    return results.get(curve) or absent, results.get(f"{curve}_ci95") or absent


def plot_tracecov(results: dict, ax=None, label: str | None = None, log_y: bool = False):
    """Draw one results dictionary and return (figure, ax); ``ax`` is made without pyplot if it is None.

    Group size on x in log2; MSE on y, linear or with ``log_y`` logarithmic (values not above 0 are then left
    out). A curve that was not computed is named as such in the legend. Raises UserError like ``load_results``.
    """
    check_results(results, label or "results")
    if ax is None:
        _, (ax,) = new_figure()
    sizes = results["K_list"]
    for position, curve in enumerate((*PUBLISHED, FLOOR)):
        # a small shift keeps the error bars of the curves apart
        _draw(ax, [size * 2 ** (0.03 * (position - 1.5)) for size in sizes], curve, *curve_of(results, curve), log_y)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    if log_y:
        ax.set_yscale("log", nonpositive="clip")
    else:
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True)
        if ax.get_ylim()[0] > 0:
            ax.set_ylim(bottom=0)
    ax.set_xlabel("group size K" + _sample_sizes(results))
    ax.set_ylabel("MSE of the gradient estimate")
    if label:
        ax.set_title(label)
    ax.grid(True, alpha=0.3, linewidth=0.6)
    ax.legend(frameon=False, fontsize="small")
    return ax.get_figure(), ax


def _draw(ax, places: list[float], curve: str, values: list, intervals: list, log_y: bool) -> None:
    look = CURVES[curve]
    shown = [v if v is not None and (v > 0 or not log_y) else math.nan for v in values]
    missing = all(value is None for value in values)
    # A percentile interval of few prompts can leave out the mean itself; a bar cannot point inwards.
    bars = [[0.0 if i is None else max(0.0, sign * (i[end] - v)) for v, i in zip(shown, intervals)]
            for end, sign in ((0, -1), (1, 1))]  # fmt: skip
    ax.errorbar(
        places, shown, yerr=bars, capsize=3, color=look.colour, marker=look.marker, linestyle=look.line,
        markersize=5, linewidth=1.5, elinewidth=1, label=look.label + (" (not computed)" if missing else ""),
    )  # fmt: skip


def _sample_sizes(results: dict) -> str:
    parts = [f"{results[f'n_{what}']:,} {what}" for what in ("prompts", "continuations") if results.get(f"n_{what}")]
    return f"\n(n = {', '.join(parts)})" if parts else ""


def plot_side_by_side(results: Sequence[dict], labels: Sequence[str], log_y: bool = False):
    """One panel for each results dictionary, each with its own y axis; returns (figure, (n,) array of axes)."""
    if len(results) != len(labels) or not results:
        raise UserError(f"--label: give one label for each results file ({len(results)} files, {len(labels)} labels)")
    figure, axes = new_figure(len(results))
    for ax, each, label in zip(axes, results, labels):
        plot_tracecov(each, ax=ax, label=label, log_y=log_y)
    return figure, axes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_tracecov.py", description="MSE of gradient estimators against the group size.")
    parser.add_argument("results", nargs="+", metavar="RESULTS.json", help="results of run_tracecov.py, one panel each")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--label", nargs="+", help="one title for each results file (default: its file name)")
    parser.add_argument("--log_y", action="store_true", help="logarithmic MSE axis (default: linear)")
    flags = parser.parse_args(arguments)
    labels = flags.label or [Path(path).stem.removeprefix("tracecov_") for path in flags.results]
    figure, _ = plot_side_by_side([load_results(path) for path in flags.results], labels, flags.log_y)
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
