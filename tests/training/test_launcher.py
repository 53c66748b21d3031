"""The launcher refuses what would fail later, says what it will do, and survives spaces, kills and second starts."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_tokenizer import parquet, save_chat_tokenizer

from data.make_arithmetic import make_problems
from data.verl_parquet import Problem
from Gradient_evaluation.errors import UserError
from Policy_Optimization import launch, run_folder
from Policy_Optimization.overrides import hydra_value, verl_overrides
from Policy_Optimization.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "Policy_Optimization" / "grpo_train.sh"
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"  # of the length of a W&B key


def good(inputs, **changes) -> list[str]:
    """Flags of a run that passes every check."""
    flags = {
        "model": inputs / "my model",
        "train_files": inputs / "train.parquet",
        "val_files": inputs / "val.parquet",
        "run_dir": inputs / "run",
        "group_size": 8,
        "budget": 256,
        "update_budget": 128,
        "gpus_per_node": 1,
        "max_response_length": 64,
        **changes,
    }
    return [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]


def needs_verl():
    pytest.importorskip("verl", reason="verl is not installed")


def dry_run(inputs, *more, environment=None, **changes):
    passed = list(more[more.index("--") :]) if "--" in more else []
    flags = [*good(inputs, **changes), *[text for text in more if text not in passed]]
    launch.main([*flags, "--dry_run", *passed], environment or {"HOME": str(inputs)})


def values(overrides):
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


# settings


@pytest.mark.parametrize("size, prompts, mini, epochs", [(4, 256, 64, 32), (32, 32, 8, 4), (128, 8, 2, 1)])
def test_the_published_budgets_fix_batch_mini_batch_and_epochs(size, prompts, mini, epochs):
    made = values(verl_overrides(read_settings(["--group_size", str(size)], {})))
    assert made["data.train_batch_size"] == str(prompts)
    assert made["actor_rollout_ref.actor.ppo_mini_batch_size"] == str(mini)
    assert made["trainer.total_epochs"] == str(epochs)
    assert float(made["actor_rollout_ref.actor.optim.lr"]) == 1e-6
    assert made["data.max_prompt_length"] == made["data.max_response_length"] == "512"
    assert made["actor_rollout_ref.actor.use_kl_loss"] == "False" and made["actor_rollout_ref.rollout.name"] == "vllm"


def test_the_two_estimators_are_verls_and_the_papers():
    made = values(verl_overrides(read_settings([], {})))
    assert (made["algorithm.adv_estimator"], made["algorithm.norm_adv_by_std_in_grpo"]) == ("grpo", "True")
    made = values(verl_overrides(read_settings(["--estimator", "paper"], {})))
    assert made["algorithm.adv_estimator"] == "rloo"
    assert made["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum"


def test_the_papers_estimator_is_unnormalised_in_verl():
    """rloo gives (r - mean) G / (G - 1): the leave-one-out advantage, not divided by the group's std."""
    needs_verl()
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards = torch.zeros(8, 3)
    rewards[:3, -1] = 1.0
    advantage, _ = get_adv_estimator_fn("rloo")(
        token_level_rewards=rewards, response_mask=torch.ones(8, 3), index=np.array(["x"] * 8)
    )
    assert advantage[0, 0].item() == pytest.approx(0.7143, abs=1e-4)
    assert advantage[7, 0].item() == pytest.approx(-0.4286, abs=1e-4)


def test_a_flag_beats_a_variable_and_both_beat_the_default():
    settings = read_settings(["--learning_rate", "3e-6"], {"LEARNING_RATE": "1e-5", "GROUP_SIZE": "16", "SEED": " "})
    assert (settings.learning_rate, settings.group_size, settings.seed) == (3e-6, 16, 0)
    assert [settings.origin[name] for name in ("learning_rate", "group_size", "seed")] == ["flag", "environment", "default"]


