"""One prompt's Grams, rewards and lengths as an .npz file: all that any estimator and group size needs.

``save`` is atomic (a killed run leaves no half file) and deterministic (the same record gives the same bytes).
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import write_bytes_atomic

# What NumPy and we raise on a file that is damaged or is no Gram file.
DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, NotImplementedError, zipfile.BadZipFile, zlib.error)
# The fields of a record that are one JSON text in the file, and the arrays that not every record has.
IN_JSON = "prompt_id index prompt ground_truth oracle_value n_oracle modules sketch_names greedy_reward order columns".split()
OPTIONAL = (
    "module_moments module_oracle sketch sketch_layout log_weights components component_sketch metric_sketch kl kl_sketch"
).split()
MORE_GRAMS = {"metric_grams": 1, "kl_grams": 2}  # and how many rows of each there are for a continuation
LONGEST_TEXT = 200  # characters of a column that --by can name
# The same of JSON texts: of several rewards, or of continuations that were left out.
OPTIONAL_IN_JSON = "n_left_out component_names component_weights oracle_components greedy_components rollouts_check".split()


@dataclass(frozen=True)
class GramRecord:
    """The measurement of one prompt: N continuations in blocks of B_1, B_2, ... (summing to N).

    prompt_id, prompt, ground_truth: as in the oracle table. index: of the prompt's row there. order: of the prompt in the
    seeded order in which the run takes prompts; None in older files. oracle_value: V(x), or None; n_oracle: how many
    continuations it is the mean of, or None. columns: ``scalar_columns`` of the prompt's row; None in older files.
    rewards, lengths (tokens, the end of sequence included), log_probs: (N,). grams: one (B, B) float64 per block,
    Q[i, j] = <g_i, g_j>. With --by_layer, modules: their names, and module_moments: (modules, 6) of stats/modules.py; else
    None. Where there is no oracle_value, module_oracle: (modules,), the trace of each module at a cross-fitted V(x), if there
    are two blocks. With --sketch_dim, sketch: (E, S) float32 or float64, the sketch of each mean gradient of ``sketch_names``
    ("grpo" first), averaged over blocks by size, and sketch_layout: (parameters, 4) of GradientSketch.layout; else None.
    greedy_reward: of the greedy continuation, or None. log_weights: (N,) log of the importance weights, up to a constant, of
    continuations that another law drew; else None. rollouts_check: of --rollouts, what runs/inputs/rollouts/compare.py found.
    metric_grams, metric_sketch: grams and sketch in the metric of --optimizer_state; None without it.
    With --ref_model, kl_grams: one (2B, 2B) per block, of its scores and then of the same continuations' token-weighted scores
    (stats/kl.py); kl_sketch (S,): of the mean of these; kl (N,): the sum over tokens of k3.
    n_left_out: continuations that had no reward (None), which are in none of the arrays; None for 0.

    Of C rewards where there are several, else None: components (C, N), NaN where a reward is None; their names and weights
    (rewards is the weighted sum); oracle_components: V(x) of each, or None; greedy_components: of the greedy continuation,
    or None; component_sketch (C, S): the sketch of the gradient of each, as ``sketch`` has it of the weighted sum.
    """

    prompt_id: int
    index: int
    prompt: object
    ground_truth: object
    oracle_value: float | None
    n_oracle: int | None
    rewards: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    grams: list[np.ndarray]
    modules: list[str] | None = None
    module_moments: np.ndarray | None = None
    sketch: np.ndarray | None = None
    sketch_names: list[str] | None = None
    sketch_layout: np.ndarray | None = None
    greedy_reward: float | None = None
    order: int | None = None
    columns: dict[str, str | int | float | bool] | None = None
    n_left_out: int | None = None
    components: np.ndarray | None = None
    component_names: list[str] | None = None
    component_weights: list[float] | None = None
    oracle_components: list[float] | None = None
    greedy_components: list[float | None] | None = None
    component_sketch: np.ndarray | None = None
    module_oracle: np.ndarray | None = None
    rollouts_check: dict | None = None
    log_weights: np.ndarray | None = None
    metric_grams: list[np.ndarray] | None = None
    metric_sketch: np.ndarray | None = None
    kl_grams: list[np.ndarray] | None = None
    kl_sketch: np.ndarray | None = None
    kl: np.ndarray | None = None

    @property
    def kl_blocks(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """[(gram (2B, 2B), rewards (B,), lengths (B,)), ...]"""
        return [(gram, *block[1:3]) for gram, block in zip(self.kl_grams, self.blocks)]

    def in_metric(self) -> GramRecord:
        """The record with its Grams and sketch in the optimiser's metric in the place of the plain ones."""
        plain_only = dict.fromkeys(("component_sketch", "modules", "module_moments", "module_oracle"))
        return replace(self, grams=self.metric_grams, sketch=self.metric_sketch, **plain_only)

    @property
    def mean_reward(self) -> float:
        """Of the continuations; with log_weights their weighted mean."""
        return float(np.average(self.rewards, weights=self._weights) if self.log_weights is not None else self.rewards.mean())

    @property
    def sizes(self) -> list[int]:
        """Of its blocks."""
        return [len(gram) for gram in self.grams]

    @property
    def n_drawn(self) -> int:
        """How many continuations were drawn: those that are measured, and those without a reward."""
        return len(self.rewards) + (self.n_left_out or 0)

    @property
    def _weights(self) -> np.ndarray:
        return np.exp(self.log_weights - self.log_weights.max())

    @property
    def blocks(self) -> list[tuple[np.ndarray, ...]]:
        """[(gram (B, B), rewards (B,), lengths (B,), weights (B,) where there are log_weights), ...] as stats/ reads them."""
        columns = [self.rewards, self.lengths]
        if self.log_weights is not None:
            columns.append(self._weights)
        ends = np.cumsum(self.sizes)
        return [(gram, *(column[end - len(gram) : end] for column in columns)) for gram, end in zip(self.grams, ends)]

    def save(self, folder: Path) -> None:
        """Write ``folder/<prompt id>.npz``, the whole file or nothing."""
        about = {name: getattr(self, name) for name in IN_JSON}
        about |= {name: getattr(self, name) for name in OPTIONAL_IN_JSON if getattr(self, name) is not None}
        extra = {name: getattr(self, name) for name in OPTIONAL if getattr(self, name) is not None}
        for name in MORE_GRAMS:
            if (grams := getattr(self, name)) is not None:
                extra[name] = np.concatenate([gram.ravel() for gram in grams])
        buffer = io.BytesIO()
        np.savez(
            buffer,
            **extra,
            about=np.array(json.dumps(about, ensure_ascii=False)),
            rewards=self.rewards,
            lengths=self.lengths,
            log_probs=self.log_probs,
            block_sizes=np.array(self.sizes),
            grams=np.concatenate([gram.ravel() for gram in self.grams]),
        )
        write_bytes_atomic(path_of(folder, self.prompt_id), buffer.getvalue())


