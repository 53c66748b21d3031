"""Every estimator of the table against brute force: exact sums over all groups and all blocks, no sampling."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import random_policy, sample_block, summary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from Gradient_evaluation.stats.blocks import (
    GroupMoments,
    PairMoments,
    group_moments,
    group_trace,
    mixture_coefficients,
    pair_moments,
    partitions,
    prompt_only_coefficients,
    prompt_only_trace,
)
from Gradient_evaluation.stats.estimators import (
    ALIASES,
    DEFAULT,
    ESTIMATORS,
    Estimator,
    extra_rollouts,
    group_rules,
    moments_of,
    resolve,
    sketch_weights,
    sketched_names,
    update_weights,
)
from Gradient_evaluation.stats.moments import mean_of_others, mixture_trace, prompt_only, shrinkage_weights
from Gradient_evaluation.stats.prompts import CLASSES, PromptMoments
from Gradient_evaluation.stats.summary import effective_group_size, prompt_trace_covs, reduce_prompts

EXACT = dict(rel=1e-10, abs=1e-10)
GREEDY = 0.25
KINDS = list(dict.fromkeys(entry.group for entry in ESTIMATORS.values() if entry.group))
seeds = st.integers(0, 2**32 - 1)


# --- the brute-force estimators, from their definitions: scores (n, K, d), rewards, lengths (n, K) -> (n, d) ---


def other_members(rewards):
    return (rewards.sum(-1, keepdims=True) - rewards) / (rewards.shape[-1] - 1)


def group_std(rewards):
    size = rewards.shape[-1]
    mean = rewards.sum(-1, keepdims=True) / size
    return np.sqrt(((rewards - mean) ** 2).sum(-1, keepdims=True) / (size - 1))


def over_std(rewards):
    return (rewards - rewards.mean(-1, keepdims=True)) / (group_std(rewards) + 1e-6)


def trl_std(rewards):
    return (rewards - rewards.mean(-1, keepdims=True)) / (group_std(rewards) + 1e-4)


def minus_mean(rewards):
    return rewards - rewards.mean(-1, keepdims=True)


def loo_over_std(rewards):
    equal = (rewards == rewards[:, :1]).all(-1)[:, None]
    return np.where(equal, 0, (rewards - other_members(rewards)) / np.where(equal, 1, group_std(rewards)))


def mean_of(advantages, scores):
    return (advantages[..., None] * scores).mean(-2)


def kept_groups(policy, group_size):
    """Indices (n, K) of the groups whose rewards are not all equal, and their probabilities (n,)."""
    index, chance = policy.tuples(group_size)
    kept = np.array([len(set(row)) > 1 for row in policy.rewards[index].tolist()])
    return index[kept], chance[kept]


def batch_length(policies, kept_at=None):
    """Mean tokens of a continuation over all prompts; over their groups of ``kept_at`` that are not silent."""
    if kept_at is None:
        return np.mean([policy.probs @ policy.lengths for policy in policies])
    groups = [
        (policy.lengths[index].mean(-1), chance) for policy in policies for index, chance in [kept_groups(policy, kept_at)]
    ]
    return sum(chance @ length for length, chance in groups) / sum(chance.sum() for _, chance in groups)


def batch_std(policies):
    """Standard deviation of the rewards of all prompts, and TRL's 1e-4."""
    first, second = (np.mean([policy.probs @ policy.rewards**power for policy in policies]) for power in (1, 2))
    return np.sqrt(second - first**2) + 1e-4


