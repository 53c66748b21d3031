"""How many prompts, and how many continuations of each? The narrowest interval for the time (docs/long_runs.md).

The relative variance of a quantity from T prompts with n continuations each is

    (between + within / n + pairs / (n (n - 1))) / T

between: how much prompts differ. The rest is what sampling n continuations adds: U-statistics of them have a variance with a
term in 1/n and one in 1/(n (n - 1)), and ||theta(x)||^2, on which G* depends most, is nearly all of the second kind. A prompt
costs c_p + n c_s seconds, so the best n is that of least variance times cost, whatever the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from Gradient_evaluation.stats.blocks import MIN_BLOCK, pair_moments
from Gradient_evaluation.stats.estimators import moments_of
from Gradient_evaluation.stats.group_size.precision import G_STAR, Quantity
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches, pair_mean, pair_products
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.prompts import reduce_prompts

SMALL, LARGE = MIN_BLOCK, 2 * MIN_BLOCK  # continuations of the parts of a block that are compared
MOST = 1024  # continuations of a prompt that are considered
QUANTILE = 1.96


@dataclass(frozen=True)
class Spread:
    """The relative variance of one prompt's share in a quantity: between + within / n + pairs / (n (n - 1))."""

    between: float
    within: float
    pairs: float

    def at(self, n: int) -> float:
        """The variance with ``n`` continuations."""
        return self.between + self.within / n + self.pairs / (n * (n - 1))


def spread_of(quantity: Quantity, records: Sequence, theta: Sketches | None) -> Spread | Missing:
    """The spread of a quantity, from the parts of the blocks of some prompts.

    records: as ``reduce_prompts`` takes them; those without two parts of ``LARGE`` are left out. theta: the sketches of all,
    for G*. The quantity is taken as a sum over prompts to first order. The continuations of a prompt are cut into
    parts of ``SMALL`` and of ``LARGE``: how much the parts of one prompt differ gives ``within`` and ``pairs``, and what is
    left of the variance over prompts is ``between``. Missing where the prompts are fewer than two or say nothing.
    """
    kept = [index for index, record in enumerate(records) if len(_parts(record, LARGE)) > 1]
    if len(kept) < 2:
        return Missing(f"fewer than two prompts have {2 * LARGE} continuations in a block")
    parts = {size: [_parts(records[index], size) for index in kept] for size in (SMALL, LARGE)}
    shares = _shares(quantity, [records[index] for index in kept], parts, None if theta is None else _common(theta)[kept])
    if isinstance(shares, Missing):
        return shares
    noise = {size: float(np.mean([np.var(each, ddof=1) for each in shares[size]])) for size in (SMALL, LARGE)}
    design = np.array([[1 / size, 1 / (size * (size - 1))] for size in (SMALL, LARGE)])
    within, pairs = np.linalg.solve(design, [noise[SMALL], noise[LARGE]])
    if within < 0 or pairs < 0:  # by chance, or as it falls faster still: what the larger parts have, as one of the two terms
        within, pairs = (0.0, noise[LARGE] * LARGE * (LARGE - 1)) if within < 0 else (noise[LARGE] * LARGE, 0.0)
    means = [np.mean(each) for each in shares[LARGE]]
    count = np.mean([1 / len(each) for each in shares[LARGE]])
    between = float(np.var(means, ddof=1) - noise[LARGE] * count)
    if not max(between, within, pairs) > 0:
        return Missing("the prompts measured so far do not differ")
    return Spread(max(between, 0.02 * noise[SMALL]), float(within), float(pairs))


def _parts(record, size: int) -> list[tuple]:
    """The blocks of a record, cut into parts of ``size`` continuations."""
    return [
        (block[0][start : start + size, start : start + size], *(column[start : start + size] for column in block[1:3]))
        for block in record.blocks
        for start in range(0, len(block[1]) - size + 1, size)
    ]


def _common(theta: Sketches) -> np.ndarray:
    """(n,): what a prompt's products with the others take from its share in c1 = mean ||theta||^2 - ||mean theta||^2."""
    products = pair_products(theta.rows)
    return 2 * products.sum(1) / (len(products) - 1) - pair_mean(products)