def test_what_follows_the_dashes_comes_last_and_unchanged():
    passed = ["trainer.save_freq=7", "+a.b='x y'", "--not-a-flag", "--"]
    assert verl_overrides(read_settings(["--save_freq", "3", "--", *passed], {}))[-4:] == passed


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "it's",
        'say "x"',
        "back\\",
        '\\"',
        "a=b,c",
        "[x]",
        "null",
        "TRUE",
        "1e5",
        "ünï",
        "(a)",
        "a:b",
        "~/x",
        "a$b",
        "#x",
        "",
        "plain/path_1.parquet",
        "/abs/a-b.c",
    ],
)
def test_hydra_reads_any_text_back_as_it_was(text):
    pytest.importorskip("hydra", reason="hydra is not installed")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    value = OverridesParser.create().parse_override("key=" + hydra_value(text)).value()
    assert value == text and isinstance(value, str)


# wrong settings: refused by name, before VERL is imported

WITHOUT_VERL = [
    ("G does not divide the budget", dict(group_size=3), r"--group_size 3 does not divide --budget 256: .*change --budget"),
    (
        "G does not divide the update",
        dict(group_size=64, budget=1024, update_budget=32),
        "--group_size 64 does not divide --update_budget 32",
    ),
    (
        "G does not divide the epochs",
        dict(group_size=256, budget=1024, update_budget=256),
        "--group_size 256 does not divide --epoch_budget 128",
    ),
    ("G of one", dict(group_size=1), None),
    ("G is no number", dict(group_size="many"), None),
    ("learning rate is text", dict(learning_rate="abc"), None),
    ("learning rate of zero", dict(learning_rate=0), None),
    ("estimator misspelt", dict(estimator="gpro"), None),
    ("no steps between checkpoints", dict(save_freq=0), None),
    ("several nodes without a cluster", dict(nnodes=2), "--nnodes: .*--ray_address"),
    (
        "no training file",
        dict(train_files="absent.parquet"),
        r"--train_files .*absent.parquet: no such file; make it with data/prepare",
    ),
    ("no validation file", dict(val_files="absent.parquet"), "--val_files .*absent.parquet: no such file"),
    ("a folder for a file", dict(train_files="{inputs}"), "--train_files .*: is a folder"),
    ("JSONL for parquet", dict(train_files="{inputs}/rows.jsonl"), "whose name ends in .parquet"),
    ("not parquet inside", dict(train_files="{inputs}/text.parquet"), "cannot be read as parquet"),
    ("parquet of another schema", dict(train_files="{inputs}/other.parquet"), "no column 'data_source'"),
    ("no rows", dict(val_files="{inputs}/empty.parquet"), "--val_files .*holds no rows"),
    ("missing model folder", dict(model="./absent/model"), "--model ./absent/model: no such folder, and no hub id"),
    ("implausible model id", dict(model="a b/c"), "--model a b/c: no such folder, and no hub id"),
    ("model folder without config", dict(model="{inputs}"), "has no config.json"),
    ("model folder without weights", dict(model="{inputs}/bare model"), "has no weights"),
    ("more tokens than positions", dict(max_prompt_length=1000), "1064 tokens, the model has 1024 positions"),
    ("heads not shared among GPUs", dict(tensor_parallel=3, gpus_per_node=3), "does not divide the model's 2 attention heads"),
    ("experiment with a slash", dict(experiment="a/b"), "--experiment 'a/b'"),
    ("run folder is a file", dict(run_dir="{inputs}/rows.jsonl"), "--run_dir .*: is a file"),
]


@pytest.fixture(scope="module")
def faults(inputs):
    """Files that are wrong in one way each, beside the good ones."""
    import pyarrow
    import pyarrow.parquet

    (inputs / "rows.jsonl").write_text('{"prompt": "1?", "ground_truth": 1}\n')
    (inputs / "text.parquet").write_text("not parquet")
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), inputs / "other.parquet")
    (inputs / "empty.parquet").write_bytes(parquet([], "val"))
    save_chat_tokenizer(inputs / "bare model")
    rows = [Problem([{"role": "user", "content": "1?"}], "none", "")] * 40
    (inputs / "answers.parquet").write_bytes(parquet(rows, "train"))
    rows = [Problem([{"role": "user", "content": "1?"}], "1", "")] * 40
    (inputs / "poetry.parquet").write_bytes(parquet(rows, "train", "poetry", "poetry"))
    (inputs / "few.parquet").write_bytes(parquet(rows[:31], "train"))
    table = pyarrow.parquet.read_table(inputs / "train.parquet")
    large = table.set_column(0, "data_source", table["data_source"].cast(pyarrow.large_string()))
    pyarrow.parquet.write_table(large, inputs / "large.parquet")
    (inputs / "reward.py").write_text("def other(): pass\n")
    return inputs


