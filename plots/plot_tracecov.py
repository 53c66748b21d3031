"""The paper's figure: MSE of vanilla, GRPO and oracle gradients against the group size, and the floor.

    python plots/plot_tracecov.py outputs/tracecov_base.json --out figure.pdf
    python plots/plot_tracecov.py base.json instruct.json few_shot.json --label base Instruct few-shot --out figure.pdf
    python plots/plot_tracecov.py base.json instruct.json --by_estimator --out figure.pdf

Each results file (written by Gradient_evaluation/run_tracecov.py) is one panel, its legend headed by model and law;
with --by_estimator each estimator is one panel, and each file a curve named by model and law in one legend. Bars are
95% intervals over prompts; a curve that was not computed is named below its panel. For unbiased estimators the MSE is
trace(Cov), in squared gradient units. Runs in seconds.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import one_line_while_importing  # noqa: E402

if __name__ == "__main__":
    one_line_while_importing()

from Gradient_evaluation.cli import Parser, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402
from Gradient_evaluation.stats.estimators import label_of  # noqa: E402
from plots.describe import describe, describe_each  # noqa: E402
from plots.style import (
    CURVES,
    Curve,
    as_written,
    finish,
    group_size_axis,
    new_ax,
    new_figure,
    note,  # noqa: E402
    numbered,
    save_figure,
    short_lines,
)

PUBLISHED = ("naive", "grpo", "oracleV")
FLOOR = "best_baseline"
FLOOR_NEEDS = "raise --M or lower --block_size"  # two blocks of continuations for each prompt


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
    out). A curve that was not computed is named below the axis. Raises UserError like ``load_results``.
    """
    check_results(results, label or "results")
    ax = new_ax(ax, height=3.1)
    sizes, absent = results["K_list"], []
    for position, curve in enumerate((*PUBLISHED, FLOOR)):
        # a small shift keeps the error bars of the curves apart
        places = [size * 2 ** (0.03 * (position - 1.5)) for size in sizes]
        if not _draw(ax, places, CURVES[curve], *curve_of(results, curve), log_y):
            absent.append(why_missing(curve, (results.get("reasons") or {}).get(f"estimators.{curve}.trace_cov")))
    _finish(ax, sizes, log_y)
    ax.set_xlabel("group size K" + sample_sizes(results))
    ax.set_ylabel("MSE (squared gradient units)")
    note(ax, "\n".join(absent))
    heading = describe(results).split("\n")
    if heading[0] == label:  # the title says it
        del heading[0]
    finish(ax, label, title="\n".join(heading), title_fontsize="small", alignment="left")
    return ax.get_figure(), ax


def why_missing(curve: str, reason: str | None = None) -> str:
    """What is said of a missing curve: ``"floor b*(x) not computed: raise --M or lower --block_size"``."""
    why = FLOOR_NEEDS if curve == FLOOR else reason
    return f"{label_of(curve)} not computed" + (f": {why}" if why else "")


def _finish(ax, sizes: Sequence[int], log_y: bool) -> None:
    group_size_axis(ax, sizes)
    if log_y:
        ax.set_yscale("log", nonpositive="clip")
    else:
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True)
        if ax.get_ylim()[0] > 0:
            ax.set_ylim(bottom=0)


def _draw(ax, places: list[float], look: Curve, values: list, intervals: list, log_y: bool) -> bool:
    """Draw one curve with its bars → whether it has any value; one without is not drawn."""
    if all(value is None for value in values):
        return False
    shown = [v if v is not None and (v > 0 or not log_y) else math.nan for v in values]
    # Results of an older version may have intervals that leave out the mean; a bar cannot point inwards.
    bars = [
        [0.0 if i is None else max(0.0, sign * (i[end] - v)) for v, i in zip(shown, intervals)]
        for end, sign in ((0, -1), (1, 1))
    ]
    ax.errorbar(
        places,
        shown,
        yerr=bars,
        capsize=3,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line,
        markersize=5,
        linewidth=1.5,
        elinewidth=1,
        label=look.label,
    )
    return True


def sample_sizes(results: dict) -> str:
    """A second line for an axis: ``"\\n(n = 40 prompts, 10,240 continuations)"``, or "" where it is not known."""
    parts = [f"{results[f'n_{what}']:,} {what}" for what in ("prompts", "continuations") if results.get(f"n_{what}")]
    return f"\n(n = {', '.join(parts)})" if parts else ""


