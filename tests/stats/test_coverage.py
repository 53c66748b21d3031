"""How often does a 95% interval hold the truth? Simulated, for the kinds of numbers that a run reports.

    python tests/stats/test_coverage.py            prints the table of the README, minutes

Prompts differ with heavy tails (lognormal or gamma, with a given coefficient of variation). Of group sizes: a model of
two levels with known constants, theta(x) and zeta(x) per prompt and noise of its continuations on top.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from abstract_policy import group_size_law_of, heavy_tailed, prompts_with, two_levels

from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.best_size import mse_times_budget
from Gradient_evaluation.stats.group_size.law import group_size_law
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches

SPREADS = (0.5, 1.24, 2.0)
PROMPTS = (4, 10, 12, 20, 40, 100)
DRAWS = 500


def coverage_of_means(kind: str, spread: float, n: int, repeats: int) -> dict[str, float]:
    """Shares of intervals that hold the truth: of a mean (bootstrap-t, percentile) and of a ratio of two (bootstrap-t)."""
    generator, bootstrap = np.random.default_rng([1, n]), PromptBootstrap(n, DRAWS)
    held = {"bootstrap-t": 0, "percentile": 0, "ratio": 0, "ratio, percentile": 0}
    for _ in range(repeats):
        values, other = (heavy_tailed(generator, kind, spread, n), heavy_tailed(generator, kind, 0.5, n))
        resampled = bootstrap.resampled_means(np.stack([values, values * other], axis=-1))
        ratio = bootstrap.of_means([values * other, values], np.divide).interval
        for name, interval in (
            ("bootstrap-t", bootstrap.mean(values).interval),
            ("ratio", ratio),
            ("percentile", np.percentile(resampled[:, 0], [2.5, 97.5])),
            ("ratio, percentile", np.percentile(resampled[:, 1] / resampled[:, 0], [2.5, 97.5])),
        ):
            held[name] += interval[0] <= 1 <= interval[1]
    return {name: count / repeats for name, count in held.items()}


@cache
def coverage_of_group_sizes(n: int, repeats: int, noise: float = 2.0, c3: float = 30.0) -> dict:
    """Shares of intervals that hold the truth, where there are any, and how often there is a G*."""
    generator, held, answers = np.random.default_rng([2, n]), {}, []
    for seed in range(repeats):
        moments, truth = two_levels(generator, n, noise=noise, c3=c3)
        result = group_size_law_of(moments, DRAWS, seed)
        for name, value in truth.items():
            if result[f"{name}_ci95"] is not None:
                low, high = result[f"{name}_ci95"]
                held.setdefault(name, []).append(low <= value <= (np.inf if high is None else high))
        held.setdefault("G_star_at_least", []).append((result["G_star_at_least"] or 2) <= truth["G_star"])
        table = result["relative_mse"]
        if table["value"] is not None:
            mse = {size: mse_times_budget(truth["c1"], truth["c2"], truth["c3"], size) for size in table["G"]}
            for size, (low, high) in zip(table["G"], table["ci95"]):
                if size != table["reference"] and size in (2, 4, 16, 64):
                    ratio = mse[size] / mse[table["reference"]]
                    held.setdefault("relative_mse", []).append(low <= ratio <= (np.inf if high is None else high))
        if result["G_star"] is not None:
            answers.append((result["G_star"] / truth["G_star"], result["G_star_may_be_larger"]))
    return {
        **{name: float(np.mean(each)) for name, each in held.items()},
        "answered": len(answers) / repeats,
        "answers": answers,
    }


# --- means and ratios ---


@pytest.mark.parametrize(
    "kind, spread, n, least",
    [("lognormal", 0.5, 10, 0.90), ("lognormal", 1.24, 10, 0.86), ("lognormal", 1.24, 40, 0.89), ("gamma", 2.0, 12, 0.86)],
)
def test_bootstrap_t_beats_the_percentile_interval(kind, spread, n, least):
    found = coverage_of_means(kind, spread, n, 400)
    assert found["bootstrap-t"] > least and found["ratio"] > 0.86
    assert found["bootstrap-t"] > found["percentile"] + (0.04 if n < 40 else 0.0)
    assert found["ratio"] > found["ratio, percentile"] + (0.01 if n < 40 else -0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lognormal", "gamma"])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("n", PROMPTS)
def test_coverage_over_spreads_and_numbers_of_prompts(kind, spread, n):
    found = coverage_of_means(kind, spread, n, 1000)
    assert found["bootstrap-t"] > (0.90 if spread < 1 else 0.87 if spread < 2 else 0.83), found
    # ratios of four very heavy-tailed prompts are the known limit of the least error of a resample: 0.81 to 0.88
    assert found["bootstrap-t"] > found["percentile"] and found["ratio"] > (0.79 if n == 4 and spread == 2 else 0.85), found


@pytest.mark.parametrize("n", [2, 3])
def test_two_or_three_prompts_have_students_interval(n):
    """Normal prompts: resamples of two or three hold too few different ones, and Student's t is exact."""
    generator, bootstrap = np.random.default_rng(0), PromptBootstrap(n, 2000)
    held = []
    for _ in range(300):
        low, high = bootstrap.mean(generator.standard_normal(n)).interval
        held.append(low <= 0 <= high)
    assert 0.91 < np.mean(held) < 0.985