def brute_force(name, policies, index, group_size):
    """The function to enumerate for prompt ``index`` among ``policies``."""
    policy = policies[index]
    square = (policy.scores**2).sum(-1)
    others = np.mean([each.value for at, each in enumerate(policies) if at != index])
    baselines = {
        "naive": 0.0,
        "oracleV": policy.value,
        "best_baseline": policy.probs @ (policy.rewards * square) / (policy.probs @ square),
        "mean_reward": others,
        "greedy": GREEDY,
    }
    if name in baselines:
        return lambda g, r, n: mean_of(r - baselines[name], g)
    if name == "shrinkage":
        weight = shrinkage_weights(exact_prompts(policies), group_size)[index]
        return lambda g, r, n: mean_of(r - weight * other_members(r) - (1 - weight) * others, g)
    if name.endswith("_batch"):
        return lambda g, r, n: brute_force(f"{name[:-6]}_none", policies, index, group_size)(g, r, n) / batch_std(policies)
    return {
        "trl_grpo": lambda g, r, n: mean_of(trl_std(r) / n, g),
        "trl_grpo_none": lambda g, r, n: mean_of(minus_mean(r) / n, g),
        "trl_bnpo": lambda g, r, n: (trl_std(r)[..., None] * g).sum(-2) / n.sum(-1, keepdims=True),
        "trl_bnpo_none": lambda g, r, n: (minus_mean(r)[..., None] * g).sum(-2) / n.sum(-1, keepdims=True),
        "trl_dapo": lambda g, r, n: mean_of(trl_std(r), g) / batch_length(policies),
        "trl_dapo_none": lambda g, r, n: mean_of(minus_mean(r), g) / batch_length(policies),
        "trl_dr_grpo": lambda g, r, n: mean_of(trl_std(r), g),
        "trl_dr_grpo_none": lambda g, r, n: mean_of(minus_mean(r), g),
        "verl_seq_mean_token_mean": lambda g, r, n: mean_of(over_std(r) / n, g),
        "grpo": lambda g, r, n: mean_of(r - other_members(r), g),
        "dr_grpo": lambda g, r, n: mean_of(r - r.mean(-1, keepdims=True), g),
        "length_normalised": lambda g, r, n: mean_of((r - other_members(r)) / n, g),
        "std_verl": lambda g, r, n: mean_of(over_std(r), g),
        "std_paper": lambda g, r, n: mean_of(loo_over_std(r), g),
        "opo": lambda g, r, n: mean_of(r - (n * r).sum(-1, keepdims=True) / n.sum(-1, keepdims=True), g),
        "token_mean": lambda g, r, n: mean_of(r - other_members(r), g) / batch_length(policies),
        "verl_default": lambda g, r, n: mean_of(over_std(r), g) / batch_length(policies),
        "dynamic_sampling": lambda g, r, n: mean_of(r - other_members(r), g),
        "dapo": lambda g, r, n: mean_of(over_std(r), g) / batch_length(policies, group_size),
    }[name]


def enumerated(policy, estimator, group_size, drop_equal=False):
    """P(keep), and mean (d,), trace and second moment of the estimator given that the group is kept."""
    index, chance = policy.tuples(group_size)
    rewards = policy.rewards[index]
    values = estimator(policy.scores[index], rewards, policy.lengths[index])
    kept = np.array([len(set(row)) > 1 for row in rewards.tolist()]) if drop_equal else np.ones(len(index), bool)
    share = chance[kept].sum()
    chance, values = chance[kept] / share, values[kept]
    mean = chance @ values
    return share, mean, float(chance @ ((values - mean) ** 2).sum(-1)), float(chance @ (values**2).sum(-1))


# --- exact moments instead of estimated ones ---


def exact_pairs(policy, scores) -> PairMoments:
    kernel = (scores[:, None] - scores[None]) * (policy.rewards[:, None] - policy.rewards[None])[..., None] / 2
    given_first = np.einsum("j,ijd->id", policy.probs, kernel)
    mean = policy.probs @ given_first
    chance = np.outer(policy.probs, policy.probs)
    return PairMoments((chance * (kernel**2).sum(-1)).sum(), policy.probs @ (given_first**2).sum(-1), mean @ mean)


def exact_prompts(policies, group_sizes=()) -> PromptMoments:
    """PromptMoments with exact sums of the policies in every field the table reads."""
    rows = []
    for policy in policies:
        p, z, g = policy.probs, policy.rewards, policy.scores
        square, mean, theta = (g**2).sum(-1), p @ g, policy.theta
        a, n, d = p @ (z**2 * square) - theta @ theta, p @ (z * square) - theta @ mean, p @ square - mean @ mean
        best = p @ (z * square) / (p @ square)
        kernel_given_first = ((g[:, None] - g[None]) * (z[:, None] - z[None])[..., None] / 2 * p[None, :, None]).sum(1)
        h = p @ kernel_given_first
        own = (kernel_given_first * g).sum(-1)
        mixture = [p @ (z * own) - h @ theta, p @ own - h @ mean]
        by_length = exact_pairs(policy, g / policy.lengths[:, None])
        best_trace = a - 2 * best * n + best**2 * d
        rows.append((policy.value, (a, n, d), best_trace, exact_pairs(policy, g), by_length, mixture))
    value, coefficients, best_trace, pairs, by_length, mixture = (np.array(column) for column in zip(*rows))
    groups = {
        (kind, size): GroupMoments(*np.array([exact_group(policy, kind, size) for policy in policies]).T)
        for kind in KINDS
        for size in group_sizes
    }
    unused = np.ones(len(policies))
    return PromptMoments(
        oracle_value=value,
        greedy_reward=np.full(len(policies), GREEDY),
        mean_reward=value,
        centre=np.zeros(len(policies)),
        coefficients=coefficients,
        best_trace=best_trace,
        pairs=PairMoments(*pairs.T),
        pairs_by_length=PairMoments(*by_length.T),
        mixture=mixture,
        groups=groups,
        score_mean_sq=unused,
        score_evidence=unused,
        score_norm_sq=unused,
        outcome_share=unused,
        n_outcomes=unused,
        n_blocks=unused,
        theta_sq_noise=unused,
        outcomes=[ExactOutcomes(policy) for policy in policies],
    )


