"""A sweep plans a run for each group size and seed, skips finished runs, and follows a recommendation if there is one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from abstract_policy import group_size_law_of
from results_files import results

from Gradient_evaluation.errors import UserError
from Policy_Optimization.overrides import training_law
from Policy_Optimization.sweep import (
    admissible_sizes,
    check_same_law,
    make_plan,
    read_manifest,
    recommended_sizes,
    write_manifest,
)

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "Policy_Optimization" / "sweep_group_size.sh"
BUDGETS = {"budget": 1024, "update_budget": 256, "epoch_budget": 128}
SIZES = list(BUDGETS.values())


def test_admissible_sizes_divide_all_budgets():
    assert admissible_sizes(SIZES) == [2, 4, 8, 16, 32, 64, 128]
    assert admissible_sizes([96, 48]) == [2, 4, 8, 16]
    assert admissible_sizes([7]) == []


@pytest.mark.parametrize(
    "law, expected",
    [
        ({"G_star": 20.0, "within_10_percent": [10, 40]}, [16, 32]),
        ({"G_star": 150.0, "within_10_percent": [100, 300]}, [128]),  # 256 does not divide 128 epochs
        ({"G_star": 20.0, "within_10_percent": [8, 32]}, [8, 16, 32]),
        ({"G_star": 20.0, "within_10_percent": [17, 30]}, [16]),
        ({"G_star": 1e9, "within_10_percent": None}, [128]),
    ],
)
def test_recommended_sizes_are_admissible_and_near_g_star(law, expected):
    assert recommended_sizes({"group_size_law": law}, "r.json", SIZES) == expected


@pytest.mark.parametrize("law, budgets", [(None, SIZES), ({}, SIZES), ({"G_star": None}, SIZES), ({"G_star": 8.0}, [7])])
def test_without_a_recommendation_it_says_so_in_one_line(law, budgets):
    with pytest.raises(UserError, match="^r.json: .*give --group_sizes$"):
        recommended_sizes({"group_size_law": law}, "r.json", budgets)


MEASURED = {"model": "org/m", "revision": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 512}
MEASURED |= {"stop": [], "reward": "math", "chat_template_kwargs": None, "dtype": "float32"}
PUBLISHED = {"top_p": 0.95, "max_new_tokens": 32}
ROLLOUT, THINKING = "actor_rollout_ref.rollout", {"enable_thinking": False}


@pytest.mark.parametrize(
    "changes, variables, passed, shown",
    [
        ({}, {}, [], None),
        ({}, {"REWARD": "math"}, ["trainer.save_freq=5"], None),
        (PUBLISHED, {}, [], f"measured with top_p 0.95, training has {ROLLOUT}.top_p 1.0"),
        (PUBLISHED, {}, [], "measured with max_new_tokens 32, training has MAX_RESPONSE_LENGTH 512"),
        (PUBLISHED, {"MAX_RESPONSE_LENGTH": "32"}, [f"{ROLLOUT}.top_p=0.95"], None),
        ({"max_new_tokens": 64}, {}, ["data.max_response_length=64"], None),
        ({"temperature": 0.6}, {}, [], "temperature 0.6, training has TEMPERATURE 1.0"),
        ({"temperature": 0.6}, {"TEMPERATURE": "0.6"}, [], None),
        ({"top_k": 20}, {}, [], "top_k 20, training has actor_rollout_ref.rollout.top_k 0"),
        ({}, {}, ["actor_rollout_ref.rollout.top_k=-1"], None),
        ({"model": "org/base"}, {}, [], 'model "org/base", training has MODEL "org/m"'),
        ({"model": "m"}, {}, [], None),  # of a local folder the name alone is stored
        ({}, {}, ["actor_rollout_ref.model.path=org/n"], 'training has MODEL "org/n"'),
        ({}, {"REWARD": "integer"}, [], 'reward "math", training has REWARD "integer"'),
        ({"stop": ["\n"]}, {}, [], "measured with stop"),
        ({"chat_template_kwargs": THINKING}, {}, [], 'chat_template_kwargs {"enable_thinking": false}'),
        ({"chat_template_kwargs": THINKING}, {"CHAT_TEMPLATE_KWARGS": '{"enable_thinking": false}'}, [], None),
        ({"chat_template_kwargs": THINKING}, {}, ["+data.apply_chat_template_kwargs.enable_thinking=False"], None),
        ({}, {"CHAT_TEMPLATE_KWARGS": '{"enable_thinking": false}'}, [], "measured with chat_template_kwargs null"),
    ],
)
def test_a_recommendation_holds_for_its_sampling_law(changes, variables, passed, shown):
    law, training = {**MEASURED, **changes}, training_law({"MODEL": "org/m", **variables}, passed)
    if shown is None:
        assert check_same_law({"law": law}, "r.json", training, False) == []
        return
    with pytest.raises(UserError, match="^r.json: measured with .*--allow_mismatch$") as caught:
        check_same_law({"law": law}, "r.json", training, False)
    (warning,) = check_same_law({"law": law}, "r.json", training, True)
    assert shown in str(caught.value) and shown in warning


def test_a_results_file_of_an_earlier_version():
    training = training_law({"MODEL": "org/m"}, [])
    old = {name: value for name, value in MEASURED.items() if name != "chat_template_kwargs"}
    assert check_same_law({"law": old}, "r.json", training, False) == []
    (warning,) = check_same_law({}, "r.json", training, False)
    assert "does not say under which sampling law" in warning


def test_the_sweep_refuses_another_sampling_law(tmp_path):
    made = results(group_size_law={"G_star": 8.0}, law={**MEASURED, "top_p": 0.95})
    (tmp_path / "r.json").write_text(json.dumps(made))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL": "org/m"}

    def plan(*more):
        command = ["bash", SWEEP, "--sweep_dir", tmp_path / "s", "--recommended", tmp_path / "r.json", "--dry_run", *more]
        return subprocess.run(command, capture_output=True, text=True, env={**environment, "TRAIN_FILES": "absent.parquet"})

    done = plan()
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "measured with top_p 0.95" in done.stderr
    for more in (["--allow_mismatch"], ["--", "actor_rollout_ref.rollout.top_p=0.95"]):  # then it comes to the data files
        done = plan(*more)
        assert "1 runs, 0 of them finished; sizes 8" in done.stderr and "absent.parquet: no such file" in done.stderr
        assert ("going on as --allow_mismatch says" in done.stderr) == (more == ["--allow_mismatch"])


def test_rewards_that_never_differ_are_refused():
    law = group_size_law_of((np.zeros(6), np.zeros(6), np.zeros(6), np.zeros((6, 4))))
    with pytest.raises(UserError, match="^r.json: .* recommends no size: no reward ever differed.*; give --group_sizes$"):
        recommended_sizes({"group_size_law": law}, "r.json", SIZES)


def test_a_plan_keeps_its_runs_and_adds_new_ones(tmp_path):
    write_manifest(tmp_path, make_plan(tmp_path, [8, 4], [0, 1], BUDGETS))
    plan = make_plan(tmp_path, [4, 16], [1], BUDGETS)
    runs = [(run["group_size"], run["seed"]) for run in plan["runs"]]
    assert runs == [(4, 0), (4, 1), (8, 0), (8, 1), (16, 1)] and plan["budget"] == 1024
    write_manifest(tmp_path, plan)
    assert read_manifest(tmp_path) == plan


def test_a_manifest_with_the_status_of_runs_is_taken(tmp_path):
    """Earlier versions wrote status, exit_code and changed into it."""
    run = {"group_size": 4, "seed": 1, "run_dir": "g4_seed1", "status": "failed", "exit_code": 7, "changed": "2025"}
    (tmp_path / "manifest.json").write_text(json.dumps({**BUDGETS, "runs": [run]}))
    assert make_plan(tmp_path, [4], [1], BUDGETS)["runs"] == [{"group_size": 4, "seed": 1, "run_dir": "g4_seed1"}]


def test_wrong_sizes_and_another_budget_are_refused(tmp_path):
    with pytest.raises(UserError, match="--group_sizes 3 does not divide --budget 1024; these do: 2, 4, 8"):
        make_plan(tmp_path / "a", [4, 3], [0], BUDGETS)
    write_manifest(tmp_path, make_plan(tmp_path, [4], [0], BUDGETS))
    with pytest.raises(UserError, match="made with --budget 1024, not 512; give another --sweep_dir"):
        make_plan(tmp_path, [4], [0], {**BUDGETS, "budget": 512})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"runs": [1]}', '{"runs": [{"group_size": 4}]}'])
def test_a_damaged_manifest_is_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json"):
        read_manifest(tmp_path)


# the shell script, with a stand-in for the launcher's python (the manifest is real)

STAND_IN = """#!/usr/bin/env bash
# Plays launch.py and VERL: leaves a plan unless it is a dry run, "trains", fails or is interrupted as told.
if [[ $1 == -m ]]; then
  echo "$*" >>"$WITNESS"
  [[ "$*" == *"$FAIL_AT"* && -n $FAIL_AT && $FAIL_CODE != hang ]] && exit "$FAIL_CODE"
  trap 'exit 0' TERM
  while [[ $FAIL_CODE == hang ]]; do touch "$WITNESS.ready"; read -rt 1 <> <(:) || :; done
  exit 0
