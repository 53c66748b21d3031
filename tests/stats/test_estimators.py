"""The estimators' formulas against exact sums over all draws of small policies, and the manners of the results."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import exact_pair_moments, leave_one_out, make_records, random_policy, sample_block, summary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.stats.blocks import (
    group_trace,
    off_diagonal,
    pair_moments,
    prompt_only_coefficients,
    prompt_only_trace,
)
from Gradient_evaluation.stats.estimators import ESTIMATORS
from Gradient_evaluation.stats.prompts import best_baselines
from Gradient_evaluation.stats.summary import prompt_trace_covs, reduce_prompts

EXACT = dict(rel=1e-10, abs=1e-10)
KINDS_OF_POLICY = pytest.mark.parametrize("centred", [True, False], ids=["centred", "not_centred"])
KINDS_OF_REWARD = pytest.mark.parametrize("binary", [True, False], ids=["binary", "real"])
seeds = st.integers(0, 2**32 - 1)


def prompt_only(baseline):
    return lambda scores, rewards, lengths: ((rewards - baseline)[..., None] * scores).mean(-2)


def exact_coefficients(policy) -> np.ndarray:
    square, mean = (policy.scores**2).sum(-1), policy.probs @ policy.scores
    p, z, theta = policy.probs, policy.rewards, policy.theta
    return np.array([p @ (z**2 * square) - theta @ theta, p @ (z * square) - theta @ mean, p @ square - mean @ mean])


# --- population formulas against brute force ---


@KINDS_OF_POLICY
@KINDS_OF_REWARD
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_population_formulas_give_the_exact_traces(centred, binary, group_size):
    policy = random_policy(11, centred=centred, binary=binary)
    _, trace = policy.moments(leave_one_out, group_size)
    assert group_trace(exact_pair_moments(policy), group_size) == pytest.approx(trace, **EXACT)
    square = (policy.scores**2).sum(-1)
    best = policy.probs @ (policy.rewards * square) / (policy.probs @ square)
    for baseline in (0.0, policy.value, best, -1.3):
        _, trace = policy.moments(prompt_only(baseline), group_size)
        formula = prompt_only_trace(exact_coefficients(policy), baseline) / group_size
        assert formula == pytest.approx(trace, **EXACT)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, centred=st.booleans(), binary=st.booleans(), group_size=st.integers(2, 4))
def test_the_group_size_law_holds_for_any_policy(seed, centred, binary, group_size):
    policy = random_policy(seed, centred=centred, binary=binary)
    _, trace = policy.moments(leave_one_out, group_size)
    assert group_trace(exact_pair_moments(policy), group_size) == pytest.approx(trace, **EXACT)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, binary=st.booleans())
def test_four_zeta1_is_the_oracle_trace_and_the_floor_lowest(seed, binary):
    policy = random_policy(seed, binary=binary)
    pairs, coefficients = exact_pair_moments(policy), exact_coefficients(policy)
    oracle = prompt_only_trace(coefficients, policy.value)
    assert 4 * pairs.zeta1 == pytest.approx(oracle, **EXACT)
    assert pairs.disjoint == pytest.approx(policy.theta @ policy.theta, **EXACT)
    best = coefficients[1] / coefficients[2]
    for baseline in (0.0, policy.value, best + 0.1, best - 0.1):
        assert prompt_only_trace(coefficients, best) <= prompt_only_trace(coefficients, baseline) + 1e-12


# --- unbiasedness: the expectation over ALL blocks ---


@KINDS_OF_POLICY
@KINDS_OF_REWARD
@pytest.mark.parametrize("size", [4, 5])
def test_every_block_statistic_is_unbiased_over_all_blocks(centred, binary, size):
    policy = random_policy(5, centred=centred, binary=binary)
    gram, rewards, _, chance = policy.blocks(size)
    for estimate, truth in zip(pair_moments(gram, rewards), exact_pair_moments(policy)):
        assert chance @ estimate == pytest.approx(truth, **EXACT)
    assert chance @ prompt_only_coefficients(gram, rewards) == pytest.approx(exact_coefficients(policy), **EXACT)
    mean = policy.probs @ policy.scores
    ones = np.ones_like(rewards)
    assert chance @ off_diagonal(gram, ones, ones) == pytest.approx(mean @ mean, **EXACT)
    assert chance @ off_diagonal(gram, rewards, ones) == pytest.approx(policy.theta @ mean, **EXACT)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, centred=st.booleans(), binary=st.booleans(), group_size=st.sampled_from([2, 3, 4]))
def test_block_estimates_average_to_the_exact_trace(seed, centred, binary, group_size):
    policy = random_policy(seed, centred=centred, binary=binary)
    gram, rewards, _, chance = policy.blocks(4)
    _, trace = policy.moments(leave_one_out, group_size)
    assert chance @ group_trace(pair_moments(gram, rewards), group_size) == pytest.approx(trace, **EXACT)
    for baseline in (0.0, policy.value, 0.37):
        _, trace = policy.moments(prompt_only(baseline), group_size)
        estimate = prompt_only_trace(prompt_only_coefficients(gram, rewards), baseline) / group_size
        assert chance @ estimate == pytest.approx(trace, **EXACT)


def test_group_trace_extends_beyond_the_block_size():
    policy = random_policy(3, n_outcomes=4)
    gram, rewards, _, chance = policy.blocks(4)
    _, trace = policy.moments(leave_one_out, 7)
    assert chance @ group_trace(pair_moments(gram, rewards), 7) == pytest.approx(trace, **EXACT)


def test_records_of_all_blocks_give_the_exact_results():
    """Through the whole of summarise: two equal prompts whose blocks are all blocks of 4 of a uniform policy."""
    policy = random_policy(8, n_outcomes=4, centred=False, binary=False)
    policy = policy._replace(probs=np.full(4, 0.25), scores=policy.scores - policy.scores.mean(0))
    gram, rewards, lengths, _ = policy.blocks(4)
    record = SimpleNamespace(oracle_value=policy.value, blocks=list(zip(gram, rewards, lengths)))
    results = summary_of([record, record], [2, 3, 4], 10)
    for position, group_size in enumerate((2, 3, 4)):
        truth = {
            "naive": policy.moments(prompt_only(0.0), group_size)[1],
            "oracleV": policy.moments(prompt_only(policy.value), group_size)[1],
            "grpo": policy.moments(leave_one_out, group_size)[1],
        }
        for name, trace in truth.items():
            assert results["conditional_on_x"][name][position] == pytest.approx(trace, **EXACT)
            ratio = policy.theta @ policy.theta / trace
            assert results["signal_to_noise"][name][position] == pytest.approx(ratio, **EXACT)
    assert results["theta_norm_sq"] == pytest.approx(policy.theta @ policy.theta, **EXACT)
    assert results["on_policy_check"]["score_mean_sq"] == pytest.approx(0, abs=1e-10)
    square = (policy.scores**2).sum(-1)
    right = policy.rewards > 0.5
    assert results["score_norm_sq"]["all"]["mean"] == pytest.approx(square.mean(), **EXACT)
    assert results["score_norm_sq"]["right"]["mean"] == pytest.approx(square[right].mean(), **EXACT)
    assert results["score_norm_sq"]["wrong"]["mean"] == pytest.approx(square[~right].mean(), **EXACT)


def test_the_on_policy_check_finds_scores_of_another_law():
    policy = random_policy(8, n_outcomes=4, centred=False)
    policy = policy._replace(probs=np.full(4, 0.25))
    gram, rewards, lengths, _ = policy.blocks(4)
    record = SimpleNamespace(oracle_value=policy.value, blocks=list(zip(gram, rewards, lengths)))
    check = summary_of([record], [2], 10)["on_policy_check"]
    mean = policy.scores.mean(0)
    assert check["ratio"] == pytest.approx(mean @ mean / (policy.scores**2).sum(-1).mean(), **EXACT)
    many = make_records(n_prompts=30, sizes=(16, 16), centred=False)
    assert summary_of(many, [2], 10)["on_policy_check"]["z"] > 5
    many = make_records(n_prompts=30, sizes=(16, 16), centred=True)
    assert abs(summary_of(many, [2], 10)["on_policy_check"]["z"]) < 4


def test_the_error_of_the_on_policy_check_is_the_jackknifes():
    """Against the jackknife over prompts, on scores whose mean is far from 0 so that both averages matter."""
    moments = reduce_prompts(make_records(n_prompts=40, sizes=(16, 16), centred=False))
    check = summary_of(moments, [2], 10)["on_policy_check"]
    mean, norm = moments.score_mean_sq, moments.score_norm_sq[:, 0]
    without = np.array([np.delete(mean, at).mean() / np.delete(norm, at).mean() for at in range(40)])
    jackknife = np.sqrt(39 / 40 * ((without - without.mean()) ** 2).sum())
    assert check["standard_error"] == pytest.approx(jackknife, rel=0.1)
    assert check["z"] == pytest.approx(check["ratio"] / check["standard_error"])


# --- the floor's baseline is cross-fitted ---


def test_a_blocks_best_baseline_does_not_depend_on_it():
    blocks = make_records(n_prompts=1, sizes=(5, 6, 7))[0].blocks
    before = best_baselines(blocks)
    for number in range(3):
        changed = list(blocks)
        gram, rewards, lengths = blocks[number]
        changed[number] = (gram * 3 + np.eye(len(gram)), rewards[::-1] * 2 + 1, lengths)
        after = best_baselines(changed)
        assert after[number] == before[number]
        assert all(after[other] != before[other] for other in range(3) if other != number)


def test_the_floor_is_unbiased_given_the_other_block():
    """Over all second blocks, with the first held fixed: the exact trace at the first block's b*."""
    policy = random_policy(2)
    gram, rewards, lengths, chance = policy.blocks(4)
    first = sample_block(policy, 6, np.random.default_rng(0))
    fixed = (first[1] * np.diag(first[0])).sum() / np.trace(first[0])
    assert best_baselines([first, (gram[0], rewards[0], lengths[0])])[1] == pytest.approx(fixed, **EXACT)
    _, trace = policy.moments(prompt_only(fixed), 2)
    estimate = chance @ prompt_only_trace(prompt_only_coefficients(gram, rewards), fixed) / 2
    assert estimate == pytest.approx(trace, **EXACT)


