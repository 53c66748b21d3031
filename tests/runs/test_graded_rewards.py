"""Rewards that are not 0 or 1 through both scripts, the results and every picture; what a table says of its rewards."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import summary_of
from scripts import FLAGS, call, from_grams, one_line_error, oracle, read, rows_of

from Gradient_evaluation import run_tracecov, utils
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.oracle_table import load_oracle_table
from Gradient_evaluation.runs.inputs.rewards import resolve_rewards, rewards_of
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.oracle import oracle_columns
from Gradient_evaluation.runs.results.report import group_size_report
from Gradient_evaluation.stats.summary import reduce_prompts
from Gradient_evaluation.utils import Reward
from plots.make_report import main as make_report
from plots.measurement import load_measurement
from plots.plot_prompts import plot_best_baselines, plot_prompt_traces, plot_score_norms, plot_variance_shares


def graded(text, ground_truth):
    """1 for the answer, -0.5 for no digit at all, between them by the first digit."""
    if text == str(ground_truth):
        return 1
    return -0.5 if not text else int(text[0]) / 10 - 0.6


@pytest.fixture
def graded_reward(monkeypatch):
    """The flag --reward offers the names of REWARDS: a reward of another scale under one of them."""
    monkeypatch.setitem(utils.REWARDS, "integer", Reward(utils.REWARDS["integer"].check, graded))


def measure(policy, problems, out, *more, capsys=None):
    """Both scripts, with the figure unless ``more`` says otherwise → (exit code, stdout, stderr) of the second."""
    assert oracle(policy, problems, out, "--n_oracle", 60)[0] == 0
    flags = ("--model", policy, "--oracle_table", out / "oracle_v_n60_four tokens.jsonl", "--save_json", out)
    return call(run_tracecov, *flags, "--K_list", 2, 4, "--M", 8, *FLAGS, *more, capsys=capsys)


def test_scripts_results_and_pictures_take_graded_rewards(graded_reward, policy, problems, tmp_path, capsys):
    code, out, err = measure(policy, problems, tmp_path, "--estimators", "all", "--budget", 16, capsys=capsys)
    assert code == 0, err
    assert "mean V" in out and ", from -" in out and "V = 0" not in out
    assert "rewards above V(x)" in out and "right answers" not in out
    for row in rows_of(tmp_path / "oracle_v_n60_four tokens.jsonl"):
        assert row["reward_values"] == "graded" and row["correct_count"] is None and -0.5 <= row["V_oracle"] <= 1
        assert row["V_standard_error_kind"] in ("sample", "unknown")
    results = read(tmp_path / "tracecov_four tokens.json")
    assert "above V(x)" in results["score_norm_sq"]["split"]
    records = list(gram_store.load_all(tmp_path / "grams"))
    silent = [np.mean([a == b for i, a in enumerate(r.rewards) for b in r.rewards[:i]]) for r in records]
    found = results["group_size_law"]["silent_share"]
    assert found["share"][0] == pytest.approx(np.mean(silent)) and found["continuations"] == 32
    above = np.concatenate([np.diag(q)[z > r.oracle_value] for r in records for q, z, _ in r.blocks])
    assert results["score_norm_sq"]["right"]["mean"] == pytest.approx(above.mean())
    assert results["estimators"]["dapo"]["trace_cov"][0] > 0
    assert "silent" in group_size_report(results["group_size_law"], 16)

    measured = load_measurement(tmp_path / "tracecov_four tokens.json")
    for plot in (plot_prompt_traces, plot_best_baselines):
        _, ax = plot(measured, 4)
        assert "expected reward" in ax.get_xlabel()
    plot_score_norms(measured)
    _, ax = plot_variance_shares(measured, 4)
    assert not any("0.25" in text.get_text() for text in ax.get_xticklabels())
    make_report([str(tmp_path / "tracecov_four tokens.json"), "--out", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").stat().st_size > 10_000

    assert from_grams(tmp_path / "grams", tmp_path / "again", "--K_list", 2, 3, "--estimators", "all")[0] == 0
    other = read(tmp_path / "again" / "tracecov_four tokens.json")
    assert other["conditional_on_x"]["grpo"][0] == pytest.approx(results["conditional_on_x"]["grpo"][0])


@pytest.mark.parametrize("bad, shown", [(float("nan"), "nan"), (float("inf"), "inf"), (None, "None"), ("yes", "'yes'")])
def test_a_reward_that_is_no_finite_number_names_the_prompt(bad, shown, monkeypatch, policy, problems, tmp_path, capsys):
    monkeypatch.setitem(utils.REWARDS, "integer", Reward(utils.REWARDS["integer"].check, lambda text, gold: bad))
    outcome = oracle(policy, problems, tmp_path, "--n_oracle", 4, capsys=capsys)
    one_line_error(outcome, "line 1", "integer", shown, "finite number")


def test_a_reward_declared_as_0_or_1_is_held_to_it(tmp_path, monkeypatch):
    (row,) = load_oracle_table(table_of(tmp_path, V_oracle=0.5))
    monkeypatch.setitem(utils.REWARDS, "integer", Reward(lambda gold: gold, lambda text, gold: 0.7, zero_one=True))
    with pytest.raises(UserError, match="line 1: .* is 0.7, not 0 or 1"):
        rewards_of(["a"], row, resolve_rewards("integer"))


def table_of(tmp_path, **columns):
    path = tmp_path / "table.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "ground_truth": 2, **columns}) + "\n")
    return path


@pytest.mark.parametrize("value", [-3.5, 1.2, 0.5, 70])
def test_a_graded_row_may_have_any_finite_oracle_value(tmp_path, value):
    path = table_of(tmp_path, V_oracle=value, n_oracle=10, correct_count=None, reward_values="graded")
    (row,) = load_oracle_table(path)
    assert row.oracle_value == value and row.correct_count is None


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(V_oracle=1.2), 'outside [0, 1]; where rewards are not 0 or 1 the row needs "reward_values": "graded"'),
        (dict(V_oracle=1.2, reward_values="0/1"), "outside [0, 1]"),
        (dict(V_oracle=0.5, reward_values="binary"), 'reward_values is "binary"'),
        (dict(V_oracle=0.5, reward_values=["graded"]), "reward_values is"),
        (dict(V_oracle=None, reward_values="graded"), "V_oracle is null"),
    ],
)
def test_other_rows_have_an_oracle_value_between_0_and_1(tmp_path, columns, message):
    with pytest.raises(UserError) as caught:
        load_oracle_table(table_of(tmp_path, **columns))
    assert message in str(caught.value) and "line 1" in str(caught.value)


# --- V's standard error ---


@pytest.mark.parametrize("n, right", [(1, 0), (256, 0), (256, 256), (64, 2), (1000, 400)])
def test_the_standard_error_of_v_is_that_of_jeffreys_posterior(n, right):
    found = oracle_columns((np.arange(n) < right).astype(float), zero_one=True)
    draws = np.random.default_rng(0).beta(right + 0.5, n - right + 0.5, size=400_000)
    assert found["V_standard_error"] == pytest.approx(draws.std(), rel=0.01) and found["V_standard_error"] > 0
    assert found["V_oracle"] == right / n and found["correct_count"] == right and found["reward_values"] == "0/1"


def test_the_standard_error_of_graded_rewards_is_the_samples():
    found = oracle_columns(np.array([-0.5, 1.0, 0.25]), zero_one=False)
    assert found["V_standard_error"] == pytest.approx(np.std([-0.5, 1.0, 0.25], ddof=1) / np.sqrt(3))
    assert found["V_standard_error_kind"] == "sample" and found["correct_count"] is None
    for rewards in ([0.1] * 3, [0.1]):
        found = oracle_columns(np.array(rewards), zero_one=False)
        assert found["V_standard_error"] is None and found["V_standard_error_kind"] == "unknown" and found["V_oracle"] == 0.1


def test_results_of_an_earlier_version_are_computed_again(policy, problems, tmp_path, capsys):
    assert measure(policy, problems, tmp_path, "--skip_plot")[0] == 0
    path = tmp_path / "tracecov_four tokens.json"
    results = read(path)
    del results["score_norm_sq"]["split"]
    path.write_text(json.dumps(results))
    assert "finished before" not in measure(policy, problems, tmp_path, "--skip_plot", capsys=capsys)[1].split("MSE of")[-1]
    assert "split" in read(path)["score_norm_sq"]
    assert "finished before" in measure(policy, problems, tmp_path, "--skip_plot", capsys=capsys)[1]


# --- the split of score norms ---


def test_score_norms_are_split_by_the_answer_or_by_v():
    gram = np.diag([1.0, 2, 3, 4])
    split = {}
    for rewards in ([1, 1, 1, 0], [2, 2, 2, 0]):
        records = [SimpleNamespace(oracle_value=1.5, blocks=[(gram, np.array(rewards, dtype=float), np.ones(4))])] * 3
        moments = reduce_prompts(records)
        found = summary_of(moments, [2], 20)["score_norm_sq"]
        split[moments.zero_one] = (found["right"]["mean"], found["wrong"]["mean"], found["split"])
    assert split[True] == (2.0, 4.0, "right: reward 1; wrong: reward 0")
    assert split[False] == (2.0, 4.0, "right: reward above V(x); wrong: reward not above V(x)")
