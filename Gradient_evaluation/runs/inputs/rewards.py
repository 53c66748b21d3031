"""The rewards of a run: which ones and how they are weighted, and rewards that statistics can use.

rewards = resolve_rewards(["format.py:score", "integer"], weights=[0.2, 1])
check_ground_truths(rows, rewards)                   before sampling
found = rewards_of(texts, row, rewards)              found.total (N,), found.components (C, N)

As in TRL the total of a continuation is the sum of weight * reward over the rewards that are not None. A continuation whose
rewards are all None is left out: its total is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.integer_answer import shorten_repr
from Gradient_evaluation.rewards.own_reward import CALL_LIMIT, Reward, check_weights, resolve_reward
from Gradient_evaluation.runs.inputs.dataset import Row

if TYPE_CHECKING:
    from Gradient_evaluation.sampling.generate import Continuation

SMALLEST, LARGEST = 1e-30, 1e30  # sizes of a reward but 0: products of four, times scores, stay below a float's 1e308
OUT_OF_RANGE = "whose size is neither 0 nor from 1e-30 to 1e30"
RESCALE = "let the reward function return values of another scale"


def squares_fit(reward: float) -> bool:
    """Whether a finite reward is 0, or of a size whose squares neither overflow nor vanish."""
    return reward == 0 or SMALLEST <= abs(reward) <= LARGEST


@dataclass(frozen=True)
class RunRewards:
    """The rewards of a run and the weight of each."""

    rewards: tuple[Reward, ...]
    weights: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self.rewards]

    @property
    def are_several(self) -> bool:
        return len(self.rewards) > 1

    @property
    def zero_one(self) -> bool:
        """Whether every total is 0 or 1, so that the share of right answers is V(x)."""
        return self.weights == (1.0,) and self.rewards[0].zero_one

    def by_name(self, found: Rewards) -> dict[str, np.ndarray] | None:
        """{name: (N,)} of the components where there are several, else None."""
        return dict(zip(self.names, found.components)) if self.are_several else None

    @property
    def identity(self) -> dict[str, Any]:
        """The entries of a run's identity: a name and a digest for one reward, lists for several."""
        digests = [reward.digest for reward in self.rewards]
        if not self.are_several:
            weights = None if self.weights == (1.0,) else list(self.weights)
            return {"reward": self.names[0], "reward_weights": weights, "reward_digest": digests[0]}
        return {"reward": self.names, "reward_weights": list(self.weights), "reward_digest": digests if any(digests) else None}


class Rewards(NamedTuple):
    """The rewards of N continuations of one prompt, float64."""

    total: np.ndarray  # (N,) NaN where a continuation is left out
    components: np.ndarray  # (C, N) of each reward, NaN where it is None

    @property
    def kept(self) -> np.ndarray:
        """(N,) bool: which continuations are not left out."""
        return ~np.isnan(self.total)


def resolve_rewards(
    names: str | Sequence[str], weights: Sequence[float] | None = None, timeout: float = CALL_LIMIT
) -> RunRewards:
    """The rewards of --reward with --reward_weights (1 each without them) and --reward_timeout.

    Raises UserError as own_reward.resolve_reward, for weights that do not fit, and for two rewards of one name.
    """
    names = [names] if isinstance(names, str) else list(names)
    checked = check_weights(weights, names)
    rewards = tuple(resolve_reward(name, timeout) for name in names)
    for position, reward in enumerate(rewards):
        if reward.name in [each.name for each in rewards[:position]]:
            raise UserError(f"--reward: two rewards have the name {reward.name}; rename one of the two")
    return RunRewards(rewards, checked)


def check_ground_truths(rows: Sequence[Row], rewards: RunRewards) -> None:
    """Raise UserError, naming the row, for the first ground_truth or row that a reward cannot use."""
    for row in rows:
        for reward in rewards.rewards:
            reward.check_row(row)


def rewards_of(
    texts: Iterable[str], row: Row, rewards: RunRewards, token_ids: Sequence[Sequence[int]] | None = None
) -> Rewards:
    """The rewards of the continuations of one prompt.

    token_ids: their tokens, for functions that take completion_ids. Raises UserError naming the row for a reward that
    statistics cannot use: not a finite number (None is taken of own functions), not 0 or 1 where the reward says so, or
    not of a size that ``squares_fit``.
    """
    texts = list(texts)
    components = np.array([_component(texts, row, reward, token_ids) for reward in rewards.rewards])
    total = weighted_sum(components, rewards.weights)
    for number, value in enumerate(total, start=1):
        if not (math.isnan(value) or squares_fit(value)):
            raise UserError(
                f"{row.where}: the weighted sum of the rewards of continuation {number} is {value:g}, {OUT_OF_RANGE}; "
                "choose other --reward_weights"
            )
    return Rewards(total, components)


def judged(continuations: Sequence[Continuation], row: Row, rewards: RunRewards) -> Rewards:
    """What the rewards of the run say of continuations."""
    return rewards_of([each.text for each in continuations], row, rewards, [each.tokens for each in continuations])


def _component(texts: list[str], row: Row, reward: Reward, token_ids) -> np.ndarray:
    """The values (N,) of one reward, checked; NaN for None."""
    found = []
    for number, value in enumerate(reward.of_prompt(texts, row, token_ids), start=1):
        if value is None and reward.digest is not None:
            found.append(math.nan)
            continue
        try:
            found.append(float(value))
        except (TypeError, ValueError, OverflowError):
            found.append(math.nan)
        of_which = f"continuation {number}, {shorten_repr(texts[number - 1])},"
        about = f"{row.where}: the reward {reward.name!r} of {of_which} is {repr(value)[:40]}"
        if not math.isfinite(found[-1]) or (reward.zero_one and found[-1] not in (0, 1)):
            wanted = "0 or 1" if reward.zero_one else "a finite number"
            raise UserError(f"{about}, not {wanted}; mend the reward function")
        if not squares_fit(found[-1]):
            raise UserError(f"{about}, {OUT_OF_RANGE}; {RESCALE}")
    return np.array(found, dtype=np.float64)


def weighted_sum(components: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """(N,): sum_c weights_c components_cn over those that are not NaN; NaN where all of them are.

    >>> weighted_sum(np.array([[1.0, np.nan, np.nan], [2.0, 3.0, np.nan]]), [1, 0.5])
    array([2. , 1.5, nan])
    """
    absent = np.isnan(components)
    total = (np.asarray(weights, dtype=np.float64)[:, None] * np.where(absent, 0.0, components)).sum(0)
    return np.where(absent.all(0), np.nan, total)
