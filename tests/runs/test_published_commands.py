"""The commands, flags and files of the paper's released scripts: taken here as they stand, and read as they are read there."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scripts import PROMPTS, call, detailed_rows, from_grams, one_line_error, read, rows_of, tracecov
from tiny_models import tiny_tokenizer

from data.make_arithmetic import make_problems
from Gradient_evaluation import calculate_oracle_v, run_tracecov
from Gradient_evaluation.chat_template import Chat
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs import plan as plan_of_run
from Gradient_evaluation.runs.inputs.oracle_table import load_oracle_table
from Policy_Optimization.launch import check_settings
from Policy_Optimization.overrides import verl_overrides
from Policy_Optimization.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
ORACLE = "python Gradient_evaluation/calculate_oracle_v.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset Kyleyee/arithmetic-"
TRACECOV = (
    "python Gradient_evaluation/run_tracecov.py --model Qwen/Qwen2.5-0.5B-Instruct "
    "--oracle_table outputs/oracle_v/your_oracle_table.jsonl --save_json outputs/tracecov_json "
)
COMMANDS = [
    ORACLE + "few-shot --split train --n_oracle 1000 --out_dir outputs/oracle_v",
    ORACLE + "test --split train --n_oracle 1000 --out_dir outputs/oracle_v_test",
    TRACECOV + "--plot_path outputs/tracecov_plot",
    TRACECOV + "--skip_plot",
]
# flag -> (values that are taken there, default there); ours of the same name must take and mean the same
SHARED = {
    "model": (["a/b"], None),
    "revision": (["v2"], "main"),
    "seed": (["3"], 0),
    "temperature": (["0.5"], 1.0),
    "top_p": (["0.9"], 0.95),
    "max_new_tokens": (["7"], 32),
}
FLAGS = {
    calculate_oracle_v: {
        **SHARED,
        "dataset": (["a/b"], None),
        "split": (["test"], "train"),
        "n_oracle": (["5"], 1000),
        "batch_size": (["4"], 32),
        "out_dir": (["a"], "oracle_v_results"),
        "device": (["cuda"], "auto"),
        "dtype": (["fp16", "bf16", "fp32"], "auto"),
    },
    run_tracecov: {
        **SHARED,
        "oracle_table": (["a.parquet"], None),
        "T": (["9"], 500),
        "M": (["2"], 16),
        "K_list": (["4"], [4, 8, 16, 32, 64]),
        "gen_bs": (["4"], 64),
        "subsample_prompts": (["20"], None),
        "save_json": (["a"], None),
        "plot_path": (["a"], None),
        "skip_plot": ([], False),
        "device": (["cuda"], "auto"),
        "dtype": (["fp16", "bf16"], "auto"),
    },
}


def parsed(script, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", [script.__file__, *words])
    return script.parse_args()


@pytest.mark.parametrize("script", FLAGS, ids=lambda script: script.__name__.rpartition(".")[2])
def test_every_published_flag_keeps_its_values_and_default(script, monkeypatch):
    needed = ["--oracle_table", "t.jsonl", "--save_json", "s"] if script is run_tracecov else []
    defaults = parsed(script, monkeypatch, *needed).config()
    for name, (values, default) in FLAGS[script].items():
        if name not in ("model", "dataset", "oracle_table", "save_json", "plot_path"):  # what is required there
            assert defaults[name] == default, name
        for value in values:
            found = parsed(script, monkeypatch, *needed, f"--{name}", value).config()[name]
            assert str(found) == value or found == [int(value)]
    if script is run_tracecov:
        assert parsed(script, monkeypatch, *needed, "--skip_plot").skip_plot


def test_a_run_without_save_json_says_so_in_one_line(table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for source in (("--oracle_table", table), ("--from_grams", tmp_path)):
        one_line_error(call(run_tracecov, *source, capsys=capsys), "--save_json", "required")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ which prompts


def published_choice(rows, seed, T, subsample=None):
    """The released script's choice of prompts from a JSONL table, restated."""
    rows = list(rows)
    if subsample is not None and len(rows) > subsample:
        rows = [rows[i] for i in np.random.default_rng(seed).choice(len(rows), size=subsample, replace=False)]
    np.random.default_rng(seed).shuffle(rows)
    return rows[:T]