def test_the_floor_tends_to_the_exact_floor_from_above():
    """b* from the same block would give about 0.9 of the truth; two blocks of 16 cost up to 15%, sixteen about 1%."""
    policy = random_policy(9)
    generator = np.random.default_rng(1)
    blocks = [sample_block(policy, 16, generator) for _ in range(4800)]
    coefficients = exact_coefficients(policy)
    truth = prompt_only_trace(coefficients, coefficients[1] / coefficients[2]) / 2
    for n_blocks, excess in ((2, 0.2), (16, 0.03)):
        records = [
            SimpleNamespace(oracle_value=policy.value, blocks=blocks[at : at + n_blocks])
            for at in range(0, len(blocks), n_blocks)
        ]
        floor = np.array(prompt_trace_covs(reduce_prompts(records), 2)["best_baseline"])
        error = floor.std() / np.sqrt(len(floor))
        assert error < 0.01 * truth
        assert truth - 4 * error < floor.mean() < (1 + excess) * truth


def test_one_block_has_no_floor_and_says_so():
    results = summary_of(make_records(sizes=(6,)), [4, 8], 20)
    assert results["best_baseline"] == [None, None] and results["best_baseline_ci95"] == [None, None]
    assert results["signal_to_noise"]["best_baseline"] == [None, None]
    assert "only one" in results["reasons"]["best_baseline"]
    assert "only one" in results["reasons"]["signal_to_noise.best_baseline"]
    assert None not in results["conditional_on_x"]["naive"]


