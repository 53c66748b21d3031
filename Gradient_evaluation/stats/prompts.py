"""What does the comparison of estimators need of each prompt? A few moments, taken in one pass; no Gram stays in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from Gradient_evaluation.stats.blocks import (
    MIN_BLOCK,
    GroupMoments,
    PairMoments,
    group_moments,
    mixture_coefficients,
    off_diagonal,
    pair_count,
    pair_moments,
    prompt_only_coefficients,
    prompt_only_trace,
)
from Gradient_evaluation.stats.estimators import group_rules
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.silent_groups import RewardCounts, reward_counts
from Gradient_evaluation.stats.weighted import WeightedCounts, self_normalised

RIGHT = 0.5  # a reward of 0 or 1 above this is that of a right answer
# All continuations; for rewards of 0 and 1 the right and the wrong ones; for other rewards those above V(x) or not. Where V(x)
# is not known, those above the mean reward of the prompt's own continuations or not.
CLASSES = ("all", "right", "wrong", "above", "not_above")
NO_GREEDY = "no greedy continuation was sampled; measure with --estimators greedy"
NO_VALUE = "no oracle value V(x)"
NO_OTHER_BLOCK = (
    "without an oracle table V(x) comes from a prompt's other blocks, and there is only one block; raise --M, lower "
    "--block_size or give --oracle_table"
)


@dataclass(frozen=True)
class PromptMoments:
    """Moments of n prompts, averaged over each prompt's blocks; arrays are float64 with n in front."""

    oracle_value: np.ndarray | Missing  # (n,) V(x)
    greedy_reward: np.ndarray | Missing  # (n,) reward of the greedy continuation
    mean_reward: np.ndarray  # (n,) mean reward of the prompt's own continuations
    centre: np.ndarray  # (n,) what is taken off the rewards and baselines in coefficients and mixture, so that digits stay
    coefficients: np.ndarray  # (n, 3) A, N, D of prompt_only_coefficients
    best_trace: np.ndarray | Missing  # (n,) per-continuation trace at the cross-fitted b*
    pairs: PairMoments  # three (n,)
    theta_sq_noise: np.ndarray  # (n,) variance of pairs.theta_sq over continuations, from block to block; NaN: one block
    pairs_by_length: PairMoments  # three (n,), of the scores g / length
    mixture: np.ndarray  # (n, 2) u, v of mixture_coefficients
    groups: Mapping[tuple[str, int], GroupMoments]  # by kind of advantage and K: three (n,)
    outcomes: Sequence[RewardCounts | WeightedCounts]  # n: the rewards of all continuations of a prompt, and their lengths
    score_mean_sq: np.ndarray  # (n,) unbiased ||E g||^2
    score_evidence: np.ndarray  # (n, 3) of those of the blocks whose scores differ: their sum, sum of squares and number
    score_norm_sq: np.ndarray  # (n, 5) mean over all continuations of ||g||^2 times each indicator of CLASSES
    outcome_share: np.ndarray  # (n, 5) share of the continuations in each of CLASSES
    n_outcomes: np.ndarray  # (n, 5) number of continuations in each of CLASSES
    n_blocks: np.ndarray  # (n,)
    cross_fitted_trace: np.ndarray | Missing = Missing(
        NO_OTHER_BLOCK
    )  # (n,) per-continuation trace at V(x), V from other blocks
    block_terms: Sequence[np.ndarray] = ()  # n of (n_blocks, 3): 4 zeta1 and 2 zeta2 - 4 zeta1 of each block, and pair_count
    reduced: Sequence[dict] = ()  # n: what ``select`` makes these moments of, for some of the prompts

    def __len__(self) -> int:
        return len(self.n_blocks)

    def select(self, positions: Sequence[int]) -> PromptMoments:
        """The moments of some of the prompts, at these positions: as if only their records had been read."""
        return _together([self.reduced[position] for position in positions])

    @property
    def weighted(self) -> bool:
        """Whether the continuations of a prompt have importance weights that differ."""
        return any(isinstance(each, WeightedCounts) for each in self.outcomes)

    @property
    def V_source(self) -> str | Missing:
        """Where the oracle's V(x) comes from: "table", or "cross-fitted" (from other blocks) where a prompt has none."""
        if not isinstance(self.oracle_value, Missing):
            return "table"
        return self.cross_fitted_trace if isinstance(self.cross_fitted_trace, Missing) else "cross-fitted"

    @property
    def zero_one(self) -> bool:
        """Whether every reward of every prompt is 0 or 1."""
        return all(each.zero_one for each in self.outcomes)

    @property
    def mean_length(self) -> float:
        """Mean number of tokens of a continuation: the mean over prompts of the mean over their continuations."""
        return float(np.mean([each.mean_length for each in self.outcomes]))


