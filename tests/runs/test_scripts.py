"""The two scripts end to end, in process, on a policy whose every number is an exact sum."""

import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from scripts import ANSWERS, PROMPTS, ROOT, call, detailed_rows, from_grams, one_line_error, oracle, read, rows_of, tracecov
from tiny_models import enumerable_policy, enumerate_outcomes, tiny_tokenizer

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.results.report import report
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.utils import integer_reward

LAW = SamplingLaw(temperature=1.3, top_p=0.9, max_new_tokens=2)


@pytest.fixture(scope="session")
def measured(policy, table, tmp_path_factory):
    out = tmp_path_factory.mktemp("tracecov")
    assert tracecov(policy, table, out, "--K_list", 8, 2, "4,3", "--M", 60)[0] == 0
    return out


class Truth:
    """Exact V, Gram and traces of one prompt, from enumeration and plain autograd."""

    def __init__(self, prompt, answer):
        outcomes = enumerate_outcomes(enumerable_policy(vocabulary=4, seed=6), [int(c) for c in prompt], LAW)
        self.p = np.array([o.probability for o in outcomes])
        self.rewards = np.array([integer_reward("".join("?123"[t] for t in o.tokens if t), answer) for o in outcomes])
        scores = torch.stack([o.score for o in outcomes])
        self.scores = scores.numpy()
        self.gram = self.scores @ self.scores.T
        self.V = float(self.p @ self.rewards)

        # Pairs of outcomes: h_ij = (g_i - g_j)(Z_i - Z_j) / 2, its conditional mean, and the two variances.
        z = self.rewards
        h = (self.scores[:, None] - self.scores[None]) * (z[:, None] - z[None])[..., None] / 2
        given_first, theta = np.einsum("j,ijd->id", self.p, h), np.einsum("i,j,ijd->d", self.p, self.p, h)
        self.zeta1 = self.p @ (given_first**2).sum(-1) - theta @ theta
        self.zeta2 = self.p @ (h**2).sum(-1) @ self.p - theta @ theta

    def trace_of_group(self, K):
        """GRPO's tr Cov at any K."""
        return 4 * self.zeta1 / K + (2 * self.zeta2 - 4 * self.zeta1) / (K * (K - 1))

    def trace(self, K, baseline):
        """tr Cov of (1/K) sum_i g_i (Z_i - C_i) over all K-tuples of outcomes."""
        n = len(self.p)
        tuples = np.array(list(itertools.product(range(n), repeat=K)))
        weight = self.p[tuples].prod(1)
        z = self.rewards[tuples]
        c = (z.sum(1, keepdims=True) - z) / (K - 1) if baseline == "leave-one-out" else baseline
        a = np.zeros((len(tuples), n))
        np.add.at(a, (np.arange(len(tuples))[:, None], tuples), (z - c) / K)
        mean = weight @ a
        return weight @ np.einsum("ti,ij,tj->t", a, self.gram, a) - mean @ self.gram @ mean


@pytest.fixture(scope="session")
def truths():
    return [Truth(p, a) for p, a in zip(PROMPTS, ANSWERS)]


def test_oracle_values_are_exact_within_their_standard_error(table, truths):
    rows = rows_of(table)
    assert [row["prompt"] for row in rows] == PROMPTS
    assert any(0.05 < truth.V < 0.95 for truth in truths)
    for row, truth in zip(rows, truths):
        assert abs(row["V_oracle"] - truth.V) <= 4.5 * np.sqrt(truth.V * (1 - truth.V) / 400)
        assert row["correct_count"] == round(row["V_oracle"] * 400) and row["n_oracle"] == 400
        c = row["correct_count"]
        a, b = c + 0.5, 400 - c + 0.5
        assert row["V_standard_error"] == pytest.approx(np.sqrt(a * b / (a + b) ** 2 / (a + b + 1)))  # Beta(a, b)
        assert row["V_standard_error_kind"] == "jeffreys" and row["reward_values"] == "0/1"
        assert row["kind"] == "x" and row["temperature"] == 1.3 and row["top_p"] == 0.9 and row["model"] == "four tokens"