@pytest.mark.parametrize(
    "n, T, subsample",
    [(40, 500, None), (40, 12, None), (40, 12, 20), (40, 500, 20), (40, 12, 40), (40, 12, 99), (7, 7, 1), (1000, 500, 600)],
)
def test_the_prompts_are_those_of_the_released_script(n, T, subsample):
    rows = [{"prompt": i} for i in range(n)]
    for seed in (0, 1, 7):
        wanted = [row["prompt"] for row in published_choice(rows, seed, T, subsample)]
        assert plan_of_run.drawn(n, T, subsample, seed) == wanted


def test_fewer_prompts_are_the_first_of_more():
    for subsample in (None, 30):
        more = plan_of_run.drawn(50, 20, subsample, 5)
        assert plan_of_run.drawn(50, 8, subsample, 5) == more[:8] != sorted(more[:8])


def test_a_run_numbers_prompts_as_the_released_script_does(policy, table, tmp_path):
    flags, seen = ("--K_list", 4, "--M", 1, "--seed", 3), []
    for name, more, choice in (
        ("a", (), (400,)),
        ("b", ("--T", 3), (3,)),
        ("c", ("--T", 3, "--subsample_prompts", 4), (3, 4)),
        ("d", ("--subsample_prompts", "--T", 3), (3,)),
    ):
        assert tracecov(policy, table, tmp_path / name, *flags, *more)[0] == 0
        found = read(tmp_path / name / "tracecov_four tokens_K4_detailed.json")["prompt_results"]
        assert [row["prompt"] for row in found] == published_choice(PROMPTS, 3, *choice)
        assert [row["prompt_index"] for row in found] == list(range(len(found)))
        assert [row["table_row"] for row in found] == [PROMPTS.index(row["prompt"]) for row in found]
        seen.append(found)
    assert seen[0][:3] == seen[1] == seen[3]  # more prompts change nothing of the first
    assert from_grams(tmp_path / "c" / "grams", tmp_path / "again", "--K_list", 4)[0] == 0
    assert read(tmp_path / "again" / "tracecov_four tokens_K4_detailed.json")["prompt_results"] == seen[2]


def test_more_prompts_keep_the_grams_of_the_first(policy, table, tmp_path, monkeypatch):
    flags = ("--K_list", 4, "--M", 1, "--seed", 3)
    words = "--oracle_table t --save_json s --seed 3 --T 4 --max_new_tokens 2".split()
    made = parsed(run_tracecov, monkeypatch, "--model", str(policy), *words)
    taken, _ = plan_of_run.choose_rows(load_oracle_table(table), made, tiny_tokenizer(("<eos>", "1", "2", "3")), Chat())
    assert [row.prompt for _, row, _ in taken] == published_choice(PROMPTS, 3, 4)
    assert [index for index, _, _ in taken] == [PROMPTS.index(row.prompt) for _, row, _ in taken]
    assert tracecov(policy, table, tmp_path, *flags, "--T", 2)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "grams").glob("*.npz")}
    assert tracecov(policy, table, tmp_path, *flags, "--T", 4)[0] == 0
    after = {path: path.read_bytes() for path in (tmp_path / "grams").glob("*.npz")}
    assert len(before) == 2 and len(after) == 4 and before.items() <= after.items()


