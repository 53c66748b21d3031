"""Validation accuracy against training step, and against the group size: means and 95% intervals over seeds.

    python plots/plot_training.py outputs/sweep/manifest.json --out outputs/sweep.pdf
    python plots/plot_training.py outputs/train/a_g8_seed0 outputs/train/a_g8_seed1 --out figure.png
    python plots/plot_training.py qwen_g8_seed0.jsonl --metric val-core/openai/gsm8k/acc/mean@1 --out figure.pdf

A source is a sweep, a run folder, a JSONL of VERL's file logger, or a JSON of train_group_sizes.py (training_logs.py). G and
seed are read from the manifest or the run folder, else from a name like ``qwen_g8_seed0``. Runs of one G are averaged at the
steps that all of them have. The interval is Student's t over seeds; one seed has no interval. The right panel is there when
at least one G is known. Runs in seconds.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, integer, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import write_json
from plots.training_logs import Run, load_runs

HEIGHT = 3.8  # inches: the legend stands below the curves
# 97.5% points of Student's t for 1, 2, ... degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Mean(NamedTuple):
    """A mean over ``n`` seeds and half the width of its 95% interval (None with one seed)."""

    value: float
    half_width: float | None
    n: int


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """The mean and t(0.975, n-1) * s / sqrt(n), with s the standard deviation of n - 1 degrees of freedom.

    >>> mean_over_seeds([0.5, 0.7])
    Mean(value=0.6, half_width=1.2706, n=2)
    """
    n = len(values)
    mean = round(statistics.fmean(values), 12)
    if n < 2:
        return Mean(mean, None, n)
    freedom = n - 1  # beyond the table: two terms of the quantile's expansion in 1 / freedom, right to 0.002
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else 1.95996 + 2.3724 / freedom
    return Mean(mean, round(quantile * statistics.stdev(values) / math.sqrt(n), 12), n)


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each G, in order of G; then each run without a G by itself."""
    groups: dict[str, list[Run]] = {}
    for each in sorted(runs, key=lambda each: (each.group_size is None, each.group_size or 0)):
        label = each.name if each.group_size is None else f"G = {each.group_size}"
        groups.setdefault(label, []).append(each)
    for label, members in groups.items():
        seeds = [each.seed for each in members if each.seed is not None]
        if len(set(seeds)) < len(seeds):
            raise UserError(f"{label}: two runs have the same seed; give each run once")
    return groups


def curve(label: str, runs: Sequence[Run]) -> dict[int, Mean]:
    """Mean accuracy at the steps that every run has; UserError where there are none."""
    steps = sorted(set.intersection(*(set(each.accuracy) for each in runs)))
    if not steps:
        raise UserError(f"{label}: its seeds share no validation step; validate them at the same steps")
    return {step: mean_over_seeds([each.accuracy[step] for each in runs]) for step in steps}


def finals(runs: Sequence[Run], last: int) -> dict[int, Mean]:
    """For each known G, over its seeds, the mean of a run's accuracy at its ``last`` last validations."""
    sized = [members for members in by_label(runs).values() if members[0].group_size is not None]
    ends = [[statistics.fmean(list(each.accuracy.values())[-last:]) for each in members] for members in sized]
    return {members[0].group_size: mean_over_seeds(values) for members, values in zip(sized, ends)}


def summarise(runs: Sequence[Run], last: int = 1) -> dict:
    """The numbers that are drawn, ready for JSON: [mean, half width, seeds] by step and by G, and ``warnings``.

    Runs that end at different steps are drawn as they are, with a warning.
    """
    curves = {label: curve(label, members) for label, members in by_label(runs).items()}
    ends = {max(each.accuracy) for each in runs}
    return {
        "accuracy_by_step": {label: {step: list(mean) for step, mean in means.items()} for label, means in curves.items()},
        "accuracy_by_group_size": {size: list(mean) for size, mean in finals(runs, last).items()},
        "warnings": [f"the runs end at different steps ({', '.join(map(str, sorted(ends)))})"] if len(ends) > 1 else [],
    }


def plot_training(runs: Sequence[Run], last: int = 1):
    """Draw accuracy by step and, where at least one G is known, by G; returns (figure, (1,) or (2,) array of axes)."""
    from plots.style import new_figure

    sized = any(each.group_size is not None for each in runs)
    figure, axes = new_figure(2 if sized else 1, height=HEIGHT)
    plot_by_step(runs, ax=axes[0])
    if sized:
        plot_by_group_size(runs, last, ax=axes[1])
    return figure, axes


def plot_by_step(runs: Sequence[Run], ax=None):
    """Mean accuracy over the seeds of each G (or of each run without one) by training step; returns (figure, ax)."""
    from plots.style import finish, new_ax, numbered

    ax = new_ax(ax, height=HEIGHT)
    for number, (label, members) in enumerate(by_label(runs).items()):
        means, n = curve(label, members), len(members)
        steps, values = list(means), [mean.value for mean in means.values()]
        look = numbered(number, f"{label} ({n} seeds)" if n > 1 else label)
        ax.plot(steps, values, markersize=4, markevery=max(1, len(steps) // 10), **look.look)
        if n > 1:
            low, high = zip(*((mean.value - mean.half_width, mean.value + mean.half_width) for mean in means.values()))
            ax.fill_between(steps, low, high, color=look.colour, alpha=0.15, linewidth=0)
    ax.set_xlabel(f"training step\n(n = {len(runs)} run{'s' if len(runs) > 1 else ''})")
    ax.set_ylabel(f"validation {runs[0].measure}")
    finish(ax, loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=2)
    return ax.get_figure(), ax


def plot_by_group_size(runs: Sequence[Run], last: int = 1, ax=None):
    """Mean over seeds of the ``last`` last validations of each run, by G; runs without one are left out."""
    from plots.style import COLOURS, finish, group_size_axis, new_ax

    ax, means = new_ax(ax, height=3.1), finals(runs, last)
    if not means:
        raise UserError("no run has a known G; name the runs like qwen_g8_seed0, or give the manifest.json of a sweep")
    sizes, values = list(means), [mean.value for mean in means.values()]
    bars = [mean.half_width or 0.0 for mean in means.values()]
    look = {"color": COLOURS[0], "marker": "o", "markersize": 5, "elinewidth": 1}
    ax.errorbar(sizes, values, yerr=bars if any(bars) else None, capsize=3, **look)
    group_size_axis(ax, sizes)
    seeds = sorted({mean.n for mean in means.values()})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    ax.set_xlabel(f"group size G\n(n = {count} seeds each)")
    measure = runs[0].measure
    ax.set_ylabel(f"final validation {measure}" if last == 1 else f"{measure}, mean of the last {last} validations")
    finish(ax)
    return ax.get_figure(), ax


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_training.py", description="Validation accuracy against step and against group size.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="sweep, run folder, or JSONL of VERL's file logger")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--metric", help="VERL's name of the accuracy (default: val-core/.../acc/mean@N, or reward for acc)")
    parser.add_argument("--last", type=integer(1), default=1, help="validations averaged for the right panel (1)")
    parser.add_argument("--save_json", help="also write the numbers that are drawn")
    flags = parser.parse_args(arguments)
    with importing():
        from plots.style import save_figure
    runs = [each for source in flags.sources for each in load_runs(source, flags.metric)]
    figure, _ = plot_training(runs, flags.last)
    summary = summarise(runs, flags.last)
    for warning in summary["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if flags.save_json:
        write_json(flags.save_json, summary)
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