def test_traces_at_every_group_size_are_the_exact_sums(measured, truths):
    records = list(gram_store.load_all(measured / "grams"))
    assert [record.prompt for record in records] == PROMPTS
    for record, truth in zip(records, truths):
        best = truth.p @ (truth.rewards * np.diag(truth.gram)) / (truth.p @ np.diag(truth.gram))
        blocks = [
            gram_store.GramRecord(**{**vars(record), "grams": [g], "rewards": z, "lengths": n}) for g, z, n in record.blocks
        ]
        for K in (2, 3, 4):
            whole = estimators.prompt_trace_covs(estimators.reduce_prompts([record]), K)
            alone = estimators.prompt_trace_covs(estimators.reduce_prompts(blocks), K)
            exact = {
                "naive": truth.trace(K, 0.0),
                "grpo": truth.trace(K, "leave-one-out"),
                "oracleV": truth.trace(K, record.oracle_value),
            }
            for name, value in exact.items():
                error = np.std(alone[name], ddof=1) / np.sqrt(len(blocks))
                assert abs(whole[name][0] - value) <= 4.5 * error, (record.prompt, K, name)
            floor = whole["best_baseline"][0]
            assert abs(floor - truth.trace(K, best)) <= 4.5 * np.std(alone["oracleV"], ddof=1) / np.sqrt(len(blocks))


def test_results_have_the_published_keys(measured):
    results = read(measured / "tracecov_four tokens.json")
    assert results["K_list"] == [2, 3, 4, 8]
    assert set(results["conditional_on_x"]) == {"naive", "grpo", "oracleV"}
    assert all(len(values) == 4 for values in results["conditional_on_x"].values())
    assert results["config"]["M"] == 60 and results["law"]["top_p"] == 0.9 and "torch" in results["versions"]
    detailed = detailed_rows(measured / "tracecov_four tokens_K4_detailed.json")
    assert [row["prompt"] for row in detailed] == PROMPTS and [row["V_oracle"] for row in detailed]
    for name, values in results["conditional_on_x"].items():
        assert np.mean([row["trace_cov"][name] for row in detailed]) == pytest.approx(values[2])


def test_published_scoring_fails_the_on_policy_check(measured, policy, table, tmp_path):
    exact = read(measured / "tracecov_four tokens.json")["on_policy_check"]
    assert abs(exact["ratio"]) < 4 * exact["standard_error"]
    assert tracecov(policy, table, tmp_path, "--K_list", 8, "--M", 60, "--scoring", "published")[0] == 0
    results = read(tmp_path / "tracecov_four tokens.json")
    published = results["on_policy_check"]
    assert published["warning"].startswith("--scoring published") and "on_policy_check.warning" not in results["reasons"]
    assert exact["warning"] is None
    assert published["ratio"] > 2.5 * published["standard_error"]  # the error is over five unlike prompts
    assert published["ratio"] > 20 * abs(exact["ratio"])


def test_stored_grams_give_the_same_results_without_a_model(measured, tmp_path):
    code = call(run_tracecov, "--from_grams", measured / "grams", "--K_list", 2, 5, 8, "--save_json", tmp_path)[0]
    assert code == 0
    first, again = read(measured / "tracecov_four tokens.json"), read(tmp_path / "tracecov_four tokens.json")
    for name in ("naive", "grpo", "oracleV"):
        before, after = first["conditional_on_x"][name], again["conditional_on_x"][name]
        assert (after[0], after[2]) == pytest.approx((before[0], before[3]), rel=1e-12) and before[3] < after[1] < before[2]
    assert again["on_policy_check"] == first["on_policy_check"]
    assert (tmp_path / "tracecov_four tokens.png").stat().st_size > 1000


def test_from_grams_of_no_grams_folder_says_what_to_give(tmp_path, capsys):
    code, _, err = call(run_tracecov, "--from_grams", tmp_path / "none", "--save_json", tmp_path / "out", capsys=capsys)
    assert code == 2 and "run.json: missing or damaged; give the grams folder of a finished run" in err
    assert "--overwrite" not in err and not (tmp_path / "out").exists()


