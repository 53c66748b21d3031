"""What the launcher's settings mean to VERL, in Hydra's syntax, and which sampling law VERL then trains under."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import is_own
from Gradient_evaluation.runs.inputs.rewards import resolve_rewards
from Policy_Optimization.settings import ESTIMATORS, Settings, value_without_flag

REWARD_FILE = Path(__file__).resolve().parent / "reward_fn.py"
SAMPLER_FILE = Path(__file__).resolve().parent / "save_rollouts.py"
REWARD_KWARGS, SAMPLER = "reward.custom_reward_function.reward_kwargs", "trainer.v1.sampler"
KWARGS = "data.apply_chat_template_kwargs"
IN_VERL = {  # key -> its name in the evaluation's sampling law
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "actor_rollout_ref.rollout.top_p": "top_p",
    "actor_rollout_ref.rollout.top_k": "top_k",
    "data.max_response_length": "max_new_tokens",
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def hydra_value(value: Any) -> str:
    r"""A JSON value in the grammar of Hydra's overrides: text is quoted unless it is plain.

    >>> hydra_value({"a": [1e-6, None, "x/y=1"], "b": False}), hydra_value("grpo")
    ('{a:[1e-06,null,"x/y=1"],b:False}', 'grpo')
    """
    if isinstance(value, dict):
        for name in value:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise UserError(f"--chat_template_kwargs: {name!r} is no name that VERL's configuration takes")
        return "{" + ",".join(f"{name}:{hydra_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    if re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    if "${" in value:
        raise UserError(f"{value}: a path or name with ${{ in it cannot be given to VERL; rename it")
    # a backslash is plain in Hydra's quotes, unless a quote follows
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value) + '"'


def verl_overrides(settings: Settings) -> list[str]:
    """What the settings mean to VERL, in Hydra's syntax; what follows ``--`` comes last, so that it wins."""
    meaning = {
        **_algorithm_and_data(settings),
        **_model_and_workers(settings),
        "reward.custom_reward_function.path": str(REWARD_FILE),
        "reward.custom_reward_function.name": "compute_score",
        **_trainer(settings),
    }
    for name, value in (settings.chat_template_kwargs or {}).items():
        hydra_value({name: value})  # refuses a name that Hydra would not read
        meaning[f"+{KWARGS}.{name}"] = value
    meaning |= _reward(settings) | _saved_rollouts(settings)
    if not settings.ray_address and (os.cpu_count() or 1) < 16:
        meaning["ray_kwargs.ray_init.num_cpus"] = 16  # with fewer slots its transfer queue waits for ever
    overrides = [f"{key}={hydra_value(value)}" for key, value in meaning.items()]
    return [*overrides, "trainer.logger=[console,wandb,file]", *settings.passed]


def _algorithm_and_data(s: Settings) -> dict[str, Any]:
    estimator, _ = ESTIMATORS[s.estimator]
    return {
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
    }


def _model_and_workers(s: Settings) -> dict[str, Any]:
    _, aggregation = ESTIMATORS[s.estimator]
    return {
        "actor_rollout_ref.model.path": s.model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{ACTOR}.optim.lr": s.learning_rate,
        f"{ACTOR}.ppo_mini_batch_size": s.mini_batch_size,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": s.micro_batch_size,
        f"{ACTOR}.loss_agg_mode": aggregation,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.entropy_coeff": 0,
        f"{ACTOR}.data_loader_seed": s.seed,
        f"{ROLLOUT}.name": s.rollout,
        f"{ROLLOUT}.n": s.group_size,
        f"{ROLLOUT}.temperature": s.temperature,
        f"{ROLLOUT}.seed": s.seed,
        f"{ROLLOUT}.tensor_model_parallel_size": s.tensor_parallel,
        f"{ROLLOUT}.gpu_memory_utilization": s.gpu_memory_utilization,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": s.log_prob_micro_batch_size,
    }


