"""The folder of a training run: what it was started with, caches, checkpoints, logs, W&B files.

run.json            overrides of the last attempt, number of attempts, W&B run id
checkpoints/        global_step_N, and VERL's latest_checkpointed_iteration.txt
logs/               console_A.log and metrics_A.jsonl of attempt A (VERL would overwrite one file)
validation/         the continuations and scores of every validation
wandb/, cache/, hydra/, finished
"""

from __future__ import annotations

import fcntl
import json
import netrc
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors, write_bytes_atomic, write_json

TRACKER = "latest_checkpointed_iteration.txt"
CACHES = {  # where libraries would write into the home folder
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "WANDB_CACHE_DIR": "wandb",
    "WANDB_DATA_DIR": "wandb",
    "XDG_CACHE_HOME": "other",
}
# What may differ between the attempts of one run: how long it trains, how often it saves and validates, batch sizes that only
# decide memory, and where it is logged and its rollouts go.
FREE = (
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.logger",
    "trainer.log_val_generations",
    "trainer.val_before_train",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.v1.sampler.custom_sampler.",
    "trainer.v1.sampler.sampler_kwargs.save_rollouts",
    "reward.custom_reward_function.reward_kwargs.reward_timeout",
    "trainer.default_local_dir",
    "hydra.run.dir",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "ray_kwargs.",
)


