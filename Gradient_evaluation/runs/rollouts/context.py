"""What an importer may look at beside its records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.dataset import Row
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import Settings


class Context(NamedTuple):
    """tokenizer: of --model; rows: of --dataset, None without one; settings: the flags."""

    tokenizer: Any
    rows: Sequence[Row] | None
    settings: Settings


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


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)
