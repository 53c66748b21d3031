"""What single prompts and continuations show: traces against V(x), score norms against the reward, the scores' mean.

Functions for plots/results.ipynb; each takes a ``Measurement`` with Grams (else it raises UserError) and an ``ax``,
and returns (figure, ax). MSE is trace(Cov | x) in squared gradient units; V(x) the expected reward, for rewards of 0
and 1 the probability of a right answer. Without an oracle table the mean reward of the prompt's own continuations stands
on its axis. g is a continuation's score, the gradient of its log-probability.
"""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import PUBLISHED
from Gradient_evaluation.stats.estimators import moments_of
from Gradient_evaluation.stats.missing import Missing
from plots.measurement import Measurement, Scores
from plots.style import COLOURS, CURVES, Curve, bars_of, finish, new_ax, note
from plots.tracecov import look_in, why_missing

DIFFICULTIES = ("hard", "middle", "easy")
HATCHES = {"naive": "////", "grpo": "", "oracleV": "...."}
MAX_LEVELS = 5  # boxes; rewards of more distinct values are put in as many classes of equal width


def _traces(measured: Measurement, group_size: int) -> tuple[dict[str, np.ndarray], str]:
    """{name: (n,) traces} of the published estimators that have them, and a line for each that has none."""
    found = {name: moments_of(measured.moments, name, group_size).trace for name in PUBLISHED}
    absent = [why_missing(name, trace.reason) for name, trace in found.items() if isinstance(trace, Missing)]
    return {name: trace for name, trace in found.items() if not isinstance(trace, Missing)}, "\n".join(absent)


def plot_prompt_traces(measured: Measurement, group_size: int, ax=None):
    """MSE of each prompt against V(x) at K = ``group_size``, logarithmic; estimates not above 0 are counted, not drawn."""
    ax, values = new_ax(ax, height=3.4), measured.values
    traces, absent = _traces(measured, group_size)
    for name, trace in traces.items():
        look, left_out = look_in(measured.compared, name), int((trace <= 0).sum())
        more = f" ({left_out} at 0 or below)" if left_out else ""
        look, filling = look._replace(label=look.label + more, line=""), look.colour if name == "grpo" else "none"
        ax.plot(values[trace > 0], trace[trace > 0], alpha=0.8, markersize=4.5, markerfacecolor=filling, **look.look)
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
        heights = [part.value for part in parts]
        bars = bars_of(heights, [part.interval for part in parts])
        filling = {"color": look.colour, "hatch": HATCHES[name], "edgecolor": "white", "linewidth": 0}
        x, thin = np.arange(3) + 0.27 * (position - 1), {"elinewidth": 1}
        ax.bar(x, heights, width=0.25, yerr=bars, capsize=2, error_kw=thin, label=look.label, **filling)
    counts = np.bincount(kinds, minlength=3)
    ranges = (f"V < {low:.3g}", f"{low:.3g} to {high:.3g}", f"V > {high:.3g}")
    names = [f"{name}\n{values}\nn = {count:,}" for name, values, count in zip(DIFFICULTIES, ranges, counts)]
    ax.set_xticks(range(3), names)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_ylabel(f"part of the mean MSE at K = {group_size}")
    note(ax, absent)
    finish(ax, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1)
    return ax.get_figure(), ax


