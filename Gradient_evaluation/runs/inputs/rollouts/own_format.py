"""The rollouts format of this toolkit: parquet or JSONL, one row per continuation. docs/rollouts.md has its columns.

recognises(record)           whether a record has response_ids and ended
read(records, context)       Rollouts, one for each prompt, in the order in which the prompts first come
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from Gradient_evaluation.chat_template import tool_schemas
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.integer_answer import shorten_repr
from Gradient_evaluation.runs.inputs.dataset import Record, Row, prompt_id, to_json
from Gradient_evaluation.runs.inputs.rollouts.context import Context, DataSetRows, OfPrompt, step_of
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.rollouts import Rollouts, check_same_law
from Gradient_evaluation.sampling.stop_strings import decode_text
from Gradient_evaluation.utils import normalise_prompt

FIX = "docs/rollouts.md has the format"
COLUMNS = (
    "prompt messages prompt_id prompt_ids ground_truth columns response_ids ended text log_probs log_kept mask reward rewards "
    "step law"
).split()
OF_PROMPT = ("prompt", "messages", "ground_truth", "columns", "prompt_ids")  # the same in every row of a prompt
HEX = set("0123456789abcdef")


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a row of this format."""
    return "response_ids" in record and "ended" in record


def read(records: Iterable[Record], context: Context) -> list[Rollouts]:
    """The rollouts of each prompt. Raises UserError, naming file and line, for what is not of the format."""
    known = None if context.rows is None else DataSetRows(context.rows)
    prompts: dict[int | str, OfPrompt] = {}
    first: dict[int | str, list] = {}  # what the first record of a prompt says of it
    laws = _Laws()
    shared: dict[int, int] = {}  # one object for each token id: a list of many millions is a quarter as large
    for where, record in records:
        laws.check(where, record.get("law"))
        said = [record.get(name) for name in OF_PROMPT]
        key = _id_of(where, record)
        if key not in prompts:
            prompts[key], first[key] = OfPrompt(_row(where, record, known), _ids(where, record, "prompt_ids", shared)), said
        elif first[key] != said:
            raise UserError(
                f"{where}: has the prompt_id of {prompts[key].wheres[0]}, but another prompt, ground_truth, columns or "
                "prompt_ids; give each prompt an id of its own"
            )
        prompt = prompts[key]
        prompt.wheres.append(where)
        prompt.continuations.append(_continuation(where, record, context.tokenizer, shared))
        prompt.rewards.append(_number(where, "reward", record.get("reward")))
        prompt.components.append(_components(where, record))
        prompt.steps.append(step_of(where, record))
    return [prompt.rollouts(law=laws.law) for prompt in prompts.values()]


class _Laws:
    """The one law of all records."""

    def __init__(self):
        self.first: tuple[str, Any] | None = None
        self.law: dict[str, Any] = {}

    def check(self, where: str, law: Any) -> None:
        if self.first is None:
            self.first, self.law = (where, law), _object(where, "law", law)
        elif law != self.first[1]:
            check_same_law(self.first[0], self.law, where, _object(where, "law", law))


