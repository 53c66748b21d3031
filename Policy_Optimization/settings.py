"""The launcher's settings: one table of names, defaults and meanings, and the VERL overrides they become.

    read_settings(arguments, environment)  -> Settings: values by name, where each came from, what follows "--"
    verl_overrides(settings)               -> ["data.train_batch_size=32", ...] in Hydra's syntax

A setting is a flag (``--group_size 32``), else an environment variable (``GROUP_SIZE=32``, or the one of the paper's
script, ``PUBLISHED``), else its default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from Gradient_evaluation.chat_template import json_object
from Gradient_evaluation.cli import Parser, integer, number
from Gradient_evaluation.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
REWARD_FILE = ROOT / "Policy_Optimization" / "reward_fn.py"
ESTIMATORS = {  # name -> (adv_estimator, loss_agg_mode)
    "grpo": ("grpo", "token-mean"),
    "paper": ("rloo", "seq-mean-token-sum"),
}


def frequency(text: str) -> int:
    """An argparse type: a positive number of steps, or -1 for never."""
    return -1 if text == "-1" else integer(1)(text)


class Setting(NamedTuple):
    """One row of the table; ``default`` None means derived from the others, as ``help`` says."""

    name: str
    convert: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None


positive = number(0, low_included=False)
fraction = number(0, 1, low_included=False)
SETTINGS = (
    Setting("model", str, "Qwen/Qwen2.5-1.5B-Instruct", "hub id or local folder"),
    Setting("train_files", str, "outputs/parquet/gsm8k/train.parquet", "written by data/prepare_parquet.py"),
    Setting("val_files", str, "outputs/parquet/gsm8k/val.parquet", "the same for validation"),
    Setting("group_size", integer(2), 32, "G: continuations of one prompt"),
    Setting("budget", integer(1), 1024, "continuations of one training step"),
    Setting("update_budget", integer(1), 256, "continuations of one optimiser update"),
    Setting("epoch_budget", integer(1), 128, "continuations of each prompt over the whole training"),
    Setting("train_batch_size", integer(1), None, "prompts of a step; default budget / G"),
    Setting("mini_batch_size", integer(1), None, "prompts of an update; default update_budget / G"),
    Setting("epochs", integer(1), None, "passes over the prompts; default epoch_budget / G"),
    Setting("estimator", str, "grpo", "grpo: VERL's, over the std of the group; paper: unnormalised", tuple(ESTIMATORS)),
    Setting("learning_rate", positive, 1e-6, "constant"),
    Setting("max_prompt_length", integer(1), 512, "tokens"),
    Setting("max_response_length", integer(1), 512, "tokens"),
    Setting("temperature", positive, 1.0, "of the training continuations; validation is greedy"),
    Setting("rollout", str, "vllm", "engine that samples", ("vllm", "sglang", "trtllm")),
    Setting(
        "chat_template_kwargs", json_object, None, """variables of the chat template, as JSON: '{"enable_thinking": false}'"""
    ),
    Setting("reward", str, None, "default: what each row of the data says", ("integer", "last_integer", "math")),
    Setting("seed", integer(0), 0, "of the data order and the sampling"),
    Setting("gpus_per_node", integer(1), 8, ""),
    Setting("nnodes", integer(1), 1, "machines; more than one need --ray_address"),
    Setting("ray_address", str, None, "an existing Ray cluster: HOST:6379, or auto on one of its nodes"),
    Setting("tensor_parallel", integer(1), 1, "GPUs that hold one copy of the sampling engine"),
    Setting("gpu_memory_utilization", fraction, 0.5, "share of a GPU for the sampling engine"),
    Setting("micro_batch_size", integer(1), 8, "continuations per GPU in one backward pass"),
    Setting("log_prob_micro_batch_size", integer(1), 16, "continuations per GPU in one forward pass"),
    Setting("save_freq", frequency, 20, "steps between checkpoints, -1 for none"),
    Setting("test_freq", frequency, 5, "steps between validations, -1 for none"),
    Setting("keep_checkpoints", integer(1), 2, "older ones are removed"),
    Setting("project", str, "group_size", "W&B project"),
    Setting("experiment", str, None, "W&B run name; default MODEL_ESTIMATOR_gG_seedS"),
    Setting("run_dir", str, None, "everything the run writes; default outputs/train/EXPERIMENT"),
)
# The variables of the paper's script -> the settings they are here; those of the same name need no entry.
PUBLISHED = {
    "TRAIN_FILE": "train_files",
    "VAL_FILE": "val_files",
    "GPUS": "gpus_per_node",
    "GPU_UTIL": "gpu_memory_utilization",
    "EXPERIMENT_NAME": "experiment",
    "PROJECT_NAME": "project",
}
KWARGS = "data.apply_chat_template_kwargs"
IN_VERL = {  # key -> its name in the law of the evaluation
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "actor_rollout_ref.rollout.top_p": "top_p",
    "actor_rollout_ref.rollout.top_k": "top_k",
    "data.max_response_length": "max_new_tokens",
    "reward.custom_reward_function.reward_kwargs.reward": "reward",
}
BUDGETS = (("train_batch_size", "budget"), ("mini_batch_size", "update_budget"), ("epochs", "epoch_budget"))


@dataclass
class Settings:
    """Values by name, the place each came from ("flag", "environment", "default", "derived"), and the rest."""

    values: dict[str, Any]
    origin: dict[str, str]
    passed: list[str] = field(default_factory=list)
    dry_run: bool = False
    allow_changes: bool = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


def make_parser() -> Parser:
    parser = Parser(
        prog="grpo_train.sh",
        description="GRPO training with VERL. Every setting is a flag or an "
        "environment variable of the same name in capitals; everything after -- goes to VERL unchanged.",
    )
    for setting in SETTINGS:
        shown = "" if setting.default is None else f" (default {setting.default})"
        parser.add_argument(
            f"--{setting.name}",
            help=(setting.help + shown).strip(),
            choices=setting.choices,
            metavar=None if setting.choices else setting.name.upper(),
            type=setting.convert,
        )
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the command, start nothing")
    parser.add_argument(
        "--allow_changes",
        action="store_true",
        help="continue from a checkpoint although settings differ from those that made it",
    )
    parser.add_argument("--env", help="conda environment or virtual environment to run in (default: the current one)")
    return parser


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags, then environment variables, then defaults, then what derives from others; UserError names the setting.

    Raises UserError if G does not divide a budget, and says which of the two to change.
    """
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given = make_parser().parse_args(arguments[:split])
    values, origin = {}, {}
    for setting in SETTINGS:
        values[setting.name], origin[setting.name] = getattr(given, setting.name), "flag"
        variable = _variable_of(setting.name, environment)
        if values[setting.name] is None and variable:
            values[setting.name] = _from_environment(setting, variable, environment)
            origin[setting.name] = "environment"
        if values[setting.name] is None:
            values[setting.name], origin[setting.name] = setting.default, "default"
    settings = Settings(values, origin, arguments[split + 1 :], given.dry_run, given.allow_changes)
    if environment.get("DATA_DIR", "").strip():
        _look_in_data_folder(settings, environment["DATA_DIR"].strip())
    _derive(settings, environment.get("RUN_TAG", "").strip())
    return settings


