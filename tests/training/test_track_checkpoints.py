"""track_checkpoints.py measures each checkpoint of a run once, in order, on the same prompts and random numbers."""

import itertools
import shutil

import numpy as np
import pytest
from callback_runs import PROBLEMS, TINY
from safetensors.torch import load_file, save_file
from scripts import call, one_line_error, read, rows_of

from data.make_arithmetic import write_jsonl
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.gram_store import load_all
from Policy_Optimization import track_checkpoints
from Policy_Optimization.track_checkpoints import find_checkpoints, parse_args, table

SMALL = "--T 3 --per_prompt 8 --K_list 4 --max_new_tokens 4 --temperature 2 --device cpu --dtype float64 --quiet".split()
NUMBERS = ("c1", "c2", "c3", "G_star", "mean_theta_norm_sq", "mse", "mean_reward", "frac_reward_zero_std", "signal_to_noise")


def perturbed(folder, size):
    """A copy of the tiny model; every weight is larger by the share ``size``."""
    shutil.copytree(TINY, folder)
    weights = {name: (1 + size) * tensor for name, tensor in load_file(TINY / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def track(run, *more, capfd=None):
    flags = ("--dataset", run / "problems.jsonl", "--save_json", run / "out", "--num_generations", 4, "--prompts_per_step", 2)
    return call(track_checkpoints, run, run / "base", *flags, *SMALL, *more, capsys=capfd)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tracked run: checkpoint-2, and the base model, which is given after it. Their parameters are almost equal."""
    folder = tmp_path_factory.mktemp("a run")
    perturbed(folder / "base", 0.0)
    perturbed(folder / "checkpoint-2", 1e-6)
    write_jsonl(PROBLEMS, folder / "problems.jsonl")
    assert track(folder)[0] == 0
    return folder


def test_one_line_a_step_in_order_of_the_steps(run):
    rows = rows_of(run / "out" / "group_size.jsonl")
    assert [(row["step"], row.get("label")) for row in rows] == [(0, "base"), (2, None)]
    assert (run / "out" / "group_size.png").stat().st_size > 10_000
    assert [line.split()[0] for line in table(rows).splitlines()] == ["step", "base", "2"]


def test_checkpoints_differ_by_their_parameters_alone(run):
    """Same prompts and random numbers: parameters that are almost equal give the same rewards and almost equal numbers."""
    base, second = rows_of(run / "out" / "group_size.jsonl")
    for name in ("c1", "c2", "c3"):
        assert base[name] != second[name] and np.isclose(base[name], second[name], rtol=1e-3), name
    assert (base["mean_reward"], base["frac_reward_zero_std"]) == (second["mean_reward"], second["frac_reward_zero_std"])
    texts = [[(each.prompt_id, *each.lengths) for each in load_all(run / "out" / f"step_{step}" / "grams")] for step in (0, 2)]
    assert texts[0] == texts[1] and len(texts[0]) == 3


def test_a_line_has_the_numbers_of_its_results_and_of_its_continuations(run):
    for row in rows_of(run / "out" / "group_size.jsonl"):
        folder, model = run / "out" / f"step_{row['step']}", row.get("label", f"checkpoint-{row['step']}")
        law = read(folder / f"tracecov_{model}.json")["group_size_law"]
        assert all(row[name] == law[name] for name in ("c1", "c2", "c3", "G_star", "G_star_ci95", "G_star_at_least"))
        assert np.isclose(row["mse"], law["c1"] / 2 + law["c2"] / 8 + law["c3"] / 24)
        rewards = [record.rewards for record in load_all(folder / "grams")]
        silent = [np.mean([len(set(group)) == 1 for group in itertools.combinations(each, 4)]) for each in rewards]
        assert np.isclose(row["frac_reward_zero_std"], np.mean(silent))
        assert np.isclose(row["mean_reward"], np.mean(rewards)) and row["n_continuations"] == np.size(rewards) == 24
        assert np.isclose(row["mean_reward_standard_error"], np.mean(rewards, axis=1).std(ddof=1) / 3**0.5)


def test_a_second_call_measures_what_is_missing_and_nothing_else(run, capfd, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb"), pytest.importorskip("tensorboard")
    file = run / "out" / "group_size.jsonl"
    before = rows_of(file)
    lost = next((run / "out" / "step_2" / "grams").glob("*.npz"))  # as a killed run leaves its folder
    for path in (lost, run / "out" / "step_2" / "tracecov_checkpoint-2.json", file):
        path.unlink()
    grams = {path: path.stat().st_mtime_ns for path in (run / "out").rglob("*.npz")}
    code, out, err = track(run, "--wandb", "--tensorboard", capfd=capfd)
    assert code == 0, err
    assert lost.exists() and grams == {path: path.stat().st_mtime_ns for path in grams}
    assert "finished before" in (run / "out" / "step_0" / "report.txt").read_text()
    for old, new in zip(before, rows_of(file), strict=True):
        assert {name: old[name] for name in NUMBERS} == {name: new[name] for name in NUMBERS}
    assert str(file) in out and list((run / "out" / "wandb").glob("offline-run-*"))
    assert list((run / "out" / "tensorboard").iterdir())


def test_a_flag_that_nobody_knows_is_refused_by_run_tracecov(tmp_path, capfd):
    shutil.copytree(TINY, tmp_path / "checkpoint-1")
    flags = ("--dataset", "x.jsonl", "--save_json", tmp_path / "out", "--temprature", "1")
    one_line_error(call(track_checkpoints, tmp_path, *flags, capsys=capfd), "--temprature", "run_tracecov.py --help")
    assert not (tmp_path / "out" / "group_size.jsonl").exists()


# ------------------------------------------------------------------------------------------- which folders


def hugging_face(folder):
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def adapter(folder):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").touch()


def shards(folder):
    """As VERL writes one: the model's config and tokenizer, but its weights in pieces."""
    (folder / "actor" / "huggingface").mkdir(parents=True)
    for name in ("huggingface/config.json", "huggingface/tokenizer.json", "model_world_size_2_rank_0.pt"):
        (folder / "actor" / name).touch()


def steps(found):
    return [each.step for each in found]


def test_the_steps_of_a_folder_are_taken_in_numeric_order(tmp_path):
    for step in (100, 20, 3, 60):
        hugging_face(tmp_path / f"checkpoint-{step}")
    for name in ("config.json", "model.safetensors", "checkpoint-7"):  # the final model; a file
        (tmp_path / name).touch()
    assert steps(find_checkpoints([tmp_path], None)) == [3, 20, 60, 100]
    assert steps(find_checkpoints([tmp_path], 20)) == [20, 60, 100]
    assert steps(find_checkpoints([tmp_path / "checkpoint-60", tmp_path / "checkpoint-3"], 20)) == [3, 60]
    with pytest.raises(UserError, match="--every 7: divides no step of .*, which has 3, 20, 60, 100"):
        find_checkpoints([tmp_path], 7)


def test_folders_without_a_step_are_numbered_as_given(tmp_path):
    given = [hugging_face(tmp_path / name) for name in ("c", "a", "b")]
    found = find_checkpoints(given, None)
    assert [(each.step, each.folder.name, each.has_step) for each in found] == [
        (0, "c", False),
        (1, "a", False),
        (2, "b", False),
    ]
    with pytest.raises(UserError, match="is of step 1, as .*a is"):
        find_checkpoints([*given, hugging_face(tmp_path / "checkpoint-1")], None)


def test_adapters_and_merged_shards_are_what_is_loaded(tmp_path):
    hugging_face(tmp_path / "checkpoints" / "global_step_9" / "actor" / "huggingface")
    hugging_face(tmp_path / "checkpoints" / "global_step_10" / "actor" / "huggingface")
    adapter(tmp_path / "checkpoints" / "global_step_10" / "actor" / "huggingface" / "lora_adapter")
    adapter(tmp_path / "lora" / "checkpoint-5")
    ninth, tenth = find_checkpoints([tmp_path], None)
    assert (ninth.step, ninth.model.name, tenth.step, tenth.model.name) == (9, "huggingface", 10, "lora_adapter")
    assert find_checkpoints([tmp_path / "lora"], None)[0].model.name == "checkpoint-5"


def test_shards_that_are_not_merged_are_refused_with_the_command(tmp_path, capsys):
    hugging_face(tmp_path / "global_step_1" / "actor" / "huggingface")
    shards(tmp_path / "global_step_2")
    actor = tmp_path / "global_step_2" / "actor"
    command = f"python -m verl.model_merger merge --backend fsdp --local_dir {actor} --target_dir {actor / 'huggingface'}"
    outcome = call(track_checkpoints, tmp_path, "--dataset", "d", "--save_json", tmp_path / "out", capsys=capsys)
    one_line_error(outcome, "not merged", command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ("there_is_none", "there_is_none: there is no such folder"),
        (".", "holds no checkpoint-N or global_step_N, and is no checkpoint"),
        ("checkpoint-1", "checkpoint-1: is no checkpoint (config.json with weights"),
        ("--T 3 .", "give the folders of runs or checkpoints first"),
        (". --model m", "--model: not with several checkpoints; give the checkpoint's folder"),
        (". --until=0.2", "--until: not with several checkpoints; checkpoints would have other prompts"),
        (". --oracle_table t", "--oracle_table: not with several checkpoints; it is of one checkpoint"),
        (". --every 0", "--every: must be at least 1"),
        (". --prompts_per_step 4", "--prompts_per_step: no effect without --num_generations"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint-1").mkdir() if words == "checkpoint-1" else None
    outcome = call(track_checkpoints, *words.split(), "--dataset", "d", "--save_json", "out", capsys=capsys)
    one_line_error(outcome, message)
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_flag_here_is_passed_on_in_its_order():
    words = "a b --T 5 --every 2 --K_list 4 8 --dataset d --stop - --save_json x --quiet"
    flags, passed = parse_args(words.split())
    assert (flags.checkpoints, flags.every) == (["a", "b"], 2)
    assert passed == "--T 5 --K_list 4 8 --stop - --quiet".split()


def test_a_table_shows_what_is_not_known_as_a_dash():
    row = dict.fromkeys(
        ("G_star", "G_star_ci95", "G_star_at_least", "c1", "c2", "c3", "signal_to_noise", "frac_reward_zero_std")
    )
    known = {**row, "step": 1, "mean_reward": 0.5, "G_star": 4.0, "G_star_ci95": [2.0, None], "c2": 1234.5}
    lines = table([known, {**row, "step": 2, "mean_reward": 0.25}]).splitlines()
    assert lines[1].split() == ["1", "4", "[2,", "inf]", "-", "-", "1.23e+03", "-", "-", "0.5", "-"]
    assert lines[2].split() == ["2", "-", "-", "-", "-", "-", "-", "0.25", "-"]