@pytest.mark.parametrize("changes, message", [row[1:] for row in WITHOUT_VERL], ids=[row[0] for row in WITHOUT_VERL])
def test_a_wrong_setting_is_refused_by_name(faults, capsys, changes, message):
    changes = {name: str(value).format(inputs=faults) for name, value in changes.items()}
    if message is None:  # argparse itself
        with pytest.raises(SystemExit) as stopped:
            dry_run(faults, **changes)
        assert stopped.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and f"--{next(iter(changes))}" in lines[0]
    else:
        with pytest.raises(UserError, match=message) as error:
            dry_run(faults, **changes)
        assert "\n" not in str(error.value)
    assert not (faults / "run").exists()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"GROUP_SIZE": "many"}, "environment variable GROUP_SIZE: 'many' is not an integer"),
        ({"ESTIMATOR": "gpro"}, "environment variable ESTIMATOR: 'gpro' is unknown"),
        ({"WANDB_MODE": "sometimes"}, "WANDB_MODE=sometimes"),
        ({"WANDB_MODE": "online"}, "WANDB_MODE=online, but there is no key"),
    ],
)
def test_a_wrong_environment_variable_is_refused_by_name(inputs, environment, message):
    with pytest.raises(UserError, match=message):
        dry_run(inputs, group_size=None, environment={"HOME": str(inputs), **environment})


def test_an_unknown_flag_is_an_error(inputs, capsys):
    with pytest.raises(SystemExit) as stopped:
        dry_run(inputs, "--group_sise", "4")
    assert stopped.value.code == 2 and "--group_sise" in capsys.readouterr().err


# wrong settings that VERL itself takes in silence, and its own checks