def reduce_prompts(records: Iterable, K_list: Sequence[int] = (), names: Sequence[str] = ()) -> PromptMoments:
    """One pass over Gram records (any iterable; no record stays in memory).

    A record has ``oracle_value`` (float V(x), or None) and ``blocks``, a list of (gram (B, B), rewards (B,),
    lengths (B,)) with B >= 4, where B may differ; optionally ``greedy_reward`` (float). A fourth part of a block, weights
    (B,), are importance weights up to a factor (``weighted``). A block counts by its size in means
    over continuations, and by ``blocks.pair_count`` in moments of pairs and of groups.
    ``K_list`` matters only for those estimators among ``names`` that need resampled groups: the moments of their groups
    are computed here. Where one record has no V(x), the oracle's trace of every prompt comes from cross-fitted values
    (``cross_fitted_oracle``).

    Raises ValueError naming the prompt (its position, and ``record.prompt_id`` where there is one) and the block
    for a value that is not finite, a wrong shape, a length below 1, a weight below 0, or a block of fewer than 4; and
    for an unknown name.
    """
    cases = [(kind, size) for kind in dict.fromkeys(group_rules(names).values()) for size in K_list]
    prompts = [_reduce(record, index, cases) for index, record in enumerate(records)]
    if not prompts:
        raise ValueError("there are no prompts to average over")
    return _together(prompts)


def _together(prompts: list[dict]) -> PromptMoments:
    """The moments of several prompts, each as ``_reduce`` gives them."""
    columns = {name: [prompt[name] for prompt in prompts] for name in prompts[0]}
    whole = {name: _column(columns.pop(name)) for name in MAY_BE_MISSING}
    pairs = {name: PairMoments(*np.array(columns.pop(name)).T) for name in ("pairs", "pairs_by_length")}
    cases = [name for name in columns if isinstance(name, tuple)]  # a kind of advantage and K
    groups = {case: GroupMoments(*np.array(columns.pop(case)).T) for case in cases}
    ragged = {name: columns.pop(name) for name in ("outcomes", "block_terms")}
    arrays = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    return PromptMoments(**whole, **pairs, groups=groups, **ragged, reduced=prompts, **arrays)


BY_PAIRS = ("pairs", "pairs_by_length", "mixture", "score_mean_sq")  # others are means over continuations
MAY_BE_MISSING = ("oracle_value", "greedy_reward", "best_trace", "cross_fitted_trace")


def _column(values: list) -> np.ndarray | Missing:
    """An array, or the first reason (with a count) where some prompt has none: no average over some prompts only."""
    missing = [value for value in values if isinstance(value, Missing)]
    if missing:
        count = f" ({len(missing)} of {len(values)} prompts)" if len(values) > 1 else ""
        return Missing(missing[0].reason + count)
    return np.array(values, dtype=np.float64)


