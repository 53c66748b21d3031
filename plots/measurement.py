"""What a run of run_tracecov.py left behind, read once for all pictures: its results and what its Grams say.

    measured = load_measurement("outputs/demo/tracecov_tiny_model.json", compare_at=4)

The Grams are those beside the results (``grams/``), or where the results say they were read from. Without them
the pictures that need none can still be drawn; the others say so in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.results.results_file import counted, load_results
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.estimators import ALL, moments_of
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.moments import Moments
from Gradient_evaluation.stats.prompts import PromptMoments


class Scores(NamedTuple):
    """One prompt's continuations: rewards (N,) and squared score norms ||g||^2 (N,)."""

    rewards: np.ndarray
    norm_sq: np.ndarray


@dataclass(frozen=True)
class Measurement:
    """Results, and from the Grams the moments and scores of every prompt, or a text that says why there are none.

    compared, reasons: as ``estimators`` and ``reasons`` of ``estimators.summarise``, of every estimator that the Grams
    allow, or without Grams of those in the results. The first entry of their lists is at K = ``compared_at``.
    """

    label: str
    results: dict
    grams: PromptMoments | str
    scores: list[Scores]
    compared_at: int
    compared: dict
    reasons: dict

    @property
    def moments(self) -> PromptMoments:
        """The prompts' moments. Raises UserError where there are no Grams."""
        if isinstance(self.grams, str):
            raise UserError(self.grams)
        return self.grams

    @property
    def bootstrap(self) -> PromptBootstrap:
        """The resamples of prompts that the results' intervals are of."""
        made = self.results.get("bootstrap") or {}
        return PromptBootstrap(len(self.moments), made.get("n_bootstrap", 2000), made.get("seed", 0))

    @property
    def values(self) -> np.ndarray:
        """(n,) V(x), or without an oracle table its estimate: the mean reward of the prompt's own continuations."""
        known = self.moments.oracle_value
        return self.moments.mean_reward if isinstance(known, Missing) else known

    @property
    def n(self) -> str:
        """How many prompts the pictures are of: ``"n = 40 prompts"``."""
        return f"n = {counted(len(self.moments), 'prompt')}"

    @property
    def value_label(self) -> str:
        """What ``values`` are, for the label of their axis."""
        if isinstance(self.moments.oracle_value, Missing):
            return "V(x), estimated by the prompt's mean reward"
        return f"V(x): {'probability of a right answer' if self.moments.zero_one else 'expected reward'}"

    def at(self, name: str, group_size: int) -> Moments:
        """One closed-form estimator's moments at any K. Raises UserError with the reason where it has none."""
        found = moments_of(self.moments, name, group_size)
        if isinstance(found.trace, Missing):
            raise UserError(f"{name}: {found.trace.reason}")
        return found


def load_measurement(path: str | Path, compare_at: int | None = None) -> Measurement:
    """Read a results JSON and its Grams, one prompt at a time.

    compare_at: the K at which estimators are compared (default: the least of K_list); this takes about 5 ms for each block
    of 64. UserError where the results or a Gram cannot be read.
    """
    path = Path(path)
    results = load_results(path)
    label, compare_at = path.stem.removeprefix("tracecov_"), compare_at or min(results["K_list"])
    folder = _grams_folder(path, results)
    if folder is None:
        why = f"there are no Grams beside {path.name}, and this picture needs them"
        compared, reasons = (results.get(name) or {} for name in ("estimators", "reasons"))
        return Measurement(label, results, why, [], results["K_list"][0], compared, reasons)
    scores: list[Scores] = []
    moments = estimators.reduce_prompts(_passing(folder, scores), [compare_at], ALL)
    bootstrap = PromptBootstrap(len(moments), seed=(results.get("bootstrap") or {}).get("seed", 0))
    summary = estimators.summarise(moments, [compare_at], bootstrap, ALL)
    return Measurement(label, results, moments, scores, compare_at, summary["estimators"], summary["reasons"])


def _grams_folder(path: Path, results: dict) -> Path | None:
    named = (results.get("config") or {}).get("from_grams")
    folders = [Path(named)] if named else []
    return next((folder for folder in (*folders, path.parent / "grams") if any(folder.glob("*.npz"))), None)


def _passing(folder: Path, scores: list[Scores]) -> Iterator:
    """The Gram records of a folder; the scores of each are appended to ``scores`` before it is yielded."""
    total = len(list(folder.glob("*.npz")))
    records: Iterable = gram_store.load_all(folder)
    for record in tqdm(records, "reading Grams", total, unit="prompt", disable=not sys.stderr.isatty()):
        scores.append(Scores(record.rewards, np.concatenate([np.diag(gram) for gram in record.grams])))
        yield record