# --- what an interval must be, whatever the numbers ---


@pytest.mark.parametrize(
    "values",
    [[1.0] * 6, [0.0] * 11 + [1.0], [1e-300] * 5, [1e200, 1e180, 3e199, 2e200], [0.0, 1.0], [0.1] * 7, [5.0, 5.0, 5.0, -2.0]],
)
def test_an_interval_is_finite_and_holds_its_estimate(values):
    values = np.array(values)
    estimate = PromptBootstrap(len(values), 400).mean(values)
    assert np.isfinite(estimate.interval).all()
    assert estimate.interval[0] <= estimate.value <= estimate.interval[1]
    if np.ptp(values) == 0:
        assert estimate.interval == pytest.approx([values[0]] * 2)


def test_intervals_go_with_scale_and_shift():
    values, bootstrap = heavy_tailed(np.random.default_rng(0), "lognormal", 1.0, 15), PromptBootstrap(15, 300, seed=3)
    plain = np.array(bootstrap.mean(values).interval)
    assert bootstrap.mean(7 - 3 * values).interval == pytest.approx((7 - 3 * plain[::-1]).tolist())
    assert bootstrap.ratio(4 * values, values).interval == pytest.approx([4.0, 4.0])
    assert bootstrap.of_means([values], np.log).interval != pytest.approx(np.log(plain).tolist())
    averages = bootstrap.averages([values, values**2])
    for row in np.array([[1.0, 0.0], [2.0, -0.5]]):
        value, draws = averages.draws(lambda first, second, row=row: row[0] * first + row[1] * second)
        many = averages.linear(row[None])
        assert many[0] == pytest.approx([value]) and many[1][:, 0] == pytest.approx(draws, rel=1e-6, abs=1e-9)
    value, draws = averages.draws(lambda first, second: second / first)
    many = averages.linear_ratio(np.array([[0.0, 1.0]]), np.array([1.0, 0.0]))
    assert many[0] == pytest.approx([value]) and many[1][:, 0] == pytest.approx(draws, rel=1e-6)
    assert bootstrap.draws(values) == pytest.approx(bootstrap.averages([values]).draws(lambda mean: mean)[1], rel=1e-6)


# --- ratios only over what lies above 0 ---


@pytest.mark.parametrize(
    "denominator, reason",
    [
        ([-3.0, -2.9, -3.1, -3.05, -2.95, -3.0], "lies below 0"),
        ([-1.0, 1.2, -0.8, 1.0, -1.1, 0.9], "includes 0"),
        ([-2.0], "not above 0"),
        ([2.0], "one prompt"),
        ([0.0, 0.0, 0.0, 0.0], "includes 0"),
    ],
)
def test_a_ratio_needs_a_denominator_surely_above_zero(denominator, reason):
    denominator = np.array(denominator)
    bootstrap = PromptBootstrap(len(denominator), 300)
    estimate = bootstrap.ratio(np.ones(len(denominator)), denominator, "trace")
    assert estimate.value is None and estimate.interval is None and reason in estimate.reason and "trace" in estimate.reason
    assert (
        bootstrap.ratio(np.ones(6)[: len(denominator)], np.arange(6)[: len(denominator)] * 0.1 + 3).value is not None
        or len(denominator) == 1
    )


# --- the group size ---


def test_the_lower_bound_holds_where_c1_may_be_zero():
    """And so does the cost of a wrong size."""
    found = coverage_of_group_sizes(20, 120, noise=6.0, c3=300.0)
    assert found["answered"] < 0.4 and found["G_star_at_least"] > 0.9, found
    assert found["G_star"] > 0.9, found  # one-sided there
    ratios, flagged = zip(*found["answers"])
    assert np.median(ratios) < 0.8 and np.mean(flagged) > 0.8  # too small, and it is said


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, 20, 50])
def test_intervals_hold_in_a_model_of_two_levels(n):
    found = coverage_of_group_sizes(n, 400)
    for name in ("c1", "c2", "c3", "G_star", "G_star_at_least", "relative_mse"):
        assert found[name] > 0.84, (name, found[name])


