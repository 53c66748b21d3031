"""Several rewards in one run: the Gram records of another weighting, and the results of each reward alone. Without a model.

A record of several rewards keeps the reward of every continuation from each of them (``components``), V(x) of each, and the
sketch of the gradient of each. Rewards, V(x) and GRPO's sketch are linear in the weights, so another weighting follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.rewards import OUT_OF_RANGE, squares_fit, weighted_sum
from Gradient_evaluation.runs.machine.gram_store import GramRecord

# What is stored for the weights of the run that made the Grams alone: why it is null under others.
OTHER_SKETCHES = "the sketches of the other estimators are those of the weights with which the Grams were made"
OTHER_LAYERS = "the moments of the modules are those of the weights with which the Grams were made"
# Of the results of all rewards together, the keys that each reward alone has too.
KEYS = ("conditional_on_x", "best_baseline", "theta_norm_sq", "signal_to_noise")


def reweighted(record: GramRecord, weights: Sequence[float]) -> GramRecord:
    """The record as a run with other weights of the same rewards would have made it, to rounding.

    None where that cannot be: oracle_value without V(x) of each reward, the moments of the modules, the sketches of other
    estimators than GRPO. Raises UserError for a record of one reward, and for totals that statistics cannot use.
    """
    if record.components is None:
        raise UserError("--reward_weights: these Grams have one reward; measure with several (--reward A B) to weigh them")
    rewards = weighted_sum(record.components, weights)
    if not all(map(squares_fit, rewards)):
        raise UserError(f"--reward_weights: a weighted sum of rewards {OUT_OF_RANGE}; choose others")
    oracle, greedy, sketch = record.oracle_components, record.greedy_components, record.component_sketch
    if greedy is not None:
        total = weighted_sum(np.array([greedy], dtype=np.float64).T, weights)[0]
        greedy = None if np.isnan(total) else float(total)
    return replace(
        record,
        rewards=rewards,
        component_weights=[float(weight) for weight in weights],
        oracle_value=None if oracle is None else float(np.dot(weights, oracle)),
        greedy_reward=greedy,
        sketch=None if sketch is None else (np.asarray(weights) @ sketch.astype(np.float64))[None].astype(sketch.dtype),
        sketch_names=None if sketch is None else record.sketch_names[:1],
        metric_sketch=None,
        modules=None,
        module_moments=None,
        module_oracle=None,
    )


def mean_given(values: np.ndarray) -> float | None:
    """The mean of the rewards (N,) of one prompt that are not NaN; None where all are."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def by_reward(
    records: Iterable[GramRecord], names: Sequence[str], weights: Sequence[float], summarise: Callable[[Iterable], dict]
) -> dict[str, dict]:
    """{name: results of one reward alone}: as if its weight were 1 and those of the others 0.

    records: may be gone through several times. weights: those of the run. summarise: records -> their results, with
    ``KEYS`` and ``group_size_law``. Each entry has weight; mean_reward, the mean over prompts of the mean over the
    continuations that have this reward; n_rewards, how many these are; ``KEYS`` with their intervals; group_size_law;
    reasons. In all but mean_reward a None counts as 0, which is what it adds to the total.
    """
    found = {}
    for position, (name, weight) in enumerate(zip(names, weights)):
        given: list[np.ndarray] = []
        summary = summarise(_alone(records, position, names, given))
        means = [mean for mean in map(mean_given, given) if mean is not None]
        keys = [f"{key}{end}" for key in KEYS for end in ("", "_ci95")]
        found[name] = {
            "weight": float(weight),
            "mean_reward": float(np.mean(means)) if means else None,
            "n_rewards": int(sum(np.isfinite(values).sum() for values in given)),
            **{key: summary[key] for key in keys},
            "V_source": summary["V_source"],
            "group_size_law": summary["group_size_law"],
            "reasons": {path: why for path, why in summary["reasons"].items() if path.split(".")[0] in keys},
        }
        if not means:
            found[name]["reasons"]["mean_reward"] = "this reward is None for every continuation"
    return found


def _alone(records: Iterable[GramRecord], position: int, names: Sequence[str], given: list[np.ndarray]) -> Iterator[GramRecord]:
    """The records of one reward alone; ``given`` gets its values (N,) of each."""
    for record in records:
        if record.component_names != names:
            raise ValueError(f"{record.prompt_id:016x}.npz has the rewards {record.component_names}, others have {names}")
        given.append(record.components[position])
        yield reweighted(record, np.eye(len(names))[position])
