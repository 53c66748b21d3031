"""Importance weights: the moments of blocks of another law q, weighted, are those of blocks of the policy itself."""

import json
from itertools import combinations
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import exact_pair_moments, leave_one_out, make_records, random_policy, sample_block, summary_of

from Gradient_evaluation.stats.blocks import mixture_coefficients, off_diagonal, pair_moments, prompt_only_coefficients
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.estimators import ESTIMATORS, leave_one_out_weights, sketch_weights
from Gradient_evaluation.stats.group_size.law import group_size_law
from Gradient_evaluation.stats.modules import layer_moments
from Gradient_evaluation.stats.prompts import cross_fitted_values, reduce_prompts
from Gradient_evaluation.stats.silent_groups import reward_counts
from Gradient_evaluation.stats.weighted import WeightedCounts, Weights, distinct_products, log_symmetric, self_normalised

EXACT = dict(rel=1e-10, abs=1e-10)
KINDS = pytest.mark.parametrize("centred, binary", [(True, True), (False, False)], ids=["binary", "not_centred_real"])
ALL = list(ESTIMATORS)


def another_law(policy, seed=3, spread=0.7):
    """(the policy under other probabilities q, the importance weights pi/q of its outcomes)."""
    probs = policy.probs * np.exp(spread * np.random.default_rng(seed).normal(size=len(policy.probs)))
    probs = probs / probs.sum()
    return policy._replace(probs=probs), policy.probs / probs


def weighted_block(other, weights, size, generator):
    index = generator.choice(len(other.probs), size=size, p=other.probs)
    gram = other.scores[index] @ other.scores[index].T
    return gram, other.rewards[index], other.lengths[index], weights[index]


# --- the mean over ALL blocks of q is the mean over all blocks of the policy ---


@KINDS
@pytest.mark.parametrize("size", [4, 5])
def test_weighted_moments_under_q_are_those_under_the_policy(centred, binary, size):
    policy = random_policy(5, n_outcomes=5, centred=centred, binary=binary)
    other, of_outcome = another_law(policy)
    index, chance = other.tuples(size)
    gram, rewards, _, _ = other.blocks(size)
    weights = Weights(of_outcome[index])
    _, _, _, under_policy = policy.blocks(size)
    for found, truth in zip(pair_moments(gram, rewards, weights), exact_pair_moments(policy)):
        assert chance @ found == pytest.approx(truth, **EXACT)
    for moments in (prompt_only_coefficients, mixture_coefficients):
        assert chance @ moments(gram, rewards, weights) == pytest.approx(under_policy @ moments(gram, rewards), **EXACT)
    mean = policy.probs @ policy.scores
    assert chance @ off_diagonal(gram, weights.values, weights.values) == pytest.approx(mean @ mean, **EXACT)
    products = chance @ distinct_products(weights.values).T
    assert products == pytest.approx([1, 1, 1, 1], **EXACT)  # so dividing by them moves no mean but by their noise


@KINDS
def test_the_weighted_direction_is_thetas(centred, binary):
    policy = random_policy(5, n_outcomes=5, centred=centred, binary=binary)
    other, of_outcome = another_law(policy)
    index, chance = other.tuples(4)
    total = 0.0
    for members, weight in zip(index, chance):
        w = of_outcome[members]
        pairs = (w.sum() ** 2 - (w**2).sum()) / 12  # what leave_one_out_weights divides by, over that of equal weights
        total += weight * pairs * leave_one_out_weights(policy.rewards[members], np.ones(4), w) @ policy.scores[members]
    assert total == pytest.approx(policy.moments(leave_one_out, 2)[0], **EXACT)
    plain = leave_one_out_weights(policy.rewards, np.ones(5))
    assert leave_one_out_weights(policy.rewards, np.ones(5), np.ones(5)) == pytest.approx(plain, **EXACT)


def test_products_of_distinct_members_against_all_sets():
    weights = np.random.default_rng(0).exponential(size=7)
    sets = [np.mean([np.prod(weights[list(each)]) for each in combinations(range(7), k)]) for k in (1, 2, 3, 4)]
    assert distinct_products(weights) == pytest.approx(sets, **EXACT)
    first, second = self_normalised([weights, weights[:5] * 2])
    together = np.concatenate([weights, 2 * weights[:5]]).mean()
    assert first.values == pytest.approx(weights / together)
    each = [distinct_products(one.values) for one in (first, second)]
    assert first.shares == pytest.approx(np.average(each, axis=0, weights=[7, 5]))


# --- silent groups ---


