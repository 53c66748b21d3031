"""A prompt whose blocks differ in size, as those of a grown folder do: unbiased, and a small block does no harm."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import make_records, random_policy, sample_block

from Gradient_evaluation.stats.blocks import group_trace, prompt_only_coefficients, prompt_only_trace
from Gradient_evaluation.stats.modules import layer_moments, mean_moments
from Gradient_evaluation.stats.prompts import _variance_of_mean, best_baselines, cross_fitted_values, reduce_prompts
from Gradient_evaluation.stats.summary import prompt_trace_covs

EXACT = dict(rel=1e-10, abs=1e-10)


def leave_one_out(scores, rewards, lengths):
    size = rewards.shape[-1]
    baselines = (rewards.sum(-1, keepdims=True) - rewards) / (size - 1)
    return ((rewards - baselines)[..., None] * scores).mean(-2)


def record_of(*blocks, value=None):
    return SimpleNamespace(oracle_value=value, blocks=list(blocks))


def alone(record):
    """The moments of each block alone."""
    return [reduce_prompts([record_of(block, value=record.oracle_value)], [2, 6], ["std_verl"]) for block in record.blocks]


@pytest.mark.parametrize("known", [True, False], ids=["V(x)", "cross-fitted"])
def test_two_blocks_of_unlike_sizes_are_unbiased(known):
    """Over all pairs of a block of 4 and one of 5, each with its probability: the exact traces."""
    policy = random_policy(5, n_outcomes=2)
    small, large = (list(zip(*policy.blocks(size))) for size in (4, 5))
    chance, records = [], []
    for (*one, p), (*other, q) in product(small, large):
        chance.append(p * q)
        records.append(record_of(one, other, value=policy.value if known else None))
    prompts, chance = reduce_prompts(records, [2], ["std_verl"]), np.array(chance)
    assert chance.sum() == pytest.approx(1)
    oracle = lambda scores, rewards, lengths: ((rewards - policy.value)[..., None] * scores).mean(-2)  # noqa: E731
    naive = lambda scores, rewards, lengths: (rewards[..., None] * scores).mean(-2)  # noqa: E731
    for size in (2, 3):
        found = prompt_trace_covs(prompts, size)
        for name, estimator in (("grpo", leave_one_out), ("oracleV", oracle), ("naive", naive)):
            assert chance @ np.array(found[name]) == pytest.approx(policy.moments(estimator, size)[1], **EXACT)
    assert chance @ prompts.pairs.theta_sq == pytest.approx(policy.theta @ policy.theta, **EXACT)
    assert chance @ prompts.mean_reward == pytest.approx(policy.value, **EXACT)
    (case,) = prompts.groups
    exact = chance @ np.stack([prompts.groups[case].square, prompts.groups[case].inner], -1)
    one = reduce_prompts([record_of(block[:3], value=policy.value) for block in small], [2], ["std_verl"]).groups[case]
    assert exact == pytest.approx(np.array([block[3] for block in small]) @ np.stack([one.square, one.inner], -1), **EXACT)


def test_means_over_blocks_count_them_by_size_or_by_pairs():
    """Against the moments of each block alone."""
    for record in make_records(n_prompts=3, sizes=(4, 9, 5), binary=False):
        whole, parts, sizes = reduce_prompts([record], [2, 6], ["std_verl"]), alone(record), [4, 9, 5]
        pairs = [4 * 3, 9 * 8, 5 * 4]
        for name in ("mean_reward", "score_mean_sq", "score_norm_sq", "outcome_share"):
            counts = pairs if name == "score_mean_sq" else sizes
            truth = np.average([getattr(part, name)[0] for part in parts], axis=0, weights=counts)
            assert getattr(whole, name)[0] == pytest.approx(truth, **EXACT), name
        for name in ("pairs", "pairs_by_length"):
            truth = np.average([np.array(getattr(part, name))[:, 0] for part in parts], axis=0, weights=pairs)
            assert np.array(getattr(whole, name))[:, 0] == pytest.approx(truth, **EXACT), name
        for (kind, size), moments in whole.groups.items():
            found = [np.array(part.groups[kind, size])[:, 0] for part in parts]
            for position, value in enumerate(np.array(moments)[:, 0]):
                usable = [(each[position], n) for each, n in zip(found, pairs) if np.isfinite(each[position])]
                truth = sum(v * n for v, n in usable) / sum(n for _, n in usable) if usable else np.nan
                assert value == pytest.approx(truth, **EXACT, nan_ok=True)
        assert whole.mean_reward[0] == pytest.approx(np.concatenate([block[1] for block in record.blocks]).mean(), **EXACT)


def test_cross_fitted_traces_count_blocks_by_size():
    record = make_records(n_prompts=1, sizes=(4, 9, 5), binary=False)[0]
    record = record_of(*record.blocks)
    coefficients = np.array([prompt_only_coefficients(gram, rewards) for gram, rewards, _ in record.blocks])
    V, square = cross_fitted_values([rewards for _, rewards, _ in record.blocks]).T
    traces = coefficients[:, 0] - 2 * V * coefficients[:, 1] + square * coefficients[:, 2]
    found = reduce_prompts([record])
    assert found.cross_fitted_trace[0] == pytest.approx(np.average(traces, weights=[4, 9, 5]), rel=1e-8)
    best = prompt_only_trace(coefficients, best_baselines(record.blocks))
    assert found.best_trace[0] == pytest.approx(np.average(best, weights=[4, 9, 5]), rel=1e-8)


def test_moments_of_modules_add_up_to_those_of_the_prompt():
    """Two modules that share each score, over blocks of 4, 9 and 5, one at a time and as two means of which one is of two."""
    record, generator = make_records(n_prompts=1, sizes=(4, 9, 5), binary=False)[0], np.random.default_rng(0)
    parts, whole = [], reduce_prompts([record])
    for gram, rewards, _ in record.blocks:
        half = generator.normal(size=gram.shape)
        parts.append(layer_moments(np.stack([half + half.T, gram - half - half.T]), rewards))
    found = mean_moments(parts, [[4], [9], [5]])
    assert found[:, 3:].sum(0) == pytest.approx(np.array(whole.pairs)[:, 0], rel=1e-8)
    coefficients = np.average([part[:, :3] for part in parts], axis=0, weights=[4, 9, 5])
    assert found[:, :3] == pytest.approx(coefficients, **EXACT)
    assert mean_moments([mean_moments(parts[:2], [[4], [9]]), parts[2]], [[4, 9], [5]]) == pytest.approx(found, **EXACT)


def test_a_small_block_does_not_add_noise():
    """1500 prompts of a block of 4 and one of 16: the variance against that of the plain mean, and of the 16 alone."""
    policy, generator = random_policy(2), np.random.default_rng(0)
    records = [record_of(*(sample_block(policy, size, generator) for size in (4, 16)), value=0.5) for _ in range(1500)]
    whole = reduce_prompts(records)
    small, large = (reduce_prompts([record_of(each.blocks[at], value=0.5) for each in records]) for at in (0, 1))
    quantities = {
        "GRPO's trace": lambda prompts: group_trace(prompts.pairs, 8),
        "||theta||^2": lambda prompts: prompts.pairs.theta_sq,
        "mean reward": lambda prompts: prompts.mean_reward,
        "squared norm": lambda prompts: prompts.score_norm_sq[:, 0],
    }
    for name, of in quantities.items():
        found, alike, larger = of(whole).var(), ((of(small) + of(large)) / 2).var(), of(large).var()
        assert found < 0.8 * alike and found < 1.02 * larger, (name, found / alike, found / larger)


def test_the_noise_of_a_mean_over_unequal_blocks():
    """Values whose variance falls as 1/size: the estimate against the variance of the weighted mean; equal sizes as before."""
    values = np.random.default_rng(1).normal(size=(4000, 3)) / np.sqrt([4, 16, 6])
    found = np.mean([_variance_of_mean(each, [4, 16, 6]) for each in values])
    assert found == pytest.approx(1 / 26, rel=0.05)
    assert _variance_of_mean(values[0], [8, 8, 8]) == pytest.approx(values[0].var(ddof=1) / 3)