def scalar_columns(columns: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Those columns of a row by which results can be told apart: numbers, booleans, and text of at most 200 characters."""
    return {
        name: value
        for name, value in columns.items()
        if name not in ("prompt", "ground_truth")
        and (isinstance(value, (int, float)) or isinstance(value, str) and len(value) <= LONGEST_TEXT)
    }


def path_of(folder: Path, prompt_id: int) -> Path:
    """The file of one prompt."""
    return folder / f"{prompt_id:016x}.npz"


@contextmanager
def _readable(path: Path, fix: str) -> Iterator[None]:
    """Raise UserError that names the file and the fix when what is read inside is damaged."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except DAMAGE as error:
        raise UserError(f"{path}: not a Gram file of this toolkit ({type(error).__name__}); {fix}") from None


def load(path: Path) -> GramRecord:
    """Read one record. Raises UserError naming the file when it is not one."""
    with _readable(path, "delete it and run run_tracecov.py again"):
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
        about = json.loads(str(data["about"]))
        sizes = data["block_sizes"].tolist()
        checked = [name for name in ("grams", "rewards", "lengths", "log_probs", *MORE_GRAMS) if name in data]
        if not all(np.isfinite(data[name]).all() for name in checked):
            raise ValueError("not finite")
        if path.stem != path_of(path.parent, about["prompt_id"]).stem:
            raise ValueError("of another prompt")
        return GramRecord(
            **about,
            **{name: data.get(name) for name in OPTIONAL},
            rewards=data["rewards"],
            lengths=data["lengths"],
            log_probs=data["log_probs"],
            grams=_squares(data["grams"], sizes),
            **{name: _squares(data[name], [times * n for n in sizes]) for name, times in MORE_GRAMS.items() if name in data},
        )


def n_drawn(path: Path) -> int:
    """``GramRecord.n_drawn`` of a file, without its Grams. Raises UserError naming the file when it is not one."""
    with _readable(path, "delete it and run run_tracecov.py again"), np.load(path, allow_pickle=False) as file:
        return int(file["block_sizes"].sum()) + (json.loads(str(file["about"])).get("n_left_out") or 0)


def _squares(flat: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Matrices of these sizes, which lie one behind the other."""
    pieces = np.split(flat, np.cumsum([size * size for size in sizes])[:-1])
    return [piece.reshape(size, size) for piece, size in zip(pieces, sizes)]


class Records:
    """Gram records that can be gone through more than once, one in memory at a time."""

    def __init__(self, read: Callable[[], Iterator[GramRecord]]):
        self.read = read

    def __iter__(self) -> Iterator[GramRecord]:
        return self.read()


def load_all(folder: Path) -> Iterator[GramRecord]:
    """The records of a folder that belong together, in the order of the oracle table, one in memory at a time."""
    for path in belonging(folder)[0]:
        yield load(path)


def belonging(folder: Path) -> tuple[list[Path], str | None]:
    """The Gram files of a folder that are of one choice of prompts, in the order of the oracle table, and a note.

    A folder that an older version began holds Grams of the first rows of its table, without an ``order``. A run that
    continues it draws its prompts and gives those an order. The two together are no sample of the table, so where some
    have an order the others are left out; where none has one, all are of the older choice. The note says so, or is None.
    """
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(f"{folder}: holds no .npz files; give the grams folder of a run_tracecov.py run")
    found = []
    for path in paths:
        with _readable(path, "remove it"), np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            found.append((about["index"], path, about.get("order") is not None))
    found.sort()
    drawn = [path for _, path, is_drawn in found if is_drawn]
    if len(drawn) == len(found):
        return drawn, None
    if not drawn:
        return [path for _, path, _ in found], (
            f"{folder}: of a run that took the first rows of its table, not a random draw by --seed; all {len(found)} are used"
        )
    return drawn, (
        f"{folder}: {len(found) - len(drawn)} of its {len(found)} Grams are of a run that took the first rows of its table. "
        "They are not among the prompts drawn by --seed and are left out (an interrupted run_tracecov.py run: finish it first)"
    )
