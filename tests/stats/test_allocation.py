"""The allocation of continuations to prompts is the best one, and its gain is judged on other blocks than it was made from."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import make_records

from Gradient_evaluation.stats.blocks import PairMoments, group_trace
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.allocation import (
    NO_GAIN,
    allocation,
    block_noise,
    crossed,
    equal_variance,
    greedy,
    group_variance,
    mean_terms,
    shrunk,
)
from Gradient_evaluation.stats.prompts import reduce_prompts


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_gain_first_is_the_best_of_all(seed):
    """Against every way to share 14 continuations among 4 prompts, with some moments of 0."""
    generator = np.random.default_rng(seed)
    terms = generator.lognormal(size=(4, 2)) * generator.choice([0, 1, 5], (4, 2))
    ways = np.array([way for way in product(range(2, 9), repeat=4) if sum(way) == 14])
    counts = greedy(terms, 14)
    assert counts.sum() == 14 and counts.min() >= 2
    assert group_variance(terms, counts).mean() == pytest.approx(group_variance(terms, ways).mean(-1).min(), rel=1e-12)


def test_the_variance_is_that_of_a_group_of_grpo():
    moments = PairMoments(4.0, 2.0, 1.0)
    terms = np.array([4 * moments.zeta1, 2 * moments.zeta2 - 4 * moments.zeta1])
    for size in (2, 3, 50):
        assert group_variance(terms, size) == pytest.approx(group_trace(moments, size))


def test_many_continuations_are_shared_as_neyman_has_it():
    """n proportional to sqrt(a) where the price of small groups is gone."""
    a = np.array([1.0, 4.0, 9.0, 0.25])
    counts = greedy(np.stack([a, a], -1), 20000)
    assert counts / counts.sum() == pytest.approx(np.sqrt(a) / np.sqrt(a).sum(), rel=2e-3)


def sized(blocks, size=8):
    """Blocks (m, 2) of each prompt with their size in a third column."""
    return [np.column_stack([each, np.full(len(each), size)]) for each in blocks]


def test_equal_prompts_get_equal_shares():
    for terms in (np.ones((7, 2)), np.zeros((7, 2))):
        assert sorted(greedy(terms, 30)) == [4] * 5 + [5] * 2
    terms = np.random.default_rng(0).lognormal(size=(7, 2))
    uneven = np.mean([group_variance(terms, np.roll([4] * 5 + [5] * 2, turn)).mean() for turn in range(7)])
    assert equal_variance(terms, 30).mean() == pytest.approx(uneven, rel=1e-12)


def test_moments_are_pulled_as_far_as_they_are_noise():
    generator = np.random.default_rng(1)
    truth = generator.lognormal(0, 1, (4000, 2))
    noise = np.array([1.0, 9.0])
    blocks = sized([each + np.sqrt(noise) * generator.normal(size=(4, 2)) for each in truth])
    assert block_noise(blocks) == pytest.approx(8 * noise, rel=0.05)
    means, found = mean_terms(blocks), shrunk(blocks, block_noise(blocks))
    for column in range(2):
        kept = truth[:, column].var() / (truth[:, column].var() + noise[column] / 4)
        inside = found[:, column] > 0
        slope = np.polyfit(means[inside, column], found[inside, column], 1)[0]
        assert slope == pytest.approx(kept, rel=0.1)
    assert (found >= 0).all()
    exact = sized([np.tile(each, (3, 1)) for each in truth])
    assert shrunk(exact, block_noise(exact)) == pytest.approx(truth)


def test_a_prompt_of_smaller_blocks_is_pulled_further():
    """Blocks of 16 and of 4, whose noise falls with their size: the variance of the pulled means is the prior's share."""
    generator = np.random.default_rng(2)
    truth = 5 + generator.normal(size=(4000, 2))
    sizes = [np.array([16, 4, 4]) if number % 2 else np.array([4, 4]) for number in range(len(truth))]
    noisy = [each + 4 * generator.normal(size=(len(s), 2)) / np.sqrt(s)[:, None] for each, s in zip(truth, sizes)]
    blocks = [np.column_stack(each) for each in zip(noisy, sizes)]
    assert block_noise(blocks) == pytest.approx([16, 16], rel=0.05)
    found, means = shrunk(blocks, block_noise(blocks)), mean_terms(blocks)
    for kind, total in ((1, 24), (0, 8)):
        slope = np.polyfit(means[kind::2, 0], found[kind::2, 0], 1)[0]
        assert slope == pytest.approx(1 / (1 + 16 / total), rel=0.1)


