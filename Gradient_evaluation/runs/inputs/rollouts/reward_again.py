"""Other rewards for rollouts whose Grams are there: results without a model pass.

A Gram does not depend on the rewards, so every trace at every group size follows from the stored one. What a block summed up
under its rewards does not: the gradient sketches behind c1 and G*, and the moments by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.rewards import RunRewards
from Gradient_evaluation.runs.inputs.rollouts.stored import rewards_of_rollouts
from Gradient_evaluation.runs.machine.gram_store import MORE_GRAMS, GramRecord
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats.blocks import MIN_BLOCK

# Fields of a record that a block summed up under its rewards, or that a table gives for them.
OF_ITS_REWARDS = (
    "oracle_value",
    "n_oracle",
    "sketch",
    "sketch_names",
    "sketch_layout",
    "modules",
    "module_moments",
    "module_oracle",
    "greedy_reward",
    "greedy_components",
    "oracle_components",
    "component_sketch",
    "metric_sketch",
)
HALF_PRECISION = 0.1  # by which log pi of a continuation may differ between sampler and scorer, per root of its tokens


def rewarded_again(record: GramRecord, several: Mapping[int, Rollouts], rewards: RunRewards | None) -> GramRecord:
    """The record with the rewards of this run, None for those of the files, and without what belongs to the old ones.

    several: rollouts by prompt id. Raises UserError where the prompt is not among them, or has other continuations.
    """
    rollouts = several.get(record.prompt_id)
    if rollouts is None:
        raise UserError(f"--rollouts: holds no prompt {record.prompt_id:016x}, whose Gram is stored; give all its rollouts")
    if not _same_continuations(record, rollouts):
        raise UserError(
            f"{rollouts.where(0)}: the stored Gram of its prompt is of other continuations; measure these in a new --save_json "
            "folder"
        )
    found = rewards_of_rollouts(rollouts, rewards)
    several_rewards = rewards is not None and rewards.are_several
    again = replace(
        record,
        rewards=found.total,
        components=found.components if several_rewards else None,
        component_names=rewards.names if several_rewards else None,
        component_weights=list(rewards.weights) if several_rewards else None,
        **dict.fromkeys(OF_ITS_REWARDS),
    )
    return _without_left_out(again, found.kept, rollouts.where(0))


def _without_left_out(record: GramRecord, kept: np.ndarray, where: str) -> GramRecord:
    """The record of the continuations that have a reward. kept: (N,) bool. A block that has fewer than 4 of these goes."""
    if kept.all():
        return record
    ends, kept = np.cumsum([len(gram) for gram in record.grams]), kept.copy()
    parts = [slice(end - len(gram), end) for gram, end in zip(record.grams, ends)]
    for part in parts:
        if kept[part].sum() < MIN_BLOCK:
            kept[part] = False
    if not kept.any():
        raise UserError(f"{where}: no block of its prompt has {MIN_BLOCK} continuations with a reward; leave the prompt out")
    components, log_weights = record.components, record.log_weights

    def of_kept(grams: list[np.ndarray] | None, times: int = 1) -> list[np.ndarray] | None:
        if grams is None:
            return None
        rows = [np.tile(kept[part], times) for part in parts]
        return [gram[np.ix_(row, row)] for gram, row in zip(grams, rows) if row.any()]

    return replace(
        record,
        rewards=record.rewards[kept],
        lengths=record.lengths[kept],
        log_probs=record.log_probs[kept],
        grams=of_kept(record.grams),
        **{name: of_kept(getattr(record, name), times) for name, times in MORE_GRAMS.items()},
        kl=None if record.kl is None else record.kl[kept],
        components=None if components is None else components[:, kept],
        log_weights=None if log_weights is None else log_weights[kept],
        n_left_out=int((~kept).sum()),
    )


def _same_continuations(record: GramRecord, rollouts: Rollouts) -> bool:
    """Whether they may be the same: as many, of the same lengths, with about the same log-probs where they have some."""
    lengths = np.array([each.length for each in rollouts.continuations])
    if not np.array_equal(lengths, record.lengths):
        return False
    if any(each.log_probs is None or each.mask is not None for each in rollouts.continuations):
        return True
    sums = np.array([each.log_probs.sum(dtype=np.float64) for each in rollouts.continuations])
    return bool(np.median(np.abs(sums - record.log_probs) / np.sqrt(lengths)) < HALF_PRECISION)


def why_no_sketch(then: object, settings: TracecovSettings) -> str:
    """The reason that results have beside c1 and G*. then: the reward under which the sketches were made."""
    command = f"run_tracecov.py --rollouts {' '.join(settings.rollouts)} --model {settings.model}"
    if settings.reward is not None:
        command += f" --reward {_text(settings.reward)}"
    now = "the rewards that the files have now" if settings.reward is None else f"--reward {_text(settings.reward)}"
    made = "other rewards" if then is None or settings.reward is None else f"--reward {_text(then)}"
    return (
        f"the gradient sketches of these Grams were made under {made}, not under {now}; {command} with a new --save_json "
        "folder measures them"
    )


def _text(reward: object) -> str:
    return reward if isinstance(reward, str) else " ".join(reward)
