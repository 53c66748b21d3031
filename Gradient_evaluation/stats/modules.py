"""Where in the network does the variance live? Covariance traces per module, which add up to the whole.

A trace of covariance is a sum over parameters, so each module has its own trace, from its own Gram. Only six moments per
module and prompt are stored (``layer_moments``), not the Grams. They give vanilla, GRPO and oracle at any K; the formulas
are in blocks.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from Gradient_evaluation.stats.blocks import (
    PairMoments,
    group_trace,
    pair_count,
    pair_moments,
    prompt_only_coefficients,
    prompt_only_trace,
)
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.weighted import Weights

NO_ORACLE = (
    "V(x) is not known, and its stand-in from other blocks is stored where a run without an oracle table has two blocks or "
    "more for each prompt: give --oracle_table, or measure with a larger --M or a smaller --block_size"
)


def layer_moments(grams: np.ndarray, rewards: np.ndarray, weights: Weights | None = None) -> np.ndarray:
    """Unbiased moments of every module from one block: grams (modules, B, B), rewards (B,), perhaps weights → (modules, 6).

    The columns are A, N, D of prompt_only_coefficients, then same_pair, shared_member, disjoint of pair_moments.
    """
    z = np.broadcast_to(rewards, (len(grams), len(rewards)))
    return np.concatenate(
        [prompt_only_coefficients(grams, z, weights), np.stack(pair_moments(grams, z, weights), axis=-1)], axis=-1
    )


def mean_moments(parts: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """(modules, 6): the mean over the blocks of one prompt; parts: ``layer_moments``, each a mean over blocks of ``sizes``.

    A block counts as in ``prompts.reduce_prompts``: by its size in A, N, D, by ``pair_count`` in moments of pairs.
    """
    continuations = [sum(each) for each in sizes]
    pairs = [sum(map(pair_count, each)) for each in sizes]
    halves = [np.average([part[:, :3] for part in parts], axis=0, weights=continuations)]
    return np.concatenate([*halves, np.average([part[:, 3:] for part in parts], axis=0, weights=pairs)], axis=-1)


def traces(moments: np.ndarray, oracle: np.ndarray | Missing, K: int) -> dict[str, np.ndarray | Missing]:
    """{naive, grpo, oracleV: (prompts, modules)} at group size K; moments: (prompts, modules, 6), oracle: ``oracle_traces``."""
    coefficients, pairs = moments[..., :3], PairMoments(*np.moveaxis(moments[..., 3:], -1, 0))
    return {
        "naive": prompt_only_trace(coefficients, 0.0) / K,
        "grpo": group_trace(pairs, K),
        "oracleV": oracle if isinstance(oracle, Missing) else oracle / K,
    }


def oracle_traces(
    moments: np.ndarray, values: Sequence[float | None], cross_fitted: Sequence[np.ndarray | None]
) -> np.ndarray | Missing:
    """(prompts, modules): the trace of one continuation's term g (Z - V(x)), or why it is not known.

    moments: (prompts, modules, 6); values: V(x) of each prompt; cross_fitted: of each prompt (modules,) of
    ``cross_fitted_oracle``, taken where a prompt has no V(x).
    """
    if all(value is not None for value in values):
        return prompt_only_trace(moments[..., :3], np.asarray(values, dtype=np.float64)[:, None])
    if all(each is not None for each in cross_fitted):
        return np.stack(list(cross_fitted))
    return Missing(NO_ORACLE)


def by_layer(
    modules: Sequence[str],
    moments: Iterable[np.ndarray],
    oracle: np.ndarray | Missing,
    K_list: Sequence[int],
    bootstrap: PromptBootstrap,
) -> dict:
    """The entry ``by_layer`` of the results: means over prompts with 95% bootstrap-t intervals, JSON-ready.

    moments: one (modules, 6) per prompt; oracle: ``oracle_traces``. Returns {"modules": names, "trace_cov": {name: [[a
    value per module] per K]}, "trace_cov_ci95": the same shape with [low, high], None with one prompt}. A curve that is
    not known is Missing instead of its list.
    """
    stacked = np.stack(list(moments))
    results: dict = {"modules": list(modules), "trace_cov": {}, "trace_cov_ci95": {}}
    for K in K_list:
        for name, per_prompt in traces(stacked, oracle, K).items():
            if isinstance(per_prompt, Missing):
                results["trace_cov"][name] = results["trace_cov_ci95"][name] = per_prompt
                continue
            means = per_prompt.mean(0)
            low, high = np.percentile(bootstrap.draws(per_prompt), [2.5, 97.5], axis=0)
            ends = zip(np.minimum(low, means).tolist(), np.maximum(high, means).tolist())
            results["trace_cov"].setdefault(name, []).append(means.tolist())
            intervals = [list(pair) if len(stacked) > 1 else None for pair in ends]
            results["trace_cov_ci95"].setdefault(name, []).append(intervals)
    return results