def as_of_old(out):
    """Make a finished run look as one begun before prompts were drawn: the first T rows, no order, detailed lists."""
    record = out / "grams" / "run.json"
    about = read(record)
    del about["flags"]["subsample_prompts"]
    record.write_text(json.dumps(about))
    for path in (out / "grams").glob("*.npz"):
        arrays = dict(np.load(path))
        prompt = json.loads(str(arrays["about"]))
        del prompt["order"]
        np.savez(path, **{**arrays, "about": np.array(json.dumps(prompt))})
    (detailed,) = out.glob("*_detailed.json")
    detailed.write_text(json.dumps(detailed_rows(detailed)))


def test_a_folder_begun_with_the_first_rows_continues(policy, table, tmp_path, capsys):
    flags, results = ("--K_list", 4, "--M", 1, "--seed", 3), tmp_path / "all" / "tracecov_four tokens.json"
    assert tracecov(policy, table, tmp_path / "all", *flags)[0] == 0
    as_of_old(tmp_path / "all")
    first = tmp_path / "first"
    shutil.copytree(tmp_path / "all", first)
    drawn = published_choice(PROMPTS, 3, 2)
    for path in (first / "grams").glob("*.npz"):  # two prompts, one of which is not drawn
        if json.loads(str(np.load(path)["about"]))["prompt"] not in (drawn[0], published_choice(PROMPTS, 3, 5)[4]):
            path.unlink()
    before = read(results)
    capsys.readouterr()
    code, _, err = tracecov(policy, table, tmp_path / "all", *flags, capsys=capsys)  # all prompts: the same ones
    again = read(results)
    assert code == 0 and "note" not in err and {**again, "seconds": 0, "law": 0} == {**before, "seconds": 0, "law": 0}
    published_reader(tmp_path / "all" / "tracecov_four tokens_K4_detailed.json")
    assert from_grams(first / "grams", tmp_path / "b", "--K_list", 4)[0] == 0
    unknown = read(tmp_path / "b" / "tracecov_four tokens_K4_detailed.json")["prompt_results"]
    assert [row["prompt_index"] for row in unknown] == [None, None]
    code, _, err = tracecov(policy, table, first, *flags, "--T", 2, capsys=capsys)
    assert code == 0 and "1 of its Grams are of prompts that are not drawn" in err
    found = read(first / "tracecov_four tokens_K4_detailed.json")["prompt_results"]
    assert [row["prompt"] for row in found] == drawn
    assert len(list((first / "grams").glob("*.npz"))) == 3


def test_from_grams_takes_the_prompts_that_were_drawn_and_says_which_others_it_leaves_out(policy, table, tmp_path, capsys):
    flags, out = ("--K_list", 4, "--M", 1, "--seed", 3), tmp_path / "run"
    assert tracecov(policy, table, out, *flags)[0] == 0

    def again(folder):
        capsys.readouterr()
        given = ("--from_grams", out / "grams", "--K_list", 4, "--skip_plot", "--save_json", tmp_path / folder)
        code, _, err = call(run_tracecov, *given, capsys=capsys)
        assert code == 0
        return err, read(tmp_path / folder / "tracecov_four tokens.json")

    err, results = again("drawn")
    assert "drawn" not in err and results["n_prompts"] == 5
    as_of_old(out)
    err, results = again("old")
    assert err.count("note:") == 1 and "all 5 are used" in err and results["n_prompts"] == 5
    drawn = published_choice(PROMPTS, 3, 2)
    assert tracecov(policy, table, out, *flags, "--T", 2)[0] == 0  # the same folder, continued: three Grams are not drawn
    run = read(out / "tracecov_four tokens.json")
    err, results = again("mixed")
    assert err.count("note:") == 1 and "3 of its 5 Grams" in err and "left out" in err
    assert results["n_prompts"] == run["n_prompts"] == 2
    assert results["conditional_on_x"] == run["conditional_on_x"]
    rows = read(tmp_path / "mixed" / "tracecov_four tokens_K4_detailed.json")["prompt_results"]
    assert [row["prompt"] for row in rows] == drawn


# ------------------------------------------------------------------------------------------------ the files


