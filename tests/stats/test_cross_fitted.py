"""The oracle's curve without an oracle table: V(x) from the other blocks of a prompt, and what the results say of it."""

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import make_records, random_policy, sample_block, summary_of

from Gradient_evaluation.stats.blocks import prompt_only_coefficients, prompt_only_trace
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.modules import NO_ORACLE, by_layer, layer_moments, oracle_traces
from Gradient_evaluation.stats.prompts import cross_fitted_oracle, cross_fitted_values, reduce_prompts
from Gradient_evaluation.stats.summary import prompt_trace_covs

EXACT = dict(rel=1e-10, abs=1e-10)
BOTH = pytest.mark.parametrize("binary", [True, False], ids=["binary", "real"])


def oracle_trace(policy, group_size=1) -> float:
    """The exact trace of a group's estimate at the true V(x)."""
    estimator = lambda scores, rewards, lengths: ((rewards - policy.value)[..., None] * scores).mean(-2)  # noqa: E731
    return policy.moments(estimator, group_size)[1]


@BOTH
@pytest.mark.parametrize("centred", [True, False], ids=["centred", "not_centred"])
def test_the_cross_fitted_oracle_is_unbiased(binary, centred):
    """Over all pairs of blocks of 4 of three outcomes, each with its probability: the exact trace at the true V."""
    policy = random_policy(1, n_outcomes=3, centred=centred, binary=binary)
    gram, rewards, lengths, chance = policy.blocks(4)
    coefficients = prompt_only_coefficients(gram, rewards)
    mean = 0.0
    for i, j in product(range(len(chance)), repeat=2):
        mean += chance[i] * chance[j] * cross_fitted_oracle(coefficients[[i, j]], rewards[[i, j]])
    assert mean == pytest.approx(oracle_trace(policy), **EXACT)
    record = SimpleNamespace(oracle_value=None, blocks=[(gram[at], rewards[at], lengths[at]) for at in (5, 40)])
    found = cross_fitted_oracle(coefficients[[5, 40]], rewards[[5, 40]])
    assert reduce_prompts([record]).cross_fitted_trace[0] == pytest.approx(found, **EXACT)


def test_a_blocks_own_rewards_never_reach_its_v():
    rewards = [block[1] for block in make_records(n_prompts=1, sizes=(5, 6, 7), binary=False)[0].blocks]
    before = cross_fitted_values(rewards)
    for number in range(3):
        changed = [each * 2 + 1 if at == number else each for at, each in enumerate(rewards)]
        same = (cross_fitted_values(changed) == before).all(-1)
        assert same.tolist() == [at == number for at in range(3)]


def test_the_square_of_the_mean_would_be_too_large():
    """V^2 comes from pairs of different continuations; the square of their mean is off by Var Z / n."""
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    V, square = cross_fitted_values([np.zeros(4), rewards])[0]
    assert V == 0.5 and square == pytest.approx(2 / 12)


def test_many_prompts_without_v_come_to_the_oracles_trace():
    policy, generator = random_policy(9), np.random.default_rng(1)
    records = [
        SimpleNamespace(oracle_value=None, blocks=[sample_block(policy, 8, generator) for _ in range(2)]) for _ in range(1500)
    ]
    traces = np.array(prompt_trace_covs(reduce_prompts(records), 4)["oracleV"])
    error = traces.std() / np.sqrt(len(traces))
    assert abs(traces.mean() - oracle_trace(policy, 4)) < 4 * error < 0.2 * oracle_trace(policy, 4)


@pytest.mark.parametrize("constant", [1e3, 1e9])
def test_a_constant_in_the_rewards_changes_nothing_here(constant):
    records = make_records(n_prompts=5, binary=False, sizes=(16, 16))
    traces = []
    for shift in (0.0, constant):
        for record in records:
            record.oracle_value = None
        moved = [
            SimpleNamespace(oracle_value=None, blocks=[(q, np.round(z * 64) / 64 + shift, n) for q, z, n in each.blocks])
            for each in records
        ]
        traces.append(prompt_trace_covs(reduce_prompts(moved), 4)["oracleV"])
    assert traces[0] == pytest.approx(traces[1], rel=1e-6)


def test_results_say_where_v_comes_from():
    records = make_records(n_prompts=6, sizes=(8, 8), binary=False)
    table = summary_of(records, [2, 4], 50)
    assert table["V_source"] == "table" and table["estimators"]["oracleV"]["title"] == "oracle baseline V(x)"
    assert "above V(x)" in table["score_norm_sq"]["split"]
    for record in records:
        record.oracle_value = None
    fitted = summary_of(records, [2, 4], 50)
    assert fitted["V_source"] == "cross-fitted"
    assert fitted["estimators"]["oracleV"]["label"] == "oracle V(x), cross-fitted"
    assert fitted["estimators"]["oracleV"]["title"] == "oracle baseline V(x), cross-fitted"
    assert "mean reward of its prompt" in fitted["score_norm_sq"]["split"]
    for name in ("naive", "grpo"):
        assert fitted["conditional_on_x"][name] == table["conditional_on_x"][name]
    assert fitted["conditional_on_x"]["oracleV"] == pytest.approx(table["conditional_on_x"]["oracleV"], rel=0.5)
    assert fitted["conditional_on_x"]["oracleV"] != table["conditional_on_x"]["oracleV"]
    assert json.loads(json.dumps(fitted, allow_nan=False)) == fitted


def test_one_prompt_without_v_makes_all_cross_fitted():
    """One source of V for a whole run, so that the curve is one estimator's."""
    records = make_records(n_prompts=4, sizes=(8, 8))
    for record in records[:1]:
        record.oracle_value = None
    mixed = reduce_prompts(records)
    assert mixed.V_source == "cross-fitted"
    for record in records:
        record.oracle_value = None
    assert prompt_trace_covs(mixed, 4)["oracleV"] == prompt_trace_covs(reduce_prompts(records), 4)["oracleV"]


# --- by module ---


def test_modules_cross_fitted_traces_add_up_to_the_whole():
    records = make_records(n_prompts=3, sizes=(6, 6, 6))
    moments, oracle, values = [], [], [None] * len(records)
    for record in records:
        record.oracle_value = None
        of_blocks = np.stack([layer_moments(np.stack([0.25 * q, 0.75 * q]), z) for q, z, _ in record.blocks])
        moments.append(of_blocks.mean(0))
        oracle.append(cross_fitted_oracle(of_blocks[..., :3], [z for _, z, _ in record.blocks]))
    found = by_layer(["a", "b"], moments, oracle_traces(np.stack(moments), values, oracle), [4], PromptBootstrap(3, 50))
    whole = summary_of(records, [4], 10)["conditional_on_x"]["oracleV"][0]
    assert found["trace_cov"]["oracleV"][0] == pytest.approx([0.25 * whole, 0.75 * whole])


def test_modules_without_any_v_have_a_reason():
    moments = np.ones((2, 1, 6))
    assert oracle_traces(moments, [None, None], [np.ones(1), None]) == Missing(NO_ORACLE)
    found = by_layer(["a"], moments, Missing(NO_ORACLE), [4, 8], PromptBootstrap(2, 50))
    assert found["trace_cov"]["oracleV"] == Missing(NO_ORACLE) and len(found["trace_cov"]["grpo"]) == 2
    known = oracle_traces(moments, [0.5, 0.5], [None, None])
    assert known == pytest.approx(prompt_only_trace(moments[..., :3], 0.5))
