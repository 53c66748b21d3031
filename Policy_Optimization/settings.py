"""The launcher's settings: names, defaults and meanings in one table, and where each value came from.

    read_settings(arguments, environment)  -> Settings
    as_typed(text, arguments, environment) -> a message that names each setting as the person can type it

A setting is a flag (``--group_size 32``), else an environment variable (``GROUP_SIZE=32``, or the one of the paper's
script, ``PUBLISHED``), else its default. What they mean to VERL is in overrides.py.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from Gradient_evaluation.chat_template import json_object
from Gradient_evaluation.cli import LARGEST, Parser, integer, number, reward_name
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import CALL_LIMIT, check_weights
from Gradient_evaluation.utils import REWARDS

ESTIMATORS = {  # name -> (adv_estimator, loss_agg_mode)
    "grpo": ("grpo", "token-mean"),
    "paper": ("rloo", "seq-mean-token-sum"),
}
positive = number(0, low_included=False)
fraction = number(0, 1, low_included=False)


def frequency(text: str) -> int:
    """An argparse type: a positive number of steps, or -1 for never."""
    return -1 if text == "-1" else integer(1)(text)


def reward_of_a_run(text: str) -> str:
    """An argparse type: as ``cli.reward_name``, a file by its absolute path, for VERL's workers start in other folders."""
    source, _, function = reward_name(text).rpartition(":")
    return f"{Path(source).expanduser().absolute()}:{function}" if source.endswith(".py") else text


weight = number(-LARGEST, LARGEST, low_included=True)


class Setting(NamedTuple):
    """One row of the table; ``default`` None means derived from the others, as ``help`` says. several: a tuple of values."""

    name: str
    convert: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    several: bool = False


def flag(convert: Callable[[str], Any], default: Any, help: str, choices: tuple[str, ...] | None = None, several: bool = False):
    """A field of ``Settings`` that is a flag."""
    return field(default=default, metadata={"flag": (convert, default, help, choices, several)})


@dataclass(frozen=True)
class Settings:
    """The flags of grpo_train.sh and their values.

    origin: where the value of each flag came from, "flag", "environment", "default" or "derived"; passed: what follows ``--``.
    """

    model: str = flag(str, "Qwen/Qwen2.5-1.5B-Instruct", "hub id or local folder")
    train_files: str = flag(str, "outputs/parquet/gsm8k/train.parquet", "written by data/prepare_parquet.py")
    val_files: str = flag(str, "outputs/parquet/gsm8k/val.parquet", "the same for validation")
    group_size: int = flag(integer(2), 32, "G: continuations of one prompt")
    budget: int = flag(integer(1), 1024, "continuations of one training step")
    update_budget: int = flag(integer(1), 256, "continuations of one optimiser update")
    epoch_budget: int = flag(integer(1), 128, "continuations of each prompt over the whole training")
    train_batch_size: int = flag(integer(1), None, "prompts of a step; default budget / G")
    mini_batch_size: int = flag(integer(1), None, "prompts of an update; default update_budget / G")
    epochs: int = flag(integer(1), None, "passes over the prompts; default epoch_budget / G")
    estimator: str = flag(str, "grpo", "grpo: VERL's, over the std of the group; paper: unnormalised", tuple(ESTIMATORS))
    learning_rate: float = flag(positive, 1e-06, "constant")
    max_prompt_length: int = flag(integer(1), 512, "tokens")
    max_response_length: int = flag(integer(1), 512, "tokens")
    temperature: float = flag(positive, 1.0, "of the training continuations; validation is greedy")
    rollout: str = flag(str, "vllm", "engine that samples", ("vllm", "sglang", "trtllm"))
    chat_template_kwargs: dict[str, Any] | None = flag(
        json_object, None, """variables of the chat template, as JSON: '{"enable_thinking": false}'"""
    )
    reward: tuple[str, ...] | None = flag(
        reward_of_a_run,
        None,
        f"{', '.join(REWARDS)}, or path/file.py:function; default: what each row of the data says",
        None,
        True,
    )
    reward_weights: tuple[float, ...] | None = flag(weight, None, "of several rewards; default 1 each", None, True)
    reward_timeout: float = flag(positive, CALL_LIMIT, "seconds per call of a reward of yours")
    seed: int = flag(integer(0), 0, "of the data order and the sampling")
    gpus_per_node: int = flag(integer(1), 8, "")
    nnodes: int = flag(integer(1), 1, "machines; more than one need --ray_address")
    ray_address: str | None = flag(str, None, "an existing Ray cluster: HOST:6379, or auto on one of its nodes")
    tensor_parallel: int = flag(integer(1), 1, "GPUs that hold one copy of the sampling engine")
    gpu_memory_utilization: float = flag(fraction, 0.5, "share of a GPU for the sampling engine")
    micro_batch_size: int = flag(integer(1), 8, "continuations per GPU in one backward pass")
    log_prob_micro_batch_size: int = flag(integer(1), 16, "continuations per GPU in one forward pass")
    save_freq: int = flag(frequency, 20, "steps between checkpoints, -1 for none")
    test_freq: int = flag(frequency, 5, "steps between validations, -1 for none")
    keep_checkpoints: int = flag(integer(1), 2, "older ones are removed")
    project: str = flag(str, "group_size", "W&B project")
    experiment: str = flag(str, None, "W&B run name; default MODEL_ESTIMATOR_gG_seedS")
    run_dir: str = flag(str, None, "everything the run writes; default outputs/train/EXPERIMENT")
    save_rollouts: str | None = flag(str, None, "folder for the tokens and log-probs of every rollout; default: not written")
    origin: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    dry_run: bool = False
    allow_changes: bool = False

    def values(self) -> dict[str, Any]:
        """The value of each flag, by name."""
        return {setting.name: getattr(self, setting.name) for setting in SETTINGS}