# --- results: layout, order, intervals, bad input ---


def test_results_have_the_published_keys_in_strict_json():
    results = summary_of(make_records(n_prompts=12), [2, 4, 64], 50)
    assert set(results["conditional_on_x"]) == {"naive", "grpo", "oracleV"}
    for curve in (*results["conditional_on_x"].values(), results["best_baseline"]):
        assert len(curve) == 3 and all(isinstance(value, float) for value in curve)
    assert (results["n_prompts"], results["n_blocks"], results["n_continuations"]) == (12, 24, 144)
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_results_do_not_depend_on_any_order():
    """Of prompts, blocks or continuations."""
    records = make_records(n_prompts=6, sizes=(5, 7, 4), binary=False)
    generator = np.random.default_rng(4)

    def shuffled(block):
        order = generator.permutation(len(block[1]))
        return block[0][np.ix_(order, order)], block[1][order], block[2][order]

    other = [
        SimpleNamespace(oracle_value=record.oracle_value, blocks=[shuffled(block) for block in record.blocks[::-1]])
        for record in records[::-1]
    ]
    first, second = (summary_of(each, [2, 8], 10) for each in (records, other))
    for name in ("naive", "grpo", "oracleV"):
        assert first["conditional_on_x"][name] == pytest.approx(second["conditional_on_x"][name], rel=1e-9)
    for outcome in ("all", "right", "wrong"):
        assert first["score_norm_sq"][outcome]["mean"] == pytest.approx(second["score_norm_sq"][outcome]["mean"])
    assert first["on_policy_check"].pop("warning") == second["on_policy_check"].pop("warning")
    for key in ("best_baseline", "theta_norm_sq", "on_policy_check"):
        assert first[key] == pytest.approx(second[key], rel=1e-9)
    traces, others = (prompt_trace_covs(reduce_prompts(each), 4)["grpo"] for each in (records, other))
    assert traces == pytest.approx(others[::-1], rel=1e-9)


