"""Validation accuracy of training runs, from whatever a run or W&B left behind.

    load_runs(path, metric)   ->   one Run for each training run found there

    manifest.json (or its folder)       every run of a sweep; sizes and seeds come from it
    *.json of train_group_sizes.py      its runs: mean reward on held-out problems before and after training
    folder of grpo_train.sh             the attempts in its logs/, a later one replacing what it repeated
    *.jsonl                             VERL's file logger
    *.log, *.txt                        VERL's console ("step:10 - val-core/...:0.5 - ...")
    *.csv                               a W&B export: of one chart ("RUN - METRIC" columns) or of a run's history
    *.wandb, offline-run-* or wandb/    W&B's offline files, before any sync

Whatever is wrong with a file is a UserError of one line.
"""

from __future__ import annotations

import csv
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.files import one_line_errors

VALIDATION = re.compile(r"val-core/.+/acc/mean@\d+")
NAME = re.compile(r"(?:^|[_\W])g(?:roup_size)?[_=]?(\d+)(?=$|[_\W])", re.IGNORECASE)
SEED = re.compile(r"(?:^|[_\W])seed[_=]?(\d+)(?=$|[_\W])", re.IGNORECASE)
Rows = list[tuple[int, dict[str, float]]]  # (step, metrics by name)


class Run(NamedTuple):
    """One training run: its name, G and seed where they are known, and {step: accuracy}."""

    name: str
    group_size: int | None
    seed: int | None
    accuracy: dict[int, float]


def load_runs(path: str | Path, metric: str | None = None) -> list[Run]:
    """Every run ``path`` holds. ``metric``: VERL's name; default the one val-core/.../acc/mean@N there is."""
    path = Path(path)
    if path.is_dir() and (path / "manifest.json").is_file():
        path = path / "manifest.json"
    if path.is_dir():
        return _folder_runs(path, metric)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a run folder, a manifest.json or a log")
    if path.suffix == ".json":
        return _manifest_runs(path, metric) if path.name == "manifest.json" else _group_size_runs(path, metric)
    if path.suffix == ".csv":
        return _csv_runs(path, metric)
    if path.suffix == ".wandb":
        rows = _wandb_rows(path)
    elif path.suffix == ".jsonl":
        rows = _jsonl_rows(path)
    else:
        rows = _console_rows(path)
    return [_run(path.stem, rows, metric, path)]


def _run(name: str, rows: Rows, metric: str | None, path: Path, size: int | None = None, seed: int | None = None) -> Run:
    """Pick the metric out of ``rows``; later rows replace earlier ones of the same step."""
    names = {key for _, metrics in rows for key in metrics}
    if metric is None:
        found = sorted(key for key in names if VALIDATION.fullmatch(key))
        if not found:
            raise UserError(f"{path}: holds no validation accuracy (val-core/.../acc/mean@N); was test_freq -1?")
        if len(found) > 1:
            raise UserError(f"{path}: holds several accuracies ({', '.join(found)[:150]}); choose one with --metric")
        metric = found[0]
    accuracy = {step: metrics[metric] for step, metrics in rows if metric in metrics}
    if not accuracy:
        raise UserError(f"{path}: holds no values of {metric}")
    if size is None and (match := NAME.search(name)):
        size = int(match[1])
    if seed is None and (match := SEED.search(name)):
        seed = int(match[1])
    return Run(name, size, seed, dict(sorted(accuracy.items())))


def _numbers(metrics: dict) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _read(path: Path) -> str:
    with one_line_errors(path, "read"):
        return path.read_bytes().decode("utf-8-sig", errors="replace")


def _manifest_runs(path: Path, metric: str | None) -> list[Run]:
    from Policy_Optimization.sweep_manifest import read_manifest

    runs = []
    for each in read_manifest(path.parent)["runs"]:
        rows = _attempts(path.parent / each["run_dir"] / "logs")
        if any(VALIDATION.fullmatch(key) or key == metric for _, metrics in rows for key in metrics):
            runs.append(_run(each["run_dir"], rows, metric, path, each["group_size"], each["seed"]))
    if not runs:
        raise UserError(f"{path}: no run of it has logged a validation yet")
    return runs


def _group_size_runs(path: Path, metric: str | None) -> list[Run]:
    if metric not in (None, "held_out_reward"):
        raise UserError(f"{path}: --metric {metric}: runs of train_group_sizes.py have held_out_reward alone")
    runs = []
    try:
        content = json.loads(_read(path))
        for name, each in content["runs"].items():
            reward = {0: float(content["start"]), len(each["train_reward"]): float(each["held_out_reward"])}
            runs.append(Run(name, int(each["G"]), int(each["seed"]), reward))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}: give the manifest.json of a sweep, a file of train_group_sizes.py, a run folder, or a log"
        ) from None
    if not runs:
        raise UserError(f"{path}: no run in it is finished yet")
    return runs


