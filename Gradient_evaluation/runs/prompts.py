"""The sampling law and the identity of a run, from its flags, and the prompts as the model will read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from Gradient_evaluation.chat_template import FLAG, Chat, chat_of
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import check_prompt_length, crosses_rope_length, model_label, model_limits
from Gradient_evaluation.runs.dataset import Row
from Gradient_evaluation.runs.resume import at_row
from Gradient_evaluation.runs.rewards import RunRewards
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.stop_strings import check_stop_strings
from Gradient_evaluation.settings import Settings
from Gradient_evaluation.utils import format_prompt


def sampling_law(settings: Settings) -> SamplingLaw:
    """The sampling law that the flags describe."""
    return SamplingLaw(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, tuple(settings.stop))


def chat_from(settings: Settings, tokenizer, earlier: Iterable[Mapping]) -> Chat:
    """What the chat template is given: the flag's variables, and the date of what the run goes on from.

    earlier: rows or the identity that an earlier part of this run has left; the first that names a date decides.
    """
    return chat_of(tokenizer, settings.chat_template_kwargs, (each.get("template_date") for each in earlier))


def run_identity(settings: Settings, tokenizer, chat: Chat, rewards: RunRewards) -> dict:
    """What decides a continuation's distribution and reward, as stored with every row and result.

    A local model goes by its folder's name, so that a table may move between machines; its weights' fingerprint,
    stored beside, tells two folders of one name apart.
    """
    model = model_label(settings.model) if Path(settings.model).is_dir() else settings.model
    revision = None if settings.revision == "main" else settings.revision  # as tables have it whose script had no default
    return {
        "model": model,
        "revision": revision,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_new_tokens": settings.max_new_tokens,
        "stop": list(settings.stop),
        **rewards.identity,
        "chat_template_kwargs": dict(chat.kwargs) or None,
        "template_date": chat.date,
        "prompt_format": prompt_format(tokenizer, chat),
    }


def prompt_format(tokenizer, chat: Chat) -> str:
    """A short hash of what the tokenizer and its chat template make of a fixed prompt, as string and as messages."""
    text = "What is 12 + 34? Answer with one integer.\n"
    made = [format_prompt(tokenizer, prompt, chat=chat) for prompt in (text, [{"role": "user", "content": text}])]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]


def tokenised(rows: Sequence[Row], settings: Settings, tokenizer, chat: Chat) -> tuple[list[Row], list[list[int]], int]:
    """(rows, token ids of their prompts, number left out): before the model is loaded, every prompt is checked.

    Raises UserError naming the row of a prompt that the tokenizer refuses, or that does not fit the model's context;
    the latter are left out and counted under --skip_long.
    """
    check_stop_strings(tokenizer, settings.stop)
    if chat.kwargs and all(isinstance(row.prompt, str) for row in rows):
        raise UserError(f"{FLAG}: every prompt is a string, which no template renders; leave it out, or give messages")
    context, vocabulary, rope = model_limits(settings.model, settings.revision, settings.trust_remote_code)
    kept, prompts = [], []
    for row in rows:
        prompt_ids = at_row(row, format_prompt, tokenizer, row.prompt, row.tools, chat)
        if vocabulary is not None and max(prompt_ids) >= vocabulary:
            raise UserError(
                f"{row.where}: the tokenizer makes token {max(prompt_ids)} of this prompt, the model knows "
                f"{vocabulary}; they do not belong together, check --model {settings.model}"
            )
        if not settings.skip_long:
            at_row(row, check_prompt_length, context, prompt_ids, settings.max_new_tokens)
        elif context is not None and len(prompt_ids) + settings.max_new_tokens > context:
            continue
        if crosses_rope_length(rope, len(prompt_ids), settings.max_new_tokens):
            raise UserError(
                f"{row.where}: this prompt of {len(prompt_ids)} tokens and --max_new_tokens {settings.max_new_tokens} "
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