def exact_group(policy, kind, size) -> GroupMoments:
    """The exact GroupMoments of one kind of advantages."""
    name = next(
        name for name, entry in ESTIMATORS.items() if entry.group == kind and not entry.per_token and not entry.batch_std
    )
    _, mean, _, second = enumerated(policy, brute_force(name, [policy] * 2, 0, size), size)
    theta = policy.probs @ ((policy.rewards - policy.value)[:, None] * policy.scores)  # the mean of the pair kernel
    return GroupMoments(second, mean @ mean, mean @ theta)


class ExactOutcomes:
    """Instead of RewardCounts: the true chances of every group, not a sample."""

    def __init__(self, policy):
        self.policy = policy
        self.zero_one = set(policy.rewards.tolist()) <= {0, 1}
        self.mean_length = policy.probs @ policy.lengths
        self.variance = policy.probs @ (policy.rewards - policy.value) ** 2

    def silent_share(self, group_size):
        return 1 - kept_groups(self.policy, group_size)[1].sum()

    def kept_beside_a_pair(self, group_size):
        return 1 - self.silent_share(group_size)

    def kept_tokens(self, group_size):
        index, chance = kept_groups(self.policy, group_size)
        return chance @ self.policy.lengths[index].mean(-1)


def some_policies(seed, centred=True, binary=True):
    return [random_policy(seed + at, n_outcomes=5 + (at == 0), centred=centred, binary=binary) for at in range(3)]


# --- the formulas fed with exact probabilities ---


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "real"])
@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_moments_are_those_of_the_enumerated_estimator(name, group_size, binary):
    check_moments(some_policies(21, binary=binary), name, group_size)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**30), binary=st.booleans(), group_size=st.sampled_from([2, 3]))
def test_every_estimator_has_its_exact_moments(seed, binary, group_size):
    for name in ESTIMATORS:
        check_moments(some_policies(seed, binary=binary), name, group_size)


def check_moments(policies, name, group_size):
    prompts, entry = exact_prompts(policies, [group_size]), ESTIMATORS[name]
    found = moments_of(prompts, name, group_size)
    for at, policy in enumerate(policies):
        drop = entry.drop_silent
        share, mean, trace, _ = enumerated(policy, brute_force(name, policies, at, group_size), group_size, drop)
        assert found.trace[at] == pytest.approx(trace, **EXACT)
        assert found.signal[at] == pytest.approx(mean @ mean, **EXACT)
        if drop:
            assert found.weight[at] == pytest.approx(share, **EXACT)
        if entry.other_target:
            assert entry.other_target in found.squared_bias.reason and found.mse == found.squared_bias
        else:
            bias = ((mean - policy.theta) ** 2).sum()
            assert found.squared_bias[at] == pytest.approx(bias, **EXACT)
            assert found.mse[at] == pytest.approx(trace + bias, **EXACT)
        if found.scale is not None:
            assert mean == pytest.approx(found.scale * policy.theta, **EXACT)


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_traces_hold_for_scores_whose_mean_is_not_zero(name, group_size):
    policies = some_policies(4, centred=False, binary=False)
    found = moments_of(exact_prompts(policies, [group_size]), name, group_size)
    drop = ESTIMATORS[name].drop_silent
    for at, policy in enumerate(policies):
        _, _, trace, _ = enumerated(policy, brute_force(name, policies, at, group_size), group_size, drop)
        assert found.trace[at] == pytest.approx(trace, **EXACT)


def test_dr_grpo_has_bias_minus_theta_over_k_and_opo_has_one():
    policies = some_policies(3)
    _, mean, _, _ = enumerated(policies[0], brute_force("dr_grpo", policies, 0, 3), 3)
    assert mean - policies[0].theta == pytest.approx(-policies[0].theta / 3, **EXACT)
    assert moments_of(exact_prompts(policies, [3]), "opo", 3).squared_bias.min() > 1e-6


# --- the block statistics over ALL blocks ---