SETTINGS = tuple(Setting(each.name, *each.metadata["flag"]) for each in fields(Settings) if each.metadata)
# The variables of the paper's script -> the settings they are here; those of the same name need no entry.
PUBLISHED = {
    "TRAIN_FILE": "train_files",
    "VAL_FILE": "val_files",
    "GPUS": "gpus_per_node",
    "GPU_UTIL": "gpu_memory_utilization",
    "EXPERIMENT_NAME": "experiment",
    "PROJECT_NAME": "project",
}
# The variable that sweep_group_size.sh sets for its runs, and its own flags by the launcher's settings.
IN_SWEEP = "IN_SWEEP"
SWEEP_FLAGS = {
    "group_size": "--group_sizes",
    "seed": "--seeds",
    "run_dir": "--sweep_dir",
    **{name: f"--{name}" for name in ("budget", "update_budget", "epoch_budget")},
}
BUDGETS = (("train_batch_size", "budget"), ("mini_batch_size", "update_budget"), ("epochs", "epoch_budget"))


def make_parser() -> Parser:
    where = "Every setting is a flag or an environment variable of the same name in capitals"
    text = f"GRPO training with VERL. {where}; everything after -- goes to VERL unchanged."
    parser = Parser(prog="grpo_train.sh", description=text)
    for setting in SETTINGS:
        shown = "" if setting.default is None else f" (default {setting.default})"
        parser.add_argument(
            f"--{setting.name}",
            help=(setting.help + shown).strip(),
            choices=setting.choices,
            metavar=None if setting.choices else setting.name.upper(),
            type=setting.convert,
            nargs="+" if setting.several else None,
        )
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the command, start nothing")
    changes = "continue from a checkpoint although settings differ from those that made it"
    parser.add_argument("--allow_changes", action="store_true", help=changes)
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
        variable = _variable_of(setting.name, environment)  # two that differ are refused, also beside a flag
        values[setting.name], origin[setting.name] = getattr(given, setting.name), "flag"
        if isinstance(values[setting.name], list):
            values[setting.name] = tuple(values[setting.name])
        if values[setting.name] is None:
            values[setting.name], origin[setting.name] = _without_flag(setting, variable, environment)
    folder = environment.get("DATA_DIR", "").strip()
    in_folder = _in_data_folder(values, origin, folder) if folder else {}
    values |= in_folder
    derived = _derived(values, environment.get("RUN_TAG", "").strip())
    values |= derived
    origin |= dict.fromkeys(in_folder, "environment") | dict.fromkeys(derived, "derived")
    values |= _absolute_paths(values)
    return Settings(
        **values, origin=origin, passed=tuple(arguments[split + 1 :]), dry_run=given.dry_run, allow_changes=given.allow_changes
    )


def value_without_flag(name: str, environment: Mapping[str, str]) -> Any:
    """The value of a setting that no flag gives: that of its environment variable, else the default."""
    (setting,) = (each for each in SETTINGS if each.name == name)
    return _without_flag(setting, _variable_of(name, environment), environment)[0]


