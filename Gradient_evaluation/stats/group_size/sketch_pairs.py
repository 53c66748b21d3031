"""What do gradients of different prompts have in common? Inner products over pairs of prompts, from sketches.

||mean over x of theta(x)||^2 is the mean of <theta(x), theta(x')> over independent prompts x, x'. Each prompt has one
unbiased (sketched) gradient estimate, from its own continuations. The mean of their products over pairs x != x' is
unbiased; a prompt paired with itself would add the noise of its estimate. Two errors remain: that of the drawn prompts
(``pair_averages``) and that of the sketch, which more prompts do not reduce (``sketch_covariance``). Derived in
docs/method.md, section 5, and here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.bootstrap import ONE_PROMPT, Averages, Estimate, PromptBootstrap, not_above_zero

MIN_PROMPTS = 4  # for an interval: with fewer, too many resamples hold one prompt only
FEW_PROMPTS = f"fewer than {MIN_PROMPTS} prompts: there is no interval over pairs of prompts"


class SketchPart(NamedTuple):
    """The part of a sketch that one parameter has: the next ``rows * columns`` entries, row by row.

    A side that was compressed is random: its entries are exchangeable draws over the sketch matrices. A side that was
    short enough is stored as it is, and not random. A vector is one row that is not random.
    """

    rows: int
    columns: int
    random_rows: bool
    random_columns: bool


@dataclass(frozen=True)
class Sketches:
    """One sketch per prompt of its unbiased gradient estimate (GRPO's), and how it was made.

    Without ``layout`` and ``dim`` the rows are whole gradients; see ``sketch_covariance``.
    """

    rows: np.ndarray  # (n, S)
    layout: Sequence[SketchPart] | None = None
    dim: int | None = None


def pair_products(left: np.ndarray, right: np.ndarray | None = None) -> np.ndarray:
    """H (n, n) float64 with H_xy = (<left_x, right_y> + <left_y, right_x>) / 2 and zeros on its diagonal.

    left, right: (n, S) sketches, one row per prompt; without ``right``, <left_x, left_y>.
    """
    left = np.asarray(left, dtype=np.float64)
    products = left @ (left if right is None else np.asarray(right, dtype=np.float64)).T
    np.fill_diagonal(products, 0.0)
    return (products + products.T) / 2


def pair_mean(products: np.ndarray) -> float:
    """Mean over x != y of ``pair_products``: unbiased for <E left, E right>. NaN with one prompt."""
    n = len(products)
    return float(products.sum() / (n * (n - 1))) if n > 1 else float("nan")


def pair_mean_covariance(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Covariance (q, q) of the ``pair_mean`` of q symmetric tables (n, n) of the same prompts (n >= 4).

    See ``pair_variances``: Cov = 4 Cov(A) / n + 2 Cov(E) / (n (n - 1)).
    """
    n = len(tables[0])
    spread, noise = pair_variances(tables)
    return 4 * spread / n + 2 * noise / (n * (n - 1))


def pair_variances(tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Cov(A), Cov(E), each (q, q), in H_xy = P + A_x + A_y + E_xy of q symmetric tables (n, n), n >= 4.

    A two-way decomposition: the residuals of the least-squares fit give Cov(E) with n (n - 3) degrees of freedom. The
    spread of the fitted A_x is Cov(A) + Cov(E) / (n - 2). An estimated variance of A below 0 counts as 0.
    """
    n = len(tables[0])
    effects, residuals = [], []
    for table in tables:
        mean = pair_mean(table)
        effects.append((n - 1) / (n - 2) * (table.sum(1) / (n - 1) - mean))
        rest = table - mean - effects[-1][:, None] - effects[-1]
        np.fill_diagonal(rest, 0.0)
        residuals.append(rest.ravel())
    noise = np.array(residuals) @ np.array(residuals).T / (n * (n - 3))
    values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(effects)) - noise / (n - 2))
    return (vectors * np.clip(values, 0.0, None)) @ vectors.T, noise


def pair_averages(
    columns: Sequence[np.ndarray], tables: Sequence[np.ndarray], bootstrap: PromptBootstrap, errors: np.ndarray | None = None
) -> Averages:
    """Means of (n,) ``columns`` and then the ``pair_mean`` of ``tables`` (n, n), with their resamples; n >= 4.

    errors: (n_bootstrap, number of tables) draws of truth - value that come from the sketch and not from the prompts.

    A prompt drawn w_x times has w_x w_y pairs with y and none with its own copies (the diagonal is 0): their product is
    not one of independent estimates. The noise of single pairs is in the spread of such resamples three times instead
    of once: as such, and twice in each prompt's sum over its pairs, where it looks like a difference between prompts.
    It is in the resamples' own standard errors in the same way, because these come from the same sums. So the ratio of
    both has the right distribution, and it is multiplied by the standard error of ``pair_mean_covariance``.
    """
    n, count = bootstrap.n_prompts, len(columns)
    plain = np.stack([np.asarray(column, dtype=np.float64) for column in columns], -1) if count else np.zeros((n, 0))
    means = np.array([*plain.mean(0), *map(pair_mean, tables)])
    effects = [2 * (table.sum(1) / (n - 1) - pair_mean(table)) for table in tables]
    influence = np.concatenate([plain - plain.mean(0), np.stack(effects, -1)], axis=1)
    covariance = influence.T @ influence / n**2
    covariance[count:, count:] = pair_mean_covariance(tables) * (n - 1) / n  # as the others: no degree of freedom off
    resampled, again = (
        np.concatenate(parts)
        for parts in zip(*(_resample(counts, plain, tables, means) for counts in bootstrap.counts_in_parts()))
    )
    others = None if errors is None else np.concatenate([np.zeros((len(errors), count)), errors], axis=1)
    return Averages(means, covariance, resampled, again, others)


def _resample(counts: np.ndarray, plain: np.ndarray, tables: Sequence[np.ndarray], means: np.ndarray):
    """The averages (b, q) of resamples in which prompt x stands counts[:, x] times, and their covariances (b, q, q)."""
    n = plain.shape[0]
    averages = counts @ plain / n
    influence = [column - mean[:, None] for column, mean in zip(plain.T, averages.T)]
    found = list(averages.T)
    pairs, partners = n**2 - (counts**2).sum(1), n - counts
    for table, mean in zip(tables, means[plain.shape[1] :]):
        sums = counts @ table
        # a resample of one prompt only has no pair: it gets the mean
        found.append(np.divide((sums * counts).sum(1), pairs, out=np.full(len(counts), mean), where=pairs > 0))
        own = np.divide(sums, partners, out=np.full_like(sums, mean), where=partners > 0)
        influence.append(2 * (own - found[-1][:, None]))
    stacked = np.stack(influence, axis=-1)
    weighted = (stacked * counts[:, :, None]).swapaxes(1, 2) @ stacked
    return np.stack(found, axis=-1), weighted / n**2


def sketch_covariance(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], layout: Sequence[SketchPart] | None, sketch_dim: int | None
) -> np.ndarray:
    """Covariance (q, q) that the sketch's random matrices give to the q pair means of (left, right), each (n, S).

    A parameter's part of a pair mean is the sum of a table with one row and one column per sketch dimension. Its rows
    and columns are exchangeable, so a two-way analysis of variance of this one table estimates the variance of its sum
    without bias. Parameters are independent. The result includes the sketch's share in the noise of single pairs, which
    is in the resamples too: intervals are a little too wide, not too narrow.

    Without a ``layout`` a bound is used: relative standard deviation 2 sqrt(1/k + 1/k^2), that of one matrix of rank 1
    and dimension k = ``sketch_dim``, fully correlated between pair means. Without both it is 0: the rows are whole
    gradients.
    """
    n = len(pairs[0][0])
    if n < 2 or (layout is None and sketch_dim is None):
        return np.zeros((len(pairs), len(pairs)))
    if layout is None:
        values = np.array([pair_mean(pair_products(*pair)) for pair in pairs])
        return 4 * (1 / sketch_dim + 1 / sketch_dim**2) * np.outer(values, values)
    entries = np.stack([_entrywise_pair_means(*pair) for pair in pairs])
    ends = np.cumsum([part.rows * part.columns for part in layout])
    if ends[-1] != entries.shape[1]:
        raise ValueError(f"the sketch has {entries.shape[1]} entries, its layout {ends[-1]}")
    tables = np.split(entries, ends[:-1], axis=1)
    return sum(_covariance_of_sum(t.reshape(-1, p.rows, p.columns), p) for t, p in zip(tables, layout))


def _entrywise_pair_means(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    n = len(left)
    sums = left.sum(0, dtype=np.float64) * right.sum(0, dtype=np.float64)
    return (sums - np.einsum("xs,xs->s", left, right, dtype=np.float64)) / (n * (n - 1))


def _covariance_of_sum(table: np.ndarray, part: SketchPart) -> np.ndarray:
    """Covariance (q, q) of the sums of tables (q, rows, columns) over exchangeable rows and/or columns."""
    if not part.random_rows:
        return _covariance_of_columns(table.sum(1)) if part.random_columns else np.zeros((len(table),) * 2)
    if not part.random_columns:
        return _covariance_of_columns(table.sum(2))
    # Sums of squares of rows + columns - rest, each over its degrees of freedom, times the number of entries
    rows, columns = _covariance_of_columns(table.sum(2)), _covariance_of_columns(table.sum(1))
    rest = table - table.mean(1, keepdims=True) - table.mean(2, keepdims=True) + table.mean((1, 2), keepdims=True)
    size = part.rows * part.columns / ((part.rows - 1) * (part.columns - 1))
    return rows + columns - size * np.einsum("iab,jab->ij", rest, rest)


def _covariance_of_columns(values: np.ndarray) -> np.ndarray:
    """Covariance (q, q) of the sums over m exchangeable columns of values (q, m): m times the sample covariance."""
    if values.shape[1] < 2:
        raise ValueError("the sketch's error needs a sketch dimension of at least 2")
    return values.shape[1] * np.atleast_2d(np.cov(values))


def sketch_draws(covariance: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Normal draws (count, q) of the sketch's error; eigenvalues of an estimated covariance below 0 count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.clip(values, 0.0, None))
    return np.random.default_rng([seed, 1]).standard_normal((count, len(covariance))) @ root.T


def squared_norm_draws(value: float, standard_error: float, count: int, seed: int) -> np.ndarray:
    """Draws (count,) of truth - ``value`` for a squared norm that a sketch gives with this ``standard_error``.

    Such a value is about truth * chi^2_m / m with m = 2 (value / standard_error)^2: errors are skewed, and small values
    have small standard errors. So the draws are of value * (m / chi^2_m - 1), normal as m grows. For one matrix of rank
    1 to 8, 95% intervals contained the truth 86% of the time at k = 6 and 91% at k = 12 (from normal draws 78% and 87%).
    m is at least 8 (a relative error of 1/2): a smaller value says too little about m.
    """
    if not standard_error > 0:
        return np.zeros(count)
    freedom = max(8.0, 2 * (value / standard_error) ** 2) if value > 0 else 8.0
    ratio = freedom / np.random.default_rng([seed, 1]).chisquare(freedom, count)
    return standard_error * np.sqrt(freedom / 2) * (ratio - 1)


def prompt_averaged_cosines(
    sketches: np.ndarray, names: Sequence[str], theta: Sketches, bootstrap: PromptBootstrap
) -> dict[str, dict]:
    """Cosine between each estimator's gradient averaged over prompts and theta averaged over prompts.

    sketches: (n, E, S), for each prompt the sketch of the mean of each of the E ``names``, made as those of ``theta``.
    {name: {cosine, ci95, reason}}: <m_e, m> / sqrt(||m_e||^2 ||m||^2), each of the three from products over pairs
    x != x', so it may be a little above 1; 95% intervals over prompts and sketch. Null with the reason where the interval
    of a squared norm is not above 0, or there are too few prompts.
    """
    result = {}
    for index, name in enumerate(names):
        own = sketches[:, index]
        pairs = [(own, theta.rows), (own, own), (theta.rows, theta.rows)]
        covariance = sketch_covariance(pairs, theta.layout, theta.dim)
        errors = sketch_draws(covariance, bootstrap.n_bootstrap, bootstrap.seed)
        estimate = _cosine([pair_products(*pair) for pair in pairs], errors, bootstrap, name)
        result[name] = {"cosine": estimate.value, "ci95": estimate.interval, "reason": estimate.reason}
    return result


def _cosine(products: Sequence[np.ndarray], errors: np.ndarray, bootstrap: PromptBootstrap, name: str) -> Estimate:
    if bootstrap.n_prompts < MIN_PROMPTS:
        return Estimate(None, None, ONE_PROMPT if bootstrap.n_prompts == 1 else FEW_PROMPTS)
    averages = pair_averages([], products, bootstrap, errors)
    for square, what in ((lambda inner, own, other: own, name), (lambda inner, own, other: other, "theta")):
        reason = not_above_zero(bootstrap.interval(averages.draws(square)[1]), f"||mean {what}||^2 over prompts")
        if reason:
            return Estimate(None, None, reason)
    return bootstrap.estimate(*averages.draws(lambda inner, own, other: inner / np.sqrt(own * other)))
