"""When an answer is precise enough, and how many continuations of a prompt are best: against known variances."""

from types import SimpleNamespace

import numpy as np
import pytest

from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.design import (
    Spread,
    best_continuations,
    expected_half_width,
    expected_seconds,
    prompts_needed,
    spread_of,
)
from Gradient_evaluation.stats.group_size.precision import Quantity, estimate_of, forecast, half_width, is_enough, looks
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches
from Gradient_evaluation.stats.prompts import reduce_prompts
from Gradient_evaluation.stats.summary import summarise


def record(rng, theta, n, d=6, noise=1.0):
    """Scores with ||theta||^2 of this prompt: rewards 0/1 at random, scores that lean to theta where the reward is 1."""
    rewards = rng.integers(0, 2, n).astype(float)
    scores = noise * rng.standard_normal((n, d)) + np.outer(2 * rewards - 1, theta)
    return SimpleNamespace(oracle_value=0.5, blocks=[(scores @ scores.T, rewards, np.ones(n))], greedy_reward=None)


def prompts_of(rng, count, n):
    sizes = rng.uniform(0.5, 2.0, count)
    thetas = rng.standard_normal((count, 6)) * sizes[:, None]
    return [record(rng, theta, n) for theta in thetas], thetas / 2


@pytest.mark.parametrize(
    "text", ["", "G", "trace", "trace:grpo", "trace:grpo:1", "trace:grpo:x", "difference:grpo:8", "snr:none:8", "G_star:grpo:8"]
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="give G_star"):
        Quantity.parse(text)


def test_estimates_are_those_of_the_results():
    rng = np.random.default_rng(0)
    prompts = reduce_prompts(prompts_of(rng, 30, 16)[0])
    bootstrap = PromptBootstrap(30, seed=3)
    whole = summarise(prompts, [8], bootstrap)
    for kind, key in (("trace", "conditional_on_x"), ("snr", "signal_to_noise")):
        value, low, high, reason = estimate_of(Quantity.parse(f"{kind}:rloo:8"), prompts, None, bootstrap)
        assert reason is None and value == pytest.approx(whole[key]["grpo"][0])
        assert [low, high] == pytest.approx(whole[f"{key}_ci95"]["grpo"][0], rel=1e-3)
    value, low, high, _ = estimate_of(Quantity.parse("difference:grpo:naive:8"), prompts, None, bootstrap)
    assert value == pytest.approx(whole["conditional_on_x"]["grpo"][0] - whole["conditional_on_x"]["naive"][0])
    assert low < value < high


def test_an_interval_is_enough_where_both_ends_are_near():
    assert is_enough(10, 8, 12, 0.2) and not is_enough(10, 7.9, 11, 0.2) and not is_enough(10, 9, 12.1, 0.2)
    assert is_enough(-10, -12, -8, 0.2)
    assert not is_enough(None, None, None, 0.2) and not is_enough(10, 9, None, 0.2) and half_width(0, -1, 1) is None
    assert forecast(10, 6, 12, 30, 0.2) == 120 and forecast(10, 9, None, 30, 0.2) is None


def test_looks_begin_at_20_and_end_with_the_last_prompt():
    assert looks(40) == [20, 22, 25, 28, 31, 35, 39, 40] and looks(12) == [12] and looks(20) == [20]


def test_the_best_number_of_continuations_is_the_one_of_least_variance_times_cost():
    spread = Spread(2.0, 6.0, 30.0)
    n = best_continuations(spread, 3.0, 0.25)
    value = {each: spread.at(each) * (3.0 + 0.25 * each) for each in range(4, 200)}
    assert value[n] == min(value.values()) and 4 < n < 40
    assert best_continuations(Spread(2.0, 6.0, 0.0), 3.0, 0.25) == 6  # METHOD 8.6: sqrt(6 * 3 / (2 * 0.25))
    assert best_continuations(Spread(9.0, 0.1, 0.0), 0.1, 1.0) == 4


def test_forecasts_fall_with_the_root_of_the_prompts():
    spread = Spread(1.0, 4.0, 0.0)
    assert expected_half_width(spread, 50, 4) == pytest.approx(1.96 * np.sqrt(2 / 50))
    assert expected_half_width(spread, prompts_needed(spread, 4, 0.2), 4) == pytest.approx(0.2, rel=0.01)
    assert expected_seconds(50, 4, 1.0, 0.5) == pytest.approx(150)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["G_star", "trace:grpo:4"])
def test_a_spread_forecasts_the_variance_that_simulations_have(text):
    """The spread of 200 prompts against the relative variance of the quantity over 200 runs of 30 prompts of 8 and 24."""
    rng, quantity = np.random.default_rng(1), Quantity.parse(text)
    records, thetas = prompts_of(rng, 200, 16)
    spread = spread_of(quantity, records, Sketches(thetas, None, None))
    for n in (8, 24):
        values = []
        for _ in range(200):
            records, thetas = prompts_of(rng, 30, n)
            prompts, bootstrap = reduce_prompts(records), PromptBootstrap(30, n_bootstrap=50)
            values.append(estimate_of(quantity, prompts, Sketches(thetas, None, None), bootstrap)[0])
        values = np.array([value for value in values if value is not None], dtype=float)
        assert len(values) > 150
        found = np.std(values, ddof=1) / np.mean(values)
        assert 0.7 < np.sqrt(spread.at(n) / 30) / found < 1.4, (n, found)