def _reward(s: Settings) -> dict[str, Any]:
    """What reward_fn.compute_score is given by keyword; nothing where each row of the data names its rewards."""
    if not s.reward:
        return {}
    found: dict[str, Any] = {"reward": s.reward[0] if len(s.reward) == 1 else list(s.reward)}
    if s.reward_weights:
        found["reward_weights"] = list(s.reward_weights)
    if any(map(is_own, s.reward)):
        found["reward_timeout"] = s.reward_timeout
        found["reward_digests"] = [
            each.digest for each in resolve_rewards(s.reward, s.reward_weights, s.reward_timeout).rewards
        ]
    return {f"+{REWARD_KWARGS}.{name}": value for name, value in found.items()}


def _saved_rollouts(s: Settings) -> dict[str, Any]:
    if not s.save_rollouts:
        return {}
    # without a model, for each step has weights of its own, and without a reward that each row of the data names
    law = law_of(s.values(), s.passed)
    told = {
        name: value for name, value in law.items() if name not in ("model", "revision") and (name, value) != ("reward", None)
    }
    asked = {"directory": s.save_rollouts, "model": s.model, "law": json.dumps(told, sort_keys=True)}
    return {
        f"{SAMPLER}.custom_sampler.path": str(SAMPLER_FILE),
        f"{SAMPLER}.custom_sampler.name": "SavingReplayBuffer",
        f"+{SAMPLER}.sampler_kwargs.save_rollouts": asked,
    }


def _trainer(s: Settings) -> dict[str, Any]:
    run_dir = Path(s.run_dir)
    return {
        "trainer.project_name": s.project,
        "trainer.experiment_name": s.experiment,
        "trainer.n_gpus_per_node": s.gpus_per_node,
        "trainer.nnodes": s.nnodes,
        "trainer.total_epochs": s.epochs,
        "trainer.save_freq": s.save_freq,
        "trainer.test_freq": s.test_freq,
        "trainer.max_actor_ckpt_to_keep": s.keep_checkpoints,
        "trainer.val_before_train": True,
        "trainer.resume_mode": "auto",
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "trainer.validation_data_dir": str(run_dir / "validation"),
        "hydra.run.dir": str(run_dir / "hydra"),
    }


def training_law(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, Any]:
    """The sampling law and reward of the training's rollouts, under the names the evaluation gives them.

    environment: settings as variables. passed: what goes to VERL unchanged. reward None: each row names its own.
    """
    names = ("model", "temperature", "max_response_length", "reward", "reward_weights", "chat_template_kwargs")
    return law_of({name: value_without_flag(name, environment) for name in names}, passed)


def law_of(settings: Mapping[str, Any], passed: Sequence[str]) -> dict[str, Any]:
    """``training_law`` of the launcher's settings, by name."""
    law = {
        "model": settings["model"],
        "revision": None,
        "temperature": settings["temperature"],
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": settings["max_response_length"],
        "stop": [],
    }
    rewards, weights = settings["reward"], settings["reward_weights"]
    kwargs = dict(settings["chat_template_kwargs"] or {})
    for override in passed:
        key, _, text = override.lstrip("+").partition("=")
        if key == f"{REWARD_KWARGS}.reward":
            rewards = (_yaml(text),)
        elif key in IN_VERL:
            law[IN_VERL[key]] = _yaml(text)
        elif key.startswith(f"{KWARGS}."):
            kwargs[key.removeprefix(f"{KWARGS}.")] = _yaml(text)
    model = str(law["model"])
    if Path(model).expanduser().is_dir():
        model = Path(model).expanduser().resolve().name
    top_k = 0 if law["top_k"] == -1 else law["top_k"]  # VERL writes -1 for all tokens
    judged = resolve_rewards(rewards, weights).identity if rewards else {"reward": None}
    return {**law, "model": model, "top_k": top_k, **judged, "chat_template_kwargs": kwargs or None}


def _yaml(text: str) -> Any:
    """The value of an override, as far as the sampling law needs it: a number, True, False or null, else text."""
    with contextlib.suppress(ValueError):
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    return text.strip("'\"")