WITH_VERL = [
    ("misspelt estimator", ["algorithm.adv_estimator=gpro"], "adv_estimator=gpro: unknown to VERL; use one of .*grpo"),
    ("misspelt loss", ["actor_rollout_ref.actor.policy_loss.loss_mode=vanila"], "loss_mode=vanila: unknown to VERL"),
    ("no continuations", ["actor_rollout_ref.rollout.n=0"], "rollout.n=0: a whole number of at least 1"),
    ("a group of one", ["actor_rollout_ref.rollout.n=1"], "rollout.n=1: grpo compares at least two"),
    ("learning rate is text", ["actor_rollout_ref.actor.optim.lr=abc"], "optim.lr=abc: a number is expected"),
    ("learning rate is infinite", ["actor_rollout_ref.actor.optim.lr=inf"], "optim.lr=inf: a finite number"),
    ("a switch is text", ["actor_rollout_ref.actor.use_kl_loss=perhaps"], "use_kl_loss=perhaps: True or False"),
    ("missing file behind the dashes", ["data.train_files=/absent/x.parquet"], "/absent/x.parquet: no such file"),
    (
        "micro-batch does not divide",
        ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24"],
        r"--micro_batch_size 24 does not divide the 128 continuations of a GPU",
    ),
    (
        "log-prob batch does not divide",
        ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=24"],
        "--log_prob_micro_batch_size 24 does not divide the 256",
    ),
    (
        "mini-batch does not divide",
        ["actor_rollout_ref.actor.ppo_mini_batch_size=12"],
        "--mini_batch_size 12 does not divide --train_batch_size 32",
    ),
    (
        "tensor parallelism does not fit",
        ["trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=3"],
        "--tensor_parallel 3 does not fit 1 nodes of 4 GPUs",
    ),
    ("batch does not fit the GPUs", ["trainer.n_gpus_per_node=3"], "cannot be shared among 3 GPUs"),
    (
        "reward under the dead key",
        ["custom_reward_function.path=/x.py"],
        "VERL 0.9.1 ignores it; use reward.custom_reward_function.path",
    ),
    ("reward manager under the dead key", ["reward_model.reward_manager=dapo"], "use reward.reward_manager.name"),
    ("reward file is missing", ["reward.custom_reward_function.path=/absent.py"], "VERL cannot load it"),
    ("reward function is missing", ["reward.custom_reward_function.path='{inputs}/reward.py'"], "VERL cannot load it"),
    (
        "unknown key",
        ["trainer.epochs=3"],
        r"^trainer.epochs: VERL has no such key; is it trainer.\w+\? \(\+trainer.epochs=... adds one\)$",
    ),
    ("misspelt key", ["data.train_batchsize=3"], "data.train_batchsize: VERL has no such key; is it data.train_batch_size"),
    ("no override", ["train_batch_size"], "VERL's configuration: .*train_batch_size"),
    ("unknown engine", ["actor_rollout_ref.rollout.name=vlm"], "rollout.name=vlm: unknown to VERL; use one of .*vllm"),
    ("unknown logger", ["trainer.logger=[console,wand]"], "trainer.logger=wand: unknown to VERL"),
    ("unknown resume mode", ["trainer.resume_mode=always"], "resume_mode=always: unknown to VERL"),
    ("unknown aggregation", ["actor_rollout_ref.actor.loss_agg_mode=mean"], "VERL's validate_config: .*loss_agg_mode"),
    ("batch below the mini-batch", ["data.train_batch_size=8"], "--mini_batch_size 16 does not divide"),
    (
        "engine without room",
        ["actor_rollout_ref.rollout.max_model_len=100"],
        "max_model_len=100: prompt and response have up to 576",
    ),
    (
        "no micro-batch",
        ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"],
        "VERL's validate_config: .*ppo_micro_batch_size",
    ),
    (
        "fewer prompts than a step takes",
        ["data.train_files='{inputs}/few.parquet'"],
        "--train_files: 31 usable prompts, a step takes 32",
    ),
    (
        "answers the reward cannot use",
        ["data.train_files='{inputs}/answers.parquet'"],
        "row 1: the ground_truth 'none' is not an integer",
    ),
    ("unknown reward in the data", ["data.train_files='{inputs}/poetry.parquet'"], "reward 'poetry' .*is unknown"),
    (
        "all prompts too long",
        ["data.max_prompt_length=10"],
        r"--train_files: 0 usable prompts.*64 are longer than --max_prompt_length 10: raise it",
    ),
    (
        "token budget below one sequence",
        ["actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=575"],
        "ppo_max_token_len_per_gpu=575: prompt and response have up to 576 tokens.*raise it to 576",
    ),
    ("LoRA rank above vLLM's", ["actor_rollout_ref.model.lora_rank=513"], "lora_rank"),
    (
        "a variable the template does not read",
        ["+data.apply_chat_template_kwargs.enable_thinking=False"],
        "does not read enable_thinking",
    ),
    (
        "files that VERL cannot join",
        ["data.train_files=['{inputs}/train.parquet','{inputs}/large.parquet']"],
        "large.parquet: VERL cannot load it: .*other types than in .*train.parquet",
    ),
    ("a key among the overrides", [f"+x.WANDB_API_KEY={FAKE_KEY}"], "x.WANDB_API_KEY: looks like a key"),
]


@pytest.mark.parametrize("passed, message", [row[1:] for row in WITH_VERL], ids=[row[0] for row in WITH_VERL])
def test_what_verl_would_take_in_silence_is_refused(faults, capsys, passed, message):
    needs_verl()
    passed = [text.replace("{inputs}", str(faults).replace("'", "\\'")) for text in passed]
    with pytest.raises(UserError, match=message) as error:
        dry_run(faults, "--", *passed)
    assert "\n" not in str(error.value) and FAKE_KEY not in str(error.value)
    assert not (faults / "run").exists()


