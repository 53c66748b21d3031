"""The launcher says what it will do, and survives spaces, kills and second starts."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launches import FAKE_KEY, LAUNCHER, ROOT, dry_run, good, needs_verl


def test_a_dry_run_prints_the_settings_and_writes_nothing(inputs, capsys):
    needs_verl()
    before = sorted(inputs.rglob("*"))
    dry_run(inputs, "--estimator", "paper", environment={"HOME": str(inputs), "WANDB_API_KEY": FAKE_KEY})
    shown = capsys.readouterr()
    parts = ["32 prompts x 8 continuations = 256", "16 prompts x 8 = 128", "rloo", "seq-mean-token-sum", "nothing was started"]
    for part in (*parts, "-m verl.trainer.main_ppo", "data.train_batch_size=32"):
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
        (modules / f"{name}.py").touch()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_HOME"))}

    def start(trainer, *flags):
        told = {"TRAINER": trainer, "WITNESS": str(tmp_path / "witness"), "WANDB_API_KEY": FAKE_KEY, "WANDB_MODE": "offline"}
        environment = {**clean, "HOME": str(tmp_path), "PYTHONPATH": str(modules), **told}
        command = ["bash", str(LAUNCHER), "--env", str(home), *good(inputs, run_dir=tmp_path / "my run"), *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)

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
