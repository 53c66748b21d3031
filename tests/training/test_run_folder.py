"""The run folder: W&B's mode and variables, and from which checkpoint a run is continued."""

import json

import pytest
from launches import FAKE_KEY, checkpoint

from Gradient_evaluation.errors import UserError
from Policy_Optimization import launch, run_folder

# W&B


def test_wandb_goes_offline_without_a_key(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert run_folder.wandb_mode(home) == "offline"
    assert run_folder.wandb_mode({**home, "WANDB_API_KEY": FAKE_KEY}) == "online"
    assert run_folder.wandb_mode({**home, "WANDB_API_KEY": FAKE_KEY, "WANDB_MODE": "offline"}) == "offline"
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {FAKE_KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert run_folder.wandb_mode(home) == "online"


def test_no_variable_given_to_the_workers_holds_a_key(tmp_path):
    environment = {"HOME": str(tmp_path), "WANDB_API_KEY": FAKE_KEY, "HF_TOKEN": FAKE_KEY}
    variables = run_folder.run_environment(tmp_path / "run", 1, "id", environment)
    assert FAKE_KEY not in json.dumps(launch.worker_overrides(variables))
    assert variables["WANDB_MODE"] == "online" and variables["HF_HOME"].startswith(str(tmp_path / "run"))


# continuing


@pytest.mark.parametrize(
    "complete, torn, tracker, expected",
    [
        ([], [], None, None),
        ([5, 10], [], "10", 10),
        ([5], [10], "5", 5),  # killed while it saved step 10
        ([5, 10], [], "", 10),  # killed while it wrote the number
        ([5], [10], "10", 5),  # the number names a checkpoint that is not there: VERL would start from scratch
        ([], [10], "10", None),
        ([5, 10], [], None, 10),
    ],
)
def test_training_continues_from_the_newest_complete_checkpoint(tmp_path, complete, torn, tracker, expected):
    (tmp_path / "checkpoints").mkdir()
    for step in complete:
        checkpoint(tmp_path, step)
    for step in torn:
        checkpoint(tmp_path, step, complete=False)
    file = tmp_path / "checkpoints" / run_folder.TRACKER
    if tracker is not None:
        file.write_text(tracker)
    assert run_folder.last_checkpoint(tmp_path) == expected
    run_folder.last_checkpoint(tmp_path, repair=True)
    assert (int(file.read_text()) if file.exists() else None) == expected


def test_a_checkpoint_is_continued_under_its_own_settings_only(tmp_path):
    run_folder.start_attempt(tmp_path, {}, ["a.lr=1", "trainer.total_epochs=2"])
    run = run_folder.read_run(tmp_path)
    run_folder.check_same_run(tmp_path, run, ["a.lr=2"], False)  # no checkpoint yet: nothing to spoil
    checkpoint(tmp_path, 5)
    with pytest.raises(UserError, match="a.lr was 1, is 2.*--allow_changes"):
        run_folder.check_same_run(tmp_path, run, ["a.lr=2", "trainer.total_epochs=2"], False)
    run_folder.check_same_run(tmp_path, run, ["a.lr=2"], True)
    run_folder.check_same_run(tmp_path, run, ["a.lr=1", "trainer.total_epochs=9"], False)


def test_each_attempt_keeps_its_logs_and_the_wandb_run(tmp_path):
    first = run_folder.start_attempt(tmp_path, {}, ["a=1"])
    second = run_folder.start_attempt(tmp_path, run_folder.read_run(tmp_path), ["a=1"])
    assert (first["attempts"], second["attempts"]) == (1, 2) and first["wandb_run_id"] == second["wandb_run_id"]
    paths = {run_folder.run_environment(tmp_path, n, "x", {})["VERL_FILE_LOGGER_PATH"] for n in (1, 2)}
    assert len(paths) == 2  # VERL opens the file anew and would erase the first attempt's


def test_a_damaged_run_json_is_one_line(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="run.json: is not a run.json of the launcher"):
        run_folder.read_run(tmp_path)