def test_a_run_with_a_damaged_identity_may_overwrite(policy, table, tmp_path, capsys):
    few = ("--K_list", 4, "--M", 4)
    assert tracecov(policy, table, tmp_path, *few)[0] == 0
    (tmp_path / "grams" / "run.json").write_text("{")
    one_line_error(tracecov(policy, table, tmp_path, *few, capsys=capsys), "missing or damaged", "pass --overwrite")
    assert tracecov(policy, table, tmp_path, *few, "--overwrite")[0] == 0


def test_from_grams_refuses_flags_without_effect(measured, tmp_path, capsys):
    flags = ("--from_grams", measured / "grams", "--K_list", 4, "--skip_plot", "--save_json", tmp_path)
    for given in (("--M", 60), ("--temperature=1",), ("--model", "x"), ("--T", 3, "--seed", 1), ("--oracle_table", "t.jsonl")):
        names = [str(flag).partition("=")[0] for flag in given if str(flag).startswith("--")]
        one_line_error(call(run_tracecov, *flags, *given, capsys=capsys), "no effect with --from_grams", *names)
    assert not list(tmp_path.iterdir())
    assert call(run_tracecov, *flags, "--budget", 64, "--quiet")[0] == 0
    config, made = (read(folder / "tracecov_four tokens.json")["config"] for folder in (tmp_path, measured))
    for name in ("model", "top_p", "seed", "M", "T", "block_size", "scoring"):
        assert config[name] == (made[name] if name != "model" else "four tokens")
    assert config["gen_bs"] is None and config["K_list"] == [4] and made["K_list"] == [2, 3, 4, 8]


def test_intervals_from_stored_grams_are_those_of_the_run(policy, table, tmp_path):
    flags = ("--K_list", 4, "--M", 2)
    assert tracecov(policy, table, tmp_path / "a", *flags, "--seed", 5)[0] == 0
    assert from_grams(tmp_path / "a" / "grams", tmp_path / "b", "--K_list", 4)[0] == 0
    first, again = (read(tmp_path / folder / "tracecov_four tokens.json") for folder in "ab")
    assert again["conditional_on_x_ci95"] == first["conditional_on_x_ci95"] and again["bootstrap"]["seed"] == 5


