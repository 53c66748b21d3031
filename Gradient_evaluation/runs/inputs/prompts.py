"""What both runs make of their flags: the sampling law, the identity, the prompts as token ids, the loaded model."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from Gradient_evaluation.chat_template import FLAG, Chat, chat_of
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import (
    check_prompt_length,
    crosses_rope_length,
    device_line,
    load_model,
    load_tokenizer,
    model_label,
    model_limits,
)
from Gradient_evaluation.runs.inputs.dataset import Row, at_row
from Gradient_evaluation.runs.inputs.rewards import RunRewards
from Gradient_evaluation.runs.machine.memory import tune_allocator
from Gradient_evaluation.runs.machine.processes import Processes
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.sampling.stop_strings import check_stop_strings
from Gradient_evaluation.settings import LawSettings, Settings
from Gradient_evaluation.utils import format_prompt

AnyRow = TypeVar("AnyRow", bound=Row)


def sampling_law(settings: LawSettings) -> SamplingLaw:
    """The sampling law that the flags describe."""
    return SamplingLaw(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, tuple(settings.stop))


def chat_from(settings: LawSettings, tokenizer, earlier: Iterable[Mapping]) -> Chat:
    """What the chat template is given: the flag's variables, and the date on which the run began.

    earlier: rows or the identity that an earlier part of this run has stored. The first date in them is used.
    """
    return chat_of(tokenizer, settings.chat_template_kwargs, (each.get("template_date") for each in earlier))


def run_identity(settings: Settings, tokenizer, chat: Chat, rewards: RunRewards | None) -> dict:
    """The settings that the distribution and the reward of a continuation depend on. Every row and result stores them.

    A local model has its folder's name here, so that a table may move between machines. The fingerprint of the weights,
    which is stored too, tells two folders of the same name apart. rewards: None where they stand in files of rollouts.
    """
    judged = rewards.identity if rewards else dict.fromkeys(("reward", "reward_weights", "reward_digest"))
    return {**_sampling(settings), **judged, **_rendering(tokenizer, chat)}


def law_identity(settings: LawSettings, tokenizer, chat: Chat) -> dict:
    """``run_identity`` without the reward: what decides a continuation's distribution."""
    return {**_sampling(settings), **_rendering(tokenizer, chat)}


def _sampling(settings: LawSettings) -> dict:
    model = model_label(settings.model) if Path(settings.model).is_dir() else settings.model
    # as in tables of earlier scripts, whose flag had no default
    revision = None if settings.revision == "main" else settings.revision
    return {
        "model": model,
        "revision": revision,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_new_tokens": settings.max_new_tokens,
        "stop": list(settings.stop),
    }


def _rendering(tokenizer, chat: Chat) -> dict:
    return {
        "chat_template_kwargs": dict(chat.kwargs) or None,
        "template_date": chat.date,
        "prompt_format": prompt_format(tokenizer, chat),
    }


def prompt_format(tokenizer, chat: Chat) -> str:
    """A short hash of the token ids of a fixed prompt, as a string and as messages: of tokenizer and chat template."""
    text = "What is 12 + 34? Answer with one integer.\n"
    made = [format_prompt(tokenizer, prompt, chat=chat) for prompt in (text, [{"role": "user", "content": text}])]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]


def tokenised(
    rows: Sequence[AnyRow], settings: Settings, tokenizer, chat: Chat, stored: Mapping[int, Rollouts] | None = None
) -> tuple[list[AnyRow], list[list[int]], int]:
    """(rows, token ids of their prompts, number left out). It checks every prompt, before the model is loaded.

    stored: by prompt id, the rollouts whose prompts these are: their prompt_ids are taken where they have some, and their
    longest continuation instead of --max_new_tokens.
    Raises UserError, naming the row, for a prompt that the tokenizer refuses, or that is too long for the model's context.
    Under --skip_long prompts that are too long are left out and counted.
    """
    check_stop_strings(tokenizer, settings.stop)
    if chat.kwargs and all(isinstance(row.prompt, str) for row in rows):
        raise UserError(f"{FLAG}: every prompt is a string, which no template renders; leave it out, or give messages")
    context, vocabulary, rope = model_limits(settings.model, settings.revision, settings.trust_remote_code)
    kept, prompts = [], []
    for row in rows:
        rollouts = None if stored is None else stored[row.prompt_id]
        new_tokens = settings.max_new_tokens if rollouts is None else max(len(each.tokens) for each in rollouts.continuations)
        if rollouts is not None and rollouts.prompt_ids is not None:
            prompt_ids = list(rollouts.prompt_ids)
        else:
            prompt_ids = at_row(row, format_prompt, tokenizer, row.prompt, row.tools, chat)
        if vocabulary is not None and max(prompt_ids) >= vocabulary:
            raise UserError(
                f"{row.where}: the tokenizer makes token {max(prompt_ids)} of this prompt, the model knows "
                f"{vocabulary}; they do not belong together, check --model {settings.model}"
            )
        if not settings.skip_long:
            at_row(row, check_prompt_length, context, prompt_ids, new_tokens, rollouts is not None)
        elif context is not None and len(prompt_ids) + new_tokens > context:
            continue
        if crosses_rope_length(rope, len(prompt_ids), new_tokens):
            raise UserError(
                f"{row.where}: this prompt of {len(prompt_ids)} tokens and {new_tokens} new ones (--max_new_tokens) "
                f"cross {rope} tokens, where the model's LongRoPE changes its factors, so that what is sampled is "
                "not what is scored; lower --max_new_tokens, or shorten it"
            )
        kept.append(row)
        prompts.append(prompt_ids)
    if not kept:
        raise UserError(
            f"--skip_long: every one of the {len(rows)} prompts is too long for the model's context of "
            f"{context} with --max_new_tokens {settings.max_new_tokens}; lower that, or shorten them"
        )
    return kept, prompts, len(rows) - len(kept)


def load_policy(settings: Settings, dtype: torch.dtype, processes: Processes) -> tuple:
    """(model, tokenizer) that the flags name. The model is in eval mode on the device of this process.

    The memory allocator is tuned first. Under --device auto the first process prints the device and the dtype.
    Raises UserError when the model or its tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(settings.model, settings.revision, settings.trust_remote_code)
    tune_allocator(processes.device)
    if settings.device == "auto" and processes.is_first and not settings.quiet:
        print(device_line(processes.device, dtype), file=sys.stderr)
    model = load_model(settings.model, settings.revision, processes.device, dtype, settings.trust_remote_code)
    return model, tokenizer