def test_the_mean_of_the_per_prompt_traces_is_the_result():
    records = make_records(n_prompts=5)
    results, traces = summary_of(iter(records), [8], 10), prompt_trace_covs(reduce_prompts(records), 8)
    for name in ("naive", "grpo", "oracleV"):
        assert np.mean(traces[name]) == pytest.approx(results["conditional_on_x"][name][0], rel=1e-12)
    assert np.mean(traces["best_baseline"]) == pytest.approx(results["best_baseline"][0], rel=1e-12)


@pytest.mark.parametrize("constant", [1e3, 1e9])
def test_a_constant_in_rewards_and_baselines_moves_vanilla_alone(constant):
    generator, records, moved = np.random.default_rng(0), [], []
    for record in make_records(n_prompts=5, binary=False, sizes=(16, 16)):
        blocks = [(q, np.round(z * 64) / 64, length) for q, z, length in record.blocks]  # exact beside the constant
        value, greedy = np.round(record.oracle_value * 64) / 64, float(generator.integers(4)) / 4
        records.append(SimpleNamespace(oracle_value=value, greedy_reward=greedy, blocks=blocks))
        more = [(q, z + constant, length) for q, z, length in blocks]
        moved.append(SimpleNamespace(oracle_value=value + constant, greedy_reward=greedy + constant, blocks=more))
    before, after = (summary_of(each, [4], 10, names=list(ESTIMATORS)) for each in (records, moved))
    for name in ESTIMATORS:
        if name != "naive":
            found, wanted = (each["estimators"][name]["trace_cov"] for each in (after, before))
            assert found == pytest.approx(wanted, rel=1e-6), name
    assert before["theta_norm_sq"] == pytest.approx(after["theta_norm_sq"], rel=1e-7)
    norm = before["score_norm_sq"]["all"]["mean"]  # vanilla's trace is now constant^2 E||g||^2 / K and little more
    assert after["conditional_on_x"]["naive"][0] == pytest.approx(constant**2 * norm / 4, rel=0.2)


