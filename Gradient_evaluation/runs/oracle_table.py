"""Data sets and oracle tables as checked rows: every fault is found here, before a model is loaded.

    load_dataset_rows(source, split, revision)   rows with prompt and ground_truth
    load_oracle_table(path)                      the same with a V_oracle, in [0, 1] unless its rewards are graded
    rewards_of(texts, row, reward_name)          the reward of each continuation, checked to be a finite number
    check_ground_truths(rows, reward_name)       each ground_truth is one the reward can use
    check_law(rows, law, path, allow_mismatch)   the table was made as this run samples

Every fault is a UserError of one line that names the file, the line or row, and the fix.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from Gradient_evaluation.chat_template import Messages, tool_schemas
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.dataset import Record, file_records, read_records
from Gradient_evaluation.utils import REWARDS, normalise_prompt

# Entries of the law that tables of earlier versions lack -> what they were made with.
ADDED_LATER = {"chat_template_kwargs": None, "template_date": None}
DEEPEST = 50  # levels of lists and objects in a column
ZERO_ONE, GRADED = "0/1", "graded"  # what the column reward_values of an oracle table says; without it: ZERO_ONE
ROUNDING = 1e-4  # by which a V_oracle written with four digits may differ from correct_count / n_oracle


def warn_on_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


@dataclass(frozen=True)
class Row:
    """One prompt of a data set or an oracle table.

    prompt: a string or a list of {"role", "content", ...}. ground_truth: the JSON value of the file.
    columns: every input column, ready for JSON. where: for messages, ``table.jsonl, line 7``.
    prompt_id: 64 bits of prompt, ground_truth and tools, the same in every file, order and process.
    """

    prompt: str | Messages
    ground_truth: Any
    columns: dict[str, Any]
    where: str
    prompt_id: int

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The function schemas of the column tools; [] where there are none."""
        return tool_schemas(self.columns.get("tools"))

    @property
    def oracle_value(self) -> float:
        """V_oracle: in [0, 1], or any finite number where reward_values is "graded"; UserError if this row has none."""
        return _check_oracle_value(self.columns, self.where)

    @property
    def oracle_samples(self) -> int | None:
        """n_oracle: how many continuations the oracle value is the mean reward of, if the table says."""
        return _count(self.columns, "n_oracle", self.where)

    @property
    def correct_count(self) -> int | None:
        """How many of those had reward 1, if the table says; None for graded rewards."""
        if self.columns.get("reward_values") == GRADED:
            return None
        return _count(self.columns, "correct_count", self.where)


def prompt_id(prompt: str | Messages, ground_truth: Any, tools: Sequence[Mapping] = ()) -> int:
    """First 64 bits of the SHA-256 of the canonical JSON of [prompt, ground_truth], with the tools where there are some."""
    parts = [prompt, ground_truth, *([tools] if tools else [])]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8], "big")


def load_dataset_rows(
    source: str, split: str, revision: str | None = None, warn: Callable[[str], None] = warn_on_stderr
) -> list[Row]:
    """The rows of a local file or folder, or of a data set on the hub (records.py says which are read how).

    Every row needs ``prompt`` and ``ground_truth``; the other columns are kept. Of rows with the same
    prompt and ground_truth the first is kept and the others are announced by one call of ``warn``.
    Raises UserError at the first faulty row, and for a source without rows.
    """
    return _rows(read_records(str(source), split, revision), str(source), warn)


def load_oracle_table(path: str | Path, warn: Callable[[str], None] = warn_on_stderr) -> list[Row]:
    """The rows of a table of oracle values: JSONL, or parquet with the same columns.

    As load_dataset_rows for a single file, and every row needs a number V_oracle. It is in [0, 1], consistent
    with n_oracle and correct_count where the row has them, unless the row says that its rewards are not 0 or 1
    (reward_values "graded").
    """
    rows = _rows(file_records(Path(path).expanduser()), str(path), warn)
    for row in rows:
        _check_oracle(row)
    return rows


def oracle_row(where: str, record: Mapping[str, Any]) -> Row:
    """One row of a table of oracle values, checked as ``load_oracle_table`` does; UserError beginning with ``where``."""
    row = _make_row(where, record)
    _check_oracle(row)
    return row


def _check_oracle(row: Row) -> None:
    value, samples, correct = row.oracle_value, row.oracle_samples, row.correct_count
    if samples == 0:
        raise UserError(f"{row.where}: n_oracle is 0: V_oracle is the mean of nothing; make the table again")
    if samples is not None and correct is not None and (correct > samples or abs(correct / samples - value) > ROUNDING):
        raise UserError(
            f"{row.where}: V_oracle is {value:g}, but correct_count / n_oracle is {correct} / {samples}; "
            f"correct the row or make the table again"
        )


def _rows(records: Iterable[Record], source: str, warn: Callable[[str], None]) -> list[Row]:
    first: dict[int, Row] = {}
    repeated: list[str] = []
    for where, record in records:
        row = _make_row(where, record)
        if row.prompt_id in first:
            places = (place.removeprefix(f"{source}, ") for place in (where, first[row.prompt_id].where))
            repeated.append(" as ".join(places))
        else:
            first[row.prompt_id] = row
    if not first:
        raise UserError(f"{source}: holds no rows")
    if repeated:
        listed = ", ".join(repeated[:5]) + (", ..." if len(repeated) > 5 else "")
        warn(f"{source}: left out {len(repeated)} repeated row{'s' * (len(repeated) > 1)}: {listed}")
    return list(first.values())