fi
plan="$3"; shift 3
for ((i = 1; i <= $#; i++)); do
  [[ ${!i} == --dry_run ]] && { echo "dry $*" >>"$WITNESS"; echo "the settings"; exit 0; }
  if [[ ${!i} == --run_dir ]]; then j=$((i + 1)); run="${!j}"; fi
done
mkdir -p "$run/logs"
printf '%s\\0' -m verl.trainer.main_ppo "$@" >"$plan/command"
printf 'WANDB_MODE=disabled\\0' >"$plan/environment"
printf '%s\\0' "$run" "$run/logs/console_1.log" >"$plan/paths"
"""


@pytest.fixture
def sweep(tmp_path):
    """run(*flags, fail_at, code) -> finished process; every call of python is a line of tmp_path/witness."""
    home = tmp_path / "an env"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").write_text(STAND_IN)
    (home / "bin" / "python").chmod(0o755)

    def run(*flags, fail_at="", code=7, start=subprocess.run, **variables):
        (tmp_path / "witness").unlink(missing_ok=True)
        (tmp_path / "witness").touch()
        told = {"WITNESS": str(tmp_path / "witness"), "FAIL_AT": fail_at, "FAIL_CODE": str(code), **variables}
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **told}
        command = ["bash", SWEEP, "--env", home, "--sweep_dir", "my sweep", "--group_sizes", "4", "8", *flags]
        return start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)

    return run


def lines(tmp_path):
    called = (tmp_path / "witness").read_text().splitlines()
    return [line for line in called if line.startswith("dry")], [line for line in called if line.startswith("-m")]


def test_every_run_is_checked_then_trained_once(sweep, tmp_path):
    done = sweep("--seeds", "0", "1", "--", "trainer.save_freq=50", "+x='a  b'")
    assert done.returncode == 0, done.stderr
    checked, trained = lines(tmp_path)
    assert len(checked) == len(trained) == 4
    assert all(line.endswith("-- trainer.save_freq=50 +x='a  b'") for line in trained)
    assert "--group_size 4 --seed 1" in trained[1] and f"--run_dir {tmp_path}/my sweep/g4_seed1" in trained[1]
    assert len(list((tmp_path / "my sweep").glob("*/finished"))) == 4
    done = sweep("--seeds", "0", "1")
    assert done.returncode == 0 and lines(tmp_path) == ([], [])
    assert done.stderr == "4 runs, 4 of them finished; sizes 4, 8\n"
    assert sweep("--seeds", "1", "2").returncode == 0 and "--seed 2" in lines(tmp_path)[1][0] and len(lines(tmp_path)[1]) == 2


def test_each_run_saves_its_rollouts_in_a_folder_of_its_own(sweep, tmp_path):
    assert sweep("--dry_run", SAVE_ROLLOUTS="my rollouts").returncode == 0
    checked, _ = lines(tmp_path)
    assert len(checked) == 2
    assert all(f"--save_rollouts my rollouts/{run}" in line for run, line in zip(("g4_seed0", "g8_seed0"), checked))


def test_a_failed_run_is_tried_again_and_stops_no_other(sweep, tmp_path):
    done = sweep(fail_at="--group_size 4")
    assert done.returncode == 1 and "1 of the runs failed" in done.stderr
    assert [path.parent.name for path in (tmp_path / "my sweep").glob("*/finished")] == ["g8_seed0"]
    assert sweep().returncode == 0
    assert ["--group_size 4" in line for line in lines(tmp_path)[1]] == [True]


def test_an_interrupted_sweep_goes_on(sweep, tmp_path):
    done = sweep(fail_at="--group_size 4", code=143)
    assert done.returncode == 143 and "the same command goes on" in done.stderr
    assert len(lines(tmp_path)[1]) == 1 and not list((tmp_path / "my sweep").glob("*/finished"))
    assert sweep().returncode == 0 and len(lines(tmp_path)[1]) == 2


def test_a_signal_stops_the_run_and_the_sweep(sweep, tmp_path):
    process = sweep(code="hang", start=subprocess.Popen)
    while not (tmp_path / "witness.ready").exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143 and "stopped at g4_seed0; the same command goes on" in err
    assert len(lines(tmp_path)[1]) == 1 and not list((tmp_path / "my sweep").glob("*/finished"))


def test_a_dry_run_checks_all_and_writes_nothing(sweep, tmp_path):
    done = sweep("--dry_run")
    assert done.returncode == 0 and len(lines(tmp_path)[0]) == 2 and not lines(tmp_path)[1]
    assert done.stdout.splitlines() == ["the settings", "all 2 runs can start; shown is the first"]  # once, not for every run
    assert not (tmp_path / "my sweep").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--budget", "1000"], "--group_sizes 8 does not divide --epoch_budget 100"),
        (["--recommended", "absent.json"], "give one of them"),
        (["--seeds", "-1"], "--seeds"),
        (["--sizes", "4"], "--sizes"),
        (["--env"], "--env: expected one argument"),
    ],
)
def test_a_wrong_sweep_is_one_line_and_exit_code_2(sweep, tmp_path, flags, message):
    done = sweep(*flags, EPOCH_BUDGET="100")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and message in done.stderr, done.stderr
    assert lines(tmp_path) == ([], []) and not (tmp_path / "my sweep" / "manifest.json").exists()