@pytest.mark.parametrize(
    "rows, changes, message",
    [
        (5, {}, "give more, or"),
        (31, {"group_size": 4, "budget": None, "update_budget": None, "gpus_per_node": 8}, "give more, or"),
        (200, {"group_size": 2, "gpus_per_node": 64, "nnodes": 1}, "these fit:"),
        (3, {"train_batch_size": 32, "mini_batch_size": 32}, "give more, or"),
        (1, {"group_size": 2}, "give more, or"),
        (64, {"budget": 96, "update_budget": 128}, "these fit:"),
        (64, {"micro_batch_size": 24}, "these fit:"),
        (64, {"gpus_per_node": 3}, "these fit:"),
        (64, {"train_batch_size": 24, "mini_batch_size": 16}, "these fit:"),
    ],
)
def test_the_flags_that_are_said_to_fit_do(inputs, tmp_path, capsys, rows, changes, message):
    needs_verl()
    problems = [Problem(row["prompt"], str(row["ground_truth"]), "") for row in make_problems(rows, seed=1)]
    few = tmp_path / "few.parquet"
    few.write_bytes(parquet(problems, "train"))
    with pytest.raises(UserError, match=message) as error:
        dry_run(inputs, train_files=few, **changes)
    dry_run(inputs, *str(error.value).partition(message)[2].split(), train_files=few, **changes)
    assert "all checks passed" in capsys.readouterr().out


def test_a_dry_run_prints_the_settings_and_writes_nothing(inputs, capsys):
    needs_verl()
    before = sorted(inputs.rglob("*"))
    dry_run(inputs, "--estimator", "paper", environment={"HOME": str(inputs), "WANDB_API_KEY": FAKE_KEY})
    shown = capsys.readouterr()
    for part in (
        "32 prompts x 8 continuations = 256",
        "16 prompts x 8 = 128",
        "rloo",
        "seq-mean-token-sum",
        "-m verl.trainer.main_ppo",
        "data.train_batch_size=32",
        "nothing was started",
    ):
        assert part in shown.out, part
    assert FAKE_KEY not in shown.out + shown.err and sorted(inputs.rglob("*")) == before


def test_verl_composes_the_printed_command_to_the_same_paths(inputs, capsys):
    needs_verl()
    import shlex

    from Policy_Optimization.verl_config import compose

    dry_run(inputs)
    command = capsys.readouterr().out.partition("command:\n")[2].rpartition("dry run:")[0].replace("\\\n", " ")
    arguments = shlex.split(command)
    cfg = compose(arguments[arguments.index("verl.trainer.main_ppo") + 1 :])
    assert cfg.data.train_files == str(inputs / "train.parquet")
    assert cfg.actor_rollout_ref.model.path == str(inputs / "my model")
    assert cfg.trainer.default_local_dir == str(inputs / "run" / "checkpoints")


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


def checkpoint(run_dir, step, complete=True):
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    if complete:
        (folder / "data.pt").write_bytes(b"x")


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


# the shell script itself, with a stand-in for VERL's trainer (everything before it is real)

STAND_IN = """#!/usr/bin/env bash
# A python whose verl.trainer.main_ppo only writes down how it was called, and then does what $TRAINER says.
if [[ "$1 $2" != "-m verl.trainer.main_ppo" ]]; then exec "{python}" "$@"; fi
printf '%s\\0' "$@" >"$WITNESS"; env -0 >"$WITNESS.env"
echo "step:1 - training"
case $TRAINER in
  fail) echo "ValueError: no" >&2; exit 7 ;;
  hang) touch "$WITNESS.ready"; trap 'echo told to stop; exit 0' TERM; while :; do read -rt 1 <> <(:) || :; done ;;
esac
"""