def test_intervals_cover_the_truth_about_95_times_in_100():
    hits = []
    for repeat in range(150):
        generator = np.random.default_rng(repeat)
        policies = [random_policy(int(seed)) for seed in generator.integers(0, 40, 40)]
        records = [SimpleNamespace(oracle_value=p.value, blocks=[sample_block(p, 8, generator)]) for p in policies]
        low, high = summary_of(records, [4], 300)["conditional_on_x_ci95"]["grpo"][0]
        truth = np.mean([group_trace(exact_pair_moments(random_policy(seed)), 4) for seed in range(40)])
        hits.append(low <= truth <= high)
    assert 0.87 < np.mean(hits) <= 1.0


def test_one_prompt_gives_values_without_intervals_and_says_why():
    results = summary_of(make_records(n_prompts=1, sizes=(32, 32)), [4], 20)
    assert results["conditional_on_x"]["grpo"][0] > 0
    assert results["conditional_on_x_ci95"]["grpo"] == [None]
    assert results["theta_norm_sq_ci95"] is None
    assert results["on_policy_check"]["standard_error"] is None and results["on_policy_check"]["z"] is None
    for path in ("conditional_on_x_ci95.grpo", "theta_norm_sq_ci95"):
        assert "one prompt" in results["reasons"][path]
    assert "on_policy_check.z" in results["reasons"]


def test_signal_to_noise_is_null_where_the_trace_could_be_zero():
    records = make_records(n_prompts=6)
    for record in records:  # all rewards equal: every trace around b = V is exactly 0
        record.oracle_value = 1.0
        record.blocks = [(gram, np.ones_like(rewards), lengths) for gram, rewards, lengths in record.blocks]
    results = summary_of(records, [4], 50)
    assert results["conditional_on_x"]["grpo"] == [0.0] and results["conditional_on_x"]["oracleV"] == [0.0]
    assert results["signal_to_noise"]["grpo"] == [None]
    assert "includes 0" in results["reasons"]["signal_to_noise.grpo"]
    assert results["score_norm_sq"]["wrong"] == {"mean": None, "ci95": None, "n_continuations": 0}
    assert results["reasons"]["score_norm_sq.wrong.mean"] == "no continuation is wrong"
    json.dumps(results, allow_nan=False)


def test_a_ratio_is_one_of_averages():
    records = make_records(n_prompts=5, sizes=(24, 24))
    results, moments = summary_of(records, [4], 10), reduce_prompts(records)
    trace = np.mean(prompt_trace_covs(moments, 4)["grpo"])
    assert results["signal_to_noise"]["grpo"][0] == pytest.approx(moments.pairs.disjoint.mean() / trace, rel=1e-12)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda q, z, n: (np.where(np.eye(len(q)) > 0, np.nan, q), z, n), r"prompt 2 \(id gsm-7\), block 1: the Gram"),
        (lambda q, z, n: (q, np.where(z > 0.5, np.inf, z), n), r"prompt 2 \(id gsm-7\), block 1: the rewards"),
        (lambda q, z, n: (q[:3, :3], z[:3], n[:3]), "block 1: has 3 continuations, needs at least 4"),
        (lambda q, z, n: (q, z[:-1], n), "block 1: the shapes"),
        (lambda q, z, n: (q, z, n * 0), "block 1: a continuation has a length below 1"),
    ],
)
def test_a_bad_block_is_refused_by_the_name_of_its_prompt(spoil, message):
    records = make_records(n_prompts=4, seed=1)
    records[2].prompt_id = "gsm-7"
    records[2].blocks[1] = (records[2].blocks[1][0], np.arange(7) % 2.0, records[2].blocks[1][2])
    records[2].blocks[1] = spoil(*records[2].blocks[1])
    with pytest.raises(ValueError, match=message):
        summary_of(records, [4])