# --- the forecast ---

PREFIXES = (6, 7, 9, 12, 13, 16, 20, 24, 32, 40, 50, 64, 80, 100, 130)


def prefix_forecasts(seed: int) -> dict[int, int | None]:
    """n → n plus the prompts asked for, of growing prefixes of one table; None where c1 is told from 0."""
    moments, _ = two_levels(np.random.default_rng(seed), PREFIXES[-1], spread=0.3, noise=3.0)
    results = {n: group_size_law_of([part[:n] for part in moments], 200) for n in PREFIXES}
    return {n: None if result["more_prompts"] is None else n + result["more_prompts"] for n, result in results.items()}


@pytest.mark.slow
def test_the_forecast_holds_on_growing_prefixes_of_one_table():
    """Told from 0 in four cases of five at about 90 prompts here; asked for is that, within a factor of two."""
    found = [prefix_forecasts(seed) for seed in range(24)]
    asked = [(n, total) for each in found for n, total in each.items() if total is not None]
    assert min(total - n for n, total in asked) > 1 and np.mean([total < 1.5 * n for n, total in asked]) < 0.05
    resolved = {}
    for n in (50, 90, 200):
        generator = np.random.default_rng(1000 + n)
        resolved[n] = np.mean(
            [group_size_law_of(two_levels(generator, n, spread=0.3, noise=3.0)[0], 200)["c1_ci95"][0] > 0 for _ in range(60)]
        )
    assert resolved[50] < 0.75 < 0.9 < resolved[200] and abs(resolved[90] - 0.8) < 0.15, resolved
    assert 45 < np.median([total for _, total in asked]) < 180


def test_the_forecast_never_asks_for_one_more_again_and_again():
    asked = [(n, total) for seed in range(2) for n, total in prefix_forecasts(seed).items() if total is not None and n < 50]
    assert len(asked) > 8 and min(total - n for n, total in asked) >= 5


@pytest.mark.parametrize(
    "noise, share, words",
    [
        (0.0, 0.0, "more continuations per prompt alone would not do"),
        (1.0, 1.0, "times as many continuations per prompt"),
        (None, None, None),
    ],
)
def test_the_forecast_says_how_many_continuations_would_do(noise, share, words):
    n = 24
    generator = np.random.default_rng(0)
    theta_sq = 0.1 + generator.permutation(np.linspace(-1, 1, n))
    noise_of_each = np.nan if noise is None else noise * theta_sq.var(ddof=1)
    prompts = prompts_with(theta_sq, np.ones(n), np.full(n, 5.0), theta_sq_noise=noise_of_each)
    result = group_size_law(prompts, Sketches(1e-3 * generator.standard_normal((n, 4))), PromptBootstrap(n, 200))
    assert result["G_star"] is None and result["more_prompts"] > 5
    assert result["continuations_share"] == (None if share is None else pytest.approx(share, abs=0.05))
    if words is None:
        assert "continuations per prompt" not in result["reasons"]["G_star"]
    else:
        assert words in result["reasons"]["G_star"]
    assert (result["times_continuations"] is not None) == (noise == 1.0)


def print_tables(repeats: int = 1000) -> None:
    """The two tables of the README, in Markdown."""
    print("| prompts differ by | interval | " + " | ".join(f"T = {n}" for n in PROMPTS) + " |")
    print("|---|---|" + "---|" * len(PROMPTS))
    for kind in ("lognormal", "gamma"):
        for spread in SPREADS:
            found = [coverage_of_means(kind, spread, n, repeats) for n in PROMPTS]
            for name in found[0]:
                print(f"| {kind}, {spread} | {name} | " + " | ".join(f"{each[name]:.2f}" for each in found) + " |", flush=True)
    names = ("c1", "c2", "c3", "G_star", "G_star_at_least", "relative_mse", "answered")
    print("\n| T | continuations' noise | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for noise, c3 in ((2.0, 30.0), (6.0, 300.0)):
        for n in (10, 20, 50):
            found = coverage_of_group_sizes(n, max(20, repeats // 5), noise, c3)
            print(f"| {n} | {noise:g} | " + " | ".join(f"{found.get(name, np.nan):.2f}" for name in names) + " |", flush=True)


def test_prompts_that_hardly_differ_have_a_bounded_interval():
    """Five of six prompts are 0 but for rounding: a resample without the sixth has a spread of 1e-17."""
    values = np.array([1.0, 1e-17, -1e-17, 1e-17, -1e-17, 1e-17])
    low, high = PromptBootstrap(6).mean(values).interval
    assert low <= values.mean() <= high < 20 * values.mean() and low > -20 * values.mean()


if __name__ == "__main__":
    print_tables()
