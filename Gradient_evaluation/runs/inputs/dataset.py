"""The rows of a data set: raw records from its source, then checked rows. All faults are found before a model is loaded.

    read_records(source, split, revision)        (where, record) pairs, not yet checked
    load_dataset_rows(source, split, revision)   checked rows with prompt and ground_truth

``where`` is for messages: ``problems.jsonl, line 7`` or ``row 7 of openai/gsm8k [test]`` (counted from 1). ``record`` is
a dict of columns as the file holds them. Every fault is a UserError of one line.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from Gradient_evaluation.chat_template import Messages, tool_schemas
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors
from Gradient_evaluation.utils import normalise_prompt

Record = tuple[str, dict[str, Any]]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
SPLIT_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval"}
DEEPEST = 50  # levels of lists and objects in a column


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


def at_row(row: Row, function: Callable, *args) -> Any:
    """``function(*args)``; its UserError begins with the file and line of the row."""
    try:
        return function(*args)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None


def finite_at(row: Row, function: Callable, *args) -> Any:
    """``function(*args)``; its FloatingPointError becomes a UserError that names the row."""
    try:
        return function(*args)
    except FloatingPointError as error:
        raise UserError(f"{row.where}: {error} on this prompt; check the checkpoint, or try --dtype float32") from None


def prompt_id(prompt: str | Messages, ground_truth: Any, tools: Sequence[Mapping] = ()) -> int:
    """First 64 bits of the SHA-256 of the canonical JSON of [prompt, ground_truth], with the tools where there are some."""
    parts = [prompt, ground_truth, *([tools] if tools else [])]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8], "big")


def load_dataset_rows(
    source: str, split: str, revision: str | None = None, warn: Callable[[str], None] = warn_on_stderr
) -> list[Row]:
    """The rows of a local file or folder, or of a data set on the hub (``read_records`` says how each is read).

    Every row needs ``prompt`` and ``ground_truth``; the other columns are kept. Of rows with the same prompt and
    ground_truth only the first is kept; one call of ``warn`` names the others.
    Raises UserError at the first faulty row, and for a source without rows.
    """
    return make_rows(read_records(str(source), split, revision), str(source), warn)


def make_rows(records: Iterable[Record], source: str, warn: Callable[[str], None]) -> list[Row]:
    """The checked rows of a source, each prompt_id once; ``warn`` announces the others."""
    first: dict[int, Row] = {}
    repeated: list[str] = []
    for where, record in records:
        row = make_row(where, record)
        if row.prompt_id in first:
            repeated.append(" as ".join(each.removeprefix(f"{source}, ") for each in (where, first[row.prompt_id].where)))
        else:
            first[row.prompt_id] = row
    if not first:
        raise UserError(f"{source}: holds no rows")
    if repeated:
        listed = ", ".join(repeated[:5]) + (", ..." if len(repeated) > 5 else "")
        kind = "repeated rows" if len(repeated) > 1 else "repeated row"
        warn(f"{source}: left out {len(repeated)} {kind}: {listed}")
    return list(first.values())


def make_row(where: str, record: Mapping[str, Any]) -> Row:
    """One row, checked; UserError beginning with ``where``."""
    for column in ("prompt", "ground_truth"):
        if column not in record:
            existing = " ".join(", ".join(str(name) for name in record).split())[:200] or "none"
            raise UserError(f"{where}: no column {column!r} (columns: {existing}); rename or add it")
    try:
        prompt = normalise_prompt(record["prompt"])
        _refuse_surrogates(prompt)
        columns = {str(name): to_json(value) for name, value in record.items() if name != "__index_level_0__"}
        columns = with_packed_columns(columns)
        tools = tool_schemas(columns.get("tools"))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    ground_truth = columns["ground_truth"]
    if ground_truth is None:
        raise UserError(f"{where}: the ground_truth is null or NaN; complete or remove the row")
    return Row(prompt, ground_truth, columns, where, prompt_id(prompt, ground_truth, tools))


def packed_columns(extra_info: Any) -> dict[str, Any]:
    """The columns of a data set that prepare_parquet.py has put into a row's extra_info; {} where there are none.

    They are one JSON text, extra_info["columns"]: parquet would give every row the columns of all rows, and one type to each.
    """
    text = extra_info.get("columns") if isinstance(extra_info, Mapping) else None
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def with_packed_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row, with those that prepare_parquet.py has put into its extra_info; these come first.

    Among them can be the ground_truth as the data set has it, which VERL's files hold as text, in reward_model too.
    """
    packed = packed_columns(columns.get("extra_info"))
    if "ground_truth" in packed and isinstance(columns.get("reward_model"), Mapping):
        packed["reward_model"] = {**columns["reward_model"], "ground_truth": packed["ground_truth"]}
    return {**columns, **packed}


def _refuse_surrogates(prompt: str | Messages) -> None:
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("the prompt holds half a character (a lone surrogate such as \\ud800); remove it") from None


def to_json(value: Any, depth: int = 0) -> Any:
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
        return {str(name): to_json(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return to_json(value.tolist(), depth + 1)
    raise UserError(f"a column holds {type(value).__name__} values, which JSON cannot; remove that column")


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
        files = [path for each in (folder, folder / "data") if each.is_dir() for path in sorted(each.iterdir())]
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
