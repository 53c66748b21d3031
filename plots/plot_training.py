"""Validation accuracy against training step, and against the group size: means and 95% intervals over seeds.

    python plots/plot_training.py outputs/sweep/manifest.json --out outputs/sweep.pdf
    python plots/plot_training.py outputs/train/a_g8_seed0 outputs/train/a_g8_seed1 --out figure.png
    python plots/plot_training.py export.csv --metric val-core/openai/gsm8k/acc/mean@1 --out figure.pdf

Sources are sweeps, run folders, VERL's console or JSONL logs, CSV exports of W&B and its offline runs
(training_logs.py says how each is read). G and seed come from the manifest or the run folder, else from a name
like ``qwen_g8_seed0``. Runs of one G are averaged at the steps all of them have; the interval is Student's t over
seeds, so one seed has none. The right panel is there when at least one G is known. Runs in seconds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter  # noqa: E402

from Gradient_evaluation.cli import Parser, UserError, integer, run  # noqa: E402
from plots.style import new_figure, save_figure  # noqa: E402
from plots.training_logs import Run, load_runs  # noqa: E402

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
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


def label_of(each: Run) -> str:
    return each.name if each.group_size is None else f"G = {each.group_size}"


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one G together, in order of G; runs without a G each on their own, after them."""
    groups: dict[str, list[Run]] = {}
    for each in sorted(runs, key=lambda each: (each.group_size is None, each.group_size or 0)):
        groups.setdefault(label_of(each), []).append(each)
    for label, members in groups.items():
        seeds = [each.seed for each in members if each.seed is not None]
        if len(set(seeds)) < len(seeds):
            raise UserError(f"{label}: two runs have the same seed; give each run once")
    return groups


def curve(runs: Sequence[Run]) -> dict[int, Mean]:
    """Accuracy by step over the steps that every run has."""
    steps = sorted(set.intersection(*(set(each.accuracy) for each in runs)))
    return {step: mean_over_seeds([each.accuracy[step] for each in runs]) for step in steps}


def final_accuracy(runs: Sequence[Run], last: int) -> Mean:
    """Over seeds, the mean of each run's accuracy at its ``last`` last validations."""
    return mean_over_seeds([statistics.fmean(list(each.accuracy.values())[-last:]) for each in runs])


def plot_training(runs: Sequence[Run], last: int = 1):
    """Draw both panels → (figure, axes, summary); the summary holds the numbers that are drawn, ready for JSON.

    A last validation that differs in step between runs is drawn as it is and named in the summary's ``warnings``.
    """
    groups = by_label(runs)
    sized = {label: members for label, members in groups.items() if members[0].group_size is not None}
    figure, axes = new_figure(2 if sized else 1)
    summary: dict = {"accuracy_by_step": {}, "accuracy_by_group_size": {}, "warnings": []}
    for number, (label, members) in enumerate(groups.items()):
        means = curve(members)
        if not means:
            raise UserError(f"{label}: its seeds share no validation step; validate them at the same steps")
        summary["accuracy_by_step"][label] = {step: list(mean) for step, mean in means.items()}
        _draw_curve(axes[0], means, label, number)
    if len(ends := {max(each.accuracy) for each in runs}) > 1:
        summary["warnings"].append(f"the runs end at different steps ({', '.join(map(str, sorted(ends)))})")
    axes[0].set_xlabel("training step")
    axes[0].set_ylabel("validation accuracy")
    axes[0].legend(frameon=False, fontsize="small")
    if sized:
        finals = {members[0].group_size: final_accuracy(members, last) for members in sized.values()}
        summary["accuracy_by_group_size"] = {size: list(mean) for size, mean in finals.items()}
        _draw_finals(axes[1], finals, last)
    for ax in axes:
        ax.grid(True, alpha=0.3, linewidth=0.6)
    return figure, axes, summary


def _draw_curve(ax, means: dict[int, Mean], label: str, number: int) -> None:
    steps, values = list(means), [mean.value for mean in means.values()]
    halves = [mean.half_width or 0.0 for mean in means.values()]
    colour = COLOURS[number % len(COLOURS)]
    n = next(iter(means.values())).n
    ax.plot(steps, values, color=colour, marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=1.5,
            linestyle=LINES[number % len(LINES)], label=f"{label} ({n} seeds)" if n > 1 else label)  # fmt: skip
    if n > 1:
        low, high = [[value + sign * half for value, half in zip(values, halves)] for sign in (-1, 1)]
        ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_finals(ax, finals: dict[int, Mean], last: int) -> None:
    sizes = list(finals)
    bars = [mean.half_width or 0.0 for mean in finals.values()]
    ax.errorbar(sizes, [mean.value for mean in finals.values()], yerr=bars if any(bars) else None, capsize=3,
                color=COLOURS[0], marker="o", markersize=5, linewidth=1.5, elinewidth=1)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    ax.set_xlabel("group size G")
    ax.set_ylabel("final validation accuracy" if last == 1 else f"accuracy, mean of the last {last} validations")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_training.py", description="Validation accuracy against step and against group size.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="sweep, run folder, log, W&B CSV or offline run")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--metric", help="VERL's name of the accuracy (default: val-core/.../acc/mean@N)")
    parser.add_argument("--last", type=integer(1), default=1, help="validations averaged for the right panel (1)")
    parser.add_argument("--save_json", help="also write the numbers that are drawn")
    flags = parser.parse_args(arguments)
    runs = [each for source in flags.sources for each in load_runs(source, flags.metric)]
    figure, _, summary = plot_training(runs, flags.last)
    for warning in summary["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if flags.save_json:
        from Gradient_evaluation.durable_files import write_json

        write_json(flags.save_json, json.loads(json.dumps(summary)))
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
