"""VERL's configuration, composed by the installed VERL and checked where its own checks stay silent.

Found by trying VERL: it accepts a misspelt estimator, rollout.n=0, lr=abc, missing files, micro-batches that do not
divide, and tensor parallelism that does not fit, and it reads no reward from custom_reward_function.path.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import metadata, util
from typing import Any

from Gradient_evaluation.errors import UserError

VERSION = "0.9.1"  # the one all of this was tried with
INSTALL = 'pip install "verl==0.9.1" "TransferQueue>=0.1.10" cachetools uvicorn fastapi'
RUNTIME = {"transfer_queue": "TransferQueue>=0.1.10", **{name: name for name in ("cachetools", "uvicorn", "fastapi")}}
ATTENTION = ("flash_attn", "kernels")  # either gives transformers flash_attention_2
VLLM_LARGEST_LORA_RANK = 512
DEAD_REWARD_KEYS = {"reward_manager": "reward_manager.name", "enable": "reward_model.enable", "num_workers": "num_workers"}
GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "gdpo")  # compare the continuations of one prompt


def check_installed() -> list[str]:
    """Warnings about the installed VERL; UserError, with the command that installs it, if there is none."""
    if util.find_spec("verl") is None or util.find_spec("hydra") is None:
        raise UserError(f"VERL is not installed here; install it (on Linux, Python 3.10 to 3.12): {INSTALL}")
    version = metadata.version("verl")
    return [] if version == VERSION else [f"verl is {version}; this launcher was tried with {VERSION}"]


def missing_for_training(cfg: Any) -> list[str]:
    """The packages that pip must still install: what VERL imports at run time, the sampling engine, attention.

    ``verl[vllm]`` does not bring flash-attn, which VERL's FSDP engine asks transformers for on CUDA.
    """
    missing = [package for module, package in RUNTIME.items() if util.find_spec(module) is None]
    rollout, model = cfg.actor_rollout_ref.rollout.name, cfg.actor_rollout_ref.model
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if cfg.trainer.device == "cuda" and attention == "flash_attention_2" and not any(map(util.find_spec, ATTENTION)):
        missing.append("flash-attn")
    engine = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}.get(rollout, rollout)
    return missing + ([engine] if util.find_spec(engine) is None else [])


def compose(overrides: Sequence[str]) -> Any:
    """The configuration of VERL's PPO trainer under ``overrides``; UserError with Hydra's reason in one line."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose("ppo_trainer", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        if unknown := re.match(r"Could not override '([^']+)'", reason):
            near = difflib.get_close_matches(unknown[1], default_leaves(), 1)
            hint = f"; is it {near[0]}?" if near else ""
            raise UserError(f"{unknown[1]}: VERL has no such key{hint} (+{unknown[1]}=... adds one)") from None
        raise UserError(f"VERL's configuration: {reason[:300]}") from None


@lru_cache(maxsize=1)
def default_leaves() -> dict[str, Any]:
    """VERL's own defaults by key."""
    from omegaconf import OmegaConf

    return dict(_leaves(OmegaConf.to_container(compose([]), resolve=True)))


def check_config(cfg: Any, by_budget: bool) -> None:
    """All checks of a composed configuration; UserError at the first fault. by_budget: as in ``fitting_flags``."""
    check_types(cfg)
    check_reward_key(cfg)
    check_names(cfg)
    check_batches(cfg, by_budget)
    check_devices(cfg)
    check_token_budgets(cfg)
    run_validate_config(cfg)


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def check_types(cfg: Any) -> None:
    """Where VERL's default is a number or a yes or no, the value is one too; and no number is NaN or infinite."""
    from omegaconf import OmegaConf

    values = dict(_leaves(OmegaConf.to_container(cfg, resolve=True)))
    for key, expected in default_leaves().items():
        value = values.get(key)
        if value is None or expected is None:
            continue
        if isinstance(expected, bool) and not isinstance(value, bool):
            raise UserError(f"{key}={value}: True or False is expected")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(expected, (int, float)) and not isinstance(expected, bool) and not is_number:
            raise UserError(f"{key}={value}: a number is expected")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value}: a finite number is expected")


