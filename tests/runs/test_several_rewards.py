"""Own and several rewards through both scripts: weights, each reward alone, left-out samples, other weights without a model."""

import json

import numpy as np
import pytest
from scripts import FLAGS, call, files_of, from_grams, one_line_error, oracle, read, rows_of, torchrun, tracecov

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.results.report import report
from Gradient_evaluation.runs.results.results_file import describe_each

SOURCE = """
from Gradient_evaluation.utils import integer_reward

def right(text, ground_truth):
    return integer_reward(text, ground_truth)

def shape(text):
    return len(text) / 2 - 0.5

def both(text, ground_truth):
    return -0.5 * right(text, ground_truth) + 2 * shape(text)

def some(completions, **columns):
    return [None if text.startswith("3") else len(text) / 2 for text in completions]

def few(completions, prompts, **columns):
    return [1.0 if text == "33" and prompts[0] == "2" else None for text in completions]

right.zero_one = True
"""
TABLE, RESULTS = "oracle_v_n40_four tokens.jsonl", "tracecov_four tokens.json"
SIZES = ("--K_list", 2, 4, "--M", 8)
MORE = ("--estimators", "greedy", "std_verl", "--by_layer", *SIZES)
CURVES = [f"{name}{end}" for name in ("conditional_on_x", "best_baseline", "signal_to_noise") for end in ("", "_ci95")]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(SOURCE)
    return {name: f"{path}:{name}" for name in "right shape both some few".split()}


@pytest.fixture(scope="module")
def made(policy, problems, tmp_path_factory):
    """made("name", *flags): a folder in which both scripts ran with these flags, once."""
    folders = {}

    def run(*flags):
        if flags not in folders:
            folders[flags] = tmp_path_factory.mktemp("made")
            assert oracle(policy, problems, folders[flags], "--n_oracle", 40, *flags)[0] == 0
            assert tracecov(policy, folders[flags] / TABLE, folders[flags], *MORE, *flags)[0] == 0
        return folders[flags]

    return run


@pytest.fixture(scope="module")
def two(made, rewards):
    return made("--reward", rewards["right"], rewards["shape"], "--reward_weights", -0.5, 2)


