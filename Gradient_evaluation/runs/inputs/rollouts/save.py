"""The folder of --save_rollouts: one parquet file a prompt, in the format that own_format.py reads, and run.json.

run.json says which run samples into the folder. Another run stops with an error that names the difference. The same run goes
on: its draws are fixed by seed, prompt and number, so a prompt that is measured again gives the same file, and a run that asks
for more of each prompt adds to it.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row
from Gradient_evaluation.runs.machine.files import write_bytes_atomic, write_json
from Gradient_evaluation.runs.machine.resume import IDENTITY, output_folder, read_identity, refuse_difference
from Gradient_evaluation.sampling.generate import Continuation

NAMES = "[0-9a-f]" * 16 + ".parquet"
INT64 = 2**63


class RolloutsFolder:
    """Writes the continuations of a run's prompts. law: run_identity with the model_fingerprint, in every row."""

    def __init__(self, folder: str | Path, law: dict[str, Any]):
        self.folder, self.law = Path(folder), json.dumps(law, sort_keys=True)

    def save(
        self,
        row: Row,
        prompt_ids: Sequence[int],
        continuations: Sequence[Continuation],
        rewards: np.ndarray,
        components: dict[str, np.ndarray] | None = None,
        first: int = 0,
    ) -> None:
        """Write ``folder/<prompt id>.parquet``, the whole file or nothing. rewards (N,) and components: NaN is null.

        first: the number of the first of these continuations; those before it are taken from the file that is there.
        """
        n = len(continuations)
        columns = {
            **{name: [value] * n for name, value in _of_prompt(row, prompt_ids).items()},
            "response_ids": pyarrow.array([each.tokens for each in continuations], pyarrow.list_(pyarrow.int32())),
            "log_probs": _numbers(each.log_probs for each in continuations),
            "log_kept": _numbers(each.log_kept for each in continuations),
            "text": [each.text for each in continuations],
            "reward": _with_nulls(rewards),
            "ended": [each.ended for each in continuations],
            "law": [self.law] * n,
        }
        if any(each.mask is not None for each in continuations):
            columns["mask"] = [each.mask or (True,) * len(each.tokens) for each in continuations]
        if components:
            names, values = list(components), [_with_nulls(each) for each in components.values()]
            columns["rewards"] = [dict(zip(names, each)) for each in zip(*values)]
        buffer, table, path = io.BytesIO(), pyarrow.table(columns), self.folder / name_of(row.prompt_id)
        if first:
            before = pyarrow.parquet.read_table(path).slice(0, first)
            table = pyarrow.concat_tables([before, table], promote_options="permissive")
        pyarrow.parquet.write_table(table, buffer, compression="zstd")
        write_bytes_atomic(path, buffer.getvalue())


def name_of(prompt_id: int) -> str:
    """The file of a prompt."""
    return f"{prompt_id:016x}.parquet"


def _of_prompt(row: Row, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """What every row of a prompt says. A ground truth that a parquet column has no type for stands in ``columns``."""
    columns = {name: value for name, value in row.columns.items() if name != "prompt"}
    truth, said = row.ground_truth, {}
    if isinstance(truth, (str, float)) or isinstance(truth, int) and abs(truth) < INT64:
        said["ground_truth"] = truth
        columns.pop("ground_truth", None)
    prompt = {"prompt": row.prompt} if isinstance(row.prompt, str) else {"messages": json.dumps(row.prompt)}
    return {
        "prompt_id": f"{row.prompt_id:016x}",
        **prompt,
        "prompt_ids": list(prompt_ids),
        **said,
        "columns": json.dumps(columns),
    }


def _numbers(values: Iterable[np.ndarray | None]) -> pyarrow.Array:
    """A list of numbers for each continuation, in the precision they have; null for None."""
    values = list(values)
    wide = any(each is not None and each.dtype == np.float64 for each in values)
    return pyarrow.array(values, pyarrow.list_(pyarrow.float64() if wide else pyarrow.float32()))


def _with_nulls(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def check_folder(folder: str | Path, identity: dict[str, Any], overwrite: bool) -> None:
    """Raise UserError, before a model is loaded, for a folder of another run, or of files without a run.json.

    A run that asks for more ``continuations`` of each prompt is no other run.
    """
    path = output_folder(folder) / IDENTITY
    if overwrite:
        return
    if path.exists():
        found, count = read_identity(path), identity.get("continuations")
        if count is not None and found.get("continuations", count) < count:
            found["continuations"] = count
        refuse_difference(str(path), found, identity)
    elif next(path.parent.glob(NAMES), None) is not None:
        raise UserError(
            f"{path.parent}: holds rollouts but no {IDENTITY} that says what sampled them; pass --overwrite to remove them, or "
            "choose another --save_rollouts"
        )


def check_first(folder: str | Path, counts: dict[int, int]) -> None:
    """Raise UserError where a prompt that gets more continuations has not all earlier ones in the folder.

    counts: {prompt id: how many it has}.
    """

    def n_rows(path: Path) -> int:
        try:
            return pyarrow.parquet.read_metadata(path).num_rows
        except (OSError, pyarrow.ArrowException):
            return 0

    short = [each for each, count in counts.items() if n_rows(Path(folder) / name_of(each)) < count]
    if short:
        raise UserError(
            f"{folder}: lacks rollouts of {len(short)} of the prompts that get more continuations (measured before without "
            "--save_rollouts?); leave out --save_rollouts, or pass --overwrite to measure everything again"
        )


def begin_folder(folder: str | Path, identity: dict[str, Any], overwrite: bool) -> None:
    """``check_folder`` with the whole ``identity``, the model_fingerprint included; then write it. overwrite: start afresh."""
    check_folder(folder, identity, overwrite)
    if overwrite:
        for old in Path(folder).glob(NAMES):
            old.unlink()
    write_json(Path(folder) / IDENTITY, identity)


def note_missing(folder: str | Path, finished: Iterable[int]) -> None:
    """Say of how many prompts, ``finished`` before by id, the folder has no rollouts."""
    missing = sum(not (Path(folder) / name_of(prompt_id)).exists() for prompt_id in finished)
    if missing:
        print(
            f"note: {folder}: without the rollouts of {missing} prompt{'s' * (missing > 1)}, finished before without "
            "--save_rollouts; --overwrite measures everything again",
            file=sys.stderr,
        )