def _folder_runs(folder: Path, metric: str | None) -> list[Run]:
    if (folder / "logs").is_dir():
        size, seed = _run_json(folder / "run.json")
        return [_run(folder.resolve().name, _attempts(folder / "logs"), metric, folder, size, seed)]
    if files := sorted(folder.glob("*.wandb")) or sorted(folder.glob("*run-*/*.wandb")):
        rows: dict[str, Rows] = {}
        for file in files:  # the parts of a continued run share its id
            rows.setdefault(file.stem, []).extend(_wandb_rows(file))
        return [_run(name, rows[name], metric, folder) for name in rows]
    raise UserError(f"{folder}: is no run folder (no logs/), no sweep (no manifest.json) and holds no W&B files")


def _run_json(path: Path) -> tuple[int | None, int | None]:
    """G and seed from the overrides a run was started with, where there are any."""
    try:
        overrides = dict(text.partition("=")[::2] for text in json.loads(_read(path))["overrides"])
        return int(overrides["actor_rollout_ref.rollout.n"]), int(overrides["data.seed"])
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _attempts(folder: Path) -> Rows:
    """The rows of all attempts of a run in order; of an earlier one only those before the later one begins."""
    rows: Rows = []
    for pattern, read in (("metrics_*.jsonl", _jsonl_rows), ("console_*.log", _console_rows)):
        for file in sorted(folder.glob(pattern), key=lambda file: int(re.sub(r"\D", "", file.stem) or 0)):
            new = read(file)
            first = min((step for step, _ in new), default=math.inf)
            rows = [(step, metrics) for step, metrics in rows if step < first] + new
        if rows:
            break
    return rows


def _jsonl_rows(path: Path) -> Rows:
    rows: Rows = []
    lines = _read(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            rows.append((int(record["step"]), _numbers(record["data"])))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(lines):  # the last line of a killed run may be torn
                raise UserError(f'{path}, line {number}: no line of VERL\'s file logger ({{"step", "data"}})') from None
    return rows


def _console_rows(path: Path) -> Rows:
    rows: Rows = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", _read(path)).splitlines():
        if not (start := re.search(r"(?:^|[\s)])step:(\d+)(?= - |$)", line)):
            continue
        metrics = {}
        for part in line[start.end() :].split(" - "):
            name, _, value = part.strip().rpartition(":")
            number = re.fullmatch(r"(?:np\.\w+\()?([-+\d.eE]+)\)?", value)
            try:
                metrics[name] = float(number[1]) if number else math.nan
            except ValueError:
                metrics[name] = math.nan
        rows.append((int(start[1]), _numbers(metrics)))
    return rows


def _csv_runs(path: Path, metric: str | None) -> list[Run]:
    """One chart's export has a column "RUN - METRIC" for each run (and __MIN, __MAX); a history has metrics alone."""
    table = list(csv.DictReader(_read(path).splitlines()))
    columns = [name for name in (table[0] if table else {}) if name and not name.endswith(("__MIN", "__MAX"))]
    step = next((name for name in ("_step", "Step", "step", "global_step") if name in columns), None)
    if step is None:
        raise UserError(f"{path}: has no column Step or _step; export a chart or a run's history from W&B as CSV")
    by_run: dict[str, Rows] = {}
    for number, record in enumerate(table, start=2):
        for column in columns:
            run, _, name = column.rpartition(" - ")
            if column == step or not (record[column] or "").strip():
                continue
            try:
                entry = (int(float(record[step])), {name: float(record[column])})
            except ValueError:
                continue  # text columns of a history
            if math.isfinite(entry[1][name]):
                by_run.setdefault(run or path.stem, []).append(entry)
    wanted = {
        run: rows
        for run, rows in by_run.items()
        if any(name == metric or (not metric and VALIDATION.fullmatch(name)) for _, m in rows for name in m)
    }
    if not wanted:
        raise UserError(f"{path}: has no column of {metric or 'a validation accuracy (val-core/.../acc/mean@N)'}")
    return [_run(run, rows, metric, path) for run, rows in wanted.items()]


def _wandb_rows(path: Path) -> Rows:
    """The history in a W&B offline file: records of protobuf in blocks, as LevelDB's log has them."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise UserError(f"{path}: reading W&B's offline files needs the package wandb; pip install wandb") from None
    rows: Rows = []
    with one_line_errors(path, "read"):
        data = path.read_bytes()
    if data[:4] != b":W&B":
        raise UserError(f"{path}: is no offline file of W&B")
    for payload in _leveldb_records(data, start=7):
        record = Record()
        try:
            record.ParseFromString(payload)
        except Exception:  # protobuf's DecodeError, whose place differs between its versions
            continue
        if record.WhichOneof("record_type") != "history":
            continue
        metrics = {}
        for item in record.history.item:
            try:
                metrics[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            except ValueError:
                continue
        step = metrics.get("_step", record.history.step.num)
        rows.append((int(step), _numbers(metrics)))
    return rows


def _leveldb_records(data: bytes, start: int) -> Iterator[bytes]:
    """Whole records from blocks of 32 KiB: 4 bytes checksum, 2 length, 1 type (full, first, middle, last)."""
    block, position, parts = 32768, start, []
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        payload = data[position + 7 : position + 7 + length]
        if len(payload) < length:
            return  # torn by a kill
        position += 7 + length
        if kind == 1:
            yield payload
        elif kind in (2, 3):
            parts.append(payload)
        elif kind == 4:
            yield b"".join([*parts, payload])
            parts = []
        else:
            position += block - position % block if position % block else 0  # padding