def test_a_wrong_flag_is_refused_before_the_large_imports():
    code = (
        "import runpy, sys\nsys.argv = [sys.argv[1], *sys.argv[2:]]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: print(end.code, *({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    for script, flags, text in (
        ("calculate_oracle_v.py", ["--n_oracle", "0"], "--n_oracle"),
        ("run_tracecov.py", ["--oracle_table", "t", "--save_json", "s", "--estimators", "gpro"], "unknown estimator 'gpro'"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, ROOT / "Gradient_evaluation" / script, *flags], capture_output=True, text=True
        )
        assert done.stdout == "2\n" and len(done.stderr.splitlines()) == 1 and text in done.stderr, done.stderr
    command = [
        sys.executable,
        ROOT / "Gradient_evaluation" / "run_tracecov.py",
        *"--oracle_table t --save_json s --K_list 1".split(),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch(r"error: --K_list: a group size must be at least 2, got 1\n", done.stderr)


def test_continuations_do_not_depend_on_batch_sizes(policy, table, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    assert tracecov(policy, table, small, "--K_list", 8, "--M", 3, "--block_size", 5, "--gen_bs", 3)[0] == 0
    assert tracecov(policy, table, large, "--K_list", 8, "--M", 3, "--gen_bs", 24)[0] == 0
    for a, b in zip(gram_store.load_all(small / "grams"), gram_store.load_all(large / "grams")):
        assert [len(g) for g in a.grams] == [5, 5, 5, 5, 4] and [len(g) for g in b.grams] == [8, 8, 8]
        assert (a.rewards == b.rewards).all() and (a.lengths == b.lengths).all()
        np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=1e-10)
        np.testing.assert_allclose(np.diag(a.grams[0]), np.diag(b.grams[0])[:5], rtol=1e-9)


def test_oracle_batches_of_any_size_give_the_same_table(policy, problems, table, tmp_path):
    assert oracle(policy, problems, tmp_path, "--batch_size", 7)[0] == 0
    assert (tmp_path / table.name).read_bytes() == table.read_bytes()


@pytest.mark.parametrize("left", [0, 1, 2.5, 5])
def test_a_stopped_oracle_run_continues_to_the_same_bytes(policy, problems, table, tmp_path, left):
    lines = table.read_bytes().splitlines(keepends=True)
    torn = b"" if left == int(left) else lines[int(left)][:40]
    (tmp_path / table.name).write_bytes(b"".join(lines[: int(left)]) + torn)
    assert oracle(policy, problems, tmp_path)[0] == 0
    assert (tmp_path / table.name).read_bytes() == table.read_bytes()


def test_a_stopped_tracecov_run_continues_to_the_same_results(policy, table, tmp_path):
    flags = ("--K_list", 4, "--M", 2)
    assert tracecov(policy, table, tmp_path, *flags)[0] == 0
    files = {p: p.read_bytes() for p in (tmp_path / "grams").iterdir()}
    results = read(tmp_path / "tracecov_four tokens.json")
    gone = sorted(p for p in files if p.suffix == ".npz")[1:4]
    for p in gone:
        p.unlink()
    assert tracecov(policy, table, tmp_path, *flags)[0] == 0
    assert {p: p.read_bytes() for p in (tmp_path / "grams").iterdir()} == files
    again = read(tmp_path / "tracecov_four tokens.json")
    assert {**again, "seconds": 0} == {**results, "seconds": 0}


def test_results_of_another_configuration_are_not_mixed_in(policy, problems, table, tmp_path, capsys):
    (tmp_path / table.name).write_bytes(table.read_bytes())
    one_line_error(oracle(policy, problems, tmp_path, "--seed", 1, capsys=capsys), "seed = 0", "1", "--overwrite")
    assert (tmp_path / table.name).read_bytes() == table.read_bytes()
    assert tracecov(policy, table, tmp_path / "t", "--K_list", 4, "--M", 2)[0] == 0
    capsys.readouterr()
    for name, then, now in (("scoring", "exact", "published"), ("gram_dtype", "float32", "bfloat16")):
        changed = tracecov(policy, table, tmp_path / "t", "--K_list", 4, "--M", 2, f"--{name}", now, capsys=capsys)
        one_line_error(changed, f"{name} = '{then}'", f"'{now}'")
    assert tracecov(policy, table, tmp_path / "t", "--K_list", 4, "--M", 2, "--seed", 1, "--overwrite")[0] == 0


def test_a_table_of_another_law_needs_allow_mismatch(policy, table, tmp_path, capsys):
    other = ["--temperature", "0.5", "--K_list", 4, "--M", 1]
    one_line_error(
        tracecov(policy, table, tmp_path / "a", *other, capsys=capsys), "temperature", "1.3", "0.5", "--allow_mismatch"
    )
    assert not (tmp_path / "a").exists()
    assert tracecov(policy, table, tmp_path / "a", *other, "--allow_mismatch")[0] == 0


def test_a_table_made_with_other_weights_is_refused(table, tmp_path, capsys):
    folder = tmp_path / "four tokens"
    enumerable_policy(vocabulary=4, seed=7).save_pretrained(folder)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(folder)
    one_line_error(tracecov(folder, table, tmp_path / "a", "--K_list", 4, "--M", 1, capsys=capsys), "other weights")


def test_a_table_of_the_published_script_gives_a_warning(policy, table, tmp_path, capsys):
    bare = tmp_path / "published.jsonl"
    keep = ("prompt", "ground_truth", "V_oracle", "n_oracle", "correct_count")
    bare.write_text("".join(json.dumps({k: row[k] for k in keep}) + "\n" for row in rows_of(table)))
    code, out, err = tracecov(policy, bare, tmp_path / "a", "--K_list", 4, "--M", 1, capsys=capsys)
    assert code == 0 and err.count("warning") == 1 and "MSE" in out


@pytest.mark.parametrize(
    "flags",
    [
        *("--K_list 1", "--K_list 0", "--K_list -4", "--M 0", "--T 0", "--top_p 0", "--top_p 1.5", "--temperature 0"),
        *("--top_p nan", "--temperature inf", "--max_new_tokens 0", "--block_size 3", "--gen_bs 0", "--device tpu9"),
        *("--dtype int8", "--no_such 1"),
    ],
)
def test_a_bad_flag_is_refused_by_name_before_any_work(policy, table, tmp_path, capsys, flags):
    outcome = tracecov(policy, table, tmp_path / "out", "--K_list", "4", *flags.split(), capsys=capsys)
    one_line_error(outcome, flags.split()[0])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--n_oracle", "0"),
        ("--batch_size", "0"),
        ("--top_p", "0"),
        ("--temperature", "0"),
        ("--dataset", "no/such/file.jsonl"),
        ("--model", "./no_such_model"),
    ],
)
def test_a_bad_oracle_flag_is_refused_by_name_before_any_work(policy, problems, tmp_path, capsys, flags):
    outcome = oracle(policy, problems, tmp_path / "out", *flags, capsys=capsys)
    one_line_error(outcome, flags[1] if flags[0] == "--dataset" else flags[0])
    assert not list((tmp_path / "out").glob("*"))


