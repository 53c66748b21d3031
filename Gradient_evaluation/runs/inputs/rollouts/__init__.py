"""Rollouts from files, whoever wrote them. The first record says which importer reads them.

read_rollouts(paths, tokenizer, rows, settings) -> [Rollouts, ...]   one for each prompt, checked

An importer is one module of this folder and one entry of ``IMPORTERS``: it recognises a record of its files, and makes
Rollouts of all their records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import model_limits
from Gradient_evaluation.runs.inputs.dataset import SUFFIXES, Record, Row, file_records
from Gradient_evaluation.runs.inputs.rollouts import own_format, trl, verl, vllm
from Gradient_evaluation.runs.inputs.rollouts.context import Context
from Gradient_evaluation.runs.machine.files import one_line_errors
from Gradient_evaluation.sampling.rollouts import Rollouts, check_rollouts
from Gradient_evaluation.settings import Settings

__all__ = ["IMPORTERS", "Context", "Importer", "Record", "read_rollouts"]

NOT_ROLLOUTS = ("run.json", "dataset_info.json", "dataset_infos.json", "state.json")


class Importer(NamedTuple):
    """name: of the format, for messages; recognises: whether a record is one of its files; read: all records of them."""

    name: str
    recognises: Callable[[dict[str, Any]], bool]
    read: Callable[[Iterable[Record], Context], list[Rollouts]]


IMPORTERS: list[Importer] = [
    Importer("rollouts of this toolkit", own_format.recognises, own_format.read),
    Importer("VERL's dump", verl.recognises, verl.read),
    Importer("TRL's completions", trl.recognises, trl.read),
    Importer("vLLM's outputs", vllm.recognises, vllm.read),
]


def read_rollouts(paths: Sequence[str], tokenizer, rows: Sequence[Row] | None, settings: Settings) -> list[Rollouts]:
    """The rollouts in files and folders, one for each prompt, in the order in which the prompts first come.

    A folder is read file by file, in order of name (numbers in their own order: 2.jsonl before 10.jsonl). rows: of --dataset,
    which give ground truths and columns by prompt; None without one. Raises UserError for files of no known format, files
    of two formats, and whatever ``check_rollouts`` refuses.
    """
    files = [file for path in paths for file in files_of(Path(path).expanduser())]
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise UserError(f"--rollouts: {file} is given twice, so its rollouts would count twice; give it once")
        seen.add(file.resolve())
    importer = importer_of(files[0])
    found = importer.read(_records(files, importer), Context(tokenizer, rows, settings))
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: holds no rollouts")
    check_rollouts(found, model_limits(settings.model, settings.revision, settings.trust_remote_code)[1])
    return found


def files_of(path: Path) -> list[Path]:
    """The file, or those of a folder: parquet, JSONL and JSON, without what says how they were made."""
    with one_line_errors(path, "read"):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if not path.is_dir():
            return [path]
        files = [each for each in path.iterdir() if each.suffix in SUFFIXES and each.name[0] != "." and each.is_file()]
    files = sorted((each for each in files if each.name not in NOT_ROLLOUTS), key=_natural)
    if not files:
        raise UserError(f"{path}: holds no rollouts ({', '.join(SUFFIXES)})")
    return files


def _natural(path: Path) -> tuple:
    return (not path.stem.isdigit(), int(path.stem) if path.stem.isdigit() else 0, path.name)


def importer_of(file: Path) -> Importer:
    """The importer of a file, by its first record."""
    where, record = next(iter(file_records(file)), (str(file), None))
    if record is None:
        raise UserError(f"{file}: holds no rollouts")
    for importer in IMPORTERS:
        if importer.recognises(record):
            return importer
    columns = ", ".join(map(str, record))[:200] or "none"
    raise UserError(
        f"{where}: no rollouts of a known format ({', '.join(each.name for each in IMPORTERS)}); its columns are {columns}. "
        "docs/rollouts.md has the formats"
    )


def _records(files: Sequence[Path], importer: Importer) -> Iterator[Record]:
    for file in files:
        for number, (where, record) in enumerate(file_records(file)):
            if number == 0 and not importer.recognises(record):
                raise UserError(f"{where}: not of the format of {files[0]} ({importer.name}); give files of one format")
            yield where, record