def _shares(quantity: Quantity, records: Sequence, parts: dict, common: np.ndarray | None) -> dict | Missing:
    """{size: [each part's share in the quantity, to first order and relative to it, for each prompt]}."""
    if quantity.kind != G_STAR:
        found = {size: _columns(quantity, records, parts[size]) for size in parts}
        if isinstance(found[LARGE], Missing):
            return found[LARGE]
        slopes = _slopes(quantity, np.concatenate(found[LARGE], axis=1).mean(1))
        return {size: [slopes @ each for each in found[size]] for size in parts}
    if common is None:
        return Missing("no gradient sketches were stored")
    shares = {}
    for size in (LARGE, SMALL):
        pairs = [[pair_moments(gram, rewards) for gram, rewards, _ in each] for each in parts[size]]
        c1 = [np.array([p.theta_sq for p in each]) - shift for each, shift in zip(pairs, common)]
        c3 = [np.array([2 * p.zeta2 - 4 * p.zeta1 for p in each]) for each in pairs]
        if size == LARGE:
            mean_c1, mean_c3 = np.mean([each.mean() for each in c1]), np.mean([each.mean() for each in c3])
            if not mean_c3 > 0:
                return Missing("no reward of the prompts measured so far differs enough")
        if mean_c1 > 0:  # d G* / G* with G* = 1 + sqrt(c3 / c1)
            root = np.sqrt(mean_c3 / mean_c1)
            scale = root / (1 + root) / 2
            shares[size] = [scale * (b / mean_c3 - a / mean_c1) for a, b in zip(c1, c3)]
        else:  # c1, the term that is least known, decides alone
            shares[size] = [a / np.abs(np.concatenate(c1)).mean() for a in c1]
    return shares


def _columns(quantity: Quantity, records: Sequence, parts: Sequence[Sequence[tuple]]) -> list[np.ndarray] | Missing:
    """For each prompt (columns, parts): trace, or signal and trace, or the two traces."""
    several = [
        SimpleNamespace(oracle_value=record.oracle_value, blocks=[part], greedy_reward=getattr(record, "greedy_reward", None))
        for record, each in zip(records, parts)
        for part in each
    ]
    prompts = reduce_prompts(several, [quantity.K], quantity.names)
    moments = [moments_of(prompts, name, quantity.K) for name in quantity.names]
    if missing := [each.trace for each in moments if isinstance(each.trace, Missing)]:
        return missing[0]
    rows = [moments[0].signal, moments[0].trace] if quantity.kind == "snr" else [each.trace for each in moments]
    return np.split(np.stack(rows), np.cumsum([len(each) for each in parts])[:-1], axis=1)


def _slopes(quantity: Quantity, means: np.ndarray) -> np.ndarray:
    """Derivative of the quantity by each mean, over the quantity."""
    if quantity.kind == "snr":
        return np.array([1, -1]) / means
    return np.array([1.0]) / means if quantity.kind == "trace" else np.array([1, -1]) / (means[0] - means[1])


def best_continuations(spread: Spread, cost_per_prompt: float, cost_per_continuation: float) -> int:
    """The n >= 4 of least ``spread.at(n) (cost_per_prompt + n cost_per_continuation)``; costs in seconds."""
    sizes = np.arange(MIN_BLOCK, MOST + 1)
    variance = spread.between + spread.within / sizes + spread.pairs / (sizes * (sizes - 1))
    return int(sizes[np.argmin(variance * (cost_per_prompt + sizes * cost_per_continuation))])


def expected_half_width(spread: Spread, T: int, n: int) -> float:
    """Half the width of the 95% interval over the value, with T prompts of n continuations each."""
    return float(QUANTILE * np.sqrt(spread.at(n) / T))


def prompts_needed(spread: Spread, n: int, until: float) -> int:
    """How many prompts of n continuations each give an interval of +-``until``."""
    return int(np.ceil(spread.at(n) * (QUANTILE / until) ** 2))


def expected_seconds(T: int, n: int, cost_per_prompt: float, cost_per_continuation: float) -> float:
    """What T prompts of n continuations each take."""
    return T * (cost_per_prompt + n * cost_per_continuation)