def test_each_set_of_equal_rewards_is_a_silent_group_of_its_weight():
    generator = np.random.default_rng(1)
    rewards, weights = generator.integers(0, 3, 9).astype(float), generator.exponential(size=9)
    counts = WeightedCounts(rewards, np.ones(9), weights)
    for size in (2, 3, 4):
        sets = [list(each) for each in combinations(range(9), size)]
        chances = np.array([np.prod(weights[each]) for each in sets])
        silent = np.array([len(set(rewards[each])) == 1 for each in sets])
        assert counts.silent_share(size) == pytest.approx(chances @ silent / chances.sum(), **EXACT)
    assert np.isnan(counts.silent_share(10))
    plain = reward_counts(rewards, np.ones(9))
    equal = WeightedCounts(rewards, np.ones(9), np.full(9, 0.3))
    assert [equal.silent_share(G) for G in (2, 3)] == pytest.approx([plain.silent_share(G) for G in (2, 3)], **EXACT)


def test_the_weighted_sets_are_unbiased_for_the_silent_share():
    policy = random_policy(5, n_outcomes=4)
    other, of_outcome = another_law(policy)
    index, chance = other.tuples(5)
    for size in (2, 3):
        found = 0.0
        for members, probability in zip(index, chance):
            rewards, w = policy.rewards[members], of_outcome[members]
            sums = [np.exp(log_symmetric(w[rewards == value], size)[-1]) for value in set(rewards.tolist())]
            found += probability * sum(sums) / comb(5, size)
        truth = sum((policy.probs @ (policy.rewards == value)) ** size for value in (0, 1))
        assert found == pytest.approx(truth, **EXACT)


def test_hundreds_of_uneven_weights_give_a_share():
    generator = np.random.default_rng(2)
    rewards, weights = (generator.random(600) < 0.01).astype(float), np.exp(3 * generator.normal(size=600)) * 1e-30
    shares = [WeightedCounts(rewards, np.ones(600), weights).silent_share(size) for size in (2, 64, 512)]
    assert np.isfinite(shares).all() and 1 >= shares[0] >= shares[1] >= shares[2] >= 0


# --- through the results ---


@pytest.mark.parametrize("constant", [1.0, 0.3])
def test_equal_weights_change_no_bit(constant):
    records = make_records(n_prompts=5, sizes=(9, 12), binary=False)
    for record in records:
        record.greedy_reward = 0.25
    weighted = [
        SimpleNamespace(**{**vars(record), "blocks": [(*block, np.full(len(block[1]), constant)) for block in record.blocks]})
        for record in records
    ]
    if constant != 1:  # the mean of equal numbers may be off by a bit, and only that
        plain, other = (summary_of(each, [2, 4], 100, ALL)["conditional_on_x"] for each in (records, weighted))
        assert all(plain[name] == pytest.approx(other[name], rel=1e-12) for name in plain)
        assert not reduce_prompts(weighted).weighted
        return
    for value in (lambda record: record.oracle_value, lambda record: None):
        for record, other in zip(records, weighted):
            record.oracle_value = other.oracle_value = value(record)
        assert summary_of(weighted, [2, 4], 100, ALL) == summary_of(records, [2, 4], 100, ALL)
    gram, rewards = records[0].blocks[0][:2]
    grams, ones = np.stack([gram, 2 * gram]), Weights(np.ones(len(rewards)))
    assert np.array_equal(layer_moments(grams, rewards, ones), layer_moments(grams, rewards))
    for moments in (prompt_only_coefficients, mixture_coefficients, pair_moments):
        assert np.array_equal(moments(gram, rewards, ones), moments(gram, rewards))


def records_of(policy, n_prompts, sizes, seed, spread=0.7, weigh=True):
    other, of_outcome = another_law(policy, spread=spread)
    generator = np.random.default_rng(seed)
    blocks = [[weighted_block(other, of_outcome, size, generator) for size in sizes] for _ in range(n_prompts)]
    return [SimpleNamespace(oracle_value=None, blocks=[b if weigh else b[:3] for b in each]) for each in blocks]


def test_results_of_weighted_continuations_are_the_policys():
    """600 prompts of one policy: means within their error and a bias of 1.5%; without the weights they are far off."""
    policy = random_policy(9, n_outcomes=12)
    generator = np.random.default_rng(0)
    own = [
        SimpleNamespace(oracle_value=None, blocks=[sample_block(policy, 12, generator) for _ in range(4)]) for _ in range(600)
    ]
    measured = {}
    for name, records in (
        ("own", own),
        ("weighted", records_of(policy, 600, [12] * 4, 1)),
        ("ignored", records_of(policy, 600, [12] * 4, 1, weigh=False)),
    ):
        prompts = reduce_prompts(records)
        found = {kind: prompts.coefficients[:, at] for at, kind in enumerate("AND")}
        found |= {"zeta1": prompts.pairs.zeta1, "zeta2": prompts.pairs.zeta2, "reward": prompts.mean_reward}
        found |= {"by_length": prompts.pairs_by_length.zeta2, "oracle": prompts.cross_fitted_trace}
        found |= {"norm": prompts.score_norm_sq[:, 0], "right": prompts.outcome_share[:, 1]}
        found |= {"silent": np.array([each.silent_share(4) for each in prompts.outcomes])}
        found |= {"tokens": np.array([each.mean_length for each in prompts.outcomes])}
        measured[name] = {
            kind: (each.mean(), each.std() / np.sqrt(len(each))) for kind, each in found.items() if kind not in "AN"
        }
    far = 0
    for kind, (truth, error) in measured["own"].items():
        mean, own_error = measured["weighted"][kind]
        assert abs(mean - truth) < 4 * np.hypot(error, own_error) + 0.015 * abs(truth), kind
        far += abs(measured["ignored"][kind][0] - truth) > 0.05 * abs(truth)
    assert far >= 8