def test_missing_or_bad_oracle_values_are_a_reason_or_an_error():
    records = make_records(n_prompts=3)
    records[1].oracle_value, records[1].blocks = None, records[1].blocks[:1]
    results = summary_of(records, [4], 10)
    assert results["conditional_on_x"]["oracleV"] == [None] and results["V_source"] is None
    for path in ("conditional_on_x.oracleV", "V_source"):
        assert "only one block; raise --M" in results["reasons"][path] and "1 of 3 prompts" in results["reasons"][path]
    assert results["estimators"]["oracleV"]["label"] == "oracle V(x)"
    assert None not in (*results["conditional_on_x"]["grpo"], *results["conditional_on_x"]["naive"])
    records[1].oracle_value = float("nan")
    with pytest.raises(ValueError, match="prompt 1: the oracle value"):
        summary_of(records, [4])


@pytest.mark.parametrize("bad", [[], [1, 4], [0]])
def test_group_sizes_below_two_and_empty_input_are_refused(bad):
    with pytest.raises(ValueError, match="at least 2"):
        summary_of(make_records(n_prompts=2), bad)
    with pytest.raises(ValueError, match="no prompts"):
        summary_of([], [4])


# --- advantages ---


@pytest.mark.parametrize(
    "kind, right, wrong",
    [
        ("leave_one_out", 0.7143, -0.4286),
        ("mean_only", 0.6250, -0.3750),
        ("std_verl", 1.2076, -0.7246),
        ("leave_one_out_over_std", 1.380, -0.828),
    ],
)
def test_advantages_of_eight_with_three_right(kind, right, wrong):
    rewards = np.array([1, 0, 0, 1, 0, 1, 0, 0])
    expected = np.where(rewards == 1, right, wrong)
    assert group_advantages(rewards, kind) == pytest.approx(expected, abs=6e-4 if "over" in kind else 6e-5)
    both = group_advantages(np.stack([rewards, 1 - rewards]), kind)
    assert both[0] == pytest.approx(group_advantages(rewards, kind)) and both[1] == pytest.approx(-both[0])


@pytest.mark.parametrize("kind", ["leave_one_out", "mean_only", "std_verl", "leave_one_out_over_std"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1 / 3, 1e8 + 0.1])
def test_equal_rewards_have_advantages_of_exactly_zero(kind, reward):
    with np.errstate(all="raise"):
        assert np.array_equal(group_advantages(np.full((2, 7), reward), kind), np.zeros((2, 7)))


def test_bad_advantage_arguments_are_refused():
    for rewards, kind in (([1.0], "mean_only"), ([1.0, 0.0], "typo"), ([1.0, np.nan], "mean_only"), (1.0, "mean_only")):
        with pytest.raises(ValueError):
            group_advantages(rewards, kind)


def test_the_noise_of_theta_sq_is_its_spread_over_blocks():
    records = make_records(n_prompts=30, sizes=(8,) * 6)
    noise = reduce_prompts(records).theta_sq_noise
    halves = [
        reduce_prompts([SimpleNamespace(oracle_value=record.oracle_value, blocks=[block]) for block in record.blocks])
        for record in records
    ]
    expected = [half.pairs.disjoint.var(ddof=1) / 6 for half in halves]
    assert noise == pytest.approx(expected)
    assert np.isnan(reduce_prompts(make_records(n_prompts=2, sizes=(8,))).theta_sq_noise).all()


def test_an_effective_group_size_below_two_is_null():
    """Plain GRPO at K = 2 is better than this: no group of GRPO is as bad, and 1.3 continuations are no group."""
    moments = reduce_prompts(make_records(n_prompts=12, sizes=(16, 16)))
    pairs = moments.pairs._replace(
        disjoint=np.full(12, 1.0), shared_member=np.full(12, 1.5), same_pair=np.linspace(4.9, 5.1, 12)
    )
    moments = replace(moments, pairs=pairs, coefficients=np.tile([30.0, 0.0, 1.0], (12, 1)), centre=np.zeros(12))
    results = summary_of(moments, [2], 50)
    worse = results["estimators"]["naive"]
    assert worse["effective_group_size"] == [None] and worse["effective_group_size_ci95"] == [None]
    assert "K = 2, the smallest group" in results["reasons"]["estimators.naive.effective_group_size"]
    assert results["estimators"]["grpo"]["effective_group_size"] == pytest.approx([2.0])