def _reduce(record, index: int, cases: Sequence[tuple[str, int]]) -> dict:
    name = f"prompt {index}"
    if getattr(record, "prompt_id", None) is not None:
        name += f" (id {record.prompt_id})"
    blocks = [_checked(block, f"{name}, block {number}") for number, block in enumerate(record.blocks)]
    if not blocks:
        raise ValueError(f"{name}: has no blocks")
    greedy = getattr(record, "greedy_reward", None)
    everything = [np.concatenate([block[part] for block in blocks]) for part in (1, 2, 3)]
    weights, sizes = self_normalised([block[3] for block in blocks]), [len(block[1]) for block in blocks]
    pairs = [pair_count(size) for size in sizes]
    weighted = bool((everything[2] != everything[2][0]).any())
    shift = everything[0].mean()  # with a large constant in the rewards A - 2 b N + b^2 D would lose all digits
    centred = [(gram, rewards - shift, each) for (gram, rewards, *_), each in zip(blocks, weights)]
    coefficients = [prompt_only_coefficients(*block) for block in centred]
    value = _number(record.oracle_value, f"{name}: the oracle value", NO_VALUE)
    mean_reward = [(w * rewards).mean() / shares[0] for (_, rewards, *_), (w, shares) in zip(blocks, weights)]
    centre = _mean_reward(everything, weighted) if isinstance(value, Missing) else value
    classes = [_classes(block[1], centre) * each.values for block, each in zip(blocks, weights)]  # a weight, or 0
    norms = [(np.diag(block[0]) * kinds).mean(-1) / each.shares[0] for block, kinds, each in zip(blocks, classes, weights)]
    score_mean_sq = np.array([off_diagonal(block[0], w, w) / shares[1] for block, (w, shares) in zip(blocks, weights)])
    means: dict = {
        "mean_reward": mean_reward,
        "coefficients": coefficients,
        "pairs": [pair_moments(block[0], block[1], each) for block, each in zip(blocks, weights)],
        "pairs_by_length": [
            pair_moments(gram / np.outer(length, length), rewards, each)
            for (gram, rewards, length, _), each in zip(blocks, weights)
        ],
        "mixture": [mixture_coefficients(*block) for block in centred],
        "score_mean_sq": score_mean_sq,
        "score_norm_sq": norms,
        "outcome_share": [kinds.mean(-1) / each.shares[0] for kinds, each in zip(classes, weights)],
    }
    return {
        **{name: np.average(values, axis=0, weights=pairs if name in BY_PAIRS else sizes) for name, values in means.items()},
        **{case: _mean_over_large_blocks(blocks, *case, weighted) for case in cases},
        "oracle_value": value,
        "greedy_reward": _number(greedy, f"{name}: the greedy reward", NO_GREEDY),
        "theta_sq_noise": _variance_of_mean([found.theta_sq for found in means["pairs"]], pairs),
        "block_terms": np.array(
            [(4 * each.zeta1, 2 * each.zeta2 - 4 * each.zeta1, count) for each, count in zip(means["pairs"], pairs)]
        ),
        "centre": shift,
        "score_evidence": _evidence(score_mean_sq, np.array(norms)[:, 0]),
        "best_trace": _best_trace(centred, np.array(coefficients)),
        "cross_fitted_trace": _oracle_trace(centred, np.array(coefficients)),
        "n_outcomes": np.sum([(_classes(block[1], centre)).sum(-1) for block in blocks], axis=0),
        "outcomes": WeightedCounts(*everything) if weighted else reward_counts(*everything[:2]),
        "n_blocks": len(blocks),
    }


def _mean_reward(everything: Sequence[np.ndarray], weighted: bool) -> float:
    """Mean of rewards, with weights where there are some: everything holds rewards, lengths and weights (n,)."""
    return float(np.average(everything[0], weights=everything[2]) if weighted else everything[0].mean())


def _evidence(mean_sq: np.ndarray, norm_sq: np.ndarray) -> np.ndarray:
    """(3,): sum, sum of squares and number of the blocks' estimates of ||E g||^2, of the blocks whose scores differ.

    norm_sq: mean ||g||^2 of each block. Where all scores of a block are equal the two are equal. One outcome was seen
    then, and its score is no more than rare outcomes, not seen, balance: the block cannot tell whether E g is 0.
    """
    telling = mean_sq[mean_sq < (1 - 1e-6) * norm_sq]
    return np.array([telling.sum(), (telling**2).sum(), len(telling)])


def _mean_over_large_blocks(blocks: Sequence[tuple], kind: str, group_size: int, weighted: bool) -> np.ndarray:
    """The three GroupMoments, each over the blocks that are large enough for it; NaN where none is, and for weighted ones."""
    if weighted:
        return np.full(3, np.nan)
    found = np.array([group_moments(block[:3], kind, group_size) for block in blocks])
    usable = ~np.isnan(found)
    counts = usable * np.array([[pair_count(len(block[1]))] for block in blocks])
    total = counts.sum(0)
    return np.where(total > 0, (counts * np.where(usable, found, 0.0)).sum(0) / np.maximum(total, 1), np.nan)


def _variance_of_mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """Estimated variance of the mean of independent values, weighted by ``counts``; NaN of one value.

    sum c (x - mean)^2 / ((m - 1) sum c): unbiased where the variance of a value falls as 1/c, or all counts are equal.
    """
    if len(values) < 2:
        return float("nan")
    squares = (np.asarray(values) - np.average(values, weights=counts)) ** 2
    return float(np.average(squares, weights=counts) / (len(values) - 1))


def _number(value, name: str, missing: str) -> float | Missing:
    if value is None:
        return Missing(missing)
    if not np.isfinite(value):
        raise ValueError(f"{name} is not finite ({value})")
    return float(value)


def _classes(rewards: np.ndarray, value: float) -> np.ndarray:
    """Indicators (5, B): which continuations belong to each of CLASSES; value: V(x), or the prompt's mean reward."""
    right, above = rewards > RIGHT, rewards > value
    return np.stack([np.ones_like(right), right, ~right, above, ~above]).astype(np.float64)