def test_a_prompt_longer_than_the_context_is_refused_by_row(policy, tmp_path, capsys):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "1" * 63, "ground_truth": 1}) + "\n")
    one_line_error(oracle(policy, long, tmp_path / "out", capsys=capsys), "line 1", "64")


def test_fewer_rows_than_T_average_over_the_rows_there_are(policy, table, tmp_path, capsys):
    assert tracecov(policy, table, tmp_path / "a", "--K_list", 4, "--M", 2, "--T", 400)[0] == 0
    assert read(tmp_path / "a" / "tracecov_four tokens.json")["n_prompts"] == 5
    assert tracecov(policy, table, tmp_path / "b", "--K_list", 4, "--M", 2, "--T", 3)[0] == 0
    assert len(detailed_rows(tmp_path / "b" / "tracecov_four tokens_K4_detailed.json")) == 3


def test_the_scripts_run_from_any_folder(tmp_path):
    for script in ("calculate_oracle_v.py", "run_tracecov.py"):
        path = ROOT / "Gradient_evaluation" / script
        shown = subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True)
        assert shown.returncode == 0 and "--max_new_tokens" in shown.stdout
    command = [sys.executable, path, "--oracle_table", "missing.jsonl", "--save_json", "a"]
    bad = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and "missing.jsonl" in bad.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script",
    [
        "Gradient_evaluation/calculate_oracle_v.py",
        "Gradient_evaluation/run_tracecov.py",
        "data/prepare_parquet.py jsonl",
        "Policy_Optimization/train_group_sizes.py",
        "plots/plot_tracecov.py a.json --out a.pdf",
        "plots/plot_group_size.py a.json --out a.pdf",
        "plots/plot_training.py run --out a.pdf",
        "plots/make_report.py a.json",
    ],
)
def test_a_python_without_the_packages_is_one_line(script):
    command = [sys.executable, "-S", *script.split()]  # no site-packages
    bare = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert bare.returncode == 2 and bare.stdout == ""
    assert re.fullmatch(r"error: \S+ has no package \w+; activate the environment .*\n", bare.stderr), bare.stderr


