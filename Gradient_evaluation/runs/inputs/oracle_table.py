"""A table of oracle values: its rows, checked before a model is loaded, and the settings that made it.

    load_oracle_table(path)                                 rows with a V_oracle, in [0, 1] unless their rewards are graded
    check_same_law(rows, identity, path, allow_mismatch)    the table was made as this run samples

Every fault is a UserError of one line that names the file, the line or row, and the fix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row, file_records, make_row, make_rows, to_json, warn_on_stderr
from Gradient_evaluation.runs.inputs.rewards import OUT_OF_RANGE, RESCALE, squares_fit
from Gradient_evaluation.runs.machine.resume import ADDED_LATER

# Columns of a table that not every row has: V of each of several rewards, and how many continuations had no reward.
V_COMPONENTS, N_LEFT_OUT = "V_components", "n_left_out"
ZERO_ONE, GRADED = "0/1", "graded"  # what the column reward_values of an oracle table says; without it: ZERO_ONE
ROUNDING = 1e-4  # by which a V_oracle written with four digits may differ from correct_count / n_oracle


@dataclass(frozen=True)
class OracleRow(Row):
    """A prompt with its oracle value, or without one (a prompt of --dataset or --rollouts).

    oracle_value: V_oracle, in [0, 1], or a finite number where reward_values is "graded"; None without one.
    oracle_samples: n_oracle, how many continuations it is the mean reward of, if the table says.
    correct_count: how many of those had reward 1, if the table says; None for graded rewards.
    """

    oracle_value: float | None
    oracle_samples: int | None
    correct_count: int | None


def load_oracle_table(path: str | Path, warn: Callable[[str], None] = warn_on_stderr) -> list[OracleRow]:
    """The rows of a table of oracle values: JSONL, or parquet with the same columns.

    As load_dataset_rows for a single file, and every row needs a number V_oracle. It is in [0, 1], consistent
    with n_oracle and correct_count where the row has them, unless the row says that its rewards are not 0 or 1
    (reward_values "graded").
    """
    records = file_records(Path(path).expanduser())
    return [with_oracle_value(row) for row in make_rows(records, str(path), warn)]


def oracle_row(where: str, record: Mapping[str, Any]) -> OracleRow:
    """One row of a table of oracle values, checked as ``load_oracle_table`` does; UserError beginning with ``where``."""
    return with_oracle_value(make_row(where, record))


def without_oracle_value(row: Row) -> OracleRow:
    """The row as a run takes it that has no oracle table."""
    return OracleRow(**{**vars(row), "oracle_value": None, "oracle_samples": None, "correct_count": None})


def with_oracle_value(row: Row) -> OracleRow:
    """The row with the oracle value in its columns, checked; UserError beginning with its where."""
    columns, where = row.columns, row.where
    value, samples = _oracle_value(columns, where), _count(columns, "n_oracle", where)
    correct = None if columns.get("reward_values") == GRADED else _count(columns, "correct_count", where)
    if samples == 0:
        raise UserError(f"{where}: n_oracle is 0: V_oracle is the mean of nothing; make the table again")
    if samples is not None and correct is not None and (correct > samples or abs(correct / samples - value) > ROUNDING):
        raise UserError(
            f"{where}: V_oracle is {value:g}, but correct_count / n_oracle is {correct} / {samples}; "
            f"correct the row or make the table again"
        )
    return OracleRow(**{**vars(row), "oracle_value": value, "oracle_samples": samples, "correct_count": correct})


def _oracle_value(columns: Mapping[str, Any], where: str) -> float:
    if "V_oracle" not in columns:
        raise UserError(f"{where}: no V_oracle; make the table with calculate_oracle_v.py")
    value = columns["V_oracle"]
    if value is None:
        raise UserError(f"{where}: V_oracle is null or NaN; make this row again")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{where}: V_oracle is {json.dumps(value)[:40]}, not a number")
    kind = columns.get("reward_values") or ZERO_ONE
    if kind not in (ZERO_ONE, GRADED):
        raise UserError(f'{where}: reward_values is {json.dumps(kind)[:40]}; it is "{ZERO_ONE}" or "{GRADED}"')
    if kind == ZERO_ONE and not 0 <= value <= 1:
        raise UserError(
            f"{where}: V_oracle is {json.dumps(value)[:40]}, outside [0, 1]; where rewards are not 0 or 1 the "
            f'row needs "reward_values": "{GRADED}"'
        )
    if not squares_fit(value):
        raise UserError(f"{where}: V_oracle is {json.dumps(value)[:40]}, {OUT_OF_RANGE}; {RESCALE}, and make the table again")
    return float(value)


def _count(columns: Mapping[str, Any], name: str, where: str) -> int | None:
    value = columns.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{where}: {name} is {json.dumps(value)[:40]}, not a count")
    return int(value)


def jeffreys_columns(correct: int, samples: int) -> dict[str, Any]:
    """V_standard_error and its kind, for ``correct`` of ``samples`` rewards 1 and the others 0.

    The standard deviation of V under Jeffreys' prior, that of Beta(c + 1/2, n - c + 1/2): sqrt(m (1 - m) / (n + 2)) with
    m = (c + 1/2) / (n + 1). Never 0, also where V is 0 or 1.
    """
    mean = (correct + 0.5) / (samples + 1)
    return {"V_standard_error": math.sqrt(mean * (1 - mean) / (samples + 2)), "V_standard_error_kind": "jeffreys"}


def with_jeffreys_error(row: OracleRow, record: dict[str, Any]) -> dict[str, Any]:
    """``record``, a row of 0/1 rewards as an earlier version wrote it, with the standard error that rows have now.

    Earlier versions wrote the plug-in sqrt(V (1 - V) / n) and no V_standard_error_kind. Other rows stay as they are.
    """
    if (
        "V_standard_error" not in record
        or "V_standard_error_kind" in record
        or not row.oracle_samples
        or row.correct_count is None
    ):
        return record
    columns: dict[str, Any] = {}
    for name, value in record.items():  # the two stand side by side, where new rows have them
        columns |= jeffreys_columns(row.correct_count, row.oracle_samples) if name == "V_standard_error" else {name: value}
    return columns


def oracle_components(row: Row, names: Sequence[str]) -> list[float] | None:
    """V(x) of each of several rewards, in the order of ``names``; None where the row does not have them all."""
    found = row.columns.get(V_COMPONENTS)
    if not isinstance(found, Mapping) or not all(isinstance(found.get(name), (int, float)) for name in names):
        return None
    return [float(found[name]) for name in names]


def check_same_law(
    rows: Sequence[Row],
    identity: Mapping[str, Any],
    path: str | Path,
    allow_mismatch: bool,
    warn: Callable[[str], None] = warn_on_stderr,
) -> None:
    """Raise UserError if the oracle table was not made under this run's ``identity``, {name: value} (prompts.run_identity).

    Each entry of it is compared with the column of that name in every row: the rows must agree with each other and with
    the run. A table of an earlier version was made with the values of ``ADDED_LATER``. A table with none of the columns
    (the published script writes none) is taken with a warning. Under ``allow_mismatch`` any difference is only a warning.
    """
    identity = to_json(identity)
    known = [name for name in identity if any(name in row.columns for row in rows)]
    if not known:
        warn(f"{path}: does not say how it was made (no {', '.join(identity)}); taken as made under this run's settings")
        return
    beside_reward = () if "reward" in known else ("reward_weights", "reward_digest")
    known = [name for name in identity if name in known or name in ADDED_LATER and name not in beside_reward]
    if unknown := [name for name in identity if name not in known]:
        warn(f"{path}: does not say its {', '.join(unknown)}; taken to be this run's")
    differences = []
    for name in known:
        first = rows[0]
        made_with = first.columns.get(name, ADDED_LATER.get(name))
        other = next((row for row in rows if row.columns.get(name, ADDED_LATER.get(name)) != made_with), None)
        if other is not None:
            differences.append(
                f"its rows disagree on {name}: {_shown(first, name)} ({first.where}) and {_shown(other, name)} ({other.where})"
            )
        elif made_with != identity[name] and name == "reward_digest":
            differences.append(
                f"made with reward_digest {_shown(first, name)}, this run has {json.dumps(identity[name])}: "
                "the file of --reward has changed since"
            )
        elif made_with != identity[name]:
            differences.append(f"made with {name} {_shown(first, name)}, this run uses {json.dumps(identity[name])}")
    if not differences:
        return
    if not allow_mismatch:
        fix = "run with the table's settings, make a table with this run's, or pass --allow_mismatch"
        raise UserError(f"{path}: {'; '.join(differences)}; {fix}")
    warn(f"{path}: {'; '.join(differences)}; going on as --allow_mismatch says")


def _shown(row: Row, name: str) -> str:
    columns = {**ADDED_LATER, **row.columns}
    return json.dumps(columns[name]) if name in columns else "missing"
