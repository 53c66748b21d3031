"""Other rewards for rollouts whose Grams are there: results without a model pass.

A Gram does not depend on the rewards, so every trace at every group size follows from the stored one. What a block summed up
under its rewards does not: the gradient sketches behind c1 and G*, and the moments by layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.gram_store import GramRecord
from Gradient_evaluation.runs.rollouts.stored import rewards_of_rollouts
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import TracecovSettings


def rewarded_again(record: GramRecord, rollouts: Rollouts, settings: TracecovSettings) -> GramRecord:
    """The record with the rewards that ``settings`` ask for, and without what belongs to the old ones.

    Raises UserError where the record is of other continuations.
    """
    lengths = np.array([each.length for each in rollouts.continuations])
    if not np.array_equal(lengths, record.lengths):
        raise UserError(
            f"{rollouts.where(0)}: the stored Grams of its prompt are of other continuations; pass --overwrite to measure "
            "these, or choose another --save_json"
        )
    return replace(
        record,
        rewards=rewards_of_rollouts(rollouts, settings),
        **dict.fromkeys(("sketch", "sketch_names", "sketch_layout", "modules", "module_moments", "greedy_reward")),
    )


def why_no_sketch(then: object, now: object) -> str:
    """The reason that results have beside c1 and G*."""
    return (
        f"the gradient sketches of these Grams were made under {_named(then)}, not under {_named(now)}; the same command with "
        "a new --save_json folder measures them"
    )


def _named(reward: object) -> str:
    return "the rewards in the files" if reward is None else f"--reward {reward}"
