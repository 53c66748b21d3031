"""The group size while a policy is trained: G*, what the noise is made of, and the reward, by training step.

    python plots/plot_over_steps.py outputs/trl/group_size.jsonl --out outputs/trl/group_size.png

The file is that of Policy_Optimization/group_size_callback.py. Left: G* with its 95% interval, dotted where it has no upper
end, and a triangle where only a lower bound is known. The shade is the range of powers of two within 10% of the least MSE. The
dashed line is the group size that the run trains with. Middle: the three parts of MSE times N at that group size (at G*
where it is not known). Right: the mean reward of the measured prompts, and the share of silent groups. Last, where it is known:
the signal-to-noise ratio of one step, ||mean gradient||^2 / MSE. Where a run was continued, the later measurement of a step
counts. The file of Policy_Optimization/track_checkpoints.py is drawn in the same way. Runs in seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import read_finished_rows

HEIGHT = 3.8  # inches: the legends stand below the curves
NEEDED = ("step", "c1", "c2", "c3", "G_star", "G_star_ci95", "G_star_at_least", "almost_best", "mean_reward")
PARTS = {"c1": "between prompts: c1 G", "c2": "per continuation: c2", "c3": "small groups: c3/(G-1)"}


def load_measurements(path: str | Path) -> list[dict]:
    """The measurements of a file in order of step; those of an earlier attempt end where the next one begins.

    Lines of measurements that failed are left out. Raises UserError where there is none.
    """
    if not Path(path).exists():
        raise UserError(f"{path}: no such file; give the group_size.jsonl in a training's output_dir")
    found: list[dict] = []
    for number, row in enumerate(read_finished_rows(path)[0], start=1):
        if "error" in row:
            continue
        if any(name not in row for name in NEEDED):
            raise UserError(f"{path}, line {number}: no measurement of GroupSizeCallback; give its group_size.jsonl")
        found = [each for each in found if each["step"] < row["step"]] + [row]
    if not found:
        raise UserError(f"{path}: holds no measurement")
    return found


def plot_over_steps(rows: Sequence[dict]):
    """Draw the measurements of ``load_measurements``; returns (figure, array of 3 axes, 4 with a signal-to-noise ratio)."""
    from plots.style import new_figure

    has_ratio = any(row.get("signal_to_noise") is not None for row in rows)
    figure, axes = new_figure(4 if has_ratio else 3, height=HEIGHT)
    plot_group_sizes(rows, axes[0])
    plot_parts(rows, axes[1])
    plot_rewards(rows, axes[2])
    if has_ratio:
        plot_signal_to_noise(rows, axes[3])
    return figure, axes


def plot_group_sizes(rows: Sequence[dict], ax) -> None:
    """G* by step, with intervals and bounds, and the group size that is trained with."""
    from matplotlib.ticker import StrMethodFormatter

    from plots.style import COLOURS

    steps = [row["step"] for row in rows]
    lowest, highest = zip(*(row["almost_best"] or (math.nan, math.nan) for row in rows))
    ax.fill_between(steps, lowest, highest, color="#E69F00", alpha=0.15, linewidth=0, label="within 10% of the least MSE")
    best = [row for row in rows if row["G_star"] is not None]
    top = 2 * max([4, *(row["G_star"] for row in best), *(end for end in highest if not math.isnan(end))])
    for row in best:
        low, high = row["G_star_ci95"]
        ax.plot([row["step"]] * 2, [low, high or top], color=COLOURS[0], linewidth=1, linestyle="-" if high else ":")
    ax.plot([row["step"] for row in best], [row["G_star"] for row in best], "o-", color=COLOURS[0], markersize=4, label="G*")
    only = [row for row in rows if row["G_star"] is None and row["G_star_at_least"] is not None]
    if only:
        bounds = [row["G_star_at_least"] for row in only]
        ax.plot([row["step"] for row in only], bounds, "^", color=COLOURS[3], markersize=5, label="G* is at least")
    if rows[-1].get("num_generations"):
        ax.axhline(rows[-1]["num_generations"], color="#000000", linestyle="--", linewidth=1, label="G of the training")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    ax.set_ylabel("group size G")
    _finish(ax, rows)


def plot_parts(rows: Sequence[dict], ax) -> None:
    """The parts of MSE times N by step, at the group size that is trained with."""
    from plots.style import numbered

    steps = [row["step"] for row in rows]
    for number, (name, label) in enumerate(PARTS.items()):
        sizes = [row.get("num_generations") or row["G_star"] or math.nan for row in rows]
        factors = [{"c1": size, "c2": 1, "c3": 1 / (size - 1)}[name] for size in sizes]
        values = [math.nan if row[name] is None else factor * row[name] for row, factor in zip(rows, factors)]
        ax.plot(steps, values, markersize=4, **numbered(number, label).look)
    ax.axhline(0, color="#999999", linewidth=0.6)
    ax.set_ylabel("part of MSE x N\n(squared gradient units)")
    _finish(ax, rows)


def plot_rewards(rows: Sequence[dict], ax) -> None:
    """Mean reward (with its standard error) and the share of silent groups by step."""
    from plots.style import numbered

    steps, errors = [row["step"] for row in rows], [row.get("mean_reward_standard_error") or 0.0 for row in rows]
    look = {"markersize": 4, "capsize": 2, "elinewidth": 1}
    ax.errorbar(steps, [row["mean_reward"] for row in rows], yerr=errors, **look, **numbered(0, "mean reward").look)
    silent = [math.nan if row.get("frac_reward_zero_std") is None else row["frac_reward_zero_std"] for row in rows]
    if not all(map(math.isnan, silent)):
        ax.plot(steps, silent, markersize=4, **numbered(1, "silent groups").look)
    ax.set_ylabel("share, or mean reward")
    _finish(ax, rows)


def plot_signal_to_noise(rows: Sequence[dict], ax) -> None:
    """The signal-to-noise ratio of one step by step; at or below 0 nothing is seen but noise."""
    from plots.style import numbered

    ratios = [math.nan if row.get("signal_to_noise") is None else row["signal_to_noise"] for row in rows]
    ax.plot([row["step"] for row in rows], ratios, markersize=4, **numbered(0, "of one training step").look)
    ax.axhline(0, color="#999999", linewidth=0.6)
    ax.set_ylabel("signal-to-noise ratio")
    _finish(ax, rows)


def _finish(ax, rows: Sequence[dict]) -> None:
    from plots.style import finish

    if any("label" in row for row in rows):  # checkpoints whose names have no step
        ax.set_xticks([row["step"] for row in rows], [row.get("label", str(row["step"])) for row in rows])
    ax.set_xlabel(f"optimiser steps\n(n = {rows[-1].get('n_prompts', '?')} prompts a measurement)")
    finish(ax, loc="upper center", bbox_to_anchor=(0.5, -0.27))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_over_steps.py", description="The group-size law of a policy by training step.")
    parser.add_argument(
        "measurements", metavar="group_size.jsonl", help="the file of GroupSizeCallback or track_checkpoints.py"
    )
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    flags = parser.parse_args(arguments)
    with importing():
        from plots.style import save_figure
    print(save_figure(plot_over_steps(load_measurements(flags.measurements))[0], flags.out))


if __name__ == "__main__":
    run(main)