def as_typed(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """``text``, a message that names settings by their flags, with the names that the person can type.

    A setting that an environment variable gives has the name of the variable. In a sweep the sweep's own flags have their
    names there, and every other setting is a variable.

    >>> as_typed("--micro_batch_size 24 does not divide", [], {"MICRO_BATCH_SIZE": "24"})
    'MICRO_BATCH_SIZE=24 does not divide'
    >>> as_typed("--group_size 4: give --save_freq 5", ["--group_size", "4"], {"IN_SWEEP": "1"})
    '--group_sizes 4: give SAVE_FREQ=5'
    """
    given, in_sweep = {argument.partition("=")[0] for argument in arguments}, bool(environment.get(IN_SWEEP))
    for name in (setting.name for setting in SETTINGS):
        variable = None if f"--{name}" in given else _variable_of(name, environment)
        if in_sweep and name in SWEEP_FLAGS:
            text = re.sub(rf"--{name}(?![\w-])", SWEEP_FLAGS[name], text)
        elif in_sweep or variable:
            variable = variable or name.upper()
            value = re.escape(environment.get(variable, "").strip()) or r"\d"
            text = re.sub(rf"--{name} (?=\d|[/~'.]\S|{value})", f"{variable}=", text)
            text = re.sub(rf"--{name}(?![\w-])", variable, text)
    return text


def _without_flag(setting: Setting, variable: str | None, environment: Mapping[str, str]) -> tuple[Any, str]:
    if variable is None:
        return setting.default, "default"
    return _from_environment(setting, variable, environment), "environment"


def _variable_of(name: str, environment: Mapping[str, str]) -> str | None:
    """The environment variable that gives a setting, ours or that of the paper's script; UserError if they differ."""
    names = [name.upper(), *(published for published, ours in PUBLISHED.items() if ours == name)]
    found = [variable for variable in names if environment.get(variable, "").strip()]
    if len({environment[variable] for variable in found}) > 1:
        raise UserError(f"environment variables {' and '.join(found)} are one setting, with two values; unset one of them")
    return found[0] if found else None


def _in_data_folder(values: Mapping[str, Any], origin: Mapping[str, str], folder: str) -> dict[str, str]:
    """The data files in ``folder``, the DATA_DIR of the paper's script. A file given by a flag, or by its full path, stays."""
    found = {}
    for name, usual in (("train_files", ("train.parquet",)), ("val_files", ("val.parquet", "test.parquet"))):
        if origin[name] == "default":
            there = [file for file in usual if (Path(folder).expanduser() / file).is_file()]
            found[name] = str(Path(folder) / (there or usual)[0])
        elif origin[name] == "environment" and not Path(values[name]).expanduser().exists():
            found[name] = str(Path(folder) / values[name])
    return found


def _from_environment(setting: Setting, variable: str, environment: Mapping[str, str]) -> Any:
    text = environment[variable]
    if variable == "GPUS" and "," in text:  # a list of devices; grpo_train.sh makes it CUDA_VISIBLE_DEVICES
        text = str(len([device for device in text.split(",") if device.strip()]))
    try:
        if setting.several:
            return tuple(setting.convert(each) for each in shlex.split(text))
        value = setting.convert(text)
    except (ValueError, argparse.ArgumentTypeError) as error:  # the former: a quote that is not closed
        raise UserError(f"environment variable {variable}: {error}") from None
    if setting.choices and value not in setting.choices:
        raise UserError(f"environment variable {variable}: {text!r} is unknown, use {' or '.join(setting.choices)}")
    return value


def _derived(values: Mapping[str, Any], run_tag: str) -> dict[str, Any]:
    """What the other settings decide: prompts of a step and an update, epochs, the run's name and folder."""
    for name in ("model", "train_files", "val_files"):
        if not values[name].strip():
            raise UserError(f"--{name}: is empty")
    size, derived = values["group_size"], {}
    for name, budget in BUDGETS:
        if values[name] is not None:
            continue
        if values[budget] % size:
            raise UserError(
                f"--group_size {size} does not divide --{budget} {values[budget]}: choose a divisor "
                f"({_divisors(values[budget])}), change --{budget}, or give --{name}"
            )
        derived[name] = values[budget] // size
    experiment = values["experiment"]
    if experiment is None:
        model = re.sub(r"[^\w.+-]", "_", Path(values["model"]).absolute().name)
        tag = f"_{run_tag}" if run_tag else ""
        derived["experiment"] = experiment = f"{model}_{values['estimator']}_g{size}_seed{values['seed']}{tag}"
    if not re.fullmatch(r"[\w.+-]+", experiment):
        raise UserError(f"--experiment {experiment!r}: use letters, digits, '.', '_', '-' and '+'")
    if values["reward_weights"]:
        check_weights(values["reward_weights"], values["reward"] or ())
    if values["run_dir"] is None:
        derived["run_dir"] = str(Path("outputs/train") / experiment)
    return derived


def _absolute_paths(values: Mapping[str, Any]) -> dict[str, str]:
    paths = {name: values[name] for name in ("run_dir", "train_files", "val_files")}
    if values["save_rollouts"]:
        paths["save_rollouts"] = values["save_rollouts"]
    if Path(values["model"]).expanduser().is_dir():
        paths["model"] = values["model"]
    return {name: str(Path(path).expanduser().absolute()) for name, path in paths.items()}


def _divisors(budget: int) -> str:
    return ", ".join(str(size) for size in range(2, budget + 1) if budget % size == 0)[:120]
