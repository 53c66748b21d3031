"""How do the numbers differ between kinds of prompts? The results of a run once more for each value of a column (--by).

values = column_values("kind", [record.columns for record in records], "outputs/qwen/grams")     one text per prompt
by_group("kind", values, summarise_some)                                                         the entry of the results
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from Gradient_evaluation.errors import UserError

NONE = "(none)"  # the value of a prompt whose row does not have the column
MOST_VALUES = 30  # more are no kinds of prompts


def column_values(column: str, columns: Sequence[dict[str, Any] | None], where: str) -> list[str]:
    """The value of each prompt in ``column`` as a text; columns: of each prompt, gram_store.scalar_columns.

    Raises UserError where the Grams are older than their columns, no prompt has this column, or it has too many values.
    """
    if any(each is None for each in columns):
        raise UserError(
            f"--by {column}: {where}: an earlier version made these Grams, without the columns of their rows; give the command "
            "that made them once more (it needs no model pass), then --by"
        )
    if not any(column in each for each in columns):
        existing = ", ".join(dict.fromkeys(name for each in columns for name in each))[:200] or "none"
        raise UserError(f"--by {column}: {where}: no prompt has a short value in such a column (columns: {existing})")
    values = [as_text(each.get(column)) for each in columns]
    if (count := len(set(values))) > MOST_VALUES:
        raise UserError(
            f"--by {column}: {where}: {count} different values for {len(values)} prompts, at most {MOST_VALUES} are compared; "
            "choose a column of kinds of prompts"
        )
    return values


def as_text(value: Any) -> str:
    """A value of a column as results and tables name it."""
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)


def positions_of(values: Sequence[str]) -> dict[str, list[int]]:
    """{value: the positions of its prompts}, in order of the values: numbers, then texts, then prompts without a value."""
    positions: dict[str, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(value, []).append(position)
    return {value: positions[value] for value in sorted(positions, key=_rank)}


def _rank(value: str) -> tuple:
    try:
        return (0, float(value), value)
    except ValueError:
        return (2 if value == NONE else 1, 0.0, value)