def read_run(run_dir: Path) -> dict:
    """run.json of an earlier attempt, or {} for a new run; UserError if the folder or file is something else."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run_dir {run_dir}: is a file; give a folder")
    path = run_dir / "run.json"
    if not path.exists():
        return {}
    with one_line_errors(path, "read"):
        data = path.read_bytes()
    try:
        run = json.loads(data)
        return {"attempts": int(run["attempts"]), "overrides": list(run["overrides"]), "wandb_run_id": str(run["wandb_run_id"])}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not a run.json of the launcher; remove it or give another --run_dir") from None


def last_checkpoint(run_dir: Path, repair: bool = False) -> int | None:
    """The step training will continue from, or None.

    VERL reads the step from a small file. A kill can leave that file empty, and VERL crashes; or it names a folder that is
    missing, and VERL starts from scratch without a message. In both cases this is the step of the newest complete checkpoint
    (data.pt is written last), and ``repair`` writes it into the file.
    """
    folder = run_dir / "checkpoints"
    complete = []
    for path in folder.glob("global_step_*"):
        number = path.name.removeprefix("global_step_")
        if number.isdigit() and (path / "data.pt").is_file() and (path / "actor").is_dir():
            complete.append(int(number))
    tracker = folder / TRACKER
    try:
        step = int(tracker.read_text())
    except (OSError, ValueError):
        step = None
    if step in complete or (step is None and not complete):
        return step
    newest = max(complete, default=None)
    if repair and newest is not None:
        write_bytes_atomic(tracker, str(newest).encode())
    elif repair and tracker.exists():
        tracker.unlink()  # it names a checkpoint that was never finished
    return newest


def last_value(run: Mapping, key: str) -> str | None:
    """What the last attempt gave VERL under ``key``, without quotes; None for a new run or without such a key."""
    value = _by_key(run.get("overrides", [])).get(key)
    return None if value is None else value.strip('"')


def check_same_gpus(run_dir: Path, cfg: Any) -> None:
    """UserError where the checkpoint to continue was written by another number of GPUs.

    FSDP writes one file for each GPU, and each GPU reads the file of its rank and their number. So no flag can allow it.
    """
    step = last_checkpoint(run_dir)
    if step is None:
        return
    folder, now = run_dir / "checkpoints" / f"global_step_{step}" / "actor", cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    parts = (re.fullmatch(r"\w+_world_size_(\d+)_rank_\d+\.pt", path.name) for path in folder.iterdir())
    before = {int(part[1]) for part in parts if part}
    if before and now not in before:
        raise UserError(
            f"{folder}: this checkpoint is in {max(before)} parts, one for each GPU that wrote it, and cannot be "
            f"continued on {now}; use as many GPUs, or merge it into a --model of a new --run_dir "
            "(docs/training.md)"
        )


def check_same_run(run_dir: Path, run: Mapping, overrides: list[str], allow_changes: bool) -> None:
    """UserError naming what changed, if a checkpoint would be continued with other settings than it was made with."""
    if not run or allow_changes or last_checkpoint(run_dir) is None:
        return
    before, now = _by_key(run["overrides"]), _by_key(overrides)
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and not key.startswith(FREE)]
    if changed:
        shown = "; ".join(f"{key} was {before.get(key, 'unset')}, is {now.get(key, 'unset')}" for key in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{run_dir}: its checkpoint was made with other settings ({shown}{more}); "
            f"give another --run_dir, or pass --allow_changes"
        )


def is_finished(run_dir: Path, run: Mapping, overrides: list[str]) -> bool:
    """Did an attempt with exactly these overrides run to its end?"""
    return (run_dir / "finished").exists() and bool(run) and _by_key(run["overrides"]) == _by_key(overrides)


def _by_key(overrides: list[str]) -> dict[str, str]:
    return dict(override.lstrip("+~").partition("=")[::2] for override in overrides)


def start_attempt(run_dir: Path, run: Mapping, overrides: list[str]) -> dict:
    """Make the folders and write run.json for one more attempt; returns it."""
    for name in ("checkpoints", "logs", "validation", "cache"):  # W&B makes its own below run_dir
        with one_line_errors(run_dir / name, "write"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
    _refuse_second_launcher(run_dir)
    last_checkpoint(run_dir, repair=True)
    (run_dir / "finished").unlink(missing_ok=True)
    run = {
        "attempts": run.get("attempts", 0) + 1,
        "overrides": overrides,
        "wandb_run_id": run.get("wandb_run_id") or secrets.token_hex(4),
    }
    write_json(run_dir / "run.json", run)
    return run


def _refuse_second_launcher(run_dir: Path) -> None:
    """UserError while a launcher trains in this folder.

    The shell of grpo_train.sh holds the kernel's lock on .lock (flock) as long as it trains; here it is only asked for. The
    package filelock cannot be held by a shell, and where there is no flock it takes another lock, which the shell does not see.
    """
    with one_line_errors(run_dir / ".lock", "write"), open(run_dir / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_dir}: another launcher trains here; wait, or give another --run_dir") from None


def has_wandb_key(environment: Mapping[str, str]) -> bool:
    """Is there a key for W&B, in WANDB_API_KEY or in the netrc file? The key itself is neither returned nor stored."""
    if environment.get("WANDB_API_KEY", "").strip():
        return True
    host = urlparse(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = environment.get("NETRC") or os.path.join(environment.get("HOME", "~"), ".netrc")
    try:
        return netrc.netrc(os.path.expanduser(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_mode(environment: Mapping[str, str]) -> str:
    """online, offline or disabled: WANDB_MODE where it is set, else online with a key and offline without one."""
    mode = environment.get("WANDB_MODE", "").strip()
    if mode not in ("", "online", "offline", "disabled"):
        raise UserError(f"WANDB_MODE={mode}: use online, offline or disabled")
    if mode == "online" and not has_wandb_key(environment):
        raise UserError("WANDB_MODE=online, but there is no key; set WANDB_API_KEY or use WANDB_MODE=offline")
    return mode or ("online" if has_wandb_key(environment) else "offline")


def run_environment(run_dir: Path, attempt: int, run_id: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that training needs, none of them a secret. A cache whose variable the user has set stays where it is."""
    variables = {name: environment.get(name) or str(run_dir / "cache" / folder) for name, folder in CACHES.items()}
    token = Path(environment.get("HOME", "~")).expanduser() / ".cache" / "huggingface" / "token"
    if not environment.get("HF_HOME") and not environment.get("HF_TOKEN_PATH") and token.exists():
        variables["HF_TOKEN_PATH"] = str(token)  # where the login is; otherwise it would be looked for below HF_HOME
    variables |= {
        "VERL_FILE_LOGGER_PATH": str(run_dir / "logs" / f"metrics_{attempt}.jsonl"),
        "WANDB_MODE": wandb_mode(environment),
        "WANDB_DIR": str(run_dir),
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
    }
    return variables