def _components(where: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {name: _number(where, name, value) for name, value in _object(where, "rewards", record.get("rewards")).items()}


def _id_of(where: str, record: Mapping[str, Any]) -> int | str:
    """What tells the record's prompt from others: its prompt_id, else the prompt with its ground truth and tools."""
    written = record.get("prompt_id")
    if written is None:
        said = [record.get(name) for name in ("prompt", "messages", "ground_truth", "columns")]
        return json.dumps(said, sort_keys=True, default=str)
    if not (isinstance(written, str) and len(written) == 16 and set(written) <= HEX):
        raise UserError(
            f"{where}: its prompt_id is {shorten_repr(written)}, not 16 hex digits; leave it out where there is a prompt"
        )
    return int(written, 16)


def _row(where: str, record: Mapping[str, Any], known: DataSetRows | None) -> Row:
    """The prompt of a record: that of --dataset where there is one, else as the record has it."""
    key = _id_of(where, record)
    prompt, columns = _prompt(where, record), _object(where, "columns", record.get("columns"))
    if prompt is None:
        if known is None or isinstance(key, str):
            missing = "--dataset, which has the prompts by their prompt_id" if isinstance(key, int) else "a prompt in every row"
            raise UserError(f"{where}: has no prompt; give {missing}")
        return replace(known.by_prompt_id(where, key), where=where)
    try:
        columns = to_json(columns)
        ground_truth = to_json(record.get("ground_truth", columns.get("ground_truth")))
        columns |= {"prompt": prompt, "ground_truth": ground_truth}
        tools = tool_schemas(columns.get("tools"))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    row = Row(prompt, ground_truth, columns, where, prompt_id(prompt, ground_truth, tools) if isinstance(key, str) else key)
    if known is None:
        return row
    found = known.of(row)  # keeps the id that the file has, so that Grams made without --dataset are found again
    return replace(found, where=where, prompt_id=found.prompt_id if isinstance(key, str) else key)


def _prompt(where: str, record: Mapping[str, Any]) -> str | list | None:
    """The prompt of a record: the column prompt, or messages (a list, or its JSON text); None without either."""
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(messages, str):
        messages = _json(where, "messages", messages)
    if prompt is None and messages is None:
        return None
    try:
        return normalise_prompt(messages if prompt is None else prompt)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _continuation(where: str, record: Mapping[str, Any], tokenizer, shared: dict[int, int]) -> Continuation:
    tokens, ended = _ids(where, record, "response_ids", shared), record.get("ended")
    if tokens is None or not isinstance(ended, bool):
        name = "response_ids" if tokens is None else "ended"
        kind = "a list of token ids" if tokens is None else "true or false"
        raise UserError(f"{where}: its {name} is {shorten_repr(record.get(name))}, not {kind}; {FIX}")
    text = record.get("text")
    if text is None:
        text = decode_text(tokenizer, list(tokens[:-1] if ended else tokens))
    if not isinstance(text, str):
        raise UserError(f"{where}: its text is {shorten_repr(text)}, not a string; {FIX}")
    numbers = {name: _numbers(where, name, record.get(name)) for name in ("log_probs", "log_kept")}
    mask = _mask(where, record.get("mask"))
    if mask is not None and len(mask) == len(tokens) and all(mask):
        mask = None
    return Continuation(tokens, ended, text, **numbers, mask=mask)


def _ids(where: str, record: Mapping[str, Any], name: str, shared: dict[int, int]) -> tuple[int, ...] | None:
    values = record.get(name)
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(type(value) is int for value in values):
        raise UserError(f"{where}: its {name} is {shorten_repr(values)}, not a list of token ids; {FIX}")
    return tuple([shared.setdefault(value, value) for value in values])


def _numbers(where: str, name: str, values: Any) -> np.ndarray | None:
    if values is None:
        return None
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros((0, 0))
    if found.ndim != 1 or isinstance(values, str):
        raise UserError(f"{where}: its {name} is {shorten_repr(values)}, not a list of numbers; {FIX}")
    return found


def _mask(where: str, values: Any) -> tuple[bool, ...] | None:
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(type(value) in (bool, int) and value in (0, 1) for value in values):
        raise UserError(f"{where}: its mask is {shorten_repr(values)}, not a list of true and false (or 1 and 0); {FIX}")
    return tuple(bool(value) for value in values)


def _number(where: str, name: str, value: Any) -> float:
    """A reward; NaN where there is none."""
    if value is None:
        return math.nan
    try:
        return float(value) if isinstance(value, (int, float)) else _no_number(where, name, value)
    except OverflowError:  # a whole number beyond 1e308
        return _no_number(where, name, value)


def _no_number(where: str, name: str, value: Any):
    raise UserError(f"{where}: its {name} is {shorten_repr(value)}, not a number; {FIX}")


def _object(where: str, name: str, value: Any) -> dict[str, Any]:
    """A JSON object, or its text; {} where there is none."""
    value = _json(where, name, value) if isinstance(value, str) else value
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: its {name} is {shorten_repr(value)}, not a JSON object; {FIX}")
    return dict(value)


def _json(where: str, name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{where}: its {name} is nested too deeply; {FIX}") from None
    except ValueError as error:
        raise UserError(f"{where}: its {name} is text, but no JSON ({error}); {FIX}") from None
