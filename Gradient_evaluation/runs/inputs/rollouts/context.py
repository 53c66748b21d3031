"""What every importer has: what it may look at beside its records, and what it collects of them.

Context(tokenizer, rows, settings)   the tokenizer of --model, the rows of --dataset, the flags
DataSetRows(rows)                    these rows, found by what a record says of its prompt
OfPrompt(row)                        what the records of one prompt say, as they come
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from Gradient_evaluation.chat_template import chat_of
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row, at_row
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import LawSettings
from Gradient_evaluation.utils import format_prompt


class Context(NamedTuple):
    """tokenizer: of --model; rows: of --dataset, None without one; settings: the flags."""

    tokenizer: Any
    rows: Sequence[Row] | None
    settings: LawSettings

    def rendered_rows(self) -> Iterator[tuple[Row, list[int]]]:
        """(row, token ids of its prompt) of every row of --dataset."""
        chat = chat_of(self.tokenizer, self.settings.chat_template_kwargs)
        for row in self.rows or ():
            yield row, at_row(row, format_prompt, self.tokenizer, row.prompt, row.tools, chat)


class DataSetRows:
    """The rows of --dataset, found by what rollouts say of their prompt."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self.by_id = {row.prompt_id: row for row in rows}
        self.by_prompt: dict[str, list[Row]] = {}
        for row in rows:
            self.by_prompt.setdefault(_key(row.prompt), []).append(row)

    def by_prompt_id(self, where: str, prompt_id: int) -> Row:
        """The row of this id. Raises UserError, beginning with ``where``, for an id that is not there."""
        if prompt_id not in self.by_id:
            raise UserError(f"{where}: no row of --dataset has the prompt_id {prompt_id:016x}; give the data set it is of")
        return self.by_id[prompt_id]

    def of(self, row: Row) -> Row:
        """The row with the prompt of ``row``, and its ground_truth where it has one. UserError beginning with its where."""
        if row.prompt_id in self.by_id:
            return self.by_id[row.prompt_id]
        found = self.by_prompt.get(_key(row.prompt), [])
        if row.ground_truth is not None:
            found = [each for each in found if each.ground_truth == row.ground_truth] or found
        if not found:
            raise UserError(f"{row.where}: its prompt is not in --dataset; give the data set it is of")
        if len(found) > 1:
            raise UserError(
                f"{row.where}: its prompt stands {len(found)} times in --dataset ({found[0].where}, {found[1].where}), with "
                "other ground truths or tools; give rollouts with a prompt_id"
            )
        return found[0]

    def in_order(self, several: Sequence[Rollouts]) -> list[Rollouts]:
        """The rollouts in the order of the rows, as a run has them that samples the prompts itself."""
        index = {row.prompt_id: i for i, row in enumerate(self.rows)}
        return sorted(several, key=lambda each: index[self.of(each.row).prompt_id])


@dataclass
class OfPrompt:
    """What the records of one prompt say, one continuation after the other. Only ``wheres`` and ``continuations`` must grow."""

    row: Row
    prompt_ids: tuple[int, ...] | None = None
    wheres: list[str] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # NaN where there is none
    components: list[dict[str, float]] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)

    def component(self, name: str) -> np.ndarray:
        """The reward of this name of every continuation, (N,) float64; NaN where there is none."""
        return np.array([each.get(name, np.nan) for each in self.components], dtype=np.float64)

    def rollouts(self, from_text: bool = False, law: dict[str, Any] | None = None) -> Rollouts:
        """See ``Rollouts``."""
        rewards = np.array(self.rewards, dtype=np.float64)
        return Rollouts(
            self.row,
            self.prompt_ids,
            tuple(self.continuations),
            None if np.isnan(rewards).all() else rewards,
            {name: self.component(name) for name in dict.fromkeys(name for each in self.components for name in each)},
            law or {},
            tuple(self.steps) if any(step is not None for step in self.steps) else None,
            tuple(self.wheres),
            from_text,
        )


def step_of(where: str, record: dict[str, Any]) -> int | None:
    """The training step of a record, None without one. UserError for what is no integer."""
    step = record.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise UserError(f"{where}: its step is {str(step)[:40]!r}, not an integer")
    return step


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)
