"""The share of silent groups, and the tokens of the groups that are kept: against sums over all samples and groups."""

from fractions import Fraction
from itertools import combinations
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import random_policy, sample_block, summary_of

from Gradient_evaluation.stats.estimators import moments_of
from Gradient_evaluation.stats.silent_groups import RewardCounts, reward_counts, subset_share
from Gradient_evaluation.stats.summary import reduce_prompts

EXACT = dict(rel=1e-10, abs=1e-12)


def with_rewards(policy, kind):
    """The policy with rewards of 0 and 1, three values that coincide in part, or all different."""
    rewards = {"zero_one": [0, 1, 0, 1], "graded": [-0.5, 1, 0.25, 1], "all_different": [-0.5, 1, 0.25, 0.3]}[kind]
    return policy._replace(rewards=np.array(rewards, dtype=float))


@pytest.mark.parametrize("kind", ["zero_one", "graded", "all_different"])
@pytest.mark.parametrize("n, group_size", [(4, 2), (5, 3), (6, 6)])
def test_silent_share_and_kept_tokens_are_unbiased(kind, n, group_size):
    policy = with_rewards(random_policy(3, n_outcomes=4), kind)
    groups, chance_of_group = policy.tuples(group_size)
    rewards = policy.rewards[groups]
    silent = (rewards == rewards[:, :1]).all(1)
    tokens = chance_of_group @ (policy.lengths[groups].mean(1) * ~silent)
    samples, chance = policy.tuples(n)
    counts = [reward_counts(policy.rewards[sample], policy.lengths[sample]) for sample in samples]
    assert chance @ [each.silent_share(group_size) for each in counts] == pytest.approx(chance_of_group @ silent, **EXACT)
    assert chance @ [each.kept_tokens(group_size) for each in counts] == pytest.approx(tokens, **EXACT)


def test_the_case_of_a_hard_prompt_comes_out_without_bias():
    """V = 0.03, n = G = 64: the share is 0.142; V^G + (1-V)^G at the measured V is 0.293 on average."""
    chance = [comb(64, c) * 0.03**c * 0.97 ** (64 - c) for c in range(65)]
    shares = [RewardCounts(np.array([0, 1]), np.array([64 - c, c]), np.ones(2)).silent_share(64) for c in range(65)]
    assert np.dot(chance, shares) == pytest.approx(0.97**64 + 0.03**64, rel=1e-9)
    assert np.dot(chance, shares) == pytest.approx(0.142, abs=5e-4)


@pytest.mark.parametrize("count, total, size", [(3, 5, 2), (2000, 4096, 512), (4095, 4096, 512), (511, 4096, 512), (0, 7, 1)])
def test_subset_shares_are_exact_where_binomials_overflow(count, total, size):
    exact = float(Fraction(comb(count, size), comb(total, size)))
    assert subset_share(np.array([count]), total, size)[0] == pytest.approx(exact, rel=1e-11)


def test_a_group_larger_than_the_sample_has_no_share():
    counts = reward_counts(np.array([0.0, 1.0, 1.0]), np.ones(3))
    assert np.isnan(counts.silent_share(4)) and np.isnan(counts.kept_tokens(4))


def test_a_group_above_the_continuations_has_no_p_keep():
    policy, generator = random_policy(1), np.random.default_rng(0)
    records = [SimpleNamespace(oracle_value=0.5, blocks=[sample_block(policy, 8, generator)]) for _ in range(6)]
    results = summary_of(records, [4, 100], 20, names=["dynamic_sampling", "dapo"])
    for name in ("dynamic_sampling", "dapo"):
        found = results["estimators"][name]
        assert found["trace_cov"][0] is not None and found["trace_cov"][1] is None
        assert found["continuations_per_group"][1] is None
        assert "at least 100 continuations" in results["reasons"][f"estimators.{name}.trace_cov"]


def test_p_keep_comes_from_all_continuations_of_a_prompt():
    """Two blocks, each of equal rewards: no group inside a block is kept, half of the groups of the prompt would be."""
    policy, generator = random_policy(1), np.random.default_rng(0)
    records = []
    for _ in range(6):
        blocks = [sample_block(policy, 8, generator) for _ in range(2)]
        equal = [(gram, np.full(8, float(at)), lengths) for at, (gram, _, lengths) in enumerate(blocks)]
        records.append(SimpleNamespace(oracle_value=0.5, blocks=equal))
    found = summary_of(records, [2], 20, names=["dynamic_sampling"])["estimators"]["dynamic_sampling"]
    assert found["continuations_per_group"][0] == pytest.approx(2 / (8 * 8 / comb(16, 2)))


def test_p_keep_beside_a_pair_is_that_of_all_groups():
    rewards, shares = np.array([0, 0, 0, 1, 1, 2, 2, 0.5]), []
    for i, j in combinations(range(8), 2):
        if rewards[i] != rewards[j]:
            rest = np.delete(rewards, [i, j]).tolist()
            shares.append(np.mean([len(set(group)) > 1 for group in combinations(rest, 3)]))
    counts = reward_counts(rewards, np.ones(8))
    assert counts.kept_beside_a_pair(3) == pytest.approx(np.mean(shares), **EXACT)
    assert np.isnan(counts.kept_beside_a_pair(7))
    assert reward_counts(np.array([0, 0, 1.0, 0]), np.ones(4)).kept_beside_a_pair(2) == 0.0


@pytest.mark.parametrize("V, n", [(0.1, 64), (0.9, 64), (0.5, 32)])
def test_the_squared_mean_over_p_keep_is_right_on_average(V, n):
    """Given c right ones, the unbiased ||theta||^2 has the mean c (c-1) (n-c) (n-c-1) / (n)_4 up to a constant."""
    K = 4
    c = np.arange(n + 1)
    chance = np.array([comb(n, k) * V**k * (1 - V) ** (n - k) for k in c])
    squared = c * (c - 1) * (n - c) * (n - c - 1) / (n * (n - 1) * (n - 2) * (n - 3))
    truth = V**2 * (1 - V) ** 2 / (1 - V**K - (1 - V) ** K)
    assert chance @ squared == pytest.approx(V**2 * (1 - V) ** 2, rel=1e-9)
    prompts = [SimpleNamespace(oracle_value=V, blocks=[(np.eye(n), np.arange(n) < k, np.ones(n))]) for k in c]
    reduced = reduce_prompts(prompts)
    reduced.pairs.disjoint[:] = squared
    found = moments_of(reduced, "dynamic_sampling", K)
    assert chance @ (found.weight * found.signal) == pytest.approx(truth, rel=0.02)
