"""Raw records from a data source, each with the place it stands in for messages to the user.

``read_records(source, split, revision)`` yields (where, record): ``where`` reads like
``problems.jsonl, line 7`` or ``row 7 of openai/gsm8k [test]`` (counted from 1), ``record`` is a dict of
columns as the file holds them, not yet checked. Whatever is wrong with a file is a UserError of one line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.files import one_line_errors

Record = tuple[str, dict[str, Any]]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
SPLIT_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval"}


def read_records(source: str, split: str, revision: str | None = None) -> Iterator[Record]:
    """Records of a local file, a local folder, or a data set on the Hugging Face hub.

    * file: JSONL, JSON (a list of objects, or one object per line) or parquet; it has no splits.
    * folder written by ``save_to_disk``: a DatasetDict needs ``split``, a Dataset has none.
    * folder of such files: those with ``split`` as a word of their name (``test-00000-of-00001.parquet``);
      all of them, in order of name, if none is named after any split. Looked for in ``data/`` too.
    * anything that is no local path: ``datasets.load_dataset(source, split=split, revision=revision)``;
      code of the data set's own is never run.
    """
    if not source.strip():
        raise UserError("the name of the data set is empty; give a file, a folder or a hub id")
    path = Path(source).expanduser()
    with one_line_errors(source, "read"):
        is_folder, is_there = path.is_dir(), path.exists()
    if is_folder:
        return _folder_records(path, split)
    if is_there:
        return file_records(path)
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source) or path.suffix in SUFFIXES:
        raise UserError(f"{source}: no such file or folder")
    return _hub_records(source, split, revision)


def file_records(path: Path) -> Iterator[Record]:
    """Records of one file: JSONL, JSON or parquet, told apart by suffix and by content without a known one."""
    with one_line_errors(path, "read"):
        if path.is_dir():
            tables = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)[:5]
            hint = f"; give one of the files in it: {', '.join(tables)}" if tables else ""
            raise UserError(f"{path}: is a folder, a file is expected{hint}")
        if not path.exists():
            raise UserError(f"{path}: no such file")
        data = path.read_bytes()
    if path.suffix == ".parquet" or data[:4] == b"PAR1":
        return _parquet_records(path)
    if data[:2] == b"\x1f\x8b":
        raise UserError(f"{path}: is compressed; unpack it first (gunzip)")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: is UTF-16 text; save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if path.suffix not in (".jsonl", ".ndjson") and data.lstrip()[:1] == b"[":
        return _json_list_records(path, data)
    return _json_line_records(path, data)


def _json_line_records(path: Path, data: bytes) -> Iterator[Record]:
    lines = data.split(b"\n")  # not splitlines: JSON text may hold U+2028 and the like
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = parse_json(line, where)
        except UserError:
            if number == len(lines) and b"\r" not in line.strip() and line.lstrip()[:1] == b"{":
                raise UserError(f"{where}: the file ends in the middle of this line; remove or complete it") from None
            raise
        yield where, _as_record(record, where)


def _json_list_records(path: Path, data: bytes) -> Iterator[Record]:
    for number, record in enumerate(parse_json(data, str(path)), start=1):
        where = f"{path}, item {number}"
        yield where, _as_record(record, where)


def parse_json(data: bytes, where: str) -> Any:
    """``data`` as JSON; NaN and Infinity become the floats. UserError, starting with ``where``, if it is none."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_repeated_names)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    except RecursionError:
        raise UserError(f"{where}: not usable JSON: nested too deeply") from None
    except RepeatedName as error:
        raise UserError(f"{where}: the name {error.args[0]!r} stands twice in one JSON object; remove one of the two") from None
    except ValueError as error:
        if b"\r" in data.strip() and b"\n" not in data:
            raise UserError(f"{where}: its lines end in a carriage return alone; save the file with line feeds") from None
        reason = re.sub(r": line 1 (column \d+).*", r" at \1", str(error))
        raise UserError(f"{where}: not JSON: {reason}") from None


class RepeatedName(Exception):
    """A name that a JSON object holds twice."""


def _without_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedName(next(name for name in names if names.count(name) > 1))
    return found


def _as_record(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        found = json.dumps(record)[:40]
        raise UserError(f"{where}: a JSON object with prompt and ground_truth is expected, not {found}")
    return record


def _parquet_records(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with one_line_errors(path, "read"):
            table = pyarrow.parquet.ParquetFile(path).read()
        rows = table.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{path}: cannot be read as parquet: {_first_line(error)}") from None
    for number, record in enumerate(rows, start=1):
        yield f"{path}, row {number}", record


def _folder_records(folder: Path, split: str) -> Iterator[Record]:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        yield from _saved_dataset_records(folder, split)
        return
    for path in _files_of_split(folder, split):
        yield from file_records(path)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    with one_line_errors(folder, "read"):
        files = [path for place in (folder, folder / "data") if place.is_dir() for path in sorted(place.iterdir())]
    files = [path for path in files if path.suffix in SUFFIXES and path.name[0] != "." and path.is_file()]
    files = [path for path in files if path.name not in ("dataset_info.json", "dataset_infos.json")]
    if not files:
        raise UserError(f"{folder}: holds no data file ({', '.join(SUFFIXES)}) and no saved data set")
    words = {path: set(re.split(r"[-_.]", path.stem.lower())) for path in files}
    chosen = [path for path in files if split.lower() in words[path]]
    if chosen:
        return chosen
    named = {path: words[path] & SPLIT_NAMES for path in files}
    if any(named.values()):
        _refuse_split(str(folder), split, sorted(set().union(*named.values())))
    return files


def _saved_dataset_records(folder: Path, split: str) -> Iterator[Record]:
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises what its readers raise
        raise UserError(f"{folder}: cannot be read as a saved data set: {_first_line(error)}") from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            _refuse_split(str(folder), split, list(data))
        data = data[split]
    for number, record in enumerate(data, start=1):
        yield f"{folder}, row {number}", record


def _hub_records(source: str, split: str, revision: str | None) -> Iterator[Record]:
    import datasets

    print(f"{source}: no file or folder here, asking the Hugging Face hub", file=sys.stderr)
    try:
        data = datasets.load_dataset(source, split=split, revision=revision)
    except Exception as error:  # network, hub and builder errors are of many unrelated types
        if splits := re.search(r"Unknown split .*?Should be one of \[(.*?)\]", str(error)):
            _refuse_split(source, split, re.findall(r"[^\s',]+", splits[1]))
        raise UserError(f"{source}: no local file or folder of this name, and the hub gave: {_first_line(error)}") from None
    for number, record in enumerate(data, start=1):
        yield f"row {number} of {source} [{split}]", record


def _refuse_split(source: str, split: str, existing: list[str]):
    raise UserError(f"{source}: no split {split!r}; there is {', '.join(existing) or 'none'}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
