"""TRL's completions (GRPOConfig(log_completions=True)): parquet, one file per logging step, one row per completion.

    step, prompt, completion, one column per reward function, columns of log_extra, advantage

TRL 1.16 keeps the prompt as the data set has it, string or messages, and decodes the completion with
skip_special_tokens=True; a chat's completion is one message of the assistant. Rewards are not weighted; the advantage is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Record, Row, prompt_id
from Gradient_evaluation.runs.inputs.rewards import weighted_sum
from Gradient_evaluation.runs.inputs.rollouts.context import Context, DataSetRows, OfPrompt, step_of
from Gradient_evaluation.runs.inputs.rollouts.from_text import FromText, check_one_step, number_of
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.utils import normalise_prompt

NAME = "TRL"
OURS = ("step", "prompt", "completion", "advantage", "image", "images")


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a row of TRL's completions."""
    return {"prompt", "completion", "advantage"} <= set(record)


def read(records: Iterable[Record], context: Context) -> list[Rollouts]:
    """The rollouts of each prompt; ground truths come from --dataset where there is one."""
    known = None if context.rows is None else DataSetRows(context.rows)
    texts = FromText(NAME, "max_completion_length", context)
    prompts: dict[int, OfPrompt] = {}
    advantages: dict[int, list[float]] = {}
    steps, wheres, names = [], [], None
    for where, record in records:
        names = names if names is not None else _reward_columns(where, record)
        row = _row_of(where, record, known)
        prompt = prompts.setdefault(row.prompt_id, OfPrompt(row))
        prompt.wheres.append(where)
        prompt.continuations.append(texts.continuation(where, _text_of(where, record["completion"])))
        prompt.components.append({name: number_of(where, name, record.get(name)) for name in names})
        prompt.steps.append(step_of(where, record))
        advantages.setdefault(row.prompt_id, []).append(number_of(where, "advantage", record["advantage"]))
        steps.append(prompt.steps[-1])
        wheres.append(where)
    check_one_step(NAME, steps, wheres, context.settings.allow_mismatch)
    weights = _weights(names or [], context)
    for prompt in prompts.values():
        prompt.rewards = total({name: prompt.component(name) for name in weights}, weights).tolist()
    _note_other_weights(prompts, advantages, weights)
    texts.report()
    return [prompt.rollouts(from_text=True) for prompt in prompts.values()]


def total(components: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> np.ndarray:
    """The rewards (N,) that TRL trains on: the weighted sum of those that are there, NaN where none is."""
    return weighted_sum(np.array([components[name] for name in weights], dtype=np.float64), list(weights.values()))


def _reward_columns(where: str, record: Mapping[str, Any]) -> list[str]:
    """The columns of the reward functions: the numbers between completion and advantage."""
    names = [name for name, value in record.items() if name not in OURS and (value is None or _is_number(value))]
    if not names:
        raise UserError(f"{where}: has no column of a reward; give the completions files as TRL wrote them")
    return names


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _weights(names: Sequence[str], context: Context) -> dict[str, float]:
    given = context.settings.reward_weights
    if given is not None and len(given) != len(names):
        raise UserError(
            f"--reward_weights: {len(given)} of them, and the rollouts have the rewards {', '.join(names)}; give one for each"
        )
    return dict(zip(names, given or [1.0] * len(names)))


def _note_other_weights(prompts: Mapping[int, OfPrompt], advantages: Mapping[int, list[float]], weights: dict) -> None:
    """Warn where the advantages do not follow from the rewards: within a group one is the other, centred and scaled."""
    off = 0
    for key, prompt in prompts.items():
        rewards, advantage = np.array(prompt.rewards), np.array(advantages[key])
        if len(set(prompt.steps)) > 1 or not np.isfinite(rewards).all() or not np.isfinite(advantage).all():
            continue
        if min(rewards.std(), advantage.std()) > 1e-6:
            off += float(np.corrcoef(rewards, advantage)[0, 1]) < 0.999
    if off:
        sums = " + ".join(f"{weight:g} {name}" for name, weight in weights.items())
        print(
            f"warning: TRL's advantages do not follow from the reward {sums} on {off} of {len(prompts)} prompts; pass "
            "--reward_weights as the training had them (0 for a column that is no reward)",
            file=sys.stderr,
        )


def _row_of(where: str, record: Mapping[str, Any], known: DataSetRows | None) -> Row:
    try:
        prompt = normalise_prompt(record["prompt"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    row = Row(prompt, None, {"prompt": prompt}, where, prompt_id(prompt, None))
    return row if known is None else replace(known.of(row), where=where)


def _text_of(where: str, completion: Any) -> str:
    """The text of a completion: a string, or the content of its only message."""
    if isinstance(completion, str):
        return completion
    messages = list(completion) if isinstance(completion, (list, tuple)) else []
    if len(messages) != 1 or not isinstance(messages[0], Mapping) or not isinstance(messages[0].get("content"), str):
        raise UserError(
            f"{where}: its completion has {len(messages)} messages, not one of text; TRL's text does not say which tokens "
            "are the model's and which a tool's"
        )
    extra = sorted(name for name, value in messages[0].items() if name not in ("role", "content") and value)
    if extra:
        raise UserError(
            f"{where}: its completion was parsed into {', '.join(extra)}, so that its text is not as it was sampled"
        )
    return messages[0]["content"]
