"""How many steps does clipping by the global norm cut? The share of update batches with ||ghat_batch|| > c, from stored Grams.

A batch has B groups of different prompts, and its gradient is the mean of theirs:

    ||ghat_batch||^2 = (1/B^2) sum_x ||ghat_x||^2 + (1/B^2) sum_{x != y} <ghat_x, ghat_y>.

The first sum is drawn: B prompts, of each one of its resampled groups, whose squared norm its Gram has exactly. The Grams hold
no products between prompts. So the second sum is taken at its mean, (B-1)/B ||E ghat||^2, from the sketches (of GRPO's
gradient, times how much longer the estimator's own is, ||E[ghat | x]||^2 / ||theta(x)||^2 over all prompts). What is left out
is how that sum varies. Its standard deviation is about sqrt(2 tr(S^2)) / B, with S the mean covariance of a group, beside a
first sum of tr(S) / B: small where the noise has many directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.blocks import groups_of
from Gradient_evaluation.stats.bootstrap import ONE_PROMPT, PromptBootstrap
from Gradient_evaluation.stats.estimators import ESTIMATORS, batch_factor, moments_of, resolve
from Gradient_evaluation.stats.missing import Missing, with_reasons
from Gradient_evaluation.stats.moments import NO_WEIGHTED_GROUPS
from Gradient_evaluation.stats.prompts import PromptMoments

BATCHES, AT_ONCE = 4000, 2**20  # drawn; groups at a time
CELL = ("norm_sq", "norm_sq_std", "share", "share_ci95")


def clipped_names(names: Sequence[str]) -> list[str]:
    """GRPO and those of ``names`` whose weights come from the group alone, without dropped groups."""
    entries = {name: ESTIMATORS[name] for name in resolve(names)}
    return [name for name, entry in entries.items() if (entry.group or entry.advantages) and not entry.drop_silent]


def group_squares(records: Iterable, names: Sequence[str], sizes: Sequence[int]) -> dict[tuple[str, int], list[np.ndarray]]:
    """{(kind of advantages, G): of each prompt ||ghat||^2 of its resampled groups (m,), empty where G is above its blocks}.

    One pass over Gram records, see ``prompts.reduce_prompts``.
    """
    kinds = dict.fromkeys(kind_of(name) for name in names)
    found: dict[tuple[str, int], list[np.ndarray]] = {(kind, size): [] for kind in kinds for size in sizes}
    for record in records:
        for (kind, size), squares in found.items():
            blocks = [
                np.asarray(groups_of(block[:3], kind, size)[2]).ravel() for block in record.blocks if len(block[1]) >= size
            ]
            squares.append(np.concatenate(blocks) if blocks else np.zeros(0))
    return found


def kind_of(name: str) -> str:
    """The kind of advantages of an entry of ``clipped_names``."""
    return ESTIMATORS[name].group or ESTIMATORS[name].advantages


class Clip(NamedTuple):
    """Clipping by the global norm in a step of so many continuations."""

    threshold: float
    budget: int
    mean_norm_sq: float | Missing  # ||mean over prompts of theta||^2


def clipping(
    prompts: PromptMoments, squares: dict, names: Sequence[str], sizes: Sequence[int], clip: Clip, bootstrap: PromptBootstrap
) -> dict:
    """The share of steps whose gradient's norm is above the threshold, at each G of ``sizes``, JSON-ready.

    squares: of ``group_squares``. Returns {threshold, N: the budget, G, B: prompts of a step, estimators {name: norm_sq:
    E||ghat_batch||^2; norm_sq_std: its spread over batches; share; share_ci95}, reasons}, lists over G. The intervals are over
    prompts, with the norms of batches taken as normal.
    """
    rows = {}
    for name in names:
        cells = [_cell(prompts, squares[kind_of(name), size], (name, size), clip, bootstrap) for size in sizes]
        rows[name] = {key: [cell[key] for cell in cells] for key in CELL}
    counts = [clip.budget // size for size in sizes]
    return with_reasons({"threshold": clip.threshold, "N": clip.budget, "G": list(sizes), "B": counts, "estimators": rows})


def _cell(prompts: PromptMoments, squares: list[np.ndarray], case: tuple[str, int], clip: Clip, bootstrap) -> dict:
    """One estimator at one G: {norm_sq, norm_sq_std, share, share_ci95}."""
    name, size = case
    found, count = moments_of(prompts, name, size), clip.budget // size
    missing = [each for each in (found.signal, clip.mean_norm_sq) if isinstance(each, Missing)]
    if not all(map(len, squares)):
        missing = [Missing(f"G={size} needs a block of at least {size} continuations of every prompt")]
    if prompts.weighted:
        missing = [NO_WEIGHTED_GROUPS]
    if missing:
        return dict.fromkeys(CELL, missing[0])
    longer = found.signal.sum() / prompts.pairs.theta_sq.sum() if found.scale is None else found.scale**2
    between, factor = (count - 1) / count * longer * clip.mean_norm_sq, batch_factor(prompts, name) ** 2
    moments = [factor**power * np.array([(each**power).mean() for each in squares]) for power in (1, 2)]
    limit = count * (clip.threshold**2 - between)  # of the mean of ||ghat_x||^2 over the groups of a batch
    share = float((factor * _drawn(squares, count) / count > limit).mean())
    draws = np.concatenate([_normal_share(counts, moments, count, limit) for counts in bootstrap.counts_in_parts()])
    low, high = np.percentile(draws, [2.5, 97.5]).round(6)
    first, second = (part.mean() for part in moments)
    return {
        "norm_sq": float(first / count + between),
        "norm_sq_std": float(np.sqrt(max(0.0, second - first**2) / count**3)),
        "share": share,
        "share_ci95": [float(min(low, share)), float(max(high, share))] if len(prompts) > 1 else Missing(ONE_PROMPT),
    }


def _drawn(squares: list[np.ndarray], count: int) -> np.ndarray:
    """(BATCHES,): sums of ||ghat_x||^2 over ``count`` random prompts, of each a random group."""
    generator, sizes, flat = np.random.default_rng(0), np.array([len(each) for each in squares]), np.concatenate(squares)
    starts, sums = np.cumsum(sizes) - sizes, []
    step = max(1, AT_ONCE // count)
    for start in range(0, BATCHES, step):
        prompt = generator.integers(len(squares), size=(min(step, BATCHES - start), count))
        member = (generator.random(prompt.shape) * sizes[prompt]).astype(int)
        sums.append(flat[starts[prompt] + member].sum(1))
    return np.concatenate(sums)


def _normal_share(counts: np.ndarray, moments: Sequence[np.ndarray], count: int, limit: float) -> np.ndarray:
    """(b,): the share of normal means above ``limit``, for resamples in which prompt x stands counts[:, x] times."""
    mean, square = (counts @ part / len(part) for part in moments)
    spread = np.sqrt(np.maximum(square - mean**2, np.finfo(float).tiny) / count)
    return np.vectorize(math.erfc)((limit - mean) / spread / math.sqrt(2)) / 2