@pytest.fixture
def shell(inputs, tmp_path):
    """Start grpo_train.sh in an environment whose VERL is the stand-in: start(trainer, *flags) -> Popen."""
    needs_verl()
    home = tmp_path / "env with space"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").write_text(STAND_IN.format(python=sys.executable))
    (home / "bin" / "python").chmod(0o755)
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("transfer_queue", "cachetools", "uvicorn", "fastapi", "vllm"):
        with contextlib.suppress(FileExistsError):
            (modules / f"{name}.py").write_text("")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_HOME"))}

    def start(trainer, *flags):
        environment = {
            **clean,
            "HOME": str(tmp_path),
            "PYTHONPATH": str(modules),
            "TRAINER": trainer,
            "WITNESS": str(tmp_path / "witness"),
            "WANDB_API_KEY": FAKE_KEY,
            "WANDB_MODE": "offline",
        }
        command = ["bash", str(LAUNCHER), "--env", str(home), *good(inputs, run_dir=tmp_path / "my run"), *flags]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )

    return start


CPU = ("--", "trainer.device=cpu", "+x.text='a  b'")


def test_the_script_logs_and_starts_no_finished_run(shell, tmp_path):
    out, err = (first := shell("work", *CPU)).communicate()
    assert first.returncode == 0, err
    called = (tmp_path / "witness").read_text().split("\0")
    assert called[:2] == ["-m", "verl.trainer.main_ppo"] and "+x.text='a  b'" in called
    assert (tmp_path / "my run" / "logs" / "console_1.log").read_text() == "step:1 - training\n"
    assert "step:1 - training" in out and "wandb sync" in out
    environment = dict(pair.partition("=")[::2] for pair in (tmp_path / "witness.env").read_text().split("\0"))
    assert environment["WANDB_MODE"] == "offline" and environment["WANDB_DIR"] == str(tmp_path / "my run")
    assert environment["WANDB_API_KEY"] == FAKE_KEY  # W&B needs it; nothing shows or stores it:
    stored = [path.read_bytes() for path in (tmp_path / "my run").rglob("*") if path.is_file()]
    assert FAKE_KEY not in out + err and not any(FAKE_KEY.encode() in data for data in stored)

    (tmp_path / "witness").unlink()
    out, _ = (second := shell("work", *CPU)).communicate()
    assert second.returncode == 0 and "finished already" in out and not (tmp_path / "witness").exists()


@pytest.mark.slow
def test_a_failure_keeps_its_exit_code_and_its_log(shell, tmp_path):
    _, err = (failed := shell("fail", *CPU)).communicate()
    assert failed.returncode == 7 and "ended with code 7" in err and not (tmp_path / "my run" / "finished").exists()
    again = shell("work", *CPU)
    again.communicate()
    logs = tmp_path / "my run" / "logs"
    assert again.returncode == 0 and "ValueError: no" in (logs / "console_1.log").read_text()
    assert (logs / "console_2.log").exists() and (tmp_path / "my run" / "finished").exists()


@pytest.mark.slow
def test_a_signal_reaches_the_trainer_and_says_how_to_continue(shell, tmp_path):
    process = shell("hang", *CPU)
    while not (tmp_path / "witness.ready").exists():
        assert process.poll() is None, process.communicate()
    with pytest.raises(BlockingIOError), open(tmp_path / "my run" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = shell("work", *CPU)
    _, err = second.communicate()
    assert second.returncode == 2 and "another launcher trains here" in err
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143 and "told to stop" in out and "the same command continues" in err
    assert not (tmp_path / "my run" / "finished").exists()


def test_without_verl_it_says_how_to_install_it(inputs, tmp_path):
    """The whole script, from another folder, in a python that finds no verl."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['verl'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    command = ["bash", LAUNCHER, "--env", Path(sys.prefix), *good(inputs), "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r'error: VERL is not installed here; .*pip install "verl==0.9.1".*\n', done.stderr), done.stderr


@pytest.mark.parametrize("name, message", [("absent", "no folder"), ("{inputs}", "holds no bin/python")])
def test_a_wrong_env_is_refused(inputs, name, message):
    command = ["bash", LAUNCHER, "--env", name.format(inputs=inputs), "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and message in done.stderr


def test_the_shell_scripts_pass_shellcheck():
    import shutil

    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*sorted((ROOT / "Policy_Optimization").glob("*.sh")), *sorted((ROOT / "tests/verl_cpu").glob("*.sh"))]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
