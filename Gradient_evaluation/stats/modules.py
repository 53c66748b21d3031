"""Where in the network does the variance live? Covariance traces per module, which add up to the whole.

A trace of covariance is a sum over parameters, so each module has its own trace, from its own Gram. Only six moments per
module and prompt are stored (``layer_moments``), not the Grams. They give vanilla, GRPO and oracle at any K; the formulas
are in blocks.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from Gradient_evaluation.stats.blocks import PairMoments, group_trace, pair_moments, prompt_only_coefficients, prompt_only_trace
from Gradient_evaluation.stats.bootstrap import PromptBootstrap


def layer_moments(grams: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Unbiased moments of every module from one block: grams (modules, B, B), rewards (B,) → (modules, 6).

    The columns are A, N, D of prompt_only_coefficients, then same_pair, shared_member, disjoint of pair_moments.
    """
    z = np.broadcast_to(rewards, (len(grams), len(rewards)))
    return np.concatenate([prompt_only_coefficients(grams, z), np.stack(pair_moments(grams, z), axis=-1)], axis=-1)


def traces(moments: np.ndarray, oracle_value: np.ndarray | None, K: int) -> dict[str, np.ndarray]:
    """{naive, grpo, oracleV: (prompts, modules)} at group size K from moments (prompts, modules, 6), V (prompts,).

    Without V there is no oracleV.
    """
    coefficients, pairs = moments[..., :3], PairMoments(*np.moveaxis(moments[..., 3:], -1, 0))
    found = {"naive": prompt_only_trace(coefficients, 0.0) / K, "grpo": group_trace(pairs, K)}
    if oracle_value is not None:
        found["oracleV"] = prompt_only_trace(coefficients, oracle_value[:, None]) / K
    return found


def by_layer(
    modules: Sequence[str],
    moments: Iterable[np.ndarray],
    oracle_values: Sequence[float | None],
    K_list: Sequence[int],
    bootstrap: PromptBootstrap,
) -> dict:
    """The entry ``by_layer`` of the results: means over prompts with 95% bootstrap-t intervals, JSON-ready.

    moments: one (modules, 6) per prompt. oracle_values: where one is None there is no oracleV. Returns {"modules": names,
    "trace_cov": {name: [[a value per module] per K]}, "trace_cov_ci95": the same shape with [low, high], None with one
    prompt}.
    """
    stacked, known = np.stack(list(moments)), None not in oracle_values
    values = np.asarray(oracle_values, dtype=np.float64) if known else None
    results: dict = {"modules": list(modules), "trace_cov": {}, "trace_cov_ci95": {}}
    for K in K_list:
        for name, per_prompt in traces(stacked, values, K).items():
            means = per_prompt.mean(0)
            low, high = np.percentile(bootstrap.draws(per_prompt), [2.5, 97.5], axis=0)
            ends = zip(np.minimum(low, means).tolist(), np.maximum(high, means).tolist())
            results["trace_cov"].setdefault(name, []).append(means.tolist())
            intervals = [list(pair) if len(stacked) > 1 else None for pair in ends]
            results["trace_cov_ci95"].setdefault(name, []).append(intervals)
    return results