def _make_row(where: str, record: Mapping[str, Any]) -> Row:
    for column in ("prompt", "ground_truth"):
        if column not in record:
            existing = " ".join(", ".join(str(name) for name in record).split())[:200] or "none"
            raise UserError(f"{where}: no column {column!r} (columns: {existing}); rename or add it")
    try:
        prompt = normalise_prompt(record["prompt"])
        _refuse_surrogates(prompt)
        columns = {str(name): _to_json(value) for name, value in record.items() if name != "__index_level_0__"}
        tools = tool_schemas(columns.get("tools"))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    ground_truth = columns["ground_truth"]
    if ground_truth is None:
        raise UserError(f"{where}: the ground_truth is null or NaN; complete or remove the row")
    return Row(prompt, ground_truth, columns, where, prompt_id(prompt, ground_truth, tools))


def _refuse_surrogates(prompt: str | Messages) -> None:
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("the prompt holds half a character (a lone surrogate such as \\ud800); remove it") from None


def _to_json(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON has it: NaN, NaT and infinity as null, dates in ISO form, arrays as lists.

    Raises UserError for what has no such form (an image, bytes) and beyond DEEPEST levels.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if depth > DEEPEST:
        raise UserError(f"a column is nested more than {DEEPEST} levels deep; remove it")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat() if value == value else None  # NaT is a date that differs from itself
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            return None
        exact = abs(value.adjusted()) < 1000 and value == value.to_integral_value()
        return int(value) if exact else float(value)  # an integer of more digits than a float has stays itself
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _to_json(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return _to_json(value.tolist(), depth + 1)
    raise UserError(f"a column holds {type(value).__name__} values, which JSON cannot; remove that column")


def _check_oracle_value(columns: Mapping[str, Any], where: str) -> float:
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
    return float(value)


def _count(columns: Mapping[str, Any], name: str, where: str) -> int | None:
    value = columns.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{where}: {name} is {json.dumps(value)[:40]}, not a count")
    return int(value)


def check_ground_truths(rows: Sequence[Row], reward_name: str) -> None:
    """Raise UserError, naming the row, for the first ground_truth that the reward cannot use."""
    for row in rows:
        try:
            REWARDS[reward_name].check(row.ground_truth)
        except UserError as error:
            raise UserError(f"{row.where}: {error}; correct it or choose another --reward") from None


def rewards_of(texts: Iterable[str], row: Row, reward_name: str) -> np.ndarray:
    """The rewards (N,) of continuations; UserError naming the row for one that is not a finite number."""
    reward, found = REWARDS[reward_name], []
    for number, text in enumerate(texts, start=1):
        value = reward.score(text, row.ground_truth)
        try:
            found.append(float(value))
        except (TypeError, ValueError):
            found.append(math.nan)
        if not math.isfinite(found[-1]) or (reward.zero_one and found[-1] not in (0, 1)):
            wanted = "0 or 1" if reward.zero_one else "a finite number"
            raise UserError(
                f"{row.where}: the reward {reward_name!r} of continuation {number} is {repr(value)[:40]}, "
                f"not {wanted}; mend the reward function"
            )
    return np.array(found)


def check_law(
    rows: Sequence[Row],
    law: Mapping[str, Any],
    path: str | Path,
    allow_mismatch: bool,
    warn: Callable[[str], None] = warn_on_stderr,
) -> None:
    """Raise UserError if the oracle table was not made under ``law``, the run's fields by name.

    Each field of ``law`` is compared with the column of that name in every row: the rows must agree with
    each other and with the run. A table of an earlier version was made with the values of ``ADDED_LATER``. A table
    with none of the fields (the published script writes none) is
    taken with a warning; so is, under ``allow_mismatch``, any difference.
    """
    law = _to_json(law)
    known = [name for name in law if any(name in row.columns for row in rows)]
    if not known:
        warn(f"{path}: does not say how it was made (no {', '.join(law)}); taken as made under this run's settings")
        return
    known = [name for name in law if name in known or name in ADDED_LATER]
    if unknown := [name for name in law if name not in known]:
        warn(f"{path}: does not say its {', '.join(unknown)}; taken to be this run's")
    differences = []
    for name in known:
        first = rows[0]
        made_with = first.columns.get(name, ADDED_LATER.get(name))
        other = next((row for row in rows if row.columns.get(name, ADDED_LATER.get(name)) != made_with), None)
        if other is not None:
            differences.append(
                f"its rows disagree on {name}: {_law_value(first, name)} ({first.where}) "
                f"and {_law_value(other, name)} ({other.where})"
            )
        elif made_with != law[name]:
            differences.append(f"made with {name} {_law_value(first, name)}, this run uses {json.dumps(law[name])}")
    if not differences:
        return
    if not allow_mismatch:
        fix = "run with the table's settings, make a table with this run's, or pass --allow_mismatch"
        raise UserError(f"{path}: {'; '.join(differences)}; {fix}")
    warn(f"{path}: {'; '.join(differences)}; going on as --allow_mismatch says")


def _law_value(row: Row, name: str) -> str:
    columns = {**ADDED_LATER, **row.columns}
    return json.dumps(columns[name]) if name in columns else "missing"