@pytest.fixture(scope="module")
def small(policy, table, tmp_path_factory):
    out = tmp_path_factory.mktemp("small")
    assert tracecov(policy, table, out, "--K_list", 2, 4, "--M", 3)[0] == 0
    return out


def published_reader(path):
    """What a reader of the released detailed file does with it: the mean trace of each estimator, and the ids."""
    file = json.loads(Path(path).read_text())
    assert {"K", "prompt_results", "avg_traces"} <= set(file)
    for i, row in enumerate(file["prompt_results"]):
        assert {"prompt_index", "prompt", "gold", "V_oracle", "K", "tr_cov"} <= set(row)
        assert row["prompt_index"] == i and row["K"] == file["K"] and isinstance(row["gold"], int)
        assert set(row["tr_cov"]) == set(file["avg_traces"]) == {"naive", "grpo", "oracleV"}
    means = {name: np.mean([row["tr_cov"][name] for row in file["prompt_results"]]) for name in file["avg_traces"]}
    return file["K"], means, file["avg_traces"]


def published_curve(results_path):
    """{estimator: [trace per K]} from the detailed files beside a results file, found by its name as there."""
    results = json.loads(Path(results_path).read_text())
    curve = {name: [] for name in results["conditional_on_x"]}
    for K in results["K_list"]:
        found_K, means, averages = published_reader(str(results_path).replace(".json", f"_K{K}_detailed.json"))
        assert found_K == K and averages == pytest.approx(means)
        for name, values in curve.items():
            values.append(means[name])
    return curve


def test_a_reader_of_the_released_format_has_the_same_curve(small):
    path = small / "tracecov_four tokens.json"
    curve = published_curve(path)
    assert {"naive", "grpo", "oracleV"} == set(curve)
    for name, values in read(path)["conditional_on_x"].items():
        assert curve[name] == pytest.approx(values)


def test_the_detailed_file_has_what_it_had_before(small):
    for row in detailed_rows(small / "tracecov_four tokens_K4_detailed.json"):
        assert row["tr_cov"] == {name: row["trace_cov"][name] for name in ("naive", "grpo", "oracleV")}
        assert "best_baseline" in row["trace_cov"] and row["ground_truth"] == row["gold"] and "mean_reward" in row


def test_a_ground_truth_in_text_is_an_integer_under_gold(policy, table, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(json.dumps({**row, "ground_truth": f"so\n#### {row['ground_truth']}"}) + "\n" for row in rows_of(table))
    )
    assert tracecov(policy, path, tmp_path / "a", "--K_list", 4, "--M", 1)[0] == 0
    found = detailed_rows(tmp_path / "a" / "tracecov_four tokens_K4_detailed.json")
    assert [row["gold"] for row in found] == [row["ground_truth"] for row in rows_of(table)]
    assert found[0]["ground_truth"].startswith("so\n####")


def test_a_table_in_parquet_is_taken_as_the_same_in_jsonl(policy, table, tmp_path):
    import pandas

    rows = [
        {name: row[name] for name in ("prompt", "ground_truth", "V_oracle", "n_oracle", "correct_count")}
        for row in rows_of(table)
    ]
    path = tmp_path / "oracle_v_n400_four_tokens_20250101_120000.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    shutil.copy(table, tmp_path / "b.jsonl")
    flags = ("--K_list", 4, "--M", 1, "--T", 3)
    for out, source in (("a", path), ("b", tmp_path / "b.jsonl")):
        assert tracecov(policy, source, tmp_path / out, *flags)[0] == 0
    first, second = (read(tmp_path / out / "tracecov_four tokens_K4_detailed.json") for out in "ab")
    assert first == second


