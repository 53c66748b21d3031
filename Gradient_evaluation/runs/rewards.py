"""The rewards of a run: ground truths that a reward can use, and rewards that statistics can use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.dataset import Row
from Gradient_evaluation.utils import REWARDS

SMALLEST, LARGEST = 1e-30, 1e30  # sizes of a reward but 0: products of four, times scores, stay below a float's 1e308
OUT_OF_RANGE = "whose size is neither 0 nor from 1e-30 to 1e30"
RESCALE = "let the reward function return values of another scale"


def squares_fit(reward: float) -> bool:
    """Whether a finite reward is 0, or of a size whose squares neither overflow nor vanish."""
    return reward == 0 or SMALLEST <= abs(reward) <= LARGEST


def check_ground_truths(rows: Sequence[Row], reward_name: str) -> None:
    """Raise UserError, naming the row, for the first ground_truth that the reward cannot use."""
    for row in rows:
        try:
            REWARDS[reward_name].check(row.ground_truth)
        except UserError as error:
            raise UserError(f"{row.where}: {error}; correct it or choose another --reward") from None


def rewards_of(texts: Iterable[str], row: Row, reward_name: str) -> np.ndarray:
    """The rewards (N,) of continuations; UserError naming the row for one that statistics cannot use.

    That is one that is not a finite number, not 0 or 1 where the reward says so, or not of a size that ``squares_fit``.
    """
    reward, found = REWARDS[reward_name], []
    for number, text in enumerate(texts, start=1):
        value = reward.score(text, row.ground_truth)
        try:
            found.append(float(value))
        except (TypeError, ValueError, OverflowError):
            found.append(math.nan)
        about = f"{row.where}: the reward {reward_name!r} of continuation {number} is {repr(value)[:40]}"
        if not math.isfinite(found[-1]) or (reward.zero_one and found[-1] not in (0, 1)):
            wanted = "0 or 1" if reward.zero_one else "a finite number"
            raise UserError(f"{about}, not {wanted}; mend the reward function")
        if not squares_fit(found[-1]):
            raise UserError(f"{about}, {OUT_OF_RANGE}; {RESCALE}")
    return np.array(found)