def check_reward_key(cfg: Any) -> None:
    """The reward stands under the key VERL reads, and VERL's own loader can load it."""
    if cfg.custom_reward_function.path:
        raise UserError("custom_reward_function.path: VERL 0.9.1 ignores it; use reward.custom_reward_function.path")
    for key, live in DEAD_REWARD_KEYS.items():
        if cfg.reward_model.get(key) is not None:
            raise UserError(f"reward_model.{key}: VERL 0.9.1 ignores it; use reward.{live}")
    from verl.trainer.ppo.reward import get_custom_reward_fn

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            loaded = get_custom_reward_fn(cfg)
    except Exception as error:  # the file is a program of its author's
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise UserError(f"reward.custom_reward_function.path: VERL cannot load it: {reason[:200]}") from None
    if loaded is None:
        raise UserError("reward.custom_reward_function.path: is empty; leave it out to use the launcher's reward")


def check_names(cfg: Any) -> None:
    """Names VERL looks up only once training runs: estimator, loss, sampling engine, loggers, modes."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    loggers = [cfg.trainer.logger] if isinstance(cfg.trainer.logger, str) else cfg.trainer.logger
    loss, engine = cfg.actor_rollout_ref.actor.policy_loss.loss_mode, cfg.actor_rollout_ref.rollout.name
    choices = [
        ("algorithm.adv_estimator", cfg.algorithm.adv_estimator, ADV_ESTIMATOR_REGISTRY),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", loss, POLICY_LOSS_REGISTRY),
        ("actor_rollout_ref.rollout.name", engine, {name for name, _ in _ROLLOUT_REGISTRY}),
        ("trainer.resume_mode", cfg.trainer.resume_mode, ("auto", "disable", "resume_path")),
        ("data.truncation", cfg.data.truncation, ("error", "left", "right", "middle")),
        ("trainer.v1.trainer_mode", cfg.trainer.v1.trainer_mode, ("sync", "colocate_async", "separate_async")),
        *(("trainer.logger", name, Tracking.supported_backend) for name in loggers),
    ]
    for key, value, known in choices:
        if value not in known:
            raise UserError(f"{key}={value}: unknown to VERL; use one of {', '.join(sorted(map(str, known)))}")


def check_batches(cfg: Any, by_budget: bool) -> None:
    """Batches are whole and positive, and each divides the next larger: micro, mini (per GPU), train.

    What does not divide is refused with flags under which everything does. by_budget: as in ``fitting_flags``.
    """
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    counts = {
        "data.train_batch_size": cfg.data.train_batch_size,
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        "trainer.n_gpus_per_node": cfg.trainer.n_gpus_per_node,
        "trainer.nnodes": cfg.trainer.nnodes,
        "trainer.total_epochs": cfg.trainer.total_epochs,
        "data.max_prompt_length": cfg.data.max_prompt_length,
        "data.max_response_length": cfg.data.max_response_length,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
    }
    for key, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{key}={value}: a whole number of at least 1 is expected")
    if cfg.algorithm.adv_estimator.startswith(GROUP_ESTIMATORS) and rollout.n < 2:
        raise UserError(f"actor_rollout_ref.rollout.n=1: {cfg.algorithm.adv_estimator} compares at least two")
    prompts, part = cfg.data.train_batch_size, actor.ppo_mini_batch_size
    fix = f"; these fit: {fitting_flags(cfg, prompts, by_budget)}"
    if prompts % part and by_budget:
        raise UserError(
            f"the mini-batch of {part} prompts does not divide the {prompts} prompts of a step (by default they are "
            f"--update_budget / G and --budget / G){fix}"
        )
    if prompts % part:
        raise UserError(
            f"--mini_batch_size {part} does not divide --train_batch_size {prompts} (unless they are given, they "
            f"are --update_budget / G and --budget / G){fix}"
        )
    if not actor.use_dynamic_bsz:
        for name, micro, prompts in (
            ("micro_batch_size", actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size),
            ("log_prob_micro_batch_size", rollout.log_prob_micro_batch_size_per_gpu, cfg.data.train_batch_size),
        ):
            _check_micro_batch(cfg, name, micro, prompts, fix)


def fitting_flags(cfg: Any, prompts: int, by_budget: bool) -> str:
    """The launcher's flags that differ from ``cfg`` where a step takes ``prompts`` prompts and all its batches divide.

    by_budget: whether the launcher derives the batches from --budget and --update_budget, and is not given them.
    """
    actor, rollout, size = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.n
    update = math.gcd(prompts, actor.ppo_mini_batch_size)
    gpus = next(n for n in range(cfg.trainer.n_gpus_per_node, 0, -1) if update * size % (n * cfg.trainer.nnodes) == 0 or n == 1)
    ranks, unit = gpus * cfg.trainer.nnodes, size if by_budget else 1
    budgets = ("budget", "update_budget") if by_budget else ("train_batch_size", "mini_batch_size")
    found = {
        budgets[0]: (prompts * unit, cfg.data.train_batch_size * unit),
        budgets[1]: (update * unit, actor.ppo_mini_batch_size * unit),
        "gpus_per_node": (gpus, cfg.trainer.n_gpus_per_node),
        "micro_batch_size": _divisor(actor.ppo_micro_batch_size_per_gpu, update * size // ranks),
        "log_prob_micro_batch_size": _divisor(rollout.log_prob_micro_batch_size_per_gpu, prompts * size // ranks),
    }
    return " ".join(f"--{name} {value}" for name, (value, now) in found.items() if value != now)


def _divisor(now: Any, share: int) -> tuple[Any, Any]:
    """(the largest divisor of ``share`` up to ``now``, ``now``); a micro-batch that is none is left alone."""
    fits = isinstance(now, int) and 0 < now and 0 < share
    return next(n for n in range(min(now, share), 0, -1) if share % n == 0) if fits else now, now


def _check_micro_batch(cfg: Any, name: str, micro: Any, prompts: int, fix: str) -> None:
    if micro is None:
        return  # VERL's own check asks for it
    if not isinstance(micro, int) or micro < 1:
        raise UserError(f"--{name} {micro}: a whole number of at least 1 is expected")
    gpus, group_size = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes, cfg.actor_rollout_ref.rollout.n
    ranks = max(gpus // _sequence_parallel(cfg.actor_rollout_ref.actor), 1)
    batch = f"a batch of {prompts} prompts x {group_size} continuations"
    if prompts * group_size % ranks:
        raise UserError(f"{batch} cannot be shared among {ranks} GPUs; change --gpus_per_node, --nnodes or the batch{fix}")
    share = prompts * group_size // ranks
    if share % micro:
        raise UserError(f"--{name} {micro} does not divide the {share} continuations of a GPU ({batch}, {ranks} GPUs){fix}")


def check_devices(cfg: Any) -> None:
    """The sampling engine fits the machines: a copy fills part of one node evenly, or whole nodes evenly."""
    rollout, per_node = cfg.actor_rollout_ref.rollout, cfg.trainer.n_gpus_per_node
    copy, world = rollout.tensor_model_parallel_size * rollout.data_parallel_size, per_node * cfg.trainer.nnodes
    if world % copy or (per_node % copy if copy <= per_node else copy % per_node):
        raise UserError(
            f"--tensor_parallel {rollout.tensor_model_parallel_size} does not fit {cfg.trainer.nnodes} nodes of "
            f"{per_node} GPUs: choose a divisor of --gpus_per_node"
        )
    if not 0 < rollout.gpu_memory_utilization <= 1:
        raise UserError(f"--gpu_memory_utilization {rollout.gpu_memory_utilization}: must be in (0, 1]")
    if not 0 < rollout.top_p <= 1:
        raise UserError(f"actor_rollout_ref.rollout.top_p={rollout.top_p}: must be in (0, 1]")
    if rollout.temperature <= 0:
        raise UserError(f"actor_rollout_ref.rollout.temperature={rollout.temperature}: must be above 0")
    tokens, limit = cfg.data.max_prompt_length + cfg.data.max_response_length, rollout.max_model_len
    if limit is not None and limit < tokens:
        raise UserError(f"actor_rollout_ref.rollout.max_model_len={limit}: prompt and response have up to {tokens}")


def check_token_budgets(cfg: Any) -> None:
    """Under use_dynamic_bsz the longest prompt and response fit the tokens of a GPU; else VERL asserts once it trains.

    With Ulysses sequence parallelism, as many GPUs as share a sequence count together.
    """
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    worker, tokens = cfg.actor_rollout_ref, cfg.data.max_prompt_length + cfg.data.max_response_length
    if worker.actor.use_dynamic_bsz != worker.rollout.log_prob_use_dynamic_bsz:
        raise UserError(
            f"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz={worker.rollout.log_prob_use_dynamic_bsz}: VERL "
            f"wants it to be actor_rollout_ref.actor.use_dynamic_bsz={worker.actor.use_dynamic_bsz}"
        )
    budgets = [
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", worker.actor.use_dynamic_bsz, worker.actor),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", worker.actor.use_dynamic_bsz, worker.actor),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says each time that there is no critic
        reference, critic = need_reference_policy(cfg), need_critic(cfg)
    if reference:
        key = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
        budgets.append((key, worker.ref.log_prob_use_dynamic_bsz, worker.ref))
    if critic:
        limits = ("ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu")
        budgets += [(f"critic.{name}", cfg.critic.use_dynamic_bsz, cfg.critic) for name in limits]
    for key, dynamic, part in budgets:
        limit, shared = OmegaConf.select(cfg, key), _sequence_parallel(part)
        if dynamic and limit is not None and limit * shared < tokens:
            by = f" x {shared} GPUs that share a sequence" if shared > 1 else ""
            raise UserError(
                f"{key}={limit}{by}: prompt and response have up to {tokens} tokens, and use_dynamic_bsz cuts none "
                f"of them; raise it to {-(-tokens // shared)} or more, or lower --max_response_length"
            )


def _sequence_parallel(part: Any) -> int:
    """GPUs that share one sequence, by VERL's present key or its earlier one."""
    keys = (part.get("fsdp_config") or {}).get("ulysses_sequence_parallel_size"), part.get("ulysses_sequence_parallel_size")
    return max(1, *(size for size in keys if isinstance(size, int)), 1)