def plot_side_by_side(results: Sequence[dict], labels: Sequence[str], log_y: bool = False):
    """One panel for each results dictionary, each with its own y axis; returns (figure, (n,) array of axes)."""
    if len(results) != len(labels) or not results:
        raise UserError(f"--label: give one label for each results file ({len(results)} files, {len(labels)} labels)")
    figure, axes = new_figure(len(results), height=3.1)
    for ax, each, label in zip(axes, results, labels):
        plot_tracecov(each, ax=ax, label=label, log_y=log_y)
    return figure, axes


def plot_compared(results: Sequence[dict], curve: str, ax=None, labels: Sequence[str] | None = None):
    """One estimator (a key of CURVES) in several results, a curve each, MSE logarithmic; returns (figure, ax).

    The legend names model and law of each, behind its label where ``labels`` are given. Below the axis stands how many
    files lack this estimator.
    """
    ax, absent = new_ax(ax, height=4.0), 0
    for number, (each, name) in enumerate(zip(results, _names(results, labels))):
        check_results(each, name.split("\n")[0])
        absent += not _draw(ax, each["K_list"], numbered(number, name), *curve_of(each, curve), log_y=True)
    _finish(ax, sorted({size for each in results for size in each["K_list"]}), log_y=True)
    ax.set_xlabel("group size K")
    ax.set_ylabel("MSE (squared gradient units)")
    if absent:
        note(ax, f"not computed in {absent} of {len(results)} files" + f": {FLOOR_NEEDS}" * (curve == FLOOR))
    finish(ax, label_of(curve), loc="upper center", bbox_to_anchor=(0.5, -0.35 if absent else -0.2))
    return ax.get_figure(), ax


def _names(results: Sequence[dict], labels: Sequence[str] | None) -> list[str]:
    """The name of each file's curves: label, model and law, sizes."""
    if not results or (labels is not None and len(labels) != len(results)):
        raise UserError(f"--label: give one label for each results file ({len(results)} files, {len(labels or [])} labels)")
    texts = [": ".join(filter(None, parts)) for parts in zip(labels or [""] * len(results), describe_each(results))]
    return [text + sample_sizes(each) or f"file {number}" for number, (text, each) in enumerate(zip(texts, results), 1)]


def plot_by_estimator(results: Sequence[dict], labels: Sequence[str] | None = None):
    """A panel for each estimator with every results file in it, and one legend: (figure, (3,) or (4,) array of axes).

    Two panels in a row. Where no file has a floor, its place holds a line that says so.
    """
    has_floor = any(value is not None for each in results for value in curve_of(each, FLOOR)[0])
    figure, cells = new_figure(4, height=2.7 + 0.25 * -(-len(results) // 2), in_a_row=2)
    axes = cells if has_floor else cells[:3]
    for ax, curve in zip(axes, (*PUBLISHED, FLOOR)):
        plot_compared(results, curve, ax, labels)
        if ax.get_legend():
            ax.get_legend().remove()
    if not has_floor:
        cells[3].set_axis_off()
        cells[3].text(0.5, 0.5, short_lines(why_missing(FLOOR)), ha="center", va="center", fontsize="small")
    low, high = zip(*(ax.get_ylim() for ax in axes if ax.containers))
    for ax in axes:
        ax.set_ylim(min(low), max(high))
    entries = max(axes, key=lambda ax: len(ax.containers)).get_legend_handles_labels()
    as_written(figure.legend(*entries, loc="outside lower center", ncols=2, frameon=False, fontsize="small"))
    return figure, axes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_tracecov.py", description="MSE of gradient estimators against the group size.")
    parser.add_argument("results", nargs="+", metavar="RESULTS.json", help="results of run_tracecov.py, one panel each")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--label", nargs="+", help="one title for each results file (default: its file name)")
    parser.add_argument("--log_y", action="store_true", help="logarithmic MSE axis (default: linear)")
    parser.add_argument(
        "--by_estimator", action="store_true", help="a panel for each estimator and a curve for each file, MSE logarithmic"
    )
    flags = parser.parse_args(arguments)
    loaded = [load_results(path) for path in flags.results]
    labels = flags.label or [Path(path).stem.removeprefix("tracecov_") for path in flags.results]
    if flags.by_estimator:
        figure, _ = plot_by_estimator(loaded, flags.label)
    else:
        figure, _ = plot_side_by_side(loaded, labels, flags.log_y)
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
