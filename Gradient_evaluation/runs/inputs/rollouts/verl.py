"""VERL's dumps of rollouts (trainer.rollout_data_dir, and validation_data_dir): JSONL, one line per response.

    {"input": ..., "output": ..., "gts": ..., "score": ..., "step": ..., "uid": ...}

VERL 0.9.1 decodes prompt and response with skip_special_tokens=True and sums the reward over tokens. So a row of
--dataset has a record's prompt if decoding its tokens in the same way gives ``input``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Record, Row
from Gradient_evaluation.runs.inputs.rollouts.context import Context, OfPrompt, step_of
from Gradient_evaluation.runs.inputs.rollouts.from_text import FromText, check_one_step, decoded_prompts, number_of
from Gradient_evaluation.sampling.rollouts import Rollouts

NAME = "VERL"


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a line of VERL's dump."""
    return {"input", "output", "score", "step"} <= set(record)


def read(records: Iterable[Record], context: Context) -> list[Rollouts]:
    """The rollouts of each prompt. UserError for a prompt that is not in --dataset, of several steps, of another tokenizer."""
    by_text = decoded_prompts(context, "VERL's dump")
    texts = FromText(NAME, "data.max_response_length", context)
    prompts: dict[int, OfPrompt] = {}
    steps, wheres = [], []
    for where, record in records:
        row = _row_of(where, record, by_text)
        prompt = prompts.setdefault(row.prompt_id, OfPrompt(replace(row, where=where)))
        prompt.wheres.append(where)
        prompt.continuations.append(texts.continuation(where, record["output"]))
        prompt.rewards.append(number_of(where, "score", record["score"]))
        prompt.steps.append(step_of(where, record))
        steps.append(prompt.steps[-1])
        wheres.append(where)
    check_one_step(NAME, steps, wheres, context.settings.allow_mismatch)
    texts.report()
    return [prompt.rollouts(from_text=True) for prompt in prompts.values()]


def _row_of(where: str, record: Mapping[str, Any], by_text: Mapping[str, list[Row]]) -> Row:
    found = by_text.get(record["input"], [])
    if not found:
        raise UserError(
            f"{where}: no prompt of --dataset is {str(record['input'])[:60]!r} once decoded; give the data of this training "
            "with --chat_template_kwargs as it had them, and the tokenizer of its model"
        )
    if len(found) > 1 and record.get("gts") is not None:
        found = [row for row in found if str(row.ground_truth) == str(record["gts"])] or found
    row = found[0]
    if len(found) > 1:
        raise UserError(
            f"{where}: its prompt is that of {len(found)} rows of --dataset ({row.where}, {found[1].where}), and its gts does "
            "not say which; leave one of them out"
        )
    *_, output = str(record.get("uid") or "0").rsplit("_", 2)
    if output.isdigit() and int(output):  # of one session, whose turns VERL stores one by one
        raise UserError(
            f"{where}: is output {output} of a session of several turns, which VERL's text takes apart; dump token ids"
        )
    if row.tools:
        raise UserError(f"{where}: its prompt has tools, and VERL's text does not say which tokens are theirs; dump token ids")
    return row