def simulated(n_prompts, n_blocks, spread, seed, total):
    """(true a and c of prompts, their noisy blocks)."""
    generator = np.random.default_rng(seed)
    level = np.exp(spread * generator.normal(size=n_prompts))
    truth = np.stack([level, 4 * level * np.exp(spread * generator.normal(size=n_prompts))], -1)
    return truth, sized([each * (0.5 + 0.5 * generator.exponential(size=(n_blocks, 2))) for each in truth])


@pytest.mark.parametrize("n_blocks, spread", [(4, 0.0), (4, 1.0), (2, 1.0)])
def test_the_reported_gain_is_that_of_the_allocations_made(n_blocks, spread):
    """The difference from equal groups, against the true one of the same two allocations, over 400 samples of blocks."""
    errors, self_fitted = [], []
    for seed in range(400):
        truth, blocks = simulated(20, n_blocks, spread, seed, 320)
        allocated, equal = crossed(blocks, 320)
        halves = [[each[::2] for each in blocks], [each[1::2] for each in blocks]]
        counts = [greedy(shrunk(half, block_noise(half if n_blocks > 3 else blocks)), 320) for half in halves]
        true = np.mean([equal_variance(truth, 320).mean() - group_variance(truth, each).mean() for each in counts])
        errors.append((equal - allocated).mean() - true)
        means = mean_terms(blocks)
        mine = greedy(means, 320)
        true = equal_variance(truth, 320).mean() - group_variance(truth, mine).mean()
        self_fitted.append(equal_variance(means, 320).mean() - group_variance(means, mine).mean() - true)
    z = [np.mean(each) / np.std(each) * np.sqrt(len(each)) for each in (errors, self_fitted)]
    assert abs(z[0]) < 3.5 and z[1] > 4, z


@pytest.mark.parametrize("n_blocks", [2, 4])
def test_equal_prompts_are_promised_no_gain(n_blocks):
    gains, promised = [], 0
    for seed in range(100):
        _, blocks = simulated(20, n_blocks, 0.0, seed, 320)
        found, counts = allocation(SimpleNamespace(block_terms=blocks), 320, PromptBootstrap(20, 200, seed))
        gains.append(found["gain"])
        promised += found["gain_ci95"][0] > 0
        assert counts.max() - counts.min() <= 14
    assert abs(np.mean(gains)) < 0.003 and promised <= 2


def test_prompts_that_differ_much_are_promised_some():
    _, blocks = simulated(60, 4, 1.0, 0, 960)
    found, counts = allocation(SimpleNamespace(block_terms=blocks), 960, PromptBootstrap(60, 500))
    assert found["gain_ci95"][0] > 0 and counts.sum() == 960
    assert found["gain"] == pytest.approx(1 - found["variance_allocated"] / found["variance_equal"])
    assert (found["continuations"]["least"], found["continuations"]["most"]) == (counts.min(), counts.max())


def test_the_terms_of_the_blocks_average_to_the_prompts_moments():
    prompts = reduce_prompts(make_records(n_prompts=3, sizes=(5, 7, 6)))
    assert group_variance(mean_terms(prompts.block_terms), 4) == pytest.approx(group_trace(prompts.pairs, 4))


def test_what_cannot_be_told_is_null_with_its_reason():
    bootstrap = PromptBootstrap(3, 50)
    found, counts = allocation(reduce_prompts(make_records(n_prompts=3, sizes=(6,))), 30, bootstrap)
    assert counts is None and found["gain"] is None and found["gain_ci95"] is None
    assert "3 of 3 prompts have one block only" in found["reasons"]["gain"] and "--M" in found["reasons"]["continuations"]
    silent = SimpleNamespace(block_terms=sized([np.zeros((2, 2))] * 3))
    found, counts = allocation(silent, 30, bootstrap)
    assert counts is None and found["reasons"]["gain"] == NO_GAIN
    with pytest.raises(ValueError, match="5 continuations are fewer than 2 for each of 3 prompts"):
        allocation(silent, 5, bootstrap)
    one, counts = allocation(SimpleNamespace(block_terms=sized([np.ones((4, 2))])), 30, PromptBootstrap(1, 50))
    assert counts.tolist() == [30] and one["gain"] is None and "one prompt" in one["reasons"]["gain"]
