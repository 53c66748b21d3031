"""Files that survive a killed run: rows appended and synced, whole files replaced in one step.

    append_row(path, row)              one JSON line, on disk when the call returns
    read_finished_rows(path)           the complete rows of a run's own file, and their size in bytes
    truncate_file(path, size)          cut off the incomplete line after them
    write_json(path, value)            the whole file or nothing
    write_bytes_atomic(path, data)     the same for bytes

A full disk, a read-only folder or a missing one is a UserError with one line. NaN and infinity are not
JSON: writing one is a bug of the caller and raises ValueError.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from Gradient_evaluation.errors import UserError


@contextlib.contextmanager
def one_line_errors(path: str | Path, doing: str):
    """Turn an OSError on ``path`` while ``doing`` ("read", "write") into a UserError that names both."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot {doing} it: {error.strerror or error}") from None


def to_json_line(value: Any) -> bytes:
    """``value`` as one line of UTF-8 JSON with its newline; NumPy scalars and arrays as numbers and lists.

    Raises ValueError on NaN or infinity. A lone surrogate, which UTF-8 cannot hold, is escaped.
    """
    try:
        return (json.dumps(value, ensure_ascii=False, allow_nan=False, default=_from_numpy) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value, ensure_ascii=True, allow_nan=False, default=_from_numpy) + "\n").encode()


def append_row(path: str | Path, row: dict) -> None:
    """Append ``row`` as one JSON line; it is on disk when this returns.

    Raises UserError if it cannot be written (a full disk); what was written of it is cut off first. Raises ValueError
    on NaN or infinity before anything is written.
    """
    line = to_json_line(row)
    with one_line_errors(path, "write"):
        is_new = not os.path.exists(path)
        with open(path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(0, "the disk is full")
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
        if is_new:
            _sync_folder(path)


def read_finished_rows(path: str | Path) -> tuple[list[dict], int]:
    """The complete rows of a run's own JSONL file, and their size in bytes.

    A crash may leave a last line that has no newline or is no JSON object. It gives no row, and the size ends before it.
    Cut it off (``truncate_file``) before appending. A missing file has no rows. Raises UserError, naming the line, if an
    earlier line is damaged.
    """
    if not os.path.lexists(path):
        return [], 0
    with one_line_errors(path, "read"):
        data = Path(path).read_bytes()
    *lines, rest = data.split(b"\n")
    rows, complete = [], len(data) - len(rest)
    for number, line in enumerate(lines, start=1):
        row = _parse_object(line)
        if row is not None:
            rows.append(row)
        elif number == len(lines) and not rest:
            complete -= len(line) + 1
        else:
            raise UserError(f"{path}, line {number}: damaged (not a JSON object); remove the line, or use --overwrite")
    return rows, complete


def truncate_file(path: str | Path, size: int) -> None:
    """Cut ``path`` to ``size`` bytes and sync it to disk. Nothing happens to a file that is missing or not longer."""
    with one_line_errors(path, "write"):
        if not os.path.exists(path) or os.path.getsize(path) <= size:
            return
        with open(path, "r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON: the whole file or, on any error, no change. ValueError on NaN."""
    text = json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False, default=_from_numpy)
    write_bytes_atomic(path, text.encode() + b"\n")


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path``, sync it, and rename it over ``path``.

    The temporary file is always ``.NAME.tmp``, so the next run overwrites what a killed run has left.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with one_line_errors(path, "write"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path)


def _sync_folder(path: str | Path) -> None:
    """Sync the folder of a new file to disk, if the file system can do that."""
    with contextlib.suppress(OSError):
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _parse_object(line: bytes) -> dict | None:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _from_numpy(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