@pytest.mark.parametrize("centred", [True, False], ids=["centred", "not_centred"])
@pytest.mark.parametrize("size", [4, 5])
def test_mixture_and_length_statistics_are_unbiased(centred, size):
    policy = random_policy(6, centred=centred, binary=False)
    gram, rewards, lengths, chance = policy.blocks(size)
    exact = exact_prompts([policy] * 3)
    assert chance @ mixture_coefficients(gram, rewards) == pytest.approx(exact.mixture[0], **EXACT)
    by_length = pair_moments(gram / (lengths[:, :, None] * lengths[:, None, :]), rewards)
    for estimate, truth in zip(by_length, exact.pairs_by_length):
        assert chance @ estimate == pytest.approx(truth[0], **EXACT)


@settings(max_examples=8, deadline=None)
@given(seed=seeds, centred=st.booleans(), binary=st.booleans(), weight=st.floats(0, 1), baseline=st.floats(-1, 2))
def test_any_mixture_with_a_constant_has_its_exact_trace(seed, centred, binary, weight, baseline):
    policy = random_policy(seed, centred=centred, binary=binary)
    gram, rewards, _, chance = policy.blocks(4)
    pairs = PairMoments(*(np.array([chance @ part]) for part in pair_moments(gram, rewards)))
    prompts = SimpleNamespace(
        centre=0.0,
        pairs=pairs,
        mixture=np.array([chance @ mixture_coefficients(gram, rewards)]),
        coefficients=np.array([chance @ prompt_only_coefficients(gram, rewards)]),
    )
    for group_size in (2, 3):
        _, trace = policy.moments(
            lambda g, r, n: mean_of(r - weight * other_members(r) - (1 - weight) * baseline, g), group_size
        )
        assert mixture_trace(prompts, group_size, weight, np.array([baseline]))[0] == pytest.approx(trace, **EXACT)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "real"])