def test_a_module_of_ours_that_is_missing_keeps_its_traceback():
    code = (
        "import sys; sys.path.insert(0, '.')\nfrom Gradient_evaluation.cli import importing\n"
        "with importing():\n    import Gradient_evaluation.no_such_module"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_layers_add_up_to_the_whole(policy, table, tmp_path, capsys):
    flags = ("--K_list", 4, 6, "--M", 2)
    assert tracecov(policy, table, tmp_path / "all", *flags, "--by_layer")[0] == 0
    printed = re.findall(r"^ +(-?[\d.]+)%  (\S+)$", capsys.readouterr().out, re.MULTILINE)
    whole = read(tmp_path / "all" / "tracecov_four tokens.json")
    layers = whole["by_layer"]
    shares = dict(zip(layers["modules"], np.array(layers["trace_cov"]["grpo"][0]) / whole["conditional_on_x"]["grpo"][0]))
    assert [name for _, name in printed] == sorted(shares, key=shares.get, reverse=True)[:5]
    assert all(float(share) == pytest.approx(100 * shares[name], abs=0.051) for share, name in printed)
    assert len(layers["modules"]) == len(set(layers["modules"])) > 5
    for name, values in whole["conditional_on_x"].items():
        np.testing.assert_allclose(np.sum(layers["trace_cov"][name], axis=1), values, rtol=1e-9)
        assert np.shape(layers["trace_cov_ci95"][name]) == (2, len(layers["modules"]), 2)
    assert tracecov(policy, table, tmp_path / "part", *flags, "--params", r"\.c_attn\.|ln_f")[0] == 0
    part = read(tmp_path / "part" / "tracecov_four tokens.json")
    chosen = [i for i, module in enumerate(layers["modules"]) if "c_attn" in module or "ln_f" in module]
    assert len(chosen) == 2
    for name, values in part["conditional_on_x"].items():
        np.testing.assert_allclose(np.array(layers["trace_cov"][name])[:, chosen].sum(1), values, rtol=1e-9)
    assert from_grams(tmp_path / "all" / "grams", tmp_path / "again", "--K_list", 4, 6)[0] == 0
    again = read(tmp_path / "again" / "tracecov_four tokens.json")["by_layer"]
    assert again["modules"] == layers["modules"] and again.keys() == layers.keys()
    for kind in ("trace_cov", "trace_cov_ci95"):
        for name, values in layers[kind].items():
            np.testing.assert_allclose(again[kind][name], values, rtol=1e-9, atol=1e-12)


def test_a_stop_string_may_be_typed_as_a_shell_takes_it(tmp_path, capsys):
    folder, data = tmp_path / "lines", tmp_path / "data.jsonl"
    enumerable_policy(vocabulary=4, seed=6).save_pretrained(folder)
    tiny_tokenizer(("<eos>", "1", "\n", "3")).save_pretrained(folder)
    data.write_text(json.dumps({"prompt": "13", "ground_truth": 1}) + "\n")
    assert oracle(folder, data, tmp_path / "a", "--stop", "\n")[0] == 0
    assert oracle(folder, data, tmp_path / "b", "--stop", r"\n")[0] == 0
    (typed,), (literal,) = (rows_of(tmp_path / out / "oracle_v_n400_lines.jsonl") for out in "ab")
    assert typed == literal and typed["stop"] == ["\n"]


def test_the_two_scripts_never_share_draws(policy, table, tmp_path):
    assert tracecov(policy, table, tmp_path, "--K_list", 8, "--M", 50)[0] == 0  # 400 continuations, as the table's V
    rows = detailed_rows(tmp_path / "tracecov_four tokens_K8_detailed.json")
    assert [row["V_oracle"] for row in rows] != [row["mean_reward"] for row in rows]


def test_more_estimators_come_by_name_and_from_stored_grams(policy, table, tmp_path, capsys):
    flags = ("--K_list", 2, 4, "--M", 6)
    code, out, _ = tracecov(policy, table, tmp_path / "a", *flags, "--estimators", "all", capsys=capsys)
    assert code == 0 and "dr_grpo" in out and "std_verl" in out
    found = read(tmp_path / "a" / "tracecov_four tokens.json")
    assert all(len(gram) == 8 for record in gram_store.load_all(tmp_path / "a" / "grams") for gram in record.grams)
    assert {"rloo", "remax"}.isdisjoint(found["estimators"]) and len(found["estimators"]) >= 16
    assert all(value is not None for value in found["estimators"]["greedy"]["mse"])
    assert len(detailed_rows(tmp_path / "a" / "tracecov_four tokens_K4_detailed.json")[0]["trace_cov"]) >= 16
    three = ("--estimators", "rloo", "std_verl", "remax")
    assert from_grams(tmp_path / "a" / "grams", tmp_path / "b", "--K_list", 2, 4, *three)[0] == 0
    results = read(tmp_path / "b" / "tracecov_four tokens.json")
    for name in ("std_verl", "greedy"):
        assert results["estimators"][name] == found["estimators"][name]
    assert tracecov(policy, table, tmp_path / "c", *flags)[0] == 0
    assert from_grams(tmp_path / "c" / "grams", tmp_path / "d", "--K_list", 4, "--estimators", "greedy", "std_verl")[0] == 0
    results = read(tmp_path / "d" / "tracecov_four tokens.json")
    assert results["estimators"]["greedy"]["mse"] == [None]
    assert "greedy" in results["reasons"]["estimators.greedy.mse"]
    assert results["estimators"]["std_verl"]["signal_to_noise"] == [None]  # blocks of 4 hold no two groups of 4
    unknown = tracecov(policy, table, tmp_path / "e", *flags, "--estimators", "gpro", capsys=capsys)
    one_line_error(unknown, "--estimators", "gpro", "dr_grpo")


def test_a_prompt_without_a_kept_group_is_null_in_the_details(policy, table, tmp_path):
    hopeless = tmp_path / "hopeless.jsonl"
    rows = [
        row if i else {**row, "ground_truth": 999, "V_oracle": 0.0, "correct_count": 0} for i, row in enumerate(rows_of(table))
    ]
    hopeless.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tracecov(policy, hopeless, tmp_path / "a", "--K_list", 4, "--M", 4, "--estimators", "dapo")[0] == 0
    detailed = detailed_rows(tmp_path / "a" / "tracecov_four tokens_K4_detailed.json")
    assert detailed[0]["trace_cov"]["dapo"] is None and detailed[1]["trace_cov"]["dapo"] is not None
    assert read(tmp_path / "a" / "tracecov_four tokens.json")["estimators"]["dapo"]["prompts_never_kept"] == [1]


def test_sketches_are_the_true_gradients(policy, table, tmp_path, truths, capsys):
    flags = "--K_list 8 --M 60 --sketch_dim 1000 --budget 64 --estimators std_verl length_normalised".split()
    code, out, _ = tracecov(policy, table, tmp_path, *flags, capsys=capsys)
    assert code == 0
    thetas = []
    for record, truth in zip(gram_store.load_all(tmp_path / "grams"), truths):
        thetas.append((truth.p * truth.rewards) @ truth.scores)
        assert record.sketch.shape == (3, len(thetas[-1])) and record.sketch_names == ["grpo", "length_normalised", "std_verl"]
        # The mean of 30 blocks of 16: its squared error is about tr Cov of a group of 16 over 30.
        error = ((record.sketch[0] - thetas[-1]) ** 2).sum()
        assert error < 4 * truth.trace_of_group(16) / 30
        assert error < 0.2 * (thetas[-1] ** 2).sum()
    law = read(tmp_path / "tracecov_four tokens.json")["group_size_law"]
    theta = np.array(thetas)
    squares = (theta**2).sum(1)
    across = ((theta.sum(0) ** 2).sum() - squares.sum()) / (5 * 4)  # mean <theta(x), theta(x')> over pairs x != x'
    assert law["c1"] == pytest.approx(squares.mean() - across, rel=0.15)
    assert law["mean_theta_norm_sq"] == pytest.approx(across, rel=0.15, abs=0.1 * squares.mean())
    exact = np.mean([[4 * t.zeta1, 2 * t.zeta2 - 4 * t.zeta1] for t in truths], axis=0)
    assert law["c2"] == pytest.approx(exact[0], rel=0.15) and law["c3"] == pytest.approx(exact[1], rel=0.15)
    assert set(law["cosine_to_gradient"]) == {"length_normalised", "std_verl"}
    results = read(tmp_path / "tracecov_four tokens.json")
    results["group_size_law"]["cosine_to_gradient"]["std_verl"] = {"cosine": 0.93, "ci95": [0.9, 0.95], "reason": None}
    assert report(results).count("0.93 [0.9, 0.95]\n") == len(results["K_list"]) and "mean of groups of 8" in out
    assert "prediction" in out.strip().splitlines()[-1]