def without_lora(cfg: Any) -> Any:
    """``cfg``, or where vLLM is not installed a copy without LoRA: VERL's check of its rank imports vLLM.

    Raises UserError for a rank above vLLM's largest.
    """
    model = cfg.actor_rollout_ref.model
    ranks = (model.get("lora_rank") or 0, (model.get("lora") or {}).get("rank") or 0)
    if max(ranks) <= 0 or cfg.actor_rollout_ref.rollout.name != "vllm" or util.find_spec("vllm") is not None:
        return cfg
    if max(ranks) > VLLM_LARGEST_LORA_RANK:
        raise UserError(f"actor_rollout_ref.model.lora_rank={max(ranks)}: vLLM takes at most {VLLM_LARGEST_LORA_RANK}")
    from omegaconf import OmegaConf

    bare = copy.deepcopy(cfg)
    OmegaConf.update(bare, "actor_rollout_ref.model.lora_rank", 0, force_add=True)
    OmegaConf.update(bare, "actor_rollout_ref.model.lora.rank", 0, force_add=True)
    return bare


def run_validate_config(cfg: Any) -> None:
    """VERL's own validate_config, its prints and warnings hidden; UserError with its reason in one line."""
    cfg = without_lora(cfg)
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_config(cfg, need_reference_policy(cfg), need_critic(cfg))
    except Exception as error:  # assertions, ValueErrors, and those of Hydra's instantiation around them
        reason = " ".join(f"{error.__cause__ or error}".split())
        raise UserError(f"VERL's validate_config: {reason[:300]}") from None
    finally:
        logging.disable(previous)
