"""What grpo_train.sh does before anything starts: read the settings, check them, compose VERL's configuration.

    python Policy_Optimization/launch.py --plan FOLDER [settings as grpo_train.sh] [-- VERL overrides]

Under --dry_run it prints the command and the settings that matter. Otherwise it prepares the run folder, and writes python's
arguments and the environment to FOLDER for the shell. Each text ends with NUL, so a path may hold any character. For a run
that is finished it writes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.verl_parquet import load_chat_tokenizer
from Gradient_evaluation.chat_template import check_variables, date_string, prints_date
from Gradient_evaluation.cli import run as run_main
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.utils import REWARDS
from Policy_Optimization import checks, verl_config
from Policy_Optimization.overrides import REWARD_FILE, hydra_value, verl_overrides
from Policy_Optimization.rollout_rows import check_saving
from Policy_Optimization.run_folder import (
    check_same_gpus,
    check_same_run,
    is_finished,
    last_checkpoint,
    last_value,
    read_run,
    run_environment,
    start_attempt,
    wandb_mode,
)
from Policy_Optimization.settings import Settings, as_typed, read_settings


def check_settings(settings: Settings, environment: Mapping[str, str]) -> list[str]:
    """Check what can be checked without VERL. Returns notes for the user; raises UserError at the first fault."""
    notes = []
    if settings.nnodes > 1 and not settings.ray_address:
        raise UserError(
            "--nnodes: several machines need a Ray cluster; start one and give --ray_address (docs/training.md, Several nodes)"
        )
    config = checks.check_model(settings.model)
    if config is None:
        notes.append(f"{settings.model} is no local folder, so it is taken for a hub id; it was not looked up")
    else:
        tokens = settings.max_prompt_length + settings.max_response_length
        checks.check_model_fits(config, tokens, settings.tensor_parallel)
    checks.check_no_secret(settings.passed, environment)
    if importlib.util.find_spec("wandb") is None:
        raise UserError("the package wandb is not installed; pip install wandb")
    for name, instead in (
        ("BASE", "MODEL, DATA_DIR and RUN_DIR as paths"),
        ("REPO_DIR", "nothing: the launcher finds its own files"),
    ):
        if environment.get(name, "").strip():
            notes.append(f"{name} of the paper's script is not read here; give {instead}")
    if wandb_mode(environment) == "offline":
        notes.append(f"W&B goes offline; later: wandb sync {shlex.quote(settings.run_dir)}/wandb/offline-run-*")
    return notes


def check_data(cfg: Any, settings: Settings) -> list[str]:
    """Check the files that VERL would read: schema, answers, lengths, and whether they have enough prompts for a step."""
    from omegaconf import OmegaConf

    notes, tokenizer = [], None
    kwargs = OmegaConf.to_container(cfg.data.apply_chat_template_kwargs, resolve=True)
    if Path(settings.model).is_dir():
        tokenizer = load_chat_tokenizer(settings.model)
        check_variables(tokenizer, kwargs)
        if prints_date(tokenizer, kwargs):
            notes.append("the chat template prints today's date, so VERL's prompts change from day to day")
    custom = OmegaConf.to_container(cfg.reward.custom_reward_function, resolve=True)
    for name in ("train_files", "val_files"):
        files = cfg.data[name] if not isinstance(cfg.data[name], str) else [cfg.data[name]]
        usable = too_long = 0
        for path in files:
            rows = checks.read_training_file(path, name)
            if custom["path"] == str(REWARD_FILE):
                checks.check_rows(rows, path, name, custom.get("reward_kwargs") or {})
            limit = cfg.data.max_prompt_length
            long = 0 if tokenizer is None else checks.count_overlong(rows, tokenizer, limit, kwargs)
            too_long += long
            if long:
                notes.append(f"{long} of {len(rows)} prompts in {path} are too long and will be left out")
            usable += len(rows) - long
        checks.check_loads_together(files, name)
        need = cfg.data.train_batch_size if name == "train_files" else 1
        if usable < need:
            step = 2 ** (usable.bit_length() - 1) if usable else 0
            fix = f", or {verl_config.fitting_flags(cfg, step, is_by_budget(settings))}" if step else ""
            limit = f"--max_prompt_length {cfg.data.max_prompt_length}"
            more = f"{too_long} are longer than {limit}: raise it, or give more" if too_long else "give more"
            raise UserError(f"--{name}: {usable} usable prompts, a step takes {need}; {more}{fix}")
    return notes


def pin_date(settings: Settings, previous: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Where the chat template prints today's date: settings with the date the run began with, and a note that says so.

    Only for a local model whose template reads the variable date_string: VERL passes no function on.
    """
    key, kwargs = "data.apply_chat_template_kwargs.date_string", settings.chat_template_kwargs or {}
    if not Path(settings.model).is_dir() or any(key in override for override in settings.passed):
        return settings, []
    today = date_string(load_chat_tokenizer(settings.model), kwargs)
    if today is None:
        return settings, []
    date = last_value(previous, key) or today
    settings = replace(settings, chat_template_kwargs={**kwargs, "date_string": date})
    return settings, [f"the chat template prints the date; this run uses {date}, also when it is continued"]


def is_by_budget(settings: Settings) -> bool:
    """Whether the batches follow from --budget and --update_budget."""
    return settings.origin["train_batch_size"] == settings.origin["mini_batch_size"] == "derived"


