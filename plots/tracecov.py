"""The paper's figure: MSE of vanilla, GRPO and oracle gradients against the group size, and the floor.

    figure, ax = plot_tracecov(results, label="base")        one results dictionary
    figure, axes = plot_by_estimator(several)                a panel for each estimator, a curve for each

For unbiased estimators the MSE is trace(Cov), in squared gradient units. Bars are 95% intervals over prompts. A curve
that was not computed is named below its panel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from Gradient_evaluation.runs.results.results_file import DRAWN, FLOOR, counted, curve_of, describe, describe_each, label_in
from Gradient_evaluation.stats.estimators import label_of
from plots.style import (
    CURVES,
    Curve,
    as_written,
    bars_of,
    check_labels,
    finish,
    group_size_axis,
    new_ax,
    new_figure,
    note,
    numbered,
    short_lines,
)

FLOOR_NEEDS = "raise --M or lower --block_size"  # two blocks of continuations for each prompt


def plot_tracecov(results: dict, ax=None, label: str | None = None, log_y: bool = False):
    """Draw one results dictionary and return (figure, ax); ``ax`` is made without pyplot if it is None.

    Group size on x in log2; MSE on y, linear, or with ``log_y`` logarithmic without the values that are not above 0.
    A curve that was not computed is named below the axis.
    """
    ax = new_ax(ax, height=3.1)
    sizes, absent = results["K_list"], []
    for position, curve in enumerate(DRAWN):
        # a small shift keeps the error bars of the curves apart
        shifted = [size * 2 ** (0.03 * (position - 1.5)) for size in sizes]
        if not _draw(ax, shifted, look_in(results.get("estimators"), curve), *curve_of(results, curve), log_y):
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


def look_in(estimators: dict | None, curve: str) -> Curve:
    """The look of a curve, with the name that results (their ``estimators``) have for it."""
    return CURVES[curve]._replace(label=label_in(estimators, curve))


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


def _draw(ax, x: list[float], look: Curve, values: list, intervals: list, log_y: bool) -> bool:
    """Draw one curve with its bars and return True; without any value draw nothing and return False."""
    if all(value is None for value in values):
        return False
    shown = [v if v is not None and (v > 0 or not log_y) else math.nan for v in values]
    ax.errorbar(x, shown, yerr=bars_of(shown, intervals), capsize=3, markersize=5, elinewidth=1, **look.look)
    return True


def sample_sizes(results: dict) -> str:
    """A second line for an axis: ``"\\n(n = 40 prompts, 10,240 continuations)"``, or "" where it is not known."""
    parts = [counted(results[f"n_{noun}s"], noun) for noun in ("prompt", "continuation") if results.get(f"n_{noun}s")]
    return f"\n(n = {', '.join(parts)})" if parts else ""


def plot_by_estimator(results: Sequence[dict], labels: Sequence[str] | None = None):
    """A panel for each estimator with a curve for each results file, MSE logarithmic: (figure, (3,) or (4,) array of axes).

    Two panels in a row. One legend names model and sampling law of each file, behind its label where ``labels`` are given.
    A note below a panel says how many files lack its estimator. Where no file has a floor, a line in the fourth cell says so.
    """
    names = _names(results, labels)
    has_floor = any(value is not None for each in results for value in curve_of(each, FLOOR)[0])
    figure, cells = new_figure(4, height=2.7 + 0.25 * -(-len(results) // 2), in_a_row=2)
    axes = cells if has_floor else cells[:3]
    for ax, curve in zip(axes, DRAWN):
        _draw_each(ax, results, names, curve)
    if not has_floor:
        cells[3].set_axis_off()
        cells[3].text(0.5, 0.5, short_lines(why_missing(FLOOR)), ha="center", va="center", fontsize="small")
    low, high = zip(*(ax.get_ylim() for ax in axes if ax.containers))
    for ax in axes:
        ax.set_ylim(min(low), max(high))
    entries = max(axes, key=lambda ax: len(ax.containers)).get_legend_handles_labels()
    as_written(figure.legend(*entries, loc="outside lower center", ncols=2, frameon=False, fontsize="small"))
    return figure, axes


def _draw_each(ax, results: Sequence[dict], names: Sequence[str], curve: str) -> None:
    """One estimator in several results, without a legend."""
    looks = [numbered(number, name) for number, name in enumerate(names)]
    drawn = [_draw(ax, each["K_list"], look, *curve_of(each, curve), log_y=True) for each, look in zip(results, looks)]
    _finish(ax, sorted({size for each in results for size in each["K_list"]}), log_y=True)
    ax.set_xlabel("group size K")
    ax.set_ylabel("MSE (squared gradient units)")
    if not all(drawn):
        note(
            ax, f"not computed in {drawn.count(False)} of {len(results)} files" + (f": {FLOOR_NEEDS}" if curve == FLOOR else "")
        )
    titles = {label_in(each.get("estimators"), curve) for each in results}
    finish(ax, titles.pop() if len(titles) == 1 else label_of(curve))
    if ax.get_legend():
        ax.get_legend().remove()


def _names(results: Sequence[dict], labels: Sequence[str] | None) -> list[str]:
    """The name of each file's curves: label, model and sampling law, sizes."""
    labels = labels or [""] * len(results)
    check_labels(labels, results)
    texts = [": ".join(filter(None, parts)) for parts in zip(labels, describe_each(results))]
    return [text + sample_sizes(each) or f"file {number}" for number, (text, each) in enumerate(zip(texts, results), 1)]
