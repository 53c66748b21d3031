"""Validation accuracy of training runs, from the JSONL that VERL's file logger writes.

    load_runs(path, metric)   ->   one Run for each training run found there

    manifest.json (or its folder)       every run of a sweep; group sizes and seeds are read from the manifest
    *.json of train_group_sizes.py      its runs: mean reward on held-out problems before and after training
    folder of grpo_train.sh             the attempts in its logs/; a later attempt replaces the steps that it repeats
    *.jsonl                             one file of VERL's file logger

VERL's console output, W&B's CSV exports and W&B's offline files are not read. The launcher always writes the JSONL, which
has the same numbers. A run that was started otherwise writes it with "file" in trainer.logger, at the path in the variable
VERL_FILE_LOGGER_PATH. A run that has finished without it cannot be plotted here.

Whatever is wrong with a file is a UserError of one line.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors

VALIDATION = re.compile(r"val-core/.+/(acc|reward)/mean@\d+")  # VERL logs the reward there where rewards have no acc
NAME = re.compile(r"(?:^|[_\W])g(?:roup_size)?[_=]?(\d+)(?=$|[_\W])", re.IGNORECASE)
SEED = re.compile(r"(?:^|[_\W])seed[_=]?(\d+)(?=$|[_\W])", re.IGNORECASE)
METRICS = "metrics_*.jsonl"  # of attempt 1, 2, ... in logs/
Rows = list[tuple[int, dict[str, float]]]  # (step, metrics by name)


class Run(NamedTuple):
    """One training run: its name, its G and seed (None where unknown), {step: accuracy}, and what that is: or the reward."""

    name: str
    group_size: int | None
    seed: int | None
    accuracy: dict[int, float]
    measure: str = "accuracy"


def load_runs(path: str | Path, metric: str | None = None) -> list[Run]:
    """The runs in ``path``. metric: VERL's name of the accuracy; by default the only val-core/.../(acc or reward)/mean@N."""
    path = Path(path)
    if path.is_dir() and (path / "manifest.json").is_file():
        path = path / "manifest.json"
    if path.is_dir():
        return _folder_runs(path, metric)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a run folder, a manifest.json or a JSONL log")
    if path.suffix == ".json":
        return _manifest_runs(path, metric) if path.name == "manifest.json" else _group_size_runs(path, metric)
    if path.suffix != ".jsonl":
        raise UserError(f'{path}: is no JSONL of VERL\'s file logger; train with "file" in trainer.logger and give that file')
    return [_run(path.stem, _jsonl_rows(path), metric, path)]


def _run(name: str, rows: Rows, metric: str | None, path: Path, known: tuple[int | None, int | None] = (None, None)) -> Run:
    """The run whose log has these rows; a later row replaces an earlier one of the same step.

    known: G and seed; where one is None, it is read from ``name``.
    """
    names = {key for _, metrics in rows for key in metrics}
    if metric is None:
        found = sorted(key for key in names if VALIDATION.fullmatch(key))
        if not found:
            raise UserError(f"{path}: holds no validation accuracy (val-core/.../acc or reward/mean@N); was test_freq -1?")
        if len(found) > 1:
            raise UserError(f"{path}: holds several accuracies ({', '.join(found)[:150]}); choose one with --metric")
        metric = found[0]
    accuracy = {step: metrics[metric] for step, metrics in rows if metric in metrics}
    if not accuracy:
        raise UserError(f"{path}: holds no values of {metric}")
    size, seed = (
        int(match[1]) if value is None and (match := pattern.search(name)) else value
        for value, pattern in zip(known, (NAME, SEED))
    )
    measure = "reward" if "/reward/" in metric else "accuracy"
    return Run(name, size, seed, dict(sorted(accuracy.items())), measure)


def _numbers(metrics: dict) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if type(value) in (int, float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _read(path: Path) -> str:
    with one_line_errors(path, "read"):
        return path.read_bytes().decode("utf-8-sig", errors="replace")


def _manifest_runs(path: Path, metric: str | None) -> list[Run]:
    runs = []
    try:
        entries = json.loads(_read(path))["runs"]
        planned = [(str(each["run_dir"]), int(each["group_size"]), int(each["seed"])) for each in entries]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: is no manifest of sweep_group_size.sh; remove it and start the sweep again, finished runs are skipped"
        ) from None
    for run_dir, size, seed in planned:
        rows = _attempts(path.parent / run_dir / "logs")
        if any(VALIDATION.fullmatch(key) or key == metric for _, metrics in rows for key in metrics):
            runs.append(_run(run_dir, rows, metric, path, (size, seed)))
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
            f"{path}: give the manifest.json of a sweep, a file of train_group_sizes.py, a run folder, or a JSONL log"
        ) from None
    if not runs:
        raise UserError(f"{path}: no run in it is finished yet")
    return runs


def _folder_runs(folder: Path, metric: str | None) -> list[Run]:
    if not (folder / "logs").is_dir():
        raise UserError(f"{folder}: is no run folder (no logs/) and no sweep (no manifest.json)")
    if not list((folder / "logs").glob(METRICS)):
        raise UserError(f'{folder}: has no logs/{METRICS}; train with "file" in trainer.logger, as the launcher does')
    return [_run(folder.resolve().name, _attempts(folder / "logs"), metric, folder, _run_json(folder / "run.json"))]


def _run_json(path: Path) -> tuple[int | None, int | None]:
    """G and seed from the overrides that a run was started with; None without a run.json of the launcher."""
    try:
        overrides = dict(text.partition("=")[::2] for text in json.loads(_read(path))["overrides"])
        return int(overrides["actor_rollout_ref.rollout.n"]), int(overrides["data.seed"])
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _attempts(folder: Path) -> Rows:
    """The rows of all attempts of a run, in order. An earlier attempt counts up to the first step of the next one."""
    rows: Rows = []
    for file in sorted(folder.glob(METRICS), key=lambda file: int(re.sub(r"\D", "", file.stem) or 0)):
        new = _jsonl_rows(file)
        first = min((step for step, _ in new), default=math.inf)
        rows = [(step, metrics) for step, metrics in rows if step < first] + new
    return rows


def _jsonl_rows(path: Path) -> Rows:
    rows: Rows = []
    lines = _read(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            rows.append((int(entry["step"]), _numbers(entry["data"])))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(lines):  # the last line of a killed run may be torn
                raise UserError(f'{path}, line {number}: no line of VERL\'s file logger ({{"step", "data"}})') from None
    return rows