# ------------------------------------------------------------------------------------------------ the commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder where the released README's names of model, data sets and scripts stand for small ones."""
    from datasets import Dataset, DatasetDict

    (tmp_path / "Gradient_evaluation").symlink_to(ROOT / "Gradient_evaluation")
    shutil.copytree(ROOT / "data" / "tiny_model", tmp_path / MODEL)
    for name, style in (("few-shot", "few_shot"), ("test", "zero_shot")):
        rows = make_problems(2, seed=3, style=style) if style == "few_shot" else make_problems(2, seed=3)
        DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tmp_path / "Kyleyee" / f"arithmetic-{name}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_literally(folder, added, capsys):
    """The commands of the released README in their order, each with what ``added`` says for its script at the end."""
    for command in COMMANDS:
        _, script, *words = shlex.split(command)
        module = {"calculate_oracle_v.py": calculate_oracle_v, "run_tracecov.py": run_tracecov}[Path(script).name]
        code, _, err = call(module, *words, *added[module], capsys=capsys)
        assert code == 0, err
        if module is calculate_oracle_v and not (folder / "outputs/oracle_v/your_oracle_table.jsonl").exists():
            (written,) = Path("outputs/oracle_v").glob("oracle_v_n*.jsonl")
            shutil.copy(written, "outputs/oracle_v/your_oracle_table.jsonl")
    (results,) = (path for path in Path("outputs/tracecov_json").glob("tracecov_*.json") if "_detailed" not in path.name)
    assert len(list(Path("outputs/tracecov_plot").glob(f"{results.stem}.*"))) == 1
    curve = published_curve(results)
    for name, values in read(results)["conditional_on_x"].items():
        assert curve[name] == pytest.approx(values)


def test_the_commands_of_the_released_readme_run_as_they_stand(folder, capsys):
    law = ["--max_new_tokens", "4", "--quiet"]
    run_literally(
        folder, {calculate_oracle_v: [*law, "--n_oracle", 8], run_tracecov: [*law, "--M", 1, "--K_list", 4, 8]}, capsys
    )


@pytest.mark.slow
def test_the_commands_of_the_released_readme_run(folder, capsys):
    run_literally(folder, {calculate_oracle_v: [], run_tracecov: []}, capsys)


# ------------------------------------------------------------------------------------------------ the training script

LAUNCHER = ROOT / "Policy_Optimization" / "grpo_train.sh"
RELEASED = {
    "MODEL": "org/m",
    "TRAIN_FILE": "/d/a.parquet",
    "VAL_FILE": "/d/b.parquet",
    "GPUS": "4",
    "GPU_UTIL": "0.7",
    "NNODES": "1",
    "GROUP_SIZE": "16",
    "EXPERIMENT_NAME": "e1",
    "PROJECT_NAME": "p1",
}


def test_variables_of_the_released_script_mean_the_same():
    settings = read_settings([], RELEASED)
    names = "model train_files val_files gpus_per_node gpu_memory_utilization nnodes group_size experiment project".split()
    found = [getattr(settings, name) for name in names]
    assert found == ["org/m", "/d/a.parquet", "/d/b.parquet", 4, 0.7, 1, 16, "e1", "p1"]
    made = dict(text.partition("=")[::2] for text in verl_overrides(settings))
    assert made["data.train_batch_size"] == "64" and made["actor_rollout_ref.actor.ppo_mini_batch_size"] == "16"
    assert made["trainer.total_epochs"] == "8" and made["trainer.experiment_name"] == "e1"
    assert read_settings(["--project", "mine"], RELEASED).project == "mine"


def test_gpus_may_be_a_list_and_a_run_tag_ends_the_name():
    assert read_settings([], {"GPUS": "0,2,3"}).gpus_per_node == 3
    assert read_settings([], {"RUN_TAG": "first"}).experiment == "Qwen2.5-1.5B-Instruct_grpo_g32_seed0_first"
    assert read_settings([], {"RUN_TAG": "first", "EXPERIMENT_NAME": "e1"}).experiment == "e1"