def _variable_of(name: str, environment: Mapping[str, str]) -> str | None:
    """The environment variable that gives a setting, ours or that of the paper's script; UserError if they differ."""
    names = [name.upper(), *(published for published, ours in PUBLISHED.items() if ours == name)]
    found = [variable for variable in names if environment.get(variable, "").strip()]
    if len({environment[variable] for variable in found}) > 1:
        raise UserError(f"environment variables {' and '.join(found)} are one setting, with two values; unset one of them")
    return found[0] if found else None


def _look_in_data_folder(settings: Settings, folder: str) -> None:
    """DATA_DIR of the paper's script: where the data files are. A file named in full, or by a flag, stays."""
    values, origin = settings.values, settings.origin
    for name, usual in (("train_files", ("train.parquet",)), ("val_files", ("val.parquet", "test.parquet"))):
        if origin[name] == "default":
            there = [file for file in usual if (Path(folder).expanduser() / file).is_file()]
            values[name], origin[name] = str(Path(folder) / (there or usual)[0]), "environment"
        elif origin[name] == "environment" and not Path(values[name]).expanduser().exists():
            values[name] = str(Path(folder) / values[name])


def training_law(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, Any]:
    """The sampling law and reward of the training's rollouts, under the names the evaluation gives them.

    environment: settings as variables. passed: what goes to VERL unchanged. reward None: what each row of the data says.
    """
    by_name = {setting.name: setting for setting in SETTINGS}

    def value(name: str) -> Any:
        variable = _variable_of(name, environment)
        return _from_environment(by_name[name], variable, environment) if variable else by_name[name].default

    law = {
        "model": value("model"),
        "revision": None,
        "temperature": value("temperature"),
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": value("max_response_length"),
        "stop": [],
        "reward": value("reward"),
    }
    kwargs = dict(value("chat_template_kwargs") or {})
    for override in passed:
        key, _, text = override.lstrip("+").partition("=")
        if key in IN_VERL:
            law[IN_VERL[key]] = _yaml(text)
        elif key.startswith(f"{KWARGS}."):
            kwargs[key.removeprefix(f"{KWARGS}.")] = _yaml(text)
    model = str(law["model"])
    if Path(model).expanduser().is_dir():
        model = Path(model).expanduser().resolve().name
    top_k = 0 if law["top_k"] == -1 else law["top_k"]  # VERL's for all tokens
    return {**law, "model": model, "top_k": top_k, "chat_template_kwargs": kwargs or None}


