"""What a run leaves on disk, and how the same command continues it.

A run's identity is the configuration that decides its numbers (model, law, seed, ...), not its paths, batch sizes
or device. Rows and Gram files of another identity are never mixed in: the difference is named instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from Gradient_evaluation.cli import UserError
from Gradient_evaluation.durable_files import read_finished_rows, truncate_file, write_json
from Gradient_evaluation.tables import Row, prompt_id


def output_folder(path: str | Path) -> Path:
    """Create a folder for results, parents included, and check that it can be written to."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot create this folder ({error.strerror}); choose another") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: this folder cannot be written to; choose another")
    return folder


def at_row(row: Row, function: Callable, *args) -> Any:
    """``function(*args)``, its UserError preceded by where the row stands."""
    try:
        return function(*args)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None


def continue_table(path: Path, identity: dict) -> dict[int, dict]:
    """{prompt id: row} of the table a stopped run has left; a torn last line is cut off and sampled again.

    Raises UserError when the rows were made with another identity.
    """
    rows, size = read_finished_rows(path) if path.exists() else ([], 0)
    for number, row in enumerate(rows, 1):
        missing = [name for name in ("prompt", "ground_truth", "V_oracle", *identity) if name not in row]
        if missing:
            raise UserError(f"{path}, line {number}: not a row of this script (no {missing[0]}); pass --overwrite to "
                            "start afresh, or another --out_dir")
        refuse_difference(f"{path}, line {number}", row, identity)
    if rows or path.exists():
        truncate_file(path, size)
    return {prompt_id(row["prompt"], row["ground_truth"]): row for row in rows}


def refuse_difference(where: str, found: dict, identity: dict) -> None:
    """Raise UserError naming the first entry of the identity in which what was found differs."""
    for name, value in identity.items():
        if found.get(name) != value:
            raise UserError(f"{where}: made with {name} = {found.get(name)!r}, this run has {value!r}; use the same, "
                            "pass --overwrite to start afresh, or choose another output folder")


def check_fingerprint(rows: Iterable[dict], fingerprint: str, path: str | Path, fix: str) -> None:
    """Raise UserError when a row names other weights; a row that names none (the published script's) is taken."""
    for row in rows:
        found = row.get("model_fingerprint")
        if found is not None and found != fingerprint:
            raise UserError(f"{path}: made with other weights (fingerprint {found}, this model has {fingerprint}); {fix}")


def check_identity(path: Path, identity: dict, overwrite: bool) -> None:
    """Write a run's identity beside its Gram files, or compare with the one there.

    A different one is a UserError. With ``overwrite``, or without an identity, Gram files in the folder go first.
    """
    if path.exists() and not overwrite:
        refuse_difference(str(path), read_identity(path), identity)
        return
    for old in path.parent.glob("*.npz"):
        old.unlink()
    write_json(path, identity)


def read_identity(path: Path) -> dict:
    """The identity beside a folder of Gram files."""
    try:
        identity = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{path}: missing or not JSON; give the grams folder a run_tracecov.py run has written") from None
    if not isinstance(identity, dict) or "model" not in identity:
        raise UserError(f"{path}: not the identity of a run_tracecov.py run")
    return identity