def test_files_without_a_folder_are_in_the_data_folder(tmp_path):
    (tmp_path / "test.parquet").touch()
    settings = read_settings([], {"DATA_DIR": str(tmp_path)})
    assert (settings.train_files, settings.val_files) == (str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet"))
    settings = read_settings(["--val_files", "v.parquet"], {"DATA_DIR": str(tmp_path), "TRAIN_FILE": "mine.parquet"})
    assert settings.train_files == str(tmp_path / "mine.parquet") and settings.val_files == str(Path("v.parquet").absolute())


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"GPUS": "four"}, "environment variable GPUS: 'four' is not an integer"),
        ({"GPU_UTIL": "70"}, "environment variable GPU_UTIL"),
        ({"TRAIN_FILE": "a", "TRAIN_FILES": "b"}, "TRAIN_FILES and TRAIN_FILE are one setting"),
    ],
)
def test_a_wrong_released_variable_is_refused_by_its_own_name(environment, message):
    with pytest.raises(UserError, match=message):
        read_settings([], environment)


def test_a_released_variable_without_meaning_is_one_line():
    pytest.importorskip("wandb")
    notes = check_settings(read_settings(["--model", "org/m"], {}), {"BASE": "/b", "REPO_DIR": "/r", "HOME": "/h"})
    assert [note.split(" ")[0] for note in notes if "paper's script" in note] == ["BASE", "REPO_DIR"]


STAND_IN = """#!/bin/sh
printf '%s\\n' "$0" "$CUDA_VISIBLE_DEVICES" "$MODEL" "$TRAIN_FILE" "$GROUP_SIZE"
exit 3
"""


@pytest.fixture
def stand_in(tmp_path):
    """CONDA_ROOT with an environment ``verl`` whose python prints what it was given."""
    python = tmp_path / "conda" / "envs" / "verl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return python


def launched(script, environment):
    clean = {name: text for name, text in os.environ.items() if name not in (*RELEASED, "CUDA_VISIBLE_DEVICES", "DATA_DIR")}
    done = subprocess.run(["bash", script], env={**clean, **environment}, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_environments_of_the_released_script_are_found(stand_in, tmp_path):
    root = {"CONDA_ROOT": str(tmp_path / "conda")}
    code, said, err = launched(LAUNCHER, {**root, "ENV_NAME": "verl", "PYTHON_BIN": "python", "GPUS": "1,3", "MODEL": "org/m"})
    assert (code, said[:3]) == (3, [str(stand_in), "1,3", "org/m"]), err
    assert launched(LAUNCHER, {"PYTHON_BIN": str(stand_in), "ENV_NAME": "none"})[1][0] == str(stand_in)
    for wrong, message in (
        ({**root, "ENV_NAME": "other"}, "envs/other/bin/python"),
        ({"PYTHON_BIN": "/no/python"}, "/no/python"),
        ({"PYTHON_BIN": "no_such_python"}, "no_such_python"),
    ):
        code, _, err = launched(LAUNCHER, wrong)
        assert code == 2 and len(err.splitlines()) == 1 and message in err


def test_the_section_at_the_top_may_be_edited(stand_in, tmp_path):
    text = LAUNCHER.read_text()
    for name, value in (
        ("CONDA_ROOT", str(tmp_path / "conda")),
        ("ENV_NAME", "verl"),
        ("MODEL", "org/m"),
        ("GROUP_SIZE", "16"),
        ("DATA_DIR", "/d"),
        ("TRAIN_FILE", "$DATA_DIR/t.parquet"),
    ):
        text, found = re.subn(rf"^# {name}=.*$", f'{name}="{value}"', text, flags=re.MULTILINE)
        assert found == 1, name
    script = tmp_path / "grpo_train.sh"
    script.write_text(text)
    code, said, err = launched(script, {"MODEL": "org/other", "CUDA_VISIBLE_DEVICES": "5"})
    assert (code, said) == (3, [str(stand_in), "5", "org/m", "/d/t.parquet", "16"]), err