def check_machine(cfg: Any, settings: Settings) -> None:
    """Check, before a real run, the packages that training imports and, without a cluster, this machine's GPUs."""
    missing = verl_config.missing_for_training(cfg)
    if missing:
        quoted = " ".join(shlex.quote(package) for package in missing)
        raise UserError(f"training needs packages that are not installed here: pip install {quoted}")
    if settings.ray_address or cfg.trainer.device != "cuda":
        return
    import torch

    if torch.cuda.device_count() < cfg.trainer.n_gpus_per_node:
        raise UserError(
            f"--gpus_per_node {cfg.trainer.n_gpus_per_node}: this machine has {torch.cuda.device_count()} GPUs "
            f"that torch can use"
        )


def module_path(rewards: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The PYTHONPATH by which workers, which start in other folders, find a reward named package.module:function."""
    if all(name in REWARDS or name.rpartition(":")[0].endswith(".py") for name in rewards):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), environment.get("PYTHONPATH"))))}


def worker_overrides(variables: Mapping[str, str]) -> list[str]:
    """The overrides by which Ray gives the variables to every worker, also in a cluster that someone else started."""
    return [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}={hydra_value(text)}" for name, text in variables.items()]


def describe(settings: Settings, cfg: Any, notes: Sequence[str]) -> str:
    """What --dry_run prints above the command."""
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    step = cfg.data.train_batch_size
    given = [
        (name, " ".join(map(str, value)) if isinstance(value, tuple) else value)
        for name, value in settings.values().items()
        if value is not None
    ]
    lines = [f"  {name:26} {value}  ({settings.origin[name]})" for name, value in given]
    lines += [
        "what VERL makes of them:",
        f"  a step      {step} prompts x {rollout.n} continuations = {step * rollout.n}",
        f"  an update   {actor.ppo_mini_batch_size} prompts x {rollout.n} = {actor.ppo_mini_batch_size * rollout.n}",
        f"  advantage   {cfg.algorithm.adv_estimator}, std normalisation "
        f"{cfg.algorithm.norm_adv_by_std_in_grpo if cfg.algorithm.adv_estimator == 'grpo' else 'none'}, "
        f"{actor.loss_agg_mode}",
        f"  KL loss     {actor.use_kl_loss}, KL in reward {cfg.algorithm.use_kl_in_reward}",
        f"  reward      {cfg.reward.custom_reward_function.path}",
        f"  machines    {cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} GPUs",
    ]
    step = last_checkpoint(Path(settings.run_dir))
    lines.append(f"  starts from {'the model' if step is None else f'the checkpoint of step {step}'}")
    return "\n".join(["settings:", *lines, *(f"note: {note}" for note in notes)])


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    environment = os.environ if environment is None else environment
    plan = Path(arguments[1]) if arguments[:1] == ["--plan"] else None
    arguments = arguments[2:] if plan else arguments
    try:
        prepare(read_settings(arguments, environment), environment, plan)
    except UserError as error:
        raise UserError(as_typed(str(error), arguments, environment)) from None


def prepare(settings: Settings, environment: Mapping[str, str], plan: Path | None) -> None:
    """Check everything; then print it, or prepare the run folder and write the plan for the shell."""
    run_dir = Path(settings.run_dir)
    previous = read_run(run_dir)
    notes = check_settings(settings, environment)
    for key in ("train_files", "val_files"):  # at once, before VERL takes its seconds to import
        if not any(override.startswith(f"data.{key}=") for override in settings.passed):
            checks.read_training_file(getattr(settings, key), key)

    notes += verl_config.check_installed()
    settings, more = pin_date(settings, previous)
    notes += more
    overrides = verl_overrides(settings)
    cfg = verl_config.compose(overrides)
    verl_config.check_config(cfg, is_by_budget(settings))
    notes += check_data(cfg, settings)
    if cfg.trainer.resume_mode != "disable":
        check_same_gpus(run_dir, cfg)
    check_same_run(run_dir, previous, overrides, settings.allow_changes)
    if settings.save_rollouts:
        notes += check_saving(cfg, Path(settings.save_rollouts), resumed=bool(previous))

    command = ["-m", "verl.trainer.main_ppo"]
    if settings.dry_run:
        missing = verl_config.missing_for_training(cfg)
        notes += [f"not installed here, needed where it trains: {', '.join(missing)}"] if missing else []
        print(describe(settings, cfg, notes))
        print("command:\n  " + " \\\n    ".join([shlex.join([sys.executable, *command]), *map(shlex.quote, overrides)]))
        print("dry run: all checks passed, nothing was started")
        return
    check_machine(cfg, settings)
    if is_finished(run_dir, previous, overrides):
        print(f"{run_dir}: finished already with these settings; raise --epochs to go on, or give another --run_dir")
        return
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    started = start_attempt(run_dir, previous, overrides)
    variables = run_environment(run_dir, started["attempts"], started["wandb_run_id"], environment)
    variables |= module_path(settings.reward or (), environment)
    if settings.ray_address:
        variables["RAY_ADDRESS"] = settings.ray_address
    log = run_dir / "logs" / f"console_{started['attempts']}.log"
    write_plan(plan, [*command, *overrides, *worker_overrides(variables)], variables, run_dir, log)


def write_plan(plan: Path | None, command: Sequence[str], variables: Mapping[str, str], run_dir: Path, log: Path) -> None:
    """Leave the command, the environment and the paths of run folder and log in the folder ``plan``, each text ended by NUL."""
    if plan is None:
        raise UserError("start training with Policy_Optimization/grpo_train.sh; this file alone does --dry_run only")
    parts = {
        "command": command,
        "environment": [f"{name}={text}" for name, text in variables.items()],
        "paths": [str(run_dir), str(log)],
    }
    for name, texts in parts.items():
        (plan / name).write_bytes(b"".join(os.fsencode(text) + b"\0" for text in texts))


if __name__ == "__main__":
    run_main(main)