def _yaml(text: str) -> Any:
    """The value of an override, as far as the law needs it: a number, True, False or null, else text."""
    with contextlib.suppress(ValueError):
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    return text.strip("'\"")


def _from_environment(setting: Setting, variable: str, environment: Mapping[str, str]) -> Any:
    text = environment[variable]
    if variable == "GPUS" and "," in text:  # a list of devices; grpo_train.sh makes it CUDA_VISIBLE_DEVICES
        text = str(len([device for device in text.split(",") if device.strip()]))
    try:
        value = setting.convert(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"environment variable {variable}: {error}") from None
    if setting.choices and value not in setting.choices:
        raise UserError(f"environment variable {variable}: {text!r} is unknown, use {' or '.join(setting.choices)}")
    return value


def _derive(settings: Settings, run_tag: str) -> None:
    values = settings.values
    for name in ("model", "train_files", "val_files"):
        if not values[name].strip():
            raise UserError(f"--{name}: is empty")
    size = values["group_size"]
    for name, budget in BUDGETS:
        if values[name] is not None:
            continue
        if values[budget] % size:
            raise UserError(
                f"--group_size {size} does not divide --{budget} {values[budget]}: choose a divisor "
                f"({_divisors(values[budget])}), change --{budget}, or give --{name}"
            )
        values[name], settings.origin[name] = values[budget] // size, "derived"
    if values["experiment"] is None:
        model = re.sub(r"[^\w.+-]", "_", Path(values["model"]).absolute().name)
        label = f"{model}_{values['estimator']}_g{size}_seed{values['seed']}" + (f"_{run_tag}" if run_tag else "")
        values["experiment"], settings.origin["experiment"] = label, "derived"
    if not re.fullmatch(r"[\w.+-]+", values["experiment"]):
        raise UserError(f"--experiment {values['experiment']!r}: use letters, digits, '.', '_', '-' and '+'")
    if values["run_dir"] is None:
        values["run_dir"], settings.origin["run_dir"] = str(Path("outputs/train") / values["experiment"]), "derived"
    for name in ("run_dir", "train_files", "val_files"):
        values[name] = str(Path(values[name]).expanduser().absolute())
    if Path(values["model"]).expanduser().is_dir():
        values["model"] = str(Path(values["model"]).expanduser().absolute())


def _divisors(budget: int) -> str:
    return ", ".join(str(size) for size in range(2, budget + 1) if budget % size == 0)[:120]