def assert_close(found, expected, rel=1e-9):
    """Two JSON values are the same, numbers to rounding."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name in expected:
            assert_close(found[name], expected[name], rel)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each in zip(found, expected):
            assert_close(*each, rel)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel, abs=1e-12)
    else:
        assert found == expected


def assert_same_results(found, expected):
    """All numbers of two results but those of the modules and the cosines."""
    for key in (*CURVES, "theta_norm_sq", "on_policy_check", "estimators"):
        assert_close(found[key], expected[key], 1e-6)
    for key in ("c1", "c2", "c3", "mean_theta_norm_sq", "G_star", "c1_ci95"):  # the sketches are float32
        assert_close(found["group_size_law"][key], expected["group_size_law"][key], 1e-4)


def test_several_rewards_are_their_weighted_sum_as_one(two, made, rewards):
    one = made("--reward", rewards["both"])
    for row, alone in zip(rows_of(two / TABLE), rows_of(one / TABLE)):
        assert row["V_oracle"] == pytest.approx(alone["V_oracle"], abs=1e-12)
        right, shape = (row["V_components"][f"own.py:{name}"] for name in ("right", "shape"))
        assert row["V_oracle"] == pytest.approx(-0.5 * right + 2 * shape, abs=1e-12)
        assert row["reward"] == ["own.py:right", "own.py:shape"] and row["reward_weights"] == [-0.5, 2.0]
        assert alone["reward"] == "own.py:both" and alone["reward_weights"] is None and "V_components" not in alone
        assert row["reward_digest"] == [alone["reward_digest"]] * 2 and row["reward_values"] == "graded"
    for a, b in zip(gram_store.load_all(two / "grams"), gram_store.load_all(one / "grams")):
        assert all((x == y).all() for x, y in zip(a.grams, b.grams))
        np.testing.assert_allclose(a.rewards, [-0.5, 2] @ a.components, rtol=1e-12)
        np.testing.assert_allclose(a.rewards, b.rewards, rtol=1e-12)
        assert a.greedy_reward == pytest.approx(b.greedy_reward) and b.components is None is b.component_sketch
    found, expected = read(two / RESULTS), read(one / RESULTS)
    assert_same_results(found, expected)
    assert_close(found["by_layer"]["trace_cov"], expected["by_layer"]["trace_cov"], 1e-6)
    assert "by_reward" not in expected and expected["config"]["reward"] == rewards["both"]
    assert found["config"]["reward"] == [rewards["right"], rewards["shape"]]


def test_each_reward_alone_is_a_run_with_it(two, made):
    alone, found = read(made("--reward", "integer") / RESULTS), read(two / RESULTS)["by_reward"]["own.py:right"]
    for key in ("conditional_on_x", "conditional_on_x_ci95", "theta_norm_sq", "best_baseline"):
        assert_close(found[key], alone[key], 1e-6)
    for key in ("c1", "c2", "c3"):
        assert_close(found["group_size_law"][key], alone["group_size_law"][key], 1e-4)
    records = list(gram_store.load_all(two / "grams"))
    assert found["mean_reward"] == pytest.approx(np.mean([record.components[0].mean() for record in records]))
    assert found["weight"] == -0.5 and found["n_rewards"] == sum(len(record.rewards) for record in records)
    lines = report(read(two / RESULTS)).splitlines()
    assert any(line.startswith(f"  own.py:right (-0.5): {found['mean_reward']:.3g} | ") for line in lines)


@pytest.mark.parametrize("weights", [(1, 1), (3, -1), (1, 0)])
def test_other_weights_need_no_model(two, made, rewards, weights, tmp_path):
    expected = read(made("--reward", rewards["right"], rewards["shape"], "--reward_weights", *weights) / RESULTS)
    flags = ("--K_list", 2, 4, "--estimators", "greedy", "std_verl")
    assert from_grams(two / "grams", tmp_path, *flags, "--reward_weights", *weights)[0] == 0
    found = read(tmp_path / RESULTS)
    assert_same_results(found, expected)
    for name, each in found["by_reward"].items():
        assert_close({key: each[key] for key in CURVES}, {key: expected["by_reward"][name][key] for key in CURVES})
    assert found["law"]["reward_weights"] == found["config"]["reward_weights"] == list(weights)
    assert "by_layer" not in found and found["reasons"]["by_layer"].startswith(
        "the moments of the modules are those of the weights"
    )
    law = found["group_size_law"]
    assert law["cosine_to_gradient"] == {} and law["reasons"]["cosine_to_gradient"].startswith("the sketches of the other")


def test_results_of_two_weightings_are_told_apart(two, made, rewards):
    other = made("--reward", rewards["right"], rewards["shape"], "--reward_weights", 1, 1)
    named = describe_each([read(folder / RESULTS) for folder in (two, other)])
    assert [text.splitlines()[2] for text in named] == ["weights -0.5 2 of the rewards", "weights 1 1 of the rewards"]
    named = describe_each([read(folder / RESULTS) for folder in (two, made("--reward", "integer"))])
    assert "own.py:right own.py:shape reward" in named[0] and "integer reward" in named[1]


def test_the_weights_of_the_run_change_nothing(two, tmp_path):
    for name, flags in (("a", ()), ("b", ("--reward_weights", -0.5, 2))):
        assert from_grams(two / "grams", tmp_path / name, "--K_list", 2, 4, *flags)[0] == 0
    without, given = ({**read(tmp_path / name / RESULTS), "seconds": 0, "config": 0} for name in "ab")
    assert without == given and "by_layer" in given
    assert read(tmp_path / "a" / RESULTS)["config"]["reward_weights"] == [-0.5, 2.0]


def test_weights_that_the_grams_do_not_have_are_one_line(two, made, tmp_path, capsys):
    wrong = from_grams(two / "grams", tmp_path, "--reward_weights", 1, capsys=capsys)
    one_line_error(wrong, "--reward_weights: 1 weights for 2 rewards (own.py:right, own.py:shape)")
    one = made("--reward", "integer")
    one_line_error(from_grams(one / "grams", tmp_path, "--reward_weights", 2, capsys=capsys), "these Grams have one reward")
    assert from_grams(one / "grams", tmp_path / "one", "--reward_weights", 1, "--K_list", 2)[0] == 0
    capsys.readouterr()
    huge = from_grams(two / "grams", tmp_path, "--reward_weights", 1e30, 1e30, "--K_list", 2, capsys=capsys)
    one_line_error(huge, "--reward_weights: a weighted sum of rewards whose size is neither 0 nor from 1e-30 to 1e30")


def test_without_v_of_each_reward_the_oracle_is_cross_fitted(two, policy, tmp_path):
    rows = [{name: value for name, value in row.items() if name != "V_components"} for row in rows_of(two / TABLE)]
    (tmp_path / TABLE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    law = read(two / "grams" / "run.json")
    flags = ("--reward", *read(two / RESULTS)["config"]["reward"], "--reward_weights", *law["reward_weights"])
    assert tracecov(policy, tmp_path / TABLE, tmp_path, *SIZES, *flags)[0] == 0
    assert from_grams(tmp_path / "grams", tmp_path / "b", "--K_list", 2, 4, "--reward_weights", 1, 1)[0] == 0
    before, after = read(tmp_path / RESULTS), read(tmp_path / "b" / RESULTS)
    assert before["V_source"] == "table" and after["V_source"] == "cross-fitted"
    assert after["conditional_on_x"]["oracleV"][0] > 0 and before["by_reward"]["own.py:shape"]["V_source"] == "cross-fitted"


# --- samples that a reward leaves out ---


def test_a_sample_without_a_reward_is_left_out(made, rewards, problems, policy, capsys):
    out = made("--reward", rewards["some"])
    rows, whole = rows_of(out / TABLE), rows_of(made("--reward", "integer") / TABLE)
    assert any(row["n_left_out"] for row in rows if "n_left_out" in row)
    for row, all_of_them in zip(rows, whole):
        assert row["n_oracle"] + row.get("n_left_out", 0) == all_of_them["n_oracle"] == 40
        assert row["V_oracle"] in (0.0, 0.5, 1.0) or 0 < row["V_oracle"] < 1
    left_out = 0
    for record, full in zip(gram_store.load_all(out / "grams"), gram_store.load_all(made("--reward", "integer") / "grams")):
        left_out += record.n_left_out or 0
        assert len(record.rewards) + (record.n_left_out or 0) == len(full.rewards) == 32
        assert np.isfinite(record.rewards).all() and sum(map(len, record.grams)) == len(record.lengths) == len(record.rewards)
        kept = np.concatenate([np.diag(gram) for gram in record.grams])
        assert np.isin(kept.round(6), np.concatenate([np.diag(gram) for gram in full.grams]).round(6)).all()
    assert left_out == read(out / RESULTS)["n_left_out"] > 0
    assert f"note: {left_out} continuations had no reward (None) and are left out" in report(read(out / RESULTS))
    capsys.readouterr()
    assert oracle(policy, problems, out, "--n_oracle", 40, "--reward", rewards["some"], capsys=capsys)[1].startswith(
        "finished before"
    )
    total = sum(row.get("n_left_out", 0) for row in rows)
    table = (out / TABLE).read_bytes()
    (out / TABLE).write_bytes(b"".join(table.splitlines(keepends=True)[:2]))
    code, said, _ = oracle(policy, problems, out, "--n_oracle", 40, "--reward", rewards["some"], capsys=capsys)
    assert code == 0 and f"{total} continuations left out (no reward)" in said and (out / TABLE).read_bytes() == table


def test_none_of_one_reward_of_several_counts_as_0(made, rewards):
    out = made("--reward", rewards["right"], rewards["some"])
    results = read(out / RESULTS)
    assert results["n_left_out"] == 0
    records = list(gram_store.load_all(out / "grams"))
    absent = [np.isnan(record.components[1]) for record in records]
    assert 0 < sum(map(sum, absent)) == 160 - results["by_reward"]["own.py:some"]["n_rewards"]
    for record, none in zip(records, absent):
        np.testing.assert_array_equal(record.rewards[none], record.components[0][none])
        np.testing.assert_allclose(record.rewards[~none], record.components.sum(0)[~none])
    means = [record.components[1][~none].mean() for record, none in zip(records, absent) if not none.all()]
    assert results["by_reward"]["own.py:some"]["mean_reward"] == pytest.approx(np.mean(means))


def test_a_prompt_without_rewards_is_one_line(rewards, policy, problems, table, tmp_path, capsys):
    wrong = oracle(policy, problems, tmp_path, "--n_oracle", 8, "--reward", rewards["few"], capsys=capsys)
    one_line_error(wrong, "problems.jsonl, line 1: every reward of every continuation is None")
    wrong = tracecov(policy, table, tmp_path, *SIZES, "--reward", rewards["few"], "--allow_mismatch", capsys=capsys)
    assert wrong[0] == 2 and "of 32 continuations have a reward (the others None); at least 4 are needed" in wrong[2]
    assert not list((tmp_path / "grams").glob("*.npz"))


# --- a file that changes, older files ---


def test_a_changed_reward_file_is_refused(policy, problems, tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    flags = ("--reward", f"{path}:right")
    assert oracle(policy, problems, tmp_path, "--n_oracle", 8, *flags)[0] == 0
    table = tmp_path / "oracle_v_n8_four tokens.jsonl"
    assert tracecov(policy, table, tmp_path, *SIZES, *flags)[0] == 0
    files = files_of(tmp_path)
    path.write_text(SOURCE + "# another\n")
    capsys.readouterr()
    told = ("reward_digest", "the file of --reward", "has changed since")
    one_line_error(oracle(policy, problems, tmp_path, "--n_oracle", 8, *flags, capsys=capsys), "line 1", *told, "--overwrite")
    one_line_error(tracecov(policy, table, tmp_path, *SIZES, *flags, capsys=capsys), table.name, *told, "--allow_mismatch")
    code, _, err = tracecov(policy, table, tmp_path, *SIZES, *flags, "--allow_mismatch", capsys=capsys)
    assert code == 2 and err.splitlines()[-1].startswith(f"error: {tmp_path / 'grams' / 'run.json'}: made with reward_digest")
    path.write_text(SOURCE)
    assert "finished before" in tracecov(policy, table, tmp_path, *SIZES, *flags, capsys=capsys)[1]
    assert files_of(tmp_path) == files


def test_files_of_before_these_flags_are_continued(policy, problems, tmp_path, capsys):
    assert oracle(policy, problems, tmp_path, "--n_oracle", 40)[0] == 0
    assert tracecov(policy, tmp_path / TABLE, tmp_path, *SIZES)[0] == 0
    new = files_of(tmp_path)
    rows = rows_of(tmp_path / TABLE)
    identity, results = read(tmp_path / "grams" / "run.json"), read(tmp_path / RESULTS)
    assert rows[0]["reward"] == identity["reward"] == results["config"]["reward"] == "integer"
    for each in (*rows, identity):
        assert each.pop("reward_weights") is each.pop("reward_digest") is None
    results["config"] = {name: value for name, value in results["config"].items() if not name.startswith("reward_")}
    (tmp_path / TABLE).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:3]))
    (tmp_path / "grams" / "run.json").write_text(json.dumps(identity))
    (tmp_path / RESULTS).write_text(json.dumps(results))
    assert oracle(policy, problems, tmp_path, "--n_oracle", 40)[0] == 0
    assert [row["V_oracle"] for row in rows_of(tmp_path / TABLE)] == [row["V_oracle"] for row in rows]
    said = tracecov(policy, tmp_path / TABLE, tmp_path, *SIZES, capsys=capsys)[1]
    assert "finished before" in said
    gone = sorted((tmp_path / "grams").glob("*.npz"))[0]
    gone.unlink()
    assert tracecov(policy, tmp_path / TABLE, tmp_path, *SIZES)[0] == 0
    again = files_of(tmp_path)
    assert {name for name in new if name.endswith(".npz") and new[name] != again[name]} == set()


@pytest.mark.parametrize(
    "flags, told",
    [
        (
            ("--reward", "integer", "maths"),
            "invalid choice: 'maths' (choose from 'integer', 'last_integer', 'math', or path/file.py",
        ),
        (("--reward", "integer", "--reward_weights", "1", "2"), "2 weights for 1 rewards"),
        (("--reward", "integer", "--reward_weights", "x"), "'x' is not a number"),
        (("--reward", "nowhere.py:f"), "there is no file nowhere.py"),
        (("--reward_timeout", "0"), "--reward_timeout: must be in (0"),
    ],
)
def test_wrong_flags_are_one_line_before_a_model_is_loaded(flags, told, problems, tmp_path, capsys):
    one_line_error(oracle(tmp_path / "no model", problems, tmp_path / "out", *flags, capsys=capsys), told)
    assert not (tmp_path / "out").exists()


def test_a_fault_names_the_prompt_and_leaves_whole_rows(policy, problems, tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text("def f(text, prompt):\n    return 1.0 if prompt != '321' else None + 1\n")
    wrong = oracle(policy, problems, tmp_path, "--n_oracle", 8, "--reward", f"{path}:f", capsys=capsys)
    one_line_error(
        wrong, "problems.jsonl, line 3: the reward own.py:f raised TypeError", "(own.py, line 2)", "continuation 1, '"
    )
    assert len(rows_of(tmp_path / "oracle_v_n8_four tokens.jsonl")) == 2
    slow = tmp_path / "slow.py"
    slow.write_text("def f(text):\n    while True: pass\n")
    flags = ("--reward", f"{slow}:f", "--reward_timeout", 0.5)
    one_line_error(
        oracle(policy, problems, tmp_path / "b", "--n_oracle", 8, *flags, capsys=capsys), "took more than 0.5 seconds"
    )


@pytest.mark.slow
def test_processes_share_the_prompts_of_an_own_reward(two, policy, rewards, tmp_path):
    flags = ("--reward", rewards["right"], rewards["shape"], "--reward_weights", -0.5, 2)
    given = ["--model", policy, "--oracle_table", two / TABLE, "--save_json", tmp_path, "--skip_plot", *FLAGS, *MORE, *flags]
    code, _, err = torchrun([run_tracecov.__file__, *given])
    assert code == 0, err
    for path in (two / "grams").glob("*.npz"):
        a, b = gram_store.load(path), gram_store.load(tmp_path / "grams" / path.name)
        np.testing.assert_array_equal(a.components, b.components)


def test_figures_are_drawn_of_several_rewards(two, policy, tmp_path):
    flags = ("--from_grams", two / "grams", "--K_list", 2, 4, "--reward_weights", 1, 1)
    assert call(run_tracecov, *flags, "--save_json", tmp_path)[0] == 0
    assert (tmp_path / "tracecov_four tokens.png").stat().st_size > 1000
