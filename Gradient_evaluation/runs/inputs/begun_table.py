"""An oracle table that grows row by row: calculate_oracle_v.py appends to it, and the same command continues it.

part_of(table, rank)                      where one of several processes appends its rows
continue_table(table, identity, rows)     the rows that are there, checked
write_table(table, finished, rows)        all rows, in the order of the data set
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row
from Gradient_evaluation.runs.inputs.oracle_table import N_LEFT_OUT, oracle_row, with_jeffreys_error
from Gradient_evaluation.runs.machine.files import (
    one_line_errors,
    read_finished_rows,
    to_json_line,
    truncate_file,
    write_bytes_atomic,
)
from Gradient_evaluation.runs.machine.resume import ADDED_LATER, parts_of, refuse_difference


def part_of(table: Path, rank: int) -> Path:
    """The file to which process ``rank`` of several appends its rows; the first process moves them into the table."""
    return table.with_name(f".{table.name}.rank{rank}")


def remove_table(table: Path) -> None:
    """Remove a table and its parts."""
    with one_line_errors(table, "remove"):
        for path in (table, *parts_of(table)):
            path.unlink(missing_ok=True)


def left_rows(table: Path) -> Iterator[dict]:
    """The rows in a table and its parts, unchecked."""
    for path in (table, *parts_of(table)) if table.parent.is_dir() else ():
        yield from read_finished_rows(path)[0]


def continue_table(table: Path, identity: dict, rows: Sequence[Row]) -> dict[int, dict]:
    """{prompt id: row} of the rows in a table and its parts. Moves the parts into the table.

    Rows of an earlier version get the standard error that rows have now, and a line on stderr says so. Raises UserError
    for rows made with another identity, or of prompts that are not among ``rows``.
    """
    wanted = {row.prompt_id for row in rows}
    finished: dict[int, dict] = {}
    earlier = 0
    for path in (table, *parts_of(table)):
        found, size = read_finished_rows(path)
        for number, row in enumerate(found, 1):
            where = f"{path}, line {number}"
            _refuse_other_row(where, row, identity)
            checked = oracle_row(where, row)
            now = with_jeffreys_error(checked, row)
            earlier += now is not row
            key = checked.prompt_id
            if finished.get(key, now) != now:
                raise UserError(f"{where}: a second, different row of a prompt; remove one of the two")
            if key not in wanted:
                raise UserError(
                    f"{where}: a prompt that is not in --dataset; give the data set this table was made "
                    "from, pass --overwrite to start afresh, or another --out_dir"
                )
            finished[key] = now
        truncate_file(path, size)
    if earlier:
        print(
            f"{table}: an earlier version wrote {earlier} of its rows; their V_standard_error is computed again from "
            "correct_count and n_oracle, by the rule of the new rows (jeffreys)",
            file=sys.stderr,
        )
    if earlier or parts_of(table):
        write_table(table, finished, rows)
    return finished


def _refuse_other_row(where: str, row: dict, identity: dict) -> None:
    """Raise UserError for what is no row of calculate_oracle_v.py, or one made with another identity."""
    columns = ("prompt", "ground_truth", "V_oracle", *identity)
    missing = [name for name in columns if name not in row and name not in ADDED_LATER]
    if missing:
        raise UserError(
            f"{where}: not a row of this script (no {missing[0]}); pass --overwrite to start afresh, or another --out_dir"
        )
    if isinstance(row.get(N_LEFT_OUT), int):  # n_oracle of such a row are those that are left; the identity has all
        row = {**row, "n_oracle": row["n_oracle"] + row[N_LEFT_OUT]}
    refuse_difference(where, row, identity)


def write_table(table: Path, finished: dict[int, dict], rows: Sequence[Row]) -> None:
    """Write the finished rows in the order of the data set, all or none; then remove the parts."""
    ordered = b"".join(to_json_line(finished[row.prompt_id]) for row in rows if row.prompt_id in finished)
    if not table.exists() or table.read_bytes() != ordered:
        write_bytes_atomic(table, ordered)
    for part in parts_of(table):
        part.unlink()
