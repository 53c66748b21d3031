"""Losses with a KL term against exact sums over all groups and all blocks of small policies."""

from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import random_policy

from Gradient_evaluation.stats.blocks import group_trace, pair_moments
from Gradient_evaluation.stats.kl import group_moments_with_kl, pair_moments_with_kl, reduce_with_kl
from Gradient_evaluation.stats.prompts import reduce_prompts

EXACT = dict(rel=1e-10, abs=1e-10)
BETA = 0.7


def with_kl(seed=5, n_outcomes=5, binary=False):
    """A policy and the vectors r of its outcomes."""
    policy = random_policy(seed, n_outcomes=n_outcomes, binary=binary)
    return policy, np.random.default_rng(seed + 1).normal(size=policy.scores.shape) + 0.3


def blocks_of(policy, kl, size):
    index, chance = policy.tuples(size)
    both = np.concatenate([policy.scores[index], kl[index]], axis=1)
    return both @ both.swapaxes(1, 2), policy.rewards[index], policy.lengths[index], chance


def exact(policy, kl, kind, size, std=1.0):
    """Mean, and covariance trace, of the estimate over all groups, from its definition."""
    index, chance = policy.tuples(size)
    rewards, lengths = policy.rewards[index], policy.lengths[index]
    centred = rewards - rewards.mean(1, keepdims=True)
    per = np.ones(index.shape)
    if kind.endswith("/length"):
        per = lengths
    if kind.endswith("/group_tokens"):
        per = np.repeat(lengths.sum(1, keepdims=True) / size, size, 1)
    advantages = {
        "leave_one_out": centred * size / (size - 1),
        "mean_only": centred,
        "std_trl": centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4),
    }[kind.partition("/")[0]]
    values = (((advantages / std)[..., None] * policy.scores[index] - BETA * kl[index]) / per[..., None]).mean(1)
    mean = chance @ values
    return mean, chance @ ((values - mean) ** 2).sum(1)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("size", [4, 5])
def test_grpo_with_kl_has_its_exact_trace_at_every_group_size(size, binary):
    policy, kl = with_kl(binary=binary)
    gram, rewards, _, chance = blocks_of(policy, kl, size)
    pairs = pair_moments_with_kl(gram, rewards, BETA)
    pairs = type(pairs)(*(chance @ part for part in pairs))
    for group_size in (2, 3, 4):
        mean, trace = exact(policy, kl, "leave_one_out", group_size)
        assert group_trace(pairs, group_size) == pytest.approx(trace, **EXACT)
        assert pairs.theta_sq == pytest.approx(mean @ mean, **EXACT)


def test_a_coefficient_of_zero_is_plain_grpo():
    policy, kl = with_kl()
    gram, rewards, _, _ = blocks_of(policy, kl, 4)
    for found, plain in zip(pair_moments_with_kl(gram, rewards, 0.0), pair_moments(gram[:, :4, :4], rewards)):
        assert found == pytest.approx(plain, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", ["leave_one_out", "mean_only/length", "std_trl", "std_trl/length", "std_trl/group_tokens"])
def test_groups_with_kl_are_unbiased_over_all_blocks(kind):
    policy, kl = with_kl(n_outcomes=4)
    gram, rewards, lengths, chance = blocks_of(policy, kl, 4)
    found = np.array([group_moments_with_kl(block, kind, 2, BETA, 1.3) for block in zip(gram, rewards, lengths)])
    mean, trace = exact(policy, kl, kind, 2, 1.3)
    assert chance @ found[:, 1] == pytest.approx(mean @ mean, **EXACT)
    assert chance @ (found[:, 0] - found[:, 1]) == pytest.approx(trace, **EXACT)
    assert np.isnan(group_moments_with_kl((gram[0], rewards[0], lengths[0]), kind, 3, BETA)[1])


def test_records_give_the_moments_of_the_losses_with_their_denominators():
    names, generator = ["grpo", "trl_dapo_batch", "trl_grpo"], np.random.default_rng(0)
    policies = [with_kl(seed, binary=True) for seed in range(3)]
    records = []
    for policy, kl in policies:
        blocks = []
        for _ in range(400):
            index = generator.choice(len(policy.probs), size=8, p=policy.probs)
            both = np.concatenate([policy.scores[index], kl[index]])
            blocks.append((both @ both.T, policy.rewards[index], policy.lengths[index]))
        plain = [(gram[:8, :8], rewards, lengths) for gram, rewards, lengths in blocks]
        records.append(SimpleNamespace(oracle_value=None, blocks=plain, kl_blocks=blocks))
    prompts, moments = reduce_with_kl(records, reduce_prompts(records), names, [4], BETA)
    length = np.mean([policy.probs @ policy.lengths for policy, _ in policies])
    second, first = (np.mean([policy.probs @ policy.rewards**power for policy, _ in policies]) for power in (2, 1))
    std = np.sqrt(second - first**2) + 1e-4
    cases = {
        "grpo": ("leave_one_out", 1.0, 1.0),
        "trl_dapo_batch": ("mean_only", std, length),
        "trl_grpo": ("std_trl/length", 1.0, 1.0),
    }
    for at, (policy, kl) in enumerate(policies):
        for name, (kind, divisor, tokens) in cases.items():
            mean, trace = exact(policy, kl, kind, 4, divisor)
            square, disjoint = moments[name, 4][at]
            assert square - disjoint == pytest.approx(trace / tokens**2, rel=0.1), name
            assert disjoint == pytest.approx(mean @ mean / tokens**2, rel=0.15, abs=0.02 * trace), name
        mean, trace = exact(policy, kl, "leave_one_out", 4)
        own = type(prompts.pairs)(*(part[at] for part in prompts.pairs))
        assert group_trace(own, 4) == pytest.approx(trace, rel=0.1)
