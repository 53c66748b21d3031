"""The predicted share of clipped steps against the norms of simulated batches of whole gradients."""

from types import SimpleNamespace

import numpy as np
import pytest
from scripts import RESULTS, from_grams, one_line_error, read, tracecov

from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.clip import Clip, clipped_names, clipping, group_squares
from Gradient_evaluation.stats.estimators import ESTIMATORS, update_weights
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.prompts import reduce_prompts

NAMES = ["grpo", "dr_grpo", "token_mean", "std_verl", "verl_default", "trl_grpo", "trl_dapo_batch", "trl_bnpo"]
SIZES, BUDGET, BLOCK, PROMPTS, WIDTH = [2, 4, 8], 64, 32, 30, 400


@pytest.fixture(scope="module")
def world():
    """Prompts with scores of many directions and a common one, and whole gradients of their continuations."""
    generator, prompts = np.random.default_rng(0), []
    common = generator.normal(size=WIDTH) / np.sqrt(WIDTH)
    for at in range(PROMPTS):
        rewards = (generator.random(256) < generator.uniform(0.1, 0.9)).astype(float)
        lengths = generator.integers(1, 9, 256)
        scores = generator.normal(size=(256, WIDTH)) * np.sqrt(lengths / 8)[:, None] * (1 + at % 4)
        prompts.append((scores + 6 * (rewards - rewards.mean())[:, None] * common, rewards, lengths))
    records = [
        SimpleNamespace(
            oracle_value=None,
            blocks=[(g[i : i + BLOCK] @ g[i : i + BLOCK].T, r[i : i + BLOCK], n[i : i + BLOCK]) for i in range(0, 256, BLOCK)],
        )
        for g, r, n in prompts
    ]
    thetas = np.stack([((r - r.mean())[:, None] * g).sum(0) / 255 for g, r, _ in prompts])
    together = thetas.sum(0)
    mean_norm_sq = (together @ together - (thetas**2).sum()) / (PROMPTS * (PROMPTS - 1))
    return prompts, reduce_prompts(records, SIZES, NAMES), records, mean_norm_sq


def simulated(prompts, name, size, count):
    """||ghat_batch||^2 of batches of ``count`` groups, from the gradients themselves and the loss's own denominators."""
    generator, found = np.random.default_rng(1), []
    for _ in range(400):
        picked = generator.integers(PROMPTS, size=count)
        members = [generator.choice(256, size=size, replace=False) for _ in range(count)]
        rewards, lengths = (np.stack([prompts[x][part][m] for x, m in zip(picked, members)]) for part in (1, 2))
        weights = update_weights(name, rewards, lengths)
        gradient = sum(w @ prompts[x][0][m] for w, x, m in zip(weights, picked, members)) / size / count
        found.append(gradient @ gradient)
    return np.array(found)


@pytest.mark.parametrize("name", NAMES)
def test_the_share_is_that_of_simulated_batches(world, name):
    prompts, moments, records, mean_norm_sq = world
    squares = group_squares(records, [name], SIZES)
    for position, size in enumerate(SIZES):
        norms = simulated(prompts, name, size, BUDGET // size)
        for percent in (20, 50, 80):
            threshold = float(np.sqrt(np.percentile(norms, percent)))
            clip = Clip(threshold, BUDGET, mean_norm_sq)
            found = clipping(moments, squares, [name], SIZES, clip, PromptBootstrap(PROMPTS, 100))["estimators"][name]
            assert found["share"][position] == pytest.approx(1 - percent / 100, abs=0.13), (size, percent)
            low, high = found["share_ci95"][position]
            assert 0 <= low <= found["share"][position] <= high <= 1
        assert found["norm_sq"][position] == pytest.approx(norms.mean(), rel=0.06)
        assert found["norm_sq_std"][position] == pytest.approx(norms.std(), rel=0.3)


def test_a_larger_norm_clips_fewer_and_all_or_none_at_the_ends(world):
    _, moments, records, mean_norm_sq = world
    squares = group_squares(records, ["grpo"], SIZES)
    shares = []
    for threshold in (1e-6, 3.0, 6.0, 1e6):
        clip = Clip(threshold, BUDGET, mean_norm_sq)
        shares.append(
            clipping(moments, squares, ["grpo"], SIZES, clip, PromptBootstrap(PROMPTS, 50))["estimators"]["grpo"]["share"]
        )
    assert shares[0] == [1.0] * 3 and shares[-1] == [0.0] * 3 and (np.diff(shares, axis=0) <= 0).all()


def test_what_is_missing_has_its_reason(world):
    _, moments, records, _ = world
    squares = group_squares(records, ["grpo"], [2, 64])
    clip = Clip(1.0, BUDGET, 0.5)
    found = clipping(moments, squares, ["grpo"], [2, 64], clip, PromptBootstrap(PROMPTS, 50))
    assert found["estimators"]["grpo"]["share"][1] is None and found["B"] == [32, 1]
    assert "G=64 needs a block of at least 64" in found["reasons"]["estimators.grpo.share"]
    found = clipping(moments, squares, ["grpo"], [2], clip._replace(mean_norm_sq=Missing("none")), PromptBootstrap(PROMPTS, 50))
    assert found["reasons"]["estimators.grpo.norm_sq"] == "none"


def test_entries_with_a_baseline_of_their_own_or_dropped_groups_are_left_out():
    assert clipped_names(["dapo", "trl_dapo", "greedy"]) == ["grpo", "trl_dapo"]
    assert {name for name in ESTIMATORS if name in clipped_names(list(ESTIMATORS))} >= set(NAMES)


def test_a_run_says_how_many_steps_are_clipped(undisturbed, policy, table, tmp_path, capsys):
    more = ("--K_list", 4, 8, "--estimators", "trl_grpo", "--budget", 32, "--clip", 2.5)
    code, out, err = from_grams(undisturbed / "grams", tmp_path, *more, capsys=capsys)
    assert code == 0, err
    found = read(tmp_path / RESULTS)["clip"]
    assert (found["threshold"], found["N"], found["G"], found["B"]) == (2.5, 32, [4, 8], [8, 4])
    assert list(found["estimators"]) == ["grpo", "trl_grpo"] and 0 <= found["estimators"]["grpo"]["share"][0] <= 1
    assert "share of steps of 32 continuations whose gradient is longer than 2.5" in out
    outcome = tracecov(policy, table, tmp_path / "out", "--clip", 1, capsys=capsys)
    one_line_error(outcome, "--clip: give --budget too")