def hydra_value(value: Any) -> str:
    r"""``value`` in the grammar of Hydra's overrides: text is quoted unless it is plain.

    >>> hydra_value("a b/c=1"), hydra_value(1e-6), hydra_value(True), hydra_value("grpo")
    ('"a b/c=1"', '1e-06', 'True', 'grpo')
    """
    if not isinstance(value, str):
        return str(value)
    if re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    if "${" in value:
        raise UserError(f"{value}: a path or name with ${{ in it cannot be given to VERL; rename it")
    # a backslash is plain in Hydra's quotes, unless a quote follows
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value) + '"'


def hydra_json(value: Any) -> str:
    """A JSON value in the same grammar.

    >>> hydra_json({"a": [1, None, "x y"], "b": False})
    '{a:[1,null,"x y"],b:False}'
    """
    if isinstance(value, dict):
        for name in value:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise UserError(f"--chat_template_kwargs: {name!r} is no name that VERL's configuration takes")
        return "{" + ",".join(f"{name}:{hydra_json(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_json, value)) + "]"
    return "null" if value is None else hydra_value(value)


def verl_overrides(settings: Settings) -> list[str]:
    """What the settings mean to VERL, in Hydra's syntax; what follows ``--`` comes last, so that it wins."""
    s, run_dir = settings, Path(settings.run_dir)
    estimator, aggregation = ESTIMATORS[s.estimator]
    actor, rollout, trainer = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
    meaning = {
        "algorithm.adv_estimator": estimator,
        "algorithm.norm_adv_by_std_in_grpo": s.estimator == "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": s.train_files,
        "data.val_files": s.val_files,
        "data.train_batch_size": s.train_batch_size,
        "data.max_prompt_length": s.max_prompt_length,
        "data.max_response_length": s.max_response_length,
        "data.filter_overlong_prompts": True,
        "data.truncation": "error",
        "data.seed": s.seed,
        "actor_rollout_ref.model.path": s.model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{actor}.optim.lr": s.learning_rate,
        f"{actor}.ppo_mini_batch_size": s.mini_batch_size,
        f"{actor}.ppo_micro_batch_size_per_gpu": s.micro_batch_size,
        f"{actor}.loss_agg_mode": aggregation,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.data_loader_seed": s.seed,
        f"{rollout}.name": s.rollout,
        f"{rollout}.n": s.group_size,
        f"{rollout}.temperature": s.temperature,
        f"{rollout}.seed": s.seed,
        f"{rollout}.tensor_model_parallel_size": s.tensor_parallel,
        f"{rollout}.gpu_memory_utilization": s.gpu_memory_utilization,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": s.log_prob_micro_batch_size,
        "reward.custom_reward_function.path": str(REWARD_FILE),
        "reward.custom_reward_function.name": "compute_score",
        f"{trainer}.project_name": s.project,
        f"{trainer}.experiment_name": s.experiment,
        f"{trainer}.n_gpus_per_node": s.gpus_per_node,
        f"{trainer}.nnodes": s.nnodes,
        f"{trainer}.total_epochs": s.epochs,
        f"{trainer}.save_freq": s.save_freq,
        f"{trainer}.test_freq": s.test_freq,
        f"{trainer}.max_actor_ckpt_to_keep": s.keep_checkpoints,
        f"{trainer}.val_before_train": True,
        f"{trainer}.resume_mode": "auto",
        f"{trainer}.default_local_dir": str(run_dir / "checkpoints"),
        f"{trainer}.validation_data_dir": str(run_dir / "validation"),
        "hydra.run.dir": str(run_dir / "hydra"),
    }
    for name, value in (s.chat_template_kwargs or {}).items():
        hydra_json({name: value})  # refuses a name that Hydra would not read
        meaning[f"+{KWARGS}.{name}"] = value
    if s.reward:
        meaning["+reward.custom_reward_function.reward_kwargs.reward"] = s.reward
    if not s.ray_address and (os.cpu_count() or 1) < 16:
        meaning["ray_kwargs.ray_init.num_cpus"] = 16  # with fewer slots its transfer queue waits for ever
    overrides = [f"{key}={hydra_json(value)}" for key, value in meaning.items()]
    return [*overrides, "trainer.logger=[console,wandb,file]", *s.passed]