def _checked(block, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    gram, rewards, lengths, *weights = (np.asarray(part, dtype=np.float64) for part in block)
    size = len(rewards) if rewards.ndim == 1 else -1
    if gram.shape != (size, size) or lengths.shape != (size,):
        raise ValueError(
            f"{name}: the shapes of gram {gram.shape}, rewards {rewards.shape}, lengths {lengths.shape} do not agree"
        )
    if size < MIN_BLOCK:
        raise ValueError(f"{name}: has {size} continuations, needs at least {MIN_BLOCK}")
    for part, what in ((gram, "the Gram"), (rewards, "the rewards")):
        if not np.isfinite(part).all():
            raise ValueError(f"{name}: {what} has a value that is not finite (NaN or infinity)")
    if not (lengths >= 1).all():
        raise ValueError(f"{name}: a continuation has a length below 1")
    weight = weights[0] if weights else np.ones(size)
    if weight.shape != (size,) or not (np.isfinite(weight).all() and (weight >= 0).all() and weight.any()):
        raise ValueError(f"{name}: the importance weights are not {size} finite numbers of at least 0, one above 0")
    return gram, rewards, lengths, weight


def best_baselines(blocks: Sequence[tuple], weights: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """(n_blocks,): for each block b* = sum w Z ||g||^2 / sum w ||g||^2 over the OTHER blocks of the prompt.

    A b* of the block itself is fitted to the block's noise, and the trace is then biased low (0.89 of the truth at
    B = 16). The cross-fitted b* has the noise of the other blocks, so the trace is too high: by 10 to 20% with two blocks
    of 16 (the oracle may then be below it), by about 1% with sixteen.
    """
    weights = [np.ones(len(block[1])) for block in blocks] if weights is None else weights
    weighted = np.array([(w * block[1] * np.diag(block[0])).sum() for block, w in zip(blocks, weights)])
    square = np.array([(w * np.diag(block[0])).sum() for block, w in zip(blocks, weights)])
    # Sums over the others, not total minus own: a block must not reach its own baseline even by rounding.
    others = 1.0 - np.eye(len(blocks))
    numerator, denominator = others @ weighted, others @ square
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _best_trace(blocks: Sequence[tuple], coefficients: np.ndarray) -> float | Missing:
    if len(blocks) < 2:
        return Missing("the best prompt-only baseline of a block is fitted on the prompt's other blocks, and there is only one")
    traces = prompt_only_trace(coefficients, best_baselines(blocks, [each.values for *_, each in blocks]))
    return float(np.average(traces, weights=[len(rewards) for _, rewards, _ in blocks]))


def cross_fitted_values(rewards: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """(n_blocks, 2): for each block unbiased estimates of V and V^2 from the rewards of the OTHER blocks of the prompt.

    rewards: of each block, (B,). V is their mean. V^2 is the mean of Z_i Z_j over pairs of different continuations, since
    the square of the mean is too large by Var Z / n. NaN for a single block. With weights (B,) of each block both means
    are weighted and self-normalised.
    """
    weights = [np.ones(len(each)) for each in rewards] if weights is None else weights
    sums = np.array([[w.sum(), (w**2).sum(), (w * z).sum(), ((w * z) ** 2).sum()] for w, z in zip(weights, rewards)])
    # Sums over the others, not total minus own: a block must not reach its own V even by rounding.
    weight, weight_square, total, square = ((1.0 - np.eye(len(sums))) @ sums).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack([total / weight, (total**2 - square) / (weight**2 - weight_square)], axis=-1)


def cross_fitted_oracle(
    coefficients: np.ndarray, rewards: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """The trace of one continuation's term g (Z - V(x)), without bias and without an oracle table.

    coefficients: (n_blocks, ..., 3) A, N, D of prompt_only_coefficients of each block; rewards and weights: as
    ``cross_fitted_values``, of at least two blocks. Returns (...,): the mean over blocks, by size, of A - 2 V N + V^2 D with
    V and V^2 of ``cross_fitted_values``. These are independent of the block, and A - 2 V N + V^2 D is linear in them, so the
    mean is exact.
    """
    values = cross_fitted_values(rewards, weights).reshape(len(rewards), *[1] * (coefficients.ndim - 2), 2)
    constant, linear, quadratic = np.moveaxis(coefficients, -1, 0)
    traces = constant - 2 * values[..., 0] * linear + values[..., 1] * quadratic
    return np.average(traces, axis=0, weights=[len(each) for each in rewards])


def _oracle_trace(blocks: Sequence[tuple], coefficients: np.ndarray) -> float | Missing:
    if len(blocks) < 2:
        return Missing(NO_OTHER_BLOCK)
    return float(cross_fitted_oracle(coefficients, [block[1] for block in blocks], [each.values for *_, each in blocks]))
