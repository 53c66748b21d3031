"""What a trainer's own settings decide of a measurement, and the rollouts it has just generated.

    check_measurable(args, model, trainer)     UserError for what a score cannot be taken of (FSDP, ZeRO-3, tools, ...)
    law_of(args), trained_with(args)           the sampling law, and (group size, prompts a step)
    prompt_ids(tokenizer, prompt, template)    token ids of a prompt, as TRL makes them
    RolloutRecorder().wrapped(reward_funcs)    the same rewards, and notes of the tokens that they were given for

Public names of TRL 1.16 and transformers alone: TRL passes prompts, completions and completion_ids to reward functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row, prompt_id
from Gradient_evaluation.runs.inputs.rewards import weighted_sum
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.utils import normalise_prompt
from Policy_Optimization.policy_in_place import Group, Trained

CHECKPOINTS = "measure its checkpoints instead: run_tracecov.py --model OUTPUT_DIR/checkpoint-50"
OTHER_LAW = "which the law that is measured does not have; leave it out, or give law=SamplingLaw(...) to insist"


def check_measurable(args, model: nn.Module, trainer=None) -> None:
    """Raise UserError that names what this trainer does and a measurement in place cannot follow."""
    parameters = list(model.parameters())
    if any(hasattr(p, "ds_id") for p in parameters):
        raise UserError(f"GroupSizeCallback: DeepSpeed ZeRO-3 splits every parameter over the processes; {CHECKPOINTS}")
    sharded = any(type(p).__name__ == "DTensor" for p in parameters)
    if sharded or any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules()) or getattr(args, "fsdp", None):
        raise UserError(f"GroupSizeCallback: FSDP splits the parameters over the processes; {CHECKPOINTS}")
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, Mapping) and any(each.is_prompt_learning for each in configs.values()):
        raise UserError("GroupSizeCallback: an adapter of virtual tokens is not in the model's layers; train LoRA instead")
    for name in ("tools", "rollout_func", "environments"):
        if getattr(trainer, name, None):
            raise UserError(f"GroupSizeCallback: the trainer's {name} write tokens that the policy does not; leave it out")


def law_of(args) -> SamplingLaw:
    """The sampling law of a TRL trainer's arguments. Raises UserError where there is none, or it is more than ours is."""
    limit = getattr(args, "max_completion_length", None)
    if limit is None:
        raise UserError(
            "GroupSizeCallback: these training arguments have no max_completion_length, so they say nothing of sampling; give "
            "law=SamplingLaw(temperature, top_p, top_k, max_new_tokens)"
        )
    plain = {"min_p": (None, 0), "repetition_penalty": (None, 1), "generation_kwargs": (None, {})}
    for name, values in plain.items():
        if (value := getattr(args, name, None)) not in values:
            raise UserError(f"GroupSizeCallback: the trainer samples with {name}={value!r}, {OTHER_LAW}")
    return SamplingLaw(args.temperature, args.top_p, args.top_k or 0, limit)


def trained_with(args) -> Trained:
    """G = num_generations and B: the continuations of one optimiser step, over all processes, by G."""
    size = getattr(args, "num_generations", None)
    if size is None:
        return Trained(None, None)
    return Trained(size, args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size / size)


def prompt_ids(tokenizer, prompt: Any, template: Mapping[str, Any]) -> list[int]:
    """Token ids of a string or of messages, by the calls that TRL makes. template: keywords for the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template)
    return list(made["input_ids"])


class Rollout(NamedTuple):
    """One completion of the trainer: what its reward functions were given, and the value of each (None: no value)."""

    prompt: Any
    tokens: tuple[int, ...]
    values: tuple[float | None, ...]


class RolloutRecorder:
    """Notes what reward functions are given and what they return, since the last ``clear``."""

    def __init__(self):
        self.calls: dict[int, list[tuple[list, list, list]]] = {}  # of each function: prompts, tokens, values

    def clear(self) -> None:
        """Forget all calls."""
        self.calls = {}

    def wrapped(self, functions: Sequence[Callable]) -> list[Callable]:
        """The functions with notes taken: same arguments, same values. UserError for a reward model, which gets no tokens."""
        for each in functions:
            if isinstance(each, nn.Module):
                raise UserError(
                    "GroupSizeCallback: rollouts='trainer' reads the tokens that TRL passes to reward functions, and the "
                    f"model {type(each).__name__} gets none; give a function that calls it, or leave rollouts out"
                )
        return [self._wrapped(number, each) for number, each in enumerate(functions)]

    def _wrapped(self, number: int, function: Callable) -> Callable:
        def note(given: Mapping[str, Any], values):
            if not hasattr(values, "__len__"):  # a generator can be gone through once
                values = list(values)
            tokens = [tuple(ids) for ids in given["completion_ids"]]
            self.calls.setdefault(number, []).append((list(given["prompts"]), tokens, list(values)))
            return values

        if _is_async(function):

            @wraps(function)
            async def recorded(**given):
                return note(given, await function(**given))

        else:

            @wraps(function)
            def recorded(**given):
                return note(given, function(**given))

        return recorded

    def rollouts(self) -> list[list[Rollout]]:
        """The completions of each generation, in order."""
        found = []
        for calls in zip(*(self.calls[number] for number in sorted(self.calls))):
            prompts, tokens, _ = calls[0]
            found.append([Rollout(*each) for each in zip(prompts, tokens, zip(*(values for _, _, values in calls)))])
        return found


def _is_async(function: Callable) -> bool:
    while isinstance(function, partial):
        function = function.func
    return any(inspect.iscoroutinefunction(each) for each in (function, getattr(function, "__call__", None)))  # noqa: B004


def groups_of(
    generations: Sequence[Sequence[Rollout]],
    size: int,
    weights: Sequence[float],
    tokenizer,
    template: Mapping,
    ends: Sequence[int],
) -> list[Group]:
    """The groups of ``size`` completions with their weighted rewards; groups of one prompt are one group.

    generations: the completions of each generation in the order of the trainer's batch, over all processes. ends: ids of the
    ends of sequence. Raises UserError where the completions are no such groups.
    """
    found: dict[tuple, Group] = {}
    for rollouts in generations:
        for start in range(0, len(rollouts), size):
            members = rollouts[start : start + size]
            if len(members) < size or any(each.prompt != members[0].prompt for each in members):
                raise UserError(f"the trainer's batch is not made of groups of {size} completions of one prompt")
            group = _group(members, weights, tokenizer, template, ends)
            key = tuple(group.prompt_ids)
            if key in found:
                earlier = found[key]
                group = earlier._replace(
                    continuations=earlier.continuations + group.continuations,
                    rewards=np.concatenate([earlier.rewards, group.rewards]),
                )
            found[key] = group
    return list(found.values())


def _group(members: Sequence[Rollout], weights: Sequence[float], tokenizer, template: Mapping, ends: Sequence[int]) -> Group:
    prompt = members[0].prompt
    ids = prompt_ids(tokenizer, prompt, template)
    values = np.array([[np.nan if value is None else float(value) for value in each.values] for each in members]).T
    row = Row(prompt, None, {}, "the trainer's batch", prompt_id(normalise_prompt(prompt), None))
    continuations = [Continuation(each.tokens, each.tokens[-1] in ends, "") for each in members]
    return Group(row, ids, continuations, weighted_sum(values, weights))


def gathered(value: Any) -> list[Any]:
    """The value of every process, in order of rank; all of them must call this."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found