def reward_classes(rewards: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """[(name, (N,) member or not), ...] of rewards (N,): each value, or five classes of equal width, empty ones left out."""
    levels = np.unique(rewards)
    if len(levels) <= MAX_LEVELS:
        return [(f"{level:g}", rewards == level) for level in levels]
    edges = np.linspace(levels[0], levels[-1], MAX_LEVELS + 1)
    number = np.clip(np.searchsorted(edges, rewards, side="right") - 1, 0, MAX_LEVELS - 1)
    found = [(f"{edges[i]:.2g} to {edges[i + 1]:.2g}", number == i) for i in range(MAX_LEVELS)]
    return [(name, members) for name, members in found if members.any()]


def plot_score_norms(measured: Measurement, ax=None):
    """||g||^2 of single continuations by reward: medians, quartiles, 5 to 95% whiskers, and means (diamonds).

    A score is exactly 0 where the model can give no other continuation. The logarithmic axis cannot show it: it counts
    in n and in the mean, not in the box, and the tick says how many there are.
    """
    ax, _ = new_ax(ax), measured.moments  # UserError without Grams
    rewards = np.concatenate([each.rewards for each in measured.scores])
    norm_sq = np.concatenate([each.norm_sq for each in measured.scores])
    if not (norm_sq > 0).any():
        raise UserError("every score is 0: there are no norms to draw")
    classes = [(name, norm_sq[members]) for name, members in reward_classes(rewards)]
    positions, means = range(1, len(classes) + 1), np.array([values.mean() for _, values in classes])
    box = {"whis": (5, 95), "showfliers": False, "widths": 0.5, "medianprops": {"color": "black"}}
    ax.boxplot([values[values > 0] for _, values in classes], positions=positions, **box)
    diamond = {"linestyle": "", "marker": "D", "markersize": 6, "color": COLOURS[0], "markeredgecolor": "black"}
    ax.plot(positions, np.where(means > 0, means, np.nan), zorder=4, **diamond)
    ax.set_yscale("log")
    ax.set_xticks(positions, [_of_class(*each) for each in classes])
    ax.set_xlabel("reward of the continuation")
    ax.set_ylabel("squared score norm\n(box: quartiles, diamond: mean)")
    finish(ax)
    return ax.get_figure(), ax


def _of_class(name: str, values: np.ndarray) -> str:
    zeros = int((values == 0).sum())
    return f"{name}\nn = {len(values):,}\nmean {values.mean():.4g}" + (f"\n({zeros:,} at 0 not drawn)" if zeros else "")


def best_baseline(scores: Scores) -> float:
    """b* = E[Z ||g||^2] / E||g||^2 of one prompt; NaN where every score is 0."""
    total = scores.norm_sq.sum()
    return float((scores.rewards * scores.norm_sq).sum() / total) if total > 0 else np.nan


def plot_best_baselines(measured: Measurement, group_size: int, ax=None):
    """The best prompt-only baseline b* of each prompt against V(x), marked by whether GRPO is noisier than vanilla.

    "As noisy" means that both traces are the same, for example because every reward and so every estimate is 0. On the
    diagonal ||g||^2 is uncorrelated with the reward (the paper's Assumption 2). A constant baseline b has the variance
    A - 2 b N + b^2 D, which is least at b* = N/D. So the baseline V(x) is worse than none where b* is below V/2 (for
    V < 0: above it).
    """
    ax, values = new_ax(ax, height=3.7), measured.values
    best = np.array([best_baseline(each) for each in measured.scores])
    grpo, vanilla = (measured.at(name, group_size).trace for name in ("grpo", "naive"))
    equal = np.isclose(grpo, vanilla, rtol=1e-9, atol=0)
    kinds = (
        (~equal & (grpo > vanilla), "s", CURVES["naive"].colour, "noisier than"),
        (~equal & (grpo < vanilla), "o", CURVES["grpo"].colour, "less noisy than"),
        (equal, "x", "#000000", "as noisy as"),
    )
    low, high = (0.0, 1.0) if measured.moments.zero_one else (min(0.0, values.min()), max(0.0, values.max()))
    for edge, beyond in ((high, low), (low, high)):  # below V/2 where V is above 0, above V/2 where V is below 0
        if edge != 0:
            label = "V(x) worse than no baseline" if edge == high else None
            ax.fill_between([0, edge], [0, edge / 2], beyond, color="#999999", alpha=0.25, linewidth=0, label=label)
    ax.plot([low, high], [low, high], color="black", linewidth=1, label="Assumption 2 holds: b* = V(x)")
    for chosen, marker, colour, text in kinds if equal.any() else kinds[:2]:
        look = Curve(f"GRPO {text} vanilla ({chosen.sum()} of {len(values)})", colour, marker, "")
        filling = "none" if marker == "o" else colour
        ax.plot(values[chosen], best[chosen], markersize=4.5, markerfacecolor=filling, **look.look)
    ax.set_xlabel(f"{measured.value_label}\n({measured.n}, K = {group_size})")
    ax.set_ylabel("best baseline b*(x)")
    finish(ax, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return ax.get_figure(), ax


def plot_on_policy_check(measured: Measurement, ax=None):
    """Unbiased ||E g||^2 of each prompt over the mean E||g||^2 of all, and their mean with its 95% interval.

    With the scores of the sampled law the mean is 0 up to noise. The square itself cannot be negative, so a mean below 0
    is noise, however narrow the interval is; only a mean far above 0 speaks against the scores.
    """
    ax, moments = new_ax(ax), measured.moments
    check = measured.results.get("on_policy_check") or {}
    if check.get("ratio") is None:
        raise UserError("the results hold no on-policy check")
    values = np.sort(moments.score_mean_sq / moments.score_norm_sq[:, 0].mean())
    ax.plot(np.arange(1, len(values) + 1), values, linestyle="", marker="o", markersize=3, color=COLOURS[0], label="one prompt")
    ratio, error = check["ratio"], check.get("standard_error")
    if error is not None:
        ax.axhspan(ratio - 1.96 * error, ratio + 1.96 * error, color=COLOURS[1], alpha=0.25, linewidth=0)
    text = f"mean {ratio:.2g}" + ("" if error is None else f" ± {1.96 * error:.2g} (95%)")
    ax.axhline(ratio, color=COLOURS[1], linestyle="--", linewidth=1.5, label=text)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel(f"prompts in order of their estimate\n({measured.n})")
    ax.set_ylabel("share of the score's mean\n||E g||² / E||g||²")
    note(ax, "warning: these are not the scores of the sampled law" if check.get("warning") else "")
    finish(ax)
    return ax.get_figure(), ax