@pytest.mark.parametrize("group_size, size, n_outcomes", [(2, 4, 6), (2, 5, 6), (3, 5, 5), (3, 6, 4), (4, 8, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_resampled_group_moments_are_unbiased_over_all_blocks(kind, group_size, size, n_outcomes, binary):
    policy = random_policy(7, n_outcomes=n_outcomes, binary=binary)
    gram, rewards, lengths, chance = policy.blocks(size)
    found = group_moments((gram, rewards, lengths), kind, group_size, n_groups=3)
    truth = exact_group(policy, kind, group_size)
    for part, estimate, exact in zip(GroupMoments._fields, found, truth):
        if part == "disjoint" and 2 * group_size > size:
            assert np.isnan(estimate).all()
        else:
            assert chance @ estimate == pytest.approx(exact, **EXACT), part


def test_groups_of_a_partition_are_disjoint_and_always_the_same():
    members = partitions(11, 3, 20)
    assert members.shape == (7, 3, 3)
    assert all(len(set(each.ravel().tolist())) == 9 for each in members)
    assert np.array_equal(members, partitions.__wrapped__(11, 3, 20))


# --- fitted and borrowed baselines never see their own prompt ---


def test_borrowed_baselines_never_see_their_own_prompt():
    def fitted(records):
        prompts = reduce_prompts(records)
        return mean_of_others(prompts), shrinkage_weights(prompts, 2)

    generator = np.random.default_rng(5)
    records = [SimpleNamespace(oracle_value=0.5, blocks=[sample_block(random_policy(at), 32, generator)]) for at in range(5)]
    before = fitted(records)
    gram, rewards, lengths = records[2].blocks[0]
    records[2].blocks = [(gram * 2 + np.eye(32), 1 - 0.5 * rewards, lengths)]
    after = fitted(records)
    for old, new in zip(before, after):
        assert new[2] == pytest.approx(old[2], rel=1e-12)
        assert np.abs(np.delete(new - old, 2)).max() > 1e-3  # the others' do move


def test_the_shrinkage_weight_is_best_for_the_other_prompts():
    policies = some_policies(12) + some_policies(40)
    prompts = exact_prompts(policies)
    for group_size in (2, 16):
        weights = shrinkage_weights(prompts, group_size)
        for at in range(len(policies)):
            rest = exact_prompts([policy for other, policy in enumerate(policies) if other != at])
            baseline = mean_of_others(rest)
            grid = np.linspace(0, 1, 2001)
            traces = [mixture_trace(rest, group_size, weight, baseline).mean() for weight in grid]
            assert weights[at] == pytest.approx(grid[int(np.argmin(traces))], abs=6e-4)


def test_shrinkage_leans_on_the_group_more_as_the_group_grows():
    prompts = exact_prompts(some_policies(12) + some_policies(40))
    weights = [shrinkage_weights(prompts, size).mean() for size in (2, 4, 16, 256)]
    assert weights == sorted(weights) and weights[0] < weights[-1]


# --- effective group size ---


@settings(max_examples=40, deadline=None)
@given(seed=seeds, group_size=st.floats(1.5, 500))
def test_effective_group_size_inverts_the_group_size_law(seed, group_size):
    pairs = exact_pairs(policy := random_policy(seed), policy.scores)
    trace = group_trace(pairs, group_size)
    if trace > 1e-9 and pairs.zeta1 > 1e-9:
        found = effective_group_size(trace, pairs.zeta1, 2 * pairs.zeta2 - 4 * pairs.zeta1)
        assert found == pytest.approx(group_size, rel=1e-6)


def sampled_records(n_prompts=40, sizes=(16, 16), **kinds):
    generator = np.random.default_rng(2)
    made = []
    for at in range(n_prompts):
        policy = random_policy(at % 10, **kinds)
        blocks = [sample_block(policy, size, generator) for size in sizes]
        made.append(SimpleNamespace(oracle_value=policy.value, greedy_reward=float(at % 2), blocks=blocks))
    return made


def test_grpo_and_dr_grpo_have_their_own_group_size():
    results = summary_of(sampled_records(sizes=(32, 32)), [4, 8], 200, names=["dr_grpo"])
    for name in ("grpo", "dr_grpo"):
        assert results["estimators"][name]["effective_group_size"] == pytest.approx([4, 8], rel=1e-9)
        assert results["estimators"][name]["effective_group_size_ci95"][0] == pytest.approx([4, 4], rel=1e-9)
    floor = results["estimators"]["oracleV"]["effective_group_size"]
    assert group_trace_of(results, floor[0]) == pytest.approx(results["conditional_on_x"]["oracleV"][0], rel=1e-9)


def group_trace_of(results, size):
    """Plain GRPO's average trace at any size, from its values at K = 4 and 8 (two unknowns)."""
    four, eight = results["conditional_on_x"]["grpo"]
    single, pair = np.linalg.solve([[1 / 4, 1 / 12], [1 / 8, 1 / 56]], [four, eight])
    return single / size + pair / (size * (size - 1))


# --- from records to results ---


def test_sampled_records_give_the_exact_moments():
    """Through the whole of summarise, on many blocks; the ratios of dynamic sampling need large blocks."""
    policies = some_policies(30)
    generator = np.random.default_rng(3)
    blocks = [[sample_block(policy, 64, generator) for _ in range(60)] for policy in policies]
    records = [
        SimpleNamespace(oracle_value=policy.value, greedy_reward=GREEDY, blocks=own) for policy, own in zip(policies, blocks)
    ]
    prompts, exact = reduce_prompts(records, [4], list(ESTIMATORS)), exact_prompts(policies, [4])
    traces = prompt_trace_covs(prompts, 4, list(ESTIMATORS))
    results = summary_of(prompts, [4], 50, names=list(ESTIMATORS))
    for name in ESTIMATORS:
        truth = moments_of(exact, name, 4)
        assert traces[name] == pytest.approx(truth.trace, rel=0.12), name
        weight = np.ones(3) if truth.weight is None else truth.weight
        average = (weight * truth.trace).sum() / weight.sum()
        assert results["estimators"][name]["trace_cov"][0] == pytest.approx(average, rel=0.08), name
        ratio = (weight * truth.signal).sum() / (weight * truth.trace).sum()
        if results["estimators"][name]["signal_to_noise"][0] is not None:
            assert results["estimators"][name]["signal_to_noise"][0] == pytest.approx(ratio, rel=0.15), name
        cost = 4 / weight.mean()
        assert results["estimators"][name]["continuations_per_group"][0] == pytest.approx(cost, rel=0.02), name


def nulls(node, path=""):
    """Dotted paths of all Nones; a list counts as one path."""
    if node is None:
        return [path]
    if isinstance(node, list):
        return [path] if None in node else []
    if isinstance(node, dict):
        return [found for key, each in node.items() for found in nulls(each, f"{path}.{key}" if path else key)]
    return []


@pytest.mark.parametrize("sizes", [(4,), (8, 8), (16, 9)])
@pytest.mark.parametrize("n_prompts", [1, 2, 3, 25])
def test_every_null_in_the_results_has_its_reason(n_prompts, sizes):
    records = sampled_records(n_prompts, sizes)
    results = summary_of(records, [2, 4, 8], 60, names=list(ESTIMATORS))
    assert list(results["estimators"]) == [*DEFAULT, *(name for name in ESTIMATORS if name not in DEFAULT)]
    keys = {tuple(entry) for entry in results["estimators"].values()}
    assert len(keys) == 1
    for entry in results["estimators"].values():
        assert all(len(value) == 3 for key, value in entry.items() if key not in ("title", "label", "target"))
    assert set(nulls(results)) == {path for path in results["reasons"]}
    assert all(isinstance(reason, str) and reason for reason in results["reasons"].values())
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_the_published_keys_do_not_change_with_more_estimators():
    records = sampled_records(8)
    plain = summary_of(records, [4], 40)
    more = summary_of(records, [4], 40, names=["rloo", "opo", "dapo"])
    assert list(plain["estimators"]) == list(DEFAULT) and list(more["estimators"]) == [*DEFAULT, "opo", "dapo"]
    for key in plain:
        if key not in ("estimators", "reasons"):
            assert plain[key] == more[key]


def test_a_block_too_small_for_two_groups_still_has_an_mse():
    results = summary_of(sampled_records(sizes=(16, 16)), [8, 10, 16], 40, names=["opo", "std_verl"])
    opo, std = results["estimators"]["opo"], results["estimators"]["std_verl"]
    assert opo["trace_cov"][0] > 0 and opo["trace_cov"][1:] == [None, None]
    assert opo["mse"][1] > 0 and opo["mse"][2] is None
    assert std["trace_cov"][1] is None
    assert "K=10 needs a block of at least 20" in results["reasons"]["estimators.opo.trace_cov"]
    assert "K=16 needs a block of at least 18" in results["reasons"]["estimators.opo.mse"]
    assert "not theta" in results["reasons"]["estimators.std_verl.mse"]


def test_the_greedy_baseline_needs_its_continuation_and_says_so():
    records = sampled_records(6)
    moments = reduce_prompts(records)
    expected = np.mean(prompt_only_trace(moments.coefficients, np.arange(6) % 2.0 - moments.centre)) / 4
    found = summary_of(moments, [4], 20, names=["remax"])["estimators"]["greedy"]
    assert found["trace_cov"] == pytest.approx([expected])
    del records[3].greedy_reward
    results = summary_of(records, [4], 20, names=["greedy"])
    assert results["estimators"]["greedy"]["trace_cov"] == [None]
    assert results["reasons"]["estimators.greedy.trace_cov"].startswith("no greedy continuation")
    records[3].greedy_reward = float("inf")
    with pytest.raises(ValueError, match="prompt 3: the greedy reward is not finite"):
        reduce_prompts(records)


def test_prompts_that_keep_no_group_weigh_nothing():
    records = sampled_records(12)
    without = summary_of(records, [4], 40, names=["dynamic_sampling"])["estimators"]["dynamic_sampling"]
    gram, rewards, lengths = records[0].blocks[0]
    solved = SimpleNamespace(oracle_value=1.0, greedy_reward=1.0, blocks=[(gram, np.ones(16), lengths)] * 2)
    results = summary_of([*records, solved, solved, solved], [4], 40, names=["dynamic_sampling"])
    found = results["estimators"]["dynamic_sampling"]
    assert without["prompts_never_kept"] == [0] and found["prompts_never_kept"] == [3]
    for key in ("trace_cov", "signal_to_noise"):
        assert found[key] == pytest.approx(without[key], rel=1e-12)
    # kept groups cost more continuations: three more prompts of fifteen are sampled for nothing
    assert found["continuations_per_group"][0] == pytest.approx(without["continuations_per_group"][0] * 15 / 12)
    assert found["signal_to_noise_per_continuation"][0] == pytest.approx(
        found["signal_to_noise"][0] / found["continuations_per_group"][0]
    )
    traces = prompt_trace_covs(reduce_prompts([*records, solved]), 4, ["dynamic_sampling"])["dynamic_sampling"]
    assert traces[-1] is None and None not in traces[:-1]


def test_prompts_weigh_by_their_share_of_kept_groups():
    policies = [random_policy(at, n_outcomes=4) for at in range(4)]
    for at, policy in enumerate(policies):  # from rarely to mostly kept
        right = 0.03 + 0.15 * at
        weight = np.where(policy.rewards > 0.5, right, 1 - right)
        policies[at] = policy._replace(probs=policy.probs * weight / (policy.probs @ weight))
    prompts = exact_prompts(policies, [3])
    results = summary_of(with_counts(prompts), [3], 10, names=["dapo"])
    found, entry = moments_of(prompts, "dapo", 3), results["estimators"]["dapo"]
    assert found.weight.min() < 0.5 * found.weight.max()
    trace, signal = (found.weight @ part for part in (found.trace, found.signal))
    assert entry["trace_cov"][0] == pytest.approx(trace / found.weight.sum(), rel=1e-12)
    assert entry["signal_to_noise"][0] == pytest.approx(signal / trace, rel=1e-12)
    assert entry["continuations_per_group"][0] == pytest.approx(3 / found.weight.mean(), rel=1e-12)


def with_counts(prompts):
    """The same moments with the fields that summarise reports about the scores."""
    three = np.ones((len(prompts), len(CLASSES)))
    evidence = np.ones((len(prompts), 3))
    return dataclasses.replace(prompts, score_norm_sq=three, score_evidence=evidence, outcome_share=three, n_outcomes=three)


def test_without_a_kept_group_there_is_a_reason():
    records = sampled_records(6)
    for record in records:
        record.blocks = [(gram, rewards * 0, lengths) for gram, rewards, lengths in record.blocks]
    results = summary_of(records, [4], 20, names=["dapo"])
    assert results["estimators"]["dapo"]["prompts_never_kept"] == [6]
    assert results["estimators"]["dapo"]["trace_cov"] == [None]
    assert "share of groups kept" in results["reasons"]["estimators.dapo.trace_cov"]


def test_names_resolve_and_unknown_ones_list_what_there_is():
    assert resolve(["rloo", "vanilla", "opo", "opo"]) == [*DEFAULT, "opo"]
    assert set(ALIASES.values()) <= set(ESTIMATORS)
    assert list(group_rules(["opo", "dr_grpo", "dynamic_sampling", "dapo"])) == ["opo", "dapo"] and group_rules([]) == {}
    with pytest.raises(ValueError, match="unknown estimator 'grpoo': one of naive, .*, rloo"):
        summary_of(sampled_records(3), [4], names=["grpoo"])


@pytest.mark.parametrize("name", sketched_names(list(ESTIMATORS)))
def test_the_sketched_sum_of_scores_has_the_estimators_mean(name):
    """Over all blocks of 4; without the division by the batch's tokens, and 0 for groups of equal rewards."""
    policy = random_policy(7, n_outcomes=5, binary=False)
    index, chance = policy.tuples(4)
    blocks = zip(policy.rewards[index], policy.lengths[index])
    weights = np.array([sketch_weights([name], rewards, lengths, 2)[0] for rewards, lengths in blocks])
    found = chance @ (weights[..., None] * policy.scores[index]).sum(1)
    share, mean, _, _ = enumerated(policy, brute_force(name, [policy] * 2, 0, 2), 2, ESTIMATORS[name].drop_silent)
    scale = batch_length([policy] * 2, 2 if ESTIMATORS[name].drop_silent else None) if ESTIMATORS[name].per_token else 1.0
    scale *= batch_std([policy] * 2) if ESTIMATORS[name].batch_std else 1.0
    scale *= 2 if (ESTIMATORS[name].advantages or "").startswith("mean_only") else 1.0  # K/(K-1): a direction is GRPO's
    assert found == pytest.approx(share * scale * mean, **EXACT)


def test_a_new_entry_is_asked_for_what_it_declares(monkeypatch):
    entry = Estimator("half greedy", lambda p, k: prompt_only(p, k, p.greedy_reward / 2), extra_rollout="greedy")
    monkeypatch.setitem(ESTIMATORS, "half_greedy", entry)
    monkeypatch.setitem(ESTIMATORS, "turned", entry._replace(extra_rollout=None, direction=lambda r, n: -np.ones_like(r)))
    assert extra_rollouts(["half_greedy"]) == extra_rollouts(["remax"]) == {"greedy"} and extra_rollouts(["opo"]) == set()
    assert sketched_names(["turned", "half_greedy", "dapo"]) == ["grpo", "dapo", "turned"]
    assert sketch_weights(["grpo", "turned"], np.arange(4.0), np.ones(4), 2)[1].tolist() == [-1.0] * 4
    found = summary_of(sampled_records(6), [4], 20, names=["half_greedy"])["estimators"]["half_greedy"]
    assert found["trace_cov"][0] > 0 and found["title"] == "half greedy"


def test_prompts_reduced_without_an_estimator_are_refused():
    prompts = reduce_prompts(sampled_records(3), [4], ["opo"])
    for sizes, names in (([8], ["opo"]), ([4], ["std_verl"])):
        with pytest.raises(ValueError, match="call reduce_prompts"):
            summary_of(prompts, sizes, 10, names=names)


# --- the batch's denominator, against VERL ---


@pytest.mark.parametrize("name", ["verl_default", "token_mean", "dapo"])
def test_token_mean_is_verls_loss_over_an_update_batch(name):
    """One update batch holds every possible group once; VERL's own advantages and agg_loss, one group at a time.

    The policies' outcomes are equally likely, so the batch's tokens over its continuations are exactly the mean length.
    """
    pytest.importorskip("verl", reason="verl is not installed")
    torch = pytest.importorskip("torch")
    from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage

    policies, K, entry = some_policies(8, binary=True)[1:], 2, ESTIMATORS[name]
    policies = [policy._replace(probs=np.full(5, 0.2)) for policy in policies]
    policies = [policy._replace(scores=policy.scores - policy.scores.mean(0)) for policy in policies]
    kept_only = [kept_groups(policy, K)[0] if entry.drop_silent else policy.tuples(K)[0] for policy in policies]
    width = max(policy.lengths.max() for policy in policies)
    tokens = sum(policy.lengths[groups].sum() for policy, groups in zip(policies, kept_only))
    n_groups = sum(map(len, kept_only))
    found = moments_of(exact_prompts(policies, [K]), name, K)
    assert policies[0].lengths.mean() != policies[1].lengths.mean()
    for at, (policy, groups) in enumerate(zip(policies, kept_only)):
        gradients = []
        for group in groups:
            length = torch.tensor(policy.lengths[group])
            mask = (torch.arange(width) < length[:, None]).double()
            reward = torch.zeros_like(mask)
            reward[:, 0] = torch.tensor(policy.rewards[group])
            advantages, _ = compute_grpo_outcome_advantage(reward, mask, np.zeros(K, dtype=int))
            if name == "token_mean":  # leave-one-out, which this function of VERL's has not
                others = torch.tensor(policy.rewards[group] - other_members(policy.rewards[group]))
                advantages = others[:, None] * mask
            parameters = torch.zeros(policy.scores.shape[1], dtype=torch.float64, requires_grad=True)
            score = torch.tensor(policy.scores[group])
            log_prob = (score @ parameters / length)[:, None].expand_as(mask)  # each token has its part of the score
            loss = -advantages * torch.exp(log_prob - log_prob.detach())
            agg_loss(loss, mask, "token-mean", batch_num_tokens=int(tokens)).backward()
            gradients.append(-n_groups * parameters.grad.numpy())  # the batch's gradient is the mean over its groups
        gradients = np.array(gradients)
        mean = gradients.mean(0)
        assert found.signal[at] == pytest.approx(mean @ mean, rel=1e-6)
        assert found.trace[at] == pytest.approx(((gradients - mean) ** 2).sum(1).mean(), rel=1e-6)


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if entry.group or entry.advantages])
def test_an_update_batch_of_every_group_has_the_estimators_moments(name):
    """Each group once, of outcomes that are equally likely: the batch's own mean length and kept groups are the exact ones."""
    policies, K = some_policies(8, binary=False)[1:], 2
    policies = [policy._replace(probs=np.full(5, 0.2)) for policy in policies]
    policies = [policy._replace(scores=policy.scores - policy.scores.mean(0)) for policy in policies]
    groups = [policy.tuples(K)[0] for policy in policies]
    rewards, lengths = (
        np.concatenate([getattr(policy, part)[index] for policy, index in zip(policies, groups)])
        for part in ("rewards", "lengths")
    )
    weights = update_weights(name, rewards, lengths)
    if ESTIMATORS[name].batch_std:  # the batch's is the one with n - 1
        weights = weights * (rewards.std(ddof=1) + 1e-4) / (rewards.std() + 1e-4)
    found = moments_of(exact_prompts(policies, [K]), name, K)
    for at, (policy, index, own) in enumerate(zip(policies, groups, np.split(weights, 2))):
        gradients = (own[..., None] * policy.scores[index]).mean(1)
        mean = gradients.mean(0)
        kept = 1.0 if found.weight is None else found.weight.mean()  # the weights of kept groups are over their share
        weight = 1.0 if found.weight is None else found.weight[at]
        assert mean @ mean * kept**2 / weight == pytest.approx(weight * found.signal[at], rel=1e-9), name
        square = (gradients**2).sum(1).mean() * kept**2
        assert square == pytest.approx(weight * (found.trace[at] + found.signal[at]), rel=1e-9), name


def test_token_mean_keeps_grpos_effective_group_size():
    records = sampled_records(sizes=(32, 32))
    results = summary_of(records, [4, 8], 200, names=["token_mean"])
    found, plain = results["estimators"]["token_mean"], results["estimators"]["grpo"]
    length = np.mean([np.mean([block[2].mean() for block in record.blocks]) for record in records])
    assert [note["tokens_per_continuation"] for note in found["notes"]] == pytest.approx([length, length])
    assert found["trace_cov"] == pytest.approx(np.array(plain["trace_cov"]) / length**2)
    assert found["signal_to_noise"] == pytest.approx(plain["signal_to_noise"])
    assert found["effective_group_size"] == pytest.approx([4, 8], rel=1e-9)
    assert found["mse"] == [None, None]