@pytest.mark.parametrize("spread, less", [(0.3, 0.98), (1.0, 0.7)])
def test_self_normalised_moments_have_less_noise_and_little_bias(spread, less):
    policy = random_policy(1, n_outcomes=40)
    other, of_outcome = another_law(policy, spread=spread)
    index = np.random.default_rng(0).choice(40, size=(1500, 4, 16), p=other.probs)
    gram = (policy.scores @ policy.scores.T)[index[..., :, None], index[..., None, :]]
    rewards, weights = policy.rewards[index], of_outcome[index]
    raw = pair_moments(gram, rewards, Weights(weights))
    shares = distinct_products(weights).mean(-1)
    own = [each.mean(-1) / shares[k] for each, k in zip(raw, (1, 2, 3))]
    truth = exact_pair_moments(policy)
    error = {}
    for name, (_, shared, disjoint) in (("raw", [each.mean(-1) for each in raw]), ("self-normalised", own)):
        found = shared - disjoint - truth.zeta1
        error[name] = np.sqrt((found**2).mean())
        assert abs(found.mean()) < 0.03 * truth.zeta1 + 4 * found.std() / np.sqrt(1500)
    assert error["self-normalised"] < less * error["raw"]


def test_what_has_no_weighted_form_is_null_with_its_reason():
    results = summary_of(records_of(random_policy(9), 5, (12, 12), 2), [4], 50, ALL)
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    for name, entry in ESTIMATORS.items():
        missing = entry.group or entry.drop_silent or name == "greedy"
        assert (results["estimators"][name]["trace_cov"] == [None]) == bool(missing), name
        if missing and name != "greedy":
            assert "importance weights" in results["reasons"][f"estimators.{name}.trace_cov"]
    with pytest.raises(ValueError, match="importance weights"):
        sketch_weights(["grpo", "std_verl"], np.arange(8) % 2.0, np.ones(8), 4, np.arange(1, 9.0))
    assert sketch_weights(["grpo"], np.arange(8) % 2.0, np.ones(8), 4, np.arange(1, 9.0)).shape == (1, 8)


def test_the_group_size_law_takes_weighted_prompts():
    prompts = reduce_prompts(records_of(random_policy(9), 5, (12, 12), 2))
    law = group_size_law(prompts, None, PromptBootstrap(5, 50))
    assert law["c2"] == pytest.approx(4 * prompts.pairs.zeta1.mean()) and law["silent_share"]["share"][0] < 1


def test_only_ratios_of_weights_count():
    records = records_of(random_policy(9), 4, (12, 12), 2)
    scaled = [
        SimpleNamespace(oracle_value=None, blocks=[(*block[:3], block[3] * 1e-200) for block in record.blocks])
        for record in records
    ]
    first, second = (summary_of(each, [2, 4], 50) for each in (records, scaled))
    for name, curve in first["conditional_on_x"].items():
        assert curve == pytest.approx(second["conditional_on_x"][name], rel=1e-9)


def test_cross_fitted_values_are_weighted():
    rewards, weights = [np.zeros(4), np.array([0.0, 1.0, 1.0, 0.0])], [np.ones(4), np.array([3.0, 1.0, 1.0, 3.0])]
    V, square = cross_fitted_values(rewards, weights)[0]
    assert V == 2 / 8 and square == pytest.approx(2 * 1 / (64 - 20))


@pytest.mark.parametrize("bad", [[-1.0, 1, 1, 1, 1], [np.inf, 1, 1, 1, 1], [np.nan, 1, 1, 1, 1], [0.0] * 5, [1.0] * 4])
def test_bad_weights_are_refused(bad):
    records = make_records(n_prompts=2, sizes=(5,))
    records[1].blocks = [(*records[1].blocks[0], np.array(bad))]
    with pytest.raises(ValueError, match="prompt 1, block 0: the importance weights are not 5 finite numbers"):
        summary_of(records, [4])
